"""Three counts of the same saves: when they agree, and what is said when they do not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from board.agreement import agreement
from board.execute import _instruments


def observer(user: int, kernel: int = 0) -> dict[str, Any]:
    return {"totals": {"user_saves": user, "kernel_saves": kernel}}


def profiler(user: int, missed: int = 0, elsewhere: int = 5) -> dict[str, Any]:
    return {
        "sites": [
            _site("save", "context-switch", "user")
            | {"target": {"count": user}, "begin_missed": missed},
            _site("save", "context-switch", "kernel") | {"target": {"count": 0}, "begin_missed": 0},
            # What is missed elsewhere explains nothing here.
            _site("save", "signal", "user") | {"target": {"count": elsewhere}, "begin_missed": 9},
            _site("restore", "exit-to-user", "user") | {"target": {"count": elsewhere}},
        ],
    }


def truth(*user: int) -> dict[str, Any]:
    harts = [{"target_count": count} for count in user]
    return {
        "sites": [
            _site("save", "context-switch", "user") | {"harts": harts},
            _site("save", "kernel-vector", "user") | {"harts": [{"target_count": 9}]},
        ]
    }


def _site(kind: str, role: str, state: str) -> dict[str, Any]:
    return {"kind": kind, "role": role, "state": state}


def test_what_agrees() -> None:
    found = agreement(observer(12), profiler(12), truth(7, 5))
    assert found == {
        "user_saves": {"observer": 12, "profiler": 12, "truth": 12},
        "kernel_saves": {"observer": 0, "profiler": 0, "truth": 0},
        "saves": {"observer": 12, "profiler": 12, "truth": 12},
        "profiler_missed": 0,
        "agrees": True,
        "differences": [],
    }


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((observer(11), profiler(12), truth(12)), ["user saves: observer 11, truth 12"]),
        ((observer(12, 1), None, truth(12)), ["kernel saves: observer 1, truth 0"]),
        # Missed probes explain what is missing, never a surplus.
        ((observer(12), profiler(10, missed=2), truth(12)), []),
        (
            (observer(12), profiler(10, missed=1), truth(12)),
            ["user saves: profiler 10, missed 1, truth 12"],
        ),
        (
            (observer(12), profiler(13, missed=4), truth(12)),
            ["user saves: profiler 13, missed 4, truth 12"],
        ),
        # On a real board there is no truth: the observer takes its place.
        ((observer(12), profiler(11), None), ["user saves: profiler 11, missed 0, observer 12"]),
    ],
)
def test_what_does_not(parts: tuple[Mapping[str, Any] | None, ...], says: list[str]) -> None:
    found = agreement(*parts)
    assert found is not None
    assert (found["differences"], found["agrees"]) == (says, not says)


def _untold(document: dict[str, Any], count: int) -> dict[str, Any]:
    """The document of a kernel that saves both states by one routine."""
    one = _site("save", "context-switch", "unknown")
    number: dict[str, Any] = {"target": {"count": count}, "harts": [{"target_count": count}]}
    number["begin_missed"] = 0
    elsewhere = [site for site in document["sites"] if site["role"] != "context-switch"]
    return document | {"sites": [one | number, *elsewhere]}


def test_sites_that_serve_both_states_are_compared_by_their_sum() -> None:
    nothing = {"observer": None, "profiler": None, "truth": None}
    found = agreement(observer(12, 3), _untold(profiler(0), 15), _untold(truth(), 15))
    assert found is not None and found["agrees"]
    assert found["user_saves"] == nothing | {"observer": 12}
    assert found["kernel_saves"] == nothing | {"observer": 3}
    assert found["saves"] == {"observer": 15, "profiler": 15, "truth": 15}
    found = agreement(observer(12, 3), _untold(profiler(0), 14), _untold(truth(), 16))
    assert found is not None
    assert found["differences"] == [
        "saves: observer 15, truth 16",
        "saves: profiler 14, missed 0, truth 16",
    ]


def test_one_instrument_agrees_with_nobody() -> None:
    assert agreement(observer(1), None, None) is None
    assert agreement(None, None, None) is None


@pytest.mark.parametrize(
    ("left", "before", "after"),
    [
        (None, [], ["truth-missing"]),
        ("{", [], ["damaged-results"]),
        # What stopped the run is the reason; that it left nothing is not another one.
        (None, ["guest-panic"], ["guest-panic"]),
    ],
)
def test_what_an_instrument_left_behind(
    tmp_path: Path, left: str | None, before: list[str], after: list[str]
) -> None:
    if left is not None:
        (tmp_path / "truth.json").write_text(left)
    reasons, details = list(before), list[str]()
    counted = _instruments(["truth"], tmp_path, reasons, details)
    assert counted == {"observer": None, "profiler": None, "truth": None}
    assert reasons == after
    assert bool(details) == (before != after)

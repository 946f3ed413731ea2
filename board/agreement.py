"""Do the instruments agree on what they all counted: the target's context-switch saves?

Promise: observer and truth must give the same number, and the profiler's number and truth's may
differ by no more than the probes say they missed; what does not fit is a line of its own.
Limit: only the target's saves at context switches are compared.  Saves elsewhere (signals, kernel
vector code) are in truth and profiler by their sites, and restores in each its own way.
"""

from collections.abc import Mapping
from typing import Any

ROLE = "context-switch"
STATES = ("user", "kernel")


def agreement(
    observer: Mapping[str, Any] | None,
    profiler: Mapping[str, Any] | None,
    truth: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the record's `agreement`, or None where less than two instruments counted."""
    if sum(part is not None for part in (observer, profiler, truth)) < 2:
        return None
    missed: int | None = profiler["missed_saves"] if profiler else None
    document: dict[str, Any] = {"profiler_missed": missed}
    differences = []
    for state in STATES:
        counted = {
            "observer": observer["totals"][f"{state}_saves"] if observer else None,
            "profiler": _profiled(profiler, state) if profiler else None,
            "truth": _true(truth, state) if truth else None,
        }
        document[f"{state}_saves"] = counted
        differences += [f"{state} saves: {line}" for line in _differences(counted, missed or 0)]
    document["agrees"] = not differences
    document["differences"] = differences
    return document


def _differences(counted: Mapping[str, int | None], missed: int) -> list[str]:
    observer, profiler, truth = counted["observer"], counted["profiler"], counted["truth"]
    exact = truth if truth is not None else observer
    lines = []
    if observer is not None and truth is not None and observer != truth:
        lines.append(f"observer {observer}, truth {truth}")
    if profiler is not None and exact is not None and not profiler <= exact <= profiler + missed:
        name = "truth" if truth is not None else "observer"
        lines.append(f"profiler {profiler}, missed {missed}, {name} {exact}")
    return lines


def _profiled(profiler: Mapping[str, Any], state: str) -> int:
    return sum(site["target"]["count"] for site in _saves(profiler, state))


def _true(truth: Mapping[str, Any], state: str) -> int:
    return sum(hart["target_count"] for site in _saves(truth, state) for hart in site["harts"])


def _saves(document: Mapping[str, Any], state: str) -> list[Mapping[str, Any]]:
    return [
        site
        for site in document["sites"]
        if (site["kind"], site["role"], site["state"]) == ("save", ROLE, state)
    ]

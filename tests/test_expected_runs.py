"""What everybody is to get: equal, different, unknown, accepted.  On a scripted board."""

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from fake_board import FakeBoard, definitions, good

from analysis import expected_runs
from board.cell import Definitions, Overrides
from board.runner import reproduce, run_one
from toolchain.errors import Differs, InvalidData


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runs.json"
    path.write_text('{"schema_version": "1", "cells": {}}')
    monkeypatch.setattr(expected_runs, "EXPECTED", path)
    return path


@pytest.fixture
def known(tmp_path: Path) -> Definitions:
    return definitions(tmp_path)


def run(known: Definitions, results: Path, *, accept: bool = False) -> int:
    return reproduce([], FakeBoard(), results, 2, False, accept=accept, definitions=known)


def cells(path: Path) -> dict[str, Mapping[str, Any]]:
    content: dict[str, Mapping[str, Any]] = json.loads(path.read_text())["cells"]
    return content


def test_of_other_inputs_nothing_is_expected(
    expected: Path, known: Definitions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(known, tmp_path / "results") == 0
    said = capsys.readouterr().out
    assert "runs.json: 3 not in it (other inputs): nothing to compare with" in said


def test_a_second_reproduction_is_equal_bit_for_bit(
    expected: Path, known: Definitions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(known, tmp_path / "one", accept=True) == 0
    assert capsys.readouterr().out.count("expected from now on: ") == len(cells(expected)) == 3
    assert run(known, tmp_path / "two") == 0
    said = capsys.readouterr().out
    assert "cells of artifact/expected/runs.json: 3 of 3 equal, bit for bit\n" in said


def test_a_line_tells_which_of_similar_cells_it_is(expected: Path) -> None:
    (one,) = synthetic.matrix([1], policies=["vhot"], concurrencies=[2])
    rows: list[dict[str, Any]] = [
        {},
        {"scope": "all"},
        {"variant": "any-dirty"},
        {"bystanders": 1},
        {"seed": 2},
    ]
    runs = [
        replace(one, row={**one.row, **row}, cell_hash=f"{number:012x}")
        for number, row in enumerate(rows)
    ]
    lines = expected_runs.remember(runs)
    assert len({line.partition(": ")[0] for line in lines}) == len(rows)
    assert lines[2].startswith("E2 banana-tiny vhot any-dirty partial c=2 seed=1 VLEN=256: ")


def test_what_is_accepted_replaces_only_what_it_supersedes(expected: Path) -> None:
    (one,) = synthetic.matrix([1], policies=["vhot"], concurrencies=[2])
    other_seed = replace(one, row={**one.row, "seed": 2}, cell_hash="0" * 12)
    elsewhere = replace(one, experiments=("range",), cell_hash="1" * 12)
    expected_runs.remember([one, other_seed, elsewhere])
    edited = replace(one, cell_hash="2" * 12)  # another scheduler, the same words
    expected_runs.remember([edited])
    assert set(cells(expected)) == {"0" * 12, "1" * 12, "2" * 12}


def test_a_cell_of_two_experiments_belongs_to_both_in_whichever_order(expected: Path) -> None:
    (one,) = synthetic.matrix([1], policies=["vhot"], concurrencies=[2])
    expected_runs.remember([replace(one, experiments=("E2",))])
    expected_runs.remember([replace(one, experiments=("E6",))])
    (cell,) = cells(expected).values()
    assert cell["what"].startswith("E2;E6 banana-tiny vhot")
    edited = replace(one, experiments=("E6",), cell_hash="2" * 12)
    expected_runs.remember([edited])
    assert set(cells(expected)) == {"2" * 12}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"figures": {"output_tps": 1.5}}, "DIFFERS: output_tps "),
        ({"record_sha256": "0" * 64}, "DIFFERS: in its record, not in the figures of the table"),
    ],
)
def test_a_run_that_differs_is_named_and_is_exit_code_1(
    expected: Path,
    known: Definitions,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    words: str,
) -> None:
    assert run(known, tmp_path / "one", accept=True) == 0
    content = json.loads(expected.read_text())
    cell = next(iter(content["cells"].values()))
    cell["record_sha256"] = "0" * 64
    cell["figures"] |= change.get("figures", {})
    expected.write_text(json.dumps(content))
    capsys.readouterr()
    assert run(known, tmp_path / "two") == 1
    said = capsys.readouterr().out
    assert f"{cell['what']}: {words}" in said
    assert "2 of 3 equal" in said
    before = expected.read_bytes()
    assert run(known, tmp_path / "two") == 1
    assert expected.read_bytes() == before


def test_a_run_by_itself_is_held_against_the_file_too(
    expected: Path, known: Definitions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[run_defaults] is a cell of the experiment of these definitions."""
    assert run(known, tmp_path / "one", accept=True) == 0
    run_one(FakeBoard(), Overrides(), tmp_path / "two", definitions=known)
    assert "runs.json: 1 of 1 equal, bit for bit" in capsys.readouterr().err
    content = json.loads(expected.read_text())
    for cell in content["cells"].values():
        cell["record_sha256"] = "0" * 64
    expected.write_text(json.dumps(content))
    with pytest.raises(Differs, match=r"0 of 1 equal.*DIFFERS: in its record") as caught:
        run_one(FakeBoard(), Overrides(), tmp_path / "three", definitions=known)
    assert caught.value.exit_code == 1
    said = capsys.readouterr().out  # kept, and its folder is printed all the same
    assert str(tmp_path / "three" / "runs") in said
    run_one(FakeBoard(), Overrides(seed="9"), tmp_path / "four", definitions=known)
    assert "runs.json" not in capsys.readouterr().err


def test_a_cell_that_is_invalid_for_everybody_is_no_failure(
    expected: Path, known: Definitions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def frozen_late(
        cell: Mapping[str, Any], directory: Path, cancel: threading.Event
    ) -> dict[str, Any]:
        facts = good(cell, directory, cancel)
        if cell["seed"] == 2:
            path = directory / "agent.json"
            agent = json.loads(path.read_text()) | {"invalid_reasons": ["freezer-failed"]}
            path.write_text(json.dumps(agent))
        return facts

    def again(results: str, *, accept: bool = False) -> int:
        place = tmp_path / results
        board = FakeBoard(frozen_late)
        return reproduce([], board, place, 2, False, accept=accept, definitions=known)

    assert again("one") == 4  # nobody expects it yet
    assert again("one", accept=True) == 4
    said = capsys.readouterr().out
    assert " INVALID: freezer-failed\n" in said and said.count("expected from now on: ") == 3
    assert again("two") == 0
    seen = capsys.readouterr()
    assert "runs.json: 3 of 3 equal, bit for bit" in seen.out
    assert "seed=2: invalid, as for everybody: freezer-failed" in seen.err
    assert again("two") == 0  # and it is not run again
    assert "its run is invalid for everybody" in capsys.readouterr().err
    content = json.loads(expected.read_text())
    (bad,) = (cell for cell in content["cells"].values() if "invalid_reasons" in cell)
    bad["record_sha256"] = "0" * 64  # of another invalid run
    expected.write_text(json.dumps(content))
    assert again("three") == 4


def test_a_damaged_file_is_named(expected: Path, known: Definitions, tmp_path: Path) -> None:
    expected.write_text('{"schema_version": "1", "cells": {"0123456789ab": {}}}')
    with pytest.raises(InvalidData, match=r"runs\.json"):
        run(known, tmp_path / "results")

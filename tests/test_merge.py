"""Shards on several machines and their folders put together.  On a scripted board."""

import json
from pathlib import Path

import pytest
from fake_board import FakeBoard, definitions

from board.cell import Definitions
from board.merge import merge, shard_of
from board.runner import reproduce
from schemas.record import read_records
from toolchain.errors import Differs, InvalidData, UsageError


@pytest.fixture
def known(tmp_path: Path) -> Definitions:
    return definitions(tmp_path)


def run(known: Definitions, results: Path, shard: tuple[int, int] = (1, 1)) -> None:
    assert reproduce([], FakeBoard(), results, 2, False, shard=shard, definitions=known) == 0


def runs(results: Path) -> set[str]:
    return {path.name for path in (results / "runs").iterdir()}


def test_shards_are_all_the_cells_and_none_twice(known: Definitions, tmp_path: Path) -> None:
    whole, one, two = (tmp_path / name for name in ("whole", "one", "two"))
    run(known, whole)
    run(known, one, (1, 2))
    run(known, two, (2, 2))
    assert runs(one) | runs(two) == runs(whole)
    assert not runs(one) & runs(two)
    assert runs(one) and runs(two)


def test_merged_they_are_a_reproduction_with_nothing_to_run(
    known: Definitions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, all_ = (tmp_path / name for name in ("one", "two", "all"))
    run(known, one, (1, 2))
    run(known, two, (2, 2))
    merge([one, two], all_)
    merge([one, two], all_)
    assert "0 runs copied" in capsys.readouterr().err
    board = FakeBoard()
    assert reproduce([], board, all_, 2, False, definitions=known) == 0
    assert "nothing to run" in capsys.readouterr().err
    record = next((all_ / "runs").glob("*/record.json"))
    assert record.read_bytes() in {
        path.read_bytes() for path in tmp_path.glob("*/runs/*/record.json")
    }


def test_two_machines_that_disagree_are_found(known: Definitions, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(known, one)
    run(known, two)
    changed = next((two / "runs").glob("*/record.json"))
    record = json.loads(changed.read_text())
    record["loadgen"]["summary"]["output_tps"] += 1e-6
    changed.write_text(json.dumps(record))
    merge([one], tmp_path / "all")
    before = runs(tmp_path / "all")
    with pytest.raises(Differs, match="the same deterministic cell with other results"):
        merge([two], tmp_path / "all")
    assert runs(tmp_path / "all") == before


@pytest.mark.parametrize("damaged", ["record.json", "index.json"])
def test_a_damaged_folder_stops_the_merge_before_it_begins(
    known: Definitions, tmp_path: Path, damaged: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(known, one, (1, 2))
    run(known, two, (2, 2))
    next(two.rglob(damaged)).write_text("{}")
    with pytest.raises(InvalidData) as caught:
        merge([one, two], tmp_path / "all")
    assert f"two/{'' if damaged == 'index.json' else 'runs/'}" in str(caught.value)
    assert "; nothing was merged: fetch " in str(caught.value)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "all").exists()
    run(known, tmp_path / "all", (1, 2))
    before = runs(tmp_path / "all")
    with pytest.raises(InvalidData, match="nothing was merged"):
        merge([two, one], tmp_path / "all")
    assert runs(tmp_path / "all") == before


def test_a_damaged_folder_to_merge_into(known: Definitions, tmp_path: Path) -> None:
    run(known, tmp_path / "one")
    run(known, tmp_path / "all")
    next((tmp_path / "all").rglob("record.json")).write_text("{}")
    with pytest.raises(InvalidData, match="nothing was merged: name a new folder with --results"):
        merge([tmp_path / "one"], tmp_path / "all")


def test_folders_that_disagree_with_each_other_are_not_merged(
    known: Definitions, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(known, one)
    run(known, two)
    changed = sorted((two / "runs").glob("*/record.json"))[-1]
    record = json.loads(changed.read_text())
    record["loadgen"]["summary"]["output_tps"] += 1e-6
    changed.write_text(json.dumps(record))
    there = one / "runs" / changed.parent.name
    with pytest.raises(Differs, match=f"other results than {there}; nothing was merged: compare"):
        merge([one, two], tmp_path / "all")
    record["valid"], record["invalid_reasons"] = False, ["server-died"]
    changed.write_text(json.dumps(record))
    with pytest.raises(InvalidData, match=f"another run than {there}, which has the same name; "):
        merge([one, two], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_what_cannot_be_merged(known: Definitions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got no folder"):
        merge([], tmp_path)
    with pytest.raises(UsageError, match="not a results folder"):
        merge([tmp_path / "none"], tmp_path / "all")
    run(known, tmp_path / "one")
    with pytest.raises(UsageError, match="is the folder to merge into"):
        merge([tmp_path / "one"], tmp_path / "one")


def test_a_part_of_an_experiment(known: Definitions, tmp_path: Path) -> None:
    def seeds(folder: str, **only: list[str]) -> list[int]:
        results = tmp_path / folder
        code = reproduce([], FakeBoard(), results, 2, False, only=only, definitions=known)
        assert code == 0
        return sorted(record["cell"]["seed"] for record in read_records(results))

    everything = seeds("all")
    assert seeds("one", seed=["1"]) == [seed for seed in everything if seed == 1] != everything
    assert seeds("scope", policy=["baseline"], scope=[]) == everything
    with pytest.raises(UsageError, match=r"--seed 77: no cell asked for has it; there are: 1, 2"):
        seeds("none", seed=["1", "77"])


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/2", "1/2/3", "-1/2"])
def test_a_shard_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="expected K/N"):
        shard_of(text)

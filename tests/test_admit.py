"""Runs side by side: each thing that does not fit is refused by its name, and only that is skipped.

Each test damages one good folder of made-up records (tests/synthetic.py) in one way.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic

import schemas
from analysis.admit import DECIDES_A_RUN, _platforms, admit
from schemas.record import RECORD, run_id
from toolchain.command import run
from toolchain.errors import InvalidData, UsageError
from toolchain.paths import REPO

CELLS = [
    synthetic.cell(policy, concurrency, seed)
    for policy in ("baseline", "vhot")
    for concurrency in (2, 8)
    for seed in (1, 2, 3)
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    synthetic.write(folder, [synthetic.record(cell) for cell in CELLS])
    return folder


def directory(results: Path, number: int) -> Path:
    return results / "runs" / run_id(CELLS[number], 1)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a record and the files beside it in the same way, and keep its name."""
    record = json.loads((path / RECORD).read_text())
    change(record)
    (path / RECORD).write_text(json.dumps(record))
    agent = json.loads((path / "agent.json").read_text())
    agent |= {"platform": record["platform"], "scheduler": record["scheduler"]["kernel"]}
    (path / "agent.json").write_text(json.dumps(agent))
    (path / "loadgen.json").write_text(json.dumps(record["loadgen"]))


def rename(results: Path, number: int, change: Callable[[Any], None], attempt: int = 1) -> str:
    """Change a cell consistently: hash, folder, index."""
    old = directory(results, number)
    edit(old, change)
    record = json.loads((old / RECORD).read_text())
    record["run_id"] = run_id(record["cell"], attempt)
    (old / RECORD).write_text(json.dumps(record))
    old.rename(old.with_name(record["run_id"]))
    index = json.loads((results / "index.json").read_text())
    hashes = index["experiments"]["E2"]["virtual"]
    hashes.append(record["run_id"].split("-")[0])
    (results / "index.json").write_text(json.dumps(index))
    return str(record["run_id"])


def test_good_folder(results: Path) -> None:
    admitted = admit([results])
    assert len(admitted.runs) == len(CELLS)
    assert admitted.refused == ()
    assert all(run.experiments == ("E2",) for run in admitted.runs)


def swap(results: Path) -> int:
    one, other = directory(results, 0), directory(results, 1)
    for name in ("loadgen.json",):
        first, second = (one / name).read_bytes(), (other / name).read_bytes()
        (one / name).write_bytes(second)
        (other / name).write_bytes(first)
    return 2


def swap_records(results: Path) -> int:
    one, other = directory(results, 0) / RECORD, directory(results, 1) / RECORD
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return 2


def foreign_load(results: Path) -> int:
    def change(record: Any) -> None:
        record["loadgen"]["config"]["seed"] = 99

    edit(directory(results, 0), change)
    return 1


def copied(results: Path) -> int:
    source = directory(results, 0)
    record = json.loads((source / RECORD).read_text())
    record["run_id"] = run_id(record["cell"], 2)
    record["environment"]["attempt"] = 2
    copy_ = source.with_name(record["run_id"])
    copy_.mkdir()
    (copy_ / RECORD).write_text(json.dumps(record))
    return 2  # which of the two is the copy cannot be told


def copied_seed(results: Path) -> int:
    source = json.loads((directory(results, 0) / RECORD).read_text())

    def change(record: Any) -> None:
        for mine, theirs in zip(
            record["loadgen"]["requests"], source["loadgen"]["requests"], strict=True
        ):
            mine["t_send_ms"] = theirs["t_send_ms"]

    edit(directory(results, 1), change)
    return 2


def other_kernel(results: Path) -> int:
    def change(record: Any) -> None:
        record["platform"]["kernel_release"] = "6.18.0"

    edit(directory(results, 3), change)
    return 1


def other_load(results: Path) -> int:
    def change(record: Any) -> None:
        record["cell"]["load"]["max_tokens"] = 99
        record["loadgen"]["config"]["max_tokens"] = 99

    rename(results, 0, change)
    return 1


def other_flags(results: Path) -> int:
    rename(results, 0, lambda record: record["cell"]["server"]["flags"].append("--poll"))
    return 1


def other_calibration(results: Path) -> int:
    def change(record: Any) -> None:
        record["calibration"]["burn"]["8"] = [1.5e7]

    edit(directory(results, 5), change)
    return 1


def truncated(results: Path) -> int:
    path = directory(results, 2) / RECORD
    path.write_text(path.read_text()[:500])
    return 1


def not_a_number(results: Path) -> int:
    path = directory(results, 2) / RECORD
    path.write_text(path.read_text().replace('"host_cpu_s": 100.0', '"host_cpu_s": NaN'))
    return 1


def doubled_key(results: Path) -> int:
    path = directory(results, 2) / RECORD
    path.write_text(path.read_text().replace('{\n "agreement"', '{"agreement": null, "agreement"'))
    return 1


def misspelt_key(results: Path) -> int:
    path = directory(results, 2) / RECORD
    path.write_text(path.read_text().replace('"truth"', '"truht"'))
    return 1


def wrong_unit(results: Path) -> int:
    path = directory(results, 2) / RECORD
    path.write_text(path.read_text().replace('"mean_ttft_ms"', '"mean_ttft_s"'))
    return 1


def other_version(results: Path) -> int:
    path = directory(results, 2) / RECORD
    record = json.loads(path.read_text())
    record["schema_version"] = "2"
    path.write_text(json.dumps(record))
    return 1


FAULTS: list[tuple[Callable[[Path], int], str, str]] = [
    (swap, "swapped-files", "loadgen.json is not what record.json holds"),
    (swap_records, "damaged-record", "but its folder is called"),
    (foreign_load, "swapped-files", "the load has seed 99, the cell 1"),
    (copied, "copied-run", "began and ended at the same moment"),
    (copied_seed, "copied-run", "other seeds but the same times"),
    (other_kernel, "mixed-platforms", '$.kernel_release "6.18.0", but'),
    (other_load, "changed-definition", "$.load.max_tokens 99, but"),
    (other_flags, "changed-definition", "$.server.flags"),
    (other_calibration, "changed-calibration", "$.burn.8[0] 15000000.0, but"),
    (truncated, "damaged-record", "not the JSON of a record file"),
    (not_a_number, "damaged-record", "found NaN, expected a finite number"),
    (doubled_key, "damaged-record", 'the key "agreement" stands twice'),
    (misspelt_key, "damaged-record", 'unknown key "truht" (did you mean "truth"?)'),
    (wrong_unit, "damaged-record", 'unknown key "mean_ttft_s"'),
    (other_version, "damaged-record", 'schema_version is "2"'),
]


@pytest.mark.parametrize(
    ("damage", "name", "says"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_fault_is_named_and_the_rest_is_analysed(
    results: Path, damage: Callable[[Path], int], name: str, says: str
) -> None:
    before = len(admit([results]).runs)
    lost = damage(results)
    there = len(list((results / "runs").iterdir()))
    with pytest.raises(InvalidData) as caught:
        admit([results])
    assert caught.value.exit_code == 4
    assert str(caught.value).startswith(f"{name}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    admitted = admit([results], skip_invalid=True)
    named = [refusal for refusal in admitted.refused if refusal.name == name]
    assert sum(len(refusal.runs) for refusal in named) == lost
    assert len(admitted.runs) == there - lost >= before - 2
    assert len(list((results / "runs").iterdir())) == there  # nothing is removed


@pytest.mark.parametrize(("real", "named"), [(False, []), (True, ["mixed-platforms"])])
def test_memory_tells_real_boards_apart_but_not_the_virtual_one(
    real: bool, named: list[str]
) -> None:
    """On the virtual board Linux finds a page more or less, by the size of the model."""
    runs = copy.deepcopy(synthetic.matrix([1, 2, 3], concurrencies=[2]))
    if real:
        for one in runs:
            one.record["cell"]["machine"] = None
    runs[0].record["platform"]["memory_kib"] -= 4
    assert [refusal.name for refusal in _platforms(runs)] == named


def test_missing_seed(results: Path) -> None:
    for path in directory(results, 4).iterdir():
        path.unlink()
    directory(results, 4).rmdir()
    with pytest.raises(InvalidData, match=r"baseline c=8 has no run of seed 2, other cells have"):
        admit([results])
    admitted = admit([results], skip_invalid=True)
    assert [refusal.name for refusal in admitted.refused] == ["missing-seed"]
    assert len(admitted.runs) == len(CELLS) - 1


def test_cells_that_lack_the_same_seeds_share_a_line(results: Path) -> None:
    """As after an interrupted experiment: a line for each of them would bury the rest."""
    for number in (1, 4):
        shutil.rmtree(directory(results, number))
    admitted = admit([results], skip_invalid=True)
    assert [refusal.name for refusal in admitted.refused] == ["missing-seed"]
    (line,) = (refusal.line for refusal in admitted.refused)
    assert ": 2 of 4 cells (baseline c=2, baseline c=8) have no run of seed 2, other" in line


def test_an_invalid_run_is_no_missing_seed(tmp_path: Path) -> None:
    records = [synthetic.record(cell) for cell in CELLS[:-1]]
    records.append(synthetic.record(CELLS[-1], reasons=["guest-panic"]))
    synthetic.write(tmp_path / "results", records)
    admitted = admit([tmp_path / "results"])
    assert sum(not run.row["valid"] for run in admitted.runs) == 1


def test_run_in_two_folders(results: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthetic.write(other, [synthetic.record(CELLS[0])])
    with pytest.raises(InvalidData, match=r"duplicate-run: run .* is in .*other"):
        admit([results, other])
    assert len(admit([results, other], skip_invalid=True).runs) == len(CELLS)


def test_folders_that_are_none(results: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        admit([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="are one folder"):
        admit([results, results / ".." / "results"])
    (results / "index.json").write_text("{")
    for skip in (False, True):
        with pytest.raises(InvalidData, match=r"index\.json: not the JSON of a results file"):
            admit([results], skip_invalid=skip)
    (results / "index.json").unlink()
    for skip in (False, True):
        with pytest.raises(UsageError, match=r"not a results folder \(no index.json in it\); exp"):
            admit([results], skip_invalid=skip)


def commit(*, changes_runs: bool) -> str | None:
    """A commit of this checkout's history after which runs did, or did not, change; or None."""
    words = ["git", "-C", str(REPO), "log", "--format=%H"]
    done = run(words, what="asking for commits", check=False)
    for one in done.stdout.split()[1:]:
        diff = ["git", "-C", str(REPO), "diff", "--name-only", one, "HEAD", "--", *DECIDES_A_RUN]
        if bool(run(diff, what="asking for changes").stdout.strip()) is changes_runs:
            return one
    return None


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
@pytest.mark.parametrize("known", [True, False])
def test_results_of_another_commit(results: Path, known: bool) -> None:
    other = commit(changes_runs=True) if known else "0" * 40
    if other is None or not (REPO / ".git").exists():
        pytest.skip("no Git history to compare with")

    def change(record: Any) -> None:
        record["environment"]["git_commit"] = other

    for number in range(len(CELLS)):
        edit(directory(results, number), change)
    with pytest.raises(InvalidData) as caught:
        admit([results])
    why = "has changed" if known else "not in the history of this checkout"
    assert f"another-commit: runs {min(run_id(c, 1) for c in CELLS)}" in str(caught.value)
    assert other[:12] in str(caught.value)
    assert why in str(caught.value)
    assert admit([results], skip_invalid=True).runs == ()
    admitted = admit([results], any_commit=True)
    assert len(admitted.runs) == len(CELLS)
    assert "of another commit" in admitted.notes[0]


def test_repeats_of_a_cell_say_whether_the_board_is_deterministic(tmp_path: Path) -> None:
    first, second = (synthetic.record(CELLS[0], attempt) for attempt in (1, 2))
    synthetic.write(tmp_path / "same", [first, second])
    [note] = [n for n in admit([tmp_path / "same"]).notes if "more than once" in n]
    assert "the same to the last byte" in note
    second = copy.deepcopy(second)
    second["loadgen"]["summary"]["output_tps"] += 0.001
    synthetic.write(tmp_path / "other", [first, second])
    [note] = [n for n in admit([tmp_path / "other"]).notes if "more than once" in n]
    assert "DIFFER" in note and run_id(CELLS[0], 2) in note


def test_quick_check_agrees_with_jsonschema() -> None:
    """What schemas/quick.py accepts, jsonschema accepts; and it does accept what is right."""
    from schemas.quick import Compiler

    quick = Compiler(schemas.schema)
    document = synthetic.record(CELLS[0])
    assert quick.accepts("record", document)
    values: list[Any] = [None, True, 0, 1.0, -1, "x", "", [], {}, [1, 1], {"a": 1}]
    validator = schemas._validator("record")
    seen = 0
    for place in _places(document):
        for value in values:
            changed = _put(document, place, value)
            if quick.accepts("record", changed):
                seen += 1
                assert validator.is_valid(changed), (place, value)
    assert seen > 100
    assert quick.knows("loadgen") and quick.knows("agent") and quick.knows("summary-row")


def _places(document: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every third place in the document: enough to meet each keyword, few enough to be quick."""
    found: list[tuple[Any, ...]] = []

    def walk(value: Any, place: tuple[Any, ...]) -> None:
        found.append(place)
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*place, key))
        elif isinstance(value, list):
            for number, item in enumerate(value[:1]):
                walk(item, (*place, number))

    walk(document, before)
    return found[1::3]


def _put(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.copy(document)
    target = changed
    for word in place[:-1]:
        target[word] = copy.copy(target[word])
        target = target[word]
    target[place[-1]] = value
    return changed

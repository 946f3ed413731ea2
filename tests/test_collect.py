"""Records to summary.csv and table: columns, order, bytes, and what is never averaged."""

import copy
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import synthetic
from fake_board import EXPERIMENTS, FakeBoard, agent, definitions, deliver, loadgen
from rich.console import Console

import schemas
from analysis.collect import CollectedRun, collect, collected, with_scheduler
from analysis.instruments import vstate_columns
from analysis.table import Expectation, print_table
from board.base import RunFailed
from board.cell import Overrides
from board.policies import Policies
from board.progress import Progress, words_for
from board.runner import reproduce, run_one
from toolchain.errors import InvalidData

COLUMNS = [
    "run_id", "experiment", "board", "platform", "model", "policy", "concurrency", "seed",
    "valid", "invalid_reasons", "output_tps", "mean_ttft_ms", "p95_ttft_ms", "mean_latency_ms",
    "save_count", "undiscarded_save_count", "discarded_save_count", "spin_save_count",
    "restore_count", "save_total_ns", "saves_per_s", "vstate_ns_per_request",
    "vstate_cpu_capacity_ppm", "context_switches", "migrations", "critical_instructions",
    "vlen_bits", "bytes_per_save", "window_ms", "requests_ok", "context_switches_per_request",
    "experiment_mode", "aggregate_tps", "vstate_total_ns", "scope", "variant",
    "bystanders", "bystander_share", "bystander_rounds_per_s",
]  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of E0, one of its runs invalid at first, and a run that is in no experiment."""
    root = tmp_path / "results"
    known = definitions(tmp_path)

    def panic(*_: object) -> dict[str, Any]:
        raise RunFailed("guest-panic", "Kernel panic")

    assert reproduce([], FakeBoard(by_seed={2: panic}), root, 1, False, definitions=known) == 4
    assert reproduce([], FakeBoard(), root, 1, False, definitions=known) == 0
    run_one(FakeBoard(), Overrides(concurrency=4), root, definitions=known)
    return root


def rows(results: Path) -> list[dict[str, str]]:
    text = (results / "summary.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def test_columns_and_rows(results: Path) -> None:
    collect(results)
    text = (results / "summary.csv").read_text(encoding="utf-8")
    assert text.splitlines()[0] == ",".join(COLUMNS)
    assert "\r" not in text
    got = rows(results)
    assert [
        (r["experiment"], r["model"], r["concurrency"], r["seed"], r["valid"]) for r in got
    ] == [
        ("", "banana-tiny", "4", "1", "true"),
        ("E0", "banana-tiny", "2", "1", "true"),
        ("E0", "banana-tiny", "2", "2", "false"),
        ("E0", "banana-tiny", "2", "2", "true"),
        ("E0", "smollm2", "1", "1", "true"),
    ]
    assert got[1]["output_tps"] == "5.25"
    assert got[1]["mean_ttft_ms"] == "2001.0"
    assert got[1]["p95_ttft_ms"] == "2501.0"
    assert got[1]["mean_latency_ms"] == "4001.0"
    assert got[1]["platform"] == got[1]["board"] == "virtual"
    assert got[1]["aggregate_tps"] == got[1]["output_tps"]
    assert (got[1]["experiment_mode"], got[1]["vlen_bits"]) == ("baseline", "256")
    assert got[1]["invalid_reasons"] == got[1]["save_count"] == got[1]["migrations"] == ""
    assert got[2]["invalid_reasons"] == "guest-panic"
    assert got[2]["output_tps"] == ""
    assert got[2]["run_id"].removesuffix("-1") == got[3]["run_id"].removesuffix("-2")


@pytest.mark.parametrize(
    ("policy", "mode"), [("vhot", "scx"), ("newer", "scx"), ("affinity", "baseline")]
)
def test_the_mode_follows_the_table_of_policies(
    policy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = copy.deepcopy(Policies.read())
    known.content["policies"]["newer"] = known.content["policies"]["cooperative"]
    monkeypatch.setattr(Policies, "read", lambda: known)
    monkeypatch.setattr("analysis.collect.with_scheduler", with_scheduler.__wrapped__)
    run = synthetic.record(synthetic.cell("baseline", 2, 1))
    run["cell"]["policy"] = policy
    assert collected(run, {}).row["experiment_mode"] == mode


def test_same_bytes_again_and_elsewhere(results: Path, tmp_path: Path) -> None:
    collect(results)
    before = (results / "summary.csv").read_bytes()
    collect(results)
    assert (results / "summary.csv").read_bytes() == before
    moved = tmp_path / "elsewhere"
    results.rename(moved)
    collect(moved)
    assert (moved / "summary.csv").read_bytes() == before


def test_attempts_sort_as_numbers(tmp_path: Path) -> None:
    known = definitions(tmp_path)
    root = tmp_path / "results"
    for _ in range(11):
        run_one(FakeBoard(), Overrides(), root, definitions=known)
    collect(root)
    assert [row["run_id"].split("-")[1] for row in rows(root)] == [str(n) for n in range(1, 12)]


def damage(name: str) -> Any:
    return {
        "truncated": lambda text: text[:50],
        "not a number": lambda text: text.replace("5.25", "NaN", 1),
        "unknown key": lambda text: text.replace('"truth"', '"truht"', 1),
        "negative": lambda text: text.replace('"n_ok": 1', '"n_ok": -1', 1),
        "bad date": lambda text: text.replace('"started_at": "2', '"started_at": "x', 1),
        "valid with reasons": lambda text: text.replace(
            '"invalid_reasons": []', '"invalid_reasons": ["why"]'
        ),
    }[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("truncated", "not the JSON of a record file"),
        ("not a number", "NaN"),
        ("unknown key", 'unknown key "truht" (did you mean "truth"?)'),
        ("negative", "found -1"),
        ("bad date", "$.environment.started_at"),
        ("valid with reasons", "invalid_reasons"),
    ],
)
def test_bad_record_is_named_and_nothing_changes(results: Path, name: str, says: str) -> None:
    collect(results)
    summary = (results / "summary.csv").read_bytes()
    directory = results / "runs" / rows(results)[1]["run_id"]
    path = directory / "record.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(name)(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    others = {p: p.read_bytes() for p in results.rglob("*.json") if p != path}
    with pytest.raises(InvalidData) as caught:
        collect(results)
    assert caught.value.exit_code == 4
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (results / "summary.csv").read_bytes() == summary
    assert {p: p.read_bytes() for p in results.rglob("*.json") if p != path} == others


def test_changed_cell_is_noticed(results: Path) -> None:
    name = next((results / "runs").iterdir()).name
    path = results / "runs" / name / "record.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["cell"]["machine"]["vlen_bits"] = 512
    schemas.write(path, record, "record")
    with pytest.raises(InvalidData, match="the record was changed after the run"):
        collect(results)


def test_record_in_another_folder_is_noticed(results: Path) -> None:
    directory = next((results / "runs").iterdir())
    directory.rename(directory.with_name("ffffffffffff-1"))
    with pytest.raises(InvalidData, match="its folder is called 'ffffffffffff-1'"):
        collect(results)


@pytest.mark.parametrize("kind", ["file", "empty folder"])
def test_things_that_are_no_runs_are_named(results: Path, kind: str) -> None:
    path = results / "runs" / "notes"
    if kind == "file":
        path.write_text("mine", encoding="utf-8")
    else:
        path.mkdir()
    with pytest.raises(InvalidData, match="runs/notes"):
        collect(results)


def test_columns_of_the_instruments() -> None:
    """By hand: 30 saves of 12 and 18 in 2 s, 8 requests, at VLEN 256."""
    kind = {"kind": "save", "role": "context-switch"}
    scope = {"count": 30, "total_ns": 60_000}
    observer = {
        "totals": {"user_saves": 30, "undiscarded_saves": 20, "discarded_saves": 10,
                   "spin_saves": 4, "switches": 80, "migrations": None},
    }  # fmt: skip
    profiler = {
        "sites": [
            {**kind, "state": "user", "target": scope},
            {**kind, "state": "kernel", "target": {"count": 99, "total_ns": 99}},
        ],
        "restores": {"target": {"count": 28}},
        "vstate_cpu_capacity_ppm": {"target": 3.75},
    }
    harts = [{"target_count": 12, "target_bytes": 12_288},
             {"target_count": 18, "target_bytes": 18_432}]  # fmt: skip
    truth = {
        "sites": [{**kind, "state": "user", "harts": harts}],
        "restores": {"target": {"count": 29}},
        "critical_instructions": 12345,
    }
    whole = {"observer": observer, "profiler": profiler, "truth": truth,
             "loadgen": {"summary": {"n_ok": 8, "window_ms": 2000.0}}}  # fmt: skip
    found = vstate_columns(whole)
    assert found == {
        "save_count": 30, "undiscarded_save_count": 20, "discarded_save_count": 10,
        "spin_save_count": 4, "restore_count": 29, "save_total_ns": 60_000,
        "vstate_total_ns": 60_000, "saves_per_s": 15.0, "vstate_ns_per_request": 7500.0,
        "vstate_cpu_capacity_ppm": 3.75, "context_switches": 80,
        "context_switches_per_request": 10.0, "migrations": None, "critical_instructions": 12345,
        "bytes_per_save": 1024.0,
    }  # fmt: skip
    none = dict.fromkeys(whole)
    assert set(vstate_columns(none).values()) == {None}
    assert vstate_columns({**none, "truth": truth})["save_count"] == 30
    blind = vstate_columns({**none, "profiler": {**profiler, "restores": None}})
    assert blind["restore_count"] is None
    alone = vstate_columns({**none, "profiler": profiler, "loadgen": whole["loadgen"]})
    assert (alone["save_count"], alone["saves_per_s"], alone["context_switches"]) == (
        30,
        15.0,
        None,
    )


# ------------------------------------------------------------------------------- the table


def run(
    cell_hash: str, tps: float | None, *, experiments: Sequence[str] = ("E0",), n_ok: int = 8,
    attempt: int = 1, **changed: Any,
) -> CollectedRun:  # fmt: skip
    row = dict.fromkeys(COLUMNS) | {
        "run_id": f"{cell_hash}-{attempt}",
        "board": "virtual",
        "platform": "virtual",
        "model": "banana-tiny",
        "policy": "baseline",
        "scope": None,
        "variant": None,
        "bystanders": 0,
        "concurrency": 2,
        "seed": 1,
        "valid": tps is not None,
        "output_tps": tps,
        "mean_ttft_ms": None if tps is None else 1000 * tps,
        "p95_ttft_ms": None if tps is None else 2000 * tps,
    }
    return CollectedRun(row | changed, cell_hash, tuple(experiments), n_ok, ())


def table(
    runs: Sequence[CollectedRun], expectations: Sequence[Expectation] = (), **options: Any
) -> str:
    file = io.StringIO()
    print_table(runs, expectations, Console(file=file, highlight=False, **options))
    return file.getvalue()


def cells_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| E")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_one_two_three_values() -> None:
    runs = [run("a" * 12, 1.0), run("b" * 12, 2.0), run("c" * 12, 6.0)]
    assert cells_of(table(runs[:1]))[0][5:8] == ["1", "0", "1.000"]
    assert cells_of(table(runs[:2]))[0][5:8] == ["2", "0", "1.000 / 2.000"]
    # Mean 3, sample standard deviation sqrt(7) = 2.6458 by hand.
    assert cells_of(table(runs))[0][5:9] == ["3", "0", "3.000 ± 2.646", "3000.0 ± 2645.8"]


def test_invalid_runs_are_counted_and_not_averaged() -> None:
    runs = [
        run("a" * 12, 1.0),
        run("b" * 12, None),
        run("c" * 12, 99.0, valid=False),
        run("d" * 12, 2.0),
    ]
    assert cells_of(table(runs))[0][5:8] == ["2", "2", "1.000 / 2.000"]
    assert cells_of(table([run("b" * 12, None)]))[0][5:] == ["0", "1", "-", "-", "-", "-"]


def test_a_cell_counts_once() -> None:
    runs = [run("a" * 12, 1.0), run("a" * 12, 5.0, attempt=2), run("b" * 12, 2.0)]
    assert cells_of(table(runs))[0][5:8] == ["2", "0", "1.000 / 2.000"]


def test_different_cells_are_not_mixed() -> None:
    runs = [
        run("a" * 12, 1.0),
        run("b" * 12, 2.0, concurrency=8),
        run("c" * 12, 3.0, policy="vhot"),
        run("d" * 12, 4.0, model="smollm2"),
        run("e" * 12, 5.0, experiments=("E0", "E1")),
        run("f" * 12, 6.0, experiments=()),
    ]
    assert [row[:5] + row[7:8] for row in cells_of(table(runs))] == [
        ["E0", "virtual", "banana-tiny", "baseline", "2", "1.000 / 5.000"],
        ["E0", "virtual", "banana-tiny", "baseline", "8", "2.000"],
        ["E0", "virtual", "banana-tiny", "vhot", "2", "3.000"],
        ["E0", "virtual", "smollm2", "baseline", "2", "4.000"],
        ["E1", "virtual", "banana-tiny", "baseline", "2", "5.000"],
    ]


def test_platforms_have_tables_of_their_own() -> None:
    text = table([run("a" * 12, 1.0), run("b" * 12, 2.0, board="f3", platform="board")])
    assert text.count("VIRTUAL milliseconds") == 1
    assert text.count("mean TTFT, virtual ms") == 1
    assert text.count("Times in milliseconds") == 1
    assert "1.000 / 2.000" not in text


def test_small_samples_are_flagged() -> None:
    assert cells_of(table([run("a" * 12, 1.0, n_ok=8)]))[0][9] == "2000.0 (n=8, near max)"
    assert cells_of(table([run("a" * 12, 1.0, n_ok=20)]))[0][9] == "2000.0"


def test_plain_unless_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = table([run("a" * 12, 1.0)])
    assert plain.isascii()
    assert "\x1b" not in plain
    shown = table([run("a" * 12, 1.0)], force_terminal=True, width=200, color_system="standard")
    assert "\x1b" in shown
    monkeypatch.setenv("NO_COLOR", "1")
    uncoloured = table([run("a" * 12, 1.0)], force_terminal=True, width=200)
    assert "\x1b[3" not in uncoloured.replace("\x1b[3m", "")  # italics are no colour


@pytest.mark.parametrize(
    ("texts", "met"),
    [
        ((" Paris.",), True),
        ((" Paris.", "It is Paris"), True),
        ((" Paris.", " Lyon."), False),
        ((" paris",), False),
        ((), False),
    ],
)
def test_expectation(texts: tuple[str, ...], met: bool) -> None:
    expectation = Expectation("a" * 12 + "-1", "E0 smollm2", "Paris", texts)
    assert expectation.met is met
    assert ("met: got" if met else "DIFFERS: got") in table([], [expectation])


def test_answers_are_those_of_the_measured_requests(tmp_path: Path) -> None:
    def script(cell: Any, directory: Path, _cancel: object) -> dict[str, Any]:
        deliver(directory, agent(), loadgen(cell, texts=["one", "two"]))
        return {"host_cpu_s": 1.0, "host_wall_s": 1.0}

    root = tmp_path / "results"
    run_one(FakeBoard(script), Overrides(), root, definitions=definitions(tmp_path, EXPERIMENTS))
    [got] = collect(root)
    assert got.texts == ("one", "two")
    assert got.n_ok == 2


# ---------------------------------------------------------------------------- the progress


def test_progress_lines_exactly() -> None:
    file = io.StringIO()
    now_s = [0.0]
    console = Console(file=file, highlight=False, markup=False, soft_wrap=True, width=80)
    progress = Progress(3, 2, {"a": 60.0, "b": 30.0}, console, lambda: now_s[0])
    with progress:
        progress.skipped("z", "zzz-1", "E0 x")
        progress.started("a", "aaa-1", "E0 y")
        now_s[0] = 20.0
        progress.started("b", "bbb-2", "E0 z")
        now_s[0] = 130.0
        progress.ended("a", "OK", "")
        progress.ended("b", "INVALID", "guest-panic", ["saw\n[red]this[/red]"])
    assert file.getvalue().splitlines() == [
        "[  SKIP   ] cell 1 of 3: zzz-1 E0 x (a valid run is there, elapsed 0 s)",
        "[   RUN   ] cell 2 of 3: aaa-1 E0 y (about 60 s left, elapsed 0 s)",
        "[   RUN   ] cell 3 of 3: bbb-2 E0 z (about 40 s left, elapsed 20 s)",
        "[   OK    ] cell 2 of 3: aaa-1 E0 y (took 2 min, elapsed 2 min)",
        "[ INVALID ] cell 3 of 3: bbb-2 E0 z (guest-panic, took 2 min, elapsed 2 min)",
        "    | saw",
        "    | [red]this[/red]",
    ]


def test_live_line_on_a_terminal_only() -> None:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, highlight=False, markup=False, soft_wrap=True, width=80,
        _environ={"TERM": "xterm"},
    )  # fmt: skip
    with Progress(1, 1, {"a": 60.0}, console) as progress:
        progress.started("a", "aaa-1", "E0 y")
    assert "elapsed 0 s, about 60 s left | aaa-1 E0 y" in file.getvalue()
    dumb = io.StringIO()
    console = Console(file=dumb, force_terminal=True, soft_wrap=True, _environ={"TERM": "dumb"})
    with Progress(1, 1, {"a": 60.0}, console) as progress:
        progress.started("a", "aaa-1", "E0 y")
    assert "\x1b" not in dumb.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (3540, "59 min"), (3600, "1 h 0 min"),
     (5400, "1 h 30 min"), (7199, "2 h 0 min")],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert words_for(seconds) == words

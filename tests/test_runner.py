"""The runner on a scripted board: what is kept, void or told, and every way to fail."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_board import (
    EXPERIMENTS,
    FakeBoard,
    Script,
    agent,
    calibration,
    definitions,
    deliver,
    good,
    loadgen,
    slow,
)

import board.results
import schemas
from board.base import RunFailed, opened
from board.cell import Definitions, Overrides, plan_run
from board.results import Results
from board.runner import reproduce, run_one
from board.virtual.board import VirtualBoard
from schemas.record import comparable, read_record
from toolchain.command import Cancelled, interrupt_sets, run
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError

PROGRAM = Path(__file__).resolve().parent / "fake_board.py"
Change = Callable[[str], str]
WAIT_S = 60.0
"""How long a test waits for something that must happen; never a measure of speed."""


@pytest.fixture
def known(tmp_path: Path) -> Definitions:
    return definitions(tmp_path)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def again(board: FakeBoard, results: Path, known: Definitions, jobs: int | None = 2) -> int:
    return reproduce([], board, results, jobs, False, definitions=known)


def entries(results: Path, name: str) -> list[str]:
    return sorted(path.name for path in (results / name).iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def failing(reason: str, detail: str = "line 1\nline 2") -> Script:
    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        (directory / "console.log").write_text("it went wrong\n", encoding="utf-8")
        raise RunFailed(reason, detail)

    return script


def delivering(change_agent: Change | None, change_loadgen: Change | None) -> Script:
    """A run whose files are changed on their way; None: a file gets lost."""

    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        facts = good(cell, directory, cancel)
        for name, change in (("agent", change_agent), ("loadgen", change_loadgen)):
            path = directory / f"{name}.json"
            text = path.read_text(encoding="utf-8")
            path.unlink()
            if change is not None:
                path.write_text(change(text), encoding="utf-8")
        return facts

    return script


def raising(error: Exception) -> Script:
    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        raise error

    return script


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------- one run


def test_run_prints_its_folder_last(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    board = FakeBoard()
    folder = run_one(board, Overrides(), results, definitions=known)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(folder)
    assert folder.parent == results / "runs"
    record = read_record(folder)
    assert record["run_id"] == folder.name
    assert record["valid"]
    assert record["invalid_reasons"] == []
    assert list(record) == sorted(schemas.schema("record")["required"])
    assert record["loadgen"] == loadgen(record["cell"])
    assert record["calibration"] == calibration(record["cell"])
    assert record["environment"]["attempt"] == 1
    assert record["environment"]["host_cpu_s"] == 12.5
    assert record["environment"]["disk_bytes"] > 0
    assert sorted(content(folder)) == [
        "agent.json", "console.log", "loadgen.json", "record.json",
    ]  # fmt: skip
    assert board.deadlines_s == [60]
    assert entries(results, "partial") == entries(results, "void") == []
    assert "30 s with 1 job, 30 CPU-s, 0 MiB (expected)" in err
    assert "[   RUN   ] cell 1 of 1:" in err
    assert "[   OK    ] cell 1 of 1:" in err
    assert "\x1b" not in err


def test_same_cell_gives_same_bytes_and_another_attempt(results: Path, known: Definitions) -> None:
    first, second = (
        run_one(FakeBoard(), Overrides(), results, definitions=known) for _ in range(2)
    )
    assert (first.name[-2:], second.name[-2:]) == ("-1", "-2")
    one, two = read_record(first), read_record(second)
    assert one != two
    assert comparable(one) == comparable(two)
    other = read_record(run_one(FakeBoard(), Overrides(seed=2), results, definitions=known))
    assert comparable(one) != comparable(other)
    # A check that can fail: any other difference is seen.
    two["loadgen"]["summary"]["output_tps"] += 1e-9
    assert comparable(one) != comparable(two)


def test_two_runs_of_a_cell_at_once(results: Path, known: Definitions) -> None:
    both = threading.Barrier(2, timeout=WAIT_S)

    def meet(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        both.wait()
        return good(cell, directory, cancel)

    folders: list[Path] = []

    def one() -> None:
        folders.append(run_one(FakeBoard(meet), Overrides(), results, definitions=known))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(folder.name[-2:] for folder in folders) == ["-1", "-2"]
    assert len({comparable(read_record(folder)) for folder in folders}) == 1


def test_attempts_are_allocated_without_a_race(results: Path, known: Definitions) -> None:
    folder = Results(results)
    cell = plan_run(known, Overrides(), FakeBoard()).cell
    names: list[str] = []

    def many() -> None:
        for _ in range(20):
            names.append(folder.begin(cell).run_id)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(name.split("-")[1]) for name in names) == list(range(1, 81))


def test_run_that_begins_is_not_taken_for_a_dead_one(
    results: Path, known: Definitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Results(results)
    sweeper = threading.Thread(target=folder.sweep)
    lock = board.results._lock_directory

    def lock_late(path: Path) -> int:
        if sweeper.ident is None:  # between making the folder and locking it
            sweeper.start()
            sweeper.join(0.5)
        return lock(path)

    monkeypatch.setattr(board.results, "_lock_directory", lock_late)
    partial = folder.begin(plan_run(known, Overrides(), FakeBoard()).cell)
    sweeper.join(WAIT_S)
    assert partial.path.is_dir()
    assert entries(results, "void") == []


@pytest.mark.parametrize(
    "reason",
    [
        "guest-panic", "guest-oops", "guest-rcu-stall", "guest-oom", "guest-timeout", "qemu-killed",
        "no-results", "agent-failed",
    ],
)  # fmt: skip
def test_failed_run_is_kept_with_its_reason(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    with pytest.raises(InvalidData, match=f"the run is invalid: {reason}; it is kept in") as caught:
        run_one(FakeBoard(failing(reason)), Overrides(), results, definitions=known)
    assert caught.value.exit_code == 4
    out, err = capsys.readouterr()
    folder = Path(out.splitlines()[-1])
    record = read_record(folder)
    assert not record["valid"]
    assert record["invalid_reasons"] == [reason]
    assert record["environment"]["failure"] == {"reason": reason, "detail": "line 1\nline 2"}
    assert record["loadgen"] is None
    assert (folder / "console.log").read_text(encoding="utf-8") == "it went wrong\n"
    assert "line 2" in err
    assert "[ INVALID ]" in err


def same(text: str) -> str:
    return text


def replaced(old: str, new: str) -> Change:
    def change(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change_agent", "change_loadgen", "reasons", "says"),
    [
        (None, None, ["no-results"], "agent.json: the board delivered no such file"),
        (same, None, ["no-results"], "loadgen.json: the board delivered no such file"),
        (None, same, ["no-results"], "agent.json: the board delivered no such file"),
        (same, lambda text: text[:-9], ["damaged-results"], "loadgen.json: not the JSON"),
        (same, lambda _text: "", ["damaged-results"], "loadgen.json: not the JSON"),
        (lambda _text: "\0\0", same, ["damaged-results"], "agent.json: not the JSON"),
        (lambda text: text[:-1] + ', "extra": 1}', same, ["damaged-results"], '"extra"'),
        (same, replaced("5.25", "NaN"), ["damaged-results"], "NaN"),
        (same, replaced('"n_ok"', '"nok"'), ["damaged-results"], 'did you mean "n_ok"?'),
        (same, lambda _text: "[]", ["damaged-results"], "expected object"),
        (same, replaced('"concurrency": 2', '"concurrency": 4'), ["load-mismatch"],
         "loadgen.json: concurrency is 4, the cell's is 2"),
        (same, replaced('"prompt_words": 48', '"prompt_words": 47'), ["load-mismatch"],
         "loadgen.json: prompt_words is 47, the cell's is 48"),
    ],
)  # fmt: skip
def test_missing_or_damaged_results_make_the_run_invalid(
    results: Path,
    known: Definitions,
    capsys: pytest.CaptureFixture[str],
    change_agent: Change | None,
    change_loadgen: Change | None,
    reasons: list[str],
    says: str,
) -> None:
    script = delivering(change_agent, change_loadgen)
    with pytest.raises(InvalidData):
        run_one(FakeBoard(script), Overrides(), results, definitions=known)
    out, err = capsys.readouterr()
    assert read_record(Path(out.splitlines()[-1]))["invalid_reasons"] == reasons
    assert says in err
    assert "partial" not in err


def test_reasons_of_all_parts_are_kept(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        deliver(
            directory,
            agent() | {"invalid_reasons": ["kernel-warning", "server-died"]},
            loadgen(cell, reasons=["failed_requests", "unequal_output"]),
        )
        return {"host_cpu_s": 1.0, "host_wall_s": 1.0}

    class BadMachine(FakeBoard):
        def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
            return calibration(cell) | {"valid": False, "invalid_reasons": ["not-parallel"]}

    with pytest.raises(InvalidData):
        run_one(BadMachine(script), Overrides(), results, definitions=known)
    assert "    | loadgen.json: unequal_output: the figures\n" in capsys.readouterr().err
    [name] = entries(results, "runs")
    assert read_record(results / "runs" / name)["invalid_reasons"] == [
        "kernel-warning", "server-died", "failed_requests", "unequal_output", "not-parallel",
    ]  # fmt: skip


SLOW_INTERRUPT = "hrtimer: interrupt took 1025200 ns"


@pytest.mark.parametrize(
    ("warnings", "platform", "reasons"),
    [
        ([SLOW_INTERRUPT], "virtual", []),
        ([SLOW_INTERRUPT, "rcu: odd"], "virtual", ["kernel-warning"]),
        ([SLOW_INTERRUPT], "board", ["kernel-warning"]),
    ],
)
def test_a_slow_interrupt_is_the_emulator_s_and_kept(
    warnings: list[str], platform: str, reasons: list[str], results: Path, known: Definitions
) -> None:
    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        said = agent() | {"invalid_reasons": ["kernel-warning"]}
        said["platform"] |= {"kernel_warnings": warnings}
        deliver(directory, said, loadgen(cell))
        return {"host_cpu_s": 1.0, "host_wall_s": 1.0}

    board = FakeBoard(script)
    board.platform = platform
    with pytest.raises(InvalidData) if reasons else contextlib.nullcontext():
        run_one(board, Overrides(), results, definitions=known)
    [name] = entries(results, "runs")
    record = read_record(results / "runs" / name)
    assert record["invalid_reasons"] == reasons
    assert record["platform"]["kernel_warnings"] == warnings


def test_board_that_says_too_much_is_refused(results: Path, known: Definitions) -> None:
    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        return good(cell, directory, cancel) | {"surprise": 1}

    with pytest.raises(InvalidData, match='unknown key "surprise"'):
        run_one(FakeBoard(script), Overrides(), results, definitions=known)
    assert entries(results, "runs") == entries(results, "partial") == []


def test_unforeseen_error_keeps_the_logs(results: Path, known: Definitions) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        run_one(FakeBoard(raising(RuntimeError("a bug"))), Overrides(), results, definitions=known)
    [name] = entries(results, "void")
    assert "a bug" in (results / "void" / name / "void.txt").read_text(encoding="utf-8")
    assert entries(results, "runs") == entries(results, "partial") == []


def test_unknown_board() -> None:
    with pytest.raises(UsageError, match="--board f4: no such board; known: f3, virtual, "):
        opened("f4")


# ---------------------------------------------------------------------------- a reproduction


def test_reproduce_runs_everything_once(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    board = FakeBoard()
    assert again(board, results, known) == 0
    out, err = capsys.readouterr()
    assert len(board.runs) == 3
    assert len(entries(results, "runs")) == 3
    assert len((results / "summary.csv").read_text(encoding="utf-8").splitlines()) == 4
    assert "3 cells on board virtual, 0 done before: 90 s with 2 jobs, 150 CPU-s" in err
    assert "E0, kick the tires: a purpose" in err
    assert err.index("150 CPU-s") < err.index("[   RUN   ]")
    assert "cell 3 of 3" in err
    assert re.search(r"about \d+ s left, elapsed", err)
    assert "5.250 / 5.500" in out
    assert "VIRTUAL milliseconds" in out
    assert "'Paris': met: got ' Paris.'" in out
    assert "\x1b" not in out + err


def test_reproduce_again_runs_nothing(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert again(FakeBoard(), results, known) == 0
    summary = (results / "summary.csv").read_bytes()
    capsys.readouterr()
    board = FakeBoard()
    assert again(board, results, known) == 0
    assert board.runs == []
    err = capsys.readouterr().err
    assert "3 cells on board virtual, 3 done before: nothing to run" in err
    assert len(re.findall(r"\[  SKIP   \] cell \d of 3: [0-9a-f]{12}-1 E0 .*a valid run", err)) == 3
    assert (results / "summary.csv").read_bytes() == summary


def test_another_kernel_is_another_cell(results: Path, known: Definitions) -> None:
    assert again(FakeBoard(), results, known) == 0
    board = FakeBoard()
    board.kernel = "2" * 64
    assert again(board, results, known) == 0
    assert len(board.runs) == 3
    assert len(entries(results, "runs")) == 6
    # The runs with the old kernel are kept, and no longer part of the experiment.
    rows = (results / "summary.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert sorted(row.split(",")[1] for row in rows) == ["", "", "", "E0", "E0", "E0"]


def test_cost_is_what_was_measured_here(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    run_one(FakeBoard(), Overrides(), results, definitions=known)
    capsys.readouterr()
    again(FakeBoard(), results, known)
    # Seed 1 is done; seed 2 is of its kind: 12.5 CPU-s measured; smollm2 is not: 90 expected.
    err = capsys.readouterr().err
    assert "1 done before: 90 s with 2 jobs, 102 CPU-s" in err
    assert "(1 of 2 measured here, the others expected)" in err


def test_invalid_run_is_kept_counted_and_retried(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    board = FakeBoard(by_seed={2: failing("guest-panic")})
    assert again(board, results, known) == 4
    out, err = capsys.readouterr()
    assert "[ INVALID ]" in err
    assert "line 2" in err
    assert "no valid run of E0 banana-tiny baseline c=2 seed=2" in err
    assert "5.500" not in out
    before = content(results / "runs")
    good_board = FakeBoard()
    assert again(good_board, results, known) == 0
    assert [cell["seed"] for cell in good_board.runs] == [2]
    assert content(results / "runs").items() >= before.items()
    assert len(entries(results, "runs")) == 4
    assert any(name.endswith("-2") for name in entries(results, "runs"))
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "banana-tiny" in line)
    assert [word.strip() for word in row.split("|")][5:9] == ["2", "2", "1", "5.250 / 5.500"]


def test_wrong_answer_is_a_difference(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        deliver(directory, agent(), loadgen(cell, texts=[" Lyon."]))
        return {"host_cpu_s": 1.0, "host_wall_s": 1.0}

    assert again(FakeBoard(wrong), results, known) == 1
    assert "'Paris': DIFFERS: got ' Lyon.'" in capsys.readouterr().out
    # It is no accident of this run: asked again, the kept record says the same.
    assert again(FakeBoard(), results, known) == 1


def test_jobs_are_kept_busy_and_not_exceeded(results: Path, tmp_path: Path) -> None:
    known = definitions(tmp_path, EXPERIMENTS.replace("[1, 2]", "[1, 2, 3, 4, 5, 6]"))
    pair = threading.Barrier(2, timeout=WAIT_S)

    def meet(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        if cell["model"] != "smollm2":
            pair.wait()  # passes only if two run at the same time
        return good(cell, directory, cancel)

    board = FakeBoard(meet)
    board.by_seed = {}
    assert again(board, results, known, jobs=3) == 0
    assert 2 <= board.most_at_once <= 3
    single = FakeBoard()
    assert again(single, tmp_path / "other", known, jobs=1) == 0
    assert single.most_at_once == 1


def test_longest_cell_starts_first(results: Path, known: Definitions) -> None:
    board = FakeBoard()
    assert again(board, results, known, jobs=1) == 0
    assert [cell["model"] for cell in board.runs] == ["smollm2", "banana-tiny", "banana-tiny"]


def test_jobs_must_be_positive(results: Path, known: Definitions) -> None:
    with pytest.raises(UsageError, match="--jobs 0: expected an integer from 1"):
        again(FakeBoard(), results, known, jobs=0)
    assert not results.exists()


def test_shared_cells_run_once(results: Path, tmp_path: Path) -> None:
    text = EXPERIMENTS.replace("concurrencies = [8]", "concurrencies = [2]")
    board = FakeBoard()
    assert reproduce([], board, results, 2, True, definitions=definitions(tmp_path, text)) == 0
    assert len(board.runs) == 3
    rows = (results / "summary.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert sorted(row.split(",")[1] for row in rows) == ["E0", "E0", "E0;E9"]


# ---------------------------------------------------------------------- what stops everything


@pytest.mark.parametrize("failing_seed", [1, 2])
def test_one_cell_that_cannot_go_on_stops_the_others(
    results: Path, tmp_path: Path, failing_seed: int
) -> None:
    # Two jobs, three cells: smollm2 (seed 1) and the one with seed 2 are at work.
    known = definitions(tmp_path, EXPERIMENTS.replace("[1, 2]", "[2, 3]"))
    both = threading.Barrier(2, timeout=WAIT_S)

    def unfit(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        both.wait()
        raise EnvironmentUnfit("QEMU cannot be started: try again")

    def other(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        both.wait()
        assert cancel.wait(WAIT_S)
        raise Cancelled("cancelled")

    with pytest.raises(EnvironmentUnfit, match="QEMU cannot be started"):
        again(FakeBoard(other, by_seed={failing_seed: unfit}), results, known)
    assert entries(results, "runs") == entries(results, "partial") == []
    assert len(entries(results, "void")) == 2
    assert again(FakeBoard(), results, known) == 0


def test_full_disk_in_a_run(results: Path, known: Definitions) -> None:
    assert run_one(FakeBoard(), Overrides(), results, definitions=known)
    before = content(results / "runs")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(EnvironmentUnfit) as caught:
        run_one(FakeBoard(raising(full)), Overrides(), results, definitions=known)
    assert "No space left on device" in str(caught.value)
    assert "earlier results are untouched" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(results / "runs") == before
    assert entries(results, "partial") == entries(results, "void") == []


def test_full_disk_is_not_an_invalid_run(
    results: Path, known: Definitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    # QEMU, not this process, met the full disk; from inside it looks as if results were missing.
    monkeypatch.setattr(Results, "is_full", lambda _self: True)
    with pytest.raises(EnvironmentUnfit, match=r"is full \(no-results\)"):
        run_one(FakeBoard(failing("no-results")), Overrides(), results, definitions=known)
    assert entries(results, "runs") == entries(results, "partial") == []


def test_too_little_space_is_told_before_the_start(results: Path, tmp_path: Path) -> None:
    known = definitions(tmp_path, EXPERIMENTS.replace("disk_mib = 0.25", "disk_mib = 1e9"))
    board = FakeBoard()
    with pytest.raises(EnvironmentUnfit, match="MiB free, 3000000000 MiB needed"):
        again(board, results, known)
    assert board.runs == []


def in_a_small_world(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount file systems nobody else sees."""
    wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-eu", "-c", script, "sh"]
    return subprocess.run([*wrapper, *arguments], capture_output=True, text=True, timeout=WAIT_S)


small_world = pytest.mark.skipif(
    shutil.which("unshare") is None or in_a_small_world("mount -t tmpfs none /mnt").returncode != 0,
    reason="this host lets nobody mount in a user namespace",
)


@small_world
def test_really_full_disk(tmp_path: Path, known: Definitions) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    done = in_a_small_world(
        'mount -t tmpfs -o size=1536k none "$1"\n'
        '"$2" "$3" "$1/results" "$4" 0 >/dev/null 2>&1\n'  # fits
        'find "$1/results/runs" -type f | sort | xargs sha256sum >"$1/before"\n'
        'dd if=/dev/zero of="$1/filler" bs=1k 2>/dev/null || true\n'
        # Other cells, so that there is something to run.
        'sed "s/seeds = .1, 2./seeds = [3, 4]/; s/disk_mib = 0.25/disk_mib = 1e-6/" "$4" >"$5"\n'
        'set +e; "$2" "$3" "$1/results" "$5" 0; code=$?; set -e\n'
        'find "$1/results/runs" -type f | sort | xargs sha256sum | cmp - "$1/before" || exit 99\n'
        'test -z "$(ls -A "$1/results/partial")" || exit 98\n'
        "exit $code",
        *map(str, (mount, sys.executable, PROGRAM, known.path, tmp_path / "other.toml")),
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


@small_world
def test_read_only_results(tmp_path: Path, known: Definitions) -> None:
    results = tmp_path / "results"
    assert again(FakeBoard(), results, known) == 0
    before = content(results)
    done = in_a_small_world(
        'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"\n"$2" "$3" "$1/$4" "$5" 0',
        *map(str, (tmp_path, sys.executable, PROGRAM, "results", known.path)),
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "pass --results DIR" in done.stderr
    assert content(results) == before
    done = in_a_small_world(
        'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"\n"$2" "$3" "$1/$4" "$5" 0',
        *map(str, (tmp_path, sys.executable, PROGRAM, "new", known.path)),
    )
    assert done.returncode == 3, done.stderr
    assert "Read-only file system" in done.stderr


def test_results_is_a_file(tmp_path: Path, known: Definitions) -> None:
    path = tmp_path / "file"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(EnvironmentUnfit, match="pass --results DIR"):
        again(FakeBoard(), path, known)
    assert path.read_text(encoding="utf-8") == "mine"


# ------------------------------------------------------------------- folders that are not ours


def test_folder_of_another_version(results: Path, known: Definitions) -> None:
    results.mkdir()
    (results / "index.json").write_text('{"schema_version": "0"}', encoding="utf-8")
    board = FakeBoard()
    with pytest.raises(InvalidData) as caught:
        again(board, results, known)
    assert caught.value.exit_code == 4
    assert "was made by another version" in str(caught.value)
    assert "pass --results DIR for a new folder, or move this one away" in str(caught.value)
    assert [path.name for path in results.iterdir()] == ["index.json"]
    assert board.prepared == []


def test_record_of_another_version(results: Path, known: Definitions) -> None:
    folder = run_one(FakeBoard(), Overrides(), results, definitions=known)
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    (folder / "record.json").write_text(
        json.dumps(record | {"schema_version": "2"}), encoding="utf-8"
    )
    with pytest.raises(InvalidData, match=r'another version.*schema_version is "2"'):
        again(FakeBoard(), results, known)


def test_damaged_record_stops_before_the_start(results: Path, known: Definitions) -> None:
    folder = run_one(FakeBoard(), Overrides(), results, definitions=known)
    path = folder / "record.json"
    path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
    board = FakeBoard()
    with pytest.raises(InvalidData, match=re.escape(str(path))):
        again(board, results, known)
    assert board.runs == []


# ------------------------------------------------------------- two at once, interrupts, kills


@contextlib.contextmanager
def start(results: Path, known: Definitions) -> Iterator[subprocess.Popen[str]]:
    """A reproduction in another process, on a board that never gets done."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(results), str(known.path), "1e6"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def at_work(results: Path) -> bool:
    """Whether two cells have got as far as to write their console."""
    return len(list((results / "partial").glob("*/console.log"))) == 2


def test_interrupt_leaves_nothing_and_resumes(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_one(FakeBoard(), Overrides(), results, definitions=known)
    before = content(results / "runs")
    with start(results, known) as process:
        wait_until(lambda: at_work(results))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # an impatient person
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "nothing is left running; the same command goes on from here" in err
    assert content(results / "runs") == before
    assert entries(results, "partial") == []
    voided = entries(results, "void")
    assert len(voided) == 2
    for name in voided:
        assert re.search(rf"\[  VOID   \] .*{name}.*interrupted; its logs: .*void/{name}", err)
        assert (results / "void" / name / "void.txt").read_text("utf-8") == "interrupted\n"
        assert (results / "void" / name / "console.log").read_text("utf-8") == "booting\n"
    capsys.readouterr()
    board = FakeBoard()
    assert again(board, results, known) == 0
    assert len(board.runs) == 2
    assert "1 done before" in capsys.readouterr().err
    # The number of an attempt that was void is not given again.
    assert len([name for name in entries(results, "runs") if name.endswith("-2")]) == 2


def test_an_interrupt_in_the_middle_of_the_first_waits_for_no_lock() -> None:
    class Impatient(threading.Event):
        sets = 0

        def set(self) -> None:
            with self._cond:  # type: ignore[attr-defined]  # as Event.set() does
                self.sets += 1
                if self.sets == 1:
                    os.kill(os.getpid(), signal.SIGINT)
            super().set()

    cancel = Impatient()
    with pytest.raises(KeyboardInterrupt), interrupt_sets(cancel):
        os.kill(os.getpid(), signal.SIGINT)
    assert cancel.sets == 1 and cancel.is_set()


def test_interrupt_during_a_calibration_stops_its_guests(
    results: Path, known: Definitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads have no cancel event of the runner's, and one of them has not begun yet."""
    ended: list[str] = []

    def guest(name: str) -> None:
        try:
            if name == "first":
                os.kill(os.getpid(), signal.SIGINT)
            run(["sleep", "1000"], what=name)
        except Cancelled as error:
            ended.append(str(error))
            raise

    def calibration(_board: FakeBoard, _cell: Mapping[str, Any]) -> dict[str, Any] | None:
        with ThreadPoolExecutor(1) as pool:
            futures = [pool.submit(guest, name) for name in ("first", "second")]
            for future in futures:
                future.result()
        return None

    monkeypatch.setattr(FakeBoard, "calibration", calibration)
    with pytest.raises(KeyboardInterrupt):
        run_one(FakeBoard(), Overrides(), results, definitions=known)
    assert len(ended) == 2 and ended[1] == "second: cancelled before it started"
    assert entries(results, "runs") == entries(results, "partial") == []
    assert run(["true"], what="a command after it").returncode == 0


def test_a_machine_that_cannot_be_calibrated_is_told_like_a_run(
    results: Path, known: Definitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibration(_board: FakeBoard, _cell: Mapping[str, Any]) -> dict[str, Any] | None:
        raise RunFailed("guest-timeout", "the virtual board did not end within 900 s")

    monkeypatch.setattr(FakeBoard, "calibration", calibration)
    with pytest.raises(InvalidData, match="guest-timeout: the virtual board did not end") as caught:
        again(FakeBoard(), results, known)
    assert caught.value.exit_code == 4


def test_interrupt_of_one_run(results: Path, known: Definitions) -> None:
    def press(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return slow(WAIT_S)(cell, directory, cancel)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_one(FakeBoard(press), Overrides(), results, definitions=known)
    assert signal.getsignal(signal.SIGINT) is before
    assert entries(results, "runs") == entries(results, "partial") == []
    assert len(entries(results, "void")) == 1


def test_killed_process_is_cleaned_up_after(
    results: Path, known: Definitions, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(results, known) as process:
        wait_until(lambda: at_work(results))
        process.kill()
        process.communicate(timeout=WAIT_S)
    left = entries(results, "partial")
    assert len(left) == 2
    assert again(FakeBoard(), results, known) == 0
    err = capsys.readouterr().err
    for name in left:
        assert f"void: {name} was left behind by a killed process" in err
    assert entries(results, "void") == left
    assert entries(results, "partial") == []


def test_second_reproduction_is_refused(results: Path, known: Definitions) -> None:
    with start(results, known) as process:
        wait_until(lambda: at_work(results))
        board = FakeBoard()
        with pytest.raises(EnvironmentUnfit) as caught:
            again(board, results, known)
        assert caught.value.exit_code == 3
        assert f"(process {process.pid})" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert board.prepared == []
        # A single run is welcome, and leaves the runs under way alone.
        folder = run_one(board, Overrides(concurrency=3), results, definitions=known)
        assert read_record(folder)["valid"]
        assert len(entries(results, "partial")) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert again(FakeBoard(), results, known) == 0


def test_stale_lock_file_is_no_obstacle(results: Path, known: Definitions) -> None:
    results.mkdir()
    (results / "reproduce.lock").write_text("99999\n", encoding="utf-8")
    assert again(FakeBoard(), results, known) == 0


def test_lock_is_given_back(results: Path, known: Definitions) -> None:
    assert again(FakeBoard(), results, known) == 0
    with (results / "reproduce.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_default_jobs_are_the_board_s(
    results: Path, known: Definitions, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 4})
    board = FakeBoard()
    board.jobs = VirtualBoard().jobs
    assert again(board, results, known, jobs=None) == 0
    assert "with 5 jobs" in capsys.readouterr().err

"""From a clean results folder to valid, repeatable records: ./inv as a person calls it.

One reproduction of E0 serves several tests; what is compared with it is run anew: the same cell
twice at once, one of the two from a copy of the checkout at another path.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import users_of

from schemas.record import comparable

pytestmark = pytest.mark.boot


@dataclass(frozen=True)
class Reproduction:
    """What ./inv reproduce left behind."""

    root: Path
    stdout: str
    stderr: str

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted(self.root.glob("runs/*/record.json"))]

    def load_record(self, seed: int) -> dict[str, Any]:
        [record] = [
            r
            for r in self.records()
            if r["cell"]["model"] == "banana-tiny" and r["cell"]["seed"] == seed
        ]
        return record


def inv(checkout: Path, *words: object) -> "subprocess.Popen[str]":
    environment = {**os.environ, "BANANAOS_VENV": os.environ["VIRTUAL_ENV"]}
    return subprocess.Popen(
        [checkout / "inv", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="module", autouse=True)
def known_environment(repo: Path) -> Iterator[None]:
    """./inv of a copied checkout shall use this environment instead of making its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIRTUAL_ENV", os.environ.get("BANANAOS_VENV", str(repo / ".venv")))
        yield


@pytest.fixture(scope="module")
def reproduction(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    root = tmp_path_factory.mktemp("E0")
    process = inv(repo, "reproduce", "--results", root, "--report", root / "report")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stdout + stderr
    return Reproduction(root, stdout, stderr)


def test_reproduction_is_valid(reproduction: Reproduction) -> None:
    with (reproduction.root / "summary.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 3
    assert all(row["valid"] == "true" and not row["invalid_reasons"] for row in rows)
    assert all(float(row["output_tps"]) > 0 and float(row["mean_ttft_ms"]) > 0 for row in rows)
    assert "virtual" in reproduction.stdout.lower()


def test_smollm2_knows_paris_on_the_virtual_board(reproduction: Reproduction) -> None:
    [record] = [r for r in reproduction.records() if r["cell"]["model"] == "smollm2"]
    [request] = record["loadgen"]["requests"]
    assert "Paris" in request["text"]
    assert "Paris" in reproduction.stdout


def test_everybody_gets_these_runs(reproduction: Reproduction) -> None:
    """An input that changed and runs that were not accepted anew (--accept) end here, too."""
    assert "artifact/expected/runs.json: 3 of 3 equal, bit for bit" in reproduction.stdout


def test_it_ends_with_a_verdict_on_every_claim(reproduction: Reproduction) -> None:
    """What E0 cannot say is NOT-RUN with its reason, never silence."""
    verdicts = json.loads((reproduction.root / "report" / "verdicts.json").read_text())["claims"]
    assert len(verdicts) > 20
    for verdict in verdicts:
        assert verdict["verdict"] and verdict["reason"]
        assert f"{verdict['id']} " in reproduction.stdout
    assert "banana-tiny" in (reproduction.root / "report" / "index.html").read_text()


def test_vector_registers_were_used(reproduction: Reproduction) -> None:
    server = reproduction.load_record(1)["platform"]["server"]
    assert server["vlen_bits"] == 256
    assert server["vector_threads"] >= 8, "every compute thread has left VS Off"


def test_calibration_is_in_every_record_and_holds(reproduction: Reproduction) -> None:
    calibrations = [record["calibration"] for record in reproduction.records()]
    assert all(calibration == calibrations[0] for calibration in calibrations)
    calibration = calibrations[0]
    assert calibration["valid"]
    assert calibration["linear_error_ratio"] <= 0.10
    one, eight = calibration["server"]
    assert (one["threads"], eight["threads"]) == (1, 8)
    assert one["prompt_ms"] >= 3 * eight["prompt_ms"]
    assert one["predicted_ms"] >= eight["predicted_ms"]


def test_another_seed_gives_other_numbers(reproduction: Reproduction) -> None:
    first, second = reproduction.load_record(1), reproduction.load_record(2)
    assert first["cell"]["inputs"] == second["cell"]["inputs"]
    assert first["loadgen"]["summary"] != second["loadgen"]["summary"]


RAW = (
    *("console.log", "dmesg.log", "server.log"),
    *("agent.json", "loadgen.json", "observer.json", "profiler.json"),
)


def test_same_cell_gives_the_same_bytes_at_once_elsewhere_and_unwatched(
    reproduction: Reproduction, repo: Path, tmp_path: Path
) -> None:
    """Two at once: the same cell here, and without the emulator's counts from another path."""
    copy = tmp_path / "another path" / "checkout"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "results", "report", "__pycache__", ".*cache"
    )
    shutil.copytree(repo, copy, ignore=ignored, symlinks=True)
    unwatched = ("--instruments", "observer,profiler")
    here = inv(repo, "run", "--seed", 1, "--results", tmp_path / "here")
    there = inv(copy, "run", "--seed", 1, "--results", tmp_path / "there", *unwatched)
    expected = reproduction.load_record(1)
    first = reproduction.root / "runs" / expected["run_id"]
    for process in (here, there):
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        directory = Path(stdout.splitlines()[-1])
        # Sharper than the record: stamps of the kernel's own log tell of a difference long before
        # a request does.
        for name in RAW:
            assert (directory / name).read_bytes() == (first / name).read_bytes(), name
        record = json.loads((directory / "record.json").read_text())
        if process is here:
            assert comparable(record) == comparable(expected)
        else:
            assert record["truth"] is None
            assert record["agreement"]["agrees"]


def test_the_instruments_agree(reproduction: Reproduction) -> None:
    for record in reproduction.records():
        agreement = record["agreement"]
        assert agreement["agrees"], agreement["differences"]
        counted = agreement["user_saves"]
        assert counted["observer"] == counted["truth"] > 0
        assert counted["profiler"] + agreement["profiler_missed"] == counted["truth"]
        saves = record["truth"]["saves"]["target"]
        assert saves["bytes"] == saves["count"] * 32 * record["cell"]["machine"]["vlen_bits"] // 8
        totals = record["observer"]["totals"]
        assert totals["undiscarded_saves"] == totals["compute_saves"] + totals["spin_saves"]
        assert totals["user_saves"] == totals["undiscarded_saves"] + totals["discarded_saves"]


def test_vlen_and_policy_are_checked_before_anything_is_built(repo: Path, tmp_path: Path) -> None:
    for words, code, said in (
        (["--vlen", "384"], 2, "128"),
        (["--policy", "vhot", "--scope", "half"], 2, "partial or all"),
        (["--policy", "fastest"], 2, "baseline"),
        (["--model", "gpt"], 2, "banana-tiny"),
    ):
        process = inv(repo, "run", *words, "--results", tmp_path / "none")
        _, stderr = process.communicate()
        assert process.returncode == code
        assert said in stderr
        assert len(stderr.strip().splitlines()) == 1


def test_ctrl_c_leaves_nothing_running_and_the_run_void(repo: Path, tmp_path: Path) -> None:
    process = inv(repo, "run", "--seed", 3, "--results", tmp_path)
    console = wait_for_console(tmp_path)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert not stdout
    assert not users_of(console)
    assert not list(tmp_path.glob("runs/*/record.json"))
    assert list(tmp_path.glob("void/*/void.txt"))


def wait_for_console(root: Path) -> Path:
    for _ in range(1200):
        for console in root.glob("partial/*/console.log"):
            if re.search("bananaos: run", console.read_text(errors="replace")):
                return console
        time.sleep(0.1)
    raise AssertionError("the cell did not start within two minutes")

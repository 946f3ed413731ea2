"""Cells on the workers of a real Dask scheduler; the board behind them is scripted.

The library is an optional extra: it is installed for these tests alone, beside this environment,
from its own lock.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_board import FakeBoard, definitions

from board.base import opened
from board.dask_board import dask_board
from board.runner import reproduce
from schemas.record import comparable, read_records
from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.paths import REPO

pytestmark = pytest.mark.boot

PROGRAM = Path(__file__).with_name("fake_dask.py")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which programs find the library."""
    place = tmp_path_factory.mktemp("dask")
    words = ["install", "--quiet", "--require-hashes", "--no-deps", "--target", str(place)]
    lock = str(REPO / "requirements-dask.txt")
    subprocess.run([sys.executable, "-m", "pip", *words, "--requirement", lock], check=True)
    return {**os.environ, "PYTHONPATH": f"{place}:{REPO}", "PYTHONWARNINGS": "ignore"}


class Cluster:
    """A scheduler on this machine and its workers."""

    def __init__(
        self, environment: dict[str, str], place: Path, scheduler: dict[str, str] | None = None
    ) -> None:
        self.environment = scheduler or environment
        self.place = place
        self.processes: list[subprocess.Popen[bytes]] = []
        told = place / "scheduler.json"
        words = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show"]
        self._start("-m", "distributed.cli.dask_scheduler", *words, "--scheduler-file", str(told))
        eventually(told.exists)
        self.address = json.loads(told.read_text())["address"]
        self.environment = environment

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.place / "cluster.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *words], env=self.environment, stdout=log, stderr=log,
                    cwd=self.place,
                )
            )  # fmt: skip
        return self.processes[-1]

    def worker(self, seconds: float = 0.0, kernel: str = "1") -> subprocess.Popen[bytes]:
        """Add a worker of two threads."""
        return self._start(str(PROGRAM), "worker", self.address, str(seconds), kernel)

    def reproduction(self, results: Path) -> subprocess.Popen[str]:
        """Start a reproduction of fake_board's experiments."""
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), "reproduce", self.address, str(results),
             str(definitions_file(self.place))],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def reproduce(self, results: Path) -> tuple[int, str]:
        """Run one to its end; returns exit code and standard error."""
        with self.reproduction(results) as process:
            _, err = process.communicate()
        assert "Traceback" not in err, err
        return process.returncode, err

    def close(self) -> None:
        """End all of it, the scheduler last."""
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)


def definitions_file(place: Path) -> Path:
    return definitions(place).path


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def cluster(environment: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(environment, tmp_path)) as cluster:
        yield cluster


def names(results: Path, kind: str) -> list[str]:
    folder = results / kind
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_two_workers_give_the_results_of_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    cluster.worker()
    cluster.worker()
    assert cluster.reproduce(tmp_path / "there")[0] == 0
    reproduce([], FakeBoard(), tmp_path / "here", 1, False, definitions=definitions(tmp_path))
    there = [comparable(record) for record in read_records(tmp_path / "there")]
    assert there == [comparable(record) for record in read_records(tmp_path / "here")] != []


def test_nobody_there(cluster: Cluster, tmp_path: Path) -> None:
    code, err = cluster.reproduce(tmp_path / "results")
    assert code == 3
    assert f"the scheduler has no worker; start some: dask worker {cluster.address}" in err
    cluster.processes[0].kill()
    cluster.processes[0].wait()
    code, err = cluster.reproduce(tmp_path / "results")
    assert code == 3 and "no scheduler answers within 15 s; start one: dask scheduler" in err
    assert not (tmp_path / "results").exists()


def test_a_scheduler_outside_of_a_checkout(environment: dict[str, str], tmp_path: Path) -> None:
    place, _ = environment["PYTHONPATH"].split(":")
    bare = {**environment, "PYTHONPATH": place}
    with contextlib.closing(Cluster(environment, tmp_path, scheduler=bare)) as cluster:
        cluster.worker()
        code, err = cluster.reproduce(tmp_path / "r")
    assert code == 3
    assert "the scheduler or a worker cannot use this checkout: " in err
    assert "start both in a checkout, with PYTHONPATH=." in err
    assert names(tmp_path / "r", "void") == []


def test_another_checkout_runs_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.worker(kernel="7")
    code, err = cluster.reproduce(tmp_path / "r")
    assert code == 3
    assert "a worker's kernel is not the cell's" in err and "check out the same commit" in err
    assert names(tmp_path / "r", "runs") == []


def test_interrupted_it_takes_its_cells_back_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    slow = cluster.worker(seconds=1e6)
    results = tmp_path / "results"
    with cluster.reproduction(results) as process:
        eventually(lambda: len(names(results, "partial")) == 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert names(results, "runs") == [] and len(names(results, "void")) == 2
    slow.terminate()
    slow.wait(WAIT_S)  # it would not end if a cell still ran there
    cluster.worker()
    assert cluster.reproduce(results)[0] == 0
    assert len(names(results, "runs")) == 3


def test_a_lost_worker_s_cell_goes_to_another(cluster: Cluster, tmp_path: Path) -> None:
    lost = cluster.worker(seconds=1e6)
    results = tmp_path / "results"
    with cluster.reproduction(results) as process:
        eventually(lambda: len(names(results, "partial")) == 2)
        cluster.worker()
        lost.kill()
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert len(names(results, "runs")) == 3 and names(results, "void") == []


def test_only_the_virtual_board_s_cells_move() -> None:
    with pytest.raises(UsageError, match="board f3: only cells of the virtual one can move"):
        opened("f3", dask="tcp://localhost:1")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(EnvironmentUnfit, match="requirements-dask"), dask_board("tcp://x:1"):
        pass

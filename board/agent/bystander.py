"""Scalar work beside the server: what does a policy take from it?

Promise: the threads run from before the window to after it, and how far each one got and how much
CPU time it had is read at both edges.
Limit: they never sleep, so what is measured is a share of the CPUs, not a latency.
"""

import contextlib
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from board.agent import system

ROUNDS = struct.Struct("=Q")


class Bystanders:
    """`count` threads of the program; none of it happens when count is 0."""

    def __init__(
        self, count: int, program: str | None, reasons: list[str], say: Callable[[str], None]
    ) -> None:
        self._count = count
        self._program = program
        self._reasons = reasons
        self._say = say
        self._process: subprocess.Popen[str] | None = None
        self._file = Path()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run them for the block."""
        if not self._count:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="bystander-") as directory:
            self._file = Path(directory) / "rounds"
            try:
                self._start()
            except Exception as error:
                self._reasons.append("bystander-failed")
                self._say(f"bystander: {error}")
            try:
                yield
            finally:
                if self._process is not None:
                    self._process.kill()
                    self._process.wait()

    def _start(self) -> None:
        assert self._program is not None, "the board was given no bystander"
        self._process = subprocess.Popen(
            [self._program, str(self._count), os.fspath(self._file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"ended with {self._process.wait()}")

    def look(self) -> dict[str, Any] | None:
        """When it is (CLOCK_MONOTONIC), and each thread's rounds and CPU time so far."""
        if self._process is None or self._process.poll() is not None:
            return None
        # The first thread waits; the others were made in the order of their counters.
        rows = system.threads(self._process.pid)[1:]
        rounds = ROUNDS.iter_unpack(self._file.read_bytes())
        return {
            "at_ns": time.monotonic_ns(),
            "threads": [
                {"rounds": done, "run_ns": row["run_ns"], "wait_ns": row["wait_ns"]}
                for (done,), row in zip(rounds, rows, strict=True)
            ],
        }

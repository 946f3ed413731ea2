"""Runs in the guest, as root, on one hart: the same work with and without each instrument.

Promise: the work is kernel/vstate_profiler/pingpong.c, which spins nowhere and switches a known
number of times; with one hart online and instructions as the clock, a difference in time is a
difference in instructions executed, whoever executed them.
Limit: one hart, one kind of work; writes /results/overhead.json.
"""

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PAYLOAD = Path("/payload")
ROUNDS = 2000


def timed_ns(begin: Callable[[int], object], end: Callable[[object], None]) -> int:
    """Return the virtual nanoseconds of one ping-pong between `begin(pid)` and `end`."""
    work = subprocess.Popen(
        [PAYLOAD / "pingpong", str(ROUNDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert work.stdin is not None and work.stdout is not None
    begun = begin(int(work.stdout.readline()))
    start_ns = time.monotonic_ns()
    work.stdin.write("x")
    work.stdin.flush()
    work.stdout.readline()
    taken_ns = time.monotonic_ns() - start_ns
    end(begun)
    work.stdin.write("x")
    work.stdin.flush()
    work.wait()
    return taken_ns


def observe(pid: int) -> object:
    """Start the observer; returns when it counts."""
    observer = subprocess.Popen(
        [PAYLOAD / "vstate_observer", "--pid", str(pid), "--out", "/tmp/observer.json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert observer.stdout is not None
    while observer.stdout.readline() != "ready\n":
        pass
    return observer


def stop(observer: object) -> None:
    """End the observer in order."""
    assert isinstance(observer, subprocess.Popen)
    observer.send_signal(signal.SIGINT)
    observer.wait()


def main() -> None:
    """Measure every arm and write the result."""
    sys.path.insert(0, str(PAYLOAD))
    load = importlib.import_module("load")  # kernel/vstate_profiler/load.py

    def profile(pid: int) -> object:
        load.load(PAYLOAD / "vstate_profiler.ko", PAYLOAD / "sites.json", pid)
        load.control("start")
        return None

    def unprofile(_: object) -> None:
        load.control("stop")
        load.unload()

    arms = {
        "none": timed_ns(lambda pid: None, lambda _: None),
        "observer": timed_ns(observe, stop),
        "profiler": timed_ns(profile, unprofile),
    }
    document = {"switches": 2 * ROUNDS, "taken_ns": arms}
    Path("/results/overhead.json").write_text(json.dumps(document) + "\n")


main()

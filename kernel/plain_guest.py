"""Runs in the guest, as root: one window of all instruments over a workload whose split is known.

    plain_guest.py INSTRUMENTS.json MODE THREADS ROUNDS MILLISECONDS

The window is the agent's own (board/agent/instruments.py).  The workload's modes are those of
kernel/vstate_observer/workload.c; whoever computes or spins has another process on its hart, so
that it is preempted.  Writes the instruments' documents and reasons.json to /results.
Standard library only.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, "/payload")
from board.agent.group import Group
from board.agent.instruments import Instruments

WORKLOAD = "/payload/workload"
UNDISTURBED = "block"


@contextlib.contextmanager
def contention(mode: str) -> Iterator[None]:
    """Have another process compute while the block runs; not for a mode that only sleeps."""
    if mode == UNDISTURBED:
        yield
        return
    hog = subprocess.Popen([WORKLOAD, "hog"])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()


def main(tools: str, mode: str, threads: str, rounds: str, milliseconds: str) -> None:
    """Open the window while the target sleeps, let it work, close the window when it sleeps."""
    go = Path("/tmp/plain-go")
    os.mkfifo(go)
    target = subprocess.Popen([WORKLOAD, mode, go.as_posix(), threads, rounds, milliseconds])
    asleep = [WORKLOAD, "asleep", str(target.pid), str(int(threads) + 1)]
    subprocess.run(asleep, check=True)
    reasons: list[str] = []
    told = json.loads(Path(tools).read_text())
    group = Group(target.pid)
    instruments = Instruments(told, group, target.pid, Path("/results"), reasons, print)
    with instruments.ready(), go.open("r+b", buffering=0) as bytes_in, instruments.window():
        # Thawed, the threads go back to where they slept; before that a byte would save them it.
        subprocess.run(asleep, check=True)
        with contention(mode):
            bytes_in.write(b"\0" * int(threads))
            subprocess.run(asleep, check=True)
    target.kill()
    target.wait()
    Path("/results/reasons.json").write_text(json.dumps(reasons) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs in the guest, as root: one window of all three instruments over a workload that is known.

    guest_three_counts.py INSTRUMENTS.json WORKLOAD MODE THREADS ROUNDS MILLISECONDS OUT

As the agent does it for a run (board/agent/instruments.py), with another process on the hart so
that there are preemptions.  Writes the instruments' documents and reasons.json.  Standard library.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, "/payload")
from board.agent.instruments import Instruments


def main(tools: str, workload: str, mode: str, threads: str, *rest: str) -> None:
    """Open the window while the target sleeps, let it work, close the window when it sleeps."""
    rounds, milliseconds, out = rest
    go = Path("/tmp/three-go")
    os.mkfifo(go)
    target = subprocess.Popen([workload, mode, go.as_posix(), threads, rounds, milliseconds])
    asleep = [workload, "asleep", str(target.pid), str(int(threads) + 1)]
    subprocess.run(asleep, check=True)
    reasons: list[str] = []
    instruments = Instruments(
        json.loads(Path(tools).read_text()), target.pid, Path(out), reasons, print
    )
    with instruments.ready(), instruments.window():
        hog = subprocess.Popen([workload, "hog"])
        go.write_bytes(b"\0" * int(threads))
        subprocess.run(asleep, check=True)
        hog.kill()
        hog.wait()
    target.kill()
    target.wait()
    (Path(out) / "reasons.json").write_text(json.dumps(reasons) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

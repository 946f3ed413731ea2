"""What each instrument costs at a context switch, in instructions: a table, measured in one boot.

Promise: figures are measured in this call, on the virtual board, with one hart and no spinning
(kernel/overhead_guest.py); they are the same in each call as long as kernel and instruments are.
Limit: a switch whose save is of registers that the kernel had discarded, on one hart; on a board
the same difference is in time and depends on caches.
"""

import json
import tempfile
from pathlib import Path

from board.virtual.boot import boot
from board.virtual.guest import agent_failed
from board.virtual.machine import default_machine
from board.virtual.tools import Tools
from toolchain.paths import REPO
from toolchain.recipe import build

GUEST = REPO / "kernel" / "overhead_guest.py"


def overhead() -> None:
    """Print the table; raises RunFailed when the guest's program fails."""
    machine = default_machine({"parked_harts": 0, "memory_mib": 512})
    with tempfile.TemporaryDirectory(prefix="bananaos-overhead-") as name:
        scratch = Path(name)
        tools = Tools.of(["observer", "profiler"], scratch)
        directory = scratch / "boot"
        done = boot(
            machine,
            seed=1,
            payload={
                **tools.payload,
                "overhead_guest.py": GUEST,
                "pingpong": build("kernel/pingpong") / "pingpong",
            },
            script="#!/bin/sh\nexec python3 /payload/overhead_guest.py\n",
            directory=directory,
            deadline_s=600,
        )
        if done.exit_code:
            raise agent_failed(done.exit_code, directory)
        found = json.loads((directory / "overhead.json").read_text())
    per_switch = {
        arm: taken_ns / 2**machine.icount_shift / found["switches"]
        for arm, taken_ns in found["taken_ns"].items()
    }
    print(f"{found['switches']} context switches, instructions for each")
    for arm, instructions in per_switch.items():
        extra = instructions - per_switch["none"]
        print(f"{arm:10} {instructions:8.0f}   {f'+{extra:.0f}' if arm != 'none' else ''}")

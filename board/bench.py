"""What the virtual board costs the host: figures to print, never a test.

Promise: every figure is measured in this call; ratios compare runs of the same call.
Limit: figures of one host at one moment; another load on it changes them.
"""

import concurrent.futures
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import schemas
from board.cell import Definitions, Overrides, plan_run
from board.virtual import guest
from board.virtual.board import VirtualBoard
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from toolchain.recipe import build
from toolchain.say import say

AGENT_READY = """#!/bin/sh
cd /payload && busybox tar -x -f agent.tar && python3 -m board.agent --help >/results/help
"""


def bench() -> None:
    """Print boot time, cells per hour for one and two jobs, CPU cost, and the client's cost."""
    with tempfile.TemporaryDirectory(prefix="bananaos-bench-") as scratch:
        root = Path(scratch)
        _boot(root / "boot")
        board, definitions = VirtualBoard(), Definitions.read()
        cells = [
            plan_run(definitions, Overrides(seed=seed, concurrency=2), board).cell
            for seed in (1, 2, 3, 4)
        ]
        one_s = _timed(cells[:2], 1, root / "one")
        two_s = _timed(cells, 2, root / "two") / 2  # twice the cells
        print(f"cells per hour, 1 job     {7200 / one_s:8.1f}")
        print(f"cells per hour, 2 jobs    {7200 / two_s:8.1f}   ({one_s / two_s:.2f} times)")
        _client(root / "one" / "0")


def _boot(directory: Path) -> None:
    agent = {"agent.tar": build("board/agent") / "agent.tar"}
    machine = default_machine()
    done = boot(
        machine, seed=1, payload=agent, script=AGENT_READY, directory=directory, deadline_s=600
    )
    virtual_s = _virtual_s(directory)
    print(f"boot to agent, wall       {done.host_wall_s:8.1f} s   (power-off included)")
    print(f"boot to agent, virtual    {virtual_s:8.1f} s")


def _timed(cells: Sequence[Mapping[str, Any]], jobs: int, root: Path) -> float:
    """Run the cells with `jobs` at a time; return the wall seconds of all of them."""
    say(f"bench: {len(cells)} cells, {jobs} at a time")
    started_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(
                guest.run_cell, cell, root / str(n), deadline_s=1800, cancel=threading.Event()
            )
            for n, cell in enumerate(cells)
        ]
        facts = [each.result() for each in running]
    wall_s = time.monotonic() - started_s
    cpu_s = sum(each["host_cpu_s"] for each in facts)
    virtual_s = sum(_virtual_s(root / str(n)) for n in range(len(cells)))
    print(f"host CPU seconds per cell {cpu_s / len(cells):8.1f}")
    print(f"host CPU s / virtual s    {cpu_s / virtual_s:8.2f}")
    return wall_s


def _client(directory: Path) -> None:
    """Print what the load generator itself cost in the guest, per streamed token."""
    result = schemas.read(directory / "loadgen.json", "loadgen")
    tokens = sum(request["output_tokens"] for request in result["requests"])
    client = result["client"]
    cpu_ms = 1000 * (client["cpu_user_s"] + client["cpu_system_s"])
    print(f"loadgen, virtual CPU ms per streamed token {cpu_ms / tokens:.2f}")


def _virtual_s(directory: Path) -> float:
    """The virtual time at which the guest powered off."""
    stamps = re.findall(r"^\[ *([\d.]+)\]", (directory / "console.log").read_text(), re.MULTILINE)
    return float(stamps[-1])

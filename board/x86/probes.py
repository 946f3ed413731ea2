"""What is measured once beside the runs: the state's size and cost, and what it adds to a switch.

    results/x86/<board>/xstate.json, switch_bench.json     this processor, in the container
    results/x86/virtual/switch_bench-<VLEN>.json           the virtual board, in instructions

Promise: each file is checked against its schema and written whole.  The virtual board's are the
same for everybody.
Limit: what is there of x86 is not measured again, by whichever programs it was made: remove the
file for that.  The first boot of the virtual board needs its kernel, a quarter of an hour.
"""

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import schemas
from board.virtual.boot import boot
from board.virtual.guest import agent_failed
from board.virtual.machine import Machine, default_machine
from board.x86.board import ContainerBoard
from toolchain import cache
from toolchain.fetch import sha256_file
from toolchain.recipe import build
from toolchain.say import say

FOLDER = "x86"
PROBES = {
    "xstate": ["/payload/xstate_probe", "--out", "/results/xstate.json"],
    "switch_bench": ["/payload/switch_bench", "--out", "/results/switch_bench.json"],
}
"""Schema and file name -> command line in the container."""
VLENS = (128, 256, 512, 1024)
MEMORY_MIB = 384
ROUNDS, REPEATS = 100, 101
"""On the virtual board: enough for an interval of some twenty instructions."""
DEADLINE_S = 900.0


def measure(board: ContainerBoard, results: Path) -> None:
    """Run the probes that have left no file yet; raises EnvironmentUnfit and InvalidData."""
    folder = results / FOLDER / board.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, argv in PROBES.items():
        out = folder / f"{name}.json"
        if out.exists():
            schemas.read(out, name)
            continue
        say(f"{name}: measuring on {board.name} (some seconds)")
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder) as scratch:
            Path(scratch).chmod(0o755)
            board.probe(argv, Path(scratch), threading.Event())
            document = schemas.read(Path(scratch) / out.name, name)
        schemas.write(out, document, name)


def measure_virtual(results: Path) -> None:
    """Put the virtual board's switch_bench, at each VLEN, into the results."""
    folder = results / FOLDER / "virtual"
    folder.mkdir(parents=True, exist_ok=True)
    for vlen_bits in VLENS:
        schemas.write(
            folder / f"switch_bench-{vlen_bits}.json", on_virtual_board(vlen_bits), "switch_bench"
        )


def on_virtual_board(vlen_bits: int) -> Any:
    """The switch_bench of a virtual board; measured once for each, then cached by content.

    One hart runs, so the machine's instruction counter is that hart's.
    """
    machine = default_machine({"vlen_bits": vlen_bits, "memory_mib": MEMORY_MIB, "parked_harts": 0})
    inputs = {
        "machine": machine.as_cell(),
        "kernel": sha256_file(build("kernel/image") / "Image"),
        "initramfs": sha256_file(build("board/initramfs") / "initramfs.cpio"),
        "switch_bench": sha256_file(build("kernel/switch-bench-riscv64") / "switch_bench"),
        "rounds": ROUNDS,
        "repeats": REPEATS,
    }
    entry = cache.entry("switch-bench-virtual", inputs, lambda out: _boot(machine, out))
    return schemas.read(entry / "switch_bench.json", "switch_bench")


def _boot(machine: Machine, out: Path) -> None:
    say(f"switch_bench: measuring on the virtual board, VLEN {machine.vlen_bits} (half a minute)")
    with tempfile.TemporaryDirectory(prefix="bananaos-switch-") as scratch:
        directory = Path(scratch)
        done = boot(
            machine,
            seed=1,
            payload={"switch_bench": build("kernel/switch-bench-riscv64") / "switch_bench"},
            script="#!/bin/sh\nexec /payload/switch_bench --out /results/switch_bench.json "
            f"--rounds {ROUNDS} --repeats {REPEATS}\n",
            directory=directory,
            deadline_s=DEADLINE_S,
        )
        if done.exit_code != 0:
            raise agent_failed(done.exit_code, directory)
        schemas.read(directory / "switch_bench.json", "switch_bench")
        shutil.copyfile(directory / "switch_bench.json", out / "switch_bench.json")

"""QEMU's arguments for the quantum plugin (quantum.c), made from the kernel that will run.

Promise: the quantum bounds the harts' turns from the first instruction of the second hart to the
last of the last but one; what the guest does follows from machine, seed and payload as ever.
Limit: for the kernel built here, whose map is at hand: another one boots with the timer always on,
as it was before, and takes the host longer.
"""

from pathlib import Path

from kernel.sites import symbol_list
from toolchain.errors import InvalidData
from toolchain.recipe import build

INSIDE = "/in/board/quantum/quantum.so"
MONITOR = "/build/qmp"
TIMER = "/objects/timer"  # machine.py
LOADED_AT = 0x80200000
"""Where OpenSBI's next stage is loaded on QEMU's virt machine: the physical address of _start."""


def arguments(kernel: Path) -> list[str]:
    """Return QEMU's arguments; kernel is the folder of Image and System.map."""
    # A starting hart runs at physical addresses still, a stopping one at virtual ones.
    first, start, stop = _symbols(
        kernel / "System.map", "_start", "secondary_start_sbi", "arch_cpu_idle_dead"
    )
    values = [
        f"start={start - first + LOADED_AT:#x}",
        f"stop={stop:#x}",
        f"qmp={MONITOR}",
        f"timer={TIMER}",
    ]
    return [
        *("-qmp", f"unix:{MONITOR},server=on,wait=off"),
        *("-plugin", ",".join([INSIDE, *values])),
    ]


def binds() -> dict[str, Path]:
    """Return what QEMU must see of the host, building the plugin if need be."""
    return {INSIDE: build("board/quantum") / "quantum.so"}


def _symbols(path: Path, *names: str) -> list[int]:
    found = {one.name: one.address for one in symbol_list(path) if one.name in names}
    if missing := [name for name in names if name not in found]:
        raise InvalidData(f"{path}: has no {missing[0]}; is the list of symbols complete?")
    return [found[name] for name in names]

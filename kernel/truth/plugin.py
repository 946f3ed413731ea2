"""QEMU's arguments for the truth plugin, made from the kernel that will run.

Promise: `arguments(kernel, sites, spins, out)` is a pure function of the kernel's code and types
(kernel/sites.py) and the program's waiting loops; nothing of the layout is assumed.
Limit: the addresses are the linked ones: for kernels that do not move at boot (no KASLR).  QEMU
separates plugin arguments by commas, so `out` must not have one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel.sites import Kernel, Site
from toolchain.recipe import build

INSIDE = "/in/kernel/truth/truth.so"
"""Where `binds` puts the plugin in the pinned tree."""
SWITCH = "__switch_to"


def arguments(
    kernel: Kernel, sites: Sequence[Site], spins: Iterable[tuple[int, int]], out: str
) -> list[str]:
    """Return QEMU's command-line arguments.

    spins are half-open address ranges of waiting loops in the target; out is the path QEMU writes
    truth.schema.json to.
    """
    values = [
        f"out={out}",
        f"switch={kernel.need(SWITCH):#x}",
        f"tgid={kernel.btf.offset_bytes('task_struct', 'tgid'):#x}",
        f"kernel={kernel.need('_start'):#x}-{kernel.need('_end'):#x}",
        *(f"site={site.kind}:{site.role}:{site.state}:{_accesses(site)}" for site in sites),
        *(f"spin={start:#x}-{end:#x}" for start, end in spins),
    ]
    return ["-plugin", ",".join([INSIDE, *values])]


def _accesses(site: Site) -> str:
    start = int(site.address, 16)
    return ".".join(f"{start + offset:#x}" for offset in site.access_offsets_bytes)


def binds() -> dict[str, Path]:
    """Return what QEMU must see of the host, building the plugin if need be."""
    return {INSIDE: build("kernel/truth") / "truth.so"}

"""Instruments, scheduler and bystander on the virtual board: what guest and QEMU get of them.

Promise: a run with `truth` and one without give the guest the same bytes: the plugin watches from
outside, and the guest's marks mean nothing without it.
Limit: addresses are those of the kernel and the llama-server that are built here, unless others are
named.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernel import sites, spin_ranges
from kernel.truth import plugin
from toolchain.fetch import sha256_file
from toolchain.paths import REPO
from toolchain.recipe import build

LOADER = REPO / "kernel" / "vstate_profiler" / "load.py"
TRUTH = "/out/truth.json"
FILES = {
    "observer": ("kernel/vstate-observer", "vstate_observer"),
    "profiler": ("kernel/vstate-profiler", "vstate_profiler.ko"),
    "truth": ("kernel/truth", "truth.so"),
    "scheduler": ("sched_ext/scx-vstate", "scx_vstate"),
    "bystander": ("board/bystander", "bystander"),
}
"""Tool -> the artifact that is its heart."""
INSTRUMENTS = {"observer", "profiler", "truth"}


def artifacts(tools: Sequence[str]) -> dict[str, str]:
    """Build the tools; return name -> sha256 (part of a cell's `inputs`)."""
    return {name: sha256_file(_file(name)) for name in tools}


def _file(name: str) -> Path:
    artifact, file = FILES[name]
    return build(artifact) / file


@dataclass(frozen=True)
class Tools:
    """payload: name below /payload -> host file; qemu: arguments; binds: what these refer to."""

    payload: Mapping[str, Path]
    qemu: Sequence[str] = ()
    binds: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tools: Sequence[str],
        scratch: Path,
        *,
        spins: Sequence[tuple[int, int]] | None = None,
        kernel: sites.Kernel | None = None,
        module: Path | None = None,
    ) -> "Tools":
        """Return what a run with these tools needs; writes some files below `scratch`.

        spins: the target's waiting loops (default: llama-server's).  kernel, module: of another
        kernel than the one built here.
        """
        spins = server_spins() if spins is None else spins
        kernel = kernel or our_kernel()
        payload: dict[str, Path] = {}
        told: dict[str, object] = {}
        for name in ("scheduler", "bystander"):
            if name in tools:
                file = FILES[name][1]
                payload[file] = _file(name)
                told[name] = f"/payload/{file}"
        if set(tools) & INSTRUMENTS:
            payload["mark"] = build("kernel/truth") / "mark"
            told["mark"] = "/payload/mark"
        if "observer" in tools:
            payload["vstate_observer"] = _file("observer")
            told["observer"] = "/payload/vstate_observer"
            told["spin"] = [f"{start:#x}-{end:#x}" for start, end in spins]
        if "profiler" in tools:
            payload["vstate_profiler.ko"] = module or _file("profiler")
            payload["load.py"] = LOADER
            payload["sites.json"] = scratch / "sites.json"
            payload["sites.json"].write_text(json.dumps(sites.document(kernel), indent=1) + "\n")
            told["profiler"] = {
                "module": "/payload/vstate_profiler.ko",
                "sites": "/payload/sites.json",
                "loader": "/payload/load.py",
            }
        payload["tools.json"] = scratch / "tools.json"
        payload["tools.json"].write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
        if "truth" not in tools:
            return cls(payload)
        return cls(
            payload,
            plugin.arguments(kernel, sites.find(kernel), spins, TRUTH),
            plugin.binds(),
        )


@functools.cache
def our_kernel() -> sites.Kernel:
    """The kernel built here, for its save sites."""
    image = build("kernel/image")
    return sites.from_image(image / "Image", image / "System.map")


@functools.cache
def server_spins() -> list[tuple[int, int]]:
    """The address ranges of llama-server in which it only waits."""
    loops = spin_ranges.spin_loops(build("llama.cpp/server-riscv64") / "llama-server")
    return [span for loop in loops for span in loop.ranges]

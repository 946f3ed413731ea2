"""A plain vector workload under all three instruments, at every VLEN: the control arm of E3.

Promise: the same instructions at every VLEN, and a split of saves that is known beforehand
(kernel/vstate_observer/workload.c): what a vector length changes here is the kernel's doing and not
that of a library that chooses other routines, as ggml does.  Deterministic: the same figures for
everybody.
Limit: one hart, no llama-server.  No cell of the experiments: no requests, no tokens.

    python -m kernel.plain            # the table of docs/split.md; some minutes
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from board.agreement import agreement
from board.virtual.boot import boot
from board.virtual.machine import default_machine, vlens
from board.virtual.tools import Tools
from kernel.spin_ranges import spin_loops
from toolchain.errors import ArtifactError, InvalidData
from toolchain.paths import REPO
from toolchain.recipe import build

INSTRUMENTS = ("observer", "profiler", "truth")
GUEST = "kernel/plain_guest.py"
AGENT = tuple(
    f"board/{name}.py"
    for name in ("__init__", "agent/__init__", "agent/group", "agent/held", "agent/instruments")
)
DEADLINE_S = 1800.0
THREADS = 2
HEADER = (
    "work", "VLEN", "observer", "profiler + missed", "truth", "compute", "spin", "discarded",
    "bytes per save, counted", "32 * VLEN / 8",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What each of the THREADS threads does: rounds of it, milliseconds for each part of one."""

    rounds: int
    milliseconds: int


MODES = {"compute": Work(0, 60), "block": Work(20, 0), "mixed": Work(4, 20)}


def payload() -> dict[str, Path]:
    """Return the files that plain_guest.py needs beside the instruments."""
    files = {name: REPO / name for name in (GUEST, *AGENT)}
    return {**files, "workload": build("kernel/observer-workload") / "workload"}


def spins() -> list[tuple[int, int]]:
    """Return the address ranges of the workload's waiting loop."""
    loops = spin_loops(build("kernel/observer-workload") / "workload", ["spin_until"])
    return [span for loop in loops for span in loop.ranges]


def command(mode: str, work: Work | None = None) -> str:
    """Return the guest's shell command for a window over this mode."""
    work = work or MODES[mode]
    return (
        f"python3 /payload/{GUEST} /payload/tools.json {mode} {THREADS} {work.rounds} "
        f"{work.milliseconds}"
    )


def read(directory: Path) -> dict[str, Any]:
    """Return instrument -> document, and `agreement`; raises InvalidData for what is unusable."""
    found = {name: schemas.read(directory / f"{name}.json", name) for name in INSTRUMENTS}
    problems = json.loads((directory / "reasons.json").read_text())
    for name, document in found.items():
        objections = (*document.get("problems", []), *document.get("invalid_reasons", []))
        problems += [f"{name}: {objection}" for objection in objections]
    if problems:
        raise InvalidData(f"{directory}: {'; '.join(problems)}")
    return {**found, "agreement": agreement(**found)}


def run(mode: str, vlen_bits: int, directory: Path) -> dict[str, Any]:
    """Boot, run one mode at one VLEN under all instruments; see `read`."""
    machine = default_machine({"parked_harts": 0, "memory_mib": 384, "vlen_bits": vlen_bits})
    with tempfile.TemporaryDirectory(prefix="bananaos-plain-") as scratch:
        used = Tools.of(INSTRUMENTS, Path(scratch), spins=spins())
        done = boot(
            machine,
            seed=1,
            payload={**used.payload, **payload()},
            script=f"#!/bin/sh\nexec {command(mode)}\n",
            directory=directory,
            deadline_s=DEADLINE_S,
            extra=used.qemu,
            binds=used.binds,
        )
    if done.exit_code:
        raise InvalidData(f"{directory}: the guest's program ended with {done.exit_code}")
    return read(directory)


def row(mode: str, vlen_bits: int, found: Mapping[str, Any]) -> str:
    """Return one row of the table."""
    agreed, totals = found["agreement"], found["observer"]["totals"]
    saves, stored = agreed["saves"], found["truth"]["saves"]["target"]
    cells = [
        mode,
        vlen_bits,
        saves["observer"],
        f"{saves['profiler']} + {agreed['profiler_missed']}",
        saves["truth"],
        *(totals[f"{kind}_saves"] for kind in ("compute", "spin", "discarded")),
        f"{stored['bytes'] / stored['count']:g}",
        32 * vlen_bits // 8,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def plain() -> None:
    """Print the table; raises InvalidData where the instruments do not agree."""
    print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|")
    for mode in MODES:
        for vlen_bits in vlens():
            with tempfile.TemporaryDirectory(prefix="bananaos-plain-") as directory:
                found = run(mode, vlen_bits, Path(directory))
            print(row(mode, vlen_bits, found), flush=True)
            if not found["agreement"]["agrees"]:
                raise InvalidData("; ".join(found["agreement"]["differences"]))


if __name__ == "__main__":
    try:
        plain()
    except ArtifactError as error:
        print(f"plain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

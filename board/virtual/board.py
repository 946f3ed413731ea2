"""The virtual board, as the runner sees it: artifacts, calibration, one cell at a time.

Promise: what a cell runs is exactly what its `inputs` name; two runs of a cell differ in nothing
that is compared.
Limit: an idealised machine (docs/calibration.md): its milliseconds are virtual and are never
compared with a board's.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from board.virtual import guest
from board.virtual.calibrate import calibration
from board.virtual.machine import Machine, default_machine
from board.virtual.tools import FILES, artifacts
from toolchain.errors import UsageError


class VirtualBoard:
    """QEMU's virt machine in deterministic mode (see machine.py, boot.py)."""

    name = "virtual"
    platform = "virtual"
    parallel = True
    instruments: Sequence[str] = ("observer", "profiler", "truth")
    most_threads = None

    @property
    def jobs(self) -> int:
        """One per processor that this process may use."""
        return len(os.sched_getaffinity(0))

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        """Return machine.toml's machine with `overrides`."""
        return default_machine(overrides).as_cell()

    def prepare(self, model: str, tools: Sequence[str]) -> dict[str, str]:
        """Build or fetch all a run needs; what is cached costs a checksum."""
        if unknown := [name for name in tools if name not in FILES]:
            raise UsageError(
                f"instrument {unknown[0]}: not on the virtual board, which has {', '.join(FILES)}"
            )
        return guest.artifacts(model) | artifacts(tools)

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return how parallel the cell's machine is, measuring it on first use."""
        return calibration(Machine(**cell["machine"]))

    def begin(self) -> None:
        """Nothing: each cell boots its own guest."""

    def run(
        self,
        cell: Mapping[str, Any],
        directory: Path,
        *,
        deadline_s: float,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        """Run the cell in a fresh guest."""
        return guest.run_cell(cell, directory, deadline_s=deadline_s, cancel=cancel)

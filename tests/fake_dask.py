"""The scripted board behind a real Dask scheduler, as programs for test_dask.py.

    python tests/fake_dask.py worker ADDRESS SECONDS_PER_CELL KERNEL
    python tests/fake_dask.py reproduce ADDRESS RESULTS EXPERIMENTS

KERNEL: a digit, of which the worker's kernel has the sha256.
"""

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fake_board import FakeBoard, slow

from board import dask_board
from board.cell import Definitions
from board.runner import reproduce
from toolchain.errors import ArtifactError

_cells = FakeBoard()


class ScriptedDaskBoard(dask_board.DaskBoard):
    """What the virtual board would build is made up; where cells run is not."""

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        return _cells.machine(overrides)

    def prepare(self, model: str, tools: Sequence[str]) -> dict[str, str]:
        return _cells.prepare(model, tools)

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        return _cells.calibration(cell)


def worker(address: str, seconds: str, kernel: str) -> int:
    """Be a worker of two threads until the scheduler ends."""
    cli = importlib.import_module("distributed.cli.dask_worker")
    board = FakeBoard(slow(float(seconds)))
    board.kernel = kernel * 64
    setattr(dask_board, "VirtualBoard", lambda: board)  # noqa: B010
    logging.disable(logging.CRITICAL)
    cli.main(
        [address, "--no-nanny", "--no-dashboard", "--nworkers", "1", "--nthreads", "2"],
        standalone_mode=False,
    )
    return 0


def run(address: str, results: str, experiments: str) -> int:
    """Reproduce on the scheduler's workers."""
    setattr(dask_board, "DaskBoard", ScriptedDaskBoard)  # noqa: B010
    try:
        with dask_board.dask_board(address) as board:
            known = Definitions.read(experiments=Path(experiments))
            return reproduce([], board, Path(results), None, False, definitions=known)
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit({"worker": worker, "reproduce": run}[sys.argv[1]](*sys.argv[2:]))

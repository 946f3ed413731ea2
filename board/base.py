"""What a board is to the runner, and how one is found by name.

Promise: the runner knows boards only through the Protocol here.
Limit: boards.toml says which names there are; each board's own module says how it works.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from board import boards
from toolchain.errors import InvalidData, UsageError

EMULATED_WARNINGS = ("hrtimer: interrupt took ",)
"""What the kernel of an emulated board says when a hart stood still in the middle of an interrupt,
for other harts' turns of the quantum or for the host: of the emulation, not of the run.  On a real
board the same line makes a run invalid."""


AGENT_INVALID = 4
"""The agent's exit code for an invalid run, whose files are all there."""
_TO_AGENT = ("machine", "concurrency", "load", "server", "scheduling", "bystanders")
_TAIL_LINES = 12


def for_agent(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent on a board is told of its cell: what it does.

    A cell that differs only in what watches from outside (truth) must be the same cell in there,
    to the last byte.
    """
    return {key: cell[key] for key in _TO_AGENT}


def tail(log: Path, if_empty: str) -> str:
    """The last lines of a log, indented for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"  | {line}" for line in lines or [f"({if_empty})"])


class RunFailed(InvalidData):
    """A cell, or another guest, could not be run to its end; a run is kept, as invalid, with this.

    reason: guest-panic, guest-oops, guest-rcu-stall, guest-oom, guest-timeout, qemu-killed,
        container-oom, container-timeout, board-timeout, sched-ext-missing, no-results or
        agent-failed.
    detail: what was seen, the console's last lines included.
    facts: what is known of the run all the same, for the record's environment.
    """

    def __init__(self, reason: str, detail: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.facts = facts or {}


class RunVoid(Exception):
    """A cell came to no end and says nothing: the board was restarted, or emptied, under it.

    It is run again.  reason: board-restarted, board-emptied or worker-lost.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")


class Board(Protocol):
    """A machine, real or virtual, that runs cells."""

    name: str
    platform: str
    """virtual, container-x86, emulated or board: what its numbers may be compared with."""
    parallel: bool
    """Whether cells may run on it side by side."""

    @property
    def jobs(self) -> int:
        """How many do if nobody says."""

    instruments: Sequence[str]
    """What can count on it."""

    @property
    def most_threads(self) -> int | None:
        """The server gets no more threads; None where the cell's number stands, whatever it is."""

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        """The cell's `machine`, or None for a real board; overrides, e.g. {"vlen_bits": 512}."""

    def prepare(self, model: str, tools: Sequence[str]) -> dict[str, str]:
        """Build or fetch all that a run with `model` and `tools` needs; the cell's `inputs`.

        tools: instruments, `scheduler`, `bystander`: what the cell asks for.

        May take half an hour the first time.
        """

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """How parallel the cell's machine is (calibration.schema.json), or None for a real board.

        Cached by content; may take minutes the first time.
        """

    def begin(self) -> None:
        """Get ready to run cells, once, before the first one: connect, ask, set up.

        Raises UsageError and EnvironmentUnfit.
        """

    def run(
        self,
        cell: Mapping[str, Any],
        directory: Path,
        *,
        deadline_s: float,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        """Run the cell and fill `directory` with its raw files.

        Those are agent.json, loadgen.json, a JSON file per instrument of the cell, and logs.
        Returns the facts about the host that go into the record's environment: host_cpu_s and
        host_wall_s, in seconds, `board` for one reached over SSH, `container` for a container.
        Called from several threads at once where the board is parallel.  Raises RunFailed (the run
        is kept as invalid), RunVoid (it is run again) and toolchain.command.Cancelled once `cancel`
        is set (it is void).
        """


def opened(
    name: str, *, yes: bool = False, dask: str = ""
) -> contextlib.AbstractContextManager[Board]:
    """The board called `name`, for the time of a with block, which leaves it as it was.

    yes: what is done as root on a real board is agreed to.  dask: address of the scheduler whose
    workers run the cells.  Raises UsageError naming those boards there are.
    """
    table = boards.table_of(name)
    if dask:
        if table["platform"] != "virtual":
            raise UsageError(f"--dask {dask}: board {name}: only cells of the virtual one can move")
        from board.dask_board import dask_board

        return dask_board(dask)
    # Imported late: a board's module needs more than a person who asks for --help has.
    if "ssh" in table:
        from board.ssh.board import SshBoard

        return SshBoard(boards.ssh_settings(name), yes=yes)
    if table["platform"] == "container-x86":
        from board.x86.board import container_board

        return contextlib.nullcontext(container_board(name))
    from board.virtual.board import VirtualBoard

    return contextlib.nullcontext(VirtualBoard())

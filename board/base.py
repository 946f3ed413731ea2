"""What a board is to the runner, and how one is found by name.

Promise: the runner knows boards only through the Protocol here.
Limit: boards.toml says which names there are; each board's own module says how it works.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import schemas
from toolchain.errors import UsageError
from toolchain.paths import REPO

BOARDS = REPO / "board" / "boards.toml"


class RunFailed(Exception):
    """A cell could not be run to its end; the run is kept, as invalid, with this reason.

    reason: guest-panic, guest-oops, guest-rcu-stall, guest-oom, guest-timeout, qemu-killed,
        container-oom, container-timeout, no-results or agent-failed.
    detail: what was seen, the console's last lines included.
    facts: what is known of the run all the same, for the record's environment.
    """

    def __init__(self, reason: str, detail: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.facts = facts or {}


class Board(Protocol):
    """A machine, real or virtual, that runs cells."""

    name: str
    platform: str
    """virtual, container-x86 or board: what its numbers may be compared with."""

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
        host_wall_s, in seconds, and of a container what it was.  Called from several threads at
        once.  Raises RunFailed (the run is kept as invalid) and toolchain.command.Cancelled once
        `cancel` is set (it is void).
        """


def board_names() -> Mapping[str, Mapping[str, str]]:
    """Name to title and platform of every board, from boards.toml."""
    boards: Mapping[str, Mapping[str, str]] = schemas.read_toml(BOARDS, "boards")["boards"]
    return boards


def get_board(name: str) -> Board:
    """The board called `name`; raises UsageError naming those there are."""
    known = board_names()
    if name not in known:
        raise UsageError(f"--board {name}: no such board; known: {', '.join(sorted(known))}")
    # Imported late: a board's module needs more than a person who asks for --help has.
    if known[name]["platform"] == "container-x86":
        from board.x86.board import container_board

        return container_board(name)
    from board.virtual.board import VirtualBoard

    return VirtualBoard()

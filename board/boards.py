"""The boards by name: board/boards.toml, and a file of the user's own.

Promise: what is returned is complete and checked; an unknown key, a bad value, a name that nobody
defines are each one line that names the file and the place.
Limit: whether the board is as the file says is for `./inv doctor` to find out.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from toolchain.errors import InvalidData, UsageError
from toolchain.paths import REPO, state_dir

BOARDS = REPO / "board" / "boards.toml"
VARIABLE = "BANANAOS_BOARDS"
"""Environment variable: a file of the same form, whose boards are added; it may redefine all but
the deterministic one."""


@dataclass(frozen=True)
class SshSettings:
    """A board reached over SSH, as its tables in boards.toml say; meanings: boards.schema.json."""

    name: str
    title: str
    platform: str
    address: str
    port: int
    user: str
    directory: str
    emulator: bool
    soc: str
    harts: int
    vlen_bits: int
    memory_mib: int
    disk_mib: int
    temperature_c: int
    cooling_s: int
    governors: str
    temperatures: str
    key: str | None = None

    @property
    def state(self) -> Path:
        """Where this host keeps what it knows of the board: its host key, module, command log."""
        return state_dir() / "boards" / self.name

    @property
    def destination(self) -> str:
        """USER@ADDRESS, or ADDRESS."""
        return f"{self.user}@{self.address}" if self.user else self.address


def board_tables() -> Mapping[str, Mapping[str, Any]]:
    """Name to content of every board; raises InvalidData and UsageError."""
    boards: dict[str, Mapping[str, Any]] = dict(schemas.read_toml(BOARDS, "boards")["boards"])
    own = os.environ.get(VARIABLE)
    if own:
        if not Path(own).is_file():
            raise UsageError(f"{VARIABLE}={own}: no such file; expected one like {BOARDS}")
        added = schemas.read_toml(Path(own), "boards")["boards"]
        if "virtual" in added:
            raise InvalidData(f"{own}: at $.boards.virtual: this board cannot be redefined")
        boards |= added
    return boards


def table_of(name: str) -> Mapping[str, Any]:
    """The table of the board called `name`; raises UsageError naming those there are."""
    known = board_tables()
    if name not in known:
        raise UsageError(f"--board {name}: no such board; known: {', '.join(sorted(known))}")
    return known[name]


def ssh_settings(name: str) -> SshSettings:
    """The settings of the board called `name`.

    Raises UsageError for a board that does not exist or is not reached over SSH.
    """
    table = table_of(name)
    if "ssh" not in table:
        reached = [name for name, other in board_tables().items() if "ssh" in other]
        raise UsageError(
            f"--board {name}: is not reached over SSH; expected one of {', '.join(sorted(reached))}"
        )
    flat = {**table["ssh"], **table["expect"], **table["limits"], **table["paths"]}
    return SshSettings(name=name, title=table["title"], platform=table["platform"], **flat)

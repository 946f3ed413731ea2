"""./inv bench's first table: a guest program that fails is named, with what it said.

Promise: its exit code and the console's last lines reach the person, in one error and no traceback
of a file that is not there.
Limit: the boot is made up here; the table itself is for ./inv bench.
"""

from pathlib import Path
from typing import Any

import pytest

from board.virtual.boot import Boot
from board.virtual.tools import Tools
from kernel import overhead
from toolchain.errors import InvalidData


def test_a_guest_program_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*_: object, directory: Path, **__: Any) -> Boot:
        directory.mkdir()
        (directory / "console.log").write_text("insmod: no such module\n")
        return Boot(exit_code=3, host_wall_s=1.0, host_cpu_s=1.0)

    monkeypatch.setattr(overhead, "boot", failing)
    monkeypatch.setattr(overhead, "build", lambda _: tmp_path)
    monkeypatch.setattr(Tools, "of", lambda *_: Tools({}))
    with pytest.raises(InvalidData, match=r"agent-failed: exit code 3\n.*insmod"):
        overhead.overhead()

"""README.md is held against the code: what it says is printed is printed somewhere.

Limit: that a message comes at the right time is for the tests of what prints it.
"""

import re

import pytest

from toolchain.paths import REPO

README = (REPO / "README.md").read_text()
ROOMS = ("analysis", "artifact", "board", "docker", "kernel", "llama.cpp", "sched_ext", "toolchain")


def _messages() -> list[str]:
    """The left column of the table of troubles: each message in its own backticks."""
    table = README.partition("## When something goes wrong")[2].partition("\n## ")[0]
    left = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [message for cell in left for message in re.findall(r"`([^`]+)`", cell)]


def _code() -> str:
    """All Python and shell of the rooms, with strings that are written in several pieces joined."""
    files = [path for room in ROOMS for path in sorted((REPO / room).rglob("*"))]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".sh")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


@pytest.mark.parametrize("message", _messages())
def test_a_message_of_the_table_is_printed_somewhere(message: str) -> None:
    assert message in _code()


def test_there_are_messages() -> None:
    assert len(_messages()) > 5

"""Asking before anything is changed on a board.

Promise: what is about to be done as root is listed, line by line, before it is done; without --yes
or a `y` typed at a terminal nothing of it happens.
Limit: the list is of this project's own doing; what an artifact does once it runs is in its docs.
"""

import sys
from collections.abc import Sequence

from toolchain.errors import UsageError
from toolchain.say import say


def require_consent(board: str, lines: Sequence[str], yes: bool) -> None:
    """Show the list and have it agreed to; raises UsageError otherwise."""
    say(f"board {board}: as root there, undone afterwards:")
    for line in lines:
        print(f"    {line}", file=sys.stderr)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"board {board}: nothing was done: pass --yes to agree to the list above")
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"board {board}: nothing was done")

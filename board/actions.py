"""`./inv board ACTION`: the emulated board's life, and ways to look at any board.

Promise: an action that does not fit the board is refused with one line, and so ends a login that
fails.
Limit: up, down, console and log are for boards with emulator = true in boards.toml; a command over
ssh that itself ends with exit code 255 is taken for a lost connection.
"""

import shlex
import sys
from collections.abc import Sequence

from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.say import say

ACTIONS: Sequence[str] = ("up", "down", "ssh", "console", "log", "shell")


def act(action: str, board: str, *, model: str, command: str) -> int:
    """Do it; returns the exit code, of ssh that of the command there.

    Raises UsageError and EnvironmentUnfit (also when ssh itself failed: its reason stands above).
    """
    # Imported late: each action needs its own part of the project.
    if action not in ACTIONS:
        raise UsageError(f"board {action!r}: expected one of {', '.join(ACTIONS)}")
    if action == "shell":
        from board.virtual.shell import shell

        return shell(model)
    from board.boards import ssh_settings

    settings = ssh_settings(board)
    if action == "ssh":
        from board.ssh.link import LOST, Link

        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError(
                f"--command {command!r}: {error}; expected words for a POSIX shell"
            ) from error
        with Link(settings) as link:
            code = link.interactive(words)
        if code == LOST:
            advice = f"is it on, is the cable in? ./inv doctor --board {board} tells"
            if settings.emulator:
                advice = f"./inv board up --board {board} starts it"
            raise EnvironmentUnfit(
                f"board {board}: no connection to {settings.destination}, or it broke (ssh ended "
                f"with exit code {LOST}): {advice}"
            )
        return code
    from board.virtual.interactive import Interactive

    emulated = Interactive(settings)
    match action:
        case "up":
            emulated.up()
        case "down":
            say(f"board {board}: {'down' if emulated.down() else 'was down'}")
        case "console":
            emulated.console()
        case "log":
            try:
                text = emulated.console_log.read_text(errors="replace")
            except FileNotFoundError as error:
                raise EnvironmentUnfit(f"board {board}: was not up yet: no log") from error
            sys.stdout.write(text)
    return 0

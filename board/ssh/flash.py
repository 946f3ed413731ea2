"""`./inv flash` and `./inv unflash`: a board made ready for runs, and as it was before.

Promise: flash sends only what differs and changes only what it has listed; a module for another
kernel is refused before it is loaded; unflash ends what is left of runs, undoes every change that
was written down, and removes the one directory, so that nothing of this project is left.
Limit: a reboot undoes the changes by itself; a run makes them again.
"""

from board.boards import SshSettings
from board.cell import Definitions
from board.ssh import payload
from board.ssh.board import STOP_S
from board.ssh.consent import require_consent
from board.ssh.session import Session
from toolchain.errors import EnvironmentUnfit
from toolchain.say import say


def flash(settings: SshSettings, model: str | None, *, yes: bool) -> None:
    """Send the artifacts and set the board up; raises UsageError, and as Session does."""
    if model is not None:
        Definitions.read().require_model(model)
    with Session(settings, yes=yes) as session:
        session.open()
        facts = session.facts()
        used = list(payload.ALL)
        try:
            payload.check_module(settings, facts)
        except EnvironmentUnfit as error:
            say(f"without the profiler: {error}")
            used.remove("profiler")
        changed = session.supply(payload.items(settings, model, used))
        if "profiler" in used:
            found = session.sites_for(facts["build_id"])
            saves = sum(site["kind"] == "save" for site in found["sites"])
            say(f"board {settings.name}: its kernel {found['release']} has {saves} save sites")
        # From here on the changes outlive the session.
        session.ask("apply", root=True, governors=settings.governors, flashed=True)
        if changed:
            say(f"board {settings.name}: new or changed: {', '.join(_short(changed))}")
        else:
            say(f"board {settings.name}: had all files already")
        for change in session.ask("state")["changes"]:
            say(f"board {settings.name}: {change['path']} stays changed until ./inv unflash")
    say(f"board {settings.name}: flashed; next: ./inv run --board {settings.name}")


def unflash(settings: SshSettings, *, yes: bool) -> None:
    """Put the board back as it was."""
    with Session(settings, yes=yes) as session:
        session.hello()
        state = session.ask("state")
        lines = [f"put back {change['path']}" for change in reversed(state["changes"])]
        lines += ["end what is left of runs", f"remove {session.directory}"]
        require_consent(settings.name, lines, yes)
        for token in session.ask("stop_all", root=True, timeout_s=STOP_S):
            say(f"board {settings.name}: ended run {token}")
        answer = session.ask("undo", root=True)
        for line in answer["undone"]:
            say(f"board {settings.name}: undone: {line}")
        removed = session.ask("remove", root=True)["removed"]
        outcome = "removed" if removed else "was not there"
        say(f"board {settings.name}: {session.directory} {outcome}")
        if answer["left"]:
            raise EnvironmentUnfit(
                f"board {settings.name}: not undone: {'; '.join(answer['left'])}"
            )


def _short(names: list[str]) -> list[str]:
    """The agent's files as one."""
    whole = [name for name in names if not name.startswith("agent/")]
    return [*whole, *(["agent"] if len(whole) < len(names) else [])]

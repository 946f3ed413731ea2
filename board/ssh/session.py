"""A driver's time on a board: locked, set up, supplied, and left as it was found.

Promise: one driver at a time; what is changed as root was agreed to, is written down on the board
before it is done, and is undone when the session ends, unless the board was flashed; files are
sent only where they differ and used only once their sha256 was read back.
Limit: when the link is gone for good the board keeps what was written down; the next session, or
`unflash`, undoes it.
"""

import base64
import contextlib
import getpass
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from board.boards import SshSettings
from board.ssh import payload
from board.ssh.consent import require_consent
from board.ssh.link import Link, LinkLost
from board.ssh.payload import Item
from toolchain.command import Cancelled
from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.recipe import build
from toolchain.say import say

BEAT_S = 20.0
RUN_AS_ROOT = (
    "start board.agent, which starts llama-server and the instruments of a run, and end them",
    "load vstate_observer's BPF programs, vstate_profiler.ko, scx_vstate; remove them",
    "as the policy says: base slice (debugfs sched/base_slice_ns), cpuset of the server",
    "freeze and thaw the server in the cgroup bananaos-target",
)


class Session:
    """A context manager; `open` does the work, so that making one costs nothing."""

    def __init__(self, settings: SshSettings, *, yes: bool) -> None:
        self.settings = settings
        self.link = Link(settings)
        self.directory = ""
        self.boot_id = ""
        self.uid = -1
        self.root = False
        self._yes = yes
        self.token = uuid.uuid4().hex
        self._open = False
        self._agreed = False
        self._stop_beating = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> "Session":
        self.link.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stop_beating.set()
            if self._beating is not None:
                self._beating.join()
            if self._open:
                # A board that is out of reach must not hide why.
                with contextlib.suppress(LinkLost) if kind else contextlib.nullcontext():
                    self._leave()
        finally:
            self.link.__exit__(kind, error, trace)

    def hello(self) -> dict[str, Any]:
        """Log in and learn where the directory lies; no change."""
        answer: dict[str, Any] = self.link.ask("hello", {"directory": self.settings.directory})
        self.directory, self.boot_id = answer["directory"], answer["boot_id"]
        self.uid = answer["uid"]
        self.root = self.uid == 0
        return answer

    def ask(
        self, verb: str, *, root: bool = False, timeout_s: float = 120.0, **arguments: Any
    ) -> Any:
        """Ask a verb that takes the directory; root: as root, by sudo where the login is not."""
        return self.link.ask(
            verb,
            {"directory": self.directory, **arguments},
            root=root and not self.root,
            timeout_s=timeout_s,
        )

    def facts(self) -> dict[str, Any]:
        """Everything the board tells of itself; as root where sudo lets us."""
        probe = (build("kernel/rvv-probe") / "rvv_probe").read_bytes()
        arguments = {
            "directory": self.directory,
            "governors": self.settings.governors,
            "temperatures": self.settings.temperatures,
            "rvv_probe": base64.b64encode(probe).decode(),
        }
        sudo = None
        try:
            answer = self.link.ask("facts", arguments, root=not self.root)
        except LinkLost:
            raise
        except EnvironmentUnfit as error:
            if self.root:
                raise
            sudo = str(error)
            answer = self.link.ask("facts", arguments)
        return {**answer, "sudo": sudo}

    def open(self) -> None:
        """Lock the board, have the changes agreed to, and make them.  May be repeated.

        Raises LinkLost, EnvironmentUnfit (in use, another machine, ...), UsageError (not agreed).
        """
        hello = self.hello()
        if hello["architecture"] != "riscv64":
            raise EnvironmentUnfit(
                f"board {self.settings.name}: is a {hello['architecture']} machine, "
                "expected riscv64"
            )
        self._lock()
        self._open = True
        planned = self.link.ask("plan", {"governors": self.settings.governors}, root=not self.root)
        if not self._agreed:
            lines = [_words(change) for change in planned]
            require_consent(self.settings.name, [*lines, *RUN_AS_ROOT], self._yes)
            self._agreed = True
        self.ask("apply", root=True, governors=self.settings.governors, flashed=False)

    def lock_only(self) -> None:
        """Lock the board and change nothing."""
        self.hello()
        self._lock()

    def supply(self, items: Mapping[str, Item]) -> list[str]:
        """Have the files on the board under their names; returns the names that changed.

        Raises LinkLost, EnvironmentUnfit, and InvalidData where a file keeps arriving damaged.
        """
        for item in items.values():
            item.require_riscv()
        sizes = {item.sha256: item.path.stat().st_size for item in items.values()}
        paths = {item.sha256: item.path for item in items.values()}
        names = {name: [item.sha256, item.mode] for name, item in items.items()}
        for last in (False, True):
            there = self.ask("have", files=sizes, timeout_s=600)
            missing = {
                f"{sha256}.part": (paths[sha256], got) for sha256, got in there.items() if got >= 0
            }
            if missing:
                size_mib = sum(path.stat().st_size - got for path, got in missing.values()) / 2**20
                say(f"board {self.settings.name}: sending {len(missing)} files, {size_mib:.1f} MiB")
                self.link.put(missing, f"{self.directory}/blobs")
            answer = self.ask("install", names=names, timeout_s=600)
            damaged = answer["damaged"]
            if not damaged:
                changed: list[str] = answer["changed"]
                return changed
            found = ", ".join(sorted(n for n, (sha, _) in names.items() if sha in damaged))
            if last:
                raise InvalidData(
                    f"board {self.settings.name}: arrived damaged twice (sha256 differs): {found}: "
                    "the cable or the board's disk is bad; nothing was replaced"
                )
            say(f"board {self.settings.name}: arrived damaged, sending again: {found}")
        raise AssertionError("the second round returns or raises")

    def sites_for(self, build_id: str) -> dict[str, Any]:
        """The save sites of the board's kernel: known here, or found in its running text."""
        found = payload.known_sites(build_id)
        if found is None:
            say(f"board {self.settings.name}: finding the save sites in the running kernel")
            found = self.link.ask("sites", {}, root=not self.root, timeout_s=600)
        return found

    def beat_now(self) -> bool:
        """Whether the board still counts this driver as its owner."""
        answer = self.link.ask("beat", {"directory": self.directory, "token": self.token})
        return bool(answer["held"])

    def _lock(self) -> None:
        owner = f"{getpass.getuser()}@{socket.gethostname()} (process {os.getpid()})"
        answer = self.ask("take", token=self.token, owner=owner)
        if answer["taken_over_from"]:
            say(f"board {self.settings.name}: taken over from {answer['taken_over_from']}")
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, daemon=True)
            self._beating.start()

    def _beat(self) -> None:
        while not self._stop_beating.wait(BEAT_S):
            if not self.link.busy:  # a board that answers a question hears of us
                with contextlib.suppress(EnvironmentUnfit):
                    self.beat_now()

    def _leave(self) -> None:
        if not self.ask("state")["flashed"]:
            answer = self.ask("undo", root=True)
            for line in answer["left"]:
                say(f"board {self.settings.name}: not undone: {line}")
        self.ask("release", token=self.token)


def _words(change: Mapping[str, str]) -> str:
    if change["what"] == "mount":
        return f"mount {change['type']} at {change['path']}"
    return f"set {change['path']} from {change['old']} to {change['new']} ({change['why']})"


class Patience:
    """Waiting out a lost link: the agent on the board goes on without us."""

    def __init__(self, board: str, deadline_s: float, cancel: threading.Event) -> None:
        self._board = board
        self._deadline_s = deadline_s
        self._cancel = cancel
        self._lost = False

    def lost(self, error: LinkLost) -> None:
        """Take note that the link is lost and wait a little.

        Raises the error when it is too late, and Cancelled.
        """
        if time.monotonic() > self._deadline_s:
            raise error
        if not self._lost:
            say(f"board {self._board}: link lost ({str(error).splitlines()[0]}); trying again")
        self._lost = True
        if self._cancel.wait(2.0):
            raise Cancelled(f"board {self._board}: cancelled while the link was lost") from error

    def found(self) -> None:
        """Take note that the board answers."""
        if self._lost:
            say(f"board {self._board}: back")
        self._lost = False

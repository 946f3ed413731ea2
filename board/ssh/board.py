"""A board reached over SSH, as the runner sees it: one cell at a time, by an agent left to itself.

Promise: a cell survives the link: the agent goes on without it and the results are fetched when the
board answers again; a board that was restarted makes the cell void, and it is run again; a hot
board is waited for; whatever ends a cell early, nothing of it is left on the board.
Limit: one cell at a time.  On an emulated board the numbers decide nothing (platform `emulated`).
"""

import contextlib
import json
import os
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from board.base import AGENT_INVALID, RunFailed, RunVoid, for_agent, tail
from board.boards import SshSettings
from board.cell import tools_of
from board.ssh import payload
from board.ssh.doctor import STOCK, hardware
from board.ssh.link import LinkLost
from board.ssh.session import Patience, Session
from board.virtual.boot import extract
from toolchain.command import Cancelled
from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.fetch import sha256_file
from toolchain.say import say

POLL_S = 3.0
BACK_S = 600.0
"""How long a board that is gone is waited for, beyond the run's deadline."""
COLD_POLL_S = 10.0
STOP_S = 300.0
"""An agent gets 75 s to end in order (board/onboard/runs.py), more on a board that is very busy."""
LOG = "console.log"
SILENT = "the agent said nothing"
FULL_BYTES = 1 << 20


class SshBoard:
    """A board of boards.toml with an `ssh` table; a context manager."""

    parallel = False
    jobs = 1
    instruments: Sequence[str] = payload.INSTRUMENTS

    def __init__(self, settings: SshSettings, *, yes: bool = False) -> None:
        self.name = settings.name
        self.platform = settings.platform
        # An emulated hart that spins takes this host's CPU from one that works.
        self.most_threads = len(os.sched_getaffinity(0)) if settings.emulator else None
        self._settings = settings
        self._session = Session(settings, yes=yes)
        self._facts: dict[str, Any] = {}
        self._sites: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "SshBoard":
        self._session.__enter__()
        try:
            self._session.hello()
        except LinkLost as error:  # told before half an hour of builds; it may be back by then
            say(f"{error}; without it only what has run before can be judged")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        """None: the machine is what it is."""
        if overrides:
            asked = ", ".join(f"{name}={value}" for name, value in overrides.items())
            raise UsageError(f"board {self.name}: {asked}: a board's machine cannot be chosen")
        return None

    def prepare(self, model: str, tools: Sequence[str]) -> dict[str, str]:
        """Build or fetch all a run needs; the board is not asked."""
        return payload.inputs(self._settings, model, tools)

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """None: a real machine's harts are parallel."""
        return None

    def begin(self) -> None:
        """Connect, look at the board, have the changes agreed to, and make them."""
        self._session.open()
        self._look()

    def run(
        self,
        cell: Mapping[str, Any],
        directory: Path,
        *,
        deadline_s: float,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        """Run the cell by an agent on the board; see board.base.Board.run."""
        self._session.link.run_log = directory / "commands.log"
        started_s = time.monotonic()
        patience = Patience(self.name, started_s + deadline_s + BACK_S, cancel)
        try:
            self._ensure_ready(cell, patience, cancel)
            before_c, waited_s = self._cool_down(cancel, patience)
            token = directory.name
            try:
                self._start(cell, token)  # the link may be lost after the board took it
                after = self._watch(token, deadline_s, directory, patience, cancel)
                self._require_room(after)
                self._fetch(token, directory, patience)
            except BaseException:
                with contextlib.suppress(LinkLost):
                    self._session.ask("stop", root=True, token=token, timeout_s=STOP_S)
                    self._session.ask("discard", root=True, token=token)
                raise
            self._require_end(after, directory)
        finally:
            self._session.link.run_log = None
        return {
            "host_cpu_s": None,
            "host_wall_s": time.monotonic() - started_s,
            "board": {
                "address": self._settings.destination,
                "host_key": self._session.link.host_key,
                "boot_id": self._session.boot_id,
                "soc": self._facts["soc"],
                "temperature_before_c": before_c,
                "temperature_after_c": after["temperature_c"],
                "waited_for_cooling_s": waited_s,
                "frequencies": [
                    {key: row[key] for key in ("path", "governor", "khz")}
                    for row in self._facts["frequencies"]
                ],
            },
        }

    # -- steps of a run

    def _look(self) -> None:
        """Learn what the board is, and refuse one that is another than boards.toml says."""
        self._facts = self._session.facts()
        for one in hardware(self._settings, self._facts):
            if one.level == "error":
                raise EnvironmentUnfit(
                    f"board {self.name}: {one.name}: got {one.got}, expected {one.expected}: "
                    "another board than boards.toml says"
                )

    def _ensure_ready(
        self, cell: Mapping[str, Any], patience: Patience, cancel: threading.Event
    ) -> None:
        """Have the board set up and supplied, also after it was restarted."""
        while True:
            if cancel.is_set():
                raise Cancelled(f"board {self.name}: cancelled")
            try:
                hello = self._session.link.ask("hello", {"directory": self._settings.directory})
                if hello["boot_id"] != self._session.boot_id:
                    say(f"board {self.name}: restarted: setting it up again")
                    self.begin()
                used = tools_of(cell)
                if "scheduler" in used and self._facts["sched_ext"] is None:
                    raise RunFailed("sched-ext-missing", STOCK)
                if "profiler" in used:
                    payload.check_module(self._settings, self._facts)
                self._session.supply(payload.items(self._settings, cell["model"], used))
                patience.found()
                return
            except LinkLost as error:
                patience.lost(error)

    def _cool_down(self, cancel: threading.Event, patience: Patience) -> tuple[float | None, float]:
        """Wait until the board is cool enough; its temperature then, and the seconds waited."""
        started_s = time.monotonic()
        told = False
        while True:
            state = self._state("", 0, patience)
            now_c = state["temperature_c"]
            waited_s = time.monotonic() - started_s
            if now_c is None or now_c <= self._settings.temperature_c:
                return now_c, waited_s if told else 0.0
            if waited_s > self._settings.cooling_s:
                raise EnvironmentUnfit(
                    f"board {self.name}: {now_c:.1f} degrees C after {waited_s:.0f} s, expected at "
                    f"most {self._settings.temperature_c}: cool it, or raise limits.temperature_c"
                )
            if not told:
                say(
                    f"board {self.name}: {now_c:.1f} degrees C, waiting for "
                    f"{self._settings.temperature_c}"
                )
            told = True
            if cancel.wait(min(COLD_POLL_S, 1 + self._settings.cooling_s / 10)):
                raise Cancelled(f"board {self.name}: cancelled while it cooled down")

    def _start(self, cell: Mapping[str, Any], token: str) -> None:
        directory = self._session.directory
        there = f"{directory}/artifacts"
        used = tools_of(cell)
        kernel_sites = None
        if "profiler" in used:
            build_id = self._facts["build_id"]
            if build_id not in self._sites:
                self._sites[build_id] = self._session.sites_for(build_id)
            kernel_sites = self._sites[build_id]
        files = payload.told(
            self._settings, used, f"{directory}/runs/{token}/in", there, kernel_sites
        )
        files["cell.json"] = json.dumps(for_agent(cell), indent=1, sort_keys=True) + "\n"
        argv = ["python3", "-m", "board.agent", "--cell", "{in}/cell.json"]
        argv += ["--server", f"{there}/llama-server", "--model", f"{there}/{cell['model']}.gguf"]
        argv += ["--tools", "{in}/tools.json", "--out", "{out}"]
        self._session.ask("discard", root=True, token=token)
        self._session.ask(
            "start", root=True, token=token, argv=argv, files=files, cwd=f"{there}/agent"
        )

    def _watch(
        self,
        token: str,
        deadline_s: float,
        directory: Path,
        patience: Patience,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        """Wait for the agent's end, its log coming in; the last status."""
        end_s = time.monotonic() + deadline_s
        offset = 0
        with (directory / LOG).open("w") as log:
            while True:
                state = self._state(token, offset, patience)
                offset += state["log_bytes"]
                log.write(state["log"])
                log.flush()
                if state["boot_id"] != self._session.boot_id:
                    raise RunVoid("board-restarted", f"board {self.name} was restarted in the run")
                if not state["known"]:
                    raise RunVoid("board-emptied", "the run's folder on the board is gone")
                if not state["going"]:
                    return state
                if time.monotonic() > end_s:
                    raise RunFailed(
                        "board-timeout",
                        f"not done after {deadline_s:g} s; stopped\n"
                        f"{tail(directory / LOG, SILENT)}",
                    )
                if cancel.wait(POLL_S):
                    raise Cancelled(f"board {self.name}: cancelled")

    def _state(self, token: str, offset: int, patience: Patience) -> dict[str, Any]:
        while True:
            try:
                state: dict[str, Any] = self._session.ask(
                    "status",
                    root=True,
                    token=token or "none",
                    log_offset=offset,
                    temperatures=self._settings.temperatures,
                )
                patience.found()
                return state
            except LinkLost as error:
                patience.lost(error)

    def _fetch(self, token: str, directory: Path, patience: Patience) -> None:
        """Bring the results here, verified, and remove them there."""
        archive = directory / "results.tar"
        while True:
            try:
                made = self._session.ask("collect", root=True, token=token, uid=self._session.uid)
                folder = f"{self._session.directory}/runs/{token}"
                self._session.link.get("results.tar", folder, archive, made["size_bytes"])
                if sha256_file(archive) != made["sha256"]:
                    archive.unlink()
                    raise LinkLost(f"board {self.name}: the results arrived damaged")
                self._session.ask("discard", root=True, token=token)
                patience.found()
                break
            except LinkLost as error:
                patience.lost(error)
        with tarfile.open(archive) as tar:
            extract(tar, directory)
        archive.unlink()
        for path in (directory / "out").iterdir():
            path.replace(directory / path.name)
        (directory / "out").rmdir()
        (directory / "agent.log").replace(directory / LOG)

    def _require_room(self, state: Mapping[str, Any]) -> None:
        """Raise where the agent did not come to its end for want of room."""
        if state["exit_code"] not in (0, AGENT_INVALID) and state["free_bytes"] < FULL_BYTES:
            raise EnvironmentUnfit(
                f"board {self.name}: {self._session.directory}: the disk is full: free some "
                "space on the board, then run the same again"
            )

    def _require_end(self, state: Mapping[str, Any], directory: Path) -> None:
        """Raise unless the agent came to its end."""
        code = state["exit_code"]
        if code in (0, AGENT_INVALID):
            return
        how = "its supervisor was killed" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by signal {-code}"
        raise RunFailed("agent-failed", f"{how}\n{tail(directory / LOG, SILENT)}")

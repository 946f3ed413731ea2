"""The way to a board: OpenSSH's own client, asked to run words and to move files.

Promise: the user's SSH configuration, agent, keys and jump hosts are used as they are; nothing is
ever asked on a terminal; the host key of the first contact is pinned per board and another one is
refused; every command on the board is written to a log with its exit code and seconds; what the
board's shell gets is always quoted words.  When this process ends, however it ends, no ssh of it is
left.
Limit: the board needs sshd with an sftp subsystem and python3; a link that is lost is told from a
command that failed by ssh's exit code 255, which no command here uses.
"""

import base64
import contextlib
import datetime
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from board.boards import SshSettings
from board.ssh import program
from board.ssh.channel import Channel, ChannelEnded, no_client
from toolchain.command import CommandFailed, run
from toolchain.errors import ArtifactError, EnvironmentUnfit, InvalidData, UsageError, cannot_write

CONNECT_S = 30
"""Until the other side has greeted; an emulated board takes two seconds for the key exchange."""
SILENCE_S = 10
"""An idle connection is asked for a sign of life as often, and given up after three in vain."""
PROGRAM_S = 60
"""Until our program there has started; an emulated board on a busy host takes half of it."""
LOST, NOT_FOUND = 255, 127
LOG_BYTES = 1 << 20
_CODES: Mapping[int, type[ArtifactError]] = {2: UsageError, 3: EnvironmentUnfit, 4: InvalidData}


class LinkLost(EnvironmentUnfit):
    """The board cannot be reached, or no longer; trying again later may help."""


class Link:
    """A connection to one board; a context manager.  Reconnects by itself at the next command."""

    def __init__(self, settings: SshSettings) -> None:
        self.settings = settings
        self.run_log: Path | None = None
        """A further log for the commands, such as that of the run they are for."""
        self._state = settings.state
        self._known_hosts = self._state / "known_hosts"
        self._log = self._state / "commands.log"
        self._channels: dict[bool, Channel] = {}
        self._busy = threading.Lock()
        self._sockets: Path | None = None

    def __enter__(self) -> "Link":
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            self._state.chmod(0o700)
            if self._log.exists() and self._log.stat().st_size > LOG_BYTES:
                self._log.replace(self._log.with_suffix(".log.1"))
            # A short name: the path of a socket has to fit into 108 bytes.
            self._sockets = Path(tempfile.mkdtemp(prefix="bos-"))
        except OSError as error:
            raise cannot_write(self._state, error, "XDG_STATE_HOME") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    # -- what is asked of the board

    def ask(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        root: bool = False,
        timeout_s: float = 120.0,
    ) -> Any:
        """Ask a verb of board/onboard on the board and return its answer.

        root: through sudo (which must not ask).  Raises LinkLost, EnvironmentUnfit, and what the
        verb refuses, each one line.
        """
        started_s, outcome = time.monotonic(), "lost"
        try:
            with self._busy:
                try:
                    channel = self._channel(root)
                    answer = channel.ask({"verb": verb, "arguments": arguments or {}}, timeout_s)
                except ChannelEnded as error:
                    self._close()
                    raise self._explained(error, verb) from error
                except BaseException:
                    self._close()  # an answer that is still to come is nobody's
                    raise
            outcome = "answer" if "answer" in answer else "refused"
        finally:
            # Without what goes with the question, which may be a program.
            self._log_line(f"ask{' as root' if root else ''} {verb}", outcome, started_s)
        if "fault" in answer:
            raise EnvironmentUnfit(
                f"board {self.settings.name}: {verb}: a fault of this project there:\n"
                f"{answer['fault']}"
            )
        if "refused" in answer:
            kind = _CODES.get(answer["code"], EnvironmentUnfit)
            raise kind(f"board {self.settings.name}: {answer['refused']}")
        return answer["answer"]

    @property
    def busy(self) -> bool:
        """Whether a question is being answered just now."""
        return self._busy.locked()

    def put(self, files: Mapping[str, tuple[Path, int]], directory: str) -> None:
        """Send files: name below `directory` on the board -> file here, bytes of it already there.

        A transfer that was cut off goes on where it stopped.  Raises LinkLost, EnvironmentUnfit.
        """
        lines = []
        with tempfile.TemporaryDirectory(prefix="bananaos-put-") as stage:
            for name, (path, there_bytes) in files.items():
                Path(stage, name).symlink_to(path.absolute())
                resume = "-a " if there_bytes else ""
                lines.append(f"put {resume}{name} {directory}/{name}")
            size_bytes = sum(path.stat().st_size for path, _ in files.values())
            self._sftp(lines, Path(stage), size_bytes)

    def get(self, name: str, directory: str, target: Path, size_bytes: int) -> None:
        """Fetch `directory`/`name` of the board to `target`, going on with what is there of it."""
        resume = "-a " if target.exists() else ""
        with tempfile.TemporaryDirectory(prefix="bananaos-get-") as stage:
            # sftp's batch language would need its own quoting for a path of the host.
            Path(stage, "target").symlink_to(target.parent.absolute())
            line = f"get {resume}{directory}/{name} target/{target.name}"
            self._sftp([line], Path(stage), size_bytes)

    def interactive(self, words: Sequence[str]) -> int:
        """Hand the terminal to ssh; `words` is a command, none is a shell; its exit code."""
        argv = ["ssh", *self._options(batch=False), *self._login()]
        argv += ["--", shlex.join(words)] if words else []
        try:
            return subprocess.run(argv).returncode
        except FileNotFoundError as error:
            raise no_client(error) from error

    @property
    def host_key(self) -> str:
        """The pinned host key's fingerprint, SHA256:..., as ssh-keygen shows it."""
        try:
            fields = self._known_hosts.read_text().split()
            digest = hashlib.sha256(base64.b64decode(fields[2])).digest()
        except (OSError, IndexError, ValueError) as error:
            raise EnvironmentUnfit(
                f"{self._known_hosts}: no pinned host key: {error}; remove the file to pin anew"
            ) from error
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    # -- ssh and sftp

    def _options(self, *, batch: bool = True) -> list[str]:
        settings = {
            "UserKnownHostsFile": f'"{self._known_hosts}"',
            "GlobalKnownHostsFile": "none",
            "StrictHostKeyChecking": "accept-new",
            "UpdateHostKeys": "no",
            "HashKnownHosts": "no",
            "CheckHostIP": "no",
            # One pin per board, whatever address a router gives it today.
            "HostKeyAlias": f"bananaos-{self.settings.name}",
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": str(SILENCE_S),
            "ServerAliveCountMax": "3",
            "ControlPath": "none",
        }
        if batch:
            settings |= {"BatchMode": "yes", "RequestTTY": "no", "ClearAllForwardings": "yes"}
        if self._sockets is not None:
            settings["ControlPath"] = f"{self._sockets}/c"
        key = self.settings.key
        if self.settings.emulator:
            key = os.fspath(self._state / "id_ed25519")
            settings["IdentityAgent"] = "none"
        if key:
            settings |= {"IdentityFile": f'"{Path(key).expanduser()}"', "IdentitiesOnly": "yes"}
        if self.settings.port:
            settings["Port"] = str(self.settings.port)
        return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def _login(self) -> list[str]:
        user = self.settings.user
        return [*(("-o", f"User={user}") if user else ()), self.settings.address]

    def _sftp(self, lines: Sequence[str], directory: Path, size_bytes: int) -> None:
        argv = ["sftp", "-q", "-b", "-", *self._options(), "-o", "ControlMaster=no", *self._login()]
        # 100 kB/s is what a very bad cable or an emulator gives.
        limit_s = 120 + size_bytes / 100e3
        started_s, outcome = time.monotonic(), "stopped"
        try:
            done = run(
                argv,
                what=f"move files to or from {self.settings.name}",
                input_text="".join(f"{line}\n" for line in lines),
                timeout_s=limit_s,
                cwd=directory,
            )
            outcome = str(done.returncode)
        except CommandFailed as error:
            outcome = "timeout" if error.timed_out else str(error.completed.returncode)
            ended = ChannelEnded(error.completed.returncode, "\n".join(_said(str(error))))
            if error.timed_out:
                ended.code = None
            self._close()
            raise self._explained(ended, "sftp") from error
        finally:
            shown = lines[0] if len(lines) == 1 else f"{lines[0]} and {len(lines) - 1} more"
            self._log_line(f"sftp {shown}", outcome, started_s)

    def _log_line(self, what: str, outcome: str, started_s: float) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = f"{now} {outcome} {time.monotonic() - started_s:.2f}s {what}\n"
        for log in (self._log, self.run_log):
            if log is not None:
                with contextlib.suppress(OSError), log.open("a") as file:
                    file.write(line)

    # -- one connection for all: the login's channel carries root's and the transfers

    def _channel(self, root: bool) -> Channel:
        assert self._sockets is not None, "a Link is used inside its with block"
        channel = self._channels.get(root)
        if channel is None:
            words = ["python3", "-I", "-c", program.BOOT]
            words = ["sudo", "-n", "--", *words] if root else words
            shared = "no" if root else "yes"
            if root:
                self._channel(False)  # ours first: it is the connection
            argv = ["ssh", *self._options(), "-o", f"ControlMaster={shared}", *self._login()]
            channel = Channel(
                [*argv, "--", shlex.join(words)], self._sockets / f"errors{int(root)}"
            )
            self._channels[root] = channel
            channel.open(program.package(), CONNECT_S + PROGRAM_S)
        return channel

    def _close(self) -> None:
        """End the channels, root's first."""
        for root in (True, False):
            if channel := self._channels.pop(root, None):
                channel.close()
        if self._sockets is not None:
            (self._sockets / "c").unlink(missing_ok=True)

    # -- failures in words

    def _explained(self, ended: ChannelEnded, verb: str) -> ArtifactError:
        name, said = self.settings.name, ended.said
        last = ([line.strip() for line in said.splitlines() if line.strip()] or [""])[-1]
        if ended.code is None:
            return LinkLost(f"board {name}: no answer to {verb} in time")
        if re.search(r"sudo: .*(password|terminal) is required", said):
            return EnvironmentUnfit(
                f"board {name}: sudo there asks for a password, which is never typed here: allow "
                f"'{self.settings.user or 'your user'} ALL=(ALL) NOPASSWD: ALL' in "
                "/etc/sudoers.d/bananaos on the board (remove it afterwards), or log in as root"
            )
        if re.search(r"sudo: .*not found", said):
            return EnvironmentUnfit(f"board {name}: has no sudo: install it, or log in as root")
        if ended.code == NOT_FOUND:
            return EnvironmentUnfit(f"board {name}: has no python3 ({last}): install 3.11 or later")
        if ended.code == LOST or not last:
            return self._reason(said)
        if verb == "sftp":
            # sftp ends with 1 for a refusal of the board and for a connection that broke.
            if re.search(r"Connection (closed|reset)|Broken pipe|not responding", said):
                return LinkLost(f"board {name}: the connection broke in a transfer")
            return EnvironmentUnfit(
                f"board {name}: {last}: full, read-only, or without an sftp server? "
                f"./inv doctor --board {name} tells"
            )
        return EnvironmentUnfit(f"board {name}: {verb}: {last}")

    def _reason(self, said: str) -> ArtifactError:
        """Why ssh itself failed, from what it said."""
        name, settings = self.settings.name, self.settings
        where = settings.destination + (f" port {settings.port}" if settings.port else "")
        last = [line for line in said.splitlines() if line.strip()][-1:] or ["the connection broke"]
        if "HOST IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
            got = re.search(r"SHA256:[A-Za-z0-9+/]+", said)
            return EnvironmentUnfit(
                f"board {name}: another host key than at the first contact: got "
                f"{got[0].rstrip('.') if got else 'an unknown one'}, expected {self.host_key}: "
                "another machine answers there, or the board was installed anew; if you know which "
                f"and why, remove {self._known_hosts}"
            )
        if "Permission denied" in said:
            return EnvironmentUnfit(
                f"board {name}: no login at {where}: {last[0].strip()}: put your public key there "
                "(ssh-copy-id), have the agent hold it (ssh-add), or name it as key in boards.toml"
            )
        if "UNPROTECTED PRIVATE KEY" in said:
            return EnvironmentUnfit(
                f"board {name}: the private key may be read by others: chmod 600"
            )
        advice = "is it on, is the cable in, does `ssh` reach it?"
        if settings.emulator:
            advice = f"./inv board up --board {name} starts it"
        return LinkLost(f"board {name}: no connection to {where}: {last[0].strip()}: {advice}")


def _said(message: str) -> list[str]:
    """What the command itself said, from the message of a CommandFailed."""
    return [line.removeprefix("  | ") for line in message.splitlines() if line.startswith("  | ")]

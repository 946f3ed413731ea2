"""The virtual board in interactive mode: QEMU in the background, reached over SSH like any board.

Promise: `up` returns when the board answers over SSH, or leaves nothing behind and shows the
console's last lines; `down` ends it; an interrupt during `up` ends it, too.  The key pair and the
board's host key are made at first use, for this user alone; there is no password to log in with.
The port is forwarded on 127.0.0.1 only, and the guest reaches nothing outside.
Limit: multi-threaded emulation in real time: functional checks, never numbers.  One board per name.
"""

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from board.base import tail
from board.boards import SshSettings
from board.virtual.boot import ROOM
from board.virtual.machine import default_machine, interactive
from toolchain.cache import exclusive
from toolchain.command import kill_group, run
from toolchain.errors import EnvironmentUnfit, UsageError, cannot_write
from toolchain.inside import entering
from toolchain.recipe import build
from toolchain.rootfs import ENVIRONMENT
from toolchain.say import say

MEMORY_MIB = 2048
READY_S = 240.0
"""How long a boot may take: on two busy processors it takes about 20 s."""
LEAVE = b"\x1d"  # Ctrl-], as in telnet
_STOP_S = 10.0


class Interactive:
    """The emulated board of these settings."""

    def __init__(self, settings: SshSettings) -> None:
        if not settings.emulator:
            raise UsageError(
                f"--board {settings.name}: is a real board: switch it on yourself "
                "(only boards with emulator = true can be brought up here)"
            )
        self._settings = settings
        self._state = settings.state
        self._run = self._state / "run"
        self.key = self._state / "id_ed25519"
        self.console_log = self._run / "console.log"

    # -- life

    def up(self, ready_s: float = READY_S) -> None:
        """Start the board and wait until its SSH server answers.

        Raises EnvironmentUnfit: it is up already, the port is taken, it was not ready in time.
        """
        binds = {
            "/in/kernel/image": build("kernel/image"),
            "/in/board/initramfs-ssh": build("board/initramfs-ssh"),
            "/recipe/up.sh": ROOM / "up.sh",
        }
        with exclusive(f"board-{self._settings.name}"):
            if self.pid() is not None:
                raise EnvironmentUnfit(
                    f"board {self._settings.name} is up already (process {self.pid()}); "
                    f"./inv board down --board {self._settings.name} ends it"
                )
            self._require_port()
            self._make_keys()
            self._fresh_run_directory()
            started_s = time.monotonic()
            say(f"board {self._settings.name}: booting; console: {self.console_log}")
            pid = self._start(binds)
            try:
                self._await_ssh(pid, started_s + ready_s, ready_s)
            except BaseException:
                self._kill(pid)
                raise
        say(
            f"board {self._settings.name}: up after {time.monotonic() - started_s:.0f} s; "
            f"./inv board ssh --board {self._settings.name}"
        )

    def down(self) -> bool:
        """End the board; returns whether it was up."""
        with exclusive(f"board-{self._settings.name}"):
            pid = self.pid()
            if pid is None:
                return False
            with contextlib.suppress(OSError):
                self.monitor("quit")
            deadline_s = time.monotonic() + _STOP_S
            while _start_time(pid) is not None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            self._kill(pid)
            return True

    def pid(self) -> int | None:
        """The process of the emulator's session, or None when the board is down.

        What an emulator that was killed left of its session is ended.
        """
        try:
            pid, started = (self._run / "pid").read_text().split()
        except (OSError, ValueError):
            return None
        if _start_time(int(pid)) != started:
            return None
        try:
            with self._socket("monitor"):
                return int(pid)
        except FileNotFoundError:  # it is just starting
            return int(pid)
        except ConnectionRefusedError:
            self._kill(int(pid))
            return None

    def require_up(self) -> None:
        """Raise EnvironmentUnfit when the board is down."""
        if self.pid() is None:
            name = self._settings.name
            raise EnvironmentUnfit(f"board {name} is down; ./inv board up --board {name} starts it")

    # -- ways in

    def monitor(self, command: str, **arguments: object) -> object:
        """Give QEMU's monitor (QMP) a command and return its answer; OSError when it is gone."""
        with self._socket("monitor") as stream, stream.makefile("rw") as file:
            file.readline()  # the greeting
            answer: dict[str, object] = {}
            for name, words in (("qmp_capabilities", {}), (command, arguments)):
                file.write(json.dumps({"execute": name, "arguments": words}) + "\n")
                file.flush()
                answer = {}
                while "return" not in answer and "error" not in answer:
                    line = file.readline()
                    if not line:
                        return None
                    answer = json.loads(line)
            if "error" in answer:
                raise OSError(f"QEMU: {command}: {answer['error']}")
            return answer["return"]

    def console(self) -> None:
        """Connect the terminal to the board's serial console until Ctrl-]."""
        if not sys.stdin.isatty():
            raise UsageError("board console: standard input is no terminal; see ./inv board log")
        self.require_up()
        before = termios.tcgetattr(sys.stdin)
        with self._socket("console") as stream:
            print(f"console of {self._settings.name}; Ctrl-] leaves", flush=True)
            tty.setraw(sys.stdin)
            try:
                self._bridge(stream)
            finally:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        print()

    @staticmethod
    def _bridge(stream: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([sys.stdin, stream], [], [])
            for source in ready:
                if source is stream:
                    data = stream.recv(4096)
                    if not data:
                        return
                    os.write(sys.stdout.fileno(), data)
                else:
                    typed = os.read(sys.stdin.fileno(), 256)
                    if not typed or LEAVE in typed:
                        return
                    stream.sendall(typed)

    def tail(self) -> str:
        """The console's last lines, indented for an error message."""
        return tail(self.console_log, "the console is empty")

    # -- parts

    def _require_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._settings.address, self._settings.port))
            except OSError as error:
                raise EnvironmentUnfit(
                    f"board {self._settings.name}: port {self._settings.port} of "
                    f"{self._settings.address}: {error.strerror}; end what uses it, or give the "
                    "board another port in a file of yours (BANANAOS_BOARDS)"
                ) from error

    def _make_keys(self) -> None:
        """The user's key pair and the board's host key, once; the host key is pinned as well."""
        identity = self._state / "identity" / "etc" / "ssh"
        host_key = identity / "ssh_host_ed25519_key"
        try:
            identity.mkdir(parents=True, exist_ok=True)
            self._state.chmod(0o700)
            for path, comment in ((self.key, "bananaos"), (host_key, "virtual-ssh")):
                if not path.exists():
                    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment]
                    run([*argv, "-f", path], what="make a key pair for the virtual board")
            authorized = identity / "authorized_keys"
            authorized.mkdir(exist_ok=True)
            shutil.copyfile(self.key.with_suffix(".pub"), authorized / "banana")
            # sshd refuses files that others may write, whatever the umask was.
            for path in (identity, authorized, authorized / "banana"):
                path.chmod(0o755 if path.is_dir() else 0o644)
        except OSError as error:
            raise cannot_write(self._state, error, "XDG_STATE_HOME") from error

    def _fresh_run_directory(self) -> None:
        try:
            shutil.rmtree(self._run, ignore_errors=True)
            (self._run / "build").mkdir(parents=True)
        except OSError as error:
            raise cannot_write(self._run, error, "XDG_STATE_HOME") from error

    def _start(self, binds: dict[str, Path]) -> int:
        """Start the emulator in a session of its own; returns its process id."""
        settings = self._settings
        machine = default_machine({"parked_harts": 0, "memory_mib": MEMORY_MIB})
        forward = f"hostfwd=tcp:{settings.address}:{settings.port}-:22"
        argv = ["sh", "-eu", "/recipe/up.sh", *interactive(machine)]
        argv += ["-action", "reboot=reset"]  # after -no-reboot: a board that reboots comes back
        argv += ["-netdev", f"user,id=net,restrict=on,{forward}"]
        argv += ["-device", "virtio-net-device,netdev=net,id=nic"]
        argv += ["-object", "rng-random,filename=/dev/urandom,id=entropy"]
        argv += ["-device", "virtio-rng-device,rng=entropy"]
        argv += ["-chardev", "socket,id=console,path=/out/console,server=on,wait=off"]
        argv[-1] += ",logfile=/out/console.log"
        argv += ["-serial", "chardev:console"]
        argv += ["-qmp", "unix:/out/monitor,server=on,wait=off"]
        binds = {**binds, "/identity": self._state / "identity"}
        writable = {"/build": self._run / "build", "/out": self._run}
        command = entering(argv, binds, writable, self._run / "mounts", network=True)
        # Not run by toolchain.command, and no Popen: it is there to outlive this process.
        log = os.open(self._run / "qemu.log", os.O_WRONLY | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        actions = [
            (os.POSIX_SPAWN_DUP2, old, new) for old, new in ((nothing, 0), (log, 1), (log, 2))
        ]
        try:
            pid = os.posix_spawnp(
                command[0], command, ENVIRONMENT, file_actions=actions, setsid=True
            )
        finally:
            os.close(log)
            os.close(nothing)
        try:
            (self._run / "pid").write_text(f"{pid} {_start_time(pid)}\n")
        except BaseException as error:
            self._kill(pid)
            if isinstance(error, OSError):
                raise cannot_write(self._run, error, "XDG_STATE_HOME") from error
            raise
        return pid

    def _await_ssh(self, pid: int, deadline_s: float, ready_s: float) -> None:
        """Wait for the SSH server's greeting: the port itself is open as soon as QEMU is."""
        name = self._settings.name
        while not self._greets():
            if _start_time(pid) is None:
                log = (self._run / "qemu.log").read_text(errors="replace").strip()
                raise EnvironmentUnfit(
                    f"board {name}: the emulator ended: {log or 'it said nothing'}\n{self.tail()}"
                )
            if time.monotonic() > deadline_s:
                raise EnvironmentUnfit(
                    f"board {name}: no SSH server after {ready_s:g} s; stopped. "
                    f"Its console ended with:\n{self.tail()}"
                )
            time.sleep(0.5)

    def _greets(self) -> bool:
        try:
            address = (self._settings.address, self._settings.port)
            with socket.create_connection(address, timeout=5) as stream:
                return stream.recv(4) == b"SSH-"
        except OSError:
            return False

    @contextlib.contextmanager
    def _socket(self, name: str) -> Iterator[socket.socket]:
        """Connect to a socket of the run directory, whose path may be too long for one."""
        directory = os.open(self._run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX) as stream:
                stream.connect(f"/proc/self/fd/{directory}/{name}")
                yield stream
        finally:
            os.close(directory)

    def _kill(self, pid: int) -> None:
        """Kill the session's processes, all of which are in one group, and wait for their end."""
        kill_group(pid)
        with contextlib.suppress(ChildProcessError):  # started by another process
            os.waitpid(pid, 0)
        (self._run / "pid").unlink(missing_ok=True)


def _start_time(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None for one that is gone or a zombie.

    With the pid it names a process for good: pids are given again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]

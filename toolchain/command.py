"""Running external commands: the one `run()` of the project.

Promise: the command runs in its own session and process group and never outlives the call: when it
ends, times out, is cancelled or is interrupted, whatever of its group is still alive is stopped
(TERM, a grace, then KILL) and reaped; when this process itself is killed, a guard kills the group.
A failure is explained in words (exit code, signal, program not found, time-out, disk full) with the
log, its last lines and the command in a form that can be pasted into a shell.
Limit: Linux only.  A process that leaves its group by its own setsid() is not followed.  The child
has no terminal: interactive programs must not be run through here.

Why a guard and not PR_SET_PDEATHSIG: that signal comes when the *thread* that forked ends, reaches
the direct child only (a compiler under a make under a shell would live on), and would need a
preexec_fn, which may deadlock when several threads start commands.  The guard is a shell that reads
from a pipe whose other end only this process holds; end of file without the command having ended
means that this process died.  It covers the whole group and is safe in thread pools; only a death
in the microseconds between starting the command and telling the guard its group goes unnoticed.
"""

import contextlib
import errno
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.say import say

GRACE_S = 5.0
"""Between TERM and KILL: llama-server and QEMU need well under a second to end in order."""

_TAIL_LINES = 15
_TAIL_BYTES = 65536
_POLL_MIN_S, _POLL_MAX_S = 0.0005, 0.05
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_SCALE_VARIABLE = "BANANAOS_TIMEOUT_SCALE"
_COMMAND_LOG_VARIABLE = "BANANAOS_COMMAND_LOG"
_GUARD = 'read -r group && { read -r _; kill -s KILL -- "-$group"; }'
_UTIL_LINUX = frozenset({"unshare", "mount", "umount", "chroot", "setpriv", "flock", "nsenter"})
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Completed:
    """A command that ended.

    returncode: 0..255, or -N when signal N killed it.  seconds: wall time.
    stdout: what it wrote, decoded as UTF-8; "" when the output went to a log.
    """

    argv: tuple[str, ...]
    returncode: int
    seconds: float
    stdout: str


class CommandFailed(EnvironmentUnfit):
    """A command failed, could not be started or hit its time limit.

    The first line of str() says what and why; the command and the last lines of its output follow.
    `completed.returncode` is 127 when the program was not found, 126 when it could not be executed.
    `timed_out` tells the time limit apart from a signal somebody else sent.
    """

    def __init__(
        self, message: str, *, completed: Completed, log: Path | None, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.completed = completed
        self.log = log
        self.timed_out = timed_out


class Cancelled(Exception):
    """The caller's cancel event was set; the command has been stopped and nothing is left of it."""


_stopping = threading.Event()
"""Set while Ctrl-C stops every command of this process."""


@contextlib.contextmanager
def interrupt_sets(cancel: threading.Event) -> Iterator[None]:
    """Let Ctrl-C set the event, and raise KeyboardInterrupt only at the end of the block.

    Raised at once it could strike in the middle of starting a thread, which then nobody waits for;
    and an impatient second one would break off the stopping.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    interrupted = False

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:  # perhaps in the middle of what follows, which holds locks
            return
        interrupted = True
        cancel.set()
        say("interrupted: stopping what is running")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupt_stops_all() -> Iterator[None]:
    """Let Ctrl-C stop the commands of all threads at once, then raise KeyboardInterrupt.

    For work whose threads have no cancel event of the caller's.
    """
    try:
        with interrupt_sets(_stopping):
            yield
    except Cancelled as error:
        if _stopping.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        _stopping.clear()


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    what: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    input_text: str | None = None,
    timeout_s: float | None = None,
    cancel: threading.Event | None = None,
    check: bool = True,
) -> Completed:
    """Run `argv` to its end and return how it went.

    what: the step in the words of the person waiting for it ("linking the kernel").
    env: the complete environment; None inherits ours.
    log: file that gets the command (first line) and then stdout and stderr; replaced if it exists,
        and kept.  Without it stdout is returned and stderr is shown on failure only.
    timeout_s: time limit, multiplied by $BANANAOS_TIMEOUT_SCALE when that is set.
    check: False returns a command that exited non-zero or was killed instead of raising; a time-out
        and a program that cannot be started raise all the same.
    Raises CommandFailed, Cancelled, UsageError ($BANANAOS_TIMEOUT_SCALE is no positive number) and
    EnvironmentUnfit (the log cannot be written).
    """
    words = tuple(os.fspath(word) for word in argv)
    limit_s = None if timeout_s is None else timeout_s * timeout_scale()
    line = copy_pasteable(words, cwd=cwd, env=env)
    if _is_cancelled(cancel):
        raise Cancelled(f"{what}: cancelled before it started")
    _append_to_command_log(line)
    with contextlib.ExitStack() as stack:
        stdin: IO[bytes] | int = subprocess.DEVNULL
        if input_text is not None:
            stdin = stack.enter_context(_temporary(input_text))
        # Files, not pipes: a grandchild that keeps one open cannot make us wait for it.
        output = _temporary() if log is None else _open_log(log, line)
        stdout = stack.enter_context(output)
        stderr = stack.enter_context(_temporary()) if log is None else stdout
        output_start = stdout.tell()

        started_s = time.monotonic()
        try:
            ending = _supervise(words, cwd, env, (stdin, stdout, stderr), limit_s, cancel)
        except OSError as error:
            code = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE
            completed = Completed(words, code, time.monotonic() - started_s, "")
            reason = _why_not_started(words[0], cwd, env, error)
            raise CommandFailed(
                f"{what}: {reason}\n  $ {line}", completed=completed, log=log
            ) from error
        seconds = time.monotonic() - started_s
        if ending.reason == "cancelled":
            raise Cancelled(f"{what}: cancelled after {seconds:.1f} s")
        text = _read(stdout) if log is None else ""
        completed = Completed(words, ending.returncode, seconds, text)
        timed_out = ending.reason == "timeout"
        if not timed_out and (completed.returncode == 0 or not check):
            return completed

        tail = _tail(stderr, output_start) or _tail(stdout, output_start)
        reason = _why_timeout(limit_s) if timed_out else _why_failed(completed.returncode)
        if any("No space left on device" in entry for entry in tail):
            reason += "; the disk is full (its output says so): free some space and run it again"
        if log is not None:
            reason += f"; log: {log}"
        message = [f"{what}: {Path(words[0]).name} {reason}", f"  $ {line}"]
        message += [f"  | {entry}" for entry in tail]
        raise CommandFailed("\n".join(message), completed=completed, log=log, timed_out=timed_out)


def copy_pasteable(
    argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """One line for a POSIX shell that runs `argv` in that directory and environment."""
    setting: list[str] = []
    if env is not None:
        gone = sorted(os.environ.keys() - env.keys())
        same_base = [word for name in gone for word in ("-u", name)]
        same_base += [f"{k}={v}" for k, v in sorted(env.items()) if os.environ.get(k) != v]
        from_nothing = ["-i", *(f"{name}={value}" for name, value in sorted(env.items()))]
        setting = min(same_base, from_nothing, key=lambda words: len(shlex.join(words)))
        setting = ["env", *setting] if setting else []
    return f"(cd {shlex.quote(str(cwd or Path.cwd()))} && {shlex.join([*setting, *argv])})"


@dataclass(frozen=True)
class _Ending:
    returncode: int
    reason: str  # "ended", "timeout" or "cancelled"


def _supervise(
    argv: tuple[str, ...],
    cwd: Path | None,
    env: Mapping[str, str] | None,
    streams: tuple[IO[bytes] | int, IO[bytes], IO[bytes]],
    limit_s: float | None,
    cancel: threading.Event | None,
) -> _Ending:
    """Start the command, wait, and leave nothing of its group; OSError when it cannot start."""
    with _Guard() as guard:
        child = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
        )
        try:
            guard.watch(child.pid)
            reason = _wait(child.pid, limit_s, cancel)
            if reason != "ended":
                _terminate(child.pid)
        except BaseException:
            _terminate(child.pid)
            raise
        finally:
            # The leader is not reaped yet, so its group number cannot have been given away.
            kill_group(child.pid)
            returncode = child.wait()
        return _Ending(returncode, reason)


def _wait(pid: int, limit_s: float | None, cancel: threading.Event | None) -> str:
    """Wait for the leader without reaping it."""
    deadline_s = math.inf if limit_s is None else time.monotonic() + limit_s
    pause_s = _POLL_MIN_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if _is_cancelled(cancel):
            return "cancelled"
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return "timeout"
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _POLL_MAX_S)
    return "ended"


def _is_cancelled(cancel: threading.Event | None) -> bool:
    return _stopping.is_set() or (cancel is not None and cancel.is_set())


def _terminate(group: int) -> None:
    """Ask the group to end and give it the grace; what remains is for kill_group()."""
    _signal(group, signal.SIGTERM)
    _await_end(group)


def kill_group(group: int) -> None:
    """Kill what is left of a process group, and wait: its files may be removed by the caller next.

    The leader, if it is a child of this process, is left to be reaped: until then nobody else gets
    its number.
    """
    with contextlib.suppress(ProcessLookupError):
        _signal(group, signal.SIGKILL)
    _await_end(group)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(PermissionError):  # a set-user-ID program, which ended by itself
        os.killpg(group, number)


def _await_end(group: int) -> None:
    deadline_s = time.monotonic() + GRACE_S
    while _alive(group) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _alive(group: int) -> bool:
    """Whether any process of the group still runs (zombies do not)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended while we were looking
                # "pid (name) state ppid pgrp ...": the name may hold spaces and parentheses.
                stat = (entry / "stat").read_text(errors="replace")
                state, _ppid, pgrp = stat.rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    return True
    return False


class _Guard:
    """Kills a process group when this process dies; see the head of this file."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> "_Guard":
        return self

    def __exit__(self, *_: object) -> None:
        # Killed before its pipe closes: the group number may be another's by then.
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()

    def watch(self, group: int) -> None:
        if self._shell.stdin is not None:
            self._shell.stdin.write(f"{group}\n".encode())
            self._shell.stdin.flush()


def timeout_scale() -> float:
    """Return by what every time limit is multiplied; raises UsageError for no positive number."""
    text = os.environ.get(_SCALE_VARIABLE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not (0 < scale < math.inf):
        raise UsageError(
            f"{_SCALE_VARIABLE}: got {text!r}, expected a positive number (2 doubles every limit)"
        )
    return scale


def _open_log(log: Path, line: str) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {line}\n")
        file = log.open("ab+")
        file.seek(0, os.SEEK_END)
        return file
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write the log {log}: {error.strerror}") from error


def _temporary(text: str = "") -> IO[bytes]:
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        file.write(text.encode())
        file.seek(0)
        return file
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write a temporary file: {error.strerror}; free some space or set TMPDIR"
        ) from error


def _append_to_command_log(line: str) -> None:
    name = os.environ.get(_COMMAND_LOG_VARIABLE)
    if not name:
        return
    try:
        with Path(name).open("a") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise EnvironmentUnfit(
            f"{_COMMAND_LOG_VARIABLE}: cannot append to {name}: {error.strerror}"
        ) from error


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _tail(file: IO[bytes], start: int) -> list[str]:
    """The last lines that say something, without what would disturb a terminal."""
    file.seek(0, os.SEEK_END)
    file.seek(max(start, file.tell() - _TAIL_BYTES))
    text = file.read().decode(errors="replace")
    lines = (_CONTROL.sub("", line.rstrip().rpartition("\r")[2]) for line in text.split("\n"))
    return [line for line in lines if line.strip()][-_TAIL_LINES:]


def _why_not_started(
    program: str, cwd: Path | None, env: Mapping[str, str] | None, error: OSError
) -> str:
    if cwd is not None and not cwd.is_dir():
        return f"cannot start {program}: its working directory {cwd} does not exist"
    path = (os.environ if env is None else env).get("PATH", os.defpath)
    found = shutil.which(program, mode=os.F_OK, path=path)
    if error.errno == errno.ENOENT and found is not None:
        return f"cannot start {found}: the interpreter it names in its head does not exist"
    if error.errno == errno.ENOENT:
        name = Path(program).name
        where = "there is no such file" if "/" in program else f"not in PATH={path}"
        package = "util-linux" if name in _UTIL_LINUX else f"that holds bin/{name}"
        return f"program not found: {program} ({where}); install the package {package}"
    if error.errno == errno.ENOEXEC:
        return f"cannot start {program}: not a program for this machine ({os.uname().machine})"
    return f"cannot start {program}: {error.strerror}"


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _why_failed(returncode: int) -> str:
    if returncode < 0:
        reason = f"was killed by {_signal_name(-returncode)}"
        if -returncode == signal.SIGKILL:
            reason += ", by hand or because memory ran out (dmesg tells)"
        return reason
    if returncode == _NOT_FOUND:
        return f"ended with exit code {returncode}: a program it calls was not found"
    if returncode == _NOT_EXECUTABLE:
        return f"ended with exit code {returncode}: a program it calls cannot be executed"
    if 128 < returncode < 128 + signal.NSIG:
        inner = _signal_name(returncode - 128)
        return f"ended with exit code {returncode}: what it ran was killed by {inner}"
    return f"ended with exit code {returncode}"


def _why_timeout(limit_s: float | None) -> str:
    return (
        f"did not end within its time limit of {limit_s:g} s and was stopped; "
        f"on a slow machine set {_SCALE_VARIABLE}=2 to double every limit"
    )

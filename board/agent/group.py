"""The server as a whole: where it is made to stand still, and which harts it may use.

Promise: one cgroup (v2) for all that is done to the server as a whole; what it is asked to hold is
what the kernel says it holds, or an exception.
Limit: needs root and a cgroup v2 file system with the freezer; the cpuset controller only where a
cpuset is asked for.  It is left behind empty, as nothing else uses its name.  Where there is no
such right (a container) the process is stopped by a signal: nobody else must send it any.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
CGROUP = ROOT / "bananaos-target"
FREEZE_TIMEOUT_S = 30.0


class Group:
    """The cgroup of one process; made when it is first needed.

    by_signal: no cgroup is made, and SIGSTOP takes the freezer's place.
    """

    def __init__(self, pid: int, *, by_signal: bool = False) -> None:
        self._pid = pid
        self._by_signal = by_signal
        self._made = False

    def make(self) -> None:
        """Put the process into it; does nothing the second time."""
        if not self._made and not self._by_signal:
            CGROUP.mkdir(exist_ok=True)
            (CGROUP / "cgroup.procs").write_text(str(self._pid))
            self._made = True

    def keep_to(self, harts: str) -> None:
        """Let the process run on these harts only, such as 0-7."""
        (ROOT / "cgroup.subtree_control").write_text("+cpuset")
        self.make()
        (CGROUP / "cpuset.cpus").write_text(harts)

    def harts(self) -> str | None:
        """The harts that a cpuset was asked for; None without one."""
        path = CGROUP / "cpuset.cpus"
        return path.read_text().strip() or None if self._made and path.exists() else None

    def freeze(self, frozen: bool) -> None:
        """Stop or thaw the process and wait until it is; nothing without a cgroup."""
        if self._by_signal:
            self._stop(frozen)
        if not self._made:
            return
        wanted = str(int(frozen))
        (CGROUP / "cgroup.freeze").write_text(wanted)
        _await(lambda: f"frozen {wanted}" in (CGROUP / "cgroup.events").read_text(), frozen)

    def _stop(self, stopped: bool) -> None:
        """Stop all threads and wait until they are, or let them go on; a dead one is neither."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self._pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            if stopped:
                _await(lambda: not set(_states(self._pid)) - set("TtZX"), stopped)


def _await(there: Callable[[], bool], frozen: bool) -> None:
    deadline_s = time.monotonic() + FREEZE_TIMEOUT_S
    while not there():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not {'frozen' if frozen else 'thawed'} in time")


def _states(pid: int) -> Iterator[str]:
    """The state letter of each thread, from /proc/PID/task/TID/stat."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        # The name, in parentheses, may hold anything.
        yield (task / "stat").read_text().rpartition(") ")[2][:1]

"""The cgroup of the server: where it is frozen, and which harts it may use.

Promise: one cgroup (v2) for all that is done to the server as a whole; what it is asked to hold is
what the kernel says it holds, or an exception.
Limit: needs root and a cgroup v2 file system with the freezer; the cpuset controller only where a
cpuset is asked for.  It is left behind empty, as nothing else uses its name.
"""

import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
CGROUP = ROOT / "bananaos-target"
FREEZE_TIMEOUT_S = 30.0


class Group:
    """The cgroup of one process; made when it is first needed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._made = False

    def make(self) -> None:
        """Put the process into it; does nothing the second time."""
        if not self._made:
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
        if not self._made:
            return
        wanted = str(int(frozen))
        (CGROUP / "cgroup.freeze").write_text(wanted)
        deadline_s = time.monotonic() + FREEZE_TIMEOUT_S
        while f"frozen {wanted}" not in (CGROUP / "cgroup.events").read_text():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not {'frozen' if frozen else 'thawed'} in time")

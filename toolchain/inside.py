"""Run a program inside the pinned tree: no network, fixed environment, nothing of the host but CPU.

Promise: the program sees the read-only tree, its own /proc, /dev and /tmp, the mounts it was given,
loopback only, and an environment that is the same on every machine.  It works for an ordinary user
where the kernel allows user namespaces and for root where it does not ("chroot" driver).
Limit: this isolates for reproducibility, not against hostile programs; the host's kernel version
and CPU remain visible.
"""

import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolchain.command import Completed, run
from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.paths import REPO
from toolchain.rootfs import rootfs
from toolchain.say import say

ENTER = REPO / "toolchain" / "enter.sh"
SOURCE_DATE_EPOCH = 1767225600
"""2026-01-01T00:00:00Z: the date of everything that insists on having one."""

ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",  # good for the host's unshare and for the tree
    "HOME": "/build",
    "USER": "root",
    "SHELL": "/bin/sh",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",
    "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH),
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
NAMESPACES = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
DRIVERS = {"userns": ["--user", "--map-root-user"], "chroot": []}


def run_inside(
    argv: Sequence[str],
    *,
    what: str,
    binds: Mapping[str, Path] | None = None,
    writable: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout_s: float | None = None,
    cancel: threading.Event | None = None,
    check: bool = True,
) -> Completed:
    """Run `argv` in the tree, with /build as working directory.

    binds and writable map a path inside to a host path.  Without a writable /build, programs start
    in an empty read-only directory.  Raises as `toolchain.command.run` does.
    """
    with tempfile.TemporaryDirectory(prefix="bananaos-enter-") as scratch:
        return run(
            entering(argv, binds or {}, writable or {}, Path(scratch) / "mounts"),
            what=what,
            env={**ENVIRONMENT, **(env or {})},
            log=log,
            timeout_s=timeout_s,
            cancel=cancel,
            check=check,
        )


def entering(
    argv: Sequence[str], binds: Mapping[str, Path], writable: Mapping[str, Path], mounts: Path
) -> list[str]:
    """Return the host command line that runs `argv` in the tree; writes the file `mounts`.

    For run_inside and for the few programs that need the caller's terminal.
    """
    lines = [f"ro\t{host}\t{inside}\n" for inside, host in binds.items()]
    lines += [f"rw\t{host}\t{inside}\n" for inside, host in writable.items()]
    mounts.write_text("".join(lines))
    return [
        *("unshare", *DRIVERS[driver()], *NAMESPACES),
        *("sh", os.fspath(ENTER), os.fspath(rootfs("build")), os.fspath(mounts)),
        *argv,
    ]


@functools.cache
def driver() -> str:
    """Return how this machine enters the tree: "userns", or "chroot" for root.

    BANANAOS_DRIVER names one.  Raises EnvironmentUnfit where neither works.
    """
    named = os.environ.get("BANANAOS_DRIVER", "")
    if named and named not in DRIVERS:
        raise UsageError(f"BANANAOS_DRIVER={named!r}: expected one of {', '.join(DRIVERS)}")
    missing = [name for name in ("unshare", "mount") if shutil.which(name) is None]
    if missing:
        raise EnvironmentUnfit(f"{' and '.join(missing)} not found: install util-linux")
    for name in [named] if named else DRIVERS:
        probe = run(
            ["unshare", *DRIVERS[name], *NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
            what=f"try the {name} driver",
            check=False,
        )
        if probe.returncode == 0:
            if name != "userns" and not named:
                say("inside: this kernel forbids user namespaces; falling back to chroot, as root")
            return name
    raise EnvironmentUnfit(
        "cannot enter the pinned tree: this kernel forbids user namespaces to ordinary users "
        "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone or "
        "kernel.apparmor_restrict_unprivileged_userns); allow them, or run the same command as root"
    )

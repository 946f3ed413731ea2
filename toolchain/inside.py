"""Run a program inside the pinned tree: no network, fixed environment, nothing of the host but CPU.

Promise: the program sees the read-only tree, its own /proc, /dev and /tmp, the mounts it was given,
loopback only, and an environment that is the same on every machine.  It works for an ordinary user
where the kernel allows user namespaces and for root where it does not ("chroot" driver).
Limit: this isolates for reproducibility, not against hostile programs; the host's kernel version
and CPU remain visible.
"""

import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolchain.command import Completed, run
from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.paths import REPO
from toolchain.rootfs import SOURCE_DATE_EPOCH, rootfs
from toolchain.say import say

ENTER = REPO / "toolchain" / "enter.sh"
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
    in an empty read-only directory.  Raises as `toolchain.command.run` does, and EnvironmentUnfit
    where the tree cannot be entered.
    """
    with _scratch() as scratch:
        return run(
            entering(argv, binds or {}, writable or {}, scratch / "mounts"),
            what=what,
            env={**ENVIRONMENT, **(env or {})},
            log=log,
            timeout_s=timeout_s,
            cancel=cancel,
            check=check,
        )


def entering(
    argv: Sequence[str],
    binds: Mapping[str, Path],
    writable: Mapping[str, Path],
    mounts: Path,
    *,
    name: str = "build",
    via: str | None = None,
) -> list[str]:
    """Return the host command line that runs `argv` in the tree `name`; writes the file `mounts`.

    For run_inside, for the few programs that need the caller's terminal, and for those of another
    tree.  via: a driver, where the one that is chosen by itself does not do.  Raises
    EnvironmentUnfit for a path or a file system that cannot be used, and as `driver` does.
    """
    rows = [("ro", os.fspath(host.absolute()), inside) for inside, host in binds.items()]
    rows += [("rw", os.fspath(host.absolute()), inside) for inside, host in writable.items()]
    for path in (path for row in rows for path in row if set("\t\n") & set(path)):
        raise EnvironmentUnfit(
            f"{path!r}: a path with a tab or a line break cannot be mounted; move the checkout, "
            "or set XDG_CACHE_HOME to another directory"
        )
    entry = [*("unshare", *DRIVERS[via or driver()], *NAMESPACES), "sh", os.fspath(ENTER)]
    tree = rootfs(name)
    if os.statvfs(tree).f_flag & os.ST_NOEXEC:
        raise EnvironmentUnfit(
            f"{tree}: this file system is mounted noexec, so that the tree's programs cannot run; "
            "set XDG_CACHE_HOME to a directory on another one"
        )
    try:
        mounts.write_bytes(os.fsencode("".join("\t".join(row) + "\n" for row in rows)))
    except OSError as exc:
        raise _no_scratch(os.fspath(mounts), exc) from exc
    return [*entry, os.fspath(tree), os.fspath(mounts), *argv]


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    try:
        directory = tempfile.TemporaryDirectory(prefix="bananaos-enter-")
    except OSError as exc:
        raise _no_scratch("a temporary directory", exc) from exc
    with directory as name:
        yield Path(name)


def _no_scratch(what: str, exc: OSError) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"cannot write {what}: {exc.strerror or exc}; set TMPDIR to a directory with some room"
    )


@functools.cache
def driver() -> str:
    """Return how this machine enters the tree: "userns", or "chroot" for root.

    BANANAOS_DRIVER names one.  Raises EnvironmentUnfit where neither works.
    """
    named = os.environ.get("BANANAOS_DRIVER", "")
    if named and named not in DRIVERS:
        raise UsageError(f"BANANAOS_DRIVER={named!r}: expected one of {', '.join(DRIVERS)}")
    # unshare, mount: util-linux; chroot: coreutils.  Looked for where run_inside will look.
    needed = ("unshare", "mount", "chroot")
    missing = [name for name in needed if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        raise EnvironmentUnfit(
            f"{' and '.join(missing)} not found in {ENVIRONMENT['PATH']}: install util-linux and "
            "coreutils"
        )
    for name in [named] if named else DRIVERS:
        probe = run(
            ["unshare", *DRIVERS[name], *NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
            what=f"try the {name} driver",
            env=ENVIRONMENT,
            check=False,
        )
        if probe.returncode == 0:
            if name != "userns" and not named:
                say("inside: this kernel forbids user namespaces; falling back to chroot, as root")
            return name
    tried = f"BANANAOS_DRIVER={named}: " if named else ""
    raise EnvironmentUnfit(f"{tried}cannot enter the pinned tree: {_why_not(named)}")


def _why_not(named: str) -> str:
    if os.geteuid() != 0 and named == "chroot":
        return "the chroot driver is for root; unset BANANAOS_DRIVER, or run it as root"
    if os.geteuid() != 0:
        return (
            "this kernel forbids user namespaces to ordinary users (sysctl "
            "user.max_user_namespaces, kernel.unprivileged_userns_clone or "
            "kernel.apparmor_restrict_unprivileged_userns); allow them, or run the same command "
            "as root"
        )
    if named == "userns":
        return "this kernel forbids user namespaces; unset BANANAOS_DRIVER to use chroot as root"
    return (
        "this is root without the right to mount, as in a container; allow user namespaces "
        "(sysctl user.max_user_namespaces) or give the container the capability CAP_SYS_ADMIN"
    )

"""Run a program inside the pinned tree: no network, fixed environment, nothing of the host but CPU.

Promise: the program sees the tree, its own /proc, /dev and /tmp, the mounts it was given, loopback
only, and an environment that is the same on every machine.  There are four ways in, the drivers:
userns  for an ordinary user where the kernel allows user namespaces; needs nothing but util-linux
chroot  for root where it does not
docker  a container of an image that is the tree (docker_driver.py)
nix     the tree in the Nix store (nix_driver.py); for builds only, so not for `run_inside`
The first that works is taken, or the one that BANANAOS_DRIVER names.  All give the same bytes.
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
from toolchain.rootfs import ENVIRONMENT, rootfs
from toolchain.say import say

ENTER = REPO / "toolchain" / "enter.sh"
NAMESPACES = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
UNSHARE = {"userns": ["--user", "--map-root-user"], "chroot": []}
DRIVERS = (*UNSHARE, "docker", "nix")
VARIABLE = "BANANAOS_DRIVER"
DIRECTORY = "/build"


def run_inside(
    argv: Sequence[str],
    *,
    what: str,
    binds: Mapping[str, Path] | None = None,
    writable: Mapping[str, Path] | None = None,
    scratch: Sequence[str] = (),
    directory: str = DIRECTORY,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout_s: float | None = None,
    cancel: threading.Event | None = None,
    check: bool = True,
) -> Completed:
    """Run `argv` in the tree, with `directory` as working directory.

    binds and writable map a path inside to a host path; of those named in `scratch` nobody wants
    the content back.  Without a writable `directory`, programs start in an empty one.  Raises as
    `toolchain.command.run` does, and EnvironmentUnfit where the tree cannot be entered.
    """
    binds, writable = binds or {}, writable or {}
    environment = {**ENVIRONMENT, **(env or {})}
    with _scratch() as place:
        if driver() == "docker":
            words, own = _through_docker(
                argv, binds, writable, scratch, directory, environment, place, log is not None
            )
        else:
            words = entering(argv, binds, writable, place / "mounts", directory)
            own = environment
        return run(
            words,
            what=what,
            env=own,
            log=log,
            timeout_s=timeout_s,
            cancel=cancel,
            check=check,
        )


def _through_docker(
    argv: Sequence[str],
    binds: Mapping[str, Path],
    writable: Mapping[str, Path],
    scratch: Sequence[str],
    directory: str,
    environment: Mapping[str, str],
    place: Path,
    one_stream: bool,
) -> tuple[list[str], dict[str, str]]:
    """Return the host command and its environment; the program's is part of the job."""
    from toolchain import docker_driver  # importing the SDK takes a third of a second

    job = docker_driver.Job(
        image=docker_driver.have_image(),
        argv=list(argv),
        env=environment,
        directory=directory,
        binds={inside: os.fspath(host.absolute()) for inside, host in binds.items()},
        writable={inside: os.fspath(host.absolute()) for inside, host in writable.items()},
        scratch=list(scratch),
        one_stream=one_stream,
    )
    return docker_driver.command(job, place / "job.json"), dict(os.environ)


def entering(
    argv: Sequence[str],
    binds: Mapping[str, Path],
    writable: Mapping[str, Path],
    mounts: Path,
    directory: str = DIRECTORY,
    *,
    network: bool = False,
    name: str = "build",
    via: str | None = None,
) -> list[str]:
    """Return the host command line that runs `argv` in the tree `name`; writes the file `mounts`.

    For run_inside, for the few programs that need the caller's terminal or outlive the caller, and
    for those of another tree.  network: with the host's network, for an emulator whose port is
    forwarded; no build.  via: a driver, where the one that is chosen by itself does not do.  Raises
    EnvironmentUnfit for a path or a file system that cannot be used, for a driver that has no such
    command line, and as `driver` does.
    """
    rows = [("ro", os.fspath(host.absolute()), inside) for inside, host in binds.items()]
    rows += [("rw", os.fspath(host.absolute()), inside) for inside, host in writable.items()]
    for path in (path for row in rows for path in row if set("\t\n") & set(path)):
        raise EnvironmentUnfit(
            f"{path!r}: a path with a tab or a line break cannot be mounted; move the checkout, "
            "or set XDG_CACHE_HOME to another directory"
        )
    via = via or driver()
    if via not in UNSHARE:
        raise EnvironmentUnfit(
            f"the driver {via} cannot run this, only {' and '.join(UNSHARE)} can"
            + ("; docker can run all that needs no terminal" if via == "nix" else "")
        )
    namespaces = [each for each in NAMESPACES if not (network and each == "--net")]
    entry = [*("unshare", *UNSHARE[via], *namespaces), "sh", os.fspath(ENTER)]
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
    return [*entry, os.fspath(tree), os.fspath(mounts), directory, *argv]


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


def use(name: str) -> None:
    """Make `name`, of --driver, this process's driver, as BANANAOS_DRIVER does; "" changes nothing.

    Raises UsageError for a name that is none.
    """
    if name and name not in DRIVERS:
        raise UsageError(f"--driver {name}: expected one of {', '.join(DRIVERS)}")
    if name:
        os.environ[VARIABLE] = name
        driver.cache_clear()


@functools.cache
def driver() -> str:
    """Return how this machine enters the tree: the first of DRIVERS that works here.

    BANANAOS_DRIVER names one.  Raises EnvironmentUnfit, with every reason, where none works.
    """
    named = os.environ.get(VARIABLE, "")
    if named and named not in DRIVERS:
        raise UsageError(f"{VARIABLE}={named!r}: expected one of {', '.join(DRIVERS)}")
    reasons: list[str] = []
    for name in [named] if named else DRIVERS:
        reason = refusal(name)
        if reason is None:
            if reasons:
                say(f"inside: {reasons[0]}; falling back to {name}")
            return name
        if reason not in reasons:
            reasons.append(reason)
    if named:
        raise EnvironmentUnfit(
            f"{VARIABLE}={named}: cannot enter the pinned tree: {reasons[0]}; or unset {VARIABLE}"
        )
    raise EnvironmentUnfit(f"cannot enter the pinned tree: {'; '.join(reasons)}")


@functools.cache
def refusal(name: str) -> str | None:
    """Return why the driver `name` does not work here, with the cure; None when it does."""
    if name == "docker":
        from toolchain import docker_driver

        return docker_driver.refusal()
    if name == "nix":
        from toolchain import nix_driver

        return nix_driver.refusal()
    # unshare, mount: util-linux; chroot: coreutils.  Looked for where run_inside will look.
    needed = ("unshare", "mount", "chroot")
    missing = [name for name in needed if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        return (
            f"{' and '.join(missing)} not found in {ENVIRONMENT['PATH']}: install util-linux and "
            "coreutils"
        )
    probe = run(
        ["unshare", *UNSHARE[name], *NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
        what=f"try the {name} driver",
        env=ENVIRONMENT,
        check=False,
    )
    if probe.returncode == 0:
        return None
    root = os.geteuid() == 0
    if name == "userns" and root:
        return "this kernel forbids user namespaces (sysctl user.max_user_namespaces)"
    if name == "userns":
        return (
            "this kernel forbids user namespaces to ordinary users (sysctl "
            "user.max_user_namespaces, kernel.unprivileged_userns_clone or "
            "kernel.apparmor_restrict_unprivileged_userns): allow them, or run the same command as "
            "root"
        )
    if root:
        return (
            "this is root without the right to mount, as in a container: give the container the "
            "capability CAP_SYS_ADMIN"
        )
    return "the chroot driver is for root"

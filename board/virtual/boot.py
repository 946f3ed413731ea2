"""Boot the virtual board once, deterministically, run one program on it, bring its results back.

Promise: a boot ends in exactly one way, and only a guest that ran to its end and handed out a
complete archive is a success: panic, oops, RCU stall, out of memory, time-out, a killed QEMU and
missing results are told apart, each with the console's last lines.  Nothing of it is left running.
Limit: the wall-clock deadline depends on the host; hitting it makes a run invalid, never different.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from board.base import RunFailed, tail
from board.times import cpu_seconds
from board.virtual import machine as machines
from board.virtual import quantum
from board.virtual.machine import Machine
from toolchain.command import CommandFailed
from toolchain.errors import EnvironmentUnfit
from toolchain.inside import run_inside
from toolchain.paths import cache_dir
from toolchain.recipe import build

ROOM = Path(__file__).parent

# In order: an oops ends in a panic when the kernel is told so, a stall may, out of memory may.
SYMPTOMS = (
    ("guest-oom", re.compile(r"Out of memory: |invoked oom-killer|System is deadlocked on memory")),
    ("guest-rcu-stall", re.compile(r"rcu: INFO: \S+ (self-)?detected (expedited )?stall")),
    (
        "guest-oops",
        re.compile(r"\bOops\b.*\[#\d+\]|[Kk]ernel BUG\b|Unable to handle kernel"),
    ),
    ("guest-panic", re.compile(r"Kernel panic - not syncing")),
)

WITH_MODULES = """#!/bin/sh
for module in /modules/*.ko; do
	insmod "$module" || exit 1
done
exec /payload/main
"""
"""/payload/run where the kernel has modules to load: without them there is no results port."""


@dataclass(frozen=True)
class GuestKernel:
    """A kernel to boot that is not the one built here.

    directory holds the file Image; modules is a cpio archive of /modules/NN-NAME.ko, which the
    guest loads in the order of their names before anything else.
    """

    directory: Path
    modules: Path


@dataclass(frozen=True)
class Boot:
    """A boot that ended well: the guest program's exit code and what the host spent on it."""

    exit_code: int
    host_cpu_s: float
    host_wall_s: float


def boot(
    machine: Machine,
    *,
    seed: int,
    payload: Mapping[str, Path],
    script: str,
    directory: Path,
    deadline_s: float,
    cancel: threading.Event | None = None,
    extra: Sequence[str] = (),
    binds: Mapping[str, Path] | None = None,
    kernel: GuestKernel | None = None,
) -> Boot:
    """Boot `machine`, run `script` in it and fill `directory`.

    payload maps a name below /payload to a host file; script is the text of /payload/run, whose
    results belong below /results.  directory gets console.log, qemu.log and the results' files.
    deadline_s is wall time.  extra are further arguments for QEMU, which sees binds (inside path ->
    host path, read-only) and writes below /out, which is `directory`.  kernel: instead of the one
    built here.  Raises RunFailed, Cancelled, EnvironmentUnfit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    needed = {
        "/in/kernel/image": kernel.directory if kernel else build("kernel/image"),
        "/in/board/initramfs": build("board/initramfs"),
    }
    texts = {"run": script}
    if kernel:
        needed["/in/modules.cpio"] = kernel.modules
        texts = {"run": WITH_MODULES, "main": script}
    with _scratch() as scratch:
        (scratch / "payload").mkdir()
        for name, text in texts.items():
            (scratch / "payload" / name).write_text(text)
            (scratch / "payload" / name).chmod(0o755)
        (scratch / "build").mkdir()
        mounts = {
            **needed,
            **(binds or {}),
            "/recipe/boot.sh": ROOM / "boot.sh",
            **{f"/payload/{name}": scratch / "payload" / name for name in texts},
            **{f"/payload/{name}": path for name, path in payload.items()},
        }
        argv = ["sh", "-eu", "/recipe/boot.sh", *machines.deterministic(machine, seed), *extra]
        if not kernel:
            mounts |= quantum.binds()
            argv += quantum.arguments(needed["/in/kernel/image"])
        try:
            done = run_inside(
                argv,
                what="run the virtual board",
                binds=mounts,
                writable={"/build": scratch / "build", "/out": directory},
                log=directory / "qemu.log",
                timeout_s=deadline_s,
                cancel=cancel,
            )
        except CommandFailed as exc:
            raise _failed(exc, directory) from exc
        cpu_s = cpu_seconds((scratch / "build" / "times").read_text())
    symptom = _symptom(_console(directory))
    if symptom:
        raise RunFailed(symptom, console_tail(directory))
    return Boot(_unpack(directory), cpu_s, done.seconds)


def _failed(exc: CommandFailed, directory: Path) -> Exception:
    """Tell why QEMU did not end by itself with success."""
    console = _console(directory)
    symptom = _symptom(console)
    if symptom:
        return RunFailed(symptom, console_tail(directory))
    if exc.timed_out:
        return RunFailed("guest-timeout", f"{exc}\n{console_tail(directory)}")
    # The shell that started QEMU reports a signal as 128 + its number.
    if exc.completed.returncode < 0 or exc.completed.returncode > 128:
        return RunFailed("qemu-killed", f"{exc}\n{console_tail(directory)}")
    return exc


def _symptom(console: str) -> str | None:
    for reason, pattern in SYMPTOMS:
        if pattern.search(console):
            return reason
    return None


def _console(directory: Path) -> str:
    path = directory / "console.log"
    return path.read_text(errors="replace") if path.is_file() else ""


def console_tail(directory: Path) -> str:
    """Return the console's last lines, indented for an error message."""
    return tail(directory / "console.log", "the console is empty")


def _unpack(directory: Path) -> int:
    """Unpack results.tar into `directory` and return the guest program's exit code."""
    archive = directory / "results.tar"
    try:
        with tarfile.open(archive) as tar:
            names = [member.name.removeprefix("./") for member in tar.getmembers()]
            if not names or names[-1] != "exit":
                raise RunFailed("no-results", f"results end early\n{console_tail(directory)}")
            extract(tar, directory)
    except (tarfile.TarError, FileNotFoundError) as exc:
        raise RunFailed("no-results", f"{exc}\n{console_tail(directory)}") from exc
    except OSError as exc:
        raise EnvironmentUnfit(
            f"{directory}: cannot unpack the results: {exc.strerror}; free some space"
        ) from exc
    archive.unlink()
    exit_file = directory / "exit"
    code = int(exit_file.read_text())
    exit_file.unlink()
    return code


def extract(tar: tarfile.TarFile, directory: Path) -> None:
    """Write an archive's files and folders; tarfile's own safe way came with Python 3.11.4."""
    for member in tar.getmembers():
        target = directory / member.name
        stream = tar.extractfile(member)
        if ".." in target.parts or member.name.startswith("/") or not (stream or member.isdir()):
            raise tarfile.ExtractError(f"{member.name}: neither a file nor a folder of results")
        (target if stream is None else target.parent).mkdir(parents=True, exist_ok=True)
        if stream is not None:
            with stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    parent = cache_dir() / "build"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="boot-", dir=parent))
        in_use = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise EnvironmentUnfit(
            f"{parent}: cannot write: {exc.strerror}; free some space or make it writable"
        ) from exc
    try:
        fcntl.flock(in_use, fcntl.LOCK_SH)  # ./inv clean leaves it alone
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(in_use)

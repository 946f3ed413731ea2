"""`./inv clean`: give back the disk that nothing of today's checkout needs.

Promise: results are never touched; what a running ./inv holds a lock on stays; each folder is
removed with one line that says why and how large it was.  All of it can be made or fetched again.
Limit: the use of an artifact or a tree is known by the day, not by who asked for it: another
checkout that shares this cache keeps what it used lately.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from toolchain import nix_driver
from toolchain.cache import MANIFEST, remove_tree
from toolchain.errors import UsageError, cannot_write
from toolchain.lock import read_lock
from toolchain.paths import cache_dir
from toolchain.rootfs import census_file
from toolchain.say import say
from toolchain.sources import sources

DAY_S = 86400.0
_DAMAGED = "damaged-"


def clean(days: int, everything: bool) -> None:
    """Remove what was not used for `days` days, or the whole cache; print what that gave back.

    Raises UsageError for a negative number, EnvironmentUnfit for what cannot be removed.
    """
    if days < 0:
        raise UsageError(f"--days {days}: expected an integer from 0")
    freed_bytes = 0
    for path, why in _everything() if everything else _unneeded(time.time() - days * DAY_S):
        size_bytes = _size_bytes(path)
        with _free(path) as free:  # nobody may begin to use it before it is gone
            if not free:
                say(f"clean: {path.name}: in use, left alone")
                continue
            try:
                if path.is_dir():
                    remove_tree(path)
                else:
                    path.unlink()
            except OSError as exc:
                raise cannot_write(path, exc) from exc
        say(f"clean: {path.relative_to(cache_dir())}: {why}, {size_bytes / 1e6:.1f} MB")
        freed_bytes += size_bytes
    print(f"{freed_bytes / 1e6:.0f} MB of {cache_dir()} given back")


def _everything() -> Iterator[tuple[Path, str]]:
    for place in _below(cache_dir()):
        if place.name != "locks":
            yield from ((path, "asked for") for path in _below(place))


def _unneeded(before: float) -> Iterator[tuple[Path, str]]:
    """What nothing needs: with the reason in words."""
    root = cache_dir()
    for path in _below(root / "build"):
        yield path, "left behind by a build"
    for place in ("artifacts", "rootfs"):
        for path in _below(root / place):
            if path.name.startswith((_DAMAGED, f".{_DAMAGED}")):
                yield path, "set aside as damaged"
    used_s = {path: _used_s(path / MANIFEST) for path in _below(root / "artifacts")}
    for path in _below(root / "rootfs"):
        if path.is_dir():
            used_s[path] = _used_s(census_file(path))
    for path, last_s in used_s.items():
        if not path.name.startswith((_DAMAGED, ".")) and last_s < before:
            yield path, f"last used {(time.time() - last_s) / DAY_S:.0f} days ago"
    for path in _below(root / "rootfs"):
        if path.is_file() and not path.with_suffix("").is_dir():
            yield path, "of a tree that is gone"
    for path in _below(root / "verify"):
        if path.is_dir():
            yield path, "kept by ./inv verify for a look"
    wanted = {package.sha256 for package in read_lock()} | {s.sha256 for s in sources().values()}
    for path in _below(root / "downloads"):
        if path.name.removesuffix(".part") not in wanted and not path.name.startswith("."):
            yield path, "in neither debian.lock nor sources.toml"


def _used_s(mark: Path) -> float:
    """When an entry was last used: whoever uses it sets the time of its manifest or census."""
    with contextlib.suppress(FileNotFoundError):
        return mark.stat().st_mtime
    return 0.0


def _below(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _size_bytes(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(
        Path(directory, name).lstat().st_size
        for directory, _, names in os.walk(path)
        for name in names
    )


@contextlib.contextmanager
def _free(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock that guards it (cache.exclusive); until the end nobody can."""
    name = path.name.removeprefix(".").removesuffix(".new")
    guards = {name, f"rootfs-{name}"}
    if path.parent.name in ("verify", "downloads"):  # one lock for all that lies there
        guards = {path.parent.name, f"source-{name}"}
    elif path.parent.name == "build" and name.startswith(nix_driver.PLACES):
        guards.add(nix_driver.LOCK)
    locks = [cache_dir() / "locks" / f"{guard}.lock" for guard in sorted(guards)]
    if path.parent.name == "build" and path.is_dir():
        locks.append(path)  # a guest's own folder, locked itself (board/virtual/boot.py)
    with contextlib.ExitStack() as stack:
        yield all(_locked(lock, stack) for lock in locks if lock.exists())


def _locked(lock: Path, stack: contextlib.ExitStack) -> bool:
    """Whether the lock could be had; it is given back with the stack."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

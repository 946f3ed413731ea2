"""A pinned tree: the packages of debian.lock unpacked side by side, a pure function of the lock.

Promise: no maintainer script runs; every package is checked against its sha256 when it is read;
fixups.toml lists all that is added; the tree appears whole or not at all, with the same names,
bytes, modes and times for every user, umask and Python; a tree that has changed since it was made
is set aside and made anew, and that is said.
Limit: owners, set-id bits and group/other write permission are dropped (an ordinary user must be
able to make the same tree); what needs a postinst beyond fixups.toml does not work in it.  The
check for changes compares names, modes, sizes and times, not bytes.
"""

import concurrent.futures
import contextlib
import fnmatch
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from debian.arfile import ArError
from debian.debfile import DebFile

from toolchain import fetch, lock, mirror
from toolchain.cache import exclusive, remove_tree, set_aside
from toolchain.errors import InvalidData, cannot_read, cannot_write
from toolchain.paths import REPO, cache_dir
from toolchain.say import say
from toolchain.tomlfile import read_toml

FIXUPS = REPO / "toolchain" / "fixups.toml"
FORMAT = "1"
"""Raised when this file unpacks differently from before: it is part of the tree's key."""
ENVIRONMENT: dict[str, str] = read_toml(REPO / "toolchain" / "environment.toml")
"""Of every program in a tree."""
SOURCE_DATE_EPOCH = int(ENVIRONMENT["SOURCE_DATE_EPOCH"])
"""The date of everything that insists on having one."""
COPY_BYTES = 1 << 20
_unchanged: set[Path] = set()  # trees this process has held against their census


def packages_of(tree: str) -> list[lock.Package]:
    """Return the lock's rows for `tree` ("build" or "guest"); raises InvalidData if it has none."""
    packages = [package for package in lock.read_lock() if package.tree == tree]
    if not packages:
        raise InvalidData(f"{lock.LOCK}: no package of tree {tree!r}; restore the file from git")
    return packages


def tree_key(tree: str) -> str:
    """Return the hex sha256 of everything that decides the tree's content."""
    rows = [(package.name, package.sha256) for package in packages_of(tree)]
    decided = json.dumps([FORMAT, rows, _fixups(tree)], sort_keys=True)
    return hashlib.sha256(decided.encode()).hexdigest()


def tree_inputs(tree: str) -> dict[str, str]:
    """Return what decides the tree's content, part by part, in words a person can compare."""
    fixups = json.dumps(_fixups(tree), sort_keys=True)
    decided = {"format": FORMAT, "fixups": hashlib.sha256(fixups.encode()).hexdigest()}
    for package in packages_of(tree):
        decided[f"package {package.name}:{package.architecture}"] = package.sha256
    return decided


def fetch_tree(tree: str) -> None:
    """Download what is missing or damaged of the tree's packages."""
    wanted = [
        fetch.Wanted(f"{p.name} {p.version} {p.architecture}", p.pool_path, p.size_bytes, p.sha256)
        for p in packages_of(tree)
    ]
    # One lock for all trees: they share packages.
    with exclusive("downloads"):
        fetch.fetch(wanted, mirror.find_mirrors)


def rootfs(tree: str) -> Path:
    """Return the unpacked tree's directory, making it on first use (about a minute).

    Raises InvalidData for a damaged download, EnvironmentUnfit for disk or mirror trouble.
    """
    final = cache_dir() / "rootfs" / f"{tree}-{tree_key(tree)[:16]}"
    if _is_unchanged(final):
        with contextlib.suppress(OSError):  # a cache that is read only is used all the same
            os.utime(census_file(final))  # clean.py removes what was not used for long
        return final
    with exclusive(f"rootfs-{final.name}"):
        if not _is_unchanged(final):
            if final.is_dir():
                aside = set_aside(final)
                say(
                    f"rootfs: {final.name}: changed since it was made, or of an earlier version; "
                    f"set aside as {aside.name} and made anew"
                )
            fetch_tree(tree)
            _make(tree, final)
    return final


def _make(tree: str, final: Path) -> None:
    """Unpack beside `final` and put the tree in its place; the caller holds the lock."""
    # The lock makes this name ours: whatever lies there was left by a process that was killed.
    root = final.parent / f".{final.name}.new"
    try:
        unpack(tree, root)
        # Before the tree: a tree without a census is none.
        census_file(final).write_text(_census(root))
        root.rename(final)
    except OSError as exc:
        raise cannot_write(final, exc) from exc
    finally:
        try:
            remove_tree(root)
        except OSError as exc:
            say(f"rootfs: {root}: cannot remove what was begun: {exc.strerror}")
    _unchanged.add(final)
    say(f"rootfs: tree {tree} is ready")


def unpack(tree: str, root: Path) -> None:
    """Unpack the downloaded packages of the tree into `root`, which is cleared before.

    Raises InvalidData for a damaged download, EnvironmentUnfit for disk trouble.
    """
    packages = packages_of(tree)
    say(f"rootfs: unpacking {len(packages)} packages of tree {tree} (about a minute)")
    fixups = _fixups(tree)
    try:
        remove_tree(root)
        root.mkdir(parents=True)
        root.chmod(0o755)
        for name in fixups["directories"]:
            _directory(root / name)
        _links(root, fixups["links_before"])
        # One architecture after the other: their packages share files (of the same content).
        for architecture in sorted({p.architecture for p in packages}):
            batch = [p for p in packages if p.architecture == architecture]
            _unpack_batch(batch, root, fixups["exclude"])
        _links(root, fixups["links_after"])
        for name, text in fixups["files"].items():
            _directory((root / name).parent)
            _file(root / name, io.BytesIO(text.encode()), 0o644, SOURCE_DATE_EPOCH)
        _set_times(root)
    except OSError as exc:
        raise cannot_write(root, exc) from exc


def _unpack_batch(packages: list[lock.Package], root: Path, exclude: list[str]) -> None:
    """Unpack all packages; the first failure, or an interrupt, stops the others.

    Threads and not processes: decompressing and hashing release Python's lock, and nothing of them
    can outlive this process.
    """
    stop = threading.Event()
    owner: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = [
            pool.submit(_unpack, package, root, exclude, owner, stop) for package in packages
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _unpack(
    package: lock.Package,
    root: Path,
    exclude: list[str],
    owner: dict[str, str],
    stop: threading.Event,
) -> None:
    """Unpack one package; `owner` tells whose each name beside directories is."""
    path = fetch.downloads_dir() / package.sha256
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise cannot_read(path, exc) from exc
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise InvalidData(
            f"{path}: {package.name} {package.version} changed on the disk while it was unpacked; "
            "run the same command again to fetch it anew"
        )
    for member, archive in _members(package, content):
        if stop.is_set():
            break
        name = str(member.name).removeprefix("./")
        if any(fnmatch.fnmatchcase(name, glob) for glob in exclude):
            continue
        # Claimed before it is written: two threads never write one file. setdefault is atomic.
        if not member.isdir() and (other := owner.setdefault(name, package.name)) != package.name:
            raise InvalidData(
                f"{lock.LOCK}: {package.name} and {other} both hold {name}: which of the two the "
                "tree gets would be chance"
            )
        _place(archive, member, name, root)


def _members(
    package: lock.Package, content: bytes
) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """Yield what a package holds, with the archive to read it from."""
    try:
        archive = DebFile(fileobj=io.BytesIO(content)).data.tgz()
    # OSError is how the library finds fault with an archive: nothing is read from a disk here.
    except (ArError, OSError, EOFError) as exc:
        raise InvalidData(
            f"{lock.LOCK}: {package.name} {package.version} is not a Debian package: {exc}"
        ) from exc
    for member in archive:
        yield member, archive


def _place(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, root: Path) -> None:
    """Put a member below `root` as an ordinary user can.

    tarfile's own filters would do most of it, but Python 3.11 before 3.11.4 has none, later
    versions differ in them, and their directories get the umask's mode.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise InvalidData(f"package member {name!r} points out of the tree")
    target = root / name
    if member.isdir():
        if not target.is_dir():  # made before, perhaps through one of base-files' links
            _directory(target)
        return
    _directory(target.parent)
    if member.issym():
        if not target.is_symlink():  # base-files' own links, made before
            target.symlink_to(member.linkname)
    elif member.islnk() and (root / member.linkname.removeprefix("./")).exists():
        target.unlink(missing_ok=True)
        target.hardlink_to(root / member.linkname.removeprefix("./"))
    elif member.isreg() or member.islnk():  # the latter: to what is excluded
        stream = archive.extractfile(member)
        assert stream is not None, "a regular file has a content"
        with stream:
            _file(target, stream, member.mode & 0o755 | 0o400, int(member.mtime))
    else:
        raise InvalidData(f"package member {name!r} is a device or a pipe: not for ordinary users")


def _directory(path: Path) -> None:
    """Make a directory and what is above it, whatever the umask is; another may make it, too."""
    if path.is_dir():
        return
    _directory(path.parent)
    path.mkdir(exist_ok=True)
    path.chmod(0o755)


def _file(path: Path, content: IO[bytes], mode: int, time_s: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("xb") as out:
        shutil.copyfileobj(content, out, COPY_BYTES)
    path.chmod(mode)
    os.utime(path, (time_s, time_s))


def _links(root: Path, links: dict[str, str]) -> None:
    for name, target in links.items():
        (root / name).symlink_to(target)


def _set_times(root: Path) -> None:
    """Give links and directories, whose times tell when they were made here, the fixed time."""
    for directory, names, files in os.walk(root, topdown=False):
        for name in (*names, *files):
            path = Path(directory, name)
            if path.is_symlink():
                os.utime(path, (SOURCE_DATE_EPOCH, SOURCE_DATE_EPOCH), follow_symlinks=False)
        os.utime(directory, (SOURCE_DATE_EPOCH, SOURCE_DATE_EPOCH))


def _is_unchanged(final: Path) -> bool:
    """Whether the tree is there as it was made; looked at once in a process."""
    if not final.is_dir():
        return False
    if final not in _unchanged:
        try:
            if census_file(final).read_text() != _census(final):
                return False
        except FileNotFoundError:  # of the census, or of what somebody removes just now
            return False
        except OSError as exc:
            raise cannot_read(final, exc) from exc
        _unchanged.add(final)
    return True


def census_file(final: Path) -> Path:
    """Where it is written down what a tree was made of; its time is that of the last use."""
    return final.with_name(f"{final.name}.census")


def _census(root: Path) -> str:
    """Return a hex sha256 over name, mode, size, time and link target of all below `root`."""
    digest = hashlib.sha256()
    waiting = [""]
    while waiting:
        above = waiting.pop()
        with os.scandir(root / above) as entries:
            below = sorted(entries, key=lambda entry: entry.name)
        for entry in below:
            status = entry.stat(follow_symlinks=False)
            name, size_bytes, time_s, link = f"{above}{entry.name}", 0, 0, ""
            if stat.S_ISDIR(status.st_mode):
                waiting.append(f"{name}/")
            elif stat.S_ISLNK(status.st_mode):
                link = os.readlink(entry)  # noqa: PTH115 (no Path for 20000 entries)
            else:
                size_bytes, time_s = status.st_size, int(status.st_mtime)
            digest.update(repr((name, status.st_mode, size_bytes, time_s, link)).encode())
    return digest.hexdigest()


def _fixups(tree: str) -> dict[str, Any]:
    data = read_toml(FIXUPS)
    try:
        merged: dict[str, Any] = {"directories": data["common"]["directories"]["paths"]}
        merged["exclude"] = data["common"]["exclude"]["globs"] + data[tree]["exclude"]["globs"]
        for key in ("links_before", "links_after", "files"):
            merged[key] = {**data["common"].get(key, {}), **data[tree].get(key, {})}
    except KeyError as exc:
        raise InvalidData(f"{FIXUPS}: no {exc} for tree {tree!r}; restore it from git") from exc
    return merged

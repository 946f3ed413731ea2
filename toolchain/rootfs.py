"""A pinned tree: the packages of debian.lock unpacked side by side, a pure function of the lock.

Promise: no maintainer script runs; every package is checked against its sha256 while it is read;
fixups.toml lists all that is added; the tree appears whole or not at all.
Limit: owners, set-id bits and group/other write permission are dropped (an ordinary user must be
able to make the same tree); what needs a postinst beyond fixups.toml does not work in it.
"""

import concurrent.futures
import fnmatch
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from debian.debfile import DebFile

from toolchain import fetch, lock, mirror
from toolchain.cache import exclusive
from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.paths import REPO, cache_dir
from toolchain.say import say

FIXUPS = REPO / "toolchain" / "fixups.toml"
FORMAT = "1"
"""Raised when this file unpacks differently from before: it is part of the tree's key."""


def packages_of(tree: str) -> list[lock.Package]:
    """Return the lock's rows for `tree` ("build" or "guest")."""
    return [package for package in lock.read_lock() if package.tree == tree]


def tree_key(tree: str) -> str:
    """Return the hex sha256 of everything that decides the tree's content."""
    rows = [(package.name, package.sha256) for package in packages_of(tree)]
    decided = json.dumps([FORMAT, rows, _fixups(tree)], sort_keys=True)
    return hashlib.sha256(decided.encode()).hexdigest()


def fetch_tree(tree: str) -> None:
    """Download what is missing of the tree's packages."""
    wanted = [
        fetch.Wanted(f"{p.name} {p.version} {p.architecture}", p.pool_path, p.size_bytes, p.sha256)
        for p in packages_of(tree)
    ]
    directory = fetch.downloads_dir()
    if not all((directory / w.sha256).is_file() for w in wanted):
        fetch.fetch(wanted, mirror.find_mirrors())


def rootfs(tree: str) -> Path:
    """Return the unpacked tree's directory, making it on first use (about a minute).

    Raises InvalidData for a damaged download, EnvironmentUnfit for disk or mirror trouble.
    """
    final = cache_dir() / "rootfs" / f"{tree}-{tree_key(tree)[:16]}"
    if final.is_dir():
        return final
    with exclusive(f"rootfs-{final.name}"):
        if not final.is_dir():
            fetch_tree(tree)
            _make(tree, final)
    return final


def _make(tree: str, final: Path) -> None:
    packages = packages_of(tree)
    say(f"rootfs: unpacking {len(packages)} packages of tree {tree}")
    final.parent.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    fixups = _fixups(tree)
    try:
        root.chmod(0o755)
        for name in fixups["directories"]:
            (root / name).mkdir(parents=True, exist_ok=True)
        _links(root, fixups["links_before"])
        # One architecture after the other: their packages share files (of the same content).
        with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
            for architecture in sorted({p.architecture for p in packages}):
                batch = [p for p in packages if p.architecture == architecture]
                list(
                    pool.map(_unpack, batch, [root] * len(batch), [fixups["exclude"]] * len(batch))
                )
        _links(root, fixups["links_after"])
        for name, text in fixups["files"].items():
            (root / name).write_text(text)
        root.rename(final)
    except OSError as exc:
        raise EnvironmentUnfit(
            f"{final}: cannot unpack: {exc.strerror or exc}; free some space or make it writable "
            "(the cache follows XDG_CACHE_HOME) and run the same command again"
        ) from exc
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _unpack(package: lock.Package, root: Path, exclude: list[str]) -> None:
    path = fetch.downloads_dir() / package.sha256
    if fetch.sha256_file(path) != package.sha256:
        path.unlink()
        raise InvalidData(
            f"{package.name} {package.version}: the download in the cache is damaged (sha256 is "
            "not that of debian.lock); thrown away, run the same command again to fetch it anew"
        )
    with path.open("rb") as stream, DebFile(fileobj=stream) as deb:
        archive = deb.data.tgz()
        for member in archive:
            name = member.name.removeprefix("./")
            if not any(fnmatch.fnmatchcase(name, glob) for glob in exclude):
                archive.extract(member, root, filter=_plain)


def _plain(member: tarfile.TarInfo, root: str) -> tarfile.TarInfo | None:
    """Keep what an ordinary user can make; directories stay enterable for their owner."""
    kept = tarfile.tar_filter(member, root)
    target = Path(root) / kept.name
    if kept.isdir():
        if target.is_dir():
            return None  # made before, perhaps through one of base-files' links
        return kept.replace(mode=0o755, uid=0, gid=0, uname="", gname="")
    if kept.issym() and target.is_symlink():
        return None  # base-files' own links, made before
    return kept.replace(uid=os.getuid(), gid=os.getgid(), uname="", gname="")


def _links(root: Path, links: dict[str, str]) -> None:
    for name, target in links.items():
        (root / name).symlink_to(target)


def _fixups(tree: str) -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads(FIXUPS.read_text())
    merged: dict[str, Any] = {"directories": data["common"]["directories"]["paths"]}
    merged["exclude"] = data["common"]["exclude"]["globs"] + data[tree]["exclude"]["globs"]
    for key in ("links_before", "links_after", "files"):
        merged[key] = {**data["common"].get(key, {}), **data[tree].get(key, {})}
    return merged

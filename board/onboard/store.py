"""The artifacts on the board: files by their sha256, and the names they are used by.

    DIRECTORY/blobs/<sha256>        complete and verified
    DIRECTORY/blobs/<sha256>.part   on its way
    DIRECTORY/artifacts/<name>      a hard link to a blob

Promise: a blob without .part has the content its name says, as read back from the board's disk; a
name appears or changes at once; what no name needs any more is removed.
Limit: a disk that goes bad later is found by the next `have`, which reads everything again.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from board.onboard.refused import Refused

MARK = ".bananaos"
"""In the directory: it is ours, and may be removed."""
PART = ".part"


def opened(directory: str) -> Path:
    """Return the directory, made if need be; Refused for one that holds something else."""
    root = Path(directory)
    if root.is_dir() and not (root / MARK).exists() and any(root.iterdir()):
        raise Refused(
            f"{root}: exists and is not of this project: name another directory in boards.toml", 2
        )
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "artifacts").mkdir(exist_ok=True)
    (root / MARK).touch()
    return root


def have(directory: str, files: Mapping[str, int]) -> dict[str, int]:
    """Say how much of each file (sha256 -> bytes) is here: -1 for a verified one, else bytes."""
    root = opened(directory)
    if not os.access(root / "blobs", os.W_OK):
        raise Refused(f"{root}: cannot be written: read-only, or of another user")
    there = {}
    for sha256, size_bytes in files.items():
        whole, part = _paths(root, sha256)
        if whole.exists():
            if sha256_of(whole) == sha256:
                there[sha256] = -1
                continue
            whole.unlink()
        part_bytes = part.stat().st_size if part.exists() else 0
        if part_bytes >= size_bytes and not _finish(root, sha256):
            part_bytes = 0
        there[sha256] = -1 if _paths(root, sha256)[0].exists() else part_bytes
    missing_bytes = sum(files[name] - max(0, got) for name, got in there.items() if got >= 0)
    free_bytes = shutil.disk_usage(root).free
    if missing_bytes > free_bytes:
        raise Refused(
            f"{root}: {free_bytes >> 20} MiB free, {missing_bytes / 2**20:.1f} MiB needed: "
            "free some space on the board"
        )
    return there


def install(directory: str, names: Mapping[str, list[Any]]) -> dict[str, list[str]]:
    """Verify what has arrived and give it its names: name -> [sha256, mode].

    Returns the sha256 of what arrived damaged, which is removed; nothing is renamed then.
    """
    root = opened(directory)
    damaged = []
    for sha256 in {sha256 for sha256, _ in names.values()}:
        if not _paths(root, sha256)[0].exists() and not _finish(root, sha256):
            damaged.append(sha256)
    if damaged:
        return {"damaged": damaged, "changed": []}
    changed = []
    for name, (sha256, mode) in sorted(names.items()):
        blob, target = _paths(root, sha256)[0], root / "artifacts" / name
        blob.chmod(mode)
        if target.exists() and target.samefile(blob):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.hardlink_to(blob)
        temporary.replace(target)
        changed.append(name)
    for blob in (root / "blobs").iterdir():
        if blob.stat().st_nlink == 1 and blob.suffix != PART:
            blob.unlink()
    return {"damaged": [], "changed": changed}


def forget(directory: str, name: str) -> dict[str, bool]:
    """Remove one file of the directory that was made to be fetched."""
    if "/" in name:
        raise Refused(f"{name!r}: not a file of the directory", 2)
    Path(directory, name).unlink(missing_ok=True)
    root = Path(directory)
    if not any((root / "artifacts").iterdir()) and not any((root / "blobs").iterdir()):
        shutil.rmtree(root)  # it was made for this alone
    return {"forgotten": True}


def remove(directory: str) -> dict[str, bool]:
    """Remove the directory with all in it, if it is this project's."""
    root = Path(directory)
    if not root.exists():
        return {"removed": False}
    if not (root / MARK).exists():
        raise Refused(f"{root}: is not of this project: nothing was removed", 2)
    shutil.rmtree(root)
    return {"removed": True}


def _paths(root: Path, sha256: str) -> tuple[Path, Path]:
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise Refused(f"{sha256!r}: not a sha256", 2)
    return root / "blobs" / sha256, root / "blobs" / f"{sha256}{PART}"


def _finish(root: Path, sha256: str) -> bool:
    """Take a file that has arrived; one of another content is removed."""
    whole, part = _paths(root, sha256)
    if not part.exists():
        return False
    if sha256_of(part) != sha256:
        part.unlink()
        return False
    part.replace(whole)
    return True


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    import hashlib  # costs an emulated hart a third of a second

    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

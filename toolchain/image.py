"""A container image as one archive, written by us: a tree, more files, and what runs by itself.

Promise: the archive is a pure function of the arguments and of the tree's names, bytes, modes,
times and links; so are the digests of configuration and layers, which any engine computes anew
when it loads the archive.  Nothing of it tells who made it, where and when; owners are root.
Limit: the form is that of `docker save`, which every Docker engine, containerd and Podman load.  An
engine with containerd's image store names the image by a manifest that it makes itself: compare the
digests of configuration and layers, not that name.  The tree must not change meanwhile.

    with open("image.tar", "wb") as out:
        image = write(out, "bananaos-x86:1", rootfs("x86"), {"/opt/llama-server": path}, Config())

The tree is one layer, the files are a second one above it: images of one tree share its layer.
"""

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from toolchain.errors import InvalidData, UsageError
from toolchain.rootfs import SOURCE_DATE_EPOCH

COPY_BYTES = 1 << 20
BLOCK_BYTES = 512
FILE_MODE, PROGRAM_MODE = 0o644, 0o755


class Sink(Protocol):
    """What bytes can be written to: a file, a hash wrapped by `Digest`."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class Config:
    """What a container does by itself; architecture is Go's name of it (amd64, riscv64)."""

    command: Sequence[str] = ("/bin/sh",)
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/"
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"


@dataclass(frozen=True)
class Image:
    """What was written: the name it is loaded under, and the digests in hex.

    layers_sha256 are of the uncompressed layers, the tree's first ("diff IDs", RootFS.Layers of
    `docker image inspect`); config_sha256 is the image's Id in engines without containerd's store.
    """

    name: str
    config_sha256: str
    layers_sha256: tuple[str, ...]


class Digest:
    """A sink that hashes, and passes on to another if there is one."""

    def __init__(self, behind: Sink | None = None) -> None:
        self._hash = hashlib.sha256()
        self._behind = behind
        self.size_bytes = 0

    def write(self, data: bytes, /) -> None:
        self._hash.update(data)
        self.size_bytes += len(data)
        if self._behind is not None:
            self._behind.write(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def write(
    out: Sink,
    name: str,
    tree: Path,
    files: Mapping[str, Path | bytes] | None = None,
    config: Config | None = None,
) -> Image:
    """Write the archive of the image `name` (REPOSITORY:TAG) to `out`; return its digests.

    files maps absolute paths of the image to host files, or to bytes; a host file that its owner
    may execute is mode 755, all else 644.  Raises UsageError for a path that the tree cannot take,
    InvalidData for a file that changed while it was read.
    """
    config = config or Config()
    layers = [list(tree_entries(tree))]
    if files:
        layers.append(list(_file_entries(tree, files)))
    digests = []
    for number, entries in enumerate(layers):
        out.write(_header(_info(f"{number}.tar", tarfile.REGTYPE, FILE_MODE, layer_bytes(entries))))
        digest = write_layer(Digest(out), entries)
        digests.append(digest.hexdigest())
        out.write(_padding(digest.size_bytes))
    text = _json(_configuration(config, digests))
    config_sha256 = hashlib.sha256(text).hexdigest()
    manifest = [
        {
            "Config": f"{config_sha256}.json",
            "RepoTags": [name],
            "Layers": [f"{number}.tar" for number in range(len(layers))],
        }
    ]
    for member, content in ((f"{config_sha256}.json", text), ("manifest.json", _json(manifest))):
        out.write(_header(_info(member, tarfile.REGTYPE, FILE_MODE, len(content))))
        out.write(content + _padding(len(content)))
    out.write(bytes(2 * BLOCK_BYTES))
    return Image(name, config_sha256, tuple(digests))


# --- layers -----------------------------------------------------------------------------------

Entry = tuple[tarfile.TarInfo, Path | bytes]
"""A member of a layer and, for a regular file, where its content is."""


def tree_entries(tree: Path) -> Iterator[Entry]:
    """Yield all below `tree`, sorted by name, as members of a layer."""
    first_names: dict[tuple[int, int], str] = {}
    waiting = [tree]
    while waiting:
        # Sorted within a directory and directories before what they hold, as tar needs it.
        with os.scandir(waiting.pop()) as found:
            below = sorted(found, key=lambda entry: entry.name)
        waiting += [Path(e.path) for e in reversed(below) if e.is_dir(follow_symlinks=False)]
        for entry in below:
            status = entry.stat(follow_symlinks=False)
            path = Path(entry.path)
            info = _info(
                path.relative_to(tree).as_posix(),
                tarfile.REGTYPE,
                stat.S_IMODE(status.st_mode),
                status.st_size,
                int(status.st_mtime),
            )
            if stat.S_ISDIR(status.st_mode):
                info.type, info.size = tarfile.DIRTYPE, 0
            elif stat.S_ISLNK(status.st_mode):
                info.type, info.size, info.linkname = tarfile.SYMTYPE, 0, os.readlink(path)  # noqa: PTH115
            elif not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path}: neither file, directory nor symbolic link")
            elif status.st_nlink > 1:
                identity = (status.st_dev, status.st_ino)
                first = first_names.setdefault(identity, info.name)
                if first != info.name:
                    info.type, info.size, info.linkname = tarfile.LNKTYPE, 0, first
            yield info, path


def _file_entries(tree: Path, files: Mapping[str, Path | bytes]) -> Iterator[Entry]:
    """Yield the files, and the directories above them that the tree does not have."""
    made: set[PurePosixPath] = set()
    for name, content in sorted(files.items()):
        inside = PurePosixPath(name)
        if not inside.is_absolute() or ".." in inside.parts or inside == PurePosixPath("/"):
            raise UsageError(f"{name!r}: expected the absolute path of a file of the image")
        relative = inside.relative_to("/")
        for above in reversed(relative.parents[:-1]):
            place = tree / above
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise UsageError(f"{name}: /{above} of the tree is no directory of its own")
            if not place.is_dir() and above not in made:
                made.add(above)
                yield _info(above.as_posix(), tarfile.DIRTYPE, PROGRAM_MODE, 0), b""
        if isinstance(content, bytes):
            mode, size_bytes = FILE_MODE, len(content)
        else:
            status = content.stat()
            mode = PROGRAM_MODE if status.st_mode & stat.S_IXUSR else FILE_MODE
            size_bytes = status.st_size
        yield _info(relative.as_posix(), tarfile.REGTYPE, mode, size_bytes), content


def layer_bytes(entries: Iterable[Entry]) -> int:
    """Return the size of the layer that write_layer writes, without reading any content."""
    size = sum(len(_header(info)) + info.size + -info.size % BLOCK_BYTES for info, _ in entries)
    return size + 2 * BLOCK_BYTES


def write_layer(out: Digest, entries: Iterable[Entry]) -> Digest:
    """Write a layer to `out`, which hashes it, and return `out`.

    Raises InvalidData for a file that is not of the size it had when its entry was made.
    """
    for info, content in entries:
        out.write(_header(info))
        if info.type != tarfile.REGTYPE:
            continue
        start = out.size_bytes
        stream = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
        with stream:
            while block := stream.read(COPY_BYTES):
                out.write(block)
        if out.size_bytes - start != info.size:
            raise InvalidData(f"/{info.name}: changed while the image was written; write it again")
        out.write(_padding(info.size))
    out.write(bytes(2 * BLOCK_BYTES))
    return out


def _info(
    name: str, kind: bytes, mode: int, size_bytes: int, time_s: int = SOURCE_DATE_EPOCH
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.mtime = kind, mode, size_bytes, time_s
    return info


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % BLOCK_BYTES)


# --- configuration ----------------------------------------------------------------------------


def _configuration(config: Config, digests: Sequence[str]) -> dict[str, Any]:
    """Return the image's configuration (Docker Image Specification v1.2)."""
    created = datetime.fromtimestamp(SOURCE_DATE_EPOCH, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    says = ("the pinned tree", "what is put above it")
    return {
        "architecture": config.architecture,
        "os": "linux",
        "created": created,
        "config": {
            "Cmd": list(config.command),
            "Env": [f"{key}={value}" for key, value in sorted(config.environment.items())],
            "WorkingDir": config.directory,
            "Labels": dict(sorted(config.labels.items())),
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [
            {"created": created, "created_by": "toolchain/image.py", "comment": comment}
            for comment, _ in zip(says, digests, strict=False)
        ],
    }


def _json(document: object) -> bytes:
    """Canonical JSON: sorted keys, no spaces."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

"""A deterministic .tar.zst with a manifest: written, and held against itself.

Promise: the same members give the same bytes, whoever packs them, when and where; every member but
the manifest and its signature is named in MANIFEST.sha256 (in the form of sha256sum), and `check`
wants exactly those, with those bytes, in an archive or in the folder it was unpacked to.  An
archive is one file to its last byte: what another program might unpack after its end is refused.
Limit: the manifest says that nothing changed since it was written; who wrote it, only a signature
can say, and only to somebody who has the signer's public key from elsewhere.  In a folder what
using it leaves there is not looked at, and is named.
"""

import hashlib
import io
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import zstandard

from toolchain.command import run
from toolchain.errors import Differs, InvalidData, cannot_read, cannot_write
from toolchain.rootfs import SOURCE_DATE_EPOCH

MANIFEST = "MANIFEST.sha256"
SIGNATURE = f"{MANIFEST}.sig"
NAMESPACE = "bananaos-artifact"
"""Of the signature (ssh-keygen -Y sign -n): it cannot be passed off as one of something else."""
_LEVEL = 9
_THREADS = 2
"""A constant: with other numbers of threads zstd cuts its input elsewhere."""
_IN_USE = ("results", "report", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache")
"""What using an unpacked bundle leaves at its top."""
_COMPILED = "__pycache__"


@dataclass(frozen=True)
class Checked:
    """What `check` found in order: how many files, and what of a folder it did not look at."""

    files: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """A file of the archive: its name below the top folder, and where its bytes are."""

    name: str
    content: Path | bytes
    executable: bool = False

    def open(self) -> IO[bytes]:
        """The bytes; raises EnvironmentUnfit when they cannot be read."""
        if isinstance(self.content, bytes):
            return io.BytesIO(self.content)
        try:
            return self.content.open("rb")
        except OSError as exc:
            raise cannot_read(self.content, exc) from exc

    @property
    def size_bytes(self) -> int:
        """Its length."""
        content = self.content
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def write(path: Path, top: str, members: Iterable[Member], key: Path | None = None) -> str:
    """Write the archive, all its names below `top`/; returns its hex sha256.

    key: a private key of ssh-keygen to sign the manifest with.
    Raises EnvironmentUnfit (a member, the disk, the key); nothing is left then.
    """
    ordered = sorted(members, key=lambda member: member.name)
    text = "".join(f"{_sha256(member)}  {member.name}\n" for member in ordered).encode()
    ordered.append(Member(MANIFEST, text))
    if key is not None:
        ordered.append(Member(SIGNATURE, _sign(text, key)))
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as stream:
            compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=_THREADS)
            with (
                compressor.stream_writer(stream, closefd=False) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ):
                for member in ordered:
                    _add(archive, top, member)
        with temporary.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        temporary.replace(path)
    except OSError as exc:
        raise cannot_write(path, exc, None) from exc
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def check(path: Path, signers: Path | None = None) -> Checked:
    """Hold an archive, or the folder it was unpacked to, against its manifest.

    signers: an allowed-signers file of ssh-keygen; the signature must then be there and be good.
    Raises Differs naming all that is missing, changed or not in the manifest, InvalidData for what
    is no such archive.
    """
    skipped: Counter[str] = Counter()
    found, manifest, signature = _folder(path, skipped) if path.is_dir() else _archive(path)
    if manifest is None:
        raise InvalidData(f"{path}: no {MANIFEST} in it: not a bundle, or not the whole of it")
    expected = _read_manifest(path, manifest)
    wrong = [f"{name}: missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name}: not in {MANIFEST}" for name in sorted(found.keys() - expected.keys())]
    wrong += [
        f"{name}: changed: sha256 {found[name]}, expected {sha256}"
        for name, sha256 in sorted(expected.items())
        if found.get(name, sha256) != sha256
    ]
    if wrong:
        raise Differs(f"{path}: {len(wrong)} of {len(expected)} files differ: {'; '.join(wrong)}")
    if signers is not None:
        _verify(path, manifest, signature, signers)
    several = (name if count == 1 else f"{count} {name}" for name, count in sorted(skipped.items()))
    return Checked(len(expected), tuple(several))


def _add(archive: tarfile.TarFile, top: str, member: Member) -> None:
    info = tarfile.TarInfo(f"{top}/{member.name}")
    info.size, info.mtime = member.size_bytes, SOURCE_DATE_EPOCH
    info.mode = 0o755 if member.executable else 0o644
    with member.open() as stream:
        archive.addfile(info, stream)


def _sha256(member: Member) -> str:
    with member.open() as stream:
        # file_digest wants a real file, or one in memory
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def _archive(path: Path) -> tuple[dict[str, str], bytes | None, bytes | None]:
    found: dict[str, str] = {}
    kept: dict[str, bytes] = {}
    tops: set[str] = set()
    try:
        with path.open("rb") as stream:
            # Of a stream tarfile wants no more than read(); its annotation wants more.
            unpacked: Any = _Unpacked(stream)
            with tarfile.open(fileobj=unpacked, mode="r|") as archive:
                for info in archive:
                    top, _, name = info.name.partition("/")
                    content = archive.extractfile(info) if info.isfile() else None
                    if content is None or ".." in PurePosixPath(name).parts or not name:
                        raise InvalidData(f"{path}: {info.name}: not a plain file below one folder")
                    tops.add(top)
                    if name in (MANIFEST, SIGNATURE):
                        kept[name] = content.read()
                    else:
                        found[name] = _digest(content)
                if unpacked.says_more(archive.offset):
                    raise InvalidData(
                        f"{path}: something stands after the end of the archive, which another "
                        "program may unpack, expected nothing; fetch it anew"
                    )
    except OSError as exc:
        raise cannot_read(path, exc) from exc
    except (zstandard.ZstdError, tarfile.TarError, EOFError) as exc:
        raise InvalidData(f"{path}: not a whole .tar.zst archive: {exc}; fetch it anew") from exc
    if len(tops) > 1:
        raise InvalidData(f"{path}: more than one folder at its top: {', '.join(sorted(tops))}")
    return found, kept.get(MANIFEST), kept.get(SIGNATURE)


class _Unpacked:
    """The content of a file that is one zstd frame; knows what follows a place in it.

    zstandard's own readers pass in silence over a frame that is cut off and over what follows one.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = b""
        self._last, self._before_bytes = b"", 0

    def read(self, size_bytes: int) -> bytes:
        """As many bytes, fewer only at the end; EOFError when the frame has none."""
        parts = [self._ready]
        have_bytes = len(self._ready)
        while have_bytes < size_bytes and not self._frame.eof:
            packed = self._stream.read(zstandard.DECOMPRESSION_RECOMMENDED_INPUT_SIZE)
            if not packed:
                raise EOFError("it ends too early")
            parts.append(self._frame.decompress(packed))
            have_bytes += len(parts[-1])
        whole = b"".join(parts)
        block, self._ready = whole[:size_bytes], whole[size_bytes:]
        if block:
            self._before_bytes += len(self._last)
            self._last = block
        return block

    def says_more(self, offset: int) -> bool:
        """Whether there is anything but zeros from `offset`, which was read last, to the end."""
        # tarfile reads records of twenty blocks: what follows the last one may have been read.
        if any(self._last[offset - self._before_bytes :]):
            return True
        while block := self.read(1 << 20):
            if block.count(0) != len(block):
                return True
        return bool(self._frame.unused_data or self._stream.read(1))


def _digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _folder(path: Path, skipped: Counter[str]) -> tuple[dict[str, str], bytes | None, bytes | None]:
    found: dict[str, str] = {}
    try:
        for file in _files(path, skipped):
            name = str(file.relative_to(path))
            if file.is_symlink():  # whose bytes are those of some other file
                found[name] = "none: a symbolic link"
                continue
            with file.open("rb") as stream:
                found[name] = _digest(stream)
        manifest, signature = (
            (path / name).read_bytes() if (path / name).is_file() else None
            for name in (MANIFEST, SIGNATURE)
        )
    except OSError as exc:
        raise cannot_read(path, exc) from exc
    found.pop(MANIFEST, None)
    found.pop(SIGNATURE, None)
    return found, manifest, signature


def _files(root: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Every file but what using the folder leaves there, which is counted in `skipped`.

    A link to a folder counts as a file.
    """
    for where, directories, names in os.walk(root):
        directory = Path(where)
        left = (*_IN_USE, _COMPILED) if directory == root else (_COMPILED,)
        skipped.update(name for name in directories if name in left)
        directories[:] = [name for name in directories if name not in left]
        links = [name for name in directories if (directory / name).is_symlink()]
        yield from (directory / name for name in (*names, *links))


def _read_manifest(path: Path, manifest: bytes) -> Mapping[str, str]:
    expected: dict[str, str] = {}
    for number, line in enumerate(manifest.decode(errors="replace").splitlines(), start=1):
        sha256, space, name = line.partition("  ")
        if not space or len(sha256) != 64 or not name or name in expected:
            raise InvalidData(
                f"{path}: {MANIFEST}:{number}: got {line!r}, expected a sha256, two spaces and a "
                "name that is not there twice"
            )
        expected[name] = sha256
    return expected


def _sign(manifest: bytes, key: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="bananaos-sign-") as directory:
        file = Path(directory, MANIFEST)
        file.write_bytes(manifest)
        run(
            ["ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", key, file],
            what=f"sign the manifest with {key}",
        )
        return Path(directory, SIGNATURE).read_bytes()


def _verify(path: Path, manifest: bytes, signature: bytes | None, signers: Path) -> None:
    if signature is None:
        raise Differs(f"{path}: {SIGNATURE} is missing: the bundle was not signed")
    with tempfile.TemporaryDirectory(prefix="bananaos-verify-") as directory:
        file = Path(directory, SIGNATURE)
        file.write_bytes(signature)
        words: list[str | Path] = ["ssh-keygen", "-Y", "find-principals", "-s", file, "-f", signers]
        who = run(words, what="find whose signature it is", check=False)
        names = who.stdout.split()
        if who.returncode or not names:
            raise Differs(f"{path}: {SIGNATURE} is of none of the signers in {signers}")
        words = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-s", file, "-f", signers]
        done = run(
            [*words, "-I", names[0]],
            what="verify the signature",
            input_text=manifest.decode(),
            check=False,
        )
        if done.returncode:
            raise Differs(f"{path}: {SIGNATURE} of {names[0]} does not fit {MANIFEST}")

"""Where two files of one name differ: ELF sections, archive members, or the first byte.

Promise: names the component, however deep it lies in archives; looks at bytes, not at meaning.
Limit: knows ELF, tar and cpio (newc); of all else it tells the first differing offset.
"""

import io
import tarfile
from collections.abc import Iterator

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

SHOWN = 8
"""Names are listed up to this number."""


def explain(expected: bytes, found: bytes) -> str:
    """Return in words where `found` differs from `expected`; "" when it does not."""
    if expected == found:
        return ""
    for kind, parts in (("sections", _sections), ("members", _members)):
        old, new = dict(parts(expected)), dict(parts(found))
        if not old or not new:
            continue
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names:
            inner = [_one(name, old.get(name), new.get(name)) for name in names[:SHOWN]]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            return f"{kind} {', '.join(inner)}{more}"
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    return f"first at byte {at} ({len(expected)} bytes expected, {len(found)} found)"


def _one(name: str, old: bytes | None, new: bytes | None) -> str:
    if old is None:
        return f"{name} (only in the rebuilt file)"
    if new is None:
        return f"{name} (missing in the rebuilt file)"
    inner = explain(old, new)
    return name if inner.startswith("first at") else f"{name}: {inner}"


def _sections(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the sections of an ELF file with their bytes; those that share a name are numbered."""
    if not content.startswith(b"\x7fELF"):
        return
    seen: dict[str, int] = {}
    try:
        for section in ELFFile(io.BytesIO(content)).iter_sections():
            name = section.name or "(headers)"
            seen[name] = seen.get(name, 0) + 1
            body = b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
            yield name if seen[name] == 1 else f"{name}#{seen[name]}", body
    except ELFError:
        return


def _members(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield an archive's members: name -> what the archive says of it, and its bytes."""
    if content.startswith(b"070701"):
        yield from _cpio(content)
        return
    if content[257:262] != b"ustar":
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isreg() else None
                yield member.name, stream.read() if stream else member.linkname.encode()
                said = (member.mode, member.mtime, member.uid, member.gid, member.type)
                yield f"{member.name} (mode, owner, time)", repr(said).encode()
    except tarfile.TarError:
        return


def _cpio(content: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while content[at : at + 6] == b"070701":
        fields = [int(content[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        size_bytes, name_bytes = fields[6], fields[11]
        start = at + 110
        name = content[start : start + name_bytes - 1].decode(errors="replace")
        body = start + name_bytes + -(start + name_bytes) % 4
        yield name, content[body : body + size_bytes]
        yield f"{name} (mode, owner, time)", repr((fields[1:6], fields[7:11])).encode()
        at = body + size_bytes + -(body + size_bytes) % 4

"""Where a member lies in a kernel structure, read from the kernel's own BTF.

Promise: `Btf(data).offset_bytes("task_struct", "thread.vstate.datap")` is the byte offset in the
very kernel the BTF came from; an unknown structure or member is named, never guessed.
Limit: little-endian BTF of version 1 (what every riscv64 kernel has); pointers are not followed,
bit fields and array elements are not addressed.  Standard library only: it also runs on a board.
Format: the kernel's Documentation/bpf/btf.rst.
"""

import struct
from collections.abc import Iterator

from toolchain.errors import InvalidData

_MAGIC = 0xEB9F
_STRUCT, _UNION = 4, 5
_THROUGH = (8, 9, 10, 11, 18)  # typedef, volatile, const, restrict, type tag
# Bytes after the common 12 of a type: fixed, and per element.
_TAIL = {
    **dict.fromkeys((2, 7, *_THROUGH, 12, 16), (0, 0)),
    **dict.fromkeys((1, 14, 17), (4, 0)),
    3: (12, 0),
    **dict.fromkeys((_STRUCT, _UNION, 15, 19), (0, 12)),
    **dict.fromkeys((6, 13), (0, 8)),
}


class Btf:
    """The types of one kernel."""

    def __init__(self, data: bytes) -> None:
        try:
            magic, version, _flags, header, types, types_len, strings, strings_len = (
                struct.unpack_from("<HBBIIIII", data)
            )
        except struct.error as exc:
            raise InvalidData(f"BTF: {len(data)} bytes are too few to hold any") from exc
        if (magic, version) != (_MAGIC, 1):
            raise InvalidData(f"BTF: starts with {magic:#x}, version {version}; expected 0xeb9f, 1")
        self._types = data[header + types : header + types + types_len]
        self._strings = data[header + strings : header + strings + strings_len]
        self._starts = [0]  # of each type by its number; 0 is void
        self._named: dict[str, int] = {}
        try:
            self._index()
        except (struct.error, KeyError, ValueError) as exc:
            raise InvalidData(f"BTF: damaged at type {len(self._starts)}: {exc!r}") from exc

    def _index(self) -> None:
        at = 0
        while at < len(self._types):
            name, info, _ = struct.unpack_from("<III", self._types, at)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            if kind == _STRUCT and name:
                self._named.setdefault(self._name(name), len(self._starts))
            self._starts.append(at)
            fixed, each = _TAIL[kind]
            at += 12 + fixed + each * count

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _members(self, number: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, type, bit offset and width (0: no bit field) of each member."""
        at = self._starts[number]
        _, info, _ = struct.unpack_from("<III", self._types, at)
        if info >> 24 & 0x1F not in (_STRUCT, _UNION):
            return
        for index in range(info & 0xFFFF):
            name, kind, offset = struct.unpack_from("<III", self._types, at + 12 + 12 * index)
            # Only with the flag does the upper byte hold the width of a bit field.
            width = offset >> 24 if info >> 31 else 0
            yield self._name(name), kind, offset & 0xFFFFFF if info >> 31 else offset, width

    def _resolve(self, number: int) -> int:
        """Return the type behind typedefs and qualifiers."""
        while number:
            _, info, target = struct.unpack_from("<III", self._types, self._starts[number])
            if info >> 24 & 0x1F not in _THROUGH:
                break
            number = target
        return number

    def _find(self, number: int, wanted: str) -> tuple[int, int, int] | None:
        """Return type, bit offset and width of a member, also one of an anonymous member."""
        for name, kind, offset, width in self._members(number):
            kind = self._resolve(kind)
            if name == wanted:
                return kind, offset, width
            if not name and (inner := self._find(kind, wanted)):
                return inner[0], offset + inner[1], inner[2]
        return None

    def size_bytes(self, structure: str) -> int:
        """Return the size of `structure`; raises InvalidData for one this kernel does not have."""
        _, _, size = struct.unpack_from("<III", self._types, self._starts[self._number(structure)])
        return int(size)

    def _number(self, structure: str) -> int:
        if structure not in self._named:
            raise InvalidData(f"BTF: this kernel has no struct {structure}")
        return self._named[structure]

    def offset_bytes(self, structure: str, path: str) -> int:
        """Return the byte offset of the member `path` (names joined by dots) of `structure`.

        Raises InvalidData for a structure or member this kernel does not have.
        """
        number = self._number(structure)
        bits = 0
        for name in path.split("."):
            found = self._find(number, name)
            if found is None:
                raise InvalidData(
                    f"BTF: struct {structure} of this kernel has no {path} (at {name})"
                )
            number, offset, width = found
            if width:
                raise InvalidData(f"BTF: struct {structure}: {path} is a bit field")
            bits += offset
        return bits // 8

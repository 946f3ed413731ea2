"""Where a kernel saves and restores vector registers: found in its code, not assumed.

Promise: every place that stores (or loads) the whole register file the kernel's way, `vsetvli rd,
zero, e8, m8` and then v0, v8, v16, v24 in order through one pointer, is found, whatever function
the compiler inlined it into; each is given as offsets from a symbol; half of such a sequence is an
error, and so is a kernel without any save.  The same code reads a vmlinux, a raw Image with a
symbol list (System.map or a saved /proc/kallsyms), and, on the board, the running kernel.
Limit: other ways to move vector registers (XuanTie's vendor extension, copies through user
pointers) are no sites.  Between two sites of one function, user and kernel-mode state are told
apart by the structure member the pointer is loaded from; where the code hides that, state is
"unknown".  Standard library only, but for reading a vmlinux (pyelftools).

Use: python -m kernel.sites --vmlinux FILE | --image FILE --symbols FILE | --running [--out FILE]
"""

import argparse
import bisect
import contextlib
import itertools
import json
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from kernel.btf import Btf
from toolchain.errors import ArtifactError, EnvironmentUnfit, InvalidData

# `vsetvli rd, zero, e8, m8, ta, ma`, any rd.
_VSETVLI = re.compile(rb"[\x57\xd7][\x70-\x7f]\x30\x0c", re.DOTALL)
_REGISTERS = (0, 8, 16, 24)
_ACCESS = {0x02000027: "save", 0x02000007: "restore"}  # vse8.v, vle8.v of v0, unmasked, rs1 = x0
_STRAIGHT_INSTRUCTIONS = 40
"""How far from the sequence its first and last instruction are looked for."""
_GNU_BUILD_ID = b"\x04\x00\x00\x00\x14\x00\x00\x00\x03\x00\x00\x00GNU\x00"
_BTF_HEADER = b"\x9f\xeb\x01\x00\x18\x00\x00\x00\x00\x00\x00\x00"
_RELEASE = re.compile(rb"Linux version (\S{1,64}) \(")

ROLES = {
    "__schedule": "context-switch",
    "__switch_to": "context-switch",
    "kernel_vector_begin": "kernel-vector",
    "riscv_v_context_nesting_end": "kernel-vector-resume",
    "arch_do_signal_or_restart": "signal",
    "save_v_state": "signal",
    "riscv_vr_get": "ptrace",
    "syscall_exit_to_user_mode": "exit-to-user",
    "syscall_exit_to_user_mode_work": "exit-to-user",
    "irqentry_exit_to_user_mode": "exit-to-user",
    "irqentry_exit": "exit-to-user",
    "arch_exit_to_user_mode_prepare": "exit-to-user",
}
"""What a site is for, by the function it was inlined into, or the one function here that calls it.

All others are `other`: what it is for cannot be told from the code.
"""


@dataclass(frozen=True)
class Site:
    """One sequence.  Offsets are bytes from the start of `symbol`.

    first and end are where the profiler's probes go: the first before the first CSR is read (a
    restore's: on its vsetvli), the end after the vector unit is switched off again, if control
    runs straight from the one to the other; where the code does not allow that, next to the
    sequence.
    `anchor` + `anchor_offset_bytes` is the symbol's start by a name that exists once.
    """

    kind: str
    role: str
    state: str
    symbol: str
    address: str
    anchor: str
    anchor_offset_bytes: int
    first_offset_bytes: int
    vsetvli_offset_bytes: int
    access_offsets_bytes: tuple[int, int, int, int]
    end_offset_bytes: int
    noinstr: bool


@dataclass(frozen=True)
class Symbol:
    """A name for an address of the kernel's text."""

    address: int
    kind: str
    name: str


class Kernel:
    """One kernel: its symbols, and its bytes by address."""

    def __init__(
        self,
        symbols: Iterable[Symbol],
        segments: Iterable[tuple[int, bytes]],
        *,
        release: str = "",
        notes: bytes = b"",
        btf: bytes = b"",
    ) -> None:
        self.symbols = sorted(symbols, key=lambda s: (s.address, s.kind.islower(), s.name))
        self.segments = sorted(segments)
        self._text = [s for s in self.symbols if s.kind in "tTwW" and s.name[0] not in "$."]
        self._starts = [symbol.address for symbol in self._text]
        self.address_of = {symbol.name: symbol.address for symbol in reversed(self.symbols)}
        self.names = Counter(symbol.name for symbol in self.symbols)
        self.release = release or self._search_release()
        self.build_id = self._search_build_id(notes)
        self.btf = Btf(btf or self._search_btf())

    def need(self, name: str) -> int:
        """Return a symbol's address; raises InvalidData where the kernel has none."""
        if name not in self.address_of:
            raise InvalidData(f"the kernel's symbols have no {name}; is the list complete?")
        return self.address_of[name]

    def function(self, address: int) -> tuple[Symbol, int]:
        """Return the function that holds `address` and its end."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            raise InvalidData(f"no symbol before the code at {address:#x}; is the list complete?")
        start = self._starts[index]
        following = bisect.bisect_right(self._starts, start)
        end = self._starts[following] if following < len(self._starts) else start + (1 << 16)
        # Of several names for one address the first, a global one, is as good as any.
        return self._text[bisect.bisect_left(self._starts, start)], end

    def read(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer at the end of what is known."""
        for start, data in self.segments:
            if start <= address < start + len(data):
                return data[address - start : address - start + size]
        raise InvalidData(f"the kernel's code does not reach {address:#x}")

    def _search_build_id(self, notes: bytes) -> str:
        for data in (notes, *(data for _, data in self.segments)):
            at = data.find(_GNU_BUILD_ID)
            if at >= 0:
                return data[at + 16 : at + 36].hex()
        raise InvalidData("the kernel has no GNU build-id: nothing could tie a module to it")

    def _search_btf(self) -> bytes:
        for _, data in self.segments:
            at = data.find(_BTF_HEADER)
            if at >= 0:
                return data[at:]
        raise InvalidData("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")

    def _search_release(self) -> str:
        for _, data in self.segments:
            if found := _RELEASE.search(data):
                return found[1].decode()
        raise InvalidData("no 'Linux version' text: this is no kernel")


def from_vmlinux(path: Path) -> Kernel:
    """Read an unstripped vmlinux; raises InvalidData for anything else."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            table = elf.get_section_by_name(".symtab")
            if not isinstance(table, SymbolTableSection):
                raise InvalidData(f"{path}: has no symbol table; a stripped kernel tells nothing")
            symbols = [
                Symbol(
                    symbol["st_value"],
                    ("T" if symbol["st_info"]["bind"] == "STB_GLOBAL" else "t")
                    if _is_code(elf, symbol["st_shndx"])
                    else "r",
                    symbol.name,
                )
                for symbol in table.iter_symbols()
                if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"
            ]
            segments = [
                (section["sh_addr"], section.data())
                for section in elf.iter_sections()
                if section["sh_flags"] & 2 and section["sh_type"] in ("SHT_PROGBITS", "SHT_NOTE")
            ]
    except ELFError as exc:
        raise InvalidData(f"{path}: not an ELF file: {exc}") from exc
    except OSError as exc:
        raise InvalidData(f"{path}: cannot be read: {exc.strerror}") from exc
    return _named(path, symbols, segments)


def _is_code(elf: Any, index: int | str) -> bool:
    return isinstance(index, int) and bool(elf.get_section(index)["sh_flags"] & 4)


def from_image(image: Path, symbols: Path) -> Kernel:
    """Read an uncompressed Image with its System.map, or a /proc/kallsyms saved as root."""
    try:
        data = image.read_bytes()
        listed = list(symbol_list(symbols))
    except OSError as exc:
        raise InvalidData(f"{exc.filename}: cannot be read: {exc.strerror}") from exc
    if data[0x38:0x3C] != b"RSC\x05":
        raise InvalidData(
            f"{image}: not an uncompressed RISC-V Image (magic {data[0x38:0x3C]!r}); unpack it"
        )
    starts = [symbol.address for symbol in listed if symbol.name == "_start"]
    if not starts:
        raise InvalidData(
            f"{symbols}: no _start among {len(listed)} symbols; is the list complete?"
        )
    return _named(image, listed, [(starts[0], data)])


def from_running(
    proc: Path = Path("/proc"), sys_kernel: Path = Path("/sys/kernel"), release: str = ""
) -> Kernel:
    """Read the running kernel's own text; needs root and CONFIG_PROC_KCORE.

    Raises EnvironmentUnfit where the kernel does not show its symbols or its text.
    """
    try:
        listed = list(symbol_list(proc / "kallsyms"))
        notes = (sys_kernel / "notes").read_bytes()
        btf = (sys_kernel / "btf" / "vmlinux").read_bytes()
        known = {symbol.name: symbol.address for symbol in reversed(listed)}
        start, end = known.get("_stext", 0), known.get("_etext", 0)
        if not start or not end:
            raise EnvironmentUnfit(
                f"{proc / 'kallsyms'} shows no addresses: run this as root, with sysctl "
                "kernel.kptr_restrict below 2"
            )
        text = _kcore(proc / "kcore", start, end - start)
    except OSError as exc:
        raise EnvironmentUnfit(
            f"{exc.filename}: {exc.strerror}: this kernel does not show its own code or types "
            "(CONFIG_PROC_KCORE, CONFIG_DEBUG_INFO_BTF, CONFIG_KALLSYMS_ALL; and be root); use "
            "--vmlinux, or --image with --symbols"
        ) from exc
    return Kernel(
        listed, [(start, text)], release=release or os.uname().release, notes=notes, btf=btf
    )


def _named(path: Path, symbols: list[Symbol], segments: list[tuple[int, bytes]]) -> Kernel:
    try:
        return Kernel(symbols, segments)
    except InvalidData as exc:
        raise InvalidData(f"{path}: {exc}") from exc


def symbol_list(path: Path) -> Iterator[Symbol]:
    """Yield `address type name` lines; those of modules, which follow in brackets, are left out.

    Raises InvalidData at the first line of another form, and OSError.
    """
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        fields = line.split()
        if len(fields) == 4 and fields[3].startswith("["):
            continue
        try:
            address, kind, name = fields
            yield Symbol(int(address, 16), kind, name)
        except ValueError as exc:
            raise InvalidData(f"{path}:{number}: {line!r} is not 'address type name'") from exc


def _kcore(path: Path, address: int, size: int) -> bytes:
    """Return memory from /proc/kcore, an ELF core file whose program headers map it all."""
    with path.open("rb", buffering=0) as stream:
        header = stream.read(64)
        if header[:5] != b"\x7fELF\x02":
            raise InvalidData(f"{path}: not a 64-bit ELF core file")
        table, entry, count = struct.unpack_from("<Q14xHH", header, 32)
        stream.seek(table)
        entries = stream.read(entry * count)
        for index in range(count):
            kind, _, offset, start, _, _, length, _ = struct.unpack_from(
                "<IIQQQQQQ", entries, index * entry
            )
            if kind == 1 and start <= address and address + size <= start + length:
                stream.seek(offset + address - start)
                data = b""
                while len(data) < size:
                    block = stream.read(size - len(data))
                    if not block:
                        break
                    data += block
                return data
    raise InvalidData(f"{path}: no segment holds the kernel's text at {address:#x}")


# Immediates of compressed jumps and branches: (from bit, width, to bit).
_C_J_FIELDS = (
    (3, 3, 1), (11, 1, 4), (2, 1, 5), (7, 1, 6), (6, 1, 7), (9, 2, 8), (8, 1, 10), (12, 1, 11)
)  # fmt: skip
_C_BRANCH_FIELDS = ((3, 2, 1), (10, 2, 3), (2, 1, 5), (5, 2, 6), (12, 1, 8))


@dataclass(frozen=True)
class _Instruction:
    address: int
    word: int
    size: int

    @property
    def next(self) -> int:
        return self.address + self.size

    @property
    def can_be_probed(self) -> bool:
        """Whether a kprobe may sit here: not on CSR accesses, fences, ebreak (decode-insn.c)."""
        if self.size == 4:
            return self.word & 0x7F not in (0x73, 0x0F)
        return self.word != 0x9002

    @property
    def target(self) -> int | None:
        """Where a direct branch or jump goes."""
        word = self.word
        if self.size == 4 and word & 0x7F == 0x6F:  # jal
            bits = (word >> 21 & 0x3FF) << 1 | (word >> 20 & 1) << 11 | (word >> 12 & 0xFF) << 12
            return self.address + _signed(bits | (word >> 31) << 20, 21)
        if self.size == 4 and word & 0x7F == 0x63:
            bits = (word >> 8 & 15) << 1 | (word >> 25 & 63) << 5 | (word >> 7 & 1) << 11
            return self.address + _signed(bits | (word >> 31) << 12, 13)
        if self.size == 2 and word & 3 == 1 and word >> 13 == 5:  # c.j
            return self.address + _signed(_gather(word, _C_J_FIELDS), 12)
        if self.size == 2 and word & 3 == 1 and word >> 13 in (6, 7):  # c.beqz, c.bnez
            return self.address + _signed(_gather(word, _C_BRANCH_FIELDS), 9)
        return None

    def loads_into(self, register: int) -> int | None:
        """Return the offset (12 bits) if this is `ld register, offset(x)` or its short form."""
        word = self.word
        if self.size == 4 and word & 0x707F == 0x3003 and word >> 7 & 31 == register:
            return word >> 20
        if self.size == 2 and word & 0xE003 == 0x6000 and (word >> 2 & 7) + 8 == register:
            return _gather(word, ((10, 3, 3), (5, 2, 6)))
        return None

    @property
    def jumps(self) -> bool:
        """Whether control may go on elsewhere than at the next instruction."""
        if self.size == 4:
            opcode, function = self.word & 0x7F, self.word >> 12 & 7
            return opcode in (0x63, 0x67, 0x6F) or (opcode == 0x73 and function == 0)
        quadrant, function = self.word & 3, self.word >> 13
        if quadrant == 1:
            return function in (5, 6, 7)  # c.j, c.beqz, c.bnez
        return quadrant == 2 and function == 4 and not self.word & 0x7C  # c.jr, c.jalr, c.ebreak


def _gather(word: int, parts: Iterable[tuple[int, int, int]]) -> int:
    """Put together bit fields given as (from bit, width, to bit)."""
    return sum((word >> start & (1 << width) - 1) << to for start, width, to in parts)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def _decode(code: bytes, address: int) -> list[_Instruction]:
    """Cut straight code into instructions (RISC-V's 16 and 32 bit lengths)."""
    found = []
    at = 0
    while at + 2 <= len(code):
        (word,) = struct.unpack_from("<H", code, at)
        size = 2
        if word & 3 == 3:
            size = 4
            if at + 4 > len(code):
                break
            (word,) = struct.unpack_from("<I", code, at)
        found.append(_Instruction(address + at, word, size))
        at += size
    return found


def _is_add(instruction: _Instruction, pointer: int, step: int) -> bool:
    """Whether this is `add pointer, pointer, step`, in either length and order."""
    if instruction.size == 2:
        return instruction.word == 0x9002 | pointer << 7 | step << 2
    operands = {(pointer, step), (step, pointer)}
    return any(
        instruction.word == 0x33 | pointer << 7 | first << 15 | second << 20
        for first, second in operands
    )


def _match(code: list[_Instruction], index: int) -> tuple[str, list[int]] | None:
    """Return kind and the indices of the four accesses of the sequence at code[index].

    None where no whole-register access follows the vsetvli.  Raises InvalidData for half of one.
    """
    step = code[index].word >> 7 & 31
    after = code[index + 1 :]
    if not after or after[0].size != 4:
        return None
    pointer = after[0].word >> 15 & 31
    kind = _ACCESS.get(after[0].word & ~(31 << 15))
    if kind is None:
        return None
    base = after[0].word
    accesses = [index + 1]
    at = index + 2
    for register in _REGISTERS[1:]:
        fits = (
            at + 1 < len(code)
            and _is_add(code[at], pointer, step)
            and code[at + 1].word == base | register << 7
        )
        if not fits:
            raise InvalidData(
                f"at {code[index].address:#x}: v0 is {kind}d with vsetvli e8,m8 and v{register} "
                "does not follow: half a site, or a kernel this finder does not know"
            )
        accesses.append(at + 1)
        at += 2
    return kind, accesses


def _first(code: list[_Instruction], vsetvli: int, targets: frozenset[int]) -> int:
    """Return the index where the probe goes that sees a save begin.

    That is the last instruction a kprobe can sit on at or before `csrr rd, vstart`, which begins
    the save; where that is not in straight line before the vsetvli, it is the vsetvli.
    """
    reads_vstart = False
    for index in range(vsetvli - 1, max(-1, vsetvli - _STRAIGHT_INSTRUCTIONS), -1):
        if code[index].jumps or code[index + 1].address in targets:
            break
        reads_vstart |= code[index].size == 4 and code[index].word & 0xFFFFF07F == 0x00802073
        if reads_vstart and code[index].can_be_probed:
            return index
    return vsetvli


def _end(code: list[_Instruction], last: int, targets: frozenset[int]) -> int:
    """Return the index where the probe goes that sees the work done.

    That is the first instruction a kprobe can sit on after `csrc sstatus, rs`, if control cannot
    join from elsewhere before it; else the first one after the last access.  Where control joins
    right there (7.2: from the code for XuanTie's own vector unit), that one all the same: an end
    without a begin is told apart when it happens.
    """
    joined = done = False
    candidates: list[tuple[bool, bool, int]] = []  # the least is the best
    for index in range(last + 1, min(len(code), last + _STRAIGHT_INSTRUCTIONS)):
        joined |= code[index].address in targets
        if code[index].can_be_probed:
            candidates.append((joined, joined or not done, index))
        if code[index].jumps:
            break
        done |= code[index].size == 4 and code[index].word & 0xFFF07FFF == 0x10003073
    if not candidates:
        raise InvalidData(f"after the access at {code[last].address:#x} nothing can be probed")
    return min(candidates)[2]


def _state(code: list[_Instruction], access: int, members: Mapping[str, int]) -> str:
    """Tell whose registers move, by the member the pointer was loaded from (`ld pointer, imm(x)`).

    members maps "user" and "kernel" to the offset in task_struct; the upper bits of a large offset
    are added beforehand, so that the lower twelve are what the load shows.
    """
    pointer = code[access].word >> 15 & 31
    for index in range(access - 1, max(-1, access - _STRAIGHT_INSTRUCTIONS), -1):
        offset = code[index].loads_into(pointer)
        if offset is not None:
            for state, member in members.items():
                if offset == member & 0xFFF:
                    return state
            break
    return "unknown"


def find(kernel: Kernel) -> list[Site]:
    """Return all sites in address order.

    Raises InvalidData for half a site, and for a kernel that has no save at all.
    """
    members = {"user": kernel.btf.offset_bytes("task_struct", "thread.vstate.datap")}
    with contextlib.suppress(InvalidData):  # before 6.9 the kernel has no vector state of its own
        members["kernel"] = kernel.btf.offset_bytes("task_struct", "thread.kernel_vstate.datap")
    start, end = kernel.need("_stext"), kernel.need("_etext")
    quiet = range(kernel.need("__noinstr_text_start"), kernel.need("__noinstr_text_end"))
    text = kernel.read(start, end - start)
    called_for = _called_for(kernel)
    found = []
    for hit in _VSETVLI.finditer(text):
        address = start + hit.start()
        if address % 2:
            continue
        symbol, stop = kernel.function(address)
        code = _decode(text[symbol.address - start : stop - start], symbol.address)
        at = {instruction.address: index for index, instruction in enumerate(code)}
        # In the middle of an instruction: the bytes of two others look like a vsetvli.
        matched = _match(code, at[address]) if address in at else None
        if matched is None:
            continue
        kind, accesses = matched
        vsetvli = at[address]
        targets = frozenset(i.target for i in code if i.target is not None)
        first = _first(code, vsetvli, targets) if kind == "save" else vsetvli
        state = _state(code, accesses[0], members)
        anchor = _anchor(kernel, symbol)
        offsets = [code[index].address - symbol.address for index in accesses]
        found.append(
            Site(
                kind=kind,
                role=_role(symbol, called_for),
                state=state,
                symbol=symbol.name,
                address=f"{symbol.address:#x}",
                anchor=anchor.name,
                anchor_offset_bytes=symbol.address - anchor.address,
                first_offset_bytes=code[first].address - symbol.address,
                vsetvli_offset_bytes=address - symbol.address,
                access_offsets_bytes=(offsets[0], offsets[1], offsets[2], offsets[3]),
                end_offset_bytes=code[_end(code, accesses[-1], targets)].address - symbol.address,
                noinstr=symbol.address in quiet,
            )
        )
    if not any(site.kind == "save" for site in found):
        raise InvalidData(
            "this kernel's code saves no vector registers: built without CONFIG_RISCV_ISA_V, or in "
            "a way this finder does not know"
        )
    return found


def _plain(name: str) -> str:
    """Undo what a compiler adds to the name of a copy: __schedule.constprop.0, for instance."""
    return name.partition(".")[0]


def _called_for(kernel: Kernel) -> dict[int, set[str]]:
    """Return address -> roles of the functions of ROLES that call what is there."""
    roles: dict[int, set[str]] = {}
    for symbol in kernel.symbols:
        role = ROLES.get(_plain(symbol.name))
        if role is None:
            continue
        _, stop = kernel.function(symbol.address)
        code = _decode(kernel.read(symbol.address, stop - symbol.address), symbol.address)
        for before, call in itertools.pairwise(code):
            target = call.target
            # `auipc rd, high` + `jalr rd, low(rd)`
            if call.word & 0x707F == 0x67 and before.word & 0x7F == 0x17 and call.size == 4:
                high = _signed(before.word & 0xFFFFF000, 32)
                target = before.address + high + _signed(call.word >> 20, 12)
            if target is not None:
                roles.setdefault(target, set()).add(role)
    return roles


def _role(symbol: Symbol, called_for: Mapping[int, set[str]]) -> str:
    roles = called_for.get(symbol.address, set())
    alone = next(iter(roles)) if len(roles) == 1 else "other"
    return ROLES.get(_plain(symbol.name), alone)


def _anchor(kernel: Kernel, symbol: Symbol) -> Symbol:
    """Return the symbol itself if its name exists once, else the nearest one before that does."""
    for candidate in reversed(kernel.symbols[: kernel.symbols.index(symbol) + 1]):
        if candidate.kind in "tT" and kernel.names[candidate.name] == 1:
            return candidate
    raise InvalidData(f"no symbol before {symbol.name} has a name of its own")


def document(kernel: Kernel) -> dict[str, Any]:
    """Return the kernel's sites as a document of sites.schema.json."""
    sites = [asdict(site) for site in find(kernel)]
    for site in sites:
        site["access_offsets_bytes"] = list(site["access_offsets_bytes"])
    return {
        "schema_version": "1",
        "release": kernel.release,
        "build_id": kernel.build_id,
        "sites": sites,
    }


def main(arguments: list[str]) -> int:
    """Print (or write) the sites of one kernel; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernel.sites", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--vmlinux", type=Path, help="an unstripped vmlinux")
    source.add_argument("--image", type=Path, help="an uncompressed Image; needs --symbols")
    source.add_argument("--running", action="store_true", help="this machine's kernel; as root")
    parser.add_argument("--symbols", type=Path, help="System.map, or /proc/kallsyms saved as root")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    asked = parser.parse_args(arguments)
    if bool(asked.image) != bool(asked.symbols):
        parser.error("--image and --symbols belong together")
    try:
        if asked.vmlinux:
            kernel = from_vmlinux(asked.vmlinux)
        elif asked.image:
            kernel = from_image(asked.image, asked.symbols)
        else:
            kernel = from_running()
        text = json.dumps(document(kernel), indent=1, sort_keys=True) + "\n"
        if asked.out:
            temporary = asked.out.with_name(f".{asked.out.name}.new")
            try:
                temporary.write_text(text)
                temporary.replace(asked.out)
            except OSError as exc:
                raise EnvironmentUnfit(f"{asked.out}: cannot write: {exc.strerror}") from exc
        else:
            sys.stdout.write(text)
    except ArtifactError as exc:
        print(f"sites: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


def _run() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    _run()

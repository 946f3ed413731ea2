"""Find the loops of a riscv64 program that only wait: ggml's barrier and its poll for work.

Promise: a spin loop is the innermost natural loop around a `pause` instruction of a named function;
each named function must have one.  A loop that calls a function or touches vector registers is no
wait and is refused by name, and so is a pause in another function of ggml (the compiler may have
moved a wait there).
Limit: addresses are those of the file; a position-independent program is moved when it is loaded.
What surrounds the loop (the barrier's own counter, the test before the first round) is not in it,
so time spent waiting is bounded from below.  glibc's adaptive mutexes pause, too; ggml has none.

    python -m kernel.spin_ranges PROGRAM     one line per range: START-END FUNCTION
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from toolchain.errors import ArtifactError, InvalidData
from toolchain.inside import run_inside

PAUSE = (0x0100000F).to_bytes(4, "little")
GGML = "ggml_"
GGML_WAITS = ("ggml_barrier", "ggml_graph_compute_secondary_thread")
"""ggml-cpu.c: threads that wait for one another, and threads that poll for the next graph."""
OBJDUMP = "riscv64-linux-gnu-objdump"
BRANCH = re.compile(r"c?\.?b(?:eq|ne|lt|ge|gt|le)(?:u|z|uz)?$")
JUMP = re.compile(r"(?:c\.)?j$")
CALL = re.compile(r"(?:c\.)?(?:jal|jalr|call)$")
END = re.compile(r"(?:c\.)?(?:jr|ret|tail|ebreak|unimp|mret|sret)$")
LINE = re.compile(r"\s*([0-9a-f]+):\t([0-9a-f ]+?)\s*\t(\S+)(?:\t(.*))?$")
TARGET = re.compile(r"\b([0-9a-f]+) <")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a disassembly; `target` is where a branch or jump goes."""

    address: int
    size: int
    mnemonic: str
    target: int | None

    def successors(self) -> tuple[int, ...]:
        """Return the addresses that may be executed next within the function."""
        following = self.address + self.size
        if END.match(self.mnemonic):
            return ()
        if self.target is not None and JUMP.match(self.mnemonic):
            return (self.target,)
        if self.target is not None and BRANCH.match(self.mnemonic):
            return (self.target, following)
        return (following,)


@dataclass(frozen=True)
class SpinLoop:
    """A waiting loop: its function, its code as [start, end) ranges, and its instructions."""

    function: str
    ranges: tuple[tuple[int, int], ...]
    body: tuple[Instruction, ...]


def spin_loops(program: Path, functions: Sequence[str] = GGML_WAITS) -> list[SpinLoop]:
    """Return the waiting loops of the named functions, by address.

    Raises InvalidData, naming the program, where one has none or one that does more than wait.
    """
    found: dict[tuple[tuple[int, int], ...], SpinLoop] = {}
    for name, (start, end), pauses in _functions_with_pause(program):
        if name not in functions and not name.startswith(GGML):
            continue
        code = disassemble(program, start, end)
        # The bytes of a pause may also lie across two instructions.
        for pause in (place for place in pauses if place in code):
            if name not in functions:
                raise InvalidData(
                    f"{program}: {name}: a pause at {pause:#x}; expected only in "
                    f"{', '.join(functions)}; was a wait inlined there?"
                )
            loop = _loop(program, name, code, start, pause)
            found[loop.ranges] = loop
    for name in {*functions} - {loop.function for loop in found.values()}:
        raise InvalidData(f"{program}: {name}: no such function with a pause; was it inlined?")
    return [found[ranges] for ranges in sorted(found)]


def disassemble(program: Path, start: int, end: int) -> dict[int, Instruction]:
    """Return address -> instruction of [start, end), as the pinned tree's objdump reads it."""
    argv = [OBJDUMP, "-d", f"--start-address={start:#x}", f"--stop-address={end:#x}", "/program"]
    text = run_inside(argv, what=f"disassemble {program.name}", binds={"/program": program}).stdout
    code = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            target = TARGET.search(match[4] or "")
            size = len(match[2].replace(" ", "")) // 2
            code[int(match[1], 16)] = Instruction(
                int(match[1], 16), size, match[3], int(target[1], 16) if target else None
            )
    return code


def functions(program: Path) -> list[tuple[str, tuple[int, int]]]:
    """Return name and [start, end) of each function of a riscv64 program, in its table's order.

    Raises InvalidData for another program, and for one that is stripped.
    """
    with _opened(program) as elf:
        symbols = elf.get_section_by_name(".symtab")
        if not isinstance(symbols, SymbolTableSection):
            raise InvalidData(f"{program}: stripped; its symbols name the loops, keep them")
        return [
            (symbol.name, (symbol["st_value"], symbol["st_value"] + symbol["st_size"]))
            for symbol in symbols.iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_size"]
        ]


@contextlib.contextmanager
def _opened(program: Path) -> Iterator[ELFFile]:
    try:
        with program.open("rb") as file:
            elf = ELFFile(file)
            if elf["e_machine"] != "EM_RISCV":
                raise InvalidData(f"{program}: {elf['e_machine']}, expected EM_RISCV")
            yield elf
    except (OSError, ELFError) as exc:
        raise InvalidData(f"{program}: not a readable ELF program: {exc}") from exc


def _functions_with_pause(program: Path) -> list[tuple[str, tuple[int, int], list[int]]]:
    """Return name, [start, end) and addresses of pause-like bytes of each function with some."""
    with _opened(program) as elf:
        places = [
            section["sh_addr"] + match.start()
            for section in elf.iter_sections()
            if section["sh_flags"] & 4  # SHF_EXECINSTR
            for match in re.finditer(re.escape(PAUSE), section.data())
        ]
    found = []
    for (start, end), name in sorted({span: name for name, span in functions(program)}.items()):
        if inside := [place for place in places if start <= place < end]:
            found.append((name, (start, end), inside))
    return found


def _loop(
    program: Path, name: str, code: Mapping[int, Instruction], entry: int, pause: int
) -> SpinLoop:
    """Return the innermost natural loop around the pause."""
    loops = [body for body in _natural_loops(code, entry) if pause in body]
    if not loops:
        raise InvalidData(f"{program}: {name}: the pause at {pause:#x} is in no loop")
    innermost = min(loops, key=lambda body: len(body))
    body = tuple(code[address] for address in sorted(innermost))
    for instruction in body:
        mnemonic = instruction.mnemonic
        if mnemonic.startswith("v") or CALL.match(mnemonic):
            raise InvalidData(
                f"{program}: {name}: the loop around the pause at {pause:#x} does more than wait: "
                f"{mnemonic} at {instruction.address:#x}"
            )
    ranges: list[tuple[int, int]] = []
    for instruction in body:
        end = instruction.address + instruction.size
        if ranges and ranges[-1][1] == instruction.address:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((instruction.address, end))
    return SpinLoop(name, tuple(ranges), body)


def _natural_loops(code: Mapping[int, Instruction], entry: int) -> list[set[int]]:
    """Return the bodies of all natural loops; loops with one head are one loop."""
    successors = {
        address: [next_ for next_ in instruction.successors() if next_ in code]
        for address, instruction in code.items()
    }
    predecessors: dict[int, list[int]] = {address: [] for address in code}
    for address, nexts in successors.items():
        for next_ in nexts:
            predecessors[next_].append(address)
    bodies: list[set[int]] = []
    reachable = _reached(successors, entry, without=None)
    for head in reachable:
        # Back edges come from where every way from the entry leads through the head.
        dominated = reachable - _reached(successors, entry, without=head)
        if sources := dominated.intersection(predecessors[head]):
            parts = [_reached(predecessors, source, without=head) for source in sources]
            bodies.append({head}.union(*parts))
    return bodies


def _reached(edges: Mapping[int, Sequence[int]], start: int, *, without: int | None) -> set[int]:
    """Return all nodes on ways from `start` that do not pass `without`."""
    seen: set[int] = set()
    todo = [start] if start != without else []
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [next_ for next_ in edges[node] if next_ != without]
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """Print the program's ranges; exit code 4 where there is none."""
    parser = argparse.ArgumentParser(description="find the loops of a program that only wait")
    parser.add_argument("program", type=Path)
    parser.add_argument(
        "--function",
        action="append",
        help="one that waits (default: those of ggml)",
    )
    arguments = parser.parse_args(argv)
    try:
        loops = spin_loops(arguments.program, arguments.function or GGML_WAITS)
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for loop in loops:
        for start, end in loop.ranges:
            print(f"{start:#x}-{end:#x} {loop.function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The loops of ggml that only wait are found, all of them, and nothing else passes for one.

Promise: checked against the disassembly of the llama-server that runs on the board; programs with a
loop that does more, with none, or with one where none belongs are built here and refused.
Limit: the pinned compiler's code; what another one makes of the loops is not known.
"""

import re
from pathlib import Path

import pytest

from kernel.spin_ranges import GGML_WAITS, disassemble, main, spin_loops
from toolchain.errors import InvalidData
from toolchain.inside import run_inside
from toolchain.recipe import build

pytestmark = pytest.mark.boot

PAUSE = '__asm__ volatile(".4byte 0x100000F");'


@pytest.fixture(scope="module")
def server() -> Path:
    return build("llama.cpp/server-riscv64") / "llama-server"


def test_the_loops_of_llama_server_only_wait(server: Path) -> None:
    loops = spin_loops(server)
    assert sorted(loop.function for loop in loops) == sorted(GGML_WAITS)
    for loop in loops:
        mnemonics = [instruction.mnemonic for instruction in loop.body]
        assert mnemonics.count("pause") == 1
        assert any(re.match(r"l[bhwd]u?$", name) for name in mnemonics), "it looks at memory"
        assert any(name.startswith("b") for name in mnemonics), "it may end"
        assert not [name for name in mnemonics if name.startswith(("v", "f")) and name != "fence"]
        assert not [name for name in mnemonics if re.match(r"jal|call|ecall", name)]


def test_the_ranges_are_the_loop_and_nothing_more(server: Path) -> None:
    for loop in spin_loops(server):
        code: dict[int, str] = {}
        for start, end in loop.ranges:
            part = disassemble(server, start, end)
            assert min(part) == start
            assert max(part) + part[max(part)].size == end
            code |= {address: found.mnemonic for address, found in part.items()}
        assert code == {found.address: found.mnemonic for found in loop.body}
        # From the pause every instruction of the loop is reached, and the pause from each of them.
        body = {found.address: found for found in loop.body}
        for first in body:
            reached: set[int] = set()
            todo = [first]
            while todo:
                here = todo.pop()
                if here in body and here not in reached:
                    reached.add(here)
                    todo += body[here].successors()
            assert reached == set(body)


def test_every_pause_of_ggml_is_in_a_range(server: Path) -> None:
    argv = ["riscv64-linux-gnu-objdump", "-d", "--no-show-raw-insn", "/program"]
    text = run_inside(argv, what="disassemble", binds={"/program": server}).stdout
    pauses = {int(found, 16) for found in re.findall(r"^ +([0-9a-f]+):\tpause", text, re.MULTILINE)}
    ranges = [one for loop in spin_loops(server) for one in loop.ranges]
    assert len(pauses) == 2
    assert all(any(start <= pause < end for start, end in ranges) for pause in pauses)


def compiled(directory: Path, source: str) -> Path:
    path = directory / "program.c"
    path.write_text(source)
    script = (
        "riscv64-linux-gnu-gcc -O1 -march=rv64gcv -fno-inline -nostdlib -static -Wl,-e,main "
        "-o /out/program /program.c"
    )
    run_inside(
        ["sh", "-c", script],
        what="compile",
        binds={"/program.c": path},
        writable={"/out": directory},
    )
    return directory / "program"


REFUSED = {
    "vector": (
        'void wait(volatile int *a) { while (*a) { __asm__ volatile("vmv.v.i v0, 0"); '
        f"{PAUSE} }} }}",
        r"wait: the loop around the pause at 0x\w+ does more than wait: vmv\.v\.i at 0x\w+",
    ),
    "call": (
        'void work(void) { __asm__ volatile(""); }\n'
        f"void wait(volatile int *a) {{ while (*a) {{ work(); {PAUSE} }} }}",
        r"does more than wait: (jal|jalr) at",
    ),
    "no-loop": (f"void wait(void) {{ {PAUSE} }}", r"wait: the pause at 0x\w+ is in no loop"),
    "none": ("void wait(volatile int *a) { while (*a); }", "wait: no such function with a pause"),
    "elsewhere": (
        f"void wait(volatile int *a) {{ while (*a) {PAUSE} }}\n"
        f"void ggml_other(volatile int *a) {{ while (*a) {PAUSE} }}",
        r"ggml_other: a pause at 0x\w+; expected only in wait; was a wait inlined there\?",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_wait_is_refused(name: str, tmp_path: Path) -> None:
    source, message = REFUSED[name]
    program = compiled(tmp_path, source + "\nint main(void) { return 0; }\n")
    with pytest.raises(InvalidData, match=message) as caught:
        spin_loops(program, ["wait"])
    assert str(caught.value).startswith(f"{program}: ")


def test_the_innermost_loop_is_taken(tmp_path: Path) -> None:
    source = f"""
int work(int x) {{ __asm__ volatile(""); return x + 1; }}
void wait(volatile int *a) {{
	for (int i = 0; i < 10; i = work(i))
		while (*a)
			{PAUSE}
}}
int main(void) {{ return 0; }}
"""
    [loop] = spin_loops(compiled(tmp_path, source), ["wait"])
    assert "jal" not in {found.mnemonic for found in loop.body}


def test_files_that_are_no_such_program_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("no program\n")
    assert main([str(text)]) == 4
    assert "text: not a readable ELF program" in capsys.readouterr().err
    assert main(["/bin/true"]) == 4
    assert "EM_X86_64, expected EM_RISCV" in capsys.readouterr().err
    stripped = compiled(tmp_path, f"void wait(void) {{ {PAUSE} }}\nint main(void) {{ return 0; }}")
    run_inside(
        ["riscv64-linux-gnu-strip", "/out/program"], what="strip", writable={"/out": tmp_path}
    )
    assert main([str(stripped)]) == 4
    assert "program: stripped; its symbols name the loops" in capsys.readouterr().err


def test_the_command_line_prints_what_the_observer_takes(
    server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(server)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(loop.ranges) for loop in spin_loops(server))
    assert all(re.fullmatch(r"0x[0-9a-f]+-0x[0-9a-f]+ ggml_\w+", line) for line in lines)

"""The truth plugin: exact where the answer is known beforehand, and invisible to the guest.

Promise: a program with a known number of instructions is counted to the last one; each save moves
the whole register file of the VLEN the machine has; the same boot without the plugin prints and
returns the same bytes; each misuse of the window is a named problem and none of it ends the run.
Limit: one hart is on line in these boots; many harts are counted in the cells that use the plugin.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

import schemas
from board.base import RunFailed
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from kernel import sites
from kernel.sites import Kernel, Site
from kernel.truth import plugin
from toolchain import lock, sources
from toolchain.command import CommandFailed
from toolchain.inside import run_inside
from toolchain.recipe import build

VLEN_BITS = 512
ROUNDS = 50
QUIET = """#!/bin/sh
/payload/known
cat /sys/kernel/debug/sched/debug /proc/interrupts >/results/state
"""
PINGPONG = f"""#!/bin/sh
cd /payload
mkfifo in out
./pingpong {ROUNDS} <in >out &
exec 5>in 6<out
read -r pid <&6
./mark close
./mark open "$pid"
./mark open "$pid"
./mark range 1 20 10
echo >&5
read -r word <&6
./mark close
./mark open "$pid"
echo >&5
wait
./mark nonsense || ./mark open 1x || echo "mark: $?"
"""


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    image = build("kernel/image")
    return sites.from_image(image / "Image", image / "System.map")


def waiting_loop(program: Path) -> tuple[int, int]:
    """Return the range that the program's own symbols name."""
    with program.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".symtab")
        assert isinstance(table, SymbolTableSection)
        values = {symbol.name: int(symbol["st_value"]) for symbol in table.iter_symbols()}
    return values["known_spin_start"], values["known_spin_end"]


def run(directory: Path, script: str, extra: Sequence[str]) -> None:
    programs = build("kernel/truth")
    done = boot(
        default_machine({"memory_mib": 384, "vlen_bits": VLEN_BITS}),
        seed=1,
        payload={
            "known": programs / "known",
            "mark": programs / "mark",
            "pingpong": build("kernel/pingpong") / "pingpong",
        },
        script=script,
        directory=directory,
        deadline_s=600,
        extra=extra,
        binds=plugin.binds(),
    )
    assert done.exit_code == 0


def arguments(kernel: Kernel, found: Sequence[Site]) -> list[str]:
    spin = waiting_loop(build("kernel/truth") / "known")
    return plugin.arguments(kernel, found, [spin], "/out/truth.json")


@pytest.mark.boot
def test_known_instructions_are_counted_and_the_guest_sees_nothing(
    kernel: Kernel, tmp_path: Path
) -> None:
    seen, unseen = tmp_path / "with", tmp_path / "without"
    run(seen, QUIET, arguments(kernel, sites.find(kernel)))
    truth = schemas.read(seen / "truth.json", "truth")
    assert (truth["window"], truth["problems"]) == ("closed", [])
    # kernel/truth/known.S
    assert (truth["instructions"], truth["spin_instructions"]) == (2003, 1000)
    assert truth["critical_instructions"] == 2003

    run(unseen, QUIET, [])
    assert sorted(path.name for path in unseen.iterdir()) == ["console.log", "qemu.log", "state"]
    for name in ("console.log", "state"):
        assert (seen / name).read_bytes() == (unseen / name).read_bytes(), name


@pytest.mark.boot
def test_saves_move_the_whole_register_file_and_misuse_is_named(
    kernel: Kernel, tmp_path: Path
) -> None:
    run(tmp_path, PINGPONG, arguments(kernel, sites.find(kernel)))
    truth = schemas.read(tmp_path / "truth.json", "truth")
    saves, restores = truth["saves"]["target"], truth["restores"]["target"]
    assert 2 * ROUNDS <= saves["count"] <= 2 * ROUNDS + 20
    assert saves["bytes"] == saves["count"] * 32 * VLEN_BITS / 8
    assert restores["bytes"] == restores["count"] * 32 * VLEN_BITS / 8
    for kind in ("saves", "restores"):
        assert truth[kind]["system"]["count"] >= truth[kind]["target"]["count"] > 0
    assert truth["problems"] == [
        "the window was closed while it was not open",
        "the window was opened again while it was open",
        "range 1 from 0x20 to 0x10 is empty",
        "the window was opened again after it had been closed",
    ]
    console = (tmp_path / "console.log").read_text()
    assert "use: mark open TGID" in console
    assert "mark: got '1x', expected a decimal number" in console
    assert "mark: 2" in console


@pytest.mark.boot
def test_a_panic_in_the_window_leaves_a_report_that_says_so(kernel: Kernel, tmp_path: Path) -> None:
    wrong = [
        replace(site, address=f"{int(site.address, 16) + 4:#x}") for site in sites.find(kernel)
    ]
    script = "#!/bin/sh\n/payload/mark open 1\necho c >/proc/sysrq-trigger\n"
    with pytest.raises(RunFailed) as caught:
        run(tmp_path, script, arguments(kernel, wrong))
    assert caught.value.reason == "guest-panic"
    truth = schemas.read(tmp_path / "truth.json", "truth")
    assert truth["window"] == "open"
    *misplaced, last = truth["problems"]
    assert last == "the window was never closed"
    assert len(misplaced) == len(wrong)
    assert all("the sites are of another kernel" in problem for problem in misplaced)


BAD = {
    "nonsense=1": "argument nonsense=1: unknown or not of the form",
    "site=save:x:user:1.2.3": "argument site=save:x:user:1.2.3: unknown",
    "spin=20-10": "argument spin=20-10: unknown",
    "tgid=0x684": "out, switch, tgid, kernel and a site are needed",
}


@pytest.mark.boot
@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_refused_before_the_guest_starts(argument: str) -> None:
    argv = ["qemu-system-riscv64", "-machine", "virt", "-display", "none"]
    with pytest.raises(CommandFailed, match=BAD[argument]):
        run_inside(
            [*argv, "-plugin", f"{plugin.INSIDE},{argument}"],
            what="start QEMU with a plugin",
            binds=plugin.binds(),
            timeout_s=60,
        )


@pytest.mark.boot
def test_arguments_follow_from_the_kernel(kernel: Kernel) -> None:
    [option, value] = plugin.arguments(kernel, sites.find(kernel), [(16, 32)], "/out/t.json")
    assert option == "-plugin"
    path, *parts = value.split(",")
    assert path == plugin.INSIDE
    assert parts[0] == "out=/out/t.json"
    assert parts[-1] == "spin=0x10-0x20"
    assert sum(part.startswith("site=") for part in parts) == len(sites.find(kernel))


def test_the_plugin_header_is_of_the_qemu_that_runs() -> None:
    (emulator,) = (p for p in lock.read_lock() if p.name == "qemu-system-riscv")
    upstream = emulator.version.partition(":")[2].rpartition("-")[0]
    assert sources.sources()["qemu"].version == upstream, (
        "debian.lock has moved on: pin the source archive of the same version in sources.toml"
    )

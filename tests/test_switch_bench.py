"""switch_bench: one program on two architectures, and what is made of its numbers.

Promise: on this machine the kernel counts as many switches as there are hand-overs, and each mode
has the state it names; on the virtual board V state adds instructions to a switch, by an interval
that zero is not in; the interval covers a known difference as often as it says; a file that merely
lies beside them is passed over or named.
Limit: no test asks for a time.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import schemas
from analysis.x86 import marginals, read_measured
from board.virtual.machine import default_machine
from board.x86.job import container
from board.x86.probes import on_virtual_board
from toolchain.command import Completed, run
from toolchain.errors import InvalidData
from toolchain.inside import entering
from toolchain.recipe import build

AVX = 1 << 2


def bench(directory: Path, *options: str) -> Completed:
    """Run the x86 program in the tree x86, `directory` as /out."""
    command = entering(
        ["sh", "-c", 'exec "$@" 2>&1', "sh", "/bench/switch_bench", *options],
        {"/bench": build("kernel/switch-bench-x86-64")},
        {"/out": directory},
        directory / "mounts",
        name=container()["tree"],
    )
    return run(command, what="switch_bench", env=container()["environment"], check=False)


@pytest.mark.boot
def test_on_this_machine_each_hand_over_is_a_switch(tmp_path: Path) -> None:
    rounds = 50
    done = bench(tmp_path, "--out", "/out/bench.json", "--rounds", str(rounds), "--repeats", "21")
    assert (done.returncode, done.stdout) == (0, "")
    document = schemas.read(tmp_path / "bench.json", "switch_bench")
    assert document["architecture"] == "x86_64"
    none, *others = document["modes"]
    assert none["mode"] == "none" and none["state_bytes"] == 0
    for mode in document["modes"]:
        for repeat in mode["repeats"]:
            # Each hand-over is one; a tick may add some.
            assert 2 * rounds - 2 <= repeat["switches"] <= 4 * rounds
    if none["in_use"] is not None:
        assert int(none["in_use"], 16) & AVX == 0
        assert all(int(mode["in_use"], 16) & AVX for mode in others)
    for found in marginals(document, "cpu_ns"):
        assert found.low <= found.estimate <= found.high


@pytest.mark.boot
def test_on_the_virtual_board_vector_state_adds_instructions() -> None:
    machine = default_machine()
    document = on_virtual_board(machine.vlen_bits)
    assert document["architecture"] == "riscv64"
    assert document["emulator"] == "qemu-system"
    assert [mode["mode"] for mode in document["modes"]] == ["none", "v"]
    [found] = marginals(document, "instructions")
    assert found.state_bytes == 32 * machine.vlen_bits // 8
    assert 0 < found.low <= found.estimate <= found.high
    # A save and a restore, each a dozen instructions and some questions around it.
    assert found.estimate < 0.1 * found.switch
    # One instruction is one tick of the machine's clock.
    for mode in document["modes"]:
        for repeat in mode["repeats"]:
            assert repeat["wall_ns"] >= 0.9 * repeat["instructions"] * 2**machine.icount_shift


REFUSED = [
    (("--rounds", "0"), "--rounds: got '0', expected an integer of 1..1000000"),
    (("--repeats", "10002"), "--repeats: got '10002', expected an integer of 1..10001"),
    (("word",), "'word': expected options only; see --help"),
    ((), "--out is missing; see --help"),
]


@pytest.mark.boot
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_wrong_options_are_named(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = bench(tmp_path, *options)
    assert (done.returncode, done.stdout) == (2, f"switch_bench: {message}\n")


def made_up(added_ns: float, fill_ns: float, seed: int, turns: int = 101) -> dict[str, Any]:
    """A document of two modes that differ by `added_ns` a switch, with drift and spikes."""
    stream = random.Random(seed)
    switches = 100
    repeats: dict[str, list[dict[str, Any]]] = {"none": [], "v": []}
    for turn in range(turns):
        drift = 3000 + 500 * (turn / turns) ** 2
        for mode, extra, filling in (("none", 0.0, 5.0), ("v", added_ns + fill_ns, 5.0 + fill_ns)):
            noise = stream.gauss(0, 100) + (stream.random() < 0.02) * 5000
            repeats[mode].append({
                "wall_ns": 1,
                "cpu_ns": max(0, round(switches * (drift + extra + noise))),
                "fill_cpu_ns": round(switches * filling),
                "switches": switches,
                "instructions": None,
                "fill_instructions": None,
            })  # fmt: skip
    return {
        "schema_version": "1", "architecture": "riscv64", "kernel_release": "6", "emulator": None,
        "cpu": 0, "rounds": 50, "instruction_counter": None,
        "modes": [
            {"mode": mode, "state_bytes": size, "in_use": None, "repeats": repeats[mode]}
            for mode, size in (("none", 0), ("v", 1024))
        ],
    }  # fmt: skip


def test_the_interval_covers_a_known_difference() -> None:
    covered = 0
    for seed in range(200):
        document = made_up(40.0, 12.0, seed)
        schemas.check(document, "switch_bench")
        [found] = marginals(document, "cpu_ns")
        covered += found.low <= 40.0 <= found.high
    assert 184 <= covered <= 200  # 95 % of 200, three standard deviations down


def test_what_was_not_counted_has_no_marginal() -> None:
    document = json.loads(json.dumps(made_up(40.0, 12.0, 1)))
    assert marginals(document, "instructions") == []


def test_what_lies_beside_the_measurements_is_passed_over_or_named(tmp_path: Path) -> None:
    folder = tmp_path / "x86"
    for name in ("x86-none/switch_bench", "virtual/switch_bench-256"):
        (folder / name).parent.mkdir(parents=True)
        schemas.write(folder / f"{name}.json", made_up(40.0, 12.0, 1, turns=11), "switch_bench")
    for stray in ("virtual/other.json", "x86-none/copy of switch_bench.json"):
        (folder / stray).write_text("{}")
    found = read_measured([tmp_path])
    assert (list(found.bench), list(found.virtual), found.xstate) == (["x86-none"], [256], {})
    (folder / "virtual" / "switch_bench-256 (copy).json").write_text("{}")
    with pytest.raises(InvalidData, match=r"256 \(copy\)\.json: not a file of ./inv x86-compare"):
        read_measured([tmp_path])

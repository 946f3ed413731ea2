"""rvv_probe reads VLEN and measures what its document says, at three VLENs and on the board.

Promise: under user-mode emulation at VLEN 128, 256 and 512 the document is complete and right in
all that does not depend on a clock; once on the virtual board, where an instruction takes a fixed
time, the times are those of the instructions.
Limit: no hardware here: cold passes are run to see that they run.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import schemas
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from toolchain.inside import run_inside
from toolchain.recipe import build

pytestmark = pytest.mark.boot

KINDS = ["vector-store", "vector-load", "scalar-store", "scalar-load"]
MACHINE = default_machine({"memory_mib": 384})


def probe(
    directory: Path, vlen_bits: int, *options: str, out: str = "/out/probe.json"
) -> tuple[int, str]:
    """Run the program under user-mode emulation; return its exit code and what it said."""
    cpu = dataclasses.replace(MACHINE, vlen_bits=vlen_bits).cpu_argument()
    if not vlen_bits:
        cpu = "rv64,v=false"
    argv = ["qemu-riscv64", "-cpu", cpu, "/probe/rvv_probe", "--out", out, *options]
    done = run_inside(
        ["sh", "-c", 'exec "$@" 2>&1', "sh", *argv],
        what="rvv_probe",
        binds={"/probe": build("kernel/rvv-probe")},
        writable={"/out": directory},
        check=False,
    )
    return done.returncode, done.stdout


def read(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = schemas.read(directory / "probe.json", "rvv_probe")
    for row in document["measurements"]:
        spreads = [value for value in row.values() if isinstance(value, dict)]
        assert all(s["min"] <= s["median"] <= s["max"] for s in spreads)
    return document


def instructions(document: dict[str, Any]) -> dict[str, int]:
    return {row["kind"]: row["instructions_per_pass"] for row in document["measurements"]}


@pytest.mark.parametrize("vlen_bits", [128, 256, 512])
def test_each_vlen_is_read_from_the_hardware(vlen_bits: int, tmp_path: Path) -> None:
    assert probe(tmp_path, vlen_bits, "--passes", "10", "--repeats", "3") == (0, "")
    document = read(tmp_path)
    assert document["vlenb_bytes"] == vlen_bits // 8
    assert document["register_file_bytes"] == 32 * vlen_bits // 8
    assert [row["kind"] for row in document["measurements"]] == KINDS
    assert {row["memory"] for row in document["measurements"]} == {"hot"}
    assert document["emulator"] == "qemu-user"
    assert document["counters"] == {"cycles": None, "instructions": None}
    # Four groups of eight registers at any VLEN; scalar code pays for every 8 bytes.
    doubles = document["register_file_bytes"] // 8
    assert instructions(document)["vector-store"] == 10
    assert instructions(document)["scalar-store"] == doubles + doubles // 8 * 2 + 3


def test_cold_passes_run_where_they_are_asked_for(tmp_path: Path) -> None:
    assert probe(tmp_path, 256, "--repeats", "3", "--cold-mib", "1") == (0, "")
    document = read(tmp_path)
    assert document["cold_bytes"] == 1 << 20
    assert [row["kind"] for row in document["measurements"]] == KINDS * 2
    assert [row["memory"] for row in document["measurements"]] == ["hot"] * 4 + ["cold"] * 4


@pytest.fixture(scope="module")
def on_board(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("probe")
    done = boot(
        MACHINE,
        seed=1,
        payload={"rvv_probe": build("kernel/rvv-probe") / "rvv_probe"},
        script="#!/bin/sh\n/payload/rvv_probe --out /results/probe.json\n",
        directory=directory,
        deadline_s=600,
    )
    assert done.exit_code == 0
    return read(directory)


def test_on_the_virtual_board_time_is_instructions(on_board: dict[str, Any]) -> None:
    assert on_board["emulator"] == "qemu-system"
    assert on_board["counters"] == {"cycles": "csr", "instructions": "csr"}
    assert on_board["vlenb_bytes"] == MACHINE.vlen_bits // 8
    for row in on_board["measurements"]:
        expected_ns = row["instructions_per_pass"] * 2**MACHINE.icount_shift
        # The timer ticks every 100 ns and reading the clock takes some hundred instructions.
        spare_ns = 20_000 / on_board["passes"]
        assert expected_ns <= row["ns_per_pass"]["min"] + 1
        assert row["ns_per_pass"]["min"] <= expected_ns + spare_ns
        # What the hardware counter adds is the reading of clock and counters.
        counted = row["counted_instructions_per_pass"]["min"]
        assert 0 <= counted - row["instructions_per_pass"] < 1000 / on_board["passes"]


REFUSED = [
    (("--passes", "0"), 2, "--passes: got '0', expected an integer of 1..1000000"),
    (("--repeats", "1002"), 2, "--repeats: got '1002', expected an integer of 1..1001"),
    (("--cold-mib", "3"), 2, "--cold-mib: got '3', expected a power of two"),
    (("word",), 2, "'word': expected options only; see --help"),
    (("--fast",), 2, "unrecognized option '--fast'"),
]


@pytest.mark.parametrize(("options", "code", "message"), REFUSED)
def test_wrong_options_are_named(
    options: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    returned, said = probe(tmp_path, 256, *options)
    assert returned == code
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_hart_without_v_is_refused(tmp_path: Path) -> None:
    code, said = probe(tmp_path, 0)
    assert code == 3
    assert said.startswith("rvv_probe: no V extension for programs here: ")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, said = probe(tmp_path, 256, out="/out/none/probe.json")
    assert code == 3
    assert re.search(r"/out/none/probe\.json: cannot write: No such file or directory", said)
    assert not list(tmp_path.iterdir())


def test_help_documents_the_exit_codes(tmp_path: Path) -> None:
    code, said = probe(tmp_path, 256, "--help")
    assert code == 0
    assert "Exit codes: 0 done; 2 usage; 3 no vector unit" in said

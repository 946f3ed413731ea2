"""Whole runs that must be invalid, and one that must not: sabotage from outside of the product.

Promise: real runs of a small cell on a small machine, each with one thing broken by the test: the
emulator not told of a save site, and a guest that panics in the open window.  And a window in which
the kernel itself misses probes: what is missed is accounted for, to the last save.
Limit: machine and calibration are not the published ones; nothing is timed here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_board import calibration as fake_calibration
from fake_board import definitions, experiments

from board.cell import Overrides
from board.runner import run_one
from board.virtual import guest
from board.virtual.board import VirtualBoard
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from board.virtual.tools import Tools
from kernel import plain
from kernel.truth import plugin
from schemas.record import read_record
from toolchain.errors import InvalidData
from toolchain.recipe import build

pytestmark = pytest.mark.boot

EXPERIMENTS = experiments(
    {"requests": 2, "warmup_requests": 0, "prompt_words": 12, "max_tokens": 2},
    {"threads": 1, "threads_batch": 1, "ctx_per_slot": 64, "poll": 50},
    deadline_s=3600,
    cost={"cpu_s": 40, "disk_mib": 4},
)


class SmallBoard(VirtualBoard):
    """The virtual board with two harts and no parked ones: cheap, and no measurement."""

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        return default_machine({"harts": 2, "parked_harts": 0, **overrides}).as_cell()

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        return fake_calibration(cell)


def broken_run(directory: Path) -> dict[str, Any]:
    """Run the cell; return the record of the invalid run that it must be."""
    known = definitions(directory, EXPERIMENTS)
    with pytest.raises(InvalidData, match="the run is invalid"):
        run_one(SmallBoard(), Overrides(), directory / "results", definitions=known)
    [run] = (directory / "results" / "runs").iterdir()
    record: dict[str, Any] = read_record(run)
    return record


def test_an_emulator_that_misses_a_site_makes_the_run_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = plugin.arguments

    def without_one(kernel: Any, sites: Any, spins: Any, out: str) -> list[str]:
        switch = ("save", "context-switch", "user")
        kept = [site for site in sites if (site.kind, site.role, site.state) != switch]
        assert len(kept) == len(sites) - 1
        return whole(kernel, kept, spins, out)

    monkeypatch.setattr(plugin, "arguments", without_one)
    record = broken_run(tmp_path)
    assert record["invalid_reasons"] == ["instruments-disagree"]
    agreed = record["agreement"]
    saves = agreed["user_saves"]
    assert saves["observer"] == saves["profiler"] > 0 == saves["truth"]
    assert agreed["differences"] == [
        f"user saves: observer {saves['observer']}, truth 0",
        f"user saves: profiler {saves['observer']}, missed 0, truth 0",
    ]
    assert f"instruments: {agreed['differences'][0]}" in capsys.readouterr().err


def test_a_panic_in_the_window_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = "/sys/kernel/debug/vstate_profiler/stats"
    panic = f"""(until grep -qs '^active 1' {stats}; do busybox usleep 1000; done
busybox usleep 200000 # the emulator's window opens after the profiler's, and lasts longer than this
echo c >/proc/sysrq-trigger) &
"""
    monkeypatch.setattr(
        guest, "SCRIPT", guest.SCRIPT.replace("exec python3", f"{panic}exec python3")
    )
    record = broken_run(tmp_path)
    assert record["invalid_reasons"] == ["guest-panic", "truth-problem"]
    assert record["truth"]["window"] == "open"
    assert record["truth"]["problems"] == ["the window was never closed"]
    assert record["observer"] is record["profiler"] is record["agreement"] is None
    [console] = tmp_path.glob("results/runs/*/console.log")
    assert "Kernel panic - not syncing: sysrq triggered crash" in console.read_text()


def test_probes_that_the_kernel_missed_are_accounted_for(tmp_path: Path) -> None:
    used = Tools.of(plain.INSTRUMENTS, tmp_path, spins=plain.spins())
    blocking = """at=$(busybox grep ' current_kprobe$' /proc/kallsyms | busybox cut -d ' ' -f 1)
(until grep -qs '^active 1' /sys/kernel/debug/vstate_profiler/stats; do busybox usleep 1000; done
insmod /payload/probe_blocker.ko current_kprobe_at=0x$at ms=30 2>/results/blocked) &
"""
    counted = plain.command("block", plain.Work(rounds=200, milliseconds=0))
    boot(
        default_machine({"parked_harts": 0, "memory_mib": 384}),
        seed=1,
        payload={
            **used.payload,
            **plain.payload(),
            "probe_blocker.ko": build("kernel/probe-blocker") / "probe_blocker.ko",
        },
        script=f"#!/bin/sh\n{blocking}{counted}\nwait\ndmesg >/results/dmesg\n",
        directory=tmp_path / "boot",
        deadline_s=plain.DEADLINE_S,
        extra=used.qemu,
        binds=used.binds,
    )
    assert "Resource temporarily unavailable" in (tmp_path / "boot" / "blocked").read_text()
    found = plain.read(tmp_path / "boot")
    agreed = found["agreement"]
    assert agreed["profiler_missed"] > 0
    assert agreed["agrees"], agreed["differences"]
    saves = agreed["saves"]
    assert saves["observer"] == saves["truth"] > saves["profiler"] > 0
    # Nobody else used vectors: what is missed system-wide is the target's.
    assert saves["profiler"] + agreed["profiler_missed"] == saves["truth"]
    log = (tmp_path / "boot" / "dmesg").read_text()
    assert not [line for line in log.splitlines() if "WARNING" in line or "BUG" in line]

"""vstate_profiler: counts what QEMU counts, refuses what it cannot count, leaves nothing behind.

Promise: one guest boot provokes every promised refusal for real (tests/guest_profiler.py) and
counts a workload whose saves are known beforehand, beside the truth plugin.
Limit: probes that the kernel misses are provoked in test_instruments_disagree.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import schemas
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from kernel import sites
from kernel.truth import plugin
from kernel.vstate_profiler import load
from toolchain.inside import run_inside
from toolchain.paths import REPO
from toolchain.recipe import build

ROUNDS = 200


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one boot."""
    directory = tmp_path_factory.mktemp("profiler")
    image = build("kernel/image")
    kernel = sites.from_image(image / "Image", image / "System.map")
    document = directory / "sites.json"
    schemas.write(document, sites.document(kernel), "sites")
    module = build("kernel/vstate-profiler") / "vstate_profiler.ko"
    done = boot(
        default_machine({"memory_mib": 384}),
        seed=1,
        payload={
            "sites.json": document,
            "vstate_profiler.ko": module,
            "kernel/vstate_profiler/load.py": REPO / "kernel" / "vstate_profiler" / "load.py",
            "guest_profiler.py": REPO / "tests" / "guest_profiler.py",
            "pingpong": build("kernel/pingpong") / "pingpong",
            "mark": build("kernel/truth") / "mark",
        },
        script="#!/bin/sh\nexec python3 /payload/guest_profiler.py\n",
        directory=directory,
        deadline_s=600,
        extra=plugin.arguments(kernel, sites.find(kernel), [], "/out/truth.json"),
        binds=plugin.binds(),
    )
    assert done.exit_code == 0, (directory / "console.log").read_text()[-2000:]
    return directory


@pytest.fixture(scope="module")
def found(guest: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((guest / "profiler-faults.json").read_text())
    return outcome


def tally(report: Mapping[str, Any], role: str, scope: str) -> int:
    """Sum a report's saves of one role."""
    return sum(
        site[scope]["count"]
        for site in report["sites"]
        if site["kind"] == "save" and site["role"] == role
    )


@pytest.mark.boot
def test_profiler_and_truth_count_the_same_saves(guest: Path) -> None:
    profiler = schemas.read(guest / "profiler.json", "profiler")
    truth = schemas.read(guest / "truth.json", "truth")
    assert (profiler["problems"], truth["problems"]) == ([], [])
    saves = truth["saves"]["target"]
    assert profiler["saves"]["target"]["count"] + profiler["missed_saves"] == saves["count"]
    # Each hand-over blocks once; beyond that, only begin, end and ticks.
    assert 2 * ROUNDS <= saves["count"] <= 2 * ROUNDS + 20
    assert saves["bytes"] == saves["count"] * profiler["register_file_bytes"]
    assert profiler["register_file_bytes"] == 32 * 256 / 8
    for number, site in enumerate(profiler["sites"]):
        if site["kind"] == "save":
            counted = sum(hart["target_count"] for hart in truth["sites"][number]["harts"])
            assert site["target"]["count"] + site["begin_missed"] == counted, site


@pytest.mark.boot
def test_every_save_is_timed_and_the_cost_of_probes_stands_beside(guest: Path) -> None:
    profiler = schemas.read(guest / "profiler.json", "profiler")
    target = profiler["saves"]["target"]
    assert target["timed"] == target["count"]
    assert all(site["orphan_ends"] == 0 for site in profiler["sites"])
    pair = profiler["empty_pair"]
    assert pair["count"] == 1000
    assert 0 < pair["min_ns"] <= pair["mean_ns"] <= pair["max_ns"]
    # Not subtracted: a save between two probes takes no less than nothing between two probes.
    assert target["total_ns"] >= target["timed"] * pair["min_ns"]
    switch = next(s for s in profiler["sites"] if s["target"]["count"] > ROUNDS)
    assert sum(b["count"] for b in switch["target"]["histogram"]) == switch["target"]["timed"]
    capacity = profiler["window"]["window_ns"] * profiler["window"]["online_cpus_at_start"]
    expected = 1e6 * target["total_ns"] / capacity
    assert abs(profiler["vstate_cpu_capacity_ppm"]["target"] - expected) <= 1


@pytest.mark.boot
def test_what_cannot_be_probed_is_said_and_not_summed(guest: Path, found: dict[str, Any]) -> None:
    profiler = schemas.read(guest / "profiler.json", "profiler")
    assert profiler["restores"] is None
    dead = {site["symbol"]: site["why_not_live"] for site in profiler["sites"] if not site["live"]}
    assert "recurse" in dead["riscv_v_context_nesting_end"]
    assert "noinstr" in dead["irqentry_exit_to_user_mode"]
    assert all(site["live"] for site in profiler["sites"] if site["kind"] == "save")
    assert f"sites_not_live {len(dead)}" in found["stats"].splitlines()


@pytest.mark.boot
def test_truth_counts_the_code_the_guest_names(guest: Path) -> None:
    truth = schemas.read(guest / "truth.json", "truth")
    (named,) = truth["ranges"]
    assert named["number"] == 7
    # Two handlers for each save, each of some ten instructions.
    count = truth["saves"]["system"]["count"]
    assert 20 * count < named["instructions"] < 400 * count


REFUSED = {
    "every save missing": (3, ["no_such_function_0: ", "no_such_function_6: ", "no such symbol"]),
    "one of two missing": (3, ["__schedule: its function has another one at +0x"]),
    "no saves": (3, ["no save site among the 4 given"]),
    "wrong site": (3, ["__schedule: at +0x", "not vsetvli e8,m8 with the four stores"]),
    "in an instruction": (3, ["__schedule: +0x", "no start of an instruction"]),
    "end before first": (3, ["__schedule: the end +0x"]),
    "other build-id": (4, ["with build-id 0000", "this one has", "not loaded"]),
    "other vermagic": (4, ["built for kernel 7", "not loaded"]),
    "no module": (4, ["it has no vermagic"]),
    "kprobes disabled at load": (3, ["disabled (debugfs kprobes/enabled)?"]),
    "not loaded": (3, ["vstate_profiler is not loaded"]),
    "started twice": (3, ["it has been started already; stop it first"]),
    "reset while active": (3, ["it has been started already"]),
    "stopped twice": (3, ["it was not started"]),
    "loaded twice": (3, ["is loaded already"]),
    "target unknown": (3, ["no target process of that number"]),
    "disabled at start": (3, ["its probes are not armed"]),
    "folder full": (3, ["cannot write: No space left on device; nothing was changed"]),
    "folder read-only": (3, ["cannot write: Read-only file system; nothing was changed"]),
}


@pytest.mark.boot
@pytest.mark.parametrize("fault", REFUSED)
def test_a_fault_is_refused_by_name(fault: str, found: dict[str, Any]) -> None:
    code, parts = REFUSED[fault]
    outcome = found[fault]
    assert outcome["code"] == code, outcome
    for part in parts:
        assert part in outcome["message"]


@pytest.mark.boot
def test_numbers_that_are_not_to_be_used_say_so(found: dict[str, Any]) -> None:
    assert found["target exits"] == ["the target process ended in the window"]
    assert found["window open"] == ["the window is still open"]
    assert found["after reset"] == ["the window was never opened"]
    assert found["disabled in the window"]
    assert all("its probes were disarmed" in text for text in found["disabled in the window"])
    assert found["enabled again"]["code"] == 0


@pytest.mark.boot
def test_nothing_is_left_behind(found: dict[str, Any]) -> None:
    assert found["left after refusals"] == ["", False]
    assert found["left at the end"] == ["", False]
    assert found["folder full, left"] == ["profiler.json"]
    assert found["folder read-only, left"] == "old"


@pytest.mark.boot
def test_the_module_names_no_path_of_the_build(tmp_path: Path) -> None:
    module = build("kernel/vstate-profiler") / "vstate_profiler.ko"
    data = module.read_bytes()
    assert b"/build/" not in data
    assert b"/recipe/" not in data
    image = build("kernel/image")
    kernel = sites.from_image(image / "Image", image / "System.map")
    assert load.modinfo(module)["kernel_build_id"] == kernel.build_id


@pytest.mark.boot
def test_the_module_comes_out_the_same_again(tmp_path: Path) -> None:
    room = REPO / "kernel" / "vstate_profiler"
    for name in ("build", "out"):
        (tmp_path / name).mkdir()
    run_inside(
        ["sh", "-eu", "/recipe/vstate_profiler/build.sh", "vstate-profiler"],
        what="build the module again",
        binds={
            **{f"/recipe/vstate_profiler/{file.name}": file for file in room.iterdir()},
            "/in/kernel/image": build("kernel/image"),
        },
        writable={"/build": tmp_path / "build", "/out": tmp_path / "out"},
    )
    again = (tmp_path / "out" / "vstate_profiler.ko").read_bytes()
    assert again == (build("kernel/vstate-profiler") / "vstate_profiler.ko").read_bytes()


def test_a_site_list_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sites.json"
    for text in ("", "[]", "{}", '{"schema_version": "2", "sites": []}', '{"schema_version": "1"}'):
        path.write_text(text)
        with pytest.raises(load.Refused, match=r"no site list of kernel/sites\.py") as caught:
            load.read_sites(path)
        assert caught.value.code == 4

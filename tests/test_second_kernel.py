"""A kernel that is not ours: Debian's stock riscv64 kernel of its testing suite, booted as it is.

Promise: nothing of it is compiled.  On it, in two guests: the site finder reads the running
kernel; observer, profiler (built against its headers) and truth count the same saves of a workload
whose split is known; the observer labels what the kernel does; scx_vstate says why it cannot load.
Limit: it moves: where the mirror no longer has the locked version, the tests are skipped, with the
reason.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from observer_windows import (
    FUNCTIONS,
    OUTCOMES,
    assert_sleeps,
    document,
    switched,
    workers,
)
from test_plain import assert_split
from toolchain_checkout import Mirror

import schemas
from board.virtual.boot import Boot, GuestKernel, boot
from board.virtual.machine import default_machine
from board.virtual.tools import Tools
from kernel import plain, sites
from toolchain.errors import EnvironmentUnfit
from toolchain.paths import REPO
from toolchain.recipe import build

pytestmark = pytest.mark.boot

# No parked harts: nothing is timed.  One hart is online, as in the observer's own tests.
MACHINE = default_machine({"memory_mib": 768, "parked_harts": 0, "harts": 2})
DEADLINE_S = 1800.0
MOVED_ON = "no longer carried by the mirror"


def stock(artifact: str) -> Path:
    """Build an artifact of the stock kernel; skip the test where the mirror has moved on."""
    try:
        return build(artifact)
    except EnvironmentUnfit as error:
        if MOVED_ON not in str(error):
            raise
        pytest.skip(str(error))


def run(script: str, directory: Path, payload: Mapping[str, Path], **options: Any) -> Boot:
    """Boot the stock kernel and run the script in /payload."""
    directory.mkdir()
    artifact = stock("kernel/stock-image")
    done = boot(
        MACHINE,
        seed=1,
        payload=payload,
        script=f"#!/bin/sh\ncd /payload\n{script}\nexit 0\n",
        directory=directory,
        deadline_s=DEADLINE_S,
        kernel=GuestKernel(artifact, artifact / "modules.cpio"),
        **options,
    )
    assert done.exit_code == 0, (directory / "console.log").read_text()[-2000:]
    return done


@pytest.fixture(scope="module")
def symbols(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the running kernel's own symbols (Debian's System.map is empty) and sites."""
    directory = tmp_path_factory.mktemp("stock") / "symbols"
    files = ["kernel/__init__.py", "kernel/sites.py", "kernel/btf.py"]
    files += ["toolchain/__init__.py", "toolchain/errors.py"]
    run(
        "cat /proc/kallsyms >/results/kallsyms\n"
        "python3 -m kernel.sites --running --out /results/sites.json || exit 1\n",
        directory,
        {name: REPO / name for name in files},
    )
    return directory


@pytest.fixture(scope="module")
def kernel(symbols: Path) -> sites.Kernel:
    return sites.from_image(stock("kernel/stock-image") / "Image", symbols / "kallsyms")


WINDOWS = f"""
busybox mkfifo /tmp/go /tmp/said
{plain.command("mixed")} || exit 1
busybox cat /proc/sys/net/core/bpf_jit_enable >/results/jit
echo 1 >/proc/sys/net/core/bpf_jit_enable
observe block workload block 2 20 0
contend compute workload compute 2 0 60
./workload programs >/results/programs-after
busybox grep -c vstate_profiler /proc/modules >/results/modules-after
"""

SCHEDULER = """
./scx_workload run vector:-1:0 &
target=$!
busybox sleep 0.1
scx() { # NAME
	./scx_vstate --policy vhot --pid $target --out /results/scx.json >/dev/null 2>/results/$1.err
	echo $? >/results/$1.code
	busybox cat /sys/kernel/sched_ext/state >/results/$1.after
	busybox ls -A /sys/fs/bpf >/results/$1.pinned
}
echo 0 >/proc/sys/net/core/bpf_jit_enable
scx no-jit
echo 1 >/proc/sys/net/core/bpf_jit_enable
scx refused
busybox kill -KILL $target
busybox dmesg >/results/dmesg
"""


@pytest.fixture(scope="module")
def seen(kernel: sites.Kernel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All windows and the scheduler in one guest."""
    directory = tmp_path_factory.mktemp("stock") / "windows"
    tools = Tools.of(
        plain.INSTRUMENTS,
        tmp_path_factory.mktemp("told"),
        spins=plain.spins(),
        kernel=kernel,
        module=stock("kernel/stock-profiler") / "vstate_profiler.ko",
    )
    run(
        f"{FUNCTIONS}{WINDOWS}{SCHEDULER}",
        directory,
        {
            **tools.payload,
            **plain.payload(),
            "scx_vstate": build("sched_ext/scx-vstate") / "scx_vstate",
            "scx_workload": build("sched_ext/scx-workload") / "workload",
        },
        extra=tools.qemu,
        binds=tools.binds,
    )
    return directory


def test_it_is_not_the_kernel_built_here(kernel: sites.Kernel) -> None:
    ours = build("kernel/image")
    assert kernel.release != sites.from_image(ours / "Image", ours / "System.map").release
    assert kernel.release.endswith("-riscv64")


def test_the_running_kernel_and_its_file_tell_the_same_sites(
    symbols: Path, kernel: sites.Kernel
) -> None:
    running = schemas.read(symbols / "sites.json", "sites")
    assert running == sites.document(kernel)
    switches = [s for s in running["sites"] if (s["kind"], s["role"]) == ("save", "context-switch")]
    assert switches


def test_three_instruments_count_the_same_saves(seen: Path) -> None:
    found = plain.read(seen)
    agreed = found["agreement"]
    assert agreed["agrees"], agreed["differences"]
    counted = agreed["saves"]
    assert counted["observer"] == counted["truth"] > 0
    assert counted["profiler"] + agreed["profiler_missed"] == counted["truth"]
    for row in found["observer"]["threads"]:
        if row["tid"] != found["observer"]["target"]["tgid"]:
            assert_split("mixed", row)


def test_the_observer_labels_what_this_kernel_does(seen: Path) -> None:
    found = document(seen, "compute")
    assert found["semantics"]["syscall_state"] in ("dirty", "initial")
    assert found["kernel"]["release"].endswith("-riscv64")
    assert all(program["attached"] for program in found["programs"])


def test_the_observer_counts_with_the_jit_and_without(seen: Path) -> None:
    assert (seen / "jit").read_text() == "0\n", "Debian's default"
    interpreted = schemas.read(seen / "observer.json", "observer")
    assert [program["jit"] for program in interpreted["programs"]] == [None] * 3
    said = (seen / "compute.said").read_text()
    for program in document(seen, "compute")["programs"]:
        assert f"JIT {program['jit']['start']}-{program['jit']['end']}\n" in said


def test_known_workloads_are_counted_as_on_our_kernel(seen: Path) -> None:
    state = document(seen, "block")["semantics"]["syscall_state"]
    for row in workers(seen, "block"):
        # Where the kernel leaves Initial instead, a thread that blocks saves nothing.
        if state == "dirty":
            assert_sleeps(row, 20 + 1)
        assert switched(row, ["compute_saves", "spin_saves"], "blocking") == 0
    for row in workers(seen, "compute"):
        assert row["runnable"]["compute_saves"] >= 3
        assert switched(row, ["off", "spin_saves"]) == 0
        assert switched(row, OUTCOMES, "blocking") == 1


def test_nothing_stays_loaded(seen: Path) -> None:
    assert (seen / "programs-after").read_text() == "0\n"
    assert (seen / "modules-after").read_text() == "0\n"


REFUSALS = {
    "no-jit": "the BPF JIT is off, which sched_ext needs; switch it on with sysctl",
    "refused": "sub-schedulers (CONFIG_EXT_SUB_SCHED), for which it wants private BPF stacks",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_scx_vstate_cannot_have_is_one_line(seen: Path, name: str) -> None:
    """Since sub-schedulers no scheduler with a dispatch operation loads on riscv64."""
    error = (seen / f"{name}.err").read_text()
    assert REFUSALS[name] in error
    assert error.count("\n") == 1
    assert (seen / f"{name}.code").read_text() == "3\n"
    assert (seen / f"{name}.after").read_text() == "disabled\n"
    assert (seen / f"{name}.pinned").read_text() == ""
    assert not (seen / "scx.json").exists()


def test_the_kernel_saw_nothing_odd(seen: Path) -> None:
    assert not re.findall(r"WARNING|BUG|INFO: task", (seen / "dmesg").read_text())


def test_where_the_mirror_has_moved_on_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror()  # a mirror that has none of it
    try:
        monkeypatch.setenv("BANANAOS_DEBIAN_MIRROR", mirror.address)
        monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
        with pytest.raises(pytest.skip.Exception, match=MOVED_ON):
            stock("kernel/stock-image")
        assert any("linux-b" in request.path for request in mirror.requests)
    finally:
        mirror.stop()

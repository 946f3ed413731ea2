"""The virtual board for real: boots, ways to fail, and the same bytes every time.

Each kernel fault has a boot of its own, since it ends the guest; the faults around llama-server
share one guest (tests/guest_faults.py runs there).  Nothing is simulated: panics are panics.
"""

import concurrent.futures
import dataclasses
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import users_of

from board.base import RunFailed
from board.virtual import boot as booting
from board.virtual.boot import Boot, boot
from board.virtual.machine import default_machine
from toolchain.command import Cancelled
from toolchain.recipe import build

pytestmark = pytest.mark.boot

# No parked harts: nothing is timed here, and each halted hart costs the host time (machine.toml).
SMALL = dataclasses.replace(
    default_machine({"memory_mib": 384, "parked_harts": 0}),
    append=default_machine().append + " rcupdate.rcu_cpu_stall_timeout=3",
)
DEADLINE_S = 240.0


def run_script(
    body: str, directory: Path, deadline_s: float = DEADLINE_S, **options: object
) -> Boot:
    payload = {"lkdtm.ko": build("kernel/image") / "lkdtm.ko"}
    return boot(
        SMALL,
        seed=1,
        payload=payload,
        script=f"#!/bin/sh\n{body}\n",
        directory=directory,
        deadline_s=deadline_s,
        **options,  # type: ignore[arg-type]
    )


def test_a_program_runs_and_its_results_come_back(tmp_path: Path) -> None:
    done = run_script("echo seen >/results/answer; exit 7", tmp_path)
    assert done.exit_code == 7
    assert (tmp_path / "answer").read_text() == "seen\n"
    assert done.host_cpu_s > 0
    assert not (tmp_path / "results.tar").exists()
    assert "bananaos: run ended with 7" in (tmp_path / "console.log").read_text()


def test_the_quantum_is_bounded_while_more_than_one_hart_is_up(tmp_path: Path) -> None:
    done = run_script("harts begin && harts end && harts begin", tmp_path)
    assert done.exit_code == 0
    log = (tmp_path / "qemu.log").read_text()
    assert re.findall(r"^quantum: timer (\w+)$", log, re.MULTILINE) == ["off", "on", "off", "on"]


PROVOKE = "insmod /payload/lkdtm.ko || exit 9; echo {} >/sys/kernel/debug/provoke-crash/DIRECT"
FAULTS = {
    "guest-panic": "echo c >/proc/sysrq-trigger",
    "guest-oops": PROVOKE.format("EXCEPTION"),
    # With one hart nobody would be left to notice.
    "guest-rcu-stall": f"harts begin; {PROVOKE.format('SOFTLOCKUP')}",
    "guest-oom": "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'",
    "no-results": "busybox poweroff -f",
}


@pytest.mark.parametrize("reason", FAULTS)
def test_kernel_faults_are_told_apart(reason: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run_script(FAULTS[reason], tmp_path)
    assert caught.value.reason == reason
    last = (tmp_path / "console.log").read_text(errors="replace").splitlines()[-1]
    assert last in caught.value.detail, "the message shows the console's last lines"


def test_a_bug_is_an_oops_even_when_the_guest_would_go_on(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run_script(PROVOKE.format("BUG") + "; echo fine >/results/answer", tmp_path)
    assert caught.value.reason == "guest-oops"


def test_an_endless_guest_meets_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run_script("while :; do :; done", tmp_path, deadline_s=20)
    assert caught.value.reason == "guest-timeout"
    assert "20" in caught.value.detail
    assert not qemus_of(tmp_path)


def test_a_killed_qemu_is_told_apart(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_script, "while :; do :; done", tmp_path)
        [qemu] = wait_for_qemu(tmp_path)
        os.kill(qemu, signal.SIGKILL)
        with pytest.raises(RunFailed) as caught:
            running.result()
    assert caught.value.reason == "qemu-killed"


def test_a_cancelled_boot_leaves_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_script, "while :; do :; done", tmp_path, cancel=cancel)
        wait_for_qemu(tmp_path)
        cancel.set()
        with pytest.raises(Cancelled):
            running.result()
    assert not qemus_of(tmp_path)


def test_a_damaged_results_archive_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is cut behind the guest's back, as a full disk would cut it."""
    unpack = booting._unpack

    def cut(directory: Path) -> int:
        archive = directory / "results.tar"
        os.truncate(archive, archive.stat().st_size // 2)
        return unpack(directory)

    monkeypatch.setattr(booting, "_unpack", cut)
    with pytest.raises(RunFailed) as caught:
        run_script("busybox dd if=/dev/zero of=/results/big bs=1024 count=64 2>&1", tmp_path)
    assert caught.value.reason == "no-results"


def qemus_of(directory: Path) -> list[int]:
    return users_of(directory / "console.log")


def wait_for_qemu(directory: Path) -> list[int]:
    for _ in range(600):
        if found := qemus_of(directory):
            return found
        time.sleep(0.1)
    raise AssertionError("QEMU did not start within a minute")

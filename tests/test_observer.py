"""The observer counts what must happen, refuses what it cannot observe, and leaves nothing loaded.

Promise: on the real kernel of the virtual board, in one guest: workloads whose split of saves is
known beforehand (kernel/vstate_observer/workload.c), compared thread by thread with the kernel's
own counts of switches; then every fault that the observer names, provoked for real.
Limit: that a counted save is a save is not shown here; the truth plugin counts the stores.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from observer_windows import (
    FUNCTIONS,
    OUTCOMES,
    ROUNDS,
    SAVES,
    assert_sleeps,
    document,
    spin_options,
    switched,
    workers,
)

from board.virtual.boot import boot
from board.virtual.machine import default_machine
from board.virtual.tools import Tools
from toolchain.recipe import build

MACHINE = default_machine({"memory_mib": 512})
DEADLINE_S = 1800.0
CHURN_THREADS = 20_000
SMALL_MAP = 100
SMALL_PID_MAX = 400
HOPS = 50

WINDOWS = f"""
contend scalar workload scalar 2 0 40
contend compute workload compute 2 0 60
observe block workload block 2 20 0
contend spin workload spin 2 {ROUNDS} 20 $spin
contend no-range workload spin 2 {ROUNDS} 20
contend mixed workload-pie mixed 2 {ROUNDS} 20 $spin_pie
contend copy workload copy 2 0 400
begin target-exit workload exit 1 0 30; go; end

# Opened by a signal: what the first thread does before that is not counted.
./workload block /tmp/go 2 3 0 & target=$!
./workload asleep $target 3
./vstate_observer --pid $target --out /results/held.json --hold >/tmp/said 2>/results/held.err &
observer=$!
name=held
exec 3</tmp/said
while read -r line <&3 && [ "$line" != loaded ]; do :; done
busybox head -c 1 /dev/zero >/tmp/go
./workload asleep $target 3
busybox kill -USR1 $observer
read -r line <&3
echo "$line" >/results/held.said
exec 3<&-
busybox kill -USR1 $observer
busybox head -c 1 /dev/zero >/tmp/go
./workload asleep $target 3
busybox kill -INT $observer
end

observe churn-lost workload churn 1 500 0 --max-threads {SMALL_MAP}
echo {SMALL_PID_MAX} >/proc/sys/kernel/pid_max
observe churn-reused workload churn 1 500 0 --max-threads 1000
echo 32768 >/proc/sys/kernel/pid_max

begin hop workload hop 2 {HOPS} 0; harts begin; go; close; harts end
begin wide workload compute 12 0 4; harts begin; go; close; harts end
"""

BUSY_WINDOWS = """
begin killed workload block 1 1 0
./workload programs >/results/programs-open
busybox kill -KILL $observer
end
busybox mount -t tmpfs -o size=16k tmpfs /tmp/small
begin fills-up workload block 1 1 0 --out /tmp/small/out.json
fault second ./vstate_observer --pid $target --out /results/second.json
name=fills-up
busybox dd if=/dev/zero of=/tmp/small/fill bs=4k 2>/dev/null
busybox kill -TERM $observer; end
busybox ls -A /tmp/small >/results/fills-up.left
"""

# Name of the kernel's BTF file in the payload -> bytes that are renamed in it.
HIDDEN = {
    "no-sched_switch": b"btf_trace_sched_switch",
    "no-migrate": b"btf_trace_sched_migrate_task",
    "no-new": b"btf_trace_sched_wakeup_new",
    "no-flags": b"riscv_v_flags",
}
MISSING = "observer-program-missing"

# name: (shell command in the guest, exit code, what standard error says)
FAULTS: Mapping[str, tuple[str, int, str]] = {
    "no-pid": ("observer", 2, "--pid is missing; see --help"),
    "no-out": ("./vstate_observer --pid 1", 2, "--out is missing; see --help"),
    "pid-no-number": ("observer --pid 1x", 2, "--pid: got '1x', expected an integer of 1..4194304"),
    "pid-zero": ("observer --pid 0", 2, "--pid: got '0', expected an integer"),
    "word": ("observer --pid 1 word", 2, "'word': expected options only"),
    "option": ("observer --verbose", 2, "unrecognized option '--verbose'"),
    "duration": ("observer --pid 1 --duration-ms 0", 2, "--duration-ms: got '0', expected"),
    "spin-order": ("observer --pid 1 --spin 20-10", 2, "--spin: got '20-10', expected START-END"),
    "spin-half": ("observer --pid 1 --spin 20-", 2, "--spin: got '20-', expected START-END"),
    "spin-word": ("observer --pid 1 --spin 20-3g", 2, "--spin: got '20-3g', expected START-END"),
    "spin-many": (
        "observer --pid 1 " + "--spin 1-2 " * 17,
        2,
        "--spin 1-2: more than 16 ranges",
    ),
    "spin-elsewhere": (
        "observer --pid $target --spin 10-20",
        2,
        r"--spin 0x10-0x20: no code of process \d+ \(workload\); expected addresses of its",
    ),
    "few-threads": (
        "observer --pid $target --max-threads 1",
        2,
        r"--max-threads 1: process \d+ has 2 threads already",
    ),
    "thread": (
        "observer --pid $(busybox ls /proc/$target/task | busybox tail -n 1)",
        2,
        r"--pid \d+: a thread of process (\d+); give --pid \1",
    ),
    "nobody": ("observer --pid 4000000", 3, "--pid 4000000: there is no such process"),
    "zombie": ("observer --pid $zombie", 3, r"--pid \d+: this process has ended"),
    "kernel-thread": ("observer --pid 2", 3, "/proc/2/exe: No such file or directory; a kernel"),
    "no-bpf": (
        "./workload without 39,21 ./vstate_observer --pid $target --out /tmp/out.json",
        3,
        "lacks CAP_BPF; run as root",
    ),
    "no-perfmon": (
        "./workload without 38,21 ./vstate_observer --pid $target --out /tmp/out.json",
        3,
        "lacks CAP_PERFMON; run as root",
    ),
    "no-capability": (
        "./workload without 38,39,21 ./vstate_observer --pid $target --out /tmp/out.json",
        3,
        "lacks CAP_BPF and CAP_PERFMON; run as root",
    ),
    "no-folder": (
        "./vstate_observer --pid $target --out /tmp/none/out.json",
        3,
        "/tmp/none/out.json: cannot write: No such file or directory",
    ),
    "read-only": (
        "./vstate_observer --pid $target --out /tmp/fixed/out.json",
        3,
        "/tmp/fixed/out.json: cannot write: Read-only file system; free some space or name another",
    ),
    "full": (
        "./vstate_observer --pid $target --out /tmp/full/out.json",
        3,
        "/tmp/full/out.json: cannot write: No space left on device",
    ),
    "silent": (
        "full_output",
        3,
        "cannot write to standard output: No space left on device",
    ),
    "interrupted": (
        "./workload interrupted ./vstate_observer --pid $target --out /tmp/out.json",
        130,
        "interrupted before the window was open; nothing written",
    ),
    "no-btf": (
        "under btf-none observer --pid $target",
        3,
        "/sys/kernel/btf/vmlinux: No such file or directory; needs a kernel with "
        "CONFIG_DEBUG_INFO_BTF",
    ),
    "no-switch": (
        "under no-sched_switch observer --pid $target",
        3,
        "on_switch on sched_switch: this kernel has no tracepoint of that name; nothing can be",
    ),
    "no-flags": (
        "under no-flags observer --pid $target",
        3,
        "this kernel's thread_struct has no riscv_v_flags; needs Linux 6.8 or later",
    ),
    "v-not-allowed": (
        "without_v observer --pid $target",
        3,
        "no V extension for programs here: .* sysctl abi.riscv_v_default_allow=0",
    ),
    "no-migrate": (
        "under no-migrate ./vstate_observer --pid $target --out /results/no-migrate.json "
        "--duration-ms 5",
        4,
        "^$",
    ),
    "no-new": (
        "under no-new ./vstate_observer --pid $target --out /results/no-new.json --duration-ms 5",
        4,
        "^$",
    ),
}

SURROUNDINGS = """
full_output() { ./vstate_observer --pid $target --out /tmp/out.json >/dev/full; }
under() { # BTF COMMAND...: with another BTF of the kernel, or with none
	if [ "$1" = btf-none ]; then
		busybox mount -t tmpfs tmpfs /sys/kernel/btf; at=/sys/kernel/btf
	else
		at=/sys/kernel/btf/vmlinux
		busybox mount -o bind /payload/$1 $at
	fi
	shift
	"$@"
	code=$?
	busybox umount $at
	return $code
}
without_v() {
	echo 0 >/proc/sys/abi/riscv_v_default_allow
	"$@"
	code=$?
	echo 1 >/proc/sys/abi/riscv_v_default_allow
	return $code
}
busybox mkdir /tmp/small /tmp/fixed /tmp/full
busybox mount -t tmpfs -o ro tmpfs /tmp/fixed
busybox mount -t tmpfs -o size=4k tmpfs /tmp/full
echo >/tmp/full/one
./workload block /tmp/go 1 1 0 & target=$!
./workload asleep $target 2
./workload zombie >/tmp/zombie &
while ! [ -s /tmp/zombie ]; do busybox sleep 0.01; done
zombie=$(busybox cat /tmp/zombie)
"""


def renamed(image: Path, name: bytes, directory: Path) -> Path:
    """Return a BTF file that lacks `name`, all else in its place."""
    content = image.read_bytes()
    assert content.count(b"\0" + name + b"\0") == 1
    path = directory / name.decode()
    path.write_bytes(content.replace(b"\0" + name + b"\0", b"\0" + b"X" * len(name) + b"\0"))
    return path


def run(script: str, directory: Path) -> None:
    """Boot once with the observer, the workloads and incomplete BTF files; run the script."""
    workload = build("kernel/observer-workload")
    btf = build("kernel/image") / "vmlinux.btf"
    done = boot(
        MACHINE,
        seed=1,
        payload={
            "vstate_observer": build("kernel/vstate-observer") / "vstate_observer",
            "workload": workload / "workload",
            "workload-pie": workload / "workload-pie",
            **{name: renamed(btf, text, directory) for name, text in HIDDEN.items()},
        },
        script=f"#!/bin/sh\ncd /payload\nbusybox mkfifo /tmp/go /tmp/said\n{script}\nexit 0\n",
        directory=directory,
        deadline_s=DEADLINE_S,
    )
    assert done.exit_code == 0, (directory / "console.log").read_text()[-2000:]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all windows and faults in one guest; return the folder with what they left."""
    directory = tmp_path_factory.mktemp("observer")
    workload = build("kernel/observer-workload")
    faults = "\n".join(f"fault {name} {command}" for name, (command, _, _) in FAULTS.items())
    script = f"""
spin='{spin_options(workload / "workload")}'
spin_pie='{spin_options(workload / "workload-pie")}'
{FUNCTIONS}{WINDOWS}{SURROUNDINGS}{faults}
{BUSY_WINDOWS}
busybox sleep 0.2
./workload programs >/results/programs-after
./vstate_observer --help >/results/help
"""
    run(script, directory)
    return directory


pytestmark = pytest.mark.boot


def test_a_thread_that_never_used_v_is_off(seen: Path) -> None:
    for row in workers(seen, "scalar"):
        assert row["runnable"]["off"] >= 3
        assert switched(row, OUTCOMES) == switched(row, ["off"])
        assert row["blocking"]["off"] == 1
        assert row["pending_restores"] == 0
    assert document(seen, "scalar")["totals"]["user_saves"] == 0


def test_computing_is_saved_in_the_middle_of_work(seen: Path) -> None:
    for row in workers(seen, "compute"):
        assert row["runnable"]["compute_saves"] >= 3
        assert switched(row, ["off", "clean", "spin_saves"]) == 0
        assert_sleeps(row, 1)  # for ever, at the end


def test_blocking_saves_only_what_the_kernel_had_discarded(seen: Path) -> None:
    for row in workers(seen, "block"):
        assert_sleeps(row, 20 + 1)
        assert switched(row, ["compute_saves", "spin_saves"], "blocking") == 0
        assert row["runnable"]["spin_saves"] == 0


def test_spinning_is_saved_once_for_each_use_of_v(seen: Path) -> None:
    for row in workers(seen, "spin"):
        assert row["runnable"]["spin_saves"] == ROUNDS
        assert row["runnable"]["compute_saves"] == 0
        # From the second preemption on the registers are as they were loaded.
        assert switched(row, ["clean", "initial"], "runnable") >= ROUNDS
        assert_sleeps(row, 1)


def test_without_its_range_a_spin_loop_passes_for_computing(seen: Path) -> None:
    for row in workers(seen, "no-range"):
        assert row["runnable"]["compute_saves"] == ROUNDS
        assert row["runnable"]["spin_saves"] == 0


def test_a_mixed_load_is_split_wherever_the_program_was_loaded(seen: Path) -> None:
    for row in workers(seen, "mixed"):
        assert row["runnable"]["spin_saves"] == ROUNDS
        assert row["runnable"]["compute_saves"] >= ROUNDS
        assert_sleeps(row, ROUNDS + 1)
    target = document(seen, "mixed")["target"]
    assert target["position_independent"]
    assert int(target["load_bias"], 16) > 0
    assert not document(seen, "spin")["target"]["position_independent"]


def test_interrupted_kernel_mode_vector_code_is_told_apart(seen: Path) -> None:
    # A hundred preemptions, a tenth of the time in such code: some must hit it.
    rows = workers(seen, "copy")
    assert sum(row["runnable"]["kernel_saves"] for row in rows) > 0
    assert sum(switched(row, ["compute_saves", "spin_saves"]) for row in rows) == 0


def test_the_end_of_the_target_is_named(seen: Path) -> None:
    found = document(seen, "target-exit", code=4)
    assert found["window"]["stopped_by"] == "target-exit"
    assert found["invalid_reasons"] == ["observer-target-exited"]
    # The window closes when the process is gone, maybe before its last thread is switched out.
    gone = [row["name"] for row in found["threads"] if row["exited"]]
    assert gone in (["workload"], ["workload", "workload"])


def test_a_held_window_is_opened_by_a_signal(seen: Path) -> None:
    found = document(seen, "held")
    assert (seen / "held.said").read_text() == "ready\n"
    assert found["window"]["stopped_by"] == "signal"
    blocked = sorted(switched(row, OUTCOMES, "blocking") for row in found["threads"])
    assert blocked == [0, 0, 3 + 1], "one thread worked in the window"


def test_a_deadline_ends_the_window(seen: Path) -> None:
    window = document(seen, "no-new", code=4)["window"]
    assert window["stopped_by"] == "deadline"
    assert window["stop_ns"] - window["start_ns"] >= 5_000_000


@pytest.mark.long
def test_twenty_thousand_short_threads_have_a_row_each(tmp_path: Path) -> None:
    window = f"observe churn workload churn 1 {CHURN_THREADS} 0 --max-threads 30000\n"
    run(f"{FUNCTIONS}{window}", tmp_path)
    found = document(tmp_path, "churn")
    assert found["threads_made"] == CHURN_THREADS
    assert found["lost_threads"] == 0
    assert switched(found["without_row"], OUTCOMES) == 0
    assert len(found["threads"]) == CHURN_THREADS + 2
    assert sum(row["exited"] for row in found["threads"]) == CHURN_THREADS


def test_threads_without_room_are_counted_and_named(seen: Path) -> None:
    found = document(seen, "churn-lost", code=4)
    assert found["threads_made"] == 500
    assert found["max_threads"] == len(found["threads"]) == SMALL_MAP
    # Two threads were there before: the main one and the one that makes the others.
    assert found["lost_threads"] == 500 - (SMALL_MAP - 2)
    assert switched(found["without_row"], OUTCOMES, "blocking") >= found["lost_threads"]
    assert found["invalid_reasons"] == ["observer-lost-threads"]


def test_a_thread_id_that_is_used_again_is_one_row_of_several_threads(seen: Path) -> None:
    found = document(seen, "churn-reused")
    assert found["threads_made"] == 500
    assert len(found["threads"]) < SMALL_PID_MAX
    assert sum(row["threads"] for row in found["threads"]) == 500 + 2
    assert sum(row["exited"] for row in found["threads"]) == 500


def test_each_migration_is_counted(seen: Path) -> None:
    for row in workers(seen, "hop"):
        assert row["migrations"] == HOPS
        assert switched(row, SAVES) == switched(row, ["discarded_saves"]) > 0
    window = document(seen, "hop")["window"]
    assert (window["harts_online_start"], window["harts_online_stop"]) == ("0", "0-7")


def test_eight_harts_lose_nothing(seen: Path) -> None:
    rows = workers(seen, "wide", nr=12)
    assert sum(row["runnable"]["compute_saves"] for row in rows) > 0


def test_the_self_test_labels_the_data(seen: Path) -> None:
    found = document(seen, "compute")
    semantics = found["semantics"]
    assert found["kernel"]["release"].startswith("6.12.")
    assert semantics["syscall_state"] == "dirty", "released kernels mark Dirty at system call entry"
    assert semantics["blocked"]["blocking"]["discarded_saves"] >= 4
    assert semantics["preempted"]["runnable"]["compute_saves"] > 0
    assert found["vlen_bits"] == MACHINE.vlen_bits


def test_the_programs_say_where_they_are(seen: Path) -> None:
    found = document(seen, "compute")
    said = (seen / "compute.said").read_text().splitlines()
    assert said[-1] == "ready"
    for program, line in zip(found["programs"], said, strict=False):
        assert program["attached"] and program["reason"] is None
        jit = program["jit"]
        assert 0 < int(jit["end"], 16) - int(jit["start"], 16) < 4096
        assert line == (
            f"{program['name']} on {program['event']}: {program['instructions']} instructions, "
            f"JIT {jit['start']}-{jit['end']}"
        )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_and_its_exit_code(seen: Path, name: str) -> None:
    _, code, message = FAULTS[name]
    assert (seen / f"{name}.code").read_text() == f"{code}\n"
    error = (seen / f"{name}.err").read_text()
    if message == "^$":
        assert error == ""
        return
    # The shell of the full output's test says nothing of its own.
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert not (seen / f"{name}.out").read_text().endswith("ready\n") or name == "silent"


def test_a_missing_program_is_left_out_by_name(seen: Path) -> None:
    without_migrate = document(seen, "no-migrate", code=4)
    assert without_migrate["totals"]["migrations"] is None
    assert without_migrate["threads"][0]["migrations"] is None
    without_new = document(seen, "no-new", code=4)
    assert without_new["lost_threads"] is None
    assert without_new["threads_made"] is None
    for found, name in ((without_migrate, "on_migrate"), (without_new, "on_new")):
        assert found["invalid_reasons"] == [MISSING]
        [program] = [p for p in found["programs"] if not p["attached"]]
        assert program["name"] == name
        assert program["reason"] == "this kernel has no tracepoint of that name"
    assert "on_migrate on sched_migrate_task: left out" in (seen / "no-migrate.out").read_text()


def test_a_second_observer_is_refused_and_the_first_goes_on(seen: Path) -> None:
    assert (seen / "second.code").read_text() == "3\n"
    error = (seen / "second.err").read_text()
    assert re.search(r"another vstate_observer is running, process \d+; stop it first", error)
    # It was alive to find its folder full: see fills-up.
    assert (seen / "fills-up.said").read_text().endswith("ready\n")


def test_a_folder_that_fills_up_keeps_nothing_of_ours(seen: Path) -> None:
    assert (seen / "fills-up.code").read_text() == "3\n"
    assert "out.json: cannot write: No space left on device" in (seen / "fills-up.err").read_text()
    assert (seen / "fills-up.left").read_text() == "fill\n"


def test_nothing_stays_loaded(seen: Path) -> None:
    assert (seen / "killed.code").read_text() == "137\n"
    assert int((seen / "programs-open").read_text()) == 3
    assert int((seen / "programs-after").read_text()) == 0
    assert not list(seen.glob("*.tmp"))


def test_help_documents_the_exit_codes(seen: Path) -> None:
    text = (seen / "help").read_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert re.search(r"Exit codes: 0 .* 2 .* 3 .* 4 .* 130 ", text, re.DOTALL)


def test_a_machine_without_v_is_refused(tmp_path: Path) -> None:
    cpu = MACHINE.cpu.replace("v=true", "v=false").replace("zvfh=true", "zvfh=false")
    commands = {
        "observer": "./vstate_observer --pid 1 --out /results/out.json",
        "probe": "./rvv_probe --out /results/out.json",
        "profiler": "python3 load.py load --module vstate_profiler.ko --sites sites.json",
    }
    lines = [
        f"{command} 2>/results/{name}.err\necho $? >/results/{name}.code"
        for name, command in commands.items()
    ]
    lines.append("grep -c vstate_profiler /proc/modules >/results/modules")
    boot(
        dataclasses.replace(MACHINE, cpu=cpu, parked_harts=0),
        seed=1,
        payload={
            **Tools.of(["observer", "profiler"], tmp_path).payload,
            "rvv_probe": build("kernel/rvv-probe") / "rvv_probe",
        },
        script="\n".join(["#!/bin/sh", "cd /payload", *lines, "exit 0", ""]),
        directory=tmp_path,
        deadline_s=DEADLINE_S,
    )
    says = dict.fromkeys(("observer", "probe"), "no V extension for programs here")
    says["profiler"] = "insmod refused vstate_profiler.ko: this machine has no vector unit"
    for name, words in says.items():
        assert (tmp_path / f"{name}.code").read_text() == "3\n"
        assert words in (tmp_path / f"{name}.err").read_text()
        assert (tmp_path / f"{name}.err").read_text().count("\n") == 1
    assert (tmp_path / "modules").read_text() == "0\n"
    assert not (tmp_path / "out.json").exists()

"""What the board says of itself: /proc and /sys, read and put into JSON values.

Promise: reads only; a file that is not there is None, never a guess.
Limit: RISC-V and x86-64 Linux names.
"""

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from board.agent.perf import availability

REQUIRED_EXTENSIONS = {
    "riscv64": ("v", "zfh", "zvfh", "zba", "zbb", "zbs"),
    "x86_64": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
}
"""What llama-server was compiled for (llama.cpp/*.cmake), as /proc/cpuinfo calls it; without one it
dies of SIGILL.  The x86-64 ones are those of x86-64-v3."""

_SCHED_EXT = Path("/sys/kernel/sched_ext")
BASE_SLICE = Path("/sys/kernel/debug/sched/base_slice_ns")
"""The fair scheduler's, in ns; the kernel computes it anew when a hart comes or goes."""


def text(path: Path | str) -> str | None:
    """Return a small file's text without surrounding white space, or None."""
    try:
        return Path(path).read_text(errors="replace").strip("\0 \n")
    except OSError:
        return None


def isa() -> str | None:
    """Return the ISA string of the first hart, such as rv64imafdcv_zicntr_zfh; x86: its flags."""
    line = r"^(?:isa|flags)\s*:\s*(\S.*)$"
    match = re.search(line, text("/proc/cpuinfo") or "", re.MULTILINE)
    return match.group(1) if match else None


def missing_extensions(isa_string: str | None, machine: str = platform.machine()) -> list[str]:
    """Return which of the machine's REQUIRED_EXTENSIONS its ISA string lacks."""
    required = REQUIRED_EXTENSIONS.get(machine, ())
    if isa_string is None:
        return list(required)
    # Single letters follow rv64, longer names stand between underscores; flags between spaces.
    base, *multi = re.split(r"[_ ]", isa_string.removeprefix("rv64"))
    have = {*base, *multi} if machine == "riscv64" else {base, *multi}
    return [name for name in required if name not in have]


def describe() -> dict[str, Any]:
    """Return kernel, harts, memory and interpreter of this board."""
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", text("/proc/meminfo") or "", re.MULTILINE)
    return {
        "kernel_release": platform.release(),
        "kernel_version": platform.version(),
        "kernel_command_line": text("/proc/cmdline"),
        "architecture": platform.machine(),
        "isa": isa(),
        "harts": os.cpu_count(),
        "memory_kib": int(memory.group(1)) if memory else None,
        "governor": text("/sys/devices/system/cpu/cpufreq/policy0/scaling_governor"),
        "python": platform.python_version(),
        "boot_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
        "perf": availability(),
    }


def scheduler_state() -> dict[str, Any]:
    """Return the user-visible truth about sched_ext and the fair scheduler's base slice.

    Of sched_ext: state, loaded scheduler, how often one was enabled, whether for all threads.
    """
    return {
        "state": text(_SCHED_EXT / "state"),
        "ops": text(_SCHED_EXT / "root/ops"),
        "enable_seq": _number(_SCHED_EXT / "enable_seq"),
        "switch_all": _number(_SCHED_EXT / "switch_all"),
        "base_slice_ns": base_slice_ns(),
    }


def base_slice_ns() -> int | None:
    """Return the fair scheduler's base slice now."""
    return _number(BASE_SLICE)


def _number(path: Path) -> int | None:
    found = text(path)
    return int(found) if found else None


def threads(pid: int) -> list[dict[str, Any]]:
    """Return a row per thread of a process: name, policy, class, harts, CPU time, switches.

    Times in ns from schedstat; counts since the thread was made.  harts: those that it may use.
    in_sched_ext: whether that class runs it now, None where the kernel does not show it.
    """
    rows = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        status = dict(
            line.split(":\t", 1)
            for line in (text(task / "status") or "").splitlines()
            if ":\t" in line
        )
        run_ns, wait_ns, _ = (int(word) for word in (text(task / "schedstat") or "0 0 0").split())
        rows.append(
            {
                "tid": int(task.name),
                "name": status.get("Name"),
                "policy": os.sched_getscheduler(int(task.name)),
                "in_sched_ext": _in_sched_ext(task),
                "harts": status.get("Cpus_allowed_list"),
                "run_ns": run_ns,
                "wait_ns": wait_ns,
                "voluntary_switches": int(status.get("voluntary_ctxt_switches", 0)),
                "involuntary_switches": int(status.get("nonvoluntary_ctxt_switches", 0)),
            }
        )
    return rows


def _in_sched_ext(task: Path) -> bool | None:
    """Whether sched_ext runs a thread: its policy does not tell, the kernel's own table does."""
    found = re.search(r"^ext\.enabled\s*:\s*(\d)$", text(task / "sched") or "", re.MULTILINE)
    return None if found is None else found.group(1) == "1"


def kernel_log() -> list[tuple[int, int, str]]:
    """Return the kernel's log as (level, microseconds since boot, message), oldest first."""
    entries: list[tuple[int, int, str]] = []
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(handle, "rb", buffering=0):
        while True:
            try:
                record = os.read(handle, 8192).decode(errors="replace")
            except BlockingIOError:
                return entries
            except BrokenPipeError:
                continue  # overwritten while we read: the next read goes on after the gap
            head, _, message = record.partition(";")
            priority, _, micros, *_ = head.split(",")
            entries.append((int(priority) & 7, int(micros), message.split("\n", 1)[0]))

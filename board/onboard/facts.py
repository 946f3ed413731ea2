"""What the board is and how it is set up: everything `./inv doctor` judges, in one look.

Promise: reads only; a fact that cannot be had is None, never a guess; nothing here judges.
Limit: some facts need root (kernel log, kprobes, the running kernel's code); without it they are
None.
"""

import base64
import contextlib
import ctypes
import glob
import gzip
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from board.agent import system
from board.agent.system import text
from board.onboard import store
from board.onboard.hello import hottest_c
from board.onboard.refused import Refused

OPTIONS = (
    "SCHED_CLASS_EXT", "DEBUG_INFO_BTF", "BPF_SYSCALL", "BPF_JIT", "KPROBES", "MODULES",
    "MODULE_SIG_FORCE", "DEBUG_FS", "CGROUPS", "PERF_EVENTS", "RISCV_ISA_V", "PROC_KCORE",
    "KALLSYMS_ALL", "PREEMPT", "RISCV_ISA_V_PREEMPTIVE", "BPF_EVENTS",
)  # fmt: skip
PROCESSES = ("llama-server", "scx_vstate", "vstate_observer")
MODULES = ("vstate_profiler",)
_NOTE = b"\x04\x00\x00\x00\x14\x00\x00\x00\x03\x00\x00\x00GNU\x00"
_STA_UNSYNC = 0x0040  # linux/timex.h


def facts(
    directory: str, governors: str, temperatures: str, rvv_probe: str | None
) -> dict[str, Any]:
    """All of it; see the functions below for each part.  rvv_probe: the program, in base64."""
    described = system.describe()
    memory = _memory()
    return {
        **{key: described[key] for key in (
            "kernel_release", "kernel_version", "kernel_command_line", "architecture", "isa",
            "harts", "python",
        )},
        "root": os.getuid() == 0,
        "soc": (text("/proc/device-tree/compatible") or "").split("\0"),
        "build_id": _build_id(),
        "vlen": _vlen(rvv_probe),
        "missing_extensions": system.missing_extensions(described["isa"]),
        "config": _config(),
        "sched_ext": system.scheduler_state() if Path("/sys/kernel/sched_ext").is_dir() else None,
        "btf": Path("/sys/kernel/btf/vmlinux").exists(),
        "kprobes_enabled": text("/sys/kernel/debug/kprobes/enabled"),
        "bpf_jit": text("/proc/sys/net/core/bpf_jit_enable"),
        "mounts": _mounts(),
        "file_systems": sorted(
            line.split()[-1] for line in (text("/proc/filesystems") or "").splitlines()
        ),
        "perf_event_paranoid": text("/proc/sys/kernel/perf_event_paranoid"),
        "perf_user_access": text("/proc/sys/kernel/perf_user_access"),
        "kptr_restrict": text("/proc/sys/kernel/kptr_restrict"),
        "kcore": os.access("/proc/kcore", os.R_OK) if Path("/proc/kcore").exists() else None,
        "module_signatures": text("/sys/module/module/parameters/sig_enforce"),
        "frequencies": _frequencies(governors),
        "temperature_c": hottest_c(temperatures),
        "throttled": _throttled(),
        "memory_available_mib": memory.get("MemAvailable"),
        "swap_used_mib": memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        "disk_free_mib": _disk_free_mib(directory),
        "directory_writable": _writable(directory),
        "clock_synchronised": _synchronised(),
        "load_1min": os.getloadavg()[0],
        "rt_runtime_us": text("/proc/sys/kernel/sched_rt_runtime_us"),
        "leftover_processes": _leftover_processes(),
        "leftover_modules": [name for name in MODULES if Path("/sys/module", name).exists()],
        "aiohttp": _version("aiohttp"),
        "programs": {name: shutil.which(name, path=_PATH) for name in ("insmod", "rmmod", "mount")},
        "kernel_errors": _kernel_errors(),
        "uptime_s": round(time.clock_gettime(time.CLOCK_BOOTTIME)),
    }  # fmt: skip


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def sites() -> dict[str, Any]:
    """The running kernel's save sites (sites.schema.json); as root."""
    from kernel import sites as finder
    from toolchain.errors import ArtifactError

    try:
        return finder.document(finder.from_running())
    except ArtifactError as error:
        raise Refused(str(error), error.exit_code) from error


def btf(directory: str) -> dict[str, Any]:
    """Put a copy of the kernel's BTF where it can be fetched; its name and size."""
    root = store.opened(directory)
    data = Path("/sys/kernel/btf/vmlinux").read_bytes()
    (root / "vmlinux.btf").write_bytes(data)
    return {"name": "vmlinux.btf", "size_bytes": len(data)}


def _build_id() -> str | None:
    with contextlib.suppress(OSError):
        notes = Path("/sys/kernel/notes").read_bytes()
        at = notes.find(_NOTE)
        if at >= 0:
            return notes[at + 16 : at + 36].hex()
    return None


def _vlen(program: str | None) -> dict[str, Any]:
    """VLEN as rvv_probe reads it from the hardware; the program is run from memory."""
    if program is None:
        return {"bits": None, "why": "rvv_probe was not given"}
    handle = os.memfd_create("rvv_probe")
    with os.fdopen(handle, "wb") as file, tempfile.TemporaryDirectory() as scratch:
        file.write(base64.b64decode(program))
        file.flush()
        out = Path(scratch, "probe.json")
        argv = [f"/proc/self/fd/{handle}", "--out", os.fspath(out), "--passes", "1"]
        argv += ["--repeats", "1", "--cold-mib", "1"]
        # A program that is open for writing cannot be run.
        reading = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
        file.close()
        argv[0] = f"/proc/self/fd/{reading}"
        try:
            done = subprocess.run(
                argv, pass_fds=(reading,), capture_output=True, text=True, check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"bits": None, "why": f"rvv_probe: {error}"}
        finally:
            os.close(reading)
        if done.returncode:
            said = done.stderr.strip() or f"ended with {done.returncode}"
            return {"bits": None, "why": f"rvv_probe: {said}"}
        return {"bits": json.loads(out.read_text())["vlenb_bytes"] * 8, "why": None}


def _config() -> dict[str, str] | None:
    """The kernel's configuration, as far as it matters here; None where it is not shown."""
    content = None
    with contextlib.suppress(OSError):
        content = gzip.decompress(Path("/proc/config.gz").read_bytes()).decode()
    if content is None:
        content = text(f"/boot/config-{platform.release()}")
    if content is None:
        return None
    found = dict(re.findall(r"^CONFIG_(\w+)=(.*)$", content, re.MULTILINE))
    return {name: found.get(name, "n") for name in OPTIONS}


def _mounts() -> dict[str, str]:
    """Mount point -> type of the special file systems."""
    kinds = ("debugfs", "tracefs", "bpf", "cgroup2")
    rows = [line.split() for line in (text("/proc/self/mounts") or "").splitlines()]
    return {row[1]: row[2] for row in rows if len(row) > 2 and row[2] in kinds}


def _frequencies(governors: str) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(glob.glob(governors)):  # noqa: PTH207 (the pattern is absolute)
        policy = Path(path).parent
        rows.append(
            {
                "path": path,
                "governor": text(path),
                "available": (text(policy / "scaling_available_governors") or "").split(),
                "khz": _number(policy / "scaling_cur_freq"),
                "max_khz": _number(policy / "cpuinfo_max_freq"),
            }
        )
    return rows


def _number(path: Path) -> int | None:
    content = text(path)
    return int(content) if content and content.isdecimal() else None


def _throttled() -> list[str]:
    """Cooling devices at work, processor and frequency ones."""
    found = []
    for device in sorted(Path("/sys/class/thermal").glob("cooling_device*")):
        kind, current = text(device / "type") or "", text(device / "cur_state")
        if ("cpu" in kind.lower()) and current not in (None, "0"):
            found.append(f"{device.name} ({kind}) at {current}")
    return found


def _memory() -> dict[str, int]:
    """/proc/meminfo in MiB."""
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", text("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(value) // 1024 for name, value in pairs}


def _existing(directory: str) -> Path:
    path = Path(directory)
    while not path.exists():
        path = path.parent
    return path


def _disk_free_mib(directory: str) -> int:
    return shutil.disk_usage(_existing(directory)).free >> 20


def _writable(directory: str) -> bool:
    path = _existing(directory)
    read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return os.access(path, os.W_OK) and not read_only


def _synchronised() -> bool | None:
    """Whether the kernel's clock is disciplined (adjtimex, no STA_UNSYNC)."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, modes = 0: read only
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(buffer) < 0:
        return None
    # modes (int, padded), offset, freq, maxerror, esterror (long), status (int)
    status = int.from_bytes(buffer.raw[40:44], sys.byteorder)
    return not status & _STA_UNSYNC


def _leftover_processes() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (words := text(entry / "cmdline")):
            argv = words.split("\0")
            if Path(argv[0]).name in PROCESSES or "board.agent" in argv:
                found.append(f"{entry.name} {' '.join(argv)[:80]}")
    return sorted(found)


def _version(package: str) -> str | None:
    # -I keeps the user's own packages out, as the agent's interpreter does not.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _kernel_errors() -> list[str] | None:
    """Messages of level error or worse since boot; None where the log may not be read."""
    if not os.access("/dev/kmsg", os.R_OK):
        return None
    return [line for level, _, line in system.kernel_log() if level <= 3]

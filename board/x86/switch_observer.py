"""Count the context switches of one process with BPF: runs inside the container, with bcc.

    python3 switch_observer.py --pid PID --out FILE [--hold] [--headers DIR] [--layout JSON]

Promise: programs on sched_switch and sched_migrate_task count, per thread, exactly what happened
between SIGUSR1 ("ready" is said) and SIGINT (FILE is written): the kernel counts a switch and calls
the first program in one go.  Where BPF cannot be used the file says why, and the exit code is 0 all
the same: the counts of /proc stand alone then.
Limit: PID is of this process's own PID namespace.  Nothing of a kernel structure is taken from the
headers, which need not be the running kernel's: where members lie comes from its own BTF (--layout,
made by board/x86/layout.py); without it only switches out are counted.  Exit code 130 when it is
stopped before its window was opened.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

UNOPENED = 130
LARGEST_NUMBER_OF_THREADS = 8192
PROGRAM = Path(__file__).with_name("switch_observer.bpf.c")
CAPABILITIES = {"CAP_BPF": 39, "CAP_PERFMON": 38}
_SYS_ADMIN = 21

AVX_COMPONENTS = 1 << 2 | 1 << 5 | 1 << 6 | 1 << 7
"""YMM_Hi128, opmask, ZMM_Hi256, Hi16_ZMM (Intel SDM 1, 13.1)."""


class Unavailable(Exception):
    """BPF cannot be used here; str() says why."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count context switches of a process with BPF.")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold", action="store_true", help="wait for SIGUSR1 (always so)")
    parser.add_argument("--headers", type=Path, help="folder with /usr/src of kernel headers")
    parser.add_argument("--layout", type=json.loads, default=None)
    return parser.parse_args()


def _check_rights() -> None:
    text = Path("/proc/self/status").read_text()
    effective = int(text.partition("CapEff:")[2].split()[0], 16)
    missing = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    if missing and not effective >> _SYS_ADMIN & 1:
        raise Unavailable(f"rights are missing: {' and '.join(missing)}")


def _include_flags(headers: Path | None) -> list[str]:
    """Let bcc find Debian's headers, whose two packages are its two folders."""
    common = sorted(headers.glob("usr/src/linux-headers-*-common")) if headers else []
    if not common:
        raise Unavailable("kernel headers are missing")
    generated = Path(str(common[0]).removesuffix("-common") + "-amd64")
    os.environ["BCC_KERNEL_SOURCE"] = str(common[0])
    parts = ["include", "include/generated/uapi"]
    parts += [f"arch/x86/include/generated{part}" for part in ("", "/uapi")]
    return [f"-I{generated / part}" for part in parts] + ["-Wno-everything"]


def _program(pid: int, layout: dict[str, int] | None) -> str:
    status = os.stat("/proc/self/ns/pid")  # noqa: PTH116 (a link that leads nowhere by name)
    names = {
        "LARGEST": LARGEST_NUMBER_OF_THREADS,
        "TARGET": pid,
        # The kernel's own form of a device number.
        "NAMESPACE_DEV": os.major(status.st_dev) << 20 | os.minor(status.st_dev),
        "NAMESPACE_INO": status.st_ino,
        "AVX_COMPONENTS": AVX_COMPONENTS,
        "HAS_LAYOUT": int(layout is not None),
        "HAS_FPU": int(layout is not None and "TASK_FPSTATE" in layout),
        **(layout or {}),
    }
    return "".join(f"#define {name} {value}ULL\n" for name, value in names.items()) + (
        PROGRAM.read_text()
    )


def _load(options: argparse.Namespace) -> Any:
    """Return bcc's object, its programs attached.  Raises Unavailable."""
    _check_rights()
    flags = _include_flags(options.headers)
    try:
        from bcc import BPF  # type: ignore[import-not-found]

        return BPF(text=_program(options.pid, options.layout), cflags=flags)
    except ImportError as error:
        raise Unavailable(f"bcc is missing: {error}") from error
    except Exception as error:  # bcc raises Exception itself; its compiler has said more
        raise Unavailable(f"the kernel or the compiler refused it: {error}") from error


def _record(bpf: Any, recording: bool) -> None:
    totals = bpf["totals"]
    value = totals[0]
    value.recording = int(recording)
    totals[0] = value


def _counted(bpf: Any, layout: dict[str, int] | None) -> dict[str, Any]:
    totals = bpf["totals"][0]
    has_layout, has_fpu = layout is not None, layout is not None and "TASK_FPSTATE" in layout
    threads = [
        {"tid": tid.value, "voluntary": one.voluntary, "involuntary": one.involuntary}
        for tid, one in bpf["threads"].items()
    ]
    return {
        "threads": sorted(threads, key=lambda row: row["tid"]),
        "migrations": totals.migrations if has_layout else None,
        "resumed": totals.resumed if has_layout else None,
        "resumed_with_avx": totals.resumed_with_avx if has_fpu else None,
        "lost": totals.lost,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(document, allow_nan=False, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def main() -> int:
    """Load, wait for the window, count, write; return the exit code."""
    options = _options()
    waited_for = {signal.SIGUSR1, signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    bpf, why = None, None
    try:
        bpf = _load(options)
    except Unavailable as error:
        why = str(error)
        print(f"switch_observer: {why}", file=sys.stderr, flush=True)
    print("loaded", flush=True)
    if signal.sigwait(waited_for) != signal.SIGUSR1:
        return UNOPENED
    if bpf is not None:
        _record(bpf, True)
    print("ready", flush=True)
    signal.sigwait(waited_for - {signal.SIGUSR1})
    document = {"schema_version": "1", "pid": options.pid, "unavailable": why, "counted": None}
    if bpf is not None:
        _record(bpf, False)
        document["counted"] = _counted(bpf, options.layout)
    _write(options.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())

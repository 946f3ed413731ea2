"""Whether perf may count here: asked of the kernel by opening one event of each kind.

Promise: nothing is counted; what the kernel answers is kept as it is (the name of the error).
Limit: an answer for this process, this user and this container; x86-64 and riscv64.
"""

import ctypes
import errno
import os
import platform
from pathlib import Path
from typing import Any

_SYSCALL = {"x86_64": 298, "riscv64": 241}
_ATTRIBUTE_BYTES = 128
_EXCLUDE_HYPERVISOR = 1 << 6
_EXCLUDE_KERNEL = 1 << 5
_EVENTS = {
    # name: type, config, flags (linux/perf_event.h)
    "cycles_user": (0, 0, _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR),
    "instructions_user": (0, 1, _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR),
    "context_switches": (1, 3, 0),
    "cpu_migrations": (1, 4, 0),
}


class _Attribute(ctypes.Structure):
    """The start of struct perf_event_attr; the rest stays zero."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("rest", ctypes.c_char * (_ATTRIBUTE_BYTES - 48)),
    )


def availability() -> dict[str, Any]:
    """Return perf_event_paranoid and, per event, "ok" or the name of the kernel's error."""
    try:
        paranoid: int | None = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
    except (OSError, ValueError):
        paranoid = None
    return {"paranoid": paranoid, "events": {name: _try(*event) for name, event in _EVENTS.items()}}


def _try(kind: int, config: int, flags: int) -> str:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return "ENOSYS"
    attribute = _Attribute(type=kind, size=_ATTRIBUTE_BYTES, config=config, flags=flags)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, ctypes.byref(attribute), 0, -1, -1, 0)
    if descriptor < 0:
        return errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))
    os.close(descriptor)
    return "ok"

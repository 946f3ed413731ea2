"""Where the running kernel keeps what the BPF program reads, from its own BTF.

Promise: offsets of this very kernel; what it does not have is left out, never guessed.
Limit: x86-64, Linux from 5.16 on for the extended state (struct fpstate).
"""

from pathlib import Path

from kernel.btf import Btf
from toolchain.errors import InvalidData

BTF = Path("/sys/kernel/btf/vmlinux")


def layout(path: Path = BTF) -> dict[str, int] | None:
    """Return name -> offset in bytes, as switch_observer.py wants it; None without BTF.

    TASK_TGID; TASK_FPSTATE, FPSTATE_COMPONENTS (struct fpstate: XSTATE_BV of the saved state), only
    where this kernel has them.
    """
    try:
        btf = Btf(path.read_bytes())
        found = {"TASK_TGID": btf.offset_bytes("task_struct", "tgid")}
    except (OSError, InvalidData):
        return None
    try:
        found["TASK_FPSTATE"] = _fpu(btf) + btf.offset_bytes("fpu", "fpstate")
        found["FPSTATE_COMPONENTS"] = btf.offset_bytes("fpstate", "regs") + btf.offset_bytes(
            "xregs_state", "header.xfeatures"
        )
    except InvalidData:
        found.pop("TASK_FPSTATE", None)
    return found


def _fpu(btf: Btf) -> int:
    """Return the offset of struct fpu: in the thread, from Linux 6.16 on behind the task."""
    try:
        return btf.offset_bytes("task_struct", "thread.fpu")
    except InvalidData:
        return btf.size_bytes("task_struct")

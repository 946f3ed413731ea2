"""Has a thread used vector registers, and how wide are they? Asked of the kernel, per thread.

Promise: the answer is the kernel's own: PTRACE_GETREGSET with NT_RISCV_VECTOR fails while VS is Off
and gives vlenb otherwise (arch/riscv/kernel/ptrace.c, riscv_vr_get).
Limit: stops the thread for some microseconds, so it is asked after the measured window; needs the
right to trace (a child of ours, or root).
"""

import ctypes
import os
import platform
import struct

_PTRACE_GETREGSET = 0x4204
_PTRACE_SEIZE = 0x4206
_PTRACE_INTERRUPT = 0x4207
_PTRACE_DETACH = 17
_NT_RISCV_VECTOR = 0x901
_VLENB_OFFSET = 32  # struct __riscv_v_regset_state: vstart, vl, vtype, vcsr, vlenb
_LARGEST_STATE = 40 + 32 * 8192  # VLEN 65536


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def vlen_bits_used_by(tid: int) -> int | None:
    """Return the VLEN in bits if thread `tid` ever used V, 0 if not, None if it cannot be told."""
    if platform.machine() != "riscv64":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(_PTRACE_SEIZE, tid, None, None) != 0:
        return None
    try:
        libc.ptrace(_PTRACE_INTERRUPT, tid, None, None)
        os.waitpid(tid, 0x40000000)  # __WALL: threads count as clones
        state = ctypes.create_string_buffer(_LARGEST_STATE)
        vector = _IoVec(ctypes.addressof(state), len(state))
        if libc.ptrace(_PTRACE_GETREGSET, tid, _NT_RISCV_VECTOR, ctypes.byref(vector)) != 0:
            return 0
        return int(struct.unpack_from("<Q", state, _VLENB_OFFSET)[0]) * 8
    except OSError:
        return None
    finally:
        libc.ptrace(_PTRACE_DETACH, tid, None, None)

"""An interactive look at the virtual board: its kernel, its userland, a shell on the terminal.

Promise: the same artifacts as a cell's, with llama-server, the model and the agent below /payload;
leaving the shell powers the board off; nothing is kept.
Limit: multi-threaded emulation in real time, so neither deterministic nor calibrated; no network.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from board.models import model as model_file
from board.virtual.boot import ROOM
from board.virtual.machine import default_machine, interactive
from toolchain.errors import UsageError
from toolchain.inside import entering
from toolchain.recipe import build
from toolchain.rootfs import ENVIRONMENT

RUN = """#!/bin/sh
cd /payload && busybox tar -x -f agent.tar
echo "bananaOS virtual board: llama-server, model.gguf and the agent are in /payload."
echo "Leave with 'exit'; Ctrl-A X ends QEMU at once."
exec busybox setsid busybox cttyhack sh -i
"""


def shell(model: str) -> int:
    """Boot with the caller's terminal as console; return QEMU's exit code.

    Raises UsageError when standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError("board shell: standard input is no terminal; use ./inv run for scripts")
    machine = default_machine({"parked_harts": 0})
    qemu = [*interactive(machine), "-serial", "mon:stdio"]
    with tempfile.TemporaryDirectory(prefix="bananaos-shell-") as scratch:
        root = Path(scratch)
        (root / "build").mkdir()
        run_file = root / "run"
        run_file.write_text(RUN)
        run_file.chmod(0o755)
        binds = {
            "/in/kernel/image": build("kernel/image"),
            "/in/board/initramfs": build("board/initramfs"),
            "/recipe/boot.sh": ROOM / "boot.sh",
            "/payload/run": run_file,
            "/payload/agent.tar": build("board/agent") / "agent.tar",
            "/payload/llama-server": build("llama.cpp/server-riscv64") / "llama-server",
            "/payload/model.gguf": model_file(model),
        }
        argv = ["sh", "-eu", "/recipe/boot.sh", *qemu]
        writable = {"/build": root / "build"}
        # Not run by toolchain.command: it needs the terminal.
        command = entering(argv, binds, writable, root / "mounts")
        return subprocess.run(
            command, env=dict(ENVIRONMENT, TERM=os.environ.get("TERM", "linux"))
        ).returncode

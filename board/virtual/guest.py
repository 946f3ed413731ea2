"""A guest run: the artifacts it needs, and one cell in one boot.

Promise: what a cell runs is exactly what its `inputs` name.
Limit: building them may take half an hour the first time.
"""

import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from board.base import AGENT_INVALID, RunFailed, for_agent
from board.cell import tools_of
from board.models import model as model_file
from board.virtual import tools
from board.virtual.boot import boot, console_tail
from board.virtual.machine import Machine
from toolchain.fetch import sha256_file
from toolchain.recipe import build
from toolchain.rootfs import tree_key

SCRIPT = """#!/bin/sh
cd /payload && busybox tar -x -f agent.tar || exit 1
exec python3 -m board.agent --cell cell.json --around-load /bin/harts \\
\t--server /payload/llama-server --model /payload/model.gguf \\
\t--tools tools.json --out /results
"""


def artifacts(model: str) -> dict[str, str]:
    """Build or fetch all a run with `model` needs; return name -> sha256 (a cell's `inputs`)."""
    return {
        "kernel": sha256_file(build("kernel/image") / "Image"),
        "initramfs": sha256_file(build("board/initramfs") / "initramfs.cpio"),
        "llama_server": sha256_file(build("llama.cpp/server-riscv64") / "llama-server"),
        "agent": sha256_file(build("board/agent") / "agent.tar"),
        "model": sha256_file(model_file(model)),
        "qemu": tree_key("build"),
        "quantum": sha256_file(build("board/quantum") / "quantum.so"),
    }


def run_cell(
    cell: Mapping[str, Any], directory: Path, *, deadline_s: float, cancel: threading.Event
) -> dict[str, Any]:
    """Run the cell in a fresh guest; see board.base.Board.run."""
    with tempfile.TemporaryDirectory(prefix="bananaos-cell-") as scratch:
        used = tools.Tools.of(tools_of(cell), Path(scratch))
        cell_file = Path(scratch) / "cell.json"
        cell_file.write_text(json.dumps(for_agent(cell), indent=1, sort_keys=True) + "\n")
        done = boot(
            Machine(**cell["machine"]),
            seed=cell["seed"],
            payload={
                "agent.tar": build("board/agent") / "agent.tar",
                "llama-server": build("llama.cpp/server-riscv64") / "llama-server",
                "model.gguf": model_file(cell["model"]),
                "cell.json": cell_file,
                **used.payload,
            },
            script=SCRIPT,
            directory=directory,
            deadline_s=deadline_s,
            cancel=cancel,
            extra=used.qemu,
            binds=used.binds,
        )
    if done.exit_code not in (0, AGENT_INVALID):
        raise agent_failed(done.exit_code, directory)
    return {"host_cpu_s": done.host_cpu_s, "host_wall_s": done.host_wall_s}


def agent_failed(exit_code: int, directory: Path) -> RunFailed:
    """Return the failure of a guest program that ended with an exit code it does not document."""
    return RunFailed("agent-failed", f"exit code {exit_code}\n{console_tail(directory)}")

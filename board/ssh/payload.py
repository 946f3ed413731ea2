"""What a board reached over SSH is given: files by name, and how the agent is started with them.

Promise: what is sent is what the cell's `inputs` name by sha256; a module or a list of save sites
is only ever given to the kernel it was made for.
Limit: the emulated board has our kernel; for another kernel the module must have been built with
`./inv build --kernel-src DIR --board NAME`.
"""

import functools
import json
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from board.base import EMULATED_WARNINGS
from board.boards import SshSettings
from board.models import model as model_file
from board.virtual import tools
from kernel import sites
from kernel.vstate_profiler import load
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.fetch import sha256_file
from toolchain.recipe import build

INSTRUMENTS = ("observer", "profiler")
"""What counts where no emulator does."""
ALL = (*INSTRUMENTS, "scheduler", "bystander")
PROGRAM, DATA = 0o755, 0o644
_EM_RISCV = (243).to_bytes(2, "little")


@dataclass(frozen=True)
class Item:
    """A file to send."""

    path: Path
    mode: int

    @functools.cached_property
    def sha256(self) -> str:
        """Of the file here, and of the file there."""
        return sha256_file(self.path)

    def require_riscv(self) -> None:
        """Raise InvalidData for a program or module of another machine."""
        with self.path.open("rb") as stream:
            head = stream.read(20)
        wanted = self.mode == PROGRAM or self.path.suffix == ".ko"
        if wanted and (head[:4] != b"\x7fELF" or head[18:20] != _EM_RISCV):
            raise InvalidData(
                f"{self.path}: not a RISC-V program: it was not sent; build it anew "
                f"(./inv build), or look at what replaced it"
            )


def module_file(settings: SshSettings) -> Path:
    """The profiler module for the board's kernel: of its owner's making, or the emulated one's."""
    path = settings.state / "kernel" / "vstate_profiler.ko"
    if not path.exists() and settings.emulator:
        return build("kernel/vstate-profiler") / "vstate_profiler.ko"
    if not path.exists():
        raise EnvironmentUnfit(
            f"board {settings.name}: no profiler module for its kernel: "
            f"./inv build --kernel-src DIR --board {settings.name} makes it, "
            "or leave the profiler out: --instruments observer"
        )
    return path


def items(settings: SshSettings, model: str | None, used: Sequence[str]) -> dict[str, Item]:
    """Name below artifacts/ -> file, for runs with these tools; model None: no model yet."""
    found = {
        "llama-server": Item(build("llama.cpp/server-riscv64") / "llama-server", PROGRAM),
        **_agent(),
    }
    if model is not None:
        found[f"{model}.gguf"] = Item(model_file(model), DATA)
    for name in used:
        path = _file(settings, name)
        found[path.name] = Item(path, DATA if name == "profiler" else PROGRAM)
    if "profiler" in used:
        found["load.py"] = Item(tools.LOADER, DATA)
    return found


def inputs(settings: SshSettings, model: str, used: Sequence[str]) -> dict[str, str]:
    """The `inputs` of a cell: name -> sha256; raises UsageError for a tool there is not."""
    for name in used:
        if name not in ALL:
            raise UsageError(
                f"board {settings.name}: instrument {name} needs the deterministic emulator; "
                f"expected some of {','.join(INSTRUMENTS)}, or none"
            )
    return {
        "llama_server": sha256_file(build("llama.cpp/server-riscv64") / "llama-server"),
        "agent": sha256_file(build("board/agent") / "agent.tar"),
        "model": sha256_file(model_file(model)),
        **{name: sha256_file(_file(settings, name)) for name in used},
    }


def check_module(settings: SshSettings, facts: Mapping[str, Any]) -> None:
    """Raise InvalidData unless the module is for the kernel that runs on the board."""
    path = module_file(settings)
    try:
        made_for = load.modinfo(path)
    except load.Refused as error:
        raise InvalidData(str(error)) from error
    check_release(settings, path.name, made_for["vermagic"].split(" ")[0], facts)
    found, expected = made_for["kernel_build_id"], facts["build_id"]
    if found != expected:
        raise InvalidData(
            f"board {settings.name}: {path.name} is for the kernel with build-id {found}, the "
            f"board's has {expected}: it was not loaded; ./inv build --kernel-src DIR --board "
            f"{settings.name} makes one for it"
        )


def check_release(settings: SshSettings, what: str, found: str, facts: Mapping[str, Any]) -> None:
    """Raise InvalidData unless `found` is the release that the board runs."""
    if found != facts["kernel_release"]:
        raise InvalidData(
            f"board {settings.name}: {what} is for kernel {found}, the board runs "
            f"{facts['kernel_release']}: it was not loaded; ./inv build --kernel-src DIR --board "
            f"{settings.name} makes a module for that"
        )


def known_sites(build_id: str) -> dict[str, Any] | None:
    """The save sites of the kernel with this build-id, if it is the one built here."""
    kernel = tools.our_kernel()
    return sites.document(kernel) if kernel.build_id == build_id else None


def told(
    settings: SshSettings,
    used: Sequence[str],
    given: str,
    there: str,
    kernel_sites: Mapping[str, Any] | None,
) -> dict[str, str]:
    """The files that tell the agent of its tools: name -> text.

    given: the folder on the board where these files will lie; there: that of the artifacts.
    """
    content: dict[str, Any] = {}
    files = {}
    if settings.emulator:
        content["harmless_warnings"] = EMULATED_WARNINGS
    for name in used:
        if name != "profiler":
            content[name] = f"{there}/{tools.FILES[name][1]}"
    if "observer" in used:
        content["spin"] = [f"{start:#x}-{end:#x}" for start, end in tools.server_spins()]
    if "profiler" in used:
        content["profiler"] = {
            "module": f"{there}/vstate_profiler.ko",
            "sites": f"{given}/sites.json",
            "loader": f"{there}/load.py",
        }
        files["sites.json"] = json.dumps(kernel_sites)
    files["tools.json"] = json.dumps(content, indent=1, sort_keys=True) + "\n"
    return files


def _file(settings: SshSettings, name: str) -> Path:
    if name == "profiler":
        return module_file(settings)
    artifact, file = tools.FILES[name]
    return build(artifact) / file


@functools.cache
def _agent() -> dict[str, Item]:
    """The agent's files, out of its archive: sources only, for whatever Python the board has."""
    scratch = Path(_keep().name)
    found = {}
    with tarfile.open(build("board/agent") / "agent.tar") as tar:
        for member in tar.getmembers():
            stream = tar.extractfile(member)
            if stream is None or member.name.endswith(".pyc"):
                continue
            path = scratch / member.name.replace("/", "_")
            path.write_bytes(stream.read())
            found[f"agent/{member.name}"] = Item(path, DATA)
    return found


@functools.cache
def _keep() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="bananaos-agent-")

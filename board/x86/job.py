"""What is run in the container, and the engine that runs it.

Promise: every engine gives a job the same: the files of docker/x86/container.toml in the same
places, the job's own beside them, /results and a small /tmp to write to, the CPUs and the memory it
is told, loopback and no other network, no capability but those it keeps.
Limit: x86-64 Linux.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import schemas
from toolchain.paths import REPO
from toolchain.recipe import build

CONTAINER = REPO / "docker" / "x86" / "container.toml"
OBSERVER_CAPABILITIES = ("BPF", "PERFMON")
"""What the BPF program needs (capabilities(7), Linux 5.8); nothing else gets any."""
OLDER_CAPABILITIES = ("SYS_ADMIN",)
"""What holds both, for an engine that does not know them by name."""


@dataclass(frozen=True)
class Job:
    """One program to run.

    argv: its command line.  inputs: path inside -> host file, read-only.  results: the host folder
    that is /results.  cpus: those it may use.  capabilities: those it keeps.
    """

    argv: Sequence[str]
    results: Path
    cpus: Sequence[int]
    memory_mib: int
    inputs: Mapping[str, Path] = field(default_factory=dict)
    capabilities: Sequence[str] = ()


@dataclass(frozen=True)
class Ended:
    """How a job ended; exit_code as a shell tells it (128 + N for signal N)."""

    exit_code: int
    out_of_memory: bool
    seconds: float


class Engine(Protocol):
    """docker, podman, or none."""

    name: str

    def check(self) -> None:
        """Raise EnvironmentUnfit where the engine cannot be used, and say what to do; quick."""

    def prepare(self) -> None:
        """Make ready what all jobs need (the image); may take a minute the first time.

        Raises as `check`, InvalidData for an image that is not ours.
        """

    def facts(self) -> dict[str, Any]:
        """What the record says of it: engine, engine_version, rootless, image, memory_by."""

    def observer_capabilities(self) -> tuple[str, ...]:
        """Return what a job keeps that loads the BPF program."""

    def run(self, job: Job, *, log: Path, deadline_s: float, cancel: threading.Event) -> Ended:
        """Run the job to its end, its output into `log`; nothing of it is left afterwards.

        Raises Cancelled, TimedOut, EnvironmentUnfit.
        """


class TimedOut(Exception):
    """The job did not end in time and was stopped."""


def container() -> dict[str, Any]:
    """Return docker/x86/container.toml; raises InvalidData."""
    content: dict[str, Any] = schemas.read_toml(CONTAINER, "container")
    return content


def files() -> dict[str, Path]:
    """Return path inside -> host file of all that the image holds beside the tree, built."""
    content = container()
    found = {path: build(name) / file for path, (name, file) in content["artifacts"].items()}
    return found | {path: REPO / name for path, name in content["files"].items()}

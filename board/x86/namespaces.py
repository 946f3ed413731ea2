"""The engine "none": the same files and limits in namespaces of the pinned tree, by util-linux.

Promise: no daemon, no image; an ordinary user can do it where the kernel allows user namespaces.
Limit: the memory limit is one of each process (RLIMIT_DATA): an excess is refused, not killed.  BPF
needs capabilities of the real root, so a job that keeps some is for root only.
"""

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from board.x86.job import OBSERVER_CAPABILITIES, Ended, Job, TimedOut, container, files
from toolchain.command import CommandFailed, run
from toolchain.errors import EnvironmentUnfit
from toolchain.inside import driver, entering
from toolchain.rootfs import rootfs

SYSFS = ("/sys/devices/system/cpu", "/sys/kernel/sched_ext")
"""What the agent reads of it; the whole has mounts of its own that a user may not bind."""


class Namespaces:
    """See board.x86.job.Engine."""

    name = "none"

    def check(self) -> None:
        """Raise EnvironmentUnfit where there are no namespaces to be had."""
        driver()

    def prepare(self) -> None:
        """Unpack the tree and build what lies beside it."""
        self.check()
        rootfs(container()["tree"])
        files()

    def facts(self) -> dict[str, Any]:
        """No version, no image."""
        return {
            "engine": self.name,
            "engine_version": None,
            "rootless": os.geteuid() != 0,
            "image": None,
            "memory_by": "rlimit",
        }

    def observer_capabilities(self) -> tuple[str, ...]:
        """util-linux knows them."""
        return OBSERVER_CAPABILITIES

    def run(self, job: Job, *, log: Path, deadline_s: float, cancel: threading.Event) -> Ended:
        """Run it in fresh namespaces."""
        if job.capabilities and os.geteuid() != 0:
            raise EnvironmentUnfit(
                "--bpf without an engine is for root: the kernel lets no other user load the "
                "program; run it as root, with --engine docker, or without --bpf"
            )
        content = container()
        inside = [*_limited(job), *job.argv]
        # As root of a user namespace one has no capability that BPF asks for.
        via = "chroot" if job.capabilities else None
        with tempfile.TemporaryDirectory(prefix="bananaos-x86-") as scratch:
            argv = entering(
                inside,
                {
                    **files(),
                    **job.inputs,
                    **{path: Path(path) for path in SYSFS if Path(path).is_dir()},
                },
                {"/results": job.results},
                Path(scratch) / "mounts",
                name=content["tree"],
                via=via,
            )
            try:
                done = run(
                    argv,
                    what="run in the pinned tree",
                    env=content["environment"],
                    log=log,
                    timeout_s=deadline_s,
                    cancel=cancel,
                    check=False,
                )
            except CommandFailed as error:
                if error.timed_out:
                    raise TimedOut(str(error)) from error
                raise
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return Ended(code, out_of_memory=False, seconds=done.seconds)


def _limited(job: Job) -> list[str]:
    """The words before a command that give it the job's limits (util-linux of the tree)."""
    kept = "".join(f",+{name.lower()}" for name in job.capabilities)
    cpus = ",".join(map(str, job.cpus))
    return [
        *("prlimit", f"--data={job.memory_mib << 20}", "--core=0"),
        *("taskset", "--cpu-list", cpus),
        *("setpriv", "--no-new-privs", f"--bounding-set=-all{kept}", "--inh-caps=-all", "--"),
    ]

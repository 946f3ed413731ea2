"""Real engines, Docker and Podman, and a real Nix for the tests, or the reason why there is none.

Promise: what is started here is stopped at the end; an engine that runs already is left as it is,
with no image or container more than before.
Limit: starting an engine needs root and its packages; Nix is that of the pinned tree `nix`.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolchain.command import run
from toolchain.rootfs import rootfs

MACHINE = Path(__file__).with_name("nix_machine.sh")
START_S = 120.0
PROGRAMS = ("nix", "nix-build", "nix-instantiate", "nix-store")


@contextlib.contextmanager
def docker_engine() -> Iterator[str]:
    """Yield the DOCKER_HOST of an engine: the machine's, or one of our own; skips without."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if _answers(host):
        yield host
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip(f"no Docker engine at {host}, and none can be started (root, dockerd)")
    with tempfile.TemporaryDirectory(prefix="engine-") as place:
        host = f"unix://{place}/docker.sock"
        command = ["dockerd", "--host", host, "--data-root", f"{place}/data", "--bridge", "none"]
        command += ["--exec-root", f"{place}/exec", "--pidfile", f"{place}/pid", "--iptables=false"]
        with _started(command, host, Path(place) / "log"):
            yield host


@contextlib.contextmanager
def podman_engine() -> Iterator[str]:
    """Yield the CONTAINER_HOST of an engine: the user's, or one of our own; skips without."""
    host = os.environ.get("CONTAINER_HOST", "unix:///run/podman/podman.sock")
    if _answers(host):
        yield host
        return
    if os.geteuid() != 0 or shutil.which("podman") is None:
        pytest.skip(f"no Podman engine at {host}, and none can be started (root, podman)")
    with tempfile.TemporaryDirectory(prefix="engine-") as place:
        host = f"unix://{place}/podman.sock"
        command = ["podman", "--root", f"{place}/data", "--runroot", f"{place}/run"]
        command += ["--cgroup-manager", "cgroupfs", "system", "service", "--time", "0", host]
        with _started(command, host, Path(place) / "log"):
            yield host


@contextlib.contextmanager
def _started(command: list[str], host: str, log: Path) -> Iterator[None]:
    """An engine that answers at `host` for the time of the block; skips where it does not start."""
    with log.open("wb") as out:
        engine = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(host):
            if engine.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").splitlines()[-1:]
                pytest.skip(f"{command[0]} does not start here: {last}")
            time.sleep(0.2)
        yield
    finally:
        engine.terminate()
        engine.wait()


def _answers(host: str) -> bool:
    from docker.errors import DockerException

    from board.x86.engine import _open, _reach

    try:
        _reach(host)
        with contextlib.closing(_open(host)) as client:
            return bool(client.ping())
    except (DockerException, OSError):
        return False


@contextlib.contextmanager
def nix() -> Iterator[Path]:
    """Yield a directory with Nix's programs, whose store is new and empty; skips without."""
    tree = rootfs("nix")
    # Not below pytest's own directory, which only the last few runs keep: a store is read-only.
    place = Path(tempfile.mkdtemp(prefix="nix-"))
    try:
        (place / "bin").mkdir()
        (place / "state" / "etc").mkdir(parents=True)
        (place / "state" / "etc" / "nix.conf").write_text("build-users-group =\n")
        for name in PROGRAMS:
            program = place / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {MACHINE} {tree} {place}/state {name} "$@"\n')
            program.chmod(0o755)
        probe = run([place / "bin" / "nix", "--version"], what="try Nix", check=False)
        if probe.returncode != 0:
            pytest.skip("Nix cannot be run here: neither root nor user namespaces")
        yield place / "bin"
    finally:
        subprocess.run(["chmod", "-R", "u+w", place], check=False)
        shutil.rmtree(place)

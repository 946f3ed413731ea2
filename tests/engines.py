"""Real engines, Docker and Podman, and a real Nix for the tests, or the reason why there is none.

Promise: what is started here is stopped at the end; an engine that runs already is left as it is,
with no image or container more than before.
Limit: starting an engine needs root and its packages; Nix is that of the pinned tree `nix`.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolchain.command import run
from toolchain.rootfs import rootfs

MACHINE = Path(__file__).with_name("nix_machine.sh")
START_S = 120.0
PROGRAMS = ("nix", "nix-build", "nix-instantiate", "nix-store")


def docker_engine() -> contextlib.AbstractContextManager[str]:
    """Yield the DOCKER_HOST of an engine: the machine's, or one of our own; skips without."""

    def command(place: str, host: str) -> list[str]:
        words = ["dockerd", "--host", host, "--data-root", f"{place}/data", "--bridge", "none"]
        words += ["--exec-root", f"{place}/exec", "--pidfile", f"{place}/pid", "--iptables=false"]
        return words

    return _engine("DOCKER_HOST", "unix:///var/run/docker.sock", "dockerd", command)


def podman_engine() -> contextlib.AbstractContextManager[str]:
    """Yield the CONTAINER_HOST of an engine: the user's, or one of our own; skips without."""

    def command(place: str, host: str) -> list[str]:
        words = ["podman", "--root", f"{place}/data", "--runroot", f"{place}/run"]
        words += ["--cgroup-manager", "cgroupfs", "system", "service", "--time", "0", host]
        return words

    return _engine("CONTAINER_HOST", "unix:///run/podman/podman.sock", "podman", command)


@contextlib.contextmanager
def _engine(
    variable: str, default: str, program: str, command: Callable[[str, str], list[str]]
) -> Iterator[str]:
    """Yield the engine's address.  command: of (a directory, the address) what starts one."""
    host = os.environ.get(variable, default)
    if _answers(host):
        yield host
        return
    if os.geteuid() != 0 or shutil.which(program) is None:
        pytest.skip(f"no engine at {host} ({variable}), and none can be started (root, {program})")
    with tempfile.TemporaryDirectory(prefix="engine-") as place:
        host = f"unix://{place}/engine.sock"
        with _started(command(place, host), host, Path(place) / "log"):
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
    """Ping; not by the SDK, which leaves a socket open for each time that nobody answers."""
    where = urllib.parse.urlsplit(host)
    unix = where.scheme == "unix"
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as line:
        line.settimeout(START_S)
        try:
            line.connect(where.path if unix else (where.hostname, where.port))
            line.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in line.recv(64)
        except OSError:
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

"""An emulated board of its own for a test module, and ways to do things to it behind the back.

Promise: the board has a name and a port of its own, so that any number of test runs and a user's
own virtual-ssh can be up at the same time; when the block is left it is down and forgotten.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from board.boards import VARIABLE, SshSettings, ssh_settings
from board.virtual.interactive import Interactive

TABLE = """
schema_version = "1"
[boards.{name}]
title = "a board of a test"
platform = "emulated"
[boards.{name}.ssh]
address = "127.0.0.1"
port = {port}
user = "banana"
directory = "bananaos"
emulator = true
[boards.{name}.expect]
soc = "riscv-virtio"
harts = 8
vlen_bits = 256
[boards.{name}.limits]
memory_mib = 256
disk_mib = 64
temperature_c = 70
cooling_s = 60
[boards.{name}.paths]
governors = "/run/fake/policy*/scaling_governor"
temperatures = "/run/fake/temp"
"""
SETUP = """
mkdir -p /run/fake/policy0 /run/fake/policy4
for policy in 0 4; do echo schedutil >/run/fake/policy$policy/scaling_governor; done
echo 45000 >/run/fake/temp
"""
"""The emulator has no frequency policies and no sensors: files of the same form stand in for them,
through the same settings by which a real board says where they are."""


class TestBoard:
    """A running board."""

    __test__ = False

    def __init__(self, settings: SshSettings) -> None:
        self.settings = settings
        self.emulated = Interactive(settings)

    def up(self) -> None:
        """Boot, and put the stand-ins in place."""
        self.emulated.up()
        self.root(SETUP)

    def root(self, script: str) -> str:
        """Run a script as root on the board, by a connection that has nothing to do with ours."""
        options = ["-F", "none", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]
        options += ["-o", f"UserKnownHostsFile={os.devnull}", "-o", "LogLevel=ERROR"]
        options += ["-i", os.fspath(self.emulated.key), "-p", str(self.settings.port)]
        argv = ["ssh", *options, "banana@127.0.0.1", "--", "sudo -n sh -es"]
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout

    def cable(self, *, plugged: bool) -> None:
        """Pull or plug the network cable."""
        self.emulated.monitor("set_link", name="nic", up=plugged)

    @property
    def log(self) -> str:
        """Our command log."""
        path = self.settings.state / "commands.log"
        return path.read_text() if path.exists() else ""


def free_port() -> int:
    """A port of the loopback interface that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def board(directory: Path) -> Iterator[TestBoard]:
    """A board that is up for the time of the block; skips without an SSH client."""
    if shutil.which("ssh") is None:
        pytest.skip("no ssh on this machine")
    name = f"test-{uuid.uuid4().hex[:8]}"
    port = free_port()
    file = directory / "boards.toml"
    file.write_text(TABLE.format(name=name, port=port))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, os.fspath(file))
        made = TestBoard(ssh_settings(name))
        try:
            made.up()
            yield made
        finally:
            made.emulated.down()
            shutil.rmtree(made.settings.state, ignore_errors=True)

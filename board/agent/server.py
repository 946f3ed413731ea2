"""llama-server's life on the board: started with every option explicit, watched, stopped in order.

Promise: the server that answers is the process started here; its end is noticed and named; when the
block is left, whatever way, no server is left.
Limit: readiness is loadgen's preflight's affair; here the process is only kept alive and watched.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_TIMEOUT_S = 60.0


@dataclass
class Server:
    """A started llama-server; `exit_code` is None while it runs, negative for a signal."""

    argv: list[str]
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The process id, which is also the thread group the instruments filter by."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, asked of the kernel now."""
        return self.process.poll()

    def stop(self) -> int:
        """End the server in order and return its exit code; kills it when it does not listen."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def running(
    program: Path,
    model: Path,
    flags: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    log: Path,
) -> Iterator[Server]:
    """Start llama-server on the loopback interface and stop it when the block is left.

    environment: what it is told beside what this process was told.
    """
    argv = [os.fspath(program), "--model", os.fspath(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    server = Server(argv, process)
    try:
        yield server
    finally:
        server.stop()

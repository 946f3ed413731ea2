"""A program on the board that answers questions, over one ssh: lines of JSON both ways.

Promise: an answer is whole and belongs to its question, or ChannelEnded tells what ssh or the board
said last; when this process ends, however it ends, ssh and the program there end, too: they live
by our end of a pipe.
Limit: one question at a time (board/ssh/link.py sees to it).
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolchain.errors import EnvironmentUnfit

_END_S = 3.0


class ChannelEnded(Exception):
    """No answer.  code: of ssh, or None where the answer did not come in time; said: its words."""

    def __init__(self, code: int | None, said: str) -> None:
        super().__init__(f"{code}: {said}")
        self.code = code
        self.said = said


def no_client(error: FileNotFoundError) -> EnvironmentUnfit:
    """The failure to raise where there is no ssh."""
    return EnvironmentUnfit(f"{error.filename}: not in PATH: install the package openssh-client")


class Channel:
    """The program started by `argv`, whose standard error goes to the file `errors`."""

    def __init__(self, argv: Sequence[str], errors: Path) -> None:
        self._errors = errors
        self._buffer = b""
        try:
            with errors.open("wb") as log:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except FileNotFoundError as error:
            raise no_client(error) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def open(self, package: str, timeout_s: float) -> None:
        """Hand the program over and wait until it runs."""
        deadline_s = time.monotonic() + timeout_s
        self._send(package)
        # What a login script prints comes before.
        while not self._line(deadline_s).startswith(b'{"ready"'):
            pass

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the program's answer; raises ChannelEnded."""
        self._send(json.dumps(question))
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s))
        return answer

    def close(self) -> None:
        """End the program and ssh."""
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()

    def _send(self, line: str) -> None:
        try:
            self._in.write(line.encode() + b"\n")
            self._in.flush()
        except OSError as error:
            raise self._ended() from error

    def _line(self, deadline_s: float) -> bytes:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0, deadline_s - time.monotonic()))
            if not ready:
                raise ChannelEnded(None, self._said())
            data = os.read(self._out.fileno(), 65536)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> ChannelEnded:
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return ChannelEnded(code, self._said())

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")

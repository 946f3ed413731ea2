"""A program that gets ready, waits for a signal to begin, and writes its document when it is ended.

Promise: vstate_observer, scx_vstate and switch_observer.py are driven in one way: started with
--hold they print "loaded", at SIGUSR1 "ready", and end at SIGTERM; one that does not end is killed.
Limit: what it says is read only while a word is waited for, and at its end.
"""

import signal
import subprocess
from collections.abc import Sequence

UNBEGUN = 130
"""Exit code of one that was told to end before it began: nothing was written."""
INVALID = 4
"""Exit code of one whose document has invalid_reasons of its own."""
STOP_TIMEOUT_S = 120.0


class Held:
    """One such program, started; raises RuntimeError whenever it does not do its part.

    said: its lines so far.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.said: list[str] = []
        self.ready = False
        self._process = subprocess.Popen(
            [*argv, "--hold"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._until("loaded")

    def begin(self) -> None:
        """Let it do what it is for."""
        self._process.send_signal(signal.SIGUSR1)
        self._until("ready")
        self.ready = True

    def has_ended(self) -> bool:
        """Whether it is gone, told or not."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Tell it to end and wait until it has."""
        self._process.send_signal(signal.SIGTERM)
        try:
            rest, _ = self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            rest, _ = self._process.communicate()
        self.said += rest.splitlines(keepends=True)
        expected = (0, INVALID) if self.ready else (UNBEGUN,)
        if self._process.returncode not in expected:
            raise RuntimeError(f"ended with {self._process.returncode}: {self._last()}")

    def _until(self, word: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line)
            if line == f"{word}\n":
                return
        code = self._process.wait()
        raise RuntimeError(f"ended with {code} before it was {word}: {self._last()}")

    def _last(self) -> str:
        return "".join(self.said[-1:]).strip()

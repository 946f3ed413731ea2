"""What a person sees while cells run: plain lines, and on a terminal a live line below them.

Promise: everything goes to standard error; when that is not a terminal there are only plain lines
of one event each, and no colours or control characters; NO_COLOR is respected.
Limit: what remains is an estimate from the cost of each cell, shared out over the jobs.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text


def stderr_console() -> Console:
    """The console for progress: standard error, as wide as a line gets."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def words_for(seconds: float) -> str:
    """A duration as a person says it: 45 s, 3 min, 1 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@dataclass
class _Running:
    what: str
    expected_s: float
    started_s: float


@dataclass
class Progress:
    """The progress of `total` cells on `jobs` jobs; a context manager; safe in threads.

    expected_s: run seconds expected of each cell that is not done yet, by key.
    """

    total: int
    jobs: int
    expected_s: dict[str, float]
    console: Console = field(default_factory=stderr_console)
    clock_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._begun_s = self.clock_s()
        self._numbers: dict[str, int] = {}
        self._running: dict[str, _Running] = {}
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._line,
                console=self.console,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def skipped(self, key: str, run: str, what: str, *, valid: bool = True) -> None:
        """The cell needs no run: `run` is valid, or invalid for everybody."""
        why = "a valid run is there" if valid else "its run is invalid for everybody"
        with self._lock:
            line = self._event("SKIP", key, f"{run} {what}", why)
        self.console.print(line)

    def started(self, key: str, run: str, what: str) -> None:
        """The cell runs now, as `run`."""
        with self._lock:
            expected_s = self.expected_s.pop(key, 0.0)
            self._running[key] = _Running(f"{run} {what}", expected_s, self.clock_s())
            line = self._event("RUN", key, f"{run} {what}", self._remaining())
        self.console.print(line)

    def ended(self, key: str, verdict: str, note: str, details: Sequence[str] = ()) -> None:
        """The cell's run ended; verdict: OK, INVALID or VOID; details go below, line by line."""
        with self._lock:
            running = self._running.pop(key)
            took = f"took {words_for(self.clock_s() - running.started_s)}"
            line = self._event(verdict, key, running.what, note, took, self._remaining())
        below = [f"    | {text}" for detail in details for text in detail.splitlines()]
        self.console.print("\n".join([line, *below]))

    def _event(self, tag: str, key: str, what: str, *notes: str) -> str:
        # Built under our lock and printed outside it: the live line's thread holds the console's
        # lock when it asks for ours.
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        elapsed = f"elapsed {words_for(self.clock_s() - self._begun_s)}"
        note = ", ".join([*(note for note in notes if note), elapsed])
        return f"[{tag:^9}] cell {number} of {self.total}: {what} ({note})"

    def _remaining_s(self) -> float:
        now_s = self.clock_s()
        left = [
            max(run.expected_s - (now_s - run.started_s), 0.0) for run in self._running.values()
        ]
        left += self.expected_s.values()
        return max(sum(left) / self.jobs, max(left, default=0.0))

    def _remaining(self) -> str:
        remaining_s = self._remaining_s()
        return f"about {words_for(remaining_s)} left" if remaining_s else ""

    def _line(self) -> Text:
        with self._lock:
            now_s = self.clock_s()
            running = "; ".join(
                f"{run.what} {words_for(now_s - run.started_s)}" for run in self._running.values()
            )
            elapsed, remaining = words_for(now_s - self._begun_s), self._remaining()
            text = f"elapsed {elapsed}, {remaining or 'nearly done'} | {running}"
        return Text(text, no_wrap=True, overflow="ellipsis")

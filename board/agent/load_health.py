"""Whether the client itself was well while it measured.

Promise: a heartbeat on the client's own event loop says how late the loop was; garbage collection
does not happen inside the window; CPU time is that of this process, inside the window only.
Limit: a lag shorter than the heartbeat's interval can fall between two beats, and a heartbeat costs
CPU time that the server may want: on a slow machine make the interval longer, or 0 for none.
"""

import asyncio
import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from board.agent.load_client import Clock
from board.agent.stats import percentile_linear

_POLICIES = {
    getattr(os, name): name
    for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
}
_SCHED_EXT = 7  # linux/sched.h; the os module has no name for it


class Heartbeat:
    """Asks the event loop to wake it every `interval_ms` and keeps how late it was, in ns."""

    def __init__(self, clock: Clock, interval_ms: float) -> None:
        self._clock = clock
        self._interval_ns = round(interval_ms * 1e6)
        self._due_ns = 0
        self._task: asyncio.Task[None] | None = None
        self.lags_ns: list[int] = []

    def start(self) -> None:
        if self._interval_ns:
            self._due_ns = self._clock() + self._interval_ns
            self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(max(0, self._due_ns - self._clock()) / 1e9)
            now = self._clock()
            self.lags_ns.append(max(0, now - self._due_ns))
            self._due_ns = now + self._interval_ns

    def stop(self) -> None:
        """End it; a beat that is overdue at this moment counts with its lateness so far."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            overdue_ns = self._clock() - self._due_ns
            if overdue_ns > 0:
                self.lags_ns.append(overdue_ns)


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keep the garbage collector out of what follows.

    Nothing is collected first: that takes seconds on a slow board, and frozen garbage harms nobody.
    """
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class ClientMeter:
    """Everything about the client that belongs beside its numbers."""

    def __init__(self, clock: Clock, heartbeat_ms: float) -> None:
        self._heartbeat_ms = heartbeat_ms
        self._heartbeat = Heartbeat(clock, heartbeat_ms)
        self._utc_s = 0.0
        self._cpu_s = (0.0, 0.0)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Measure the client during the block."""
        with quiet_gc():
            self._utc_s = time.time()
            user_s, system_s = _cpu_s()
            self._heartbeat.start()
            try:
                yield
            finally:
                self._heartbeat.stop()
                now_user_s, now_system_s = _cpu_s()
                self._cpu_s = (now_user_s - user_s, now_system_s - system_s)

    @property
    def loop_lag_max_ms(self) -> float | None:
        lags = self._heartbeat.lags_ns
        return round(max(lags) / 1e6, 3) if lags else None

    def as_json(self) -> dict[str, Any]:
        lags = self._heartbeat.lags_ns
        p99_ns = percentile_linear(lags, 99)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._utc_s))
        return {
            "utc_start": stamp if self._utc_s else None,
            "cpu_user_s": round(self._cpu_s[0], 6),
            "cpu_system_s": round(self._cpu_s[1], 6),
            "heartbeat_ms": self._heartbeat_ms,
            "loop_lag_beats": len(lags),
            "loop_lag_max_ms": self.loop_lag_max_ms,
            "loop_lag_p99_ms": None if p99_ns is None else round(p99_ns / 1e6, 3),
            "affinity": sorted(os.sched_getaffinity(0)),
            "policy": _policy(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "machine": platform.machine(),
            "platform": sys.platform,
        }


def _cpu_s() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _policy() -> str:
    number = os.sched_getscheduler(0)
    return "SCHED_EXT" if number == _SCHED_EXT else _POLICIES.get(number, f"unknown ({number})")

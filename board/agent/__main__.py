"""Run one cell on the board it is started on: python -m board.agent --help.

Promise: whatever happens, agent.json names it; the server is stopped before the results are
written, and everything but the load itself is done outside the measured window.
Limit: needs /proc and a llama-server for this machine; what the cell's policy changes on the board
is changed back before the results are written.  Exit code
0 for a valid run, 4 for an invalid one (the files are written all the same), 2 for bad arguments.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from board.agent import server_counts, system
from board.agent.bystander import Bystanders
from board.agent.group import Group
from board.agent.instruments import Instruments
from board.agent.load_config import LoadConfig
from board.agent.loadgen import Hooks, run_load
from board.agent.scheduler import Scheduling, objections
from board.agent.server import Server, running
from board.agent.vector import vlen_bits_used_by

INVALID = 4
UNFIT = 3
EDGES = ("before", "after")
NOTICE_S = 5.0
"""How long the load may take to notice that its server is gone."""

CLIENT: dict[str, Any] = {
    "heartbeat_ms": 100.0,
    "max_loop_lag_ms": 2000.0,
    "max_start_spread_ms": 2000.0,
}
"""The client's own limits.  It shares the board with the server it loads, on harts that may be as
slow as 15 MIPS (docs/calibration.md): a beat costs there what it costs, and lateness of that order
is the board's, not the client's; it is recorded all the same (loadgen.json, `client`)."""

# Lines of the kernel's log at warning level or worse that say nothing about the run.
EXPECTED_KERNEL_WARNINGS = (
    "sched_ext: ",
    "vstate_profiler: loading out-of-tree module taints kernel.",
)


class _CannotWrite(Exception):
    """The folder for the results is full or not to be written: there is no run."""


def main() -> int:
    """Run the cell and return the exit code."""
    options = _options()
    cell = json.loads(options.cell.read_text())
    tools = json.loads(options.tools.read_text()) if options.tools else {}
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "schema_version": "1",
        "platform": system.describe(),
        "scheduler": {
            "before": system.scheduler_state(),
            **dict.fromkeys(("opened", "closed", "after", "server_counts")),
        },
        "bystanders": None,
        "invalid_reasons": [],
    }
    platform, reasons = report["platform"], report["invalid_reasons"]
    scheduler = report["scheduler"]
    platform |= {"server": None, "kernel_warnings": []}
    valid = False
    missing = system.missing_extensions(platform["isa"])
    if missing:
        platform["missing_extensions"] = missing
        reasons.append("isa-missing")
    else:
        log_start_us = _last_log_us()
        valid = _measure(options, cell, tools, report)
        scheduler["after"] = system.scheduler_state()
        server = platform["server"]
        threads = [row for key in EDGES for row in server[f"threads_{key}"]] if server else []
        # Not what is online: the harts come and go with the load, and are allowed all the time.
        one_hart = system.threads(os.getpid())[0]["harts"].isdigit()
        reasons += objections(cell["scheduling"], scheduler, threads, one_hart=one_hart)
        platform["kernel_warnings"] = _kernel_warnings(
            log_start_us, (*EXPECTED_KERNEL_WARNINGS, *tools.get("harmless_warnings", ()))
        )
        if platform["kernel_warnings"]:
            reasons.append("kernel-warning")
    _write(options.out / "agent.json", report)
    lines = [f"<{level}>[{us / 1e6:12.6f}] {line}" for level, us, line in system.kernel_log()]
    (options.out / "dmesg.log").write_text("\n".join(lines) + "\n")
    return 0 if valid and not reasons else INVALID


def _say(what: str) -> None:
    """Say on the console where the run is, stamped like the kernel's own lines."""
    stamp_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    print(f"[{stamp_s:12.6f}] agent: {what}", file=sys.stderr, flush=True)


def _measure(
    options: argparse.Namespace,
    cell: dict[str, Any],
    tools: dict[str, Any],
    report: dict[str, Any],
) -> bool:
    """Start the server, put the load on it, stop it; fills the report and writes loadgen.json.

    Returns whether the load was a valid one.
    """
    platform, reasons = report["platform"], report["invalid_reasons"]
    config = LoadConfig(
        url=f"http://127.0.0.1:{options.port}",
        concurrency=cell["concurrency"],
        **cell["load"],
        **CLIENT,
    )
    flags, wanted = cell["server"]["flags"], cell["scheduling"]
    first, later = options.around_load, None
    if not wanted["harts_first"]:
        first, later = later, first
    with (
        _around(first),
        running(
            options.server,
            options.model,
            flags,
            wanted["environment"],
            options.port,
            options.out / "server.log",
        ) as server,
    ):
        _say("llama-server started")
        group = Group(server.pid, by_signal=tools.get("stop", False))
        mine = (options.out, reasons, _say)
        scheduling = Scheduling(wanted, tools.get("scheduler"), group, server.pid, *mine)
        instruments = Instruments(tools, group, server.pid, *mine)
        beside = Bystanders(cell["bystanders"], tools.get("bystander"), reasons, _say)
        window = _Window(server, instruments, scheduling, beside)

        @contextlib.contextmanager
        def around_load() -> Iterator[None]:
            with _around(later), scheduling.active(), beside.running():
                yield

        hooks = Hooks(load=around_load, window=window.measured)
        with scheduling.ready(), instruments.ready():
            result = asyncio.run(_load_while_alive(config, server, hooks))
        platform["server"] = _describe(server, window)
        report["scheduler"] |= window.states
        if cell["bystanders"]:
            report["bystanders"] = window.bystanders
        if server.exit_code is not None:
            reasons.append("server-died")
        else:
            report["scheduler"]["server_counts"] = server_counts.read(options.port)
    platform["server"]["exit_code"] = server.exit_code
    if server.exit_code != 0 and "server-died" not in reasons:
        reasons.append("server-exit-code")
    # Without a window nothing is known of the threads, and loadgen.json says why there was none.
    told = [row for row in platform["server"]["threads_after"] if row["vlen_bits"] is not None]
    if "server-died" not in reasons and told and not platform["server"]["vector_threads"]:
        reasons.append("vector-unused")
    _say("llama-server stopped")
    if result is None:
        _say(f"llama-server ended with {server.exit_code}:")
        print(_tail(options.out / "server.log"), file=sys.stderr)
        return False
    _write(options.out / "loadgen.json", result)
    if not result["valid"]:
        _say(f"load invalid: {', '.join(result['invalid_reasons'])}")
    return bool(result["valid"])


@contextlib.contextmanager
def _around(program: Path | None) -> Iterator[None]:
    """Run `program begin`, then the block, then `program end`."""
    if program is None:
        yield
        return
    _say(f"{program.name} begin")
    subprocess.run([program, "begin"], check=True)
    try:
        yield
    finally:
        subprocess.run([program, "end"], check=True)
        _say(f"{program.name} end")


class _Window:
    """What holds at both ends of the measured window; empty if it was not reached.

    before, after: the server's threads.  states: the scheduler.  bystanders: how far they got.
    """

    def __init__(
        self,
        server: Server,
        instruments: Instruments,
        scheduling: Scheduling,
        bystanders: Bystanders,
    ) -> None:
        self._server = server
        self._instruments = instruments
        self._scheduling = scheduling
        self._bystanders = bystanders
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self.states: dict[str, Any] = {}
        self.bystanders: dict[str, Any] = {"opened": None, "closed": None}

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        _say("window opens")
        self.states["opened"] = self._scheduling.edge()
        self.bystanders["opened"] = self._bystanders.look()
        try:
            with self._instruments.window(self._opens, self._closes):
                yield
        finally:
            self.bystanders["closed"] = self._bystanders.look()
            self.states["closed"] = self._scheduling.edge()
            _say("window closed")

    def _opens(self) -> None:
        self.before = system.threads(self._server.pid)

    def _closes(self) -> None:
        if self._server.exit_code is None:
            self.after = system.threads(self._server.pid)


async def _load_while_alive(
    config: LoadConfig, server: Server, hooks: Hooks
) -> dict[str, Any] | None:
    """Run the load; None when the server died and the load did not notice by itself.

    Without this, a server that cannot load its model would be waited for until the time limit.
    """
    load = asyncio.create_task(run_load(config, hooks=hooks))
    with _death_of(server) as died:
        gone = asyncio.create_task(died.wait())
        await asyncio.wait({load, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
    if not load.done():
        # Requests in flight fail at once when their connections break; readiness is polled.
        await asyncio.wait({load}, timeout=NOTICE_S)
    if load.done():
        return load.result()
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return None


@contextlib.contextmanager
def _death_of(server: Server) -> Iterator[asyncio.Event]:
    """An event that is set when the server's process ends; costs nothing while it lives."""
    died = asyncio.Event()
    handle = os.pidfd_open(server.pid)
    asyncio.get_running_loop().add_reader(handle, died.set)
    try:
        yield died
    finally:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)


def _tail(path: Path, lines: int = 10) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _describe(server: Server, window: _Window) -> dict[str, Any]:
    """What the kernel knows of the server at the window's ends, thread by thread."""
    widths = {row["tid"]: vlen_bits_used_by(row["tid"]) for row in window.after}
    used = {width for width in widths.values() if width}
    return {
        "argv": server.argv,
        "pid": server.pid,
        "exit_code": None,
        "threads_before": window.before,
        "threads_after": [row | {"vlen_bits": widths[row["tid"]]} for row in window.after],
        "vector_threads": sum(1 for width in widths.values() if width),
        "vlen_bits": used.pop() if len(used) == 1 else None,
    }


def _last_log_us() -> int:
    entries = system.kernel_log()
    return entries[-1][1] if entries else 0


def _kernel_warnings(since_us: int, expected: tuple[str, ...]) -> list[str]:
    """Warnings and worse that the kernel logged since, but for those that begin as expected."""
    return [
        line
        for level, us, line in system.kernel_log()
        if us > since_us and level <= 4 and not line.startswith(expected)
    ]


def _write(path: Path, document: Any) -> None:
    """Write a JSON file whole or not at all; NaN and infinity are refused."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(document, allow_nan=False, indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _CannotWrite(f"{path}: cannot write: {error.strerror}") from error


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m board.agent",
        description="Run one cell against a llama-server started for it; write its results.",
        epilog="Exit codes: 0 valid run, 4 invalid run (files are written all the same), 2 usage, "
        "3 the folder for the results cannot be written.",
    )
    parser.add_argument("--cell", type=Path, required=True, help="the cell, a JSON file")
    parser.add_argument("--server", type=Path, required=True, help="llama-server for this machine")
    parser.add_argument("--model", type=Path, required=True, help="the cell's model, a GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--around-load",
        type=Path,
        help="a program to run with the argument 'begin' before the first completion and 'end' "
        "after the last one",
    )
    parser.add_argument(
        "--tools",
        type=Path,
        help="instruments, scheduler, bystander: which there are and where, and the kernel's "
        "harmless_warnings on this board; a JSON file",
    )
    parser.add_argument("--port", type=int, default=8080, help="loopback port (default 8080)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except _CannotWrite as error:
        _say(str(error))
        sys.exit(UNFIT)

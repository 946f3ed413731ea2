"""One cell on one board: from a plan to a kept run.

Promise: whatever happens while a cell runs, its folder ends up under runs/ with a checked record
(valid, or invalid with its reasons), or it is void and the exception says why.
Limit: a result file that is missing or damaged makes the run invalid; nothing is repaired.
"""

import datetime
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from board.agreement import agreement, switch_differences
from board.base import EMULATED_WARNINGS, Board, RunFailed, RunVoid
from board.cell import Plan
from board.phase_tokens import phase_tokens, with_hints
from board.progress import Progress
from board.results import Partial, Results, is_disk_trouble
from toolchain import bundled
from toolchain.command import Cancelled
from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.git import git_output

INSTRUMENTS = ("observer", "profiler", "truth")
"""Those that count saves: the record has a place for each, asked or not."""
VOID_ATTEMPTS = 3
"""How often a cell is begun whose board is restarted under it."""


@dataclass(frozen=True)
class Outcome:
    """A run that ended and is kept in `directory`.

    reasons: why it is invalid; empty for a valid run.  details: what was seen, a line or more each,
    the last console lines included; it has been shown.
    """

    directory: Path
    reasons: tuple[str, ...]
    details: tuple[str, ...]


def execute(
    board: Board,
    plan: Plan,
    calibration: Mapping[str, Any] | None,
    results: Results,
    progress: Progress,
    cancel: threading.Event,
    *,
    jobs: int,
) -> Outcome:
    """Run the plan's cell as its next attempt; called from several threads at once.

    A run that is void by the board's doing is begun again, twice at most.  Raises
    toolchain.command.Cancelled (the run is void) and EnvironmentUnfit (no room, ...); whatever is
    raised, `cancel` is set: no other cell is begun.
    """
    for attempt in range(1, VOID_ATTEMPTS + 1):
        try:
            return _attempt(board, plan, calibration, results, progress, cancel, jobs)
        except RunVoid as error:
            if attempt == VOID_ATTEMPTS:
                cancel.set()
                raise EnvironmentUnfit(f"{plan.what}: void {attempt} times: {error}") from error
    raise AssertionError("the last attempt returns or raises")


def _attempt(
    board: Board,
    plan: Plan,
    calibration: Mapping[str, Any] | None,
    results: Results,
    progress: Progress,
    cancel: threading.Event,
    jobs: int,
) -> Outcome:
    if cancel.is_set():
        raise Cancelled(f"{plan.what}: cancelled before it started")
    partial = results.begin(plan.cell)
    progress.started(plan.hash, partial.run_id, plan.what)
    try:
        outcome = _measure(board, plan, calibration, results, partial, cancel, jobs)
    except RunVoid as error:
        progress.ended(plan.hash, "VOID", _set_aside(results, partial, error))
        raise
    except BaseException as error:
        cancel.set()
        progress.ended(plan.hash, "VOID", _set_aside(results, partial, error))
        if isinstance(error, OSError) and is_disk_trouble(error):
            raise EnvironmentUnfit(
                f"{partial.run_id}: cannot write its files: {error.strerror}: earlier results are "
                "untouched; free some space or pass --results DIR, then run the same again"
            ) from error
        raise
    verdict = "INVALID" if outcome.reasons else "OK"
    progress.ended(plan.hash, verdict, ", ".join(outcome.reasons), outcome.details)
    return outcome


def _set_aside(results: Results, partial: Partial, error: BaseException) -> str:
    """Void or remove a run that `error` stopped; says which."""
    disk = error if isinstance(error, OSError) else error.__cause__
    if isinstance(disk, OSError) and is_disk_trouble(disk):
        results.discard(partial)
        return "its files were removed: they could not be written"
    why = "interrupted" if isinstance(error, Cancelled) else f"stopped: {error}"
    return f"{why.splitlines()[0]}; its logs: {results.void(partial, why)}"


def _measure(
    board: Board,
    plan: Plan,
    calibration: Mapping[str, Any] | None,
    results: Results,
    partial: Partial,
    cancel: threading.Event,
    jobs: int,
) -> Outcome:
    started_at, started_s = _now(), time.monotonic()
    failure: dict[str, str] | None = None
    facts: Mapping[str, Any] = {"host_cpu_s": None}
    try:
        facts = board.run(plan.cell, partial.path, deadline_s=plan.deadline_s, cancel=cancel)
    except RunFailed as error:
        if results.is_full():
            # Its reason would only be how a full disk looks from inside.
            raise EnvironmentUnfit(
                f"{partial.run_id}: the disk of {results.root} is full ({error.reason}): "
                "earlier results are untouched; free some space, then run the same again"
            ) from error
        failure = {"reason": error.reason, "detail": error.detail}
        facts = {**facts, **error.facts}
    reasons = [failure["reason"]] if failure else []
    details = [failure["detail"]] if failure else []
    judged = _judged(board, plan.cell, calibration, partial.path, reasons, details)
    reasons = list(dict.fromkeys(reasons))
    record = {
        "schema_version": "1",
        "run_id": partial.run_id,
        "cell": plan.cell,
        "environment": {
            "attempt": partial.attempt,
            "started_at": started_at,
            "ended_at": _now(),
            "argv": sys.argv,
            "jobs": jobs,
            "disk_bytes": _size_bytes(partial.path),
            "failure": failure,
            "order": plan.order,
            "host_wall_s": time.monotonic() - started_s,
            **host(),
            **facts,
        },
        "calibration": calibration,
        **judged,
        "valid": not reasons,
        "invalid_reasons": reasons,
    }
    directory = results.finish(partial, record)
    return Outcome(directory, tuple(reasons), tuple(details))


def _judged(
    board: Board,
    cell: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    directory: Path,
    reasons: list[str],
    details: list[str],
) -> dict[str, Any]:
    """What the board delivered, as the record has it; what speaks against it joins the lists."""
    agent = _result(directory / "agent.json", "agent", reasons, details)
    loadgen = _result(directory / "loadgen.json", "loadgen", reasons, details)
    if loadgen:
        _judge_load(loadgen, cell, reasons, details)
    for part in (agent, loadgen, calibration):
        reasons += part["invalid_reasons"] if part else []
    if agent and "kernel-warning" in reasons:
        _judge_warnings(board, agent["platform"]["kernel_warnings"], reasons, details)
    counted = _instruments(cell["instruments"], directory, reasons, details)
    agreed = agreement(*(counted[name] for name in INSTRUMENTS))
    if agreed and not agreed["agrees"]:
        reasons.append("instruments-disagree")
        details += [f"instruments: {line}" for line in agreed["differences"]]
    if differences := switch_differences(agent, counted.get("switches")):
        reasons.append("switches-disagree")
        details += [f"switches: {line}" for line in differences]
    scheduled = _scheduler(cell, directory, reasons, details)
    told = phase_tokens(cell, agent, loadgen, scheduled)
    if told is None and agent and loadgen and scheduled and with_hints(cell):
        reasons.append("phase-tokens-unknown")
    if told and not told["agrees"]:
        reasons.append("phase-tokens-disagree")
        details += [f"phase tokens: {line}" for line in told["differences"]]
    return {
        "platform": agent["platform"] if agent else None,
        "loadgen": loadgen,
        **counted,
        "scheduler": {"kernel": agent["scheduler"], "document": scheduled} if agent else None,
        "phase_tokens": told,
        "bystanders": agent["bystanders"] if agent else None,
        "agreement": agreed,
    }


def _judge_load(
    loadgen: Mapping[str, Any], cell: Mapping[str, Any], reasons: list[str], details: list[str]
) -> None:
    if strange := _strange_load(loadgen["config"], cell):
        reasons.append("load-mismatch")
        details.append(f"loadgen.json: {strange}")
    figures = loadgen["invalid_details"]
    details += [f"loadgen.json: {reason}: {figures[reason]}" for reason in figures]


def _judge_warnings(
    board: Board, warnings: Sequence[str], reasons: list[str], details: list[str]
) -> None:
    """Show them; those that come of being emulated are no reason on the virtual board."""
    details += [f"kernel: {line}" for line in warnings]
    # Decided here, not by the agent: what that is told is part of what the board computes.
    emulated = warnings and all(line.startswith(EMULATED_WARNINGS) for line in warnings)
    if board.platform == "virtual" and emulated:
        reasons.remove("kernel-warning")


def _instruments(
    asked: Sequence[str], directory: Path, reasons: list[str], details: list[str]
) -> dict[str, dict[str, Any] | None]:
    """What each instrument wrote, None for those not asked; its own objections become reasons."""
    return {
        name: _written_by(name, directory, reasons, details) if name in asked else None
        for name in dict.fromkeys([*INSTRUMENTS, *asked])
    }


def _written_by(
    name: str, directory: Path, reasons: list[str], details: list[str]
) -> dict[str, Any] | None:
    """What a program on the board wrote; that there is nothing, and its objections, are reasons."""
    path = directory / f"{name}.json"
    if not path.exists():
        if not reasons:  # a run stopped short need not have one
            reasons.append(f"{name}-missing")
            details.append(f"{path.name}: the board delivered no such file")
        return None
    document = _result(path, name, reasons, details)
    for objection in (document or {}).get("invalid_reasons", []):
        reasons.append(objection)
    for problem in (document or {}).get("problems", []):
        reasons.append(f"{name}-problem")
        details.append(f"{path.name}: {problem}")
    return document


def _scheduler(
    cell: Mapping[str, Any], directory: Path, reasons: list[str], details: list[str]
) -> dict[str, Any] | None:
    """What scx_vstate wrote; it must have been set as the cell says."""
    asked = cell["scheduling"]["scheduler"]
    if asked is None:
        return None
    document = _written_by("scheduler", directory, reasons, details)
    if document is None:
        return None
    found = {**document, **document["knobs"]}
    for key, value in {**asked, **asked["knobs"]}.items():
        if found[key] != value and key != "knobs":
            reasons.append("scheduler-settings")
            details.append(f"scheduler.json: {key} is {found[key]!r}, the cell's is {value!r}")
    if document["ejected"]:
        why = document["ejected"]
        details.append(f"scheduler.json: ejected: {why['reason']}: {why['message']}")
    return document


def _result(path: Path, name: str, reasons: list[str], details: list[str]) -> dict[str, Any] | None:
    """A result file of the board, or None and why; a run stopped short need not have one."""
    if not path.exists():
        if not reasons:
            reasons.append("no-results")
            details.append(f"{path.name}: the board delivered no such file")
        return None
    try:
        document: dict[str, Any] = schemas.read(path, name)
    except InvalidData as error:
        reasons.append("damaged-results")
        # The folder is about to move: the name alone stays true.
        details.append(str(error).replace(str(path), path.name))
        return None
    return document


def _strange_load(config: Mapping[str, Any], cell: Mapping[str, Any]) -> str | None:
    """How the load that was generated differs from the cell's, or None: a file of another run."""
    for key, asked in {**cell["load"], "concurrency": cell["concurrency"]}.items():
        if config[key] != asked:
            return f"{key} is {config[key]!r}, the cell's is {asked!r}"
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@functools.cache
def host() -> Mapping[str, Any]:
    """What the environment says of this host and checkout; the same for a whole process."""
    commit, dirty = _git()
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "python_version": platform.python_version(),
        "host_kernel": platform.release(),
        "host_architecture": platform.machine(),
        "host_cpu_model": _cpu_model(),
        "host_cpus": len(os.sched_getaffinity(0)),
    }


def _git() -> tuple[str | None, bool | None]:
    if commit := bundled.commit():
        return commit, None  # whether a file was changed since, `./inv bundle --check` tells
    commit = git_output(["rev-parse", "HEAD"])
    changes = git_output(["status", "--porcelain"]) if commit else None
    return (commit, None if changes is None else bool(changes))


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None

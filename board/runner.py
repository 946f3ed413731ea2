"""Running cells: one for `./inv run`, those of experiments for `./inv reproduce`.

Promise: a reproduction does only what has no valid run yet, tells what that costs before it starts,
and stops at once and in order when it is interrupted or cannot go on; runs that are kept are never
touched again.
Limit: one results folder takes one reproduction at a time.
"""

import dataclasses
import random
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import schemas
from analysis import expected_runs
from analysis.collect import CollectedRun, collect
from analysis.table import Expectation, print_table
from board.base import Board
from board.cell import Definitions, Overrides, Plan, plan_experiments, plan_run
from board.cost import Costs
from board.execute import Outcome, execute
from board.progress import Progress
from board.results import Results
from schemas.record import RECORD, fingerprint
from toolchain.command import Cancelled, interrupt_sets, interrupt_stops_all
from toolchain.errors import Differs, InvalidData, UsageError
from toolchain.say import say

_INTERRUPTED = 130


def run_one(
    board: Board,
    overrides: Overrides,
    results_dir: Path,
    *,
    definitions: Definitions | None = None,
) -> Path:
    """Run one cell; prints the run's folder as the last line of standard output and returns it.

    Raises UsageError, EnvironmentUnfit, KeyboardInterrupt (the run is void), and, its folder
    printed all the same, InvalidData when it is invalid, Differs when it is not the expected one.
    """
    plan = plan_run(definitions or Definitions.read(), overrides, board)
    results = _open(results_dir)
    costs = Costs(results.records.values())
    results.require_space(costs.mib(plan))
    say(f"{plan.what} on board {board.name}: {costs.in_words([plan], 1)}")
    board.begin()
    with Progress(1, 1, {plan.hash: costs.cpu_s(plan)}) as progress:
        [outcome] = _execute_all(board, [plan], results, progress, jobs=1)
    print(outcome.directory, flush=True)
    if outcome.reasons:
        raise InvalidData(
            f"the run is invalid: {', '.join(outcome.reasons)}; it is kept in {outcome.directory}"
        )
    compared = expected_runs.compare(
        run for run in collect(results.root) if run.cell_hash == plan.hash
    )
    if compared.differing:
        raise Differs(f"{compared.sentence}: {compared.differing[0]}")
    if compared.equal:
        say(compared.sentence)
    return outcome.directory


def reproduce(
    experiments: Sequence[str],
    board: Board,
    results_dir: Path,
    jobs: int | None,
    full: bool,
    *,
    accept: bool = False,
    shard: tuple[int, int] = (1, 1),
    only: Mapping[str, Sequence[str] | None] | None = None,
    definitions: Definitions | None = None,
) -> int:
    """Run the cells of the experiments that have no valid run, then collect and print the table.

    experiments: names; none means all, but those for a full reproduction only if `full`.
    jobs: cells at the same time; None means as many as the board runs by itself.
    shard: (k, n): only each n-th cell, from the k-th on, by hash; merge.py puts folders together.
    only: a key of the cell (policy, scope, concurrency, seed) -> the values it may have.
    accept: make the runs the expected ones, artifact/expected/runs.json, instead of comparing.
    Returns the exit code: 0; 1 an answer or a run is not the expected one; 4 a cell has no valid
    run; 130 interrupted.  Raises UsageError, EnvironmentUnfit and InvalidData.
    """
    count = board.jobs if jobs is None else jobs
    if count < 1:
        raise UsageError(f"--jobs {count}: expected an integer from 1")
    if count > 1 and not board.parallel:
        raise UsageError(f"--jobs {count}: board {board.name} runs one cell at a time")
    definitions = definitions or Definitions.read()
    names = definitions.chosen(experiments, full=full, platform=board.platform)
    results = _open(results_dir)
    with results.reproducing():
        try:
            for name in names:
                experiment = definitions.experiments["experiments"][name]
                say(f"{name}, {experiment['title']}: {experiment['purpose']}")
            plans = plan_experiments(definitions, names, board)
            for name in names:
                hashes = [plan.hash for plan in plans if plan.experiment == name]
                results.remember(name, board.name, hashes)
            plans = _shard(_chosen(plans, only or {}), *shard)
            _run_missing(board, plans, results, count)
            return _conclude(results.root, plans, accept)
        except KeyboardInterrupt:
            say("interrupted: nothing is left running; the same command goes on from here")
            return _INTERRUPTED


def _chosen(plans: Sequence[Plan], only: Mapping[str, Sequence[str] | None]) -> Sequence[Plan]:
    """The cells that have the values asked for; a cell without the key (a scope) has them all."""
    for key, values in only.items():
        known = sorted({str(plan.cell[key]) for plan in plans} - {str(None)})
        for value in values or ():
            if value not in known:
                raise UsageError(
                    f"--{key} {value}: no cell asked for has it; there are: {', '.join(known)}"
                )
        if values:
            plans = [plan for plan in plans if str(plan.cell[key]) in (*values, str(None))]
    return plans


def _shard(plans: Sequence[Plan], k: int, n: int) -> list[Plan]:
    """The cells of one shard of n: the same on every machine, whatever has been run there."""
    mine = set(sorted({plan.hash for plan in plans})[k - 1 :: n])
    return [plan for plan in plans if plan.hash in mine]


def _run_missing(board: Board, plans: Sequence[Plan], results: Results, jobs: int) -> None:
    """Run the plans that have no valid run, but those whose run is invalid for everybody.

    Side by side the longest first, so that no job idles at the end; on a board that runs one after
    the other in interleaved order, so that what changes over the hours changes for all policies.
    """
    costs = Costs(results.records.values())
    distinct = list({plan.hash: plan for plan in plans}.values())
    done = {plan.hash: _settled(results, plan) for plan in distinct}
    missing = [plan for plan in distinct if done[plan.hash] is None]
    if board.parallel:
        missing.sort(key=costs.cpu_s, reverse=True)
    else:
        missing = interleaved(missing)
    results.require_space(sum(costs.mib(plan) for plan in missing))
    say(
        f"{len(distinct)} cells on board {board.name}, {len(distinct) - len(missing)} done before: "
        + (costs.in_words(missing, jobs) if missing else "nothing to run")
    )
    if missing:
        board.begin()
    expected_s = {plan.hash: costs.cpu_s(plan) for plan in missing}
    with Progress(len(distinct), jobs, expected_s) as progress:
        for plan in distinct:
            if record := done[plan.hash]:
                progress.skipped(plan.hash, record["run_id"], plan.what, valid=record["valid"])
        _execute_all(board, missing, results, progress, jobs=jobs)


def _settled(results: Results, plan: Plan) -> Mapping[str, Any] | None:
    """A valid record of the cell, or the invalid one that everybody gets."""
    return results.valid_record(plan.cell) or next(
        (
            record
            for record in results.records.values()
            if record["cell"] == plan.cell
            and expected_runs.invalid_for_everybody(plan.hash, fingerprint(record))
        ),
        None,
    )


def interleaved(plans: Sequence[Plan]) -> list[Plan]:
    """The plans in a random order of blocks that each hold all policies, and its seed in each.

    A block is the cells that differ in the policy only; within it the policies are shuffled, too,
    so that none is always the first on a cold board.  The seed follows from the cells: the same
    command gives the same order.
    """
    blocks: dict[bytes, list[Plan]] = {}
    for plan in sorted(plans, key=lambda plan: plan.hash):
        load = plan.cell["load"]
        block = (plan.experiment, plan.cell["model"], plan.cell["concurrency"], plan.cell["seed"])
        blocks.setdefault(schemas.canonical([*block, load]), []).append(plan)
    seed = zlib.crc32("".join(sorted(plan.hash for plan in plans)).encode())
    chance = random.Random(seed)
    order = list(blocks.values())
    chance.shuffle(order)
    for block_plans in order:
        chance.shuffle(block_plans)
    shuffled = [plan for block_plans in order for plan in block_plans]
    return [
        dataclasses.replace(plan, order={"seed": seed, "position": number, "of": len(shuffled)})
        for number, plan in enumerate(shuffled, start=1)
    ]


def _execute_all(
    board: Board, plans: Sequence[Plan], results: Results, progress: Progress, *, jobs: int
) -> list[Outcome]:
    """Run the plans side by side; when one cannot go on the others are stopped, then it raises."""
    # One after the other: plans share a machine, and its calibration is made only once.
    with interrupt_stops_all():
        calibrations: list[Mapping[str, Any] | None] = [
            board.calibration(plan.cell) for plan in plans
        ]
    cancel = threading.Event()
    with interrupt_sets(cancel), ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [
            pool.submit(execute, board, plan, calibration, results, progress, cancel, jobs=jobs)
            for plan, calibration in zip(plans, calibrations, strict=True)
        ]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, Cancelled):
            raise error
    return [future.result() for future in futures]


def _conclude(root: Path, plans: Sequence[Plan], accept: bool) -> int:
    """Write summary.csv, print the table and what was expected; returns the exit code."""
    runs = collect(root)
    planned = {plan.hash for plan in plans}
    asked = [run for run in runs if run.cell_hash in planned]
    valid = {run.cell_hash: run for run in reversed(runs) if run.row["valid"]}
    expectations = [
        Expectation(run.row["run_id"], plan.what, plan.expect_text, run.texts)
        for plan in plans
        if plan.expect_text is not None and (run := valid.get(plan.hash)) is not None
    ]
    print_table(runs, expectations)
    bad = {
        run.cell_hash: run.row["invalid_reasons"]
        for run in asked
        if expected_runs.invalid_for_everybody(run.cell_hash, run.fingerprint)
    }
    differs = not _as_expected(asked, accept)
    for plan in plans:
        if plan.hash in bad:
            say(f"{plan.what}: invalid, as for everybody: {bad[plan.hash]}")
    without = [plan for plan in plans if plan.hash not in valid and plan.hash not in bad]
    unmet = [expectation for expectation in expectations if not expectation.met]
    for plan in without:
        say(f"no valid run of {plan.what}; the same command tries it again")
    say(f"one row per run: {root / 'summary.csv'}; {RECORD} and logs: {root / 'runs'}")
    if without:
        return InvalidData.exit_code
    return Differs.exit_code if unmet or differs else 0


def _as_expected(runs: Sequence[CollectedRun], accept: bool) -> bool:
    """Say how the runs compare with the expected ones, or make them these; False: one differs."""
    if accept:
        for line in expected_runs.remember(runs):
            print(f"expected from now on: {line}")
        return True
    compared = expected_runs.compare(runs)
    for line in compared.differing:
        print(line)
    if compared.equal or compared.differing or compared.unknown:  # none on a real machine
        print(compared.sentence)
    return not compared.differing


def _open(results_dir: Path) -> Results:
    results = Results(results_dir)
    for path in results.sweep():
        say(f"void: {path.name} was left behind by a killed process; its logs: {path}")
    return results

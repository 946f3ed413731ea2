"""Where the time of a run goes on the virtual board, to the instruction: work, waiting, the rest.

Promise: the board's harts share one instruction clock (docs/calibration.md), so a window's length
is a number of instructions, 2^shift ns each.  Each is of one of three kinds, two of which the
emulator counts: what the server executes outside waiting loops (work), inside them (waiting), and
the rest: kernel, scheduler, client, bystanders, idle harts.  Throughput is tokens over their sum,
so what a policy gains is the sum of three differences, and nothing is left to explain.
Limit: what vector state costs is part of the rest and only bounded: each save, with its restore, at
the most that was measured for a context switch.  On a machine with caches it costs more; what the
report's own figures allow is the audit's finding cost/explains-gain (docs/audit.md).
"""

from collections.abc import Mapping

from analysis.collect import CollectedRun
from analysis.stats import Sample, Value, sample
from analysis.tables import Entry, Group, MeanSd, Table, percent, policy_order
from analysis.tables import label as policy_label
from toolchain.errors import InvalidData

VSTATE_INSTRUCTIONS_AT_MOST = 116
"""Of a save with its restore: the upper end of the widest interval of docs/x86.md (VLEN 1024)."""

_KINDS = {
    "window": (0, 1),
    "work": (0, 1),
    "waiting": (0, 1),
    "rest": (0, 1),
    "vector state, at most": (2, 3),
}
"""The columns, and with how many decimals they and their changes are shown."""

_MILLION = 1e6
_NS_PER_MS = 1e6
_NOTE = (
    "Million instructions in the window that throughput is measured in, of all harts together: "
    "mean ± sample standard deviation over n runs. work, waiting: of the server, outside and "
    "inside barrier and poll loops; rest: kernel, scheduler, client, bystanders, idle harts; "
    f"vector state: part of the rest, {VSTATE_INSTRUCTIONS_AT_MOST} instructions for each save "
    "with its restore (docs/x86.md). Changes: of the means, in per cent of the baseline's window "
    "at the same concurrency; those of work, waiting and rest add up to that of the window."
)


def accounting_table(group: Group) -> Table | None:
    """The table of a group; None where the emulator counted nothing or the clock is a real one."""
    counted = [(run, kinds) for run in group.runs if (kinds := window_kinds(run))]
    if not counted:
        return None
    cells: dict[tuple[int, str], list[tuple[CollectedRun, Mapping[str, float]]]] = {}
    for run, kinds in counted:
        cells.setdefault((run.row["concurrency"], policy_label(run.row)), []).append((run, kinds))
    samples = {
        key: {kind: _sample(key, kind, those) for kind in _KINDS} for key, those in cells.items()
    }
    ordered = sorted(samples, key=lambda key: (key[0], policy_order(key[1])))
    return Table(
        name=f"{group.name}-accounting",
        title=f"Where the time went: {group.title}",
        header=("c", "policy", "n", *_KINDS, *(f"change of {kind}" for kind in _KINDS)),
        rows=tuple(
            (
                str(key[0]),
                key[1],
                str(samples[key]["window"].n),
                *(_shown(samples[key][kind], decimals) for kind, (decimals, _) in _KINDS.items()),
                *_changes(samples[key], samples.get((key[0], "baseline")), key[1]),
            )
            for key in ordered
        ),
        note=_NOTE,
    )


def window_kinds(run: CollectedRun) -> dict[str, float] | None:
    """Instructions in the run's window by kind; None where they were not counted.

    Raises InvalidData if more were executed than the window has.
    """
    row, truth, machine = run.row, run.record.get("truth"), run.record["cell"]["machine"]
    if not truth or not machine or row["window_ms"] is None:
        return None
    window = row["window_ms"] * _NS_PER_MS / 2 ** machine["icount_shift"]
    work, waiting = truth["instructions"], truth["spin_instructions"]
    if work + waiting > window:
        raise InvalidData(
            f"{row['run_id']}: truth: {work + waiting} instructions of the server, expected at "
            f"most the {window:.0f} of its window ({row['window_ms']:g} ms of "
            f"2^{machine['icount_shift']} ns each): leave the run out, or run its cell again"
        )
    return {
        "window": window,
        "work": work,
        "waiting": waiting,
        "rest": window - work - waiting,
        "vector state, at most": row["save_count"] * VSTATE_INSTRUCTIONS_AT_MOST,
    }


def _sample(
    key: tuple[int, str], kind: str, those: list[tuple[CollectedRun, Mapping[str, float]]]
) -> Sample:
    return sample(
        f"{key[1]} c={key[0]}",
        [
            Value(run.row["run_id"], run.row["platform"], run.row["seed"], kinds[kind] / _MILLION)
            for run, kinds in those
        ],
    )


def _shown(one: Sample, decimals: int) -> MeanSd:
    return MeanSd(one.mean, one.sd, decimals)


def _changes(
    those: Mapping[str, Sample], baseline: Mapping[str, Sample] | None, policy: str
) -> tuple[Entry, ...]:
    if baseline is None or policy == "baseline":
        return (None,) * len(_KINDS)
    whole = baseline["window"].mean
    return tuple(
        percent(1 + (those[kind].mean - baseline[kind].mean) / whole, decimals)
        for kind, (_, decimals) in _KINDS.items()
    )

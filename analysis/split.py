"""What the three instruments counted, run by run, and what the saved registers were worth.

Promise: a row per valid run and nothing averaged: the three counts side by side, the split that
only the observer knows, bytes as the emulator saw them, and the observer's own instructions beside
those of what it watches.
Limit: shows, does not judge: a run whose instruments disagree is invalid and not in it.
"""

from collections.abc import Mapping
from typing import Any

from analysis.tables import Entry, Group, Table

_SPLIT = ("compute", "spin", "discarded", "kernel")
_NOTE = (
    "Saves of the target's vector registers at context switches. compute: interrupted in the "
    "middle of work; spin: in a loop that only waits; discarded: the kernel itself had overwritten "
    "them at system call entry; kernel: those of vector code inside the kernel. Observer's "
    "instructions: executed inside its BPF programs, counted by the emulator, in per cent of the "
    "target's instructions outside waiting loops."
)


def split_table(group: Group) -> Table | None:
    """The table of a group, or None where no run has the observer's counts."""
    runs = [run for run in group.runs if run.record.get("observer")]
    if not runs:
        return None
    return Table(
        name=f"{group.name}-split",
        title=f"What was saved: {group.title}",
        header=(
            "c", "policy", "seed", "observer", "profiler", "missed", "truth", *_SPLIT, "switches",
            "bytes per save", "observer's instructions",
        ),
        rows=tuple(
            (*(str(run.row[key]) for key in ("concurrency", "policy", "seed")), *_row(run.record))
            for run in runs
        ),
        note=_NOTE,
    )  # fmt: skip


def _row(record: Mapping[str, Any]) -> tuple[Entry, ...]:
    observer, truth, agreed = record["observer"], record["truth"], record["agreement"]
    totals = observer["totals"]
    saves = agreed["saves"] if agreed else {"observer": totals["user_saves"]}
    counted = [saves.get("observer"), saves.get("profiler")]
    counted += [agreed["profiler_missed"] if agreed else None, saves.get("truth")]
    counted += [*(totals[f"{kind}_saves"] for kind in _SPLIT), totals["switches"]]
    return (*(None if number is None else str(number) for number in counted), *_measured(truth))


def _measured(truth: Mapping[str, Any] | None) -> tuple[Entry, Entry]:
    if not truth:
        return None, None
    stored = truth["saves"]["target"]
    own, target = sum(r["instructions"] for r in truth["ranges"]), truth["instructions"]
    return (
        f"{stored['bytes'] / stored['count']:g}" if stored["count"] else None,
        f"{100 * own / target:.3f} %" if target and truth["ranges"] else None,
    )

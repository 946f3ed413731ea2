"""What cells will cost the host.

Promise: as soon as a cell of the same kind (all but seed and inputs equal) has run validly in this
results folder, its measured cost is used in place of the expected one, and it is said which.
Limit: an estimate; wall time takes every job to have a processor of its own.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import schemas
from board.cell import Plan
from board.progress import words_for


class Costs:
    """Costs of plans, given the records of earlier runs."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._cpu_s: dict[bytes, list[float]] = {}
        self._mib: dict[bytes, list[float]] = {}
        for record in records:
            environment = record["environment"]
            # A board's cells cost the host no processor: there it is the time they take.
            cost_s = environment["host_cpu_s"]
            cost_s = environment["host_wall_s"] if cost_s is None else cost_s
            if record["valid"] and cost_s is not None:
                kind = _kind(record["cell"])
                self._cpu_s.setdefault(kind, []).append(cost_s)
                self._mib.setdefault(kind, []).append(environment["disk_bytes"] / 2**20)

    def cpu_s(self, plan: Plan) -> float:
        """CPU seconds one run of the plan is expected to take."""
        measured = self._cpu_s.get(_kind(plan.cell))
        return statistics.fmean(measured) if measured else plan.cost_cpu_s

    def mib(self, plan: Plan) -> float:
        """MiB one run of the plan is expected to keep in the results folder."""
        measured = self._mib.get(_kind(plan.cell))
        return statistics.fmean(measured) if measured else plan.cost_disk_mib

    def in_words(self, plans: Sequence[Plan], jobs: int) -> str:
        """The cost of the plans, together, on that many jobs."""
        each_s = [self.cpu_s(plan) for plan in plans]
        wall_s = max(sum(each_s) / jobs, max(each_s, default=0.0))
        measured = sum(_kind(plan.cell) in self._cpu_s for plan in plans)
        source = {0: "expected", len(plans): "measured here"}.get(
            measured, f"{measured} of {len(plans)} measured here, the others expected"
        )
        return (
            f"{words_for(wall_s)} with {jobs} job{'s' if jobs > 1 else ''}, "
            f"{sum(each_s):.0f} CPU-s, {sum(self.mib(plan) for plan in plans):.0f} MiB ({source})"
        )


def _kind(cell: Mapping[str, Any]) -> bytes:
    kept = {key: value for key, value in cell.items() if key not in ("seed", "inputs")}
    kept["load"] = {key: value for key, value in cell["load"].items() if key != "seed"}
    return schemas.canonical(kept)

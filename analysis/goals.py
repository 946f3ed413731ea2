"""How far each policy is from what scx_vstate is to reach (artifact/goals.toml).

Promise: a ratio of geometric means against the baseline of the same concurrency, with its 95 %
interval, and one word: `met` when the whole interval keeps the bound, `missed` when none of it
does, `open` when the bound is inside.  Of a policy that ran on fewer seeds than the baseline, both
count on the seeds that they share.
Limit: one interval at a time, not adjusted for their number: a table to steer by, no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import schemas
from analysis.stats import Refused, Sample, log_contrast, on_common_seeds
from analysis.tables import Entry, Group, Table, policy_order
from toolchain.paths import REPO

GOALS = REPO / "artifact" / "goals.toml"
MET, MISSED, OPEN = "met", "missed", "open"
_NOTE = (
    "Ratio of geometric means to the baseline of the same concurrency, with its 95 % interval"
    " (Welch, on logarithms); met, missed, or open where the bound is inside the interval."
)


@dataclass(frozen=True)
class Goal:
    """A bound of the ratio policy / baseline of a column of summary.csv."""

    metric: str
    title: str
    at_most: float | None = None
    at_least: float | None = None

    def word(self, low: float, high: float) -> str:
        """Whether the interval keeps the bound."""
        if self.at_most is not None:
            return MET if high <= self.at_most else MISSED if low > self.at_most else OPEN
        assert self.at_least is not None  # the schema wants one of the two
        return MET if low >= self.at_least else MISSED if high < self.at_least else OPEN

    @property
    def heading(self) -> str:
        """The title with the bound."""
        if self.at_most is not None:
            return f"{self.title} (≤ {self.at_most:g})"
        return f"{self.title} (≥ {self.at_least:g})"


def read_goals(path: Path = GOALS) -> list[Goal]:
    """The goals, in the file's order; raises InvalidData."""
    return [Goal(**goal) for goal in schemas.read_toml(path, "goals")["goals"]]


def goals_table(group: Group, goals: Sequence[Goal]) -> Table | None:
    """The table of a group, or None where there is no other policy than the baseline."""
    present = [goal for goal in goals if group.has(goal.metric)]
    samples = {goal.metric: group.cells(goal.metric) for goal in present}
    keys = sorted(
        {key for cells in samples.values() for key in cells if key[1] != "baseline"},
        key=lambda key: (key[0], policy_order(key[1])),
    )
    if not keys:
        return None
    return Table(
        name=f"{group.name}-goals",
        title=f"Goals: {group.title}",
        header=("c", "policy", *(goal.heading for goal in present)),
        rows=tuple(
            (str(c), policy, *(_entry(goal, samples[goal.metric], c, policy) for goal in present))
            for c, policy in keys
        ),
        note=_NOTE,
    )


def _entry(
    goal: Goal, cells: Mapping[tuple[int, str], Sample], concurrency: int, policy: str
) -> Entry:
    treatment, control = (cells.get((concurrency, name)) for name in (policy, "baseline"))
    if treatment is None or control is None:
        return None
    try:
        treatment, control = on_common_seeds([treatment, control])
        found = log_contrast([(1.0, treatment), (-1.0, control)])
    except Refused as refusal:
        return f"({refusal.name})"
    word = goal.word(found.low, found.high)
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] {word}"

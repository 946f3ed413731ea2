"""From runs to samples, cell means, and the tests that are made of them.

Promise: the sample is the run.  What would make a number without meaning is refused by name:

  empty-cell           no valid run in a cell that is compared
  too-few-runs         n < 2: one run has no variance
  zero-variance        all runs of a cell say the same: any difference would look significant
  requests-as-samples  one run gives several values
  repeated-seed        two runs of one seed in one sample
  unequal-sets         the cells that are compared do not have the same seeds
  mixed-platforms      a virtual and a real clock in one sample
  not-positive         a ratio of something that is zero, negative or no number
  coding               type III sums of squares without sum coding

Ratios are of geometric means, intervals are Welch's on the logarithms (analysis/contrasts.py).
Limit: seeds sample the randomness of one board with one binary; no test here makes them a sample
of boards.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats as distributions

from analysis.collect import CollectedRun
from analysis.contrasts import Contrast, LogSummary, contrast, log_of_runs
from toolchain.errors import InvalidData

_SAME = 1e-12
"""Relative spread up to which values count as equal: what adding in another order may change."""
_EXACT_ARRANGEMENTS = 200_000
_DRAWS = 10_000


class Refused(InvalidData):
    """A number that would mean nothing; `name` is one of this module's names."""

    def __init__(self, name: str, line: str) -> None:
        super().__init__(f"{name}: {line}")
        self.name = name
        self.line = line


@dataclass(frozen=True)
class Value:
    """One metric of one run."""

    run_id: str
    platform: str
    seed: int
    value: float


@dataclass(frozen=True)
class Sample:
    """The runs of one cell: a value per seed, sorted by seed."""

    label: str
    run_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (divisor n - 1); None for a single run."""
        return statistics.stdev(self.values) if self.n > 1 else None

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same but for rounding."""
        largest = max(map(abs, self.values))
        return max(self.values) - min(self.values) <= _SAME * largest

    def logs(self) -> LogSummary:
        """The summary of the logarithms; raises Refused."""
        if any(not value > 0 for value in self.values):
            raise Refused(
                "not-positive",
                f"{self.label}: found {min(self.values):g}, expected positive numbers",
            )
        self.require_variance()
        return log_of_runs(self.values)

    def require_variance(self) -> None:
        """Raise Refused unless there are two runs and they differ."""
        if self.n < 2:
            raise Refused("too-few-runs", f"{self.label}: n is {self.n}, expected at least 2")
        if self.is_constant:
            raise Refused(
                "zero-variance",
                f"{self.label}: all {self.n} runs have {self.values[0]:g}: a test says nothing",
            )


def sample(label: str, values: Iterable[Value]) -> Sample:
    """The sample of one cell; label: the cell in a few words.  Raises Refused."""
    ordered = sorted(values, key=lambda one: (one.seed, one.run_id))
    if not ordered:
        raise Refused("empty-cell", f"{label}: no valid run has this metric")
    platforms = sorted({one.platform for one in ordered})
    if len(platforms) > 1:
        raise Refused("mixed-platforms", f"{label}: runs of {' and '.join(platforms)}")
    if run_id := _twice(one.run_id for one in ordered):
        count = sum(one.run_id == run_id for one in ordered)
        raise Refused(
            "requests-as-samples",
            f"{label}: run {run_id} gives {count} values; the sample is the run: give its mean",
        )
    if (seed := _twice(one.seed for one in ordered)) is not None:
        raise Refused("repeated-seed", f"{label}: seed {seed} was run twice; it counts once")
    if strange := next((one for one in ordered if not math.isfinite(one.value)), None):
        raise Refused(
            "not-positive", f"{label}: run {strange.run_id} has {strange.value}, expected a number"
        )
    return Sample(
        label,
        tuple(one.run_id for one in ordered),
        tuple(one.seed for one in ordered),
        tuple(one.value for one in ordered),
    )


def _twice(items: Iterable[Any]) -> Any:
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def first_valid(runs: Iterable[CollectedRun]) -> list[CollectedRun]:
    """Of each cell its first valid run; the others say the same, or are no independent sample.

    The runs must come in order (analysis.collect.in_order).
    """
    first: dict[str, CollectedRun] = {}
    for run in runs:
        if run.row["valid"]:
            first.setdefault(run.cell_hash, run)
    return list(first.values())


def require_same_seeds(samples: Sequence[Sample]) -> None:
    """Raise Refused unless all samples have the same seeds."""
    first, *others = samples
    for other in others:
        if other.seeds != first.seeds:
            raise Refused(
                "unequal-sets",
                f"{first.label} has seeds {_seeds(first)}, {other.label} has {_seeds(other)}",
            )


def on_common_seeds(samples: Sequence[Sample]) -> list[Sample]:
    """The samples cut down to the seeds that all of them have; raises Refused if there is none."""
    common = set(samples[0].seeds).intersection(*(each.seeds for each in samples[1:]))
    if not common:
        raise Refused("unequal-sets", f"{samples[0].label} and the others have no seed in common")
    cut = []
    for each in samples:
        kept = [place for place, seed in enumerate(each.seeds) if seed in common]
        cut.append(
            Sample(
                each.label,
                tuple(each.run_ids[place] for place in kept),
                tuple(each.seeds[place] for place in kept),
                tuple(each.values[place] for place in kept),
            )
        )
    return cut


def _seeds(one: Sample) -> str:
    return ", ".join(map(str, one.seeds))


def log_contrast(terms: Sequence[tuple[float, Sample]]) -> Contrast:
    """exp(sum of weight x mean log), Welch's interval: (1, a), (-1, b) is a/b.  Raises Refused."""
    require_same_seeds([one for _, one in terms])
    return contrast([one.logs() for _, one in terms], [weight for weight, _ in terms])


@dataclass(frozen=True)
class Difference:
    """Treatment minus control in the metric's unit; Welch's 95 % interval, p against 0."""

    estimate: float
    low: float
    high: float
    p: float
    df: float


def difference(treatment: Sample, control: Sample) -> Difference:
    """For what may be zero or negative, so that there is no ratio.  Raises Refused."""
    require_same_seeds([treatment, control])
    treatment.require_variance()
    control.require_variance()
    result: Any = distributions.ttest_ind(treatment.values, control.values, equal_var=False)
    interval = result.confidence_interval(0.95)
    return Difference(
        estimate=treatment.mean - control.mean,
        low=float(interval.low),
        high=float(interval.high),
        p=float(result.pvalue),
        df=float(result.df),
    )


def permutation_p(strata: Sequence[tuple[Sample, Sample]]) -> float:
    """Two-sided p of "the label means nothing", labels exchanged only within a stratum.

    The statistic is the sum over strata of the difference of mean logarithms.  Exact while there
    are few arrangements, else drawn with a fixed seed; either way the same digits every time.
    With one stratum of 3 and 3 runs it cannot be below 0.1.  Raises Refused.
    """
    logs = []
    observed = 0.0
    for treatment, control in strata:
        treatment.logs()
        control.logs()
        logs.append((np.log(np.asarray(treatment.values + control.values)), treatment.n))
        observed += _spread(logs[-1][0][None, :], treatment.n)[0]
    arrangements = math.prod(math.comb(len(both), count) for both, count in logs)
    if arrangements <= _EXACT_ARRANGEMENTS:
        total = np.zeros(1)
        for both, count in logs:
            chosen = np.asarray(list(itertools.combinations(range(len(both)), count)))
            sums = both[chosen].sum(axis=1)
            spread = sums / count - (both.sum() - sums) / (len(both) - count)
            total = np.add.outer(total, spread).ravel()
        return float(np.mean(_as_far(total, observed)))
    random = np.random.default_rng(1)
    total = np.zeros(_DRAWS)
    for both, count in logs:
        shuffled = random.permuted(np.tile(both, (_DRAWS, 1)), axis=1)
        total += _spread(shuffled, count)
    return float((np.count_nonzero(_as_far(total, observed)) + 1) / (_DRAWS + 1))


def _spread(logs: "np.ndarray[Any, np.dtype[np.float64]]", count: int) -> Any:
    """Per line: mean of the first `count` minus mean of the others."""
    return logs[:, :count].mean(axis=1) - logs[:, count:].mean(axis=1)


def _as_far(total: "np.ndarray[Any, np.dtype[np.float64]]", observed: float) -> Any:
    return np.abs(total) >= abs(observed) * (1 - 1e-9)


# -------------------------------------------------------------------------------- ANOVA


@dataclass(frozen=True)
class Effect:
    """A line of the analysis of variance; the residual has no F, p and partial eta squared."""

    source: str
    sum_sq: float
    df: int
    f: float | None
    p: float | None
    partial_eta_sq: float | None


@dataclass(frozen=True)
class Anova:
    """Two-way analysis of variance of policy x concurrency, with what it was made of in words."""

    effects: tuple[Effect, ...]
    n: int
    note: str


def anova(
    cells: Mapping[tuple[str, int], Sample],
    *,
    scale: Literal["log", "raw"] = "log",
    typ: Literal[2, 3] = 2,
    coding: Literal["sum", "treatment"] = "sum",
) -> Anova:
    """Policy x concurrency, every combination of those that occur; made by statsmodels.

    Raises Refused: an empty cell, n < 2, no variance, type III without sum coding.
    """
    if typ == 3 and coding != "sum":
        raise Refused(
            "coding",
            "type III with treatment coding tests the effect at the reference level only; "
            "use sum coding, or type II",
        )
    policies = sorted({policy for policy, _ in cells})
    concurrencies = sorted({concurrency for _, concurrency in cells})
    if min(len(policies), len(concurrencies)) < 2:
        raise Refused("empty-cell", "two-way needs two policies and two concurrencies")
    for key in itertools.product(policies, concurrencies):
        if key not in cells:
            raise Refused("empty-cell", f"{key[0]} c={key[1]} has no runs: the table has a hole")
        cells[key].require_variance()
        if scale == "log":
            cells[key].logs()
    data = pd.DataFrame(
        [
            {"y": math.log(value) if scale == "log" else value, "policy": p, "c": str(c)}
            for (p, c), one in sorted(cells.items())
            for value in one.values
        ]
    )
    # Imported here: it takes two seconds, which a verb that only prints verdicts need not spend.
    import statsmodels.api as sm  # type: ignore[import-untyped]
    from statsmodels.formula.api import ols  # type: ignore[import-untyped]

    how = "Sum" if coding == "sum" else "Treatment"
    table = sm.stats.anova_lm(ols(f"y ~ C(policy, {how}) * C(c, {how})", data).fit(), typ=typ)
    names = {
        f"C(policy, {how})": "policy",
        f"C(c, {how})": "concurrency",
        f"C(policy, {how}):C(c, {how})": "policy x concurrency",
        "Residual": "residual",
    }
    residual = float(table.loc["Residual", "sum_sq"])
    effects = []
    for row, name in names.items():
        line = table.loc[row]
        tested = name != "residual"
        square = float(line["sum_sq"])
        effects.append(
            Effect(
                source=name,
                sum_sq=square,
                df=int(line["df"]),
                f=float(line["F"]) if tested else None,
                p=float(line["PR(>F)"]) if tested else None,
                partial_eta_sq=square / (square + residual) if tested else None,
            )
        )
    unit = "logarithms" if scale == "log" else "raw values"
    note = f"type {'II' if typ == 2 else 'III'}, {coding} coding, {unit}, {len(data)} runs"
    return Anova(tuple(effects), len(data), note)

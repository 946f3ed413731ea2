"""Small statistics that the audit and the analysis share: ratios of cells, on the log scale.

Promise: times and counts are compared as ratios.  A cell is summarised by mean, sd and n of its
natural logarithms; a contrast is a weighted sum of such means with Welch's variance and
Satterthwaite's degrees of freedom, so cells may differ in spread and size.  Nothing here is
random: the same input gives the same digits.
Limit: the sample is the run.  Normality of the logarithms is assumed; at n = 3 it cannot be tested.
What is refused (n < 2, a mean that is not positive, no variance at all) raises ValueError with one
line; the caller adds the file and the cell.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

LEVEL = 0.95
ALPHA = 0.05
_QUANTILES = 64  # per variance in `power_curve`: 64 x 64 midpoints agree with 400 x 400 to 3 digits
_QUANTILES_OF_MANY = 14  # the same for up to 4 cells: within 0.01
_ANGLES = 31  # per triple in `p_range`


@dataclass(frozen=True)
class Summary:
    """What a table prints of one cell: mean and sample sd (divisor n - 1) of n runs, one unit."""

    mean: float
    sd: float
    n: int

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"n is {self.n}, expected at least 2: one run has no variance")
        if not (math.isfinite(self.mean) and self.mean > 0):
            raise ValueError(f"mean is {self.mean}, expected a positive number")
        if not (math.isfinite(self.sd) and self.sd >= 0):
            raise ValueError(f"sd is {self.sd}, expected a number from 0")


@dataclass(frozen=True)
class LogSummary:
    """Mean and sample sd of the natural logarithms of n runs; exp(mean) is the geometric mean."""

    mean: float
    sd: float
    n: int

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"n is {self.n}, expected at least 2: one run has no variance")


@dataclass(frozen=True)
class Contrast:
    """A ratio with its interval; `log` and `se` are on the log scale, p is two-sided against 1."""

    ratio: float
    low: float
    high: float
    p: float
    df: float
    log: float
    se: float

    def p_below(self, bound: float) -> float:
        """One-sided p of "the ratio is not below `bound`" (small: it is below).

        For a cost (time, saves): non-inferiority with a margin of 5 % is p_below(1.05), and a
        difference that is merely not significant shows no such thing.
        """
        return float(stats.t.cdf((self.log - math.log(bound)) / self.se, self.df))

    def p_above(self, bound: float) -> float:
        """One-sided p of "the ratio is not above `bound`" (small: it is above)."""
        return float(stats.t.sf((self.log - math.log(bound)) / self.se, self.df))


def log_of_runs(values: Sequence[float]) -> LogSummary:
    """Summary of the logarithms of runs, all positive; raises ValueError otherwise."""
    if any(not (math.isfinite(value) and value > 0) for value in values):
        raise ValueError(f"found {min(values)}, expected positive numbers: a ratio needs them")
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) < 2:
        raise ValueError(f"n is {len(logs)}, expected at least 2: one run has no variance")
    return LogSummary(float(logs.mean()), float(logs.std(ddof=1)), len(logs))


def log_of_summary(cell: Summary) -> LogSummary:
    """The log summary of a cell of which only mean and sd are known, to second order.

    variance = ln(1 + (sd/mean)^2), as for a log-normal; mean = ln(mean) - variance (n - 1)/(2n),
    which is the logarithm of the geometric mean of the n runs themselves (their own variance has
    divisor n).  How much a p-value depends on the runs not being known is what `p_range` answers.
    """
    variance = math.log1p((cell.sd / cell.mean) ** 2)
    mean = math.log(cell.mean) - variance * (cell.n - 1) / (2 * cell.n)
    return LogSummary(mean, math.sqrt(variance), cell.n)


def contrast(
    cells: Sequence[LogSummary], weights: Sequence[float], level: float = LEVEL
) -> Contrast:
    """exp(sum of weight x log mean) with Welch's interval; weights sum to 0 for a pure ratio.

    (a, b), (1, -1) is the ratio a/b; (a, b, c, d), (1, -1, -1, 1) is the ratio of ratios
    (a/b)/(c/d).  Raises ValueError when no cell that counts has any variance: then a p-value
    says nothing (deterministic runs of one seed, for example).
    """
    if len(cells) != len(weights):
        raise ValueError(f"{len(cells)} cells but {len(weights)} weights")
    parts = [(w * c.sd) ** 2 / c.n for c, w in zip(cells, weights, strict=True)]
    variance = sum(parts)
    if variance <= 0:
        raise ValueError("no variance between runs: any difference would look significant")
    df = variance**2 / sum(v**2 / (c.n - 1) for v, c in zip(parts, cells, strict=True))
    log = sum(w * c.mean for c, w in zip(cells, weights, strict=True))
    se = math.sqrt(variance)
    half = float(stats.t.ppf((1 + level) / 2, df)) * se
    p = float(2 * stats.t.sf(abs(log) / se, df))
    return Contrast(math.exp(log), math.exp(log - half), math.exp(log + half), p, df, log, se)


def ratio(treatment: LogSummary, control: LogSummary, level: float = LEVEL) -> Contrast:
    """treatment / control."""
    return contrast((treatment, control), (1.0, -1.0), level)


def p_range(cells: Sequence[Summary], weights: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest p of the contrast over all runs that have the printed means and sds.

    Three runs with mean m and sd s are m + s sqrt(4/3) cos(angle + 120 degrees k), k = 0, 1, 2, for
    some angle in [0, 60] degrees (other angles repeat the same three).  So with n = 3 the unknown
    is one angle per cell; a grid covers it, ends included.  Up to 4 cells with n = 3.  Raises
    ValueError for another n, and where a triple would hold a number that is not positive.
    """
    if any(cell.n != 3 for cell in cells):
        raise ValueError("p_range knows all samples only for n = 3")
    if len(cells) > 4:
        raise ValueError(f"{len(cells)} cells, expected at most 4")
    count = _ANGLES if len(cells) <= 2 else 9
    angles = np.linspace(0, math.pi / 3, count)
    phases = 2 * math.pi / 3 * np.arange(3)
    log, variance, squares = np.zeros(1), np.zeros(1), np.zeros(1)
    for cell, weight in zip(cells, weights, strict=True):
        waves = np.cos(angles[:, None] + phases[None, :])
        runs = cell.mean + cell.sd * math.sqrt(4 / 3) * waves
        if runs.min() <= 0:
            raise ValueError(f"mean {cell.mean} and sd {cell.sd} allow a run that is not positive")
        logs = np.log(runs)
        part = weight**2 * logs.var(axis=1, ddof=1) / 3
        log = (log[:, None] + weight * logs.mean(axis=1)[None, :]).ravel()
        variance = (variance[:, None] + part[None, :]).ravel()
        squares = (squares[:, None] + part[None, :] ** 2 / 2).ravel()
    if variance.min() <= 0:
        raise ValueError("no variance between runs: any difference would look significant")
    p = np.asarray(2 * stats.t.sf(np.abs(log) / np.sqrt(variance), variance**2 / squares))
    return float(p.min()), float(p.max())


def power_curve(
    sds: Sequence[float],
    ns: Sequence[int],
    weights: Sequence[float] = (1.0, -1.0),
    alpha: float = ALPHA,
) -> Callable[[float], float]:
    """The function from a true log effect to the probability that the test of `contrast` sees it.

    sds are of the logarithms, one per cell, as are ns and weights.  Exact for normal logarithms up
    to the grid: the mean of P(|T| > critical) over the distribution of the sample variances.  Two
    cells, n = 3, equal sds: 0.12, 0.37, 0.68, 0.88 for effects of 1, 2, 3, 4 sds.
    """
    count = _QUANTILES if len(sds) <= 2 else _QUANTILES_OF_MANY
    levels = (np.arange(count) + 0.5) / count
    total, squares, true_variance = np.zeros(1), np.zeros(1), 0.0
    for sd, n, weight in zip(sds, ns, weights, strict=True):
        variance = (weight * sd) ** 2 / n
        part = variance * np.asarray(stats.chi2.ppf(levels, n - 1)) / (n - 1)
        total = (total[:, None] + part[None, :]).ravel()
        squares = (squares[:, None] + part[None, :] ** 2 / (n - 1)).ravel()
        true_variance += variance
    if true_variance <= 0:
        raise ValueError("no variance between runs: any difference would look significant")
    quantiles = special.stdtrit(total**2 / squares, 1 - alpha / 2)
    critical = quantiles * np.sqrt(total / true_variance)

    def seen(log_effect: float) -> float:
        shift = abs(log_effect) / math.sqrt(true_variance)
        return float(np.mean(special.ndtr(shift - critical) + special.ndtr(-critical - shift)))

    return seen


def power(
    log_effect: float,
    sds: Sequence[float],
    ns: Sequence[int],
    weights: Sequence[float] = (1.0, -1.0),
    alpha: float = ALPHA,
) -> float:
    """One point of `power_curve`."""
    return power_curve(sds, ns, weights, alpha)(log_effect)


def detectable_ratio(
    sds: Sequence[float],
    ns: Sequence[int],
    weights: Sequence[float] = (1.0, -1.0),
    wanted: float = 0.8,
    alpha: float = ALPHA,
) -> float:
    """The ratio above 1 that the test sees with probability `wanted`; its inverse is the same."""
    unit = math.sqrt(sum((w * sd) ** 2 / n for sd, n, w in zip(sds, ns, weights, strict=True)))
    seen = power_curve(sds, ns, weights, alpha)
    root = optimize.brentq(lambda steps: seen(steps * unit) - wanted, 0, 60, xtol=1e-3)
    return math.exp(float(root) * unit)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values of one family, under the same names and in the same order."""
    ranked = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, name in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - position) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}

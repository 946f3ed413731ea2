"""Percentiles and their like, in exact arithmetic where the result depends on rounding.

Promise: `percentile_linear` is Hyndman-Fan type 7 (the default of numpy.percentile);
`percentile_nearest_rank` is x[ceil(p n / 100)] with the rank in integers, because a rank computed
in floating point is off by one for some sizes (n = 80 is the first).  No samples give None.
Limit: samples are held in memory and sorted; this is for thousands, not for millions.
"""

import math
from collections.abc import Iterable, Sequence


def percentile_linear(samples: Sequence[float], percent: int) -> float | None:
    """Return the type-7 percentile of `samples` (any order), or None if there are none."""
    if not samples:
        return None
    ordered = sorted(samples)
    below, remainder = divmod((len(ordered) - 1) * percent, 100)
    if remainder == 0:
        return ordered[below]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * remainder / 100


def percentile_nearest_rank(samples: Sequence[float], percent: int) -> float | None:
    """Return the smallest sample that at least `percent` % do not exceed, or None."""
    if not samples:
        return None
    rank = -(-percent * len(samples) // 100)  # ceil, in integers
    return sorted(samples)[max(rank, 1) - 1]


def mean(samples: Sequence[float]) -> float | None:
    """Return the arithmetic mean, or None if there are no samples."""
    return math.fsum(samples) / len(samples) if samples else None


def standard_deviation(samples: Sequence[float]) -> float | None:
    """Return the sample standard deviation (divisor n - 1), or None for fewer than two samples."""
    if len(samples) < 2:
        return None
    centre = math.fsum(samples) / len(samples)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in samples) / (len(samples) - 1))


def in_flight(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Sweep half-open intervals [start, end) and return the steps (start, end, how many cover it).

    Steps are in order, without gaps between the first start and the last end, and never empty.  At
    a shared instant an end comes before a start: two intervals that only touch never overlap.
    """
    changes: dict[int, int] = {}
    for start, end in intervals:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    steps: list[tuple[int, int, int]] = []
    count, previous = 0, 0
    for instant in sorted(changes):
        if steps or count:
            steps.append((previous, instant, count))
        count += changes[instant]
        previous = instant
    return steps

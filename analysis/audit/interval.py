"""Exact intervals: what a printed number may have been before it was rounded.

Promise: fractions, so a number that just fits is not a matter of floating point.  Bounds of means
of products follow from the printed sds alone.
Limit: positive numbers; rounding to nearest, either way at a tie.
"""

from dataclasses import dataclass
from fractions import Fraction

from analysis.published import Cell, Printed


@dataclass(frozen=True)
class Interval:
    """All numbers from low to high."""

    low: Fraction
    high: Fraction

    def times(self, other: "Interval | Fraction | int") -> "Interval":
        other = other if isinstance(other, Interval) else Interval(Fraction(other), Fraction(other))
        return Interval(self.low * other.low, self.high * other.high)

    def over(self, other: "Interval | Fraction | int") -> "Interval":
        other = other if isinstance(other, Interval) else Interval(Fraction(other), Fraction(other))
        return Interval(self.low / other.high, self.high / other.low)

    def minus(self, other: "Interval") -> "Interval":
        return Interval(self.low - other.high, self.high - other.low)

    def widened(self, by: Fraction) -> "Interval":
        return Interval(self.low - by, self.high + by)

    def gap(self, other: "Interval") -> Fraction:
        """How far this lies above `other` (negative: below), 0 when they share a number."""
        if self.low > other.high:
            return self.low - other.high
        return min(Fraction(0), self.high - other.low)


def rounded(number: Printed) -> Interval:
    """What was rounded to this printed number."""
    return Interval(max(Fraction(0), number.value - number.half), number.value + number.half)


def covariance_bound(a: Cell, b: Cell) -> Fraction:
    """|mean(xy) - mean(x) mean(y)| of the n runs is at most (n - 1)/n sd(x) sd(y) (Cauchy-Schwarz).

    sds have the divisor n - 1.
    """
    return Fraction(a.n - 1, a.n) * rounded(a.sd).high * rounded(b.sd).high


def mean_of_product(a: Cell, b: Cell) -> Interval:
    """Where the mean over the runs of the product of two metrics lies."""
    return rounded(a.mean).times(rounded(b.mean)).widened(covariance_bound(a, b))

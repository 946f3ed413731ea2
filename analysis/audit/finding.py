"""What a rule says: one verdict, one line, the numbers behind it.

Promise: five words and no others; ids are stable, for the expected verdicts refer to them.
Limit: a finding judges the printed numbers, never what happened on the board.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict words of the audit."""

    CONSISTENT = "CONSISTENT"  # the printed numbers agree, or bear the statement
    INCONSISTENT = "INCONSISTENT"  # they contradict each other or the statement
    NOISE = "NOISE"  # as stated in direction, not separable from run-to-run variation
    UNSUPPORTED = "UNSUPPORTED"  # no printed number bears on the statement
    NOT_CHECKABLE = "NOT-CHECKABLE"  # a number is printed, what is needed to check it is not


_WORST_FIRST = (
    Verdict.INCONSISTENT,
    Verdict.UNSUPPORTED,
    Verdict.NOISE,
    Verdict.NOT_CHECKABLE,
    Verdict.CONSISTENT,
)


@dataclass(frozen=True)
class Finding:
    """One line of the audit.  `id` is rule/subject; `by` says by how much, or is empty."""

    id: str
    sections: Sequence[str]
    verdict: Verdict
    text: str
    by: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        return self.id.partition("/")[0]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of some verdicts: what a statement gets from all that bears on it."""
    return min(verdicts, key=_WORST_FIRST.index)


def holds(condition: bool) -> Verdict:
    """CONSISTENT or INCONSISTENT."""
    return Verdict.CONSISTENT if condition else Verdict.INCONSISTENT


def share(value: float) -> str:
    """A change as text: 0.1 is "+10.0 %"."""
    return f"{100 * value:+.1f} %"


def p_text(p: float) -> str:
    """A p-value as text, three digits, never 0."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"

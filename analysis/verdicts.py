"""Claims and runs in, a verdict per claim and platform out.

Promise: every claim gets one of the documented words, with number, interval, n, p and runs, or a
reason in words why there is none.  On the published platform: REPRODUCED, CONTRADICTED,
INCONCLUSIVE; on the virtual board, which shows directions only: DIRECTION-SHOWN,
DIRECTION-OPPOSED, UNRESOLVED; on either: NOT-RUN.  Under a true effect, no effect, and an effect of
exactly the margin, a wrong word of the first two kinds has a chance of at most 5 % per family
(tests/test_verdicts.py plays it).
Limit: at n = 3 most true effects below some 15 % stay undecided.

How a word is found (docs/statistics.md has the reasons).  A point's p for the claim is two-sided
against the bound, 1 - or + the tolerance: below 0.05 exactly when the 95 % interval lies beyond the
bound.  "At every point" is the largest of them.  The p against the claim is the smallest p of a
point being on the wrong side of the bound (on the virtual board: beyond the minimum effect in the
opposite direction), times the number of points.  Both are adjusted by Holm in the claim's family.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.claims import Cell, Claim, Claims, Point
from analysis.collect import CollectedRun
from analysis.contrasts import ALPHA, Contrast, holm
from analysis.stats import (
    Difference,
    Refused,
    Sample,
    Value,
    difference,
    first_valid,
    log_contrast,
    on_common_seeds,
    permutation_p,
    require_same_seeds,
    sample,
)

WORDS = {
    "numbers": ("REPRODUCED", "CONTRADICTED", "INCONCLUSIVE"),
    "directions": ("DIRECTION-SHOWN", "DIRECTION-OPPOSED", "UNRESOLVED"),
}
NOT_RUN = "NOT-RUN"


@dataclass(frozen=True)
class Result:
    """What the runs say at one point; numbers are None where there is none, `note` says why.

    estimate, low, high: a ratio with its 95 % interval; of an `explains` point a difference in ns
    (`note` says which); of an exact point the worst value and the range.  p: two-sided against no
    effect.  p_for: two-sided against the bound, 1 on its wrong side.  p_against: that the claim is
    wrong here.
    """

    label: str
    n: int
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_for: float | None = None
    p_against: float | None = None
    note: str | None = None
    missing: bool = False


@dataclass(frozen=True)
class Verdict:
    """The verdict of one claim on one platform.

    estimate, low, high, n: of the point that decides least, the one with the largest p_for.
    p_for, p_against: adjusted in the family.  permutation_p: stratified over the points; None where
    there is no such test.
    """

    claim: Claim
    word: str
    reason: str
    results: tuple[Result, ...]
    runs: tuple[str, ...]
    n: int = 0
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    p_for: float | None = None
    p_against: float | None = None
    permutation_p: float | None = None


def decide(
    claims: Claims,
    runs: Sequence[CollectedRun],
    known_experiments: Iterable[str],
    *,
    common_seeds: bool = False,
) -> list[Verdict]:
    """The verdicts, in the file's order.

    runs: in order (analysis.collect.in_order), invalid ones included.  known_experiments: those of
    artifact/experiments.toml.  common_seeds: cut samples down to the seeds that all cells of a
    point have, instead of refusing the point.
    """
    known = frozenset(known_experiments)
    looked = [_look(claim, runs, known, common_seeds) for claim in claims.claims]
    adjusted = _adjust(looked)
    return [_word(verdict, adjusted[verdict.claim.row_id]) for verdict in looked]


# ------------------------------------------------------------------------------- what is there


def _look(
    claim: Claim, runs: Sequence[CollectedRun], known: frozenset[str], common_seeds: bool
) -> Verdict:
    """The claim's numbers; the word is still open unless it is NOT-RUN."""
    mine = [
        run
        for run in runs
        if run.row["platform"] == claim.platform and claim.experiment in run.experiments
    ]
    if not mine:
        why = f"no run of {claim.experiment} on {claim.platform}; {claim.command} makes them"
        if claim.experiment not in known:
            why = f"{claim.experiment} is not in artifact/experiments.toml of this version"
        return Verdict(claim, NOT_RUN, why, (), ())
    boards = sorted({run.row["board"] for run in mine})
    if len(boards) > 1:
        why = f"mixed-platforms: runs of {' and '.join(boards)}; analyse one board at a time"
        return Verdict(claim, WORDS[claim.words][2], why, (), ())
    results: list[Result] = []
    strata: list[tuple[Sample, Sample]] = []
    used: set[str] = set()
    for point in claim.points:
        missing = next((m for _, cell in point.terms if (m := _missing(mine, cell, claim))), None)
        if missing:
            results.append(Result(point.label, 0, note=missing, missing=True))
            continue
        try:
            samples = [_sample(mine, cell, claim) for _, cell in point.terms]
            if common_seeds:
                samples = on_common_seeds(samples)
            used |= {run_id for one in samples for run_id in one.run_ids}
            results.append(_result(claim, point, samples))
            if claim.contrast["kind"] in ("policies", "growth", "models"):
                strata.append((samples[0], samples[1]))
        except Refused as refusal:
            results.append(Result(point.label, 0, note=str(refusal)))
    return Verdict(
        claim,
        "",
        "",
        tuple(results),
        tuple(sorted(used)),
        permutation_p=_permutation(strata) if len(strata) == len(results) else None,
    )


def _missing(runs: Sequence[CollectedRun], cell: Cell, claim: Claim) -> str | None:
    """Why a cell has no number at all, or None."""
    there = [run for run in runs if _is_of(run, cell)]
    valid = [run for run in there if run.row["valid"]]
    where = f"{claim.experiment} on {claim.platform}"
    if not there:
        return f"{where} has no run of {cell.label}"
    if not valid:
        reasons = sorted({reason for run in there for reason in run.record["invalid_reasons"]})
        return f"{where}: every run of {cell.label} is invalid ({', '.join(reasons)})"
    for metric in _metrics(claim):
        if all(run.row[metric] is None for run in valid):
            return f"no run of {cell.label} has {metric}: it was not measured"
    return None


def _metrics(claim: Claim) -> tuple[str, ...]:
    return (claim.metric, "window_ms") if claim.contrast["kind"] == "explains" else (claim.metric,)


def _is_of(run: CollectedRun, cell: Cell) -> bool:
    row = run.row
    return (
        row["policy"] == cell.policy
        and row["model"] == cell.model
        and row["scope"] in (None, cell.scope)
        and row["variant"] is None
        and row["bystanders"] == 0
        and row["concurrency"] == cell.concurrency
        and (cell.vlen_bits is None or row["vlen_bits"] == cell.vlen_bits)
    )


def _sample(runs: Sequence[CollectedRun], cell: Cell, claim: Claim) -> Sample:
    chosen = [run for run in first_valid(runs) if _is_of(run, cell)]
    values = [
        Value(run.row["run_id"], run.row["platform"], run.row["seed"], _value(run, claim))
        for run in chosen
        if all(run.row[metric] is not None for metric in _metrics(claim))
    ]
    return sample(cell.label, values)


def _value(run: CollectedRun, claim: Claim) -> float:
    """The run's number; of an `explains` claim save time minus its share of the window, in ns."""
    value = float(run.row[claim.metric])
    if claim.contrast["kind"] == "explains":
        return value - float(claim.contrast["share"]) * float(run.row["window_ms"]) * 1e6
    return value


# ------------------------------------------------------------------------------- what it says


def _result(claim: Claim, point: Point, samples: Sequence[Sample]) -> Result:
    n = min(one.n for one in samples)
    if point.value is not None and point.divisor is not None:
        return _exact(claim, point, samples[0])
    require_same_seeds(samples)
    if n < claim.minimum_n:
        raise Refused("too-few-runs", f"{point.label}: n is {n}, the claim needs {claim.minimum_n}")
    if claim.contrast["kind"] == "explains":
        return _explained(point.label, n, difference(samples[0], samples[1]))
    terms = [(weight, one) for (weight, _), one in zip(point.terms, samples, strict=True)]
    if point.target is not None:
        return judge_equal(point.label, n, log_contrast(terms), point.target, claim.tolerance)
    return judge_point(
        point.label, n, log_contrast(terms), claim.relation, claim.tolerance, claim.words
    )


def judge_equal(label: str, n: int, found: Contrast, target: float, tolerance: float) -> Result:
    """The ratio's p for lying within the tolerance around the target, and for lying outside.

    For: the larger of two one-sided tests, doubled, so that it is below 0.05 exactly when the 95 %
    interval lies inside.
    """
    low, high = target * (1 - tolerance), target * (1 + tolerance)
    p_for = max(found.p_above(low), found.p_below(high))
    p_against = min(found.p_below(low), found.p_above(high))
    return Result(
        label,
        n,
        estimate=found.ratio,
        low=found.low,
        high=found.high,
        p=found.p,
        p_for=min(1.0, 2 * p_for),
        p_against=min(1.0, 2 * p_against),
    )


def judge_point(
    label: str, n: int, found: Contrast, relation: str, tolerance: float, words: str
) -> Result:
    """The ratio's p for and against a relation; this is what the calibration plays with."""
    if relation in ("below", "not-above"):
        bound = 1 - tolerance if relation == "below" else 1 + tolerance
        p_for = found.p_below(bound)
        wrong = 1 + tolerance if words == "directions" else bound
        p_against = found.p_above(wrong)
    else:
        bound = 1 + tolerance if relation == "above" else 1 - tolerance
        p_for = found.p_above(bound)
        wrong = 1 - tolerance if words == "directions" else bound
        p_against = found.p_below(wrong)
    return Result(
        label,
        n,
        estimate=found.ratio,
        low=found.low,
        high=found.high,
        p=found.p,
        p_for=min(1.0, 2 * p_for),
        p_against=min(1.0, 2 * p_against),
    )


def _explained(label: str, n: int, found: Difference) -> Result:
    """found: of (save time - share x window), control minus treatment; from 0 it explains."""
    return Result(
        label,
        n,
        estimate=found.estimate,
        low=found.low,
        high=found.high,
        p=found.p,
        p_for=found.p if found.estimate > 0 else 1.0,
        p_against=found.p if found.estimate < 0 else 1.0,
        note="ns by which the time of the saves avoided exceeds its share of the time gained",
    )


def _exact(claim: Claim, point: Point, one: Sample) -> Result:
    assert point.value is not None and point.divisor is not None
    values = [value / point.divisor for value in one.values]
    worst = max(values, key=lambda value: abs(value - (point.value or 0)))
    # Half a unit of the last printed digit is meant to be inside, however it is rounded in binary.
    met = abs(worst - point.value) <= claim.tolerance + 1e-9
    return Result(
        point.label,
        one.n,
        estimate=worst,
        low=min(values),
        high=max(values),
        p_for=0.0 if met else 1.0,
        p_against=1.0 if met else 0.0,
        note=None if met else f"expected {point.value:g}, found {worst:g}",
    )


def _permutation(strata: Sequence[tuple[Sample, Sample]]) -> float | None:
    try:
        return permutation_p(strata) if strata else None
    except Refused:
        return None


# ------------------------------------------------------------------------------ from p to words


def combine(results: Sequence[Result]) -> tuple[float, float]:
    """(p for "at every point", p against it) before adjustment; a point without a number is 1."""
    p_for = max((1.0 if r.p_for is None else r.p_for) for r in results)
    smallest = min((1.0 if r.p_against is None else r.p_against) for r in results)
    return p_for, min(1.0, len(results) * smallest)


def _adjust(looked: Sequence[Verdict]) -> Mapping[str, tuple[float, float]]:
    """Row id to both p-values, adjusted in the family; a claim that was not run counts as p = 1."""
    families: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in looked:
        families.setdefault((verdict.claim.platform, verdict.claim.family), []).append(verdict)
    adjusted: dict[str, tuple[float, float]] = {}
    for family in families.values():
        raw = {v.claim.row_id: combine(v.results) if v.results else (1.0, 1.0) for v in family}
        p_for = holm({name: pair[0] for name, pair in raw.items()})
        p_against = holm({name: pair[1] for name, pair in raw.items()})
        adjusted |= {name: (p_for[name], p_against[name]) for name in raw}
    return adjusted


def _word(verdict: Verdict, adjusted: tuple[float, float]) -> Verdict:
    if verdict.word:
        return verdict
    holds, fails, open_ = WORDS[verdict.claim.words]
    p_for, p_against = adjusted
    numbers = [result for result in verdict.results if result.p_for is not None]
    least: Any = max(numbers, key=lambda result: result.p_for or 0.0, default=None)
    if p_against < ALPHA:
        word = fails
        worst = min(numbers, key=lambda r: 1.0 if r.p_against is None else r.p_against)
        least = worst
        reason = f"{worst.label}: {_shown(verdict.claim, worst)}"
    elif missing := next((r for r in verdict.results if r.missing), None):
        word, reason = NOT_RUN, missing.note or ""
    elif refused := next((r for r in verdict.results if r.p_for is None), None):
        word, reason = open_, refused.note or ""
    elif p_for < ALPHA:
        word, reason = holds, f"at every point; least at {least.label}"
    else:
        word = open_
        reason = f"{least.label}: {_shown(verdict.claim, least)} does not decide it"
    return replace(
        verdict,
        word=word,
        reason=reason,
        n=min((result.n for result in numbers), default=0),
        estimate=least.estimate if least else None,
        low=least.low if least else None,
        high=least.high if least else None,
        p_for=p_for if numbers else None,
        p_against=p_against if numbers else None,
    )


def _shown(claim: Claim, result: Result) -> str:
    if result.note and claim.contrast["kind"] != "explains":
        return result.note
    return f"{result.estimate:.4g} [{result.low:.4g}, {result.high:.4g}]"

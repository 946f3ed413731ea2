"""Samples and tests: refusals by name, hand-made numbers, and the traps with both numbers.

A trap is shown with the wrong number (what a plain call gives, and nobody warns) and the right one
(what analysis.stats gives, or its refusal).
"""

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm  # type: ignore[import-untyped]
from scipy import stats as distributions
from statsmodels.formula.api import ols  # type: ignore[import-untyped]

from analysis.stats import (
    Refused,
    Sample,
    Value,
    anova,
    difference,
    log_contrast,
    on_common_seeds,
    permutation_p,
    require_same_seeds,
    sample,
)


def of(values: Sequence[float], label: str = "cell", seeds: Sequence[int] | None = None) -> Sample:
    numbers = seeds or range(1, len(values) + 1)
    return sample(
        label,
        [Value(f"{label}-{s}", "virtual", s, v) for s, v in zip(numbers, values, strict=True)],
    )


A, B = of([1.0, 2.0, 4.0], "a"), of([3.0, 5.0, 6.0], "b")


def test_sample_by_hand() -> None:
    assert (A.n, A.mean) == (3, 7 / 3)
    assert A.sd == pytest.approx(math.sqrt(7 / 3))  # (16 + 1 + 25) / 9 / 2
    assert of([5.0]).sd is None


def test_ratio_by_hand() -> None:
    # Logs of a: 0, ln 2, 2 ln 2: mean ln 2, variance ln 2 squared.
    found = log_contrast([(1.0, A), (-1.0, of([2.0, 4.0, 8.0], "c"))])
    assert found.ratio == pytest.approx(0.5)
    se = math.log(2) * math.sqrt(2 / 3)
    half = float(distributions.t.ppf(0.975, 4)) * se  # equal variances and n: df is 4
    assert found.df == pytest.approx(4)
    assert (found.low, found.high) == pytest.approx((0.5 * math.exp(-half), 0.5 * math.exp(half)))


def test_ratio_of_ratios_is_the_difference_of_differences() -> None:
    double = of([2.0, 4.0, 8.0], "c")
    found = log_contrast([(1.0, double), (-1.0, A), (-1.0, double), (1.0, A)])
    assert found.ratio == pytest.approx(1.0)
    assert found.df == pytest.approx(8)


def test_difference_is_welch() -> None:
    found = difference(A, B)
    expected: Any = distributions.ttest_ind(A.values, B.values, equal_var=False)
    assert found.estimate == pytest.approx(7 / 3 - 14 / 3)
    assert (found.p, found.df) == pytest.approx((expected.pvalue, expected.df))


def test_not_significant_is_not_no_worse() -> None:
    noisy, other = of([80.0, 100.0, 125.0], "t"), of([82.0, 100.0, 122.0], "c")
    found = log_contrast([(1.0, noisy), (-1.0, other)])
    assert (found.p > 0.9, found.p_below(1.05) > 0.3) == (True, True)
    calm, same = of([99.9, 100.0, 100.1], "t"), of([100.0, 100.1, 99.8], "c")
    found = log_contrast([(1.0, calm), (-1.0, same)])
    assert max(found.p_below(1.05), found.p_above(0.95)) < 0.001
    worse = of([109.9, 110.0, 110.1], "t")
    assert log_contrast([(1.0, worse), (-1.0, same)]).p_below(1.05) > 0.99


def test_permutation_exact() -> None:
    low, high = of([1.0, 2.0, 3.0], "a"), of([10.0, 20.0, 30.0], "b")
    # 20 arrangements, two of them as extreme: the smallest p that three and three allow.
    assert permutation_p([(low, high)]) == pytest.approx(0.1)
    assert permutation_p([(low, high)] * 3) == pytest.approx(2 / 20**3)
    # With the labels exchanged in one stratum the strata cancel.
    assert permutation_p([(low, high), (high, low)]) > 0.9


def test_permutation_drawn_is_the_same_every_time() -> None:
    random = np.random.default_rng(3)
    one = of(list(random.lognormal(0.0, 0.1, 30)), "a")
    other = of(list(random.lognormal(0.2, 0.1, 30)), "b")
    first = permutation_p([(one, other)])
    assert first == permutation_p([(one, other)]) == pytest.approx(1 / 10_001)


# ------------------------------------------------------------------------------------ refusals


def twice(*runs: tuple[str, int]) -> Callable[[], object]:
    return lambda: sample("cell", [Value(run, "virtual", seed, 1.0) for run, seed in runs])


@pytest.mark.parametrize(
    ("call", "name", "says"),
    [
        (lambda: sample("c=2", []), "empty-cell", "c=2: no valid run"),
        (lambda: of([5.0]).logs(), "too-few-runs", "n is 1, expected at least 2"),
        (lambda: of([5.0, 5.0, 5.0]).logs(), "zero-variance", "all 3 runs have 5"),
        (lambda: log_contrast([(1.0, A), (-1.0, of([5.0] * 3))]), "zero-variance", "all 3 runs"),
        (lambda: difference(A, of([5.0] * 3)), "zero-variance", "all 3 runs"),
        (twice(("r-1", 1), ("r-1", 1)), "requests-as-samples", "run r-1 gives 2 values"),
        (twice(("r-1", 1), ("r-2", 1)), "repeated-seed", "seed 1 was run twice"),
        (lambda: of([1.0, 0.0]).logs(), "not-positive", "found 0, expected positive"),
        (lambda: of([1.0, -3.0]).logs(), "not-positive", "found -3"),
        (lambda: of([1.0, math.nan]), "not-positive", "has nan, expected a number"),
        (
            lambda: sample("x", [Value("a", "virtual", 1, 1.0), Value("b", "board", 2, 1.0)]),
            "mixed-platforms",
            "runs of board and virtual",
        ),
        (
            lambda: log_contrast([(1.0, A), (-1.0, of([1.0, 2.0, 3.0], "b", [1, 2, 4]))]),
            "unequal-sets",
            "a has seeds 1, 2, 3, b has 1, 2, 4",
        ),
        (lambda: require_same_seeds([A, of([1.0, 2.0], "b")]), "unequal-sets", "b has 1, 2"),
        (
            lambda: on_common_seeds([A, of([1.0, 2.0], "b", [8, 9])]),
            "unequal-sets",
            "no seed in common",
        ),
    ],
)  # fmt: skip
def test_refused_by_name(call: Callable[[], object], name: str, says: str) -> None:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.name == name
    assert caught.value.exit_code == 4
    assert says in str(caught.value)


def test_common_seeds() -> None:
    cut = on_common_seeds([A, of([7.0, 8.0], "b", [3, 2])])
    assert [one.seeds for one in cut] == [(2, 3), (2, 3)]
    assert [one.values for one in cut] == [(2.0, 4.0), (8.0, 7.0)]


# --------------------------------------------------------------------------------------- ANOVA


def table(seed: int = 1, n: int = 3) -> dict[tuple[str, int], Sample]:
    """3 policies x 3 concurrencies whose policies differ at every c, but not at c=2's reference."""
    random = np.random.default_rng(seed)
    cells = {}
    for p, policy in enumerate(("baseline", "cooperative", "vhot")):
        for c, concurrency in enumerate((2, 4, 8)):
            mean = 3.0 + 0.12 * p * c
            values = [math.exp(v) for v in random.normal(mean, 0.1, n)]
            cells[policy, concurrency] = of(values, f"{policy} c={concurrency}")
    return cells


def frame(cells: dict[tuple[str, int], Sample]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"y": math.log(v), "policy": p, "c": c}
            for (p, c), one in cells.items()
            for v in one.values
        ]
    )


def naive(formula: str, data: pd.DataFrame, typ: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sm.stats.anova_lm(ols(formula, data).fit(), typ=typ)
    return found


def test_anova_by_hand() -> None:
    """Balanced: the classical sums of squares."""
    cells = table()
    logs = {key: [math.log(v) for v in one.values] for key, one in cells.items()}
    grand = statistics.fmean(v for values in logs.values() for v in values)

    def mean(**fixed: Any) -> float:
        return statistics.fmean(
            v for (p, c), values in logs.items() for v in values
            if fixed.get("p", p) == p and fixed.get("c", c) == c
        )  # fmt: skip

    policies, concurrencies = {p for p, _ in logs}, {c for _, c in logs}
    by_policy = sum(9 * (mean(p=p) - grand) ** 2 for p in policies)
    by_c = sum(9 * (mean(c=c) - grand) ** 2 for c in concurrencies)
    between = sum(3 * (mean(p=p, c=c) - grand) ** 2 for p, c in logs)
    within = sum((v - mean(p=p, c=c)) ** 2 for (p, c), values in logs.items() for v in values)
    types: tuple[Literal[2, 3], ...] = (2, 3)
    for typ in types:
        found = anova(cells, typ=typ)
        squares = [effect.sum_sq for effect in found.effects]
        assert squares == pytest.approx([by_policy, by_c, between - by_policy - by_c, within])
        assert [effect.df for effect in found.effects] == [2, 2, 4, 18]
    assert found.effects[0].f == pytest.approx(by_policy / 2 / (within / 18))
    assert found.effects[0].partial_eta_sq == pytest.approx(by_policy / (by_policy + within))
    assert "type III, sum coding, logarithms, 27 runs" in found.note


def test_trap_type_three_with_treatment_coding() -> None:
    cells = table()
    wrong = naive("y ~ C(policy) * C(c)", frame(cells), 3).loc["C(policy)", "F"]
    right = anova(cells, typ=3).effects[0].f
    assert right is not None
    # Plain coding tests the policies at c=2 only, where there is nothing to see.
    assert wrong < 2 < 10 < right
    assert right == pytest.approx(anova(cells, typ=2).effects[0].f)
    with pytest.raises(Refused, match="reference level only") as caught:
        anova(cells, typ=3, coding="treatment")
    assert caught.value.name == "coding"


def test_trap_empty_cell() -> None:
    cells = table()
    del cells["vhot", 8]
    found = naive("y ~ C(policy, Sum) * C(c, Sum)", frame(cells), 2)
    # Eight cells leave 3 degrees of freedom for the interaction; a table is printed all the same.
    assert found.loc["C(policy, Sum):C(c, Sum)", "df"] == 4
    with pytest.raises(Refused, match="vhot c=8 has no runs: the table has a hole") as caught:
        anova(cells)
    assert caught.value.name == "empty-cell"


def test_trap_zero_variance() -> None:
    """Deterministic runs of one seed: any difference is "significant", and nobody warns."""
    cells = {key: of([one.values[0]] * 3, str(key)) for key, one in table().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sm.stats.anova_lm(ols("y ~ C(policy, Sum) * C(c, Sum)", frame(cells)).fit(), typ=2)
    assert found.loc["C(policy, Sum)", "F"] > 1e20
    assert found.loc["C(policy, Sum)", "PR(>F)"] < 1e-100
    with pytest.raises(Refused) as caught:
        anova(cells)
    assert caught.value.name == "zero-variance"


def test_trap_one_run_per_cell() -> None:
    with pytest.raises(Refused) as caught:
        anova(table(n=1))
    assert caught.value.name == "too-few-runs"


def test_trap_numeric_factor() -> None:
    """A concurrency that is a number is fitted as a slope: 1 degree of freedom instead of 2."""
    cells = table()
    assert naive("y ~ C(policy, Sum) * c", frame(cells), 2).loc["c", "df"] == 1
    assert anova(cells).effects[1].df == 2


def test_trap_requests_as_samples() -> None:
    """Fifty requests per run, no difference at all between two policies of three runs each."""
    random = np.random.default_rng(5)
    wrong = right = 0
    rounds = 400
    for _ in range(rounds):
        runs = random.normal(0, 1, (6, 1)) + random.normal(0, 0.5, (6, 50))
        wrong += bool(distributions.ttest_ind(runs[:3].ravel(), runs[3:].ravel()).pvalue < 0.05)
        means = runs.mean(axis=1)
        welch = distributions.ttest_ind(means[:3], means[3:], equal_var=False)
        right += bool(welch.pvalue < 0.05)
    assert wrong / rounds > 0.7
    assert right / rounds < 0.08


def test_trap_pooled_variance() -> None:
    """Three runs of large spread against ten of small: the pooled test errs one in three times."""
    random = np.random.default_rng(6)
    few, many = random.normal(0, 5, (2000, 3)), random.normal(0, 1, (2000, 10))
    pooled = distributions.ttest_ind(few, many, axis=1, equal_var=True).pvalue
    welch = distributions.ttest_ind(few, many, axis=1, equal_var=False).pvalue
    assert np.mean(pooled < 0.05) > 0.25
    assert np.mean(welch < 0.05) < 0.08


def test_raw_milliseconds_see_an_interaction_that_ratios_do_not() -> None:
    """One ratio at every concurrency, on latencies that double: only raw values "interact"."""
    random = np.random.default_rng(8)
    cells = {
        (policy, c): of(
            [1000 * c * factor * math.exp(v) for v in random.normal(0, 0.02, 3)], f"{policy} {c}"
        )
        for policy, factor in (("baseline", 1.0), ("cooperative", 0.9))
        for c in (2, 4, 8)
    }
    assert (anova(cells, scale="raw").effects[2].p or 1) < 0.01
    assert (anova(cells, scale="log").effects[2].p or 0) > 0.05

"""Two-way analysis of variance (policy x concurrency) from the printed cells, computed twice.

Promise: sums of squares by hand from means, sds and n, and by statsmodels on samples made to have
exactly these moments; a finding says whether they agree.  The samples serve that purpose only: sums
of squares depend on the moments alone, so any sample with them gives the same table.
Limit: balanced cells (the types of sums of squares coincide).  Equal variances are assumed, which
raw milliseconds break: docs/audit.md, "Why raw milliseconds mislead".
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.formula.api import ols  # type: ignore[import-untyped]
from statsmodels.stats.anova import anova_lm  # type: ignore[import-untyped]

from analysis.audit.finding import Finding, Verdict, holds, p_text
from analysis.published import BASELINE, CONCURRENCIES, COOPERATIVE, Published

_AGREE = 1e-8
_POLICIES = (BASELINE, COOPERATIVE)
Cells = Mapping[tuple[str, int], tuple[float, float, int]]  # (policy, concurrency): mean, sd, n


@dataclass(frozen=True)
class Effect:
    """One row of the table."""

    sum_of_squares: float
    df: int
    f: float
    p: float


@dataclass(frozen=True)
class Anova:
    """The table of one metric on one scale; residual sum of squares and degrees of freedom."""

    policy: Effect
    concurrency: Effect
    interaction: Effect
    residual_sum_of_squares: float
    residual_df: int


Tables = Mapping[tuple[str, str], tuple[Anova, Anova]]  # (metric, scale): by hand, statsmodels


def by_hand(cells: Cells) -> Anova:
    """The table from cell means, sds and the common n."""
    n = _common_n(cells)
    means = np.array([[cells[p, c][0] for c in CONCURRENCIES] for p in _POLICIES])
    grand, rows, columns = means.mean(), means.mean(axis=1), means.mean(axis=0)
    residual = sum((size - 1) * sd**2 for _, sd, size in cells.values())
    residual_df = sum(size - 1 for _, _, size in cells.values())
    inside = means - rows[:, None] - columns[None, :] + grand

    def effect(squares: float, df: int) -> Effect:
        f = squares / df / (residual / residual_df)
        return Effect(float(squares), df, float(f), float(stats.f.sf(f, df, residual_df)))

    return Anova(
        policy=effect(n * len(columns) * float(((rows - grand) ** 2).sum()), len(rows) - 1),
        concurrency=effect(n * len(rows) * float(((columns - grand) ** 2).sum()), len(columns) - 1),
        interaction=effect(n * float((inside**2).sum()), (len(rows) - 1) * (len(columns) - 1)),
        residual_sum_of_squares=residual,
        residual_df=residual_df,
    )


def moment_matched(mean: float, sd: float, n: int) -> list[float]:
    """n equally spaced numbers with this mean and sample sd: mean - sd, mean, mean + sd for 3."""
    steps = np.arange(n) - (n - 1) / 2
    return [float(value) for value in mean + sd * steps / steps.std(ddof=1)]


def by_statsmodels(cells: Cells) -> Anova:
    """The type II table that statsmodels makes of moment-matched samples."""
    _common_n(cells)
    rows = [
        {"policy": policy, "concurrency": c, "value": value}
        for (policy, c), (mean, sd, n) in cells.items()
        for value in moment_matched(mean, sd, n)
    ]
    fit = ols("value ~ C(policy) * C(concurrency)", data=pd.DataFrame(rows)).fit()
    table = anova_lm(fit, typ=2)

    def effect(name: str) -> Effect:
        row = table.loc[name]
        return Effect(float(row["sum_sq"]), round(row["df"]), float(row["F"]), float(row["PR(>F)"]))

    return Anova(
        policy=effect("C(policy)"),
        concurrency=effect("C(concurrency)"),
        interaction=effect("C(policy):C(concurrency)"),
        residual_sum_of_squares=float(table.loc["Residual", "sum_sq"]),
        residual_df=round(table.loc["Residual", "df"]),
    )


def cells_of(published: Published, metric: str, scale: str) -> Cells:
    """The six cells of a metric of the board, raw or log."""
    table = published.board(metric)
    cells = {}
    for policy in _POLICIES:
        for c in CONCURRENCIES:
            cell = table.cell(metric, policy, c)
            summary = cell.summary if scale == "raw" else cell.log
            cells[policy, c] = (summary.mean, summary.sd, summary.n)
    return cells


def anova_tables(published: Published) -> Tables:
    """(metric, scale) to the table by hand and the table by statsmodels."""
    return {
        (metric, scale): (by_hand(cells), by_statsmodels(cells))
        for metric in published.rules["every_concurrency"]["metrics"]
        for scale in ("raw", "log")
        for cells in [cells_of(published, metric, scale)]
    }


def rows(tables: Tables) -> list[dict[str, Any]]:
    """The tables by hand as the result schema wants them."""
    return [
        {
            "metric": metric,
            "scale": scale,
            "policy": asdict(hand.policy),
            "concurrency": asdict(hand.concurrency),
            "interaction": asdict(hand.interaction),
            "residual": {
                "sum_of_squares": hand.residual_sum_of_squares,
                "df": hand.residual_df,
            },
        }
        for (metric, scale), (hand, _) in tables.items()
    ]


def rules(published: Published, tables: Tables) -> Iterator[Finding]:
    """Whether the two computations agree; whether any gain depends on concurrency."""
    gap = max(_difference(hand, library) for hand, library in tables.values())
    text = (
        f"{len(tables)} two-way tables by hand and by statsmodels (type II) agree to "
        f"{_AGREE:.0e} of each number"
    )
    agree = gap <= _AGREE
    by = "" if agree else f"{gap:.1e} apart"
    yield Finding("anova/computations-agree", ["4.4"], holds(agree), text, by)
    alpha = published.rules["alpha"]
    significant = {
        scale: [
            metric
            for (metric, s), (hand, _) in tables.items()
            if s == scale and hand.interaction.p < alpha
        ]
        for scale in ("raw", "log")
    }
    least = min(
        ((hand.interaction.p, metric) for (metric, s), (hand, _) in tables.items() if s == "log")
    )
    verdict = Verdict.CONSISTENT if significant["log"] else Verdict.NOISE
    raw = ", ".join(
        f"{metric} ({p_text(tables[metric, 'raw'][0].interaction.p)} raw, "
        f"{p_text(tables[metric, 'log'][0].interaction.p)} as ratio)"
        for metric in significant["raw"]
    )
    text = (
        "policy x concurrency as ratios: "
        f"{len(significant['log'])} of {len(tables) // 2} metrics interact, least "
        f"{p_text(least[0])} ({least[1]}); on raw units: {raw or 'none'}"
    )
    by = "" if significant["log"] else "an equal ratio of a larger time is a larger difference"
    yield Finding("anova/gain-depends-on-c", ["4.4"], verdict, text, by)


def _difference(a: Anova, b: Anova) -> float:
    """The largest relative difference of the sums of squares and F of two tables."""

    def flat(table: Anova) -> Sequence[float]:
        effects = (table.policy, table.concurrency, table.interaction)
        return [
            *(number for e in effects for number in (e.sum_of_squares, e.f)),
            table.residual_sum_of_squares,
        ]

    # An interaction near 0 is a difference of large numbers: relative to the whole table.
    scale_a, scale_b = max(flat(a)[::2]), max(flat(b)[::2])
    return max(
        math.inf if a.residual_df != b.residual_df else 0.0,
        *(
            abs(x - y) / max(abs(x), abs(y), 1e-6 * max(scale_a, scale_b), 1e-300)
            for x, y in zip(flat(a), flat(b), strict=True)
        ),
    )


def _common_n(cells: Cells) -> int:
    sizes = {n for _, _, n in cells.values()}
    if len(sizes) != 1:
        raise ValueError(f"cells of {sorted(sizes)} runs: by hand needs equal numbers")
    return sizes.pop()

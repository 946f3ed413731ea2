"""The audit: planted errors are found, the real tables raise no false alarm, findings by hand.

Promise: each kind of planted error is put into a copy of the tables and must change exactly the
verdicts named beside it, statements aside (they follow); each finding on the real tables is derived
again here with plain numbers typed from the report, not with the audit's own functions.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import schemas
from analysis import contrasts
from analysis.audit.anova import Anova, Cells, by_hand, by_statsmodels, moment_matched
from analysis.audit.arithmetic import integer_triple
from analysis.audit.finding import Verdict, worst
from analysis.audit.result import EXPECTED, audit, read_expected
from analysis.audit.run import check
from analysis.audit.show import GROUPS
from analysis.contrasts import LogSummary, Summary, log_of_runs, log_of_summary
from analysis.published import PUBLISHED, Printed, Published, read
from toolchain.errors import Differs
from toolchain.paths import REPO

# Typed from section 4.4; index 0, 1, 2 is c = 2, 4, 8; baseline and cooperative.
TPS = [(5.520, 6.051), (6.372, 7.075), (6.531, 7.343)]
LATENCY_S = [(23.20924, 21.15289), (40.17244, 36.18345), (78.38369, 69.69170)]
SAVES = [(146063, 96374), (131773, 86656), (130339, 85627)]
SAVE_MS = [(400.29, 289.91), (309.25, 213.96), (308.01, 207.19)]
SAVES_PER_S = [(772.13, 556.43), (800.98, 582.92), (811.92, 597.70)]
SWITCHES = [(225964, 174194), (209375, 165422), (201559, 158602)]
C = (2, 4, 8)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return audit(read(), read_expected())


@pytest.fixture
def quick_anova(monkeypatch: pytest.MonkeyPatch) -> None:
    """statsmodels once for each set of cells: the planted errors leave most of them alone."""

    def quick(cells: Cells) -> Anova:
        key = repr(sorted(cells.items()))
        if key not in _fitted:
            _fitted[key] = by_statsmodels(cells)
        return _fitted[key]

    monkeypatch.setattr("analysis.audit.anova.by_statsmodels", quick)


_fitted: dict[str, Anova] = {}


@pytest.fixture(scope="module")
def findings(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in document["findings"]}


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {finding["id"]: finding["verdict"] for finding in document["findings"]}


# --- the real tables ------------------------------------------------------------------------------


def test_shipped_tables_give_the_expected_verdicts(document: dict[str, Any]) -> None:
    assert document["unexpected"] == []
    assert read_expected()["inputs"] == document["inputs"]


def test_no_false_alarm_in_the_arithmetic(findings: dict[str, dict[str, Any]]) -> None:
    rules = GROUPS["Arithmetic of the printed numbers"]
    arithmetic = {name: f for name, f in findings.items() if f["rule"] in rules}
    assert len(arithmetic) > 30
    alarms = [name for name, f in arithmetic.items() if f["verdict"] != "CONSISTENT"]
    # Not of one table: 3.7 says that both machines ran the same requests.
    assert alarms == ["x86/requests-as-board"]


def test_every_rule_is_shown_and_every_word_is_used(document: dict[str, Any]) -> None:
    shown = {rule for rules in GROUPS.values() for rule in rules}
    assert {finding["rule"] for finding in document["findings"]} == shown
    assert sum(document["summary"].values()) == len(document["findings"])
    assert all(document["summary"].values())
    ids = [finding["id"] for finding in document["findings"]]
    assert len(set(ids)) == len(ids)


def test_docs_name_every_rule_and_every_notable_finding(document: dict[str, Any]) -> None:
    text = (REPO / "docs" / "audit.md").read_text(encoding="utf-8")
    for finding in document["findings"]:
        assert f"`{finding['rule']}" in text, finding["rule"]
        if finding["verdict"] != "CONSISTENT":
            assert f"`{finding['id']}`" in text, finding["id"]
    counts = document["summary"]
    differ = [f for f in document["findings"] if f["rule"] == "parameter"]
    differ = [f for f in differ if f["verdict"] == "INCONSISTENT"]
    summary = (
        f"{len(document['findings'])} findings, {counts['CONSISTENT']} CONSISTENT, "
        f"{counts['INCONSISTENT']} INCONSISTENT ({len(differ)} of them parameters that sections "
        f"state differently), {counts['NOISE']} NOISE, {counts['UNSUPPORTED']} UNSUPPORTED, "
        f"{counts['NOT-CHECKABLE']} NOT-CHECKABLE"
    )
    assert summary in " ".join(text.split())


def test_numbers_of_the_docs_are_the_audits(document: dict[str, Any]) -> None:
    """Each line `finding` number = value of the docs' list of figures is what the audit finds."""
    text = (REPO / "docs" / "audit.md").read_text(encoding="utf-8")
    figures = re.findall(r"^\| `([a-z0-9-]+/[\w.-]+)` \| `(\w+)` \| ([-\d.]+) \|$", text, re.M)
    assert len(figures) > 30
    numbers = {finding["id"]: finding["numbers"] for finding in document["findings"]}
    for name, key, value in figures:
        decimals = len(value.partition(".")[2])
        assert f"{numbers[name][key]:.{decimals}f}" == value, (name, key)


# --- findings by hand -----------------------------------------------------------------------------


def test_percentage_of_tps_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    """6.051/5.520 gives 9.6196 %, printed 9.63: only rounding of the means explains it."""
    assert round(100 * (6.051 / 5.520 - 1), 2) == 9.62  # equality at two decimals would fail
    least = 100 * (6.0505 / 5.5205 - 1)
    most = 100 * (6.0515 / 5.5195 - 1)
    assert least < 9.625 < most < 9.639
    numbers = findings["percent/output_tps"]["numbers"]
    assert numbers["least_c2_percent"] == pytest.approx(least)
    assert numbers["most_c2_percent"] == pytest.approx(most)


def test_tokens_per_request_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    numbers = findings["tokens/per-request"]["numbers"]
    for i, c in enumerate(C):
        for j, policy in enumerate(("baseline", "cooperative")):
            tokens = TPS[i][j] * LATENCY_S[i][j] / c
            assert 63.96 < tokens < 64.07, (c, policy)
            least, most = (numbers[f"{end}_{policy}_c{c}_tokens"] for end in ("least", "most"))
            assert least < tokens < most
    # c = 2, baseline: 64.06 is above 64.  Runs whose TPS and latency are as opposed as can be, and
    # rounding of the TPS, just allow 64; and opposed they are, if every request has 64 tokens.
    covariance = 2 / 3 * 0.200 * 0.85610 / 2
    rounding = 0.0005 * 23.20924 / 2
    assert 64 < 5.520 * 23.20924 / 2 - covariance < 64 + rounding


def test_window_by_hand(findings: dict[str, dict[str, Any]], document: dict[str, Any]) -> None:
    derived = {(d["policy"], d["concurrency"]): d for d in document["derived"]}
    for i, c in enumerate(C):
        for j, policy in enumerate(("baseline", "cooperative")):
            window_s, load_s = SAVES[i][j] / SAVES_PER_S[i][j], 16 * LATENCY_S[i][j] / c
            assert 3.4 < window_s - load_s < 4.0
            cell = derived[policy, c]
            assert cell["window_s"] == pytest.approx(window_s)
            assert cell["load_s"] == pytest.approx(load_s)
            assert cell["save_ns"] == pytest.approx(1e6 * SAVE_MS[i][j] / SAVES[i][j])
            assert cell["non_saving_switches"] == SWITCHES[i][j] - SAVES[i][j]
            assert cell["saves_per_token"] == pytest.approx(SAVES[i][j] / 1024)
            assert cell["saved_kib_per_request"] == pytest.approx(SAVES[i][j] / 16)
            ppm = SAVE_MS[i][j] / 1000 / window_s / 8 * 1e6
            assert cell["capacity_ppm"] == pytest.approx(ppm)
            assert 179 < ppm < 265
    assert findings["window/encloses-load"]["verdict"] == "CONSISTENT"


def test_removed_saves_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    numbers = findings["counts/removed"]["numbers"]
    assert [numbers[f"removed_saves_c{c}"] for c in C] == [49689, 45117, 44712]
    assert [numbers[f"removed_switches_c{c}"] for c in C] == [51770, 43953, 42957]


def test_cost_accounting_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    """16 requests of 64 tokens: what a run gained against what its saves can have cost."""
    numbers = findings["cost/explains-gain"]["numbers"]
    for i, c in enumerate(C):
        gained_s = 1024 / TPS[i][0] - 1024 / TPS[i][1]
        avoided_s = (SAVE_MS[i][0] - SAVE_MS[i][1]) / 1000
        assert 15.9 < gained_s < 17.4
        assert 0.095 < avoided_s < 0.111
        assert 147 < gained_s / avoided_s < 173
        assert numbers[f"serial_share_c{c}"] == pytest.approx(avoided_s / gained_s)
        assert numbers[f"spread_share_c{c}"] == pytest.approx(avoided_s / gained_s / 8)
        needed_us = 1e6 * gained_s / (SAVES[i][0] - SAVES[i][1])
        assert numbers[f"needed_per_save_c{c}_us"] == pytest.approx(needed_us)
        assert needed_us > 100 * 3.008  # microseconds of the dearest measured save
    # Favourable ends at c = 2: gain at the low end of its interval, save time at the high end.
    least_gained_s = 1024 / 5.520 * (1 - 1 / findings["every-c/output_tps"]["numbers"]["low_c2"])
    parts = (18.42**2 / 3, 4.45**2 / 3)
    df = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 2)
    most_avoided_s = (110.38 + float(stats.t.ppf(0.975, df)) * math.sqrt(sum(parts))) / 1000
    assert numbers["least_gained_c2_s"] == pytest.approx(least_gained_s)
    assert numbers["most_avoided_c2_s"] == pytest.approx(most_avoided_s)
    assert least_gained_s / most_avoided_s > 13
    assert findings["cost/explains-gain"]["verdict"] == "INCONSISTENT"


def welch_by_hand(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float, float]:
    """log ratio a/b, standard error, df from mean and sd of three runs, written out."""
    va, vb = math.log(1 + (a[1] / a[0]) ** 2), math.log(1 + (b[1] / b[0]) ** 2)
    log = (math.log(a[0]) - va / 3) - (math.log(b[0]) - vb / 3)
    return log, math.sqrt(va / 3 + vb / 3), (va + vb) ** 2 / (va**2 / 2 + vb**2 / 2)


@pytest.mark.parametrize(
    ("metric", "c", "cooperative", "baseline", "significant"),
    [
        ("output_tps", 2, (6.051, 0.068), (5.520, 0.200), True),
        ("mean_ttft_ms", 2, (8744.57, 107.49), (9370.05, 388.90), False),
        ("mean_ttft_ms", 4, (16838.28, 940.65), (17319.37, 290.36), False),
        ("mean_ttft_ms", 8, (28869.49, 5054.16), (32998.84, 2573.12), False),
        ("p95_ttft_ms", 2, (9489.83, 179.89), (10140.80, 268.89), True),
        ("mean_latency_ms", 2, (21152.89, 237.85), (23209.24, 856.10), True),
        ("save_count", 8, (85627, 12406), (130339, 9029), True),
        ("save_total_ms", 8, (207.19, 25.77), (308.01, 12.44), True),
        ("saves_per_s", 8, (597.70, 93.89), (811.92, 72.58), False),
        ("context_switches", 8, (158602, 18974), (201559, 6093), False),
    ],
)
def test_contrasts_by_hand(
    metric: str,
    c: int,
    cooperative: tuple[float, float],
    baseline: tuple[float, float],
    significant: bool,
    findings: dict[str, dict[str, Any]],
) -> None:
    log, error, df = welch_by_hand(cooperative, baseline)
    p = 2 * float(stats.t.sf(abs(log) / error, df))
    numbers = findings[f"every-c/{metric}"]["numbers"]
    assert numbers[f"ratio_c{c}"] == pytest.approx(math.exp(log))
    assert numbers[f"p_c{c}"] == pytest.approx(p)
    half = float(stats.t.ppf(0.975, df)) * error
    assert numbers[f"low_c{c}"] == pytest.approx(math.exp(log - half))
    assert (p < 0.05) is significant


def test_at_every_concurrency_is_the_largest_p(findings: dict[str, dict[str, Any]]) -> None:
    largest = {
        name.partition("/")[2]: max(f["numbers"][f"p_c{c}"] for c in C)
        for name, f in findings.items()
        if f["rule"] == "every-c"
    }
    assert {name: round(p, 3) for name, p in largest.items()} == {
        "output_tps": 0.038,
        "mean_ttft_ms": 0.466,
        "p95_ttft_ms": 0.029,
        "mean_latency_ms": 0.040,
        "save_count": 0.021,
        "save_total_ms": 0.022,
        "saves_per_s": 0.053,
        "context_switches": 0.063,
    }
    for metric, p in largest.items():
        assert findings[f"every-c/{metric}"]["verdict"] == ("CONSISTENT" if p < 0.05 else "NOISE")


def test_gain_with_concurrency_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    """TPS: +9.6 % at c = 2, +12.4 % at c = 8: the ratio of the two ratios is 1.025, p = 0.43."""
    logs, variances = [], []
    for mean, sd in ((7.343, 0.163), (6.531, 0.166), (6.051, 0.068), (5.520, 0.200)):
        variance = math.log(1 + (sd / mean) ** 2)
        logs.append(math.log(mean) - variance / 3)
        variances.append(variance / 3)
    log = logs[0] - logs[1] - logs[2] + logs[3]
    df = sum(variances) ** 2 / sum(v**2 / 2 for v in variances)
    p = 2 * float(stats.t.sf(log / math.sqrt(sum(variances)), df))
    assert (round(math.exp(log), 3), round(p, 2)) == (1.025, 0.43)
    numbers = findings["gain-grows/output_tps"]["numbers"]
    assert numbers["ratio_gain"] == pytest.approx(math.exp(log))
    assert numbers["p_gain"] == pytest.approx(p)
    p_values = [
        findings[f"gain-grows/{m}"]["numbers"]["p_gain"]
        for m in ("p95_ttft_ms", "save_total_ms", "output_tps")
    ]
    assert p_values == sorted(p_values)
    holm = [3 * p_values[0], 2 * p_values[1], max(2 * p_values[1], p_values[2])]
    assert [
        findings[f"gain-grows/{m}"]["numbers"]["p_holm"]
        for m in ("p95_ttft_ms", "save_total_ms", "output_tps")
    ] == pytest.approx(holm)


def test_stability_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    numbers = findings["trend/stability"]["numbers"]
    tps = (
        welch_by_hand((7.343, 0.163), (6.531, 0.166))[1]
        / (welch_by_hand((6.051, 0.068), (5.520, 0.200))[1])
    )
    ttft = (
        welch_by_hand((28869.49, 5054.16), (32998.84, 2573.12))[1]
        / (welch_by_hand((8744.57, 107.49), (9370.05, 388.90))[1])
    )
    assert numbers["output_tps_error_ratio"] == pytest.approx(tps)
    assert numbers["mean_ttft_ms_error_ratio"] == pytest.approx(ttft)
    assert tps < 1 and ttft > 4
    assert sum(value > 1 for value in numbers.values()) == 4
    assert findings["trend/stability"]["verdict"] == "INCONSISTENT"


def test_saves_fall_with_concurrency_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    log, error, df = welch_by_hand((130339, 9029), (146063, 12054))
    numbers = findings["rises/saves"]["numbers"]
    assert numbers["ratio_rise"] == pytest.approx(math.exp(log))
    assert numbers["p_rise"] == pytest.approx(2 * float(stats.t.sf(-log / error, df)))
    assert round(math.exp(log), 3) == 0.893
    assert findings["rises/saves"]["verdict"] == "INCONSISTENT"
    assert findings["rises/saves-per-s"]["verdict"] == "NOISE"


def test_x86_and_board_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    numbers = findings["trend/switches-like-x86"]["numbers"]
    x86 = welch_by_hand((883.42, 54.16), (138.83, 2.64))
    board = welch_by_hand((201559, 6093), (225964, 6627))
    assert numbers["ratio_growth"] == pytest.approx(math.exp(x86[0] - board[0]))
    assert round(numbers["growth_x86"], 2) == 6.36
    assert round(numbers["growth_board"], 2) == 0.89
    per_s_x86 = (7067.33 * 62.58) / (1110.67 * 65.36)  # equal tokens: time is 1 / TPS
    per_s_board = (201559 * 811.92 / 130339) / (225964 * 772.13 / 146063)
    assert (round(per_s_x86, 2), round(per_s_board, 2)) == (6.09, 1.05)
    assert numbers["growth_per_s_x86"] == pytest.approx(per_s_x86)
    assert numbers["growth_per_s_board"] == pytest.approx(per_s_board)
    assert findings["trend/switches-like-x86"]["verdict"] == "INCONSISTENT"


def test_requests_of_x86_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    for switches, each in ((1110.67, 138.83), (2814.33, 351.79), (7067.33, 883.42)):
        assert (switches - 0.005) / (each + 0.005) < 8 < (switches + 0.005) / (each - 0.005)
    assert findings["x86/requests-as-board"]["by"] == "8 instead of 16"


def test_prompt_cache_sign_by_hand(findings: dict[str, dict[str, Any]]) -> None:
    """If k-th of c waits for k prompts: last / mean = c / ((c + 1) / 2)."""
    x86 = findings["artefact/prompt-cache-x86"]["numbers"]
    for c, mean, p95, over in (
        (2, 273.15, 1014.34, True),
        (4, 929.49, 2018.51, True),
        (8, 3372.80, 4079.18, False),
    ):
        assert x86[f"p95_over_mean_baseline_c{c}"] == pytest.approx(p95 / mean)
        assert (p95 / mean > c / ((c + 1) / 2)) is over
    assert findings["artefact/prompt-cache-x86"]["verdict"] == "INCONSISTENT"
    board = findings["artefact/prompt-cache-inference"]
    assert board["verdict"] == "CONSISTENT"
    assert board["numbers"]["p95_over_mean_baseline_c2"] == pytest.approx(10140.80 / 9370.05)


def test_statements_take_the_worst(findings: dict[str, dict[str, Any]]) -> None:
    assert worst([Verdict.CONSISTENT, Verdict.NOISE]) is Verdict.NOISE
    assert worst([Verdict.NOISE, Verdict.INCONSISTENT]) is Verdict.INCONSISTENT
    assert findings["statement/improvements"]["verdict"] == "CONSISTENT"
    assert findings["statement/repeatable"]["verdict"] == "NOISE"
    assert findings["statement/hints-help"]["verdict"] == "UNSUPPORTED"
    assert findings["statement/ttft-3b"]["verdict"] == "NOT-CHECKABLE"


# --- analysis of variance -------------------------------------------------------------------------

LATENCY_CELLS = {
    ("baseline", 2): (23209.24, 856.10, 3),
    ("baseline", 4): (40172.44, 356.21, 3),
    ("baseline", 8): (78383.69, 1988.03, 3),
    ("cooperative", 2): (21152.89, 237.85, 3),
    ("cooperative", 4): (36183.45, 533.86, 3),
    ("cooperative", 8): (69691.70, 1486.19, 3),
}


def test_anova_of_latency_written_out(document: dict[str, Any]) -> None:
    """Sums of squares of the 2 x 3 table of raw latencies, step by step."""
    grand = (23209.24 + 40172.44 + 78383.69 + 21152.89 + 36183.45 + 69691.70) / 6
    baseline, cooperative = (
        (23209.24 + 40172.44 + 78383.69) / 3,
        (21152.89 + 36183.45 + 69691.70) / 3,
    )
    policy = 9 * ((baseline - grand) ** 2 + (cooperative - grand) ** 2)
    columns = [(23209.24 + 21152.89) / 2, (40172.44 + 36183.45) / 2, (78383.69 + 69691.70) / 2]
    concurrency = 6 * sum((column - grand) ** 2 for column in columns)
    between = 3 * sum((mean - grand) ** 2 for mean, _, _ in LATENCY_CELLS.values())
    interaction = between - policy - concurrency
    residual = 2 * (856.10**2 + 356.21**2 + 1988.03**2 + 237.85**2 + 533.86**2 + 1486.19**2)
    f = interaction / 2 / (residual / 12)
    assert round(f, 2) == 14.24
    for table in (by_hand(LATENCY_CELLS), by_statsmodels(LATENCY_CELLS)):
        assert table.policy.sum_of_squares == pytest.approx(policy, rel=1e-9)
        assert table.concurrency.sum_of_squares == pytest.approx(concurrency, rel=1e-9)
        assert table.interaction.sum_of_squares == pytest.approx(interaction, rel=1e-9)
        assert table.residual_sum_of_squares == pytest.approx(residual, rel=1e-9)
        assert table.interaction.f == pytest.approx(f, rel=1e-9)
        assert table.interaction.p == pytest.approx(float(stats.f.sf(f, 2, 12)), rel=1e-9)
        assert (table.policy.df, table.concurrency.df, table.residual_df) == (1, 2, 12)
    (shown,) = [
        row
        for row in document["anova"]
        if (row["metric"], row["scale"]) == ("mean_latency_ms", "raw")
    ]
    assert shown["interaction"]["f"] == pytest.approx(f, rel=1e-9)


def test_raw_interaction_vanishes_as_ratio(document: dict[str, Any]) -> None:
    p = {
        (row["metric"], row["scale"]): round(row["interaction"]["p"], 4)
        for row in document["anova"]
    }
    assert p["mean_latency_ms", "raw"] == 0.0007
    assert p["mean_latency_ms", "log"] > 0.6
    assert p["p95_ttft_ms", "raw"] == 0.0036
    assert p["p95_ttft_ms", "log"] > 0.25
    assert all(value > 0.05 for (_, scale), value in p.items() if scale == "log")


def test_an_equal_ratio_makes_a_raw_interaction() -> None:
    """A policy that takes 10 % off every time interacts on milliseconds and not on ratios."""
    raw, log = {}, {}
    for c, mean in ((2, 20000.0), (4, 40000.0), (8, 80000.0)):
        for policy, factor in (("baseline", 1.0), ("cooperative", 0.9)):
            raw[policy, c] = (factor * mean, 0.01 * factor * mean, 3)
            cell = log_of_summary(Summary(*raw[policy, c]))
            log[policy, c] = (cell.mean, cell.sd, 3)
    assert by_hand(raw).interaction.p < 0.001
    assert by_hand(log).interaction.p > 0.999


@pytest.mark.parametrize("n", [2, 3, 5])
def test_moment_matched_samples(n: int) -> None:
    sample = np.array(moment_matched(23209.24, 856.10, n))
    assert sample.mean() == pytest.approx(23209.24, rel=1e-12)
    assert sample.std(ddof=1) == pytest.approx(856.10, rel=1e-12)


# --- contrasts ------------------------------------------------------------------------------------


def test_contrast_equals_scipy_on_runs() -> None:
    a, b = [5.1, 5.6, 5.9], [6.0, 6.1, 6.05]
    found = contrasts.ratio(log_of_runs(b), log_of_runs(a))
    wanted = stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    interval = wanted.confidence_interval(0.95)
    assert found.p == pytest.approx(wanted.pvalue)
    assert (found.low, found.high) == pytest.approx(
        (math.exp(interval.low), math.exp(interval.high))
    )
    assert found.p_above(1.0) == pytest.approx(found.p / 2)
    assert found.p_below(1.0) == pytest.approx(1 - found.p / 2)


def test_range_of_p_holds_that_of_any_runs() -> None:
    """Runs drawn at random, summarised, and judged from the summary alone."""
    random = np.random.default_rng(1)
    for _ in range(200):
        a, b = random.normal(100, 8, 3), random.normal(90, 5, 3)
        cells = [Summary(float(x.mean()), float(x.std(ddof=1)), 3) for x in (a, b)]
        least, most = contrasts.p_range(cells, (1, -1))
        exact = contrasts.ratio(log_of_runs(list(a)), log_of_runs(list(b))).p
        assert least * 0.995 <= exact <= most * 1.005
        nominal = contrasts.ratio(log_of_summary(cells[0]), log_of_summary(cells[1])).p
        assert least * 0.98 <= nominal <= most * 1.02


def test_welch_at_three_runs_covers_where_z_and_bootstrap_do_not() -> None:
    random = np.random.default_rng(2)
    count = 4000
    x, y = (random.normal(0, sd, (count, 3)) for sd in (0.03, 0.01))
    difference = x.mean(axis=1) - y.mean(axis=1)
    parts = x.var(axis=1, ddof=1) / 3, y.var(axis=1, ddof=1) / 3
    error = np.sqrt(parts[0] + parts[1])
    df = error**4 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 2)
    welch = (np.abs(difference) < stats.t.ppf(0.975, df) * error).mean()
    z = (np.abs(difference) < 1.96 * error).mean()
    picks = random.integers(0, 3, (2, 500, 3))
    draws = x[:500, picks[0]].mean(axis=2) - y[:500, picks[1]].mean(axis=2)
    low, high = np.percentile(draws, [2.5, 97.5], axis=1)
    bootstrap = ((low < 0) & (high > 0)).mean()
    assert 0.93 < welch < 0.98
    assert z < 0.88
    assert bootstrap < 0.85


def test_power_equals_simulation() -> None:
    random = np.random.default_rng(3)
    sds, weights = np.array([0.036, 0.011, 0.025, 0.022]), np.array([1, -1, -1, 1])
    draws = random.normal(0, 1, (20000, 4, 3)) * sds[None, :, None]
    parts = draws.var(axis=2, ddof=1) / 3
    total = parts.sum(axis=1)
    critical = stats.t.ppf(0.975, total**2 / (parts**2 / 2).sum(axis=1)) * np.sqrt(total)
    for effect in (0.0, 0.03, 0.1):
        seen = float((np.abs(draws.mean(axis=2) @ weights + effect) > critical).mean())
        found = contrasts.power(effect, list(sds), (3, 3, 3, 3), list(weights))
        assert found == pytest.approx(seen, abs=0.02)
    two = [round(contrasts.power(d, (1, 1), (3, 3)), 2) for d in (1, 2, 3, 4)]
    assert two == pytest.approx([0.12, 0.37, 0.67, 0.89], abs=0.015)
    needed = contrasts.detectable_ratio((0.05, 0.05), (3, 3))
    assert contrasts.power(math.log(needed), (0.05, 0.05), (3, 3)) == pytest.approx(0.8, abs=0.001)


def test_holm_by_hand() -> None:
    assert contrasts.holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx(
        {"a": 0.06, "b": 0.03, "c": 0.06}
    )
    assert list(contrasts.holm({"z": 0.9, "a": 0.5})) == ["z", "a"]
    assert contrasts.holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Summary(1.0, 0.1, 1), "n is 1"),
        (lambda: Summary(0.0, 0.1, 3), "mean is 0.0"),
        (lambda: Summary(1.0, math.nan, 3), "sd is nan"),
        (lambda: LogSummary(1.0, 0.1, 1), "n is 1"),
        (lambda: log_of_runs([1.0]), "n is 1"),
        (lambda: log_of_runs([1.0, -1.0]), "found -1.0"),
        (lambda: contrasts.ratio(LogSummary(1, 0, 3), LogSummary(2, 0, 3)), "no variance"),
        (lambda: contrasts.contrast([LogSummary(1, 1, 3)], [1, -1]), "1 cells but 2 weights"),
        (lambda: contrasts.p_range([Summary(1, 0.1, 4)], [1]), "only for n = 3"),
        (lambda: contrasts.p_range([Summary(1, 2, 3)], [1]), "a run that is not positive"),
        (lambda: contrasts.power(0.1, (0, 0), (3, 3)), "no variance"),
        (
            lambda: by_hand({**LATENCY_CELLS, ("baseline", 2): (1.0, 1.0, 4)}),
            "cells of [3, 4] runs",
        ),
    ],
)
def test_statistics_refuse(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        call()


# --- integer counts -------------------------------------------------------------------------------


def in_full(mean: str, sd: str) -> bool:
    """Search all triples of small integers."""
    decimals_mean, decimals_sd = (len(text.partition(".")[2]) for text in (mean, sd))
    for a in range(30):
        for b in range(a, 30):
            for c in range(b, 30):
                runs = np.array([a, b, c])
                ends = float(runs.mean()), float(runs.std(ddof=1))
                near_mean = abs(ends[0] - float(mean)) <= 0.5 * 10**-decimals_mean + 1e-9
                near_sd = abs(ends[1] - float(sd)) <= 0.5 * 10**-decimals_sd + 1e-9
                if near_mean and near_sd:
                    return True
    return False


@pytest.mark.parametrize(
    ("mean", "sd", "possible"),
    [
        ("12.67", "1.15", True),
        ("12.67", "1.16", False),
        ("12.67", "1.53", True),
        ("12.50", "1.15", False),
        ("12.33", "0.58", True),
        ("12.33", "1.00", False),
        ("12.00", "1.00", True),
        ("12.00", "1.15", False),
        ("9.00", "0.30", False),
        ("9", "2", True),
        ("0.33", "0.58", True),
        ("0.33", "1.53", False),  # would need a negative count
    ],
)
def test_integer_triples(mean: str, sd: str, possible: bool) -> None:
    def printed(text: str) -> Printed:
        return Printed(Fraction(text), len(text.partition(".")[2]))

    assert in_full(mean, sd) is possible
    assert integer_triple(printed(mean), printed(sd)) is possible


# --- planted errors -------------------------------------------------------------------------------

# kind, file, text, its replacement, the findings that change (statements aside).
PLANTED: list[tuple[str, str, str, str, dict[str, str]]] = [
    (
        "two digits of a mean swapped",
        "inference.toml",
        "mean = 6.372, sd",
        "mean = 6.732, sd",
        {
            "percent/output_tps": "INCONSISTENT",
            "tokens/per-request": "INCONSISTENT",
        },
    ),
    (
        "a digit of a latency wrong",
        "inference.toml",
        "mean = 36183.45",
        "mean = 38183.45",
        {
            "percent/mean_latency_ms": "INCONSISTENT",
            "tokens/per-request": "INCONSISTENT",
            "window/encloses-load": "INCONSISTENT",
        },
    ),
    (
        "a percentage wrong in its second decimal",
        "improvements.toml",
        "p95_ttft_ms = -8.29",
        "p95_ttft_ms = -8.27",
        {"percent/p95_ttft_ms": "INCONSISTENT"},
    ),
    (
        "a sign lost",
        "improvements.toml",
        "mean_ttft_ms = -2.78",
        "mean_ttft_ms = 2.78",
        {"percent/mean_ttft_ms": "INCONSISTENT"},
    ),
    (
        "a percentage of the treatment instead of the baseline",
        "improvements.toml",
        "save_count = -34.24",
        "save_count = -52.06",
        {"percent/save_count": "INCONSISTENT"},
    ),
    (
        "a number repeated wrongly in the text",
        "improvements.toml",
        "change_percent = -32.7\n",
        "change_percent = -33.7\n",
        {"quoted/4.5": "INCONSISTENT"},
    ),
    (
        "a rate that does not fit total and time",
        "vstate.toml",
        "mean = 800.98",
        "mean = 880.98",
        {"window/encloses-load": "INCONSISTENT"},
    ),
    (
        "a total of another unit",
        "vstate.toml",
        "save_total_ms = { mean = 309.25, sd = 12.63 }",
        "save_total_ms = { mean = 3.09, sd = 0.13 }",
        {
            "percent/save_total_ms": "INCONSISTENT",
            "save-cost/per-save": "INCONSISTENT",
            "every-c/save_total_ms": "INCONSISTENT",
            "anova/gain-depends-on-c": "CONSISTENT",
        },
    ),
    (
        "more saves than switches",
        "vstate.toml",
        "context_switches = { mean = 209375",
        "context_switches = { mean = 109375",
        {
            "percent/context_switches": "INCONSISTENT",
            "counts/saves-within-switches": "INCONSISTENT",
            "counts/removed": "INCONSISTENT",
            "every-c/context_switches": "INCONSISTENT",
            "anova/gain-depends-on-c": "CONSISTENT",
        },
    ),
    (
        "more saves gone than switches",
        "vstate.toml",
        "context_switches = { mean = 174194, sd = 14950 }",
        "context_switches = { mean = 225000, sd = 1000 }",
        {
            "percent/context_switches": "INCONSISTENT",
            "counts/removed": "INCONSISTENT",
            "anova/gain-depends-on-c": "CONSISTENT",
        },
    ),
    (
        "an sd that no three integers have",
        "x86.toml",
        "involuntary_switches = { mean = 42.67, sd = 1.15 }",
        "involuntary_switches = { mean = 42.67, sd = 1.18 }",
        {"integers/x86-involuntary_switches": "INCONSISTENT"},
    ),
    (
        "a mean that no three integers have",
        "x86.toml",
        "involuntary_switches = { mean = 88.33",
        "involuntary_switches = { mean = 88.35",
        {"integers/x86-involuntary_switches": "INCONSISTENT"},
    ),
    (
        "more involuntary switches than switches",
        "x86.toml",
        "involuntary_switches = { mean = 88.33",
        "involuntary_switches = { mean = 8833.33",
        {"counts/involuntary-within-switches": "INCONSISTENT"},
    ),
    (
        "a rate per request of other requests",
        "x86.toml",
        "switches_per_request = { mean = 351.79",
        "switches_per_request = { mean = 315.79",
        {
            "x86/switches-per-request": "INCONSISTENT",
            "x86/requests-as-board": "NOT-CHECKABLE",
            "x86/xstate-per-request": "INCONSISTENT",
        },
    ),
    (
        "bytes per request that do not fit",
        "x86.toml",
        "xstate_per_request_kib = { mean = 285.8",
        "xstate_per_request_kib = { mean = 258.8",
        {"x86/xstate-per-request": "INCONSISTENT"},
    ),
    (
        "an sd of bytes per request that does not fit",
        "x86.toml",
        "xstate_per_request_kib = { mean = 285.8, sd = 6.7 }",
        "xstate_per_request_kib = { mean = 285.8, sd = 8.2 }",
        {"x86/xstate-per-request": "INCONSISTENT"},
    ),
    (
        "a growth factor wrong",
        "arithmetic.toml",
        "ratio = 6.36",
        "ratio = 6.63",
        {"x86/growth": "INCONSISTENT"},
    ),
    (
        "a table's number repeated wrongly",
        "arithmetic.toml",
        "value = 7067",
        "value = 7607",
        {"x86/quoted": "INCONSISTENT"},
    ),
    (
        "bytes of a save wrong",
        "arithmetic.toml",
        "bytes = 2048",
        "bytes = 2084",
        {"save-bytes/512": "INCONSISTENT"},
    ),
    (
        "a ratio of state sizes wrong",
        "arithmetic.toml",
        "ratio = 2.46",
        "ratio = 2.64",
        {"state-ratio/512-xsave": "INCONSISTENT"},
    ),
    (
        "a mean above its 95th percentile",
        "x86.toml",
        "mean_ttft_ms = { mean = 3372.80",
        "mean_ttft_ms = { mean = 4372.80",
        {"order/x86": "INCONSISTENT"},
    ),
    (
        "a spread much larger",
        "vstate.toml",
        "mean = 96374, sd = 8394",
        "mean = 96374, sd = 38394",
        {"every-c/save_count": "NOISE"},
    ),
    (
        "a gain that shrinks with concurrency",
        "vstate.toml",
        "save_total_ms = { mean = 400.29, sd = 18.42 }",
        "save_total_ms = { mean = 700.29, sd = 18.42 }",
        {
            "percent/save_total_ms": "INCONSISTENT",
            "quoted/4.4": "INCONSISTENT",
            "gain-grows/save_total_ms": "INCONSISTENT",
            "anova/gain-depends-on-c": "CONSISTENT",
        },
    ),
    (
        "saves that do rise with concurrency",
        "vstate.toml",
        "save_count = { mean = 130339, sd = 9029 }\nsave_total_ms = { mean = 308.01, sd = 12.44 }\n"
        "saves_per_s = { mean = 811.92, sd = 72.58 }",
        "save_count = { mean = 190339, sd = 2029 }\nsave_total_ms = { mean = 308.01, sd = 12.44 }\n"
        "saves_per_s = { mean = 1185.68, sd = 12.58 }",
        {
            "percent/save_count": "INCONSISTENT",
            "quoted/4.5": "INCONSISTENT",
            "anova/gain-depends-on-c": "CONSISTENT",
            "rises/saves": "CONSISTENT",
            "rises/saves-per-s": "CONSISTENT",
            "every-c/saves_per_s": "CONSISTENT",
        },
    ),
    (
        "a parameter brought into line",
        "conditions.toml",
        '{ section = "README", value = "3" }',
        '{ section = "README", value = "2" }',
        {"parameter/hint-abi": "CONSISTENT"},
    ),
    (
        "a parameter that another section now states differently",
        "conditions.toml",
        '{ section = "4.6", value = "performance" }',
        '{ section = "4.6", value = "schedutil" }',
        {"parameter/governor": "INCONSISTENT"},
    ),
    (
        "a mean time to first token that no queue explains",
        "inference.toml",
        "mean_ttft_ms = { mean = 9370.05",
        "mean_ttft_ms = { mean = 5370.05",
        {
            "percent/mean_ttft_ms": "INCONSISTENT",
            "every-c/mean_ttft_ms": "INCONSISTENT",
            "artefact/prompt-cache-inference": "INCONSISTENT",
            "anova/gain-depends-on-c": "CONSISTENT",
        },
    ),
]


def planted(tmp_path: Path, file: str, old: str, new: str) -> Published:
    copy = Path(shutil.copytree(PUBLISHED, tmp_path / "copy"))
    text = (copy / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return read(copy)


@pytest.mark.usefixtures("quick_anova")
@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [row[1:] for row in PLANTED],
    ids=[row[0].replace(" ", "-") for row in PLANTED],
)
def test_planted_errors_are_found_and_nothing_else_changes(
    file: str,
    old: str,
    new: str,
    changes: dict[str, str],
    tmp_path: Path,
    document: dict[str, Any],
) -> None:
    before = verdicts(document)
    after = verdicts(audit(planted(tmp_path, file, old, new)))
    found = {
        name: verdict
        for name, verdict in after.items()
        if verdict != before[name] and not name.startswith("statement/")
    }
    assert found == changes


def test_savings_large_enough_would_explain_the_gain(tmp_path: Path) -> None:
    """170 times the save time in every baseline: then, and only then, the account balances."""
    copy = Path(shutil.copytree(PUBLISHED, tmp_path / "copy"))
    text = (copy / "vstate.toml").read_text(encoding="utf-8")
    for old, new in (("400.29", "17400.29"), ("309.25", "17309.25"), ("308.01", "17908.01")):
        text = text.replace(f"mean = {old}", f"mean = {new}")
    (copy / "vstate.toml").write_text(text, encoding="utf-8")
    found = verdicts(audit(read(copy)))
    assert found["cost/explains-gain"] == "CONSISTENT"
    assert found["statement/saves-become-gains"] == "CONSISTENT"


def test_a_planted_error_reaches_its_statement(tmp_path: Path) -> None:
    copy = planted(tmp_path, "improvements.toml", "p95_ttft_ms = -8.29", "p95_ttft_ms = -8.27")
    document = audit(copy, read_expected())
    assert verdicts(document)["statement/improvements"] == "INCONSISTENT"
    (finding,) = [f for f in document["findings"] if f["id"] == "percent/p95_ttft_ms"]
    assert finding["by"] == "c = 4 by +0.0120 percentage points"
    assert [item["id"] for item in document["unexpected"]] == [
        "percent/p95_ttft_ms",
        "statement/improvements",
    ]


def test_last_digit_within_rounding_is_no_alarm(tmp_path: Path, document: dict[str, Any]) -> None:
    """9.62 would be as right as the printed 9.63: both lie within the rounding of the means."""
    copy = planted(tmp_path, "improvements.toml", "{ output_tps = 9.63,", "{ output_tps = 9.62,")
    assert verdicts(audit(copy)) == verdicts(document)


# --- the verb -------------------------------------------------------------------------------------


def test_verdict_that_differs_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(tmp_path, "arithmetic.toml", "ratio = 6.36", "ratio = 6.63")
    before = EXPECTED.read_bytes()
    with pytest.raises(Differs) as caught:
        check(tmp_path / "audit.json", tmp_path / "copy", accept=False)
    assert caught.value.exit_code == 1
    assert "x86/growth and 1 more" in str(caught.value)
    out = capsys.readouterr().out
    assert "unexpected: x86/growth: expected CONSISTENT, found INCONSISTENT" in out
    assert "another content of arithmetic.toml" in out
    written = schemas.read(tmp_path / "audit.json", "audit")
    assert len(written["unexpected"]) == 2
    assert EXPECTED.read_bytes() == before


def test_accept_writes_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "audit.json"
    monkeypatch.setattr("analysis.audit.run.EXPECTED", target)
    check(None, None, accept=True)
    assert target.read_bytes() == EXPECTED.read_bytes()


def test_the_verb_prints_one_line_a_finding(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    outputs = []
    for target in (first, second):
        done = inv("check-published", "--json", str(target))
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert first.read_bytes() == second.read_bytes()
    document = json.loads(first.read_text())
    lines = outputs[0].splitlines()
    for finding in document["findings"]:
        here = [
            line for line in lines if re.match(rf"  [A-Z-]+ +{re.escape(finding['id'])} ", line)
        ]
        assert len(here) == 1
        assert here[0].split()[0] == finding["verdict"]
        assert here[0].endswith(finding["by"] or finding["text"])
    assert lines[-1].startswith(f"{len(document['findings'])} findings: ")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], "not the TOML"),
        (lambda text: text.replace("mean = 5.520", "mean = nan"), "found nan"),
        (lambda text: text.replace("mean = 5.520", "mean = 5.520, mean = 5.520"), "not the TOML"),
        (lambda text: text.replace("output_tps = {", "ouput_tps = {"), "did you mean"),
        (lambda text: text.replace('unit = "token/s"', 'unit = "token/min"'), 'expected "token/s"'),
    ],
    ids=["truncated", "nan", "duplicate", "misspelt", "unit"],
)
def test_the_verb_refuses_bad_data(damage: Callable[[str], str], says: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PUBLISHED, tmp_path / "copy"))
    text = (copy / "inference.toml").read_text(encoding="utf-8")
    (copy / "inference.toml").write_text(damage(text), encoding="utf-8")
    target = tmp_path / "out.json"
    done = inv("check-published", "--tables", str(copy), "--json", str(target))
    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) == 1
    assert "inference.toml" in done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert not target.exists()


def inv(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from toolchain.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=REPO, capture_output=True, text=True
    )

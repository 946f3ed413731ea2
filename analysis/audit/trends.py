"""Rules of trends: what the text says of directions, sizes and stability, on the ratio scale.

Promise: families are those of rules.toml.  A direction that the printed means contradict is
INCONSISTENT; one they show, but that run-to-run variation explains as well, is NOISE.
Limit: mean, sd and n = 3 are all there is; contrasts.p_range says how much the unknown runs matter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.audit.finding import Finding, Verdict, p_text, share
from analysis.contrasts import (
    Contrast,
    contrast,
    detectable_ratio,
    holm,
    p_range,
    power,
    ratio,
)
from analysis.published import BASELINE, CONCURRENCIES, COOPERATIVE, Cell, Published

_RATIO = (1.0, -1.0)
_RATIO_OF_RATIOS = (1.0, -1.0, -1.0, 1.0)


@dataclass(frozen=True)
class PolicyContrast:
    """cooperative / baseline of one metric at one concurrency."""

    metric: str
    concurrency: int
    treatment: Cell
    control: Cell
    estimate: Contrast


def policy_contrast(published: Published, metric: str, c: int) -> PolicyContrast:
    """The contrast of the printed cells."""
    table = published.board(metric)
    treatment, control = table.cell(metric, COOPERATIVE, c), table.cell(metric, BASELINE, c)
    estimate = ratio(treatment.log, control.log, published.rules["level"])
    return PolicyContrast(metric, c, treatment, control, estimate)


def rules(published: Published) -> Iterator[Finding]:
    """All findings of this module."""
    for metric in published.rules["every_concurrency"]["metrics"]:
        yield _every_concurrency(published, metric)
    yield from _gain_grows(published)
    yield _stability(published)
    yield from _rises(published)
    yield _switches_like_x86(published)


def contrast_table(published: Published) -> list[dict[str, Any]]:
    """The contrasts cooperative / baseline; Holm over the three concurrencies of a metric."""
    rows = []
    for metric in published.rules["every_concurrency"]["metrics"]:
        items = [policy_contrast(published, metric, c) for c in CONCURRENCIES]
        adjusted = holm({str(item.concurrency): item.estimate.p for item in items})
        for item in items:
            estimate = item.estimate
            least, most = p_range((item.treatment.summary, item.control.summary), _RATIO)
            sds = (item.treatment.log.sd, item.control.log.sd)
            ns = (item.treatment.n, item.control.n)
            rows.append(
                {
                    "metric": metric,
                    "concurrency": item.concurrency,
                    "ratio": estimate.ratio,
                    "low": estimate.low,
                    "high": estimate.high,
                    "p": estimate.p,
                    "p_least": least,
                    "p_most": most,
                    "p_holm": adjusted[str(item.concurrency)],
                    "df": estimate.df,
                    "power": power(estimate.log, sds, ns, alpha=published.rules["alpha"]),
                    "detectable_ratio": detectable_ratio(sds, ns, alpha=published.rules["alpha"]),
                }
            )
    return rows


def _better(published: Published, metric: str, factor: float) -> bool:
    """Whether a factor on the metric is in the good direction."""
    higher = published.board(metric).columns[metric].higher_is_better
    return factor > 1 if higher else factor < 1


def _every_concurrency(published: Published, metric: str) -> Finding:
    alpha = published.rules["alpha"]
    items = [policy_contrast(published, metric, c) for c in CONCURRENCIES]
    numbers: dict[str, float] = {}
    for item in items:
        numbers |= _numbers(item.estimate, f"c{item.concurrency}")
    worst = max(items, key=lambda item: item.estimate.p)
    least, most = p_range((worst.treatment.summary, worst.control.summary), _RATIO)
    wrong = [i for i in items if not _better(published, metric, i.estimate.ratio)]
    if wrong:
        verdict = Verdict.INCONSISTENT
        by = "; ".join(f"{share(i.estimate.ratio - 1)} at c = {i.concurrency}" for i in wrong)
    elif worst.estimate.p < alpha:
        verdict, by = Verdict.CONSISTENT, ""
    else:
        verdict = Verdict.NOISE
        by = (
            f"largest {p_text(worst.estimate.p)} at c = {worst.concurrency}, "
            f"{least:.3f} to {most:.3f} whatever the three runs were"
        )
    ratios = ", ".join(
        f"{i.estimate.ratio:.3f} [{i.estimate.low:.3f}, {i.estimate.high:.3f}]" for i in items
    )
    text = (
        f"{metric}, cooperative / baseline at c = 2, 4, 8: {ratios}; "
        f"at every c: {p_text(worst.estimate.p)}"
    )
    sections = ["4.4", "4.5"]
    return Finding(f"every-c/{metric}", sections, verdict, text, by, numbers)


def _numbers(estimate: Contrast, name: str) -> Mapping[str, float]:
    return {
        f"ratio_{name}": estimate.ratio,
        f"low_{name}": estimate.low,
        f"high_{name}": estimate.high,
        f"p_{name}": estimate.p,
    }


def _directed(right_way: bool, p: float, alpha: float) -> Verdict:
    if not right_way:
        return Verdict.INCONSISTENT
    return Verdict.CONSISTENT if p < alpha else Verdict.NOISE


def _gain_grows(published: Published) -> Iterator[Finding]:
    family = published.rules["gain_grows"]
    alpha, level = published.rules["alpha"], published.rules["level"]
    ends = (family["to_concurrency"], family["from_concurrency"])
    estimates, cells = {}, {}
    for metric in family["metrics"]:
        last, first = (policy_contrast(published, metric, c) for c in ends)
        cells[metric] = (last.treatment, last.control, first.treatment, first.control)
        logs = [cell.log for cell in cells[metric]]
        estimates[metric] = contrast(logs, _RATIO_OF_RATIOS, level)
    adjusted = holm({metric: estimate.p for metric, estimate in estimates.items()})
    for metric, estimate in estimates.items():
        sds = [cell.log.sd for cell in cells[metric]]
        ns = [cell.n for cell in cells[metric]]
        seen = power(estimate.log, sds, ns, _RATIO_OF_RATIOS, alpha)
        needed = detectable_ratio(sds, ns, _RATIO_OF_RATIOS, alpha=alpha)
        verdict = _directed(_better(published, metric, estimate.ratio), adjusted[metric], alpha)
        text = (
            f"gain in {metric} at c = {ends[0]} over c = {ends[1]}: ratio of ratios "
            f"{estimate.ratio:.3f} [{estimate.low:.3f}, {estimate.high:.3f}], {p_text(estimate.p)}"
        )
        by = {
            Verdict.CONSISTENT: "",
            Verdict.INCONSISTENT: f"the printed gain shrinks: {share(estimate.ratio - 1)}",
        }.get(
            verdict,
            f"Holm {p_text(adjusted[metric])}; three runs a cell see a change of this size with "
            f"probability {seen:.2f}, and need a factor of {needed:.2f} for 0.8",
        )
        numbers = {
            **_numbers(estimate, "gain"),
            "p_holm": adjusted[metric],
            "power": seen,
            "detectable_ratio": needed,
        }
        yield Finding(f"gain-grows/{metric}", ["4.4"], verdict, text, by, numbers)


def _stability(published: Published) -> Finding:
    """The standard error of the log ratio at the last concurrency over that at the first."""
    family = published.rules["stability"]
    first, last = family["from_concurrency"], family["to_concurrency"]
    numbers = {
        f"{metric}_error_ratio": policy_contrast(published, metric, last).estimate.se
        / policy_contrast(published, metric, first).estimate.se
        for metric in family["metrics"]
    }
    wider = [value for value in numbers.values() if value > 1]
    shown = ", ".join(
        f"{metric} {numbers[f'{metric}_error_ratio']:.2f}" for metric in family["metrics"]
    )
    if not wider:
        verdict, by = Verdict.CONSISTENT, ""
    elif 2 * len(wider) > len(numbers):
        verdict = Verdict.INCONSISTENT
        by = f"less certain in {len(wider)} of {len(numbers)} metrics, up to {max(wider):.1f} times"
    else:
        verdict = Verdict.NOISE
        by = f"less certain in {len(wider)} of {len(numbers)} metrics"
    text = f"error of the gain at c = {last} over that at c = {first}: {shown}"
    return Finding("trend/stability", ["4.5"], verdict, text, by, numbers)


def _rises(published: Published) -> Iterator[Finding]:
    alpha, level = published.rules["alpha"], published.rules["level"]
    first, last = CONCURRENCIES[0], CONCURRENCIES[-1]
    estimates = {}
    for item in published.rules["rises"]:
        table = published.tables[item["table"]]
        end, start = (table.cell(item["metric"], BASELINE, c) for c in (last, first))
        estimates[item["id"]] = ratio(end.log, start.log, level)
    adjusted = holm({name: estimate.p for name, estimate in estimates.items()})
    for item in published.rules["rises"]:
        estimate, p = estimates[item["id"]], adjusted[item["id"]]
        verdict = _directed(estimate.ratio > 1, p, alpha)
        text = (
            f"{item['metric']} ({item['table']}), baseline, c = {last} / c = {first}: "
            f"{estimate.ratio:.3f} [{estimate.low:.3f}, {estimate.high:.3f}], {p_text(estimate.p)}"
        )
        by = {
            Verdict.CONSISTENT: "",
            Verdict.INCONSISTENT: f"{share(estimate.ratio - 1)} instead of a rise, interval from "
            f"{share(estimate.low - 1)} to {share(estimate.high - 1)}",
        }.get(verdict, f"Holm {p_text(p)}")
        numbers = {**_numbers(estimate, "rise"), "p_holm": p}
        yield Finding(f"rises/{item['id']}", item["sections"], verdict, text, by, numbers)


def _switches_like_x86(published: Published) -> Finding:
    """Growth of switches per request on x86 over that on the board, where requests are as many."""
    first, last = CONCURRENCIES[0], CONCURRENCIES[-1]
    x86, board = published.tables["x86"], published.tables["vstate"]
    cells = [
        x86.cell("switches_per_request", BASELINE, last).log,
        x86.cell("switches_per_request", BASELINE, first).log,
        board.cell("context_switches", BASELINE, last).log,
        board.cell("context_switches", BASELINE, first).log,
    ]
    level = published.rules["level"]
    growth = ratio(cells[0], cells[1], level), ratio(cells[2], cells[3], level)
    estimate = contrast(cells, _RATIO_OF_RATIOS, level)
    differs = estimate.p < published.rules["alpha"]
    per_second = _per_second(published, first, last)
    text = (
        f"switches per request from c = {first} to {last}: x {growth[0].ratio:.2f} on x86, "
        f"x {growth[1].ratio:.2f} on the board (per second x {per_second[0]:.2f} and "
        f"x {per_second[1]:.2f})"
    )
    by = (
        f"growth differs by a factor of {estimate.ratio:.2f} "
        f"[{estimate.low:.2f}, {estimate.high:.2f}]"
    )
    verdict = Verdict.INCONSISTENT if differs else Verdict.NOISE
    numbers = {
        **_numbers(estimate, "growth"),
        "growth_x86": growth[0].ratio,
        "growth_board": growth[1].ratio,
        "growth_per_s_x86": per_second[0],
        "growth_per_s_board": per_second[1],
    }
    return Finding("trend/switches-like-x86", ["3.7", "4.4"], verdict, text, by, numbers)


def _per_second(published: Published, first: int, last: int) -> tuple[float, float]:
    """Growth of switches per second: x86 (by its TPS, equal tokens), board (by its window)."""
    x86, board = published.tables["x86"], published.tables["vstate"]

    def rate_x86(c: int) -> float:
        switches, tps = (x86.cell(m, BASELINE, c) for m in ("context_switches", "output_tps"))
        return float(switches.mean) * float(tps.mean)

    def rate_board(c: int) -> float:
        switches, saves, rate = (
            float(board.cell(m, BASELINE, c).mean)
            for m in ("context_switches", "save_count", "saves_per_s")
        )
        return switches * rate / saves

    return rate_x86(last) / rate_x86(first), rate_board(last) / rate_board(first)

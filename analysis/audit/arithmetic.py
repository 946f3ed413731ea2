"""Rules of arithmetic: percentages, totals against rates against times, quoted numbers, bytes.

Promise: each rule allows exactly what rounding of the printed digits (and, for products of means,
the printed sds) allows, plus a tolerance of rules.toml where one is named: no false alarm from
rounding.  Limit: runs that conspire within those bounds pass.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from statistics import median
from typing import Any

from scipy import stats

from analysis.audit.finding import Finding, Verdict, holds
from analysis.audit.interval import (
    Interval,
    covariance_bound,
    mean_of_product,
    rounded,
)
from analysis.published import (
    BASELINE,
    CONCURRENCIES,
    COOPERATIVE,
    Cell,
    Printed,
    Published,
    printed,
)
from toolchain.errors import InvalidData

_POLICIES = (BASELINE, COOPERATIVE)
_BOARD_CELLS = [(policy, c) for c in CONCURRENCIES for policy in _POLICIES]
_CHANGES = (
    "output_tps",
    "mean_ttft_ms",
    "p95_ttft_ms",
    "mean_latency_ms",
    "save_count",
    "save_total_ms",
    "context_switches",
)


def stated_integer(published: Published, parameter: str, section: str = "4.2") -> int:
    """The value that a section states for a parameter; InvalidData when it is no integer."""
    for item in published.conditions["parameters"]:
        for stated in item["stated"]:
            if item["id"] == parameter and stated["section"] == section:
                if not stated["value"].isdecimal():
                    raise InvalidData(
                        f"conditions.toml: {parameter} of section {section} is "
                        f"{stated['value']!r}, expected an integer"
                    )
                return int(stated["value"])
    raise InvalidData(f"conditions.toml: no value of {parameter} for section {section}")


def rules(published: Published) -> Iterator[Finding]:
    """All findings of this module."""
    for rule in (
        _percentages,
        _quoted,
        _order,
        _tokens,
        _window,
        _save_cost,
        _counts,
        _integers,
        _x86,
        _sizes,
    ):
        yield from rule(published)


def change_interval(control: Cell, treatment: Cell) -> Interval:
    """Change in per cent that the rounding of both means allows."""
    ratio = rounded(treatment.mean).over(rounded(control.mean))
    return Interval(100 * (ratio.low - 1), 100 * (ratio.high - 1))


def _judge(
    checks: Iterable[tuple[str, Fraction]], show: Callable[[float], str]
) -> tuple[Verdict, str]:
    """Verdict of (where, gap) pairs and the text of the gaps that are not 0."""
    gaps = [f"{where} by {show(float(gap))}" for where, gap in checks if gap]
    return holds(not gaps), "; ".join(gaps)


def _points(value: float) -> str:
    return f"{value:+.4f} percentage points"


def _percentages(published: Published) -> Iterator[Finding]:
    decimals = published.improvements["decimals"]
    rows = {row["concurrency"]: row["change_percent"] for row in published.improvements["rows"]}
    for metric in _CHANGES:
        table = published.board(metric)
        checks, numbers, texts = [], {}, []
        for c in CONCURRENCIES:
            claimed = rows[c][metric]
            allowed = change_interval(
                table.cell(metric, BASELINE, c), table.cell(metric, COOPERATIVE, c)
            )
            checks.append((f"c = {c}", _signed(claimed, decimals).gap(allowed)))
            numbers[f"printed_c{c}_percent"] = claimed
            numbers[f"least_c{c}_percent"] = float(allowed.low)
            numbers[f"most_c{c}_percent"] = float(allowed.high)
            texts.append(f"{claimed:+.{decimals}f}")
        verdict, by = _judge(checks, _points)
        text = f"printed changes of {metric} ({', '.join(texts)} %) against its printed means"
        yield Finding(f"percent/{metric}", ["4.4"], verdict, text, by, numbers)


def _signed(value: float, decimals: int) -> Interval:
    half = Fraction(1, 2 * 10**decimals)
    exact = Fraction(f"{value:.{decimals}f}")
    return Interval(exact - half, exact + half)


def _quoted(published: Published) -> Iterator[Finding]:
    items = published.improvements["quoted"]
    for section in sorted({item["section"] for item in items}):
        here = [item for item in items if item["section"] == section]
        checks = []
        for item in here:
            metric, c = item["metric"], item["concurrency"]
            table = published.board(metric)
            allowed = change_interval(
                table.cell(metric, BASELINE, c), table.cell(metric, COOPERATIVE, c)
            )
            gap = _signed(item["change_percent"], item["decimals"]).gap(allowed)
            checks.append((f"{metric} at c = {c}", gap))
        verdict, by = _judge(checks, _points)
        text = f"{len(here)} changes repeated in the text of {section} against the printed means"
        yield Finding(f"quoted/{section}", [section], verdict, text, by)


def _order(published: Published) -> Iterator[Finding]:
    """mean TTFT <= P95 TTFT (0.25 of the largest and 0.75 of the next), mean TTFT < latency."""
    for name, pairs in (
        ("inference", (("mean_ttft_ms", "p95_ttft_ms"), ("mean_ttft_ms", "mean_latency_ms"))),
        ("x86", (("mean_ttft_ms", "p95_ttft_ms"),)),
    ):
        table = published.tables[name]
        checks = [
            (
                f"{small} > {large} at c = {c}, {policy}",
                max(
                    Fraction(0),
                    rounded(table.cell(small, policy, c).mean).low
                    - rounded(table.cell(large, policy, c).mean).high,
                ),
            )
            for small, large in pairs
            for metric, policy, c in table.cells
            if metric == small
        ]
        verdict, by = _judge(checks, lambda gap: f"{gap:.2f} ms")
        text = f"order of the times of table {name}: mean TTFT, then P95 TTFT and mean latency"
        yield Finding(f"order/{name}", [table.section], verdict, text, by)


def tokens_per_request(published: Published, policy: str, c: int) -> Interval:
    """Output tokens of a request times the share of time in which slots are busy."""
    table = published.tables["inference"]
    product = mean_of_product(
        table.cell("output_tps", policy, c), table.cell("mean_latency_ms", policy, c)
    )
    return product.over(1000 * c)


def _tokens(published: Published) -> Iterator[Finding]:
    limit = stated_integer(published, "output-limit")
    least = limit - published.rules["tolerances"]["tokens_short_per_request"]
    allowed = Interval(Fraction(least), Fraction(limit))
    checks, numbers = [], {}
    for policy, c in _BOARD_CELLS:
        found = tokens_per_request(published, policy, c)
        checks.append((f"c = {c}, {policy}", found.gap(allowed)))
        numbers[f"least_{policy}_c{c}_tokens"] = float(found.low)
        numbers[f"most_{policy}_c{c}_tokens"] = float(found.high)
    low = min(value for name, value in numbers.items() if name.startswith("least"))
    high = max(value for name, value in numbers.items() if name.startswith("most"))
    verdict, by = _judge(checks, lambda gap: f"{gap:+.2f} tokens")
    text = (
        f"TPS x latency / c gives {low:.2f} to {high:.2f} tokens a request; at most {limit} can be"
    )
    yield Finding("tokens/per-request", ["4.2", "4.4"], verdict, text, by, numbers)


def load_interval_s(published: Published, policy: str, c: int) -> Interval:
    """Wall time of the load: requests x latency / c, slots busy but for the tolerance."""
    requests, limit = (
        stated_integer(published, "requests"),
        stated_integer(published, "output-limit"),
    )
    short = published.rules["tolerances"]["tokens_short_per_request"]
    latency = rounded(published.tables["inference"].cell("mean_latency_ms", policy, c).mean)
    busy = latency.times(Fraction(requests, 1000 * c))
    return Interval(busy.low, busy.high * Fraction(limit, limit - short))


def window_interval_s(published: Published, policy: str, c: int) -> Interval:
    """Mean length of the profiler's window from saves and saves/s."""
    vstate, inference = published.tables["vstate"], published.tables["inference"]
    saves, rate = vstate.cell("save_count", policy, c), vstate.cell("saves_per_s", policy, c)
    latency = inference.cell("mean_latency_ms", policy, c)
    excess = Fraction(str(published.rules["tolerances"]["window_excess_share"]))
    scale = Fraction(stated_integer(published, "requests"), 1000 * c) * (1 + excess)
    # mean(saves) = mean(rate x window), so mean(window) = (mean(saves) - covariance) / mean(rate).
    covariance = covariance_bound(rate, latency) * scale
    return rounded(saves.mean).widened(covariance).over(rounded(rate.mean))


def _window(published: Published) -> Iterator[Finding]:
    share = Fraction(str(published.rules["tolerances"]["window_excess_share"]))
    checks, numbers = [], {}
    for policy, c in _BOARD_CELLS:
        load = load_interval_s(published, policy, c)
        window = window_interval_s(published, policy, c)
        excess = window.minus(load)
        checks.append((f"c = {c}, {policy}", excess.gap(Interval(Fraction(0), load.high * share))))
        numbers[f"excess_{policy}_c{c}_s"] = float((window.low + window.high) / 2 - load.low)
    verdict, by = _judge(checks, lambda gap: f"{gap:+.2f} s")
    low, high = min(numbers.values()), max(numbers.values())
    text = (
        f"saves / (saves/s) gives a window {low:.1f} to {high:.1f} s longer than requests x "
        f"latency / c (0 to {float(100 * share):g} % allowed)"
    )
    yield Finding("window/encloses-load", ["3.6", "4.4"], verdict, text, by, numbers)


def save_ns(published: Published, policy: str, c: int) -> float:
    """Mean nanoseconds of a save: total time over count."""
    table = published.tables["vstate"]
    total, count = table.cell("save_total_ms", policy, c), table.cell("save_count", policy, c)
    return float(total.mean.value * 10**6 / count.mean.value)


def _save_cost(published: Published) -> Iterator[Finding]:
    limits = published.rules["tolerances"]
    costs = {(policy, c): save_ns(published, policy, c) for policy, c in _BOARD_CELLS}
    middle = median(costs.values())
    factor = limits["save_cost_factor"]
    low = max(limits["save_least_ns"], middle / factor)
    high = min(limits["save_most_ns"], middle * factor)
    bad = [
        f"c = {c}, {policy}: {cost:.0f} ns"
        for (policy, c), cost in costs.items()
        if not low <= cost <= high
    ]
    numbers = {f"save_{policy}_c{c}_ns": cost for (policy, c), cost in costs.items()}
    text = (
        f"save time / saves is {min(costs.values()):.0f} to {max(costs.values()):.0f} ns "
        f"({low:.0f} to {high:.0f} allowed); it is larger with fewer saves at every c"
        if all(costs[COOPERATIVE, c] > costs[BASELINE, c] for c in CONCURRENCIES)
        else f"save time / saves is {min(costs.values()):.0f} to {max(costs.values()):.0f} ns "
        f"({low:.0f} to {high:.0f} allowed)"
    )
    yield Finding("save-cost/per-save", ["4.4"], holds(not bad), text, "; ".join(bad), numbers)


def _counts(published: Published) -> Iterator[Finding]:
    table = published.tables["vstate"]
    shares, bad = {}, []
    for policy, c in _BOARD_CELLS:
        saves = table.cell("save_count", policy, c).mean.value
        switches = table.cell("context_switches", policy, c).mean.value
        shares[f"share_{policy}_c{c}"] = float(saves / switches)
        if saves > switches:
            bad.append(f"c = {c}, {policy}: {int(saves - switches)} more saves than switches")
    text = (
        f"a save happens at a switch-out: {100 * min(shares.values()):.0f} to "
        f"{100 * max(shares.values()):.0f} % of the switches save"
    )
    yield Finding(
        "counts/saves-within-switches", ["4.4"], holds(not bad), text, "; ".join(bad), shares
    )
    yield _removed(published)
    x86 = published.tables["x86"]
    bad = [
        f"c = {c}"
        for c in CONCURRENCIES
        if x86.cell("involuntary_switches", BASELINE, c).mean.value
        > x86.cell("context_switches", BASELINE, c).mean.value
    ]
    parts = {
        f"involuntary_c{c}_share": float(
            x86.cell("involuntary_switches", BASELINE, c).mean.value
            / x86.cell("context_switches", BASELINE, c).mean.value
        )
        for c in CONCURRENCIES
    }
    text = (
        f"involuntary switches are part of all on x86: {100 * min(parts.values()):.1f} to "
        f"{100 * max(parts.values()):.1f} %, so nearly all are waits, which no slice avoids"
    )
    yield Finding(
        "counts/involuntary-within-switches",
        ["3.7"],
        holds(not bad),
        text,
        "; ".join(bad),
        parts,
    )


def _removed(published: Published) -> Finding:
    """Removed saves exceed removed switches by no more than the sds allow."""
    table = published.tables["vstate"]
    bad, texts = [], []
    numbers: dict[str, float] = {}
    for c in CONCURRENCIES:
        cells = [
            (table.cell("save_count", policy, c), table.cell("context_switches", policy, c))
            for policy in _POLICIES
        ]
        removed_saves, removed_switches = (
            int(cells[0][column].mean.value - cells[1][column].mean.value) for column in (0, 1)
        )
        # The sd of a difference is at most the sum of the sds.
        parts = [(float(a.sd) + float(b.sd)) ** 2 / a.n for a, b in cells]
        df = sum(parts) ** 2 / sum(
            part**2 / (a.n - 1) for part, (a, _) in zip(parts, cells, strict=True)
        )
        quantile = float(stats.t.ppf(0.5 + published.rules["level"] / 2, df))
        allowed = quantile * math.sqrt(sum(parts))
        excess = removed_saves - removed_switches
        if excess > allowed:
            bad.append(f"c = {c}: {excess} more saves than switches gone, {allowed:.0f} allowed")
        numbers[f"removed_saves_c{c}"] = removed_saves
        numbers[f"removed_switches_c{c}"] = removed_switches
        numbers[f"allowed_excess_c{c}"] = allowed
        texts.append(f"{removed_saves} / {removed_switches}")
    text = f"removed saves / removed switches: {', '.join(texts)} (c = 2, 4, 8)"
    return Finding("counts/removed", ["4.4"], holds(not bad), text, "; ".join(bad), numbers)


def integer_triple(mean: Printed, sd: Printed) -> bool:
    """Whether three integers from 0 have this printed mean and sample sd.

    With a >= b >= c, u = a - b and v = b - c: the sum S is an integer with S = u - v (mod 3), and
    3 sd^2 = u^2 + u v + v^2.
    """
    means, sds = rounded(mean), rounded(sd)
    low, high = 3 * sds.low**2, 3 * sds.high**2
    sums = range(math.ceil(3 * means.low), math.floor(3 * means.high) + 1)
    residues = {total % 3: total for total in sums}
    for u in range(math.isqrt(math.floor(high)) + 1):
        v = max(0, _least_v(u, low))
        while u * u + u * v + v * v <= high:
            total = residues.get((u - v) % 3)
            if total is not None and total >= u + 2 * v:
                return True
            v += 1
    return False


def _least_v(u: int, low: Fraction) -> int:
    """The least v from 0 with u^2 + u v + v^2 >= low."""
    missing = low - u * u
    if missing <= 0:
        return 0
    v = (math.isqrt(u * u + 4 * math.floor(missing)) - u) // 2
    while u * v + v * v < missing:
        v += 1
    return v


def _integers(published: Published) -> Iterator[Finding]:
    for name, metrics in (
        ("vstate", ("save_count", "context_switches")),
        ("x86", ("context_switches", "involuntary_switches")),
    ):
        table = published.tables[name]
        if table.runs_per_cell != 3:
            raise InvalidData(
                f"{name}.toml: runs_per_cell is {table.runs_per_cell}, the rule of "
                "integer counts knows 3"
            )
        for metric in metrics:
            cells = [(key, cell) for key, cell in table.cells.items() if key[0] == metric]
            bad = [
                f"c = {c}, {policy}: {cell.mean.text} +- {cell.sd.text}"
                for (_, policy, c), cell in cells
                if not integer_triple(cell.mean, cell.sd)
            ]
            text = f"each mean and sd of {metric} ({name}) can come from three integers"
            yield Finding(
                f"integers/{name}-{metric}",
                [table.section],
                holds(not bad),
                text,
                "; ".join(bad),
            )


def _x86(published: Published) -> Iterator[Finding]:
    table = published.tables["x86"]
    board_requests = stated_integer(published, "requests")

    def cells(metric: str) -> list[Cell]:
        return [table.cell(metric, BASELINE, c) for c in CONCURRENCIES]

    switches, each, state = (
        cells("context_switches"),
        cells("switches_per_request"),
        cells("xstate_per_request_kib"),
    )
    quotients = [
        rounded(total.mean).over(rounded(one.mean))
        for total, one in zip(switches, each, strict=True)
    ]
    common = [n for n in range(1, 1001) if all(q.low <= n <= q.high for q in quotients)]
    bad = []
    for c, total, one, quotient in zip(CONCURRENCIES, switches, each, quotients, strict=True):
        spread = rounded(total.sd).over(rounded(one.sd))
        if not common:
            bad.append(f"c = {c}: {float(quotient.low):.3f} to {float(quotient.high):.3f}")
        elif not spread.low <= common[0] <= spread.high:
            bad.append(f"c = {c}: the sds give {float(spread.low):.2f} to {float(spread.high):.2f}")
    shown = str(common[0]) if common else "no common number of"
    text = f"switches / switches per request gives {shown} requests at every c, means and sds"
    yield Finding("x86/switches-per-request", ["3.7"], holds(not bad), text, "; ".join(bad))
    if common:
        same = common[0] == board_requests
        text = (
            f"requests of a run: {common[0]} on x86 by its table, {board_requests} on the board; "
            "3.7 says the same"
        )
        by = "" if same else f"{common[0]} instead of {board_requests}"
        verdict = holds(same)
    else:
        verdict, by = Verdict.NOT_CHECKABLE, ""
        text = "the number of requests of an x86 run does not follow from its table"
    yield Finding("x86/requests-as-board", ["3.7", "4.2"], verdict, text, by)
    area = published.arithmetic["x86_state"]["xsave_area_bytes"]
    checks = []
    for c, one, kib in zip(CONCURRENCIES, each, state, strict=True):
        for what, source, target in (("mean", one.mean, kib.mean), ("sd", one.sd, kib.sd)):
            expected = rounded(source).times(Fraction(area, 1024))
            checks.append((f"{what} at c = {c}", rounded(target).gap(expected)))
    verdict, by = _judge(checks, lambda gap: f"{gap:+.3f} KiB")
    text = f"xstate per request is switches per request x {area} B, means and sds"
    yield Finding("x86/xstate-per-request", ["3.7"], verdict, text, by)
    yield _growth(published)
    checks = [
        (
            f"{item['metric']} at c = {item['concurrency']}",
            rounded(printed(item["value"], item["decimals"], "arithmetic.toml")).gap(
                rounded(table.cell(item["metric"], BASELINE, item["concurrency"]).mean)
            ),
        )
        for item in published.arithmetic["x86_quoted"]
    ]
    verdict, by = _judge(checks, lambda gap: f"{gap:+.2f}")
    text = f"{len(checks)} numbers of the x86 table repeated in the text"
    yield Finding("x86/quoted", ["3.7"], verdict, text, by)


def _growth(published: Published) -> Finding:
    table, growth = published.tables["x86"], published.arithmetic["x86_growth"]
    claimed = rounded(printed(growth["ratio"], growth["decimals"], "arithmetic.toml"))
    checks = []
    for metric in growth["metrics"]:
        start = table.cell(metric, BASELINE, growth["from_concurrency"])
        end = table.cell(metric, BASELINE, growth["to_concurrency"])
        checks.append((metric, claimed.gap(rounded(end.mean).over(rounded(start.mean)))))
    verdict, by = _judge(checks, lambda gap: f"{gap:+.3f}")
    text = (
        f"growth from c = {growth['from_concurrency']} to {growth['to_concurrency']} on x86 is "
        f"{growth['ratio']:g} for switches and bytes per request"
    )
    return Finding("x86/growth", [growth["section"]], verdict, text, by)


def _sizes(published: Published) -> Iterator[Finding]:
    numbers = published.arithmetic
    sizes: dict[int, int] = {}
    for item in numbers["save_bytes"]:
        bits = item["vlen_bits"]
        sizes[bits] = numbers["vector_registers"] * bits // 8
        gap = item["bytes"] - sizes[bits]
        yield Finding(
            f"save-bytes/{bits}",
            item["sections"],
            holds(gap == 0),
            f"a save at VLEN {bits} is {numbers['vector_registers']} x {bits} / 8 = "
            f"{sizes[bits]} bytes, printed {item['bytes']}",
            f"{gap:+d} bytes" if gap else "",
        )
    for item in numbers["state_ratios"]:
        yield _state_ratio(item, sizes[item["vlen_bits"]], numbers["x86_state"])


def _state_ratio(item: dict[str, Any], size: int, x86: dict[str, Any]) -> Finding:
    other = x86[item["over"]]
    exact = Fraction(size, other)
    gap = rounded(printed(item["ratio"], item["decimals"], "arithmetic.toml")).gap(
        Interval(exact, exact)
    )
    short = {"xsave_area_bytes": "xsave", "avx_component_bytes": "avx"}[item["over"]]
    sections: Sequence[str] = item["sections"]
    return Finding(
        f"state-ratio/{item['vlen_bits']}-{short}",
        sections,
        holds(not gap),
        f"{size} / {other} = {float(exact):.4f}, printed {item['ratio']:g}",
        f"{float(gap):+.4f}" if gap else "",
    )

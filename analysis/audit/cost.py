"""Cost accounting: can the saves avoided, at their measured cost, explain the throughput gained?

Promise: the comparison favours the claim: all save time is taken as if it lay on the critical path
of one processor, with its probe, and the interval ends that favour it are taken.
Limit: effects of a save beside its own time (caches, restores) are not measured in the report; the
finding says by what factor they would have to exceed it.
"""

import math
from collections.abc import Iterator

from scipy import stats

from analysis.audit.arithmetic import stated_integer
from analysis.audit.finding import Finding, Verdict
from analysis.contrasts import ratio
from analysis.published import BASELINE, CONCURRENCIES, COOPERATIVE, Cell, Published


def rules(published: Published) -> Iterator[Finding]:
    """The finding cost/explains-gain."""
    cpus = published.rules["tolerances"]["board_cpus"]
    tokens = stated_integer(published, "requests") * stated_integer(published, "output-limit")
    level = published.rules["level"]
    inference, vstate = published.tables["inference"], published.tables["vstate"]
    numbers: dict[str, float] = {}
    factors, safe_factors = [], []
    for c in CONCURRENCIES:
        slow, fast = (inference.cell("output_tps", p, c) for p in (BASELINE, COOPERATIVE))
        more, less = (vstate.cell("save_total_ms", p, c) for p in (BASELINE, COOPERATIVE))
        switches = [vstate.cell("context_switches", p, c).mean for p in (BASELINE, COOPERATIVE)]
        saves = [vstate.cell("save_count", p, c).mean for p in (BASELINE, COOPERATIVE)]
        gained_s = tokens / float(slow.mean) - tokens / float(fast.mean)
        avoided_s = (float(more.mean) - float(less.mean)) / 1000
        least_gained_s = tokens / float(slow.mean) * (1 - 1 / ratio(fast.log, slow.log, level).low)
        most_avoided_s = _upper_difference(more, less, level) / 1000
        # Nothing gained needs no explanation; a gain without fewer saves has none.
        factors.append(_quotient(gained_s, avoided_s))
        safe_factors.append(_quotient(least_gained_s, most_avoided_s))
        numbers |= {
            f"gained_c{c}_s": gained_s,
            f"avoided_c{c}_s": avoided_s,
            f"least_gained_c{c}_s": least_gained_s,
            f"most_avoided_c{c}_s": most_avoided_s,
        }
        if gained_s > 0:
            numbers[f"serial_share_c{c}"] = avoided_s / gained_s
            numbers[f"spread_share_c{c}"] = avoided_s / gained_s / cpus
        for name, pair in (("save", saves), ("switch", switches)):
            if removed := float(pair[0].value - pair[1].value):
                numbers[f"needed_per_{name}_c{c}_us"] = 1e6 * gained_s / removed
    if max(factors) <= 1:
        verdict = Verdict.CONSISTENT
    elif max(safe_factors) > 1:
        verdict = Verdict.INCONSISTENT
    else:
        verdict = Verdict.NOISE
    gains = ", ".join(f"{numbers[f'gained_c{c}_s']:.1f}" for c in CONCURRENCIES)
    costs = ", ".join(f"{numbers[f'avoided_c{c}_s']:.3f}" for c in CONCURRENCIES)
    text = (
        f"a run became {gains} s shorter (c = 2, 4, 8); all save time avoided, taken as serial, "
        f"is {costs} s"
    )
    by = (
        f"{min(factors):.0f} to {max(factors):.0f} times too little if serial, {cpus} times that "
        f"if spread over {cpus} CPUs; at the favourable ends of the {100 * level:g} % intervals "
        f"{min(safe_factors):.0f} to {max(safe_factors):.0f} times"
    )
    if verdict is Verdict.CONSISTENT:
        by = ""
    yield Finding("cost/explains-gain", ["2.3.1", "4.4", "4.5"], verdict, text, by, numbers)


def _quotient(gained_s: float, avoided_s: float) -> float:
    """How many times the time gained is the time avoided; 0 when nothing was gained."""
    if gained_s <= 0:
        return 0.0
    return gained_s / avoided_s if avoided_s > 0 else math.inf


def _upper_difference(a: Cell, b: Cell, level: float) -> float:
    """Upper end of Welch's interval of mean(a) - mean(b)."""
    parts = [cell.summary.sd**2 / cell.n for cell in (a, b)]
    df = sum(parts) ** 2 / sum(part**2 / (a.n - 1) for part in parts)
    return (
        float(a.mean)
        - float(b.mean)
        + float(stats.t.ppf(0.5 + level / 2, df)) * math.sqrt(sum(parts))
    )

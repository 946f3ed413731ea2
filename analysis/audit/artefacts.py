"""Signs of an artefact: prompts answered from a cache, waves that vary with concurrency.

Promise: the bound of the first rule is derived in docs/audit.md and holds for any speed.
Limit: a sign, not a proof; the raw times of the requests are not printed.
"""

from collections.abc import Iterator
from fractions import Fraction

from analysis.audit.arithmetic import stated_integer
from analysis.audit.finding import Finding, Verdict, holds
from analysis.published import BASELINE, CONCURRENCIES, Published


def rules(published: Published) -> Iterator[Finding]:
    """All findings of this module."""
    yield _prompt_cache(published, "inference")
    yield _prompt_cache(published, "x86")
    requests = stated_integer(published, "requests")
    waves = " / ".join(f"{requests / c:g}" for c in CONCURRENCIES)
    text = (
        f"{requests} requests make {waves} waves at c = 2 / 4 / 8: what is due to concurrency and "
        "what to the number of waves (and to P95 of so few requests) cannot be separated"
    )
    yield Finding("artefact/waves", ["4.2", "4.4"], Verdict.NOT_CHECKABLE, text)


def _prompt_cache(published: Published, name: str) -> Finding:
    """P95 TTFT over mean TTFT is at most 2c/(c + 1) when all of a wave wait for equal prompts."""
    table = published.tables[name]
    over, numbers, texts = [], {}, []
    keys = sorted((c, policy) for metric, policy, c in table.cells if metric == "mean_ttft_ms")
    for c, policy in keys:
        mean, p95 = (table.cell(m, policy, c).mean.value for m in ("mean_ttft_ms", "p95_ttft_ms"))
        found, bound = p95 / mean, Fraction(2 * c, c + 1)
        numbers[f"p95_over_mean_{policy}_c{c}"] = float(found)
        numbers[f"bound_c{c}"] = float(bound)
        texts.append(f"{float(found):.2f}")
        if found > bound:
            label = f"c = {c}" if policy == BASELINE else f"c = {c}, {policy}"
            over.append(f"{float(found):.2f} at {label}, at most {float(bound):.2f} by queueing")
    text = (
        f"P95 / mean time to first token ({name}: {', '.join(texts)}) against queueing alone; more "
        "means that some requests did not pay for their prompt"
    )
    return Finding(
        f"artefact/prompt-cache-{name}",
        [table.section],
        holds(not over),
        text,
        "; ".join(over),
        numbers,
    )

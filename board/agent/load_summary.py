"""The run as a whole: its numbers, and whether they may be used.

Promise: only successful requests enter latency and throughput, all measured ones enter the counts;
what there is no sample of is None; everything is computed from unrounded times and rounded last.
Limit: the requests of one run are not independent of each other; statistics about a claim take the
run as the sample.
Formulas: schemas/loadgen.schema.json.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from board.agent import stats
from board.agent.load_config import LoadConfig
from board.agent.load_records import STATUSES, Outcome

# Below this many samples a 95th percentile is the maximum, or nearly so.
_FEWEST_FOR_P95 = 20
# How far the client's and the server's clocks may disagree: an absolute part for the rounding of
# both, a relative one for two hosts.
_CLOCK_TOLERANCE_MS = 1.0
_CLOCK_TOLERANCE_PART = 0.001


def summarise(measured: Sequence[Outcome], config: LoadConfig) -> dict[str, Any]:
    """Return the `summary` of the schema for the measured requests."""
    ok = [outcome for outcome in measured if outcome.status == "ok"]
    counts = Counter(outcome.status for outcome in measured)
    window_ns = _window_ns(measured)
    counted_ns = window_ns if ok else None  # no success, no rate
    output_tokens = sum(outcome.output_tokens or 0 for outcome in ok)
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in ok)
    prompts_counted = all(outcome.prompt_tokens is not None for outcome in ok)
    steady_tokens, steady_ns = _steady(measured, min(config.concurrency, len(measured)))
    steps = stats.in_flight((outcome.t_send_ns, outcome.t_end_ns) for outcome in measured)
    span_ns = sum(end - start for start, end, _ in steps)
    tpot_ns = [t for outcome in ok if (t := outcome.tpot_ns) is not None]
    icl_ns = [gap for outcome in ok for gap in outcome.icl_ns]
    return {
        "n_requests": len(measured),
        "n_ok": len(ok),
        "n_failed": len(measured) - len(ok),
        "n_by_status": {status: counts[status] for status in STATUSES},
        "survivors_only": len(ok) < len(measured),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens if prompts_counted else None,
        "window_ms": None if window_ns is None else round(window_ns / 1e6, 3),
        "output_tps": _rate(output_tokens, counted_ns),
        "total_tps": _rate(output_tokens + prompt_tokens, counted_ns) if prompts_counted else None,
        "request_rps": _rate(len(ok), counted_ns),
        "steady_output_tps": _rate(steady_tokens, steady_ns if ok else None),
        "steady_window_ms": round(steady_ns / 1e6, 3),
        "mean_decode_tps": _rounded(stats.mean([1e9 / t for t in tpot_ns if t > 0])),
        "concurrency_asked": config.concurrency,
        "concurrency_peak": max((count for _, _, count in steps), default=0),
        "concurrency_mean": _rate(sum((e - s) * c for s, e, c in steps) / 1e9, span_ns),
        "start_spread_ms": start_spread_ms(measured, config),
        "p95_method": "linear: Hyndman-Fan type 7; nearest_rank: x[ceil(95 n / 100)]",
        "p95_low_n": len(ok) < _FEWEST_FOR_P95,
        "n_tpot": len(tpot_ns),
        "n_icl": len(icl_ns),
        **_describe("ttft", [t for outcome in ok if (t := outcome.ttft_ns) is not None]),
        **_describe("tpot", tpot_ns),
        **_describe("icl", icl_ns),
        **_describe("latency", [t for outcome in ok if (t := outcome.e2e_ns) is not None]),
        **_describe("client_queue", [outcome.t_send_ns - outcome.t_sched_ns for outcome in ok]),
        **_describe(
            "sched_latency",
            [t - outcome.t_sched_ns for outcome in ok if (t := outcome.t_last_ns) is not None],
        ),
    }


def _window_ns(measured: Sequence[Outcome]) -> int | None:
    ends = [t for outcome in measured if (t := outcome.t_last_ns) is not None]
    return max(ends) - min(outcome.t_send_ns for outcome in measured) if ends else None


def _steady(measured: Sequence[Outcome], concurrency: int) -> tuple[float, int]:
    """Return tokens and ns of the times when exactly `concurrency` requests were in flight.

    A chunk carries its request's mean tokens per chunk.  It belongs to the step that ends with it,
    because what it brings was made before it came.
    """
    if not measured:
        return 0.0, 0
    steps = stats.in_flight((outcome.t_send_ns, outcome.t_end_ns) for outcome in measured)
    steady = [(start, end) for start, end, count in steps if count == concurrency]
    ends = [end for _, end in steady]

    def inside(t_ns: int) -> bool:
        index = bisect_left(ends, t_ns)
        return index < len(ends) and steady[index][0] < t_ns

    tokens = 0.0
    for outcome in measured:
        if outcome.status == "ok" and outcome.output_tokens:
            weight = outcome.output_tokens / len(outcome.t_text_ns)
            tokens += weight * sum(map(inside, outcome.t_text_ns))
    return tokens, sum(end - start for start, end in steady)


def start_spread_ms(measured: Sequence[Outcome], config: LoadConfig) -> float | None:
    """Return last minus first send among requests that were to start together, the worst group.

    Closed loop: the first `concurrency` ones; rounds: those of each round; open loop: None.
    """
    if config.mode == "open" or not measured:
        return None
    sends: dict[int | None, list[int]] = {}
    for outcome in measured:
        sends.setdefault(outcome.job.round, []).append(outcome.t_send_ns)
    groups = [sorted(times)[: config.concurrency] for times in sends.values()]
    return round(max(times[-1] - times[0] for times in groups) / 1e6, 3)


def _rate(count: float, t_ns: int | None) -> float | None:
    return round(count * 1e9 / t_ns, 6) if t_ns else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _describe(name: str, samples_ns: Sequence[float]) -> dict[str, float | None]:
    values = {
        "mean": stats.mean(samples_ns),
        "sd": stats.standard_deviation(samples_ns),
        "min": min(samples_ns, default=None),
        "p50": stats.percentile_linear(samples_ns, 50),
        "p95": stats.percentile_linear(samples_ns, 95),
        "p95_nearest_rank": stats.percentile_nearest_rank(samples_ns, 95),
        "p99": stats.percentile_linear(samples_ns, 99),
        "max": max(samples_ns, default=None),
    }
    return {
        f"{key}_{name}_ms": None if value is None else round(value / 1e6, 3)
        for key, value in values.items()
    }


def findings(
    outcomes: Sequence[Outcome],
    summary: dict[str, Any],
    config: LoadConfig,
    expected_prompt_tokens: int | None,
    loop_lag_max_ms: float | None,
) -> dict[str, str]:
    """Return why the run may not be used: reason to one line; empty when it may."""
    measured = [outcome for outcome in outcomes if outcome.job.phase == "measured"]
    found = {
        "failed_requests": _failed(measured),
        "warmup_failed": _failed([o for o in outcomes if o.job.phase == "warmup"]),
        "unequal_output": _first(
            measured,
            lambda o: (
                o.output_tokens is not None
                and (o.output_tokens != config.max_tokens or o.finish_reason != "length")
                and o.token_source != "chunks"
            ),
            lambda o: (
                f"{o.output_tokens} tokens, finish_reason {o.finish_reason}, "
                f"asked for {config.max_tokens}"
            ),
        ),
        "prompt_cache_hit": _first(
            [] if config.one_prompt else measured,
            lambda o: bool(o.cached_tokens),
            lambda o: f"{o.cached_tokens} prompt tokens came from a cache",
        ),
        "token_count_mismatch": _first(
            measured, lambda o: o.mismatch is not None, lambda o: str(o.mismatch)
        ),
        "token_count_unknown": _first(
            measured,
            lambda o: o.token_source == "chunks" and o.status == "ok",
            lambda o: f"no usage and no timings; {o.output_tokens} is the number of chunks",
        ),
        "prompt_length_mismatch": _prompt_lengths(measured, expected_prompt_tokens),
        "clock_mismatch": _first(measured, _clocks_disagree, _clocks_line),
        "start_spread": _above(
            summary["start_spread_ms"], config.max_start_spread_ms, "ms between first and last send"
        ),
        "client_overloaded": _above(
            loop_lag_max_ms, config.max_loop_lag_ms, "ms lag of the client's event loop"
        ),
        "concurrency_not_reached": _concurrency(summary, config),
    }
    return {reason: line for reason, line in found.items() if line is not None}


def _first(
    outcomes: Sequence[Outcome],
    test: Callable[[Outcome], bool],
    line: Callable[[Outcome], str],
) -> str | None:
    hits = [outcome for outcome in outcomes if test(outcome)]
    if not hits:
        return None
    return f"{len(hits)} of {len(outcomes)} requests; request {hits[0].job.id}: {line(hits[0])}"


def _failed(outcomes: Sequence[Outcome]) -> str | None:
    counts = Counter(outcome.status for outcome in outcomes if outcome.status != "ok")
    if not counts:
        return None
    kinds = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    first = next(outcome for outcome in outcomes if outcome.status != "ok")
    return f"{kinds} of {len(outcomes)}; request {first.job.id}: {first.error}"


def _prompt_lengths(measured: Sequence[Outcome], expected: int | None) -> str | None:
    lengths = sorted({o.prompt_tokens for o in measured if o.prompt_tokens is not None})
    if len(lengths) > 1:
        return f"prompts of {lengths} tokens in one run"
    if lengths and expected is not None and lengths[0] != expected:
        return f"prompts of {lengths[0]} tokens, asked for {expected}"
    return None


def _clock_parts(outcome: Outcome) -> list[tuple[str, float, float]]:
    """Return (name, what the client saw, the least it can have been), in ms."""
    timings = outcome.timings or {}
    prompt_ms, predicted_ms = timings.get("prompt_ms"), timings.get("predicted_ms")
    ttft_ns, e2e_ns = outcome.ttft_ns, outcome.e2e_ns
    parts = []
    if prompt_ms is not None and ttft_ns is not None:
        parts.append(("ttft", ttft_ns / 1e6, prompt_ms))
        if predicted_ms is not None and e2e_ns is not None:
            parts.append(("e2e", e2e_ns / 1e6, prompt_ms + predicted_ms))
    return parts


def _clocks_disagree(outcome: Outcome) -> bool:
    return any(
        seen + _CLOCK_TOLERANCE_MS + least * _CLOCK_TOLERANCE_PART < least
        for _, seen, least in _clock_parts(outcome)
    )


def _clocks_line(outcome: Outcome) -> str:
    return "; ".join(
        f"{name} {seen:.3f} ms here, at least {least:.3f} ms by the server's timings"
        for name, seen, least in _clock_parts(outcome)
    )


def _above(value: float | None, limit: float, what: str) -> str | None:
    return f"{value:g} {what}, limit {limit:g}" if value is not None and value > limit else None


def _concurrency(summary: dict[str, Any], config: LoadConfig) -> str | None:
    asked = min(config.concurrency, config.requests)
    peak = summary["concurrency_peak"]
    if config.mode == "open" or peak == asked:
        return None
    return f"{peak} requests in flight at most, asked for {asked}"

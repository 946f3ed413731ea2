"""From a reply's bytes to what one request is worth: status, token counts, times.

Promise: `choices`, `usage`, `timings` and `error` of a chunk are read independently of each other,
in whatever chunk they come; token counts come from the server (usage, else timings) and are never
guessed from text; a stream that is not a complete success is never counted as one.
Limit: one choice per request (`n` is 1), text completions only.
Definitions of all times: schemas/loadgen.schema.json.
"""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from board.agent.load_client import DONE, Reply

Phase = Literal["probe", "warmup", "measured"]

STATUSES = (
    "ok",
    "short_output",
    "truncated",
    "stream_broken",
    "error_in_band",
    "no_tokens",
    "http_4xx",
    "http_503",
    "http_5xx",
    "connect_error",
    "timeout_connect",
    "timeout_first_token",
    "timeout_stall",
    "timeout_total",
    "cancelled",
    "parse_error",
)

_USAGE = ("completion_tokens", "prompt_tokens")
_TIMINGS = (
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "predicted_n",
    "predicted_ms",
    "draft_n",
    "draft_n_accepted",
)
_STREAM_LINES = (b":", b"data", b"event", b"id", b"retry")
_MESSAGE_CHARACTERS = 500


@dataclass(frozen=True)
class Job:
    """A request to be sent."""

    id: int
    phase: Phase
    prompt: str
    round: int | None = None  # rounds mode only
    t_planned_ns: int | None = None  # open loop only: after the start of the phase


@dataclass
class Outcome:
    """A request that has ended; times are clock readings in ns, None if it never happened."""

    job: Job
    worker: int
    id_slot: int | None
    t_sched_ns: int
    t_send_ns: int
    t_end_ns: int
    status: str = "ok"
    error: str | None = None
    http_status: int | None = None
    t_first_chunk_ns: int | None = None  # the first data chunk, with or without text
    t_text_ns: list[int] = field(default_factory=list)  # of each chunk with text
    t_last_ns: int | None = None
    last_token_hidden: bool = False
    text: str = ""
    finish_reason: str | None = None
    output_tokens: int | None = None
    partial_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: str | None = None
    timings: dict[str, Any] | None = None
    mismatch: str | None = None  # two counts of the server that disagree

    @property
    def ttft_ns(self) -> int | None:
        return self.t_text_ns[0] - self.t_send_ns if self.t_text_ns else None

    @property
    def e2e_ns(self) -> int | None:
        return None if self.t_last_ns is None else self.t_last_ns - self.t_send_ns

    @property
    def tpot_ns(self) -> float | None:
        n = self.output_tokens
        if self.t_last_ns is None or not self.t_text_ns or n is None or n < 2:
            return None
        return (self.t_last_ns - self.t_text_ns[0]) / (n - 1)

    @property
    def icl_ns(self) -> list[int]:
        return [later - earlier for earlier, later in pairwise(self.t_text_ns)]


@dataclass
class _Stream:
    """What the events of one stream say, before it is judged."""

    outcome: Outcome
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    t_finish_ns: int | None = None
    in_band: str | None = None
    broken: str | None = None  # something that is not what this protocol allows


def conclude(
    job: Job, worker: int, id_slot: int | None, t_sched_ns: int, reply: Reply, max_tokens: int
) -> Outcome:
    """Judge one reply.  `max_tokens` is what was asked for."""
    outcome = Outcome(
        job=job,
        worker=worker,
        id_slot=id_slot,
        t_sched_ns=t_sched_ns,
        t_send_ns=reply.t_send_ns,
        t_end_ns=reply.t_send_ns if reply.t_end_ns is None else reply.t_end_ns,
        http_status=reply.http_status,
    )
    stream = _Stream(outcome)
    for event in reply.events:
        if event.error or event.kind == b"error":
            stream.in_band = _text(event.error or event.data)
        elif event.data and event.data != DONE:
            _read_chunk(stream, event.data, event.t_ns)
        if stream.broken or stream.in_band:
            break
    if not reply.events and reply.failure is None:
        _read_body(stream, bytes(reply.body))
    _count(stream)
    outcome.status, outcome.error = _judge(stream, reply, max_tokens)
    _settle(stream, complete=outcome.status in ("ok", "short_output"))
    return outcome


def _read_chunk(stream: _Stream, data: bytes, t_ns: int) -> None:
    outcome = stream.outcome
    try:
        chunk = json.loads(data.decode("utf-8"), parse_constant=_refuse)
        if not isinstance(chunk, dict):
            raise ValueError("not an object")
        if chunk.get("error"):
            stream.in_band = _error_message(chunk["error"])
            return
        if outcome.t_first_chunk_ns is None:
            outcome.t_first_chunk_ns = t_ns
        choices = chunk.get("choices")
        if choices:
            _read_choice(stream, choices[0], t_ns)
        usage = chunk.get("usage")
        stream.usage = _counts(usage, _USAGE) or stream.usage
        if isinstance(usage, dict) and usage.get("prompt_tokens_details"):
            details = _counts(usage["prompt_tokens_details"], ("cached_tokens",))
            outcome.cached_tokens = (details or {}).get("cached_tokens")
        stream.timings = _counts(chunk.get("timings"), _TIMINGS) or stream.timings
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        stream.broken = f"cannot read a chunk: {error}: {_text(data)}"


def _read_choice(stream: _Stream, choice: dict[str, Any], t_ns: int) -> None:
    outcome = stream.outcome
    text = choice.get("text")
    if text is not None and not isinstance(text, str):
        raise ValueError("choices[0].text is not a string")
    if text:
        outcome.t_text_ns.append(t_ns)
        outcome.text += text
    reason = choice.get("finish_reason")
    if reason is not None:
        if not isinstance(reason, str):
            raise ValueError("choices[0].finish_reason is not a string")
        outcome.finish_reason = reason
        stream.t_finish_ns = t_ns


def _counts(block: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return what `block` says of `names`, None if nothing; ValueError if a number is not one."""
    if not block:
        return None
    if not isinstance(block, dict):
        raise ValueError(f"expected an object with {names[0]}, got {block!r}")
    known = {name: block.get(name) for name in names}
    for name, value in known.items():
        kind = int | float if name.endswith("_ms") else int
        good = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not (good and value >= 0):
            raise ValueError(f"{name} is {value!r}")
    return known if any(value is not None for value in known.values()) else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_body(stream: _Stream, body: bytes) -> None:
    """Look for an error in an answer that had no events (a plain JSON body, an error page)."""
    try:
        answer = json.loads(body.decode("utf-8"))
        error = answer.get("error")
    except (ValueError, AttributeError, RecursionError):
        error = None
    if error:
        stream.in_band = _error_message(error)
    elif not all(line.startswith(_STREAM_LINES) for line in body.splitlines() if line):
        stream.broken = f"expected an event stream, got: {_text(body)}"


def _error_message(error: Any) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        code = error.get("code")
        return f"{error['message']} (code {code})" if code is not None else str(error["message"])
    return _text(json.dumps(error).encode())


def _text(data: bytes) -> str:
    """Return `data` as one line, cut to a length that a record can carry."""
    line = " ".join(data.decode("utf-8", "replace").split())
    return line if len(line) <= _MESSAGE_CHARACTERS else line[:_MESSAGE_CHARACTERS] + " ..."


def _count(stream: _Stream) -> None:
    """Set the token counts and say which of the server's own counts disagree."""
    outcome, usage, timings = stream.outcome, stream.usage or {}, stream.timings or {}
    from_usage, from_timings = usage.get("completion_tokens"), timings.get("predicted_n")
    if from_usage is not None:
        outcome.output_tokens, outcome.token_source = from_usage, "usage"
    elif from_timings is not None:
        outcome.output_tokens, outcome.token_source = from_timings, "timings"
    elif outcome.t_first_chunk_ns is not None:
        outcome.output_tokens, outcome.token_source = len(outcome.t_text_ns), "chunks"
    outcome.prompt_tokens = usage.get("prompt_tokens")
    cache_n, prompt_n = timings.get("cache_n"), timings.get("prompt_n")
    if cache_n is not None:
        outcome.cached_tokens = cache_n
    outcome.timings = stream.timings
    if None not in (from_usage, from_timings) and from_usage != from_timings:
        outcome.mismatch = f"usage says {from_usage} output tokens, timings {from_timings}"
    prompt = outcome.prompt_tokens
    if cache_n is not None and prompt_n is not None and prompt not in (None, cache_n + prompt_n):
        outcome.mismatch = f"usage says {prompt} prompt tokens, timings {cache_n} + {prompt_n}"


def _judge(stream: _Stream, reply: Reply, max_tokens: int) -> tuple[str, str | None]:
    """Return the status class and, unless it is ok, one line.

    What the server said counts before what the network did: a stream that breaks after an error
    message is an error, and one that breaks after the end of the answer is not broken.
    """
    outcome = stream.outcome
    status = reply.http_status
    if status is not None and status >= 400:
        name = "http_503" if status == 503 else "http_4xx" if status < 500 else "http_5xx"
        return name, f"HTTP status {status}: {stream.in_band or _text(bytes(reply.body))}"
    if status is not None and status != 200:
        return "parse_error", f"expected HTTP status 200, got {status}"
    if stream.in_band:
        return "error_in_band", stream.in_band
    if stream.broken:
        return "parse_error", stream.broken
    if reply.failure is not None:
        return reply.failure
    if not outcome.t_text_ns:
        return "no_tokens", "the stream ended without any text"
    if outcome.finish_reason is None:
        return "truncated", "the stream ended without a finish_reason"
    got = outcome.output_tokens
    counted = outcome.token_source != "chunks"
    if outcome.finish_reason != "length" or (counted and got is not None and got < max_tokens):
        return "short_output", (
            f"asked for {max_tokens} tokens, got {got}, finish_reason {outcome.finish_reason}"
        )
    return "ok", None


def _settle(stream: _Stream, *, complete: bool) -> None:
    """Set the time of the last token, or turn the count of an incomplete answer into a partial."""
    outcome = stream.outcome
    if not complete:
        outcome.partial_tokens = outcome.output_tokens or 0
        outcome.output_tokens = None
        return
    outcome.t_last_ns = outcome.t_text_ns[-1]
    # More tokens than chunks: the last token may have had no text of its own (held back, or
    # empty), and then the chunk that ends the answer is the first sign of it.
    hidden = (outcome.output_tokens or 0) > len(outcome.t_text_ns)
    if hidden and stream.t_finish_ns is not None:
        outcome.t_last_ns = max(outcome.t_last_ns, stream.t_finish_ns)
        outcome.last_token_hidden = True


def _ms(t_ns: float | None) -> float | None:
    return None if t_ns is None else round(t_ns / 1e6, 3)


def _per_second(count: float | None, t_ns: float | None) -> float | None:
    return None if count is None or not t_ns else round(count * 1e9 / t_ns, 6)


def as_json(outcome: Outcome, origin_ns: int) -> dict[str, Any]:
    """Return the record of one request as the schema has it; times count from `origin_ns`."""
    timings, n, tpot_ns = outcome.timings or {}, outcome.output_tokens, outcome.tpot_ns
    chunks = len(outcome.t_text_ns)
    predicted_n, predicted_ms = timings.get("predicted_n"), timings.get("predicted_ms")
    prompt_ms, ttft_ms = timings.get("prompt_ms"), _ms(outcome.ttft_ns)
    first_chunk = outcome.t_first_chunk_ns
    return {
        "id": outcome.job.id,
        "phase": outcome.job.phase,
        "round": outcome.job.round,
        "worker": outcome.worker,
        "id_slot": outcome.id_slot,
        "status": outcome.status,
        "error": outcome.error,
        "http_status": outcome.http_status,
        "prompt": outcome.job.prompt,
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "t_sched_ms": _ms(outcome.t_sched_ns - origin_ns),
        "t_send_ms": _ms(outcome.t_send_ns - origin_ns),
        "client_queue_ms": _ms(outcome.t_send_ns - outcome.t_sched_ns),
        "ttfr_ms": None if first_chunk is None else _ms(first_chunk - outcome.t_send_ns),
        "ttft_ms": ttft_ms,
        "tpot_ms": _ms(tpot_ns),
        "icl_ms": [_ms(gap) for gap in outcome.icl_ns],
        "e2e_ms": _ms(outcome.e2e_ns),
        "stream_ms": _ms(outcome.t_end_ns - outcome.t_send_ns),
        "decode_tps": _per_second(1, tpot_ns),
        "e2e_tps": _per_second(n, outcome.e2e_ns),
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": n,
        "partial_tokens": outcome.partial_tokens,
        "chunks": chunks,
        "tokens_per_chunk": round(n / chunks, 6) if n and chunks else None,
        "token_source": outcome.token_source,
        "last_token_hidden": outcome.last_token_hidden,
        "timings": outcome.timings,
        "server_tpot_ms": (
            round(predicted_ms / (predicted_n - 1), 3)
            if predicted_ms is not None and predicted_n is not None and predicted_n > 1
            else None
        ),
        "server_wait_est_ms": (
            round(ttft_ms - prompt_ms, 3) if ttft_ms is not None and prompt_ms is not None else None
        ),
    }

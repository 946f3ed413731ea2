"""Every fault of the public reports, and its neighbours, against a scripted server, to the digit.

F1 to F31 are the rows of the fault catalogue; what has another name is a neighbour of the row above
it.  Times are virtual (fake_server.VirtualLoop), so all expected numbers are exact.
"""

import asyncio
import json
import socket
from typing import Any

import pytest
from fake_server import (
    CUT,
    DONE,
    PING,
    RESET,
    STAY,
    Answer,
    FakeServer,
    Request,
    Rule,
    Step,
    VirtualLoop,
    error,
    event,
    fin,
    load,
    plain,
    props,
    run_virtual,
    slots,
    stream,
    text,
    tokens,
)

import schemas
from board.agent import load_records, load_summary
from board.agent.load_client import Reply
from board.agent.load_config import LoadConfig
from board.agent.load_health import Heartbeat
from board.agent.loadgen import run_load
from board.agent.sse import SseReader


def one(*steps: Step, max_tokens: int, **settings: Any) -> dict[str, Any]:
    """The record of a single request that is answered with `steps`; the run must be valid."""
    result, _ = load(stream(*steps), max_tokens=max_tokens, **settings)
    assert (result["valid"], result["invalid_reasons"]) == (True, []), result["invalid_details"]
    record: dict[str, Any] = result["requests"][0]
    return record


def bad(answer: Rule, *, max_tokens: int = 64, **settings: Any) -> dict[str, Any]:
    """The record of a single request that fails; the run is invalid and its numbers are empty."""
    result, _ = load(answer, max_tokens=max_tokens, **settings)
    record: dict[str, Any] = result["requests"][0]
    assert not result["valid"]
    assert "failed_requests" in result["invalid_reasons"]
    summary = result["summary"]
    assert (summary["n_ok"], summary["n_failed"], summary["survivors_only"]) == (0, 1, True)
    assert summary["n_by_status"][record["status"]] == 1
    assert (summary["mean_ttft_ms"], summary["mean_latency_ms"]) == (None, None)
    assert record["error"]
    return record


def part(record: dict[str, Any], *names: str) -> list[Any]:
    return [record[name] for name in names]


TIMES = ("ttfr_ms", "ttft_ms", "tpot_ms", "e2e_ms", "icl_ms")


# -- F1: an empty chunk first


def test_f1_an_empty_first_chunk_is_not_the_first_token() -> None:
    record = one(
        (50, text("")), (400, text("A")), (450, text("B")), (450, fin(2)), (450, DONE), max_tokens=2
    )
    assert part(record, *TIMES) == [50, 400, 50, 450, [50]]
    assert part(record, "output_tokens", "chunks", "token_source") == [2, 2, "usage"]
    assert part(record, "text", "status", "error") == ["AB", "ok", None]


def test_f1_progress_chunks_are_not_tokens() -> None:
    record = one(
        (10, text("", prompt_progress={"total": 9, "processed": 3})),
        (20, text("", prompt_progress={"total": 9, "processed": 9})),
        (40, text("A")),
        (55, fin(1)),
        (55, DONE),
        max_tokens=1,
    )
    assert part(record, *TIMES) == [10, 40, None, 40, []]


def test_f2_a_chunk_that_only_has_a_role_or_null_text_is_not_a_token() -> None:
    odd = [event({"choices": [{"index": 0}]}), event({"choices": [{"index": 0, "text": None}]})]
    record = one((5, odd[0]), (6, odd[1]), (9, text("A")), (9, fin(1)), (9, DONE), max_tokens=1)
    assert part(record, "ttfr_ms", "ttft_ms", "chunks") == [5, 9, 1]


# -- F3, F5: chunks are not tokens


def test_f3_several_tokens_in_a_chunk() -> None:
    steps = [(t, text("4 tokens")) for t in (100, 130, 160)]
    record = one(*steps, (160, fin(12)), (160, DONE), max_tokens=12)
    assert part(record, "output_tokens", "tpot_ms", "icl_ms") == [12, 5.455, [30, 30]]
    assert part(record, "tokens_per_chunk", "chunks") == [4, 3]


def test_f4_a_last_token_without_text_is_timed_by_the_final_chunk() -> None:
    record = one((100, text("A")), (140, fin(2)), (145, DONE), max_tokens=2)
    assert part(record, "e2e_ms", "tpot_ms", "last_token_hidden") == [140, 40, True]
    assert part(record, "icl_ms", "stream_ms", "decode_tps") == [[], 145, 25]


def test_f5_more_chunks_than_tokens() -> None:
    steps = [(10, text("Hel")), (20, text("lo")), (30, text(" world"))]
    record = one(*steps, (30, fin(2)), (30, DONE), max_tokens=2)
    assert part(record, "output_tokens", "chunks", "text") == [2, 3, "Hello world"]
    assert part(record, "tpot_ms", "last_token_hidden") == [20, False]


# -- F7, F9: where the counts are

USAGE = {"completion_tokens": 2, "prompt_tokens": 5, "total_tokens": 7}
STOP = {"index": 0, "text": "", "finish_reason": "length"}


@pytest.mark.parametrize(
    "steps",
    [
        [(30, fin(2))],
        [(30, event({"choices": [STOP]})), (50, event({"choices": [], "usage": USAGE}))],
        [(30, event({"choices": [STOP], "usage": None})), (50, event({"usage": USAGE}))],
        [(30, event({"choices": [STOP], "usage": USAGE})), (50, text("", usage=None))],
        [(30, event({"choices": [STOP], "usage": USAGE})), (50, event({"usage": {}}))],
    ],
)
def test_f7_f9_usage_in_whatever_chunk(steps: list[Step]) -> None:
    record = one((10, text("A")), (20, text("B")), *steps, (60, DONE), max_tokens=2)
    assert part(record, "output_tokens", "token_source", "prompt_tokens") == [2, "usage", 5]
    assert part(record, "e2e_ms", "tpot_ms", "icl_ms", "stream_ms") == [20, 10, [10], 60]


def test_f7_usage_on_every_chunk_counts_once() -> None:
    steps = [(10 * n, text("x", usage={"completion_tokens": n})) for n in (1, 2, 3)]
    record = one(*steps, (30, event({"choices": [STOP]})), (30, DONE), max_tokens=3)
    assert part(record, "output_tokens", "token_source") == [3, "usage"]


def test_f8_timings_alone_are_a_source() -> None:
    last = event({"choices": [STOP], "timings": {"predicted_n": 2, "cache_n": 0, "prompt_n": 5}})
    record = one((10, text("A")), (20, text("B")), (20, last), (20, DONE), max_tokens=2)
    assert part(record, "output_tokens", "token_source", "prompt_tokens") == [2, "timings", None]


def test_f7_without_any_count_the_chunks_are_shown_and_the_run_is_flagged() -> None:
    steps = [(10, text("A")), (20, text("B")), (20, event({"choices": [STOP]})), (20, DONE)]
    result, _ = load(stream(*steps), max_tokens=9)
    assert result["invalid_reasons"] == ["token_count_unknown"]
    record = result["requests"][0]
    assert part(record, "status", "output_tokens", "token_source") == ["ok", 2, "chunks"]


def test_f10_finish_reason_and_text_in_one_chunk() -> None:
    last = {"index": 0, "text": "B", "finish_reason": "length"}
    record = one(
        (10, text("A")), (25, event({"choices": [last], "usage": USAGE})), (25, DONE), max_tokens=2
    )
    assert part(record, "text", "e2e_ms", "icl_ms", "last_token_hidden") == ["AB", 25, [15], False]


def test_f9_a_finished_stream_needs_no_done() -> None:
    record = one((10, text("A")), (30, fin(1)), max_tokens=1)
    assert part(record, "status", "e2e_ms", "stream_ms") == ["ok", 10, 30]


# -- F11, F13: cutting


def test_f11_three_events_in_one_write() -> None:
    together = text("A") + text("B") + text("C") + fin(3) + DONE
    record = one((70, together), max_tokens=3)
    assert part(record, *TIMES) == [70, 70, 0, 70, [0, 0]]
    assert part(record, "chunks", "decode_tps") == [3, None]


def test_f12_one_event_in_many_writes_has_the_time_of_the_last() -> None:
    first = text("A")
    cuts = [(10.0 + i, first[i : i + 1]) for i in range(len(first))]
    end = cuts[-1][0]
    record = one(*cuts, (end, fin(1) + DONE), max_tokens=1)
    assert part(record, "ttft_ms", "text") == [end, "A"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_f13_an_emoji_cut_between_writes(cut: int) -> None:
    chunk = event({"choices": [{"index": 0, "text": "@"}]}).replace(b"@", "\U0001f600".encode())
    at = chunk.index(b"\xf0") + cut
    record = one((10, chunk[:at]), (20, chunk[at:]), (20, fin(1)), (20, DONE), max_tokens=1)
    assert part(record, "text", "ttft_ms", "chunks") == ["\U0001f600", 20, 1]


def test_f13_line_separators_of_unicode_inside_a_string() -> None:
    string = "a\u2028b\u0085c"
    chunk = event({"choices": [{"index": 0, "text": "@"}]}).replace(b"@", string.encode())
    record = one((10, chunk), (10, fin(1)), (10, DONE), max_tokens=1)
    assert part(record, "text", "chunks") == [string, 1]


def test_f13_half_a_surrogate_pair_per_chunk() -> None:
    halves = [b'{"choices":[{"text":"\\ud83d"}]}', b'{"choices":[{"text":"\\ude00"}]}']
    wire = [b"data: " + half + b"\n\n" for half in halves]
    record = one((1, wire[0]), (2, wire[1]), (2, fin(2)), (2, DONE), max_tokens=2)
    assert json.loads(json.dumps(record["text"])) == "\U0001f600"


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_f14_other_line_ends_and_pings(end: bytes) -> None:
    def wire(chunk: bytes) -> bytes:
        return chunk.replace(b"\n", end)

    record = one(
        (5, wire(PING)),
        (15, wire(text("A"))),
        (20, wire(PING)),
        (25, wire(text("B"))),
        (25, wire(fin(2))),
        (25, wire(DONE)),
        max_tokens=2,
    )
    assert part(record, *TIMES) == [15, 15, 10, 25, [10]]


def test_f14_several_data_lines_are_one_chunk() -> None:
    chunk = b'data: {"choices":\ndata: [{"text":"A"}]}\n\n'
    record = one((1, chunk), (1, fin(1)), (1, DONE), max_tokens=1)
    assert record["text"] == "A"


def test_f21_a_line_of_600_kib() -> None:
    long = text("A", logprobs="x" * 600 * 1024)
    record = one((10, long), (10, fin(1)), (10, DONE), max_tokens=1)
    assert part(record, "text", "chunks", "ttft_ms") == ["A", 1, 10]


def test_f22_an_event_without_end_is_cut_off() -> None:
    record = bad(stream((1, b"data: " + b"x" * (17 * 1024 * 1024))), max_tokens=1)
    assert record["status"] == "parse_error"
    assert "larger than 16777216 bytes" in record["error"]


# -- F15: an error in a success

MESSAGE = {"error": {"code": 500, "message": "x", "type": "server_error"}}


@pytest.mark.parametrize(
    "answer",
    [
        stream((9, event(MESSAGE)), (9, DONE)),
        stream((9, event(MESSAGE)), (9, CUT)),
        stream((9, event({"error": "x (code 500)"})), (9, DONE)),
        stream((9, b"error: x (code 500)\n\n")),
        stream((9, b"event: error\ndata: x (code 500)\n\n"), (9, DONE)),
        plain(MESSAGE),
        plain(json.dumps(MESSAGE, indent=1).encode()),
    ],
)
def test_f15_an_error_in_a_200_answer(answer: Answer) -> None:
    record = bad(answer)
    assert part(record, "status", "http_status") == ["error_in_band", 200]
    assert record["error"].strip('"') == "x (code 500)"
    assert part(record, "ttft_ms", "e2e_ms", "output_tokens", "partial_tokens") == [
        None,
        None,
        None,
        0,
    ]


def test_f15_an_error_after_three_tokens_keeps_them() -> None:
    steps = [(10 * i, text(f"t{i}")) for i in (1, 2, 3)]
    record = bad(stream(*steps, (35, event(MESSAGE)), (35, DONE)))
    assert part(record, "status", "partial_tokens", "text") == ["error_in_band", 3, "t1t2t3"]
    assert part(record, "output_tokens", "e2e_ms", "tpot_ms") == [None, None, None]


def test_f15_an_error_of_null_is_none() -> None:
    assert one((1, text("A", error=None)), (1, fin(1)), (1, DONE), max_tokens=1)["status"] == "ok"


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "http_4xx"),
        (404, "http_4xx"),
        (429, "http_4xx"),
        (500, "http_5xx"),
        (501, "http_5xx"),
        (503, "http_503"),
        (302, "parse_error"),
        (204, "parse_error"),
    ],
)
def test_f16_other_http_statuses(status: int, name: str) -> None:
    empty = Answer([(0, b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")], raw=True)
    record = bad(error(status, "no good") if status != 204 else empty)
    assert part(record, "status", "http_status") == [name, status]
    assert str(status) in record["error"]
    assert "no good" in record["error"] or status < 400


@pytest.mark.parametrize(
    "chunk",
    [
        b"data: {\n\n",
        b"data: 3\n\n",
        b'data: "x"\n\n',
        b"data: \xff\n\n",
        b'data: {"choices": [{"text": "\xf0\x9f\x98"}]}\n\n',
        b'data: {"choices": [{"text": NaN}]}\n\n',
        b'data: {"choices": [{"text": 3}]}\n\n',
        b'data: {"choices": 3}\n\n',
        b'data: {"choices": ["A"]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": "9"}}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": -1}}\n\n',
        b'data: {"choices": [], "usage": 3}\n\n',
        b'data: {"choices": [], "timings": {"predicted_ms": true}}\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"<html>It works</html>",
    ],
)
def test_f16_what_is_not_this_protocol(chunk: bytes) -> None:
    record = bad(stream((1, chunk), (2, fin(64)), (2, DONE)) if b"<" not in chunk else plain(chunk))
    assert record["status"] == "parse_error"
    assert "\n" not in record["error"]
    assert len(record["error"]) < 700


def test_f16_not_http_at_all() -> None:
    record = bad(Answer([(0, b"SSH-2.0-x\r\n\r\n")], raw=True))
    assert record["status"] in ("parse_error", "stream_broken")


# -- F17, F18: endings that are none

TEN: list[Step] = [(10 * i, text("t")) for i in range(1, 11)]


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ([], "truncated"),
        ([(105, DONE)], "truncated"),
        ([(105, b"data: {")], "truncated"),
        ([(105, fin(64).rstrip(b"\n"))], "truncated"),
        ([(105, RESET)], "stream_broken"),
        ([(105, CUT)], "stream_broken"),
        ([(105, event({"choices": [STOP]})), (105, CUT)], "stream_broken"),
    ],
)
def test_f17_a_stream_that_ends_too_early(ending: list[Step], status: str) -> None:
    record = bad(stream(*TEN, *ending))
    assert part(record, "status", "partial_tokens", "text") == [status, 10, "t" * 10]
    assert part(record, "output_tokens", "e2e_ms", "ttft_ms", "chunks") == [None, None, 10, 10]
    assert record["icl_ms"] == [10] * 9


def test_f17_a_break_after_done_is_none() -> None:
    record = one((10, text("A")), (10, fin(1)), (10, DONE), (20, CUT), max_tokens=1)
    assert part(record, "status", "stream_ms") == ["ok", 10]
    assert one((10, text("A")), (10, fin(1)), (10, DONE), (20, RESET), max_tokens=1)


def test_f17_an_end_that_never_comes_after_done_is_not_waited_for_long() -> None:
    result, _ = load(stream((10, text("A")), (10, fin(1)), (10, DONE), (10, STAY)), max_tokens=1,
                     requests=2)  # fmt: skip
    assert result["valid"]
    assert [record["t_send_ms"] for record in result["requests"]] == [0, 1010]
    assert result["requests"][0]["stream_ms"] == 10


@pytest.mark.parametrize(
    "answer",
    [
        stream(),
        stream((5, DONE)),
        stream((5, PING)),
        stream((5, fin(0)), (5, DONE)),
        stream((5, fin(64)), (5, DONE)),
        stream((5, text("")), (5, DONE)),
    ],
)
def test_f17_a_success_without_text(answer: Answer) -> None:
    assert bad(answer)["status"] == "no_tokens"


@pytest.mark.parametrize(
    "raw",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 900\r\n\r\n"],
)
def test_f17_a_connection_closed_before_any_answer(raw: bytes) -> None:
    assert bad(Answer([(5, raw)] if raw else [], raw=True))["status"] == "stream_broken"


def test_f17_an_answer_that_ends_with_the_connection_is_complete_by_its_finish_reason() -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    result, _ = load(Answer([(1, head), (10, text("A")), (10, fin(1))], raw=True), max_tokens=1)
    assert result["valid"]
    record = bad(Answer([(1, head), (10, text("A"))], raw=True))
    assert record["status"] == "truncated"


KEPT = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b"


def test_f17_a_kept_connection_is_not_used_again() -> None:
    # A server that offers to keep the connection and then closes it when it likes.
    body = text("A") + fin(1) + DONE
    kept = Answer([(5, KEPT % (len(body), body)), (5, STAY)], raw=True)
    result, server = load(kept, requests=4, concurrency=2, max_tokens=1)
    assert result["valid"], result["invalid_details"]
    assert len(server.requests) == 4  # the fake server reads one request per connection


def test_f18_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = "http://{}:{}".format(*closed.getsockname())

        async def main(loop: VirtualLoop) -> dict[str, Any]:
            config = LoadConfig(url=url, requests=2, preflight=False, heartbeat_ms=0)
            return await run_load(config, loop.clock_ns)

        result = run_virtual(main)
    schemas.check(result, "loadgen")
    assert [r["status"] for r in result["requests"]] == ["connect_error"] * 2
    assert result["summary"]["output_tps"] is None


def test_f18_a_connection_that_is_never_accepted() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        for filler in (first, second):  # the backlog: what comes after is not answered
            filler.setblocking(False)
            filler.connect_ex(address)

        async def main(loop: VirtualLoop) -> dict[str, Any]:
            config = LoadConfig(
                url="http://{}:{}".format(*address),
                requests=1,
                preflight=False,
                heartbeat_ms=0,
                connect_timeout_s=3,
            )
            return await run_load(config, loop.clock_ns)

        record = run_virtual(main)["requests"][0]
    assert part(record, "status", "stream_ms") == ["timeout_connect", 3000]


LIMITS = {"first_token_timeout_s": 2, "stall_timeout_s": 1, "total_timeout_s": 5}
PINGS: list[Step] = [(t, PING) for t in range(100, 9000, 100)]


@pytest.mark.parametrize(
    ("answer", "status", "stream_ms"),
    [
        (Answer([(9, STAY)], raw=True), "timeout_first_token", 2000),  # no headers either
        (stream((9, STAY)), "timeout_first_token", 2000),
        (stream(*PINGS), "timeout_first_token", 2000),
        (stream((10, text("")), (1500, text("")), (3000, STAY)), "timeout_first_token", 2000),
        (stream((500, text("A")), (600, STAY)), "timeout_stall", 1500),
        (stream((50, text("A")), *PINGS), "timeout_stall", 1050),
        (stream((50, text("A")), (900, text("B")), (901, STAY)), "timeout_stall", 1900),
        (stream((50, text("A")), (60, fin(64)), (61, STAY)), "timeout_stall", 1060),
        (stream(*[(t, text("A")) for t in range(500, 9000, 500)]), "timeout_total", 5000),
    ],
)
def test_f18_each_time_limit(answer: Answer, status: str, stream_ms: float) -> None:
    record = bad(answer, **LIMITS)
    assert part(record, "status", "stream_ms") == [status, stream_ms]


def test_f18_just_within_each_limit() -> None:
    steps: list[Step] = [(t, text("A")) for t in (1999, 2998, 3997, 4996)]
    record = one(*steps, (4998, fin(4)), (4999, DONE), max_tokens=4, **LIMITS)
    assert record["status"] == "ok"


# -- F19, F20: coordinated omission

SERVICE = stream((100, text("A")), (500, text("B")), (500, fin(2)), (500, DONE))


def test_f19_the_wait_for_the_cap_is_not_lost() -> None:
    result, _ = load(
        SERVICE, max_tokens=2, requests=8, mode="open", rate_rps=10.0, arrivals="constant"
    )
    assert result["valid"]
    summary, records = result["summary"], result["requests"]
    assert [r["t_sched_ms"] for r in records] == [100 * i for i in range(8)]
    assert [r["client_queue_ms"] for r in records] == [400 * i for i in range(8)]
    assert (summary["mean_client_queue_ms"], summary["mean_latency_ms"]) == (1400, 500)
    assert (summary["mean_sched_latency_ms"], summary["p99_sched_latency_ms"]) == (1900, 3272)
    assert summary["start_spread_ms"] is None


def test_f19_no_wait_below_the_cap() -> None:
    result, _ = load(
        SERVICE,
        max_tokens=2,
        requests=8,
        mode="open",
        rate_rps=10.0,
        arrivals="constant",
        concurrency=8,
    )
    assert [r["t_send_ms"] for r in result["requests"]] == [100 * i for i in range(8)]
    assert result["summary"]["max_client_queue_ms"] == 0
    assert result["summary"]["concurrency_peak"] == 5
    assert result["valid"]  # the peak is the schedule's business


def test_f20_a_closed_loop_has_no_queue_of_its_own() -> None:
    result, _ = load(SERVICE, max_tokens=2, requests=8, concurrency=2)
    assert [r["t_send_ms"] for r in result["requests"]] == [0, 0, 500, 500, 1000, 1000, 1500, 1500]
    assert result["summary"]["max_client_queue_ms"] == 0


def test_f31_two_open_runs_with_seed_0_have_one_schedule() -> None:
    def sends(seed: int) -> list[float]:
        result, _ = load(tokens(2), max_tokens=2, requests=5, mode="open", rate_rps=3.0,
                         arrivals="poisson", seed=seed)  # fmt: skip
        return [r["t_sched_ms"] for r in result["requests"]]

    assert sends(0) == sends(0)
    assert sends(0) != sends(1)


# -- F23, F24, and the golden vector


def test_golden_vector_of_the_whole_chain() -> None:
    answers = [
        stream(*[(t, text("x")) for t in (400, 500, 600, 700, 800)], (800, fin(5)), (800, DONE)),
        stream(*[(t, text("x")) for t in (600, 800, 1000)], (1000, fin(3)), (1000, DONE)),
    ]
    result, _ = load(answers, requests=2, concurrency=2, max_tokens=5, mode="rounds")
    # One run asks for one length, so its second request is short; each judged by its own is ok.
    assert [r["status"] for r in result["requests"]] == ["ok", "short_output"]
    outcomes = []
    for number, answer in enumerate(answers):
        reader, reply = SseReader(), Reply(t_send_ns=0, t_end_ns=0, http_status=200)
        for t_ms, data in answer.steps:
            assert isinstance(data, bytes)
            reply.events += reader.feed(data, int(t_ms * 1e6))
            reply.t_end_ns = int(t_ms * 1e6)
        job = load_records.Job(id=number, phase="measured", prompt="x")
        n = (5, 3)[number]
        outcomes.append(load_records.conclude(job, number, None, 0, reply, n))
    config = LoadConfig(url="http://h", concurrency=2, requests=2)
    summary = load_summary.summarise(outcomes, config)
    assert [o.status for o in outcomes] == ["ok", "ok"]
    expected = {
        "mean_ttft_ms": 500,
        "p95_ttft_ms": 590,
        "p95_nearest_rank_ttft_ms": 600,
        "mean_tpot_ms": 150,
        "mean_icl_ms": 133.333,  # pooled over gaps: another number
        "mean_latency_ms": 900,
        "output_tps": 8.0,
        "mean_decode_tps": 7.5,
        "concurrency_peak": 2,
        "concurrency_mean": 1.8,
        "window_ms": 1000,
        "steady_window_ms": 800,
        "steady_output_tps": 8.75,  # 5 chunks of the first and 2 of the second in 0.8 s
        "sd_ttft_ms": 141.421,
        "p95_low_n": True,
        "total_tps": 18.0,
        "request_rps": 2.0,
    }
    assert {key: summary[key] for key in expected} == expected
    assert [load_records.as_json(o, 0)["decode_tps"] for o in outcomes] == [10, 5]


def test_f24_twenty_requests_are_enough_for_a_p95() -> None:
    answers = [tokens(2, first_ms=i, gap_ms=10) for i in range(1, 21)]
    result, _ = load(answers, requests=20, max_tokens=2)
    summary = result["summary"]
    assert (summary["p95_ttft_ms"], summary["p95_nearest_rank_ttft_ms"]) == (19.05, 19)
    assert summary["p95_low_n"] is False
    result, _ = load(answers, requests=19, max_tokens=2)
    assert result["summary"]["p95_low_n"] is True


def test_failed_requests_are_counted_and_in_no_latency() -> None:
    answers = [tokens(2, first_ms=10), error(500, "x"), tokens(2, first_ms=30), tokens(1)]
    result, _ = load(answers, requests=4, max_tokens=2)
    summary = result["summary"]
    assert (summary["n_requests"], summary["n_ok"], summary["n_failed"]) == (4, 2, 2)
    assert (summary["mean_ttft_ms"], summary["survivors_only"]) == (20, True)
    assert (summary["output_tokens"], summary["n_tpot"]) == (4, 2)
    # 20 + 0 + 40 + 10 ms: the window is that of all measured requests.
    assert summary["window_ms"] == 70
    assert summary["output_tps"] == round(4 / 0.07, 6)
    assert result["invalid_reasons"] == ["failed_requests", "unequal_output"]
    assert "1 http_5xx, 1 short_output of 4" in result["invalid_details"]["failed_requests"]


# -- F25, F26: readiness

LLAMA: dict[str, Rule] = {
    "/health": plain({"status": "ok"}),
    "/props": plain(props()),
    "/slots": plain(slots()),
}
LOADING = error(503, "Loading model")


def test_f25_waits_for_the_server_and_keeps_the_wait_out_of_the_results() -> None:
    result, server = load(
        [error(503, "Loading model"), tokens(1, prompt=6), tokens(2, prompt=6)],
        others={
            **LLAMA,
            "/health": [LOADING] * 5 + [plain({"status": "ok"})],
            "/props": [LOADING, plain(props())],
            "/v1/models": plain({"data": []}),
        },
        preflight=True,
        requests=3,
        max_tokens=2,
    )
    assert result["valid"], result["invalid_details"]
    paths = [request.path for request in server.requests]
    assert paths.count("/health") == 6
    assert "/v1/models" not in paths
    assert result["server"]["probe_attempts"] == 2
    probes = server.bodies()[:2]
    assert [body["n_predict"] for body in probes] == [1, 1]
    # 5 + 1 + 1 waits of a quarter of a second, then the probe's 10 ms; no trace in the durations.
    assert [r["t_send_ms"] for r in result["requests"]] == [1760, 1780, 1800]
    assert [r["e2e_ms"] for r in result["requests"]] == [20, 20, 20]
    assert result["summary"]["window_ms"] == 60


def test_f25_a_refused_connection_is_waited_for_too() -> None:
    server = FakeServer({"/v1/completions": tokens(1), **LLAMA})

    async def main(loop: VirtualLoop) -> dict[str, Any]:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            host, port = reserved.getsockname()
        config = LoadConfig(
            url=f"http://{host}:{port}", requests=1, max_tokens=1, heartbeat_ms=0, prompt_words=5
        )
        task = asyncio.create_task(run_load(config, loop.clock_ns))
        await asyncio.sleep(1.1)
        later = await asyncio.start_server(server._serve, host, port)
        try:
            return await task
        finally:
            later.close()
            await later.wait_closed()

    result = run_virtual(main)
    assert result["valid"], result["invalid_details"]
    assert result["requests"][0]["t_send_ms"] == 1260


def test_f25_a_503_while_measuring_is_a_failure_and_not_retried() -> None:
    result, server = load([tokens(2), error(503, "busy"), tokens(2)], requests=3, max_tokens=2)
    assert [r["status"] for r in result["requests"]] == ["ok", "http_503", "ok"]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("others", "rule", "line"),
    [
        ({**LLAMA, "/health": LOADING}, tokens(1), "/health: HTTP 503"),
        ({**LLAMA, "/props": LOADING}, tokens(1), "/props: HTTP 503"),
        (LLAMA, LOADING, "probe completion: http_503"),
    ],
)
def test_f25_a_server_that_never_gets_ready(others: dict[str, Rule], rule: Rule, line: str) -> None:
    result, _ = load(rule, others=others, preflight=True, ready_timeout_s=2)
    assert result["invalid_reasons"] == ["server_not_ready"]
    assert "not ready within 2 s" in result["invalid_details"]["server_not_ready"]
    assert line in result["invalid_details"]["server_not_ready"]
    assert result["requests"] == []


def test_f25_a_probe_that_fails_for_good_ends_the_run() -> None:
    result, server = load(error(400, "no such model"), others=LLAMA, preflight=True)
    assert result["invalid_reasons"] == ["probe_failed"]
    assert "no such model" in result["invalid_details"]["probe_failed"]
    assert len(server.bodies()) == 1


@pytest.mark.parametrize(
    "after",
    [
        plain(props(build_info="b2")),
        plain(props(media_marker="<two>")),
        error(500, "x"),
        plain(props(slots=8)),
    ],
)
def test_f26_a_server_that_is_another_one_afterwards(after: Answer) -> None:
    others = {**LLAMA, "/props": [plain(props()), after]}
    result, _ = load(tokens(1), others=others, preflight=True, max_tokens=1)
    assert result["invalid_reasons"] == ["server_changed"]


def test_f26_sleeping_is_not_a_change() -> None:
    others: dict[str, Rule] = {**LLAMA, "/props": [plain(props()), plain(props(is_sleeping=True))]}
    assert load(tokens(1), others=others, preflight=True, max_tokens=1)[0]["valid"]


def test_f26_any_other_server_is_measured_with_what_it_tells() -> None:
    result, _ = load(tokens(1), preflight=True, max_tokens=1)  # 404 for everything else
    assert result["valid"], result["invalid_details"]
    assert set(result["server"].values()) == {None, 1}


# -- F27: slots and context


def test_f27_too_little_context_is_found_before_the_run() -> None:
    result, server = load(
        tokens(1),
        others={**LLAMA, "/slots": plain(slots(n_ctx=256))},
        preflight=True,
        prompt_words=200,
        max_tokens=128,
    )
    assert result["invalid_reasons"] == ["context_too_small"]
    assert "need 328 > 256" in result["invalid_details"]["context_too_small"]
    assert (result["requests"], server.bodies()) == ([], [])


def test_f27_exactly_enough_context_is_enough() -> None:
    others = {**LLAMA, "/slots": plain(slots(n_ctx=9))}
    assert load(tokens(4), others=others, preflight=True, max_tokens=4)[0]["valid"]
    others = {**LLAMA, "/slots": plain(slots(n_ctx=8))}
    assert not load(tokens(4), others=others, preflight=True, max_tokens=4)[0]["valid"]


def test_f27_the_probe_knows_the_real_length() -> None:
    result, _ = load(
        tokens(1, prompt=450), others=LLAMA, preflight=True, prompt_words=100, max_tokens=128
    )
    assert result["invalid_reasons"] == ["context_too_small"]
    assert "need 578 > 512" in result["invalid_details"]["context_too_small"]


def test_f27_all_streams_fail_together() -> None:
    message = event({"error": {"code": 500, "message": "Context size has been exceeded."}})
    result, _ = load(
        stream((10, text("A")), (20, message)), requests=4, concurrency=4, max_tokens=9
    )
    assert [r["status"] for r in result["requests"]] == ["error_in_band"] * 4
    assert [r["partial_tokens"] for r in result["requests"]] == [1] * 4
    assert "Context size has been exceeded." in result["invalid_details"]["failed_requests"]


@pytest.mark.parametrize(("reason", "n"), [("length", 3), ("stop", 3), ("stop", 4)])
def test_f27_less_than_asked_for_is_no_success(reason: str, n: int) -> None:
    result, _ = load(tokens(n, reason=reason), max_tokens=4)
    assert result["requests"][0]["status"] == "short_output"
    assert result["invalid_reasons"] == ["failed_requests", "unequal_output"]
    # It is a complete answer all the same, and its own times are known.
    assert part(result["requests"][0], "output_tokens", "ttft_ms") == [n, 10]
    assert result["summary"]["mean_ttft_ms"] is None


def test_f27_more_than_asked_for_is_flagged() -> None:
    result, _ = load(tokens(5), max_tokens=4)
    assert result["requests"][0]["status"] == "ok"
    assert result["invalid_reasons"] == ["unequal_output"]


def test_f27_fewer_slots_than_streams() -> None:
    result, server = load(tokens(1), others=LLAMA, preflight=True, concurrency=5, requests=5)
    assert result["invalid_reasons"] == ["slots<concurrency"]
    assert result["invalid_details"] == {"slots<concurrency": "4 slots, concurrency 5"}
    assert server.bodies() == []


def test_f28_generation_that_goes_on_for_nobody_is_waited_for() -> None:
    def completions(request: Request) -> Answer:
        return tokens(1)

    busy = [plain(slots())] + [plain(slots(busy=1))] * 3 + [plain(slots())]
    result, server = load(
        completions, others={**LLAMA, "/slots": busy}, preflight=True, max_tokens=1
    )
    assert result["valid"]
    assert [r.path for r in server.requests].count("/slots") == 5
    busy[1:] = [plain(slots(busy=1))]
    result, _ = load(
        completions,
        others={**LLAMA, "/slots": busy},
        preflight=True,
        max_tokens=1,
        drain_timeout_s=2,
    )
    assert result["invalid_reasons"] == ["not_drained"]
    assert "slots [0] still busy 2 s" in result["invalid_details"]["not_drained"]


# -- F29, F30: the client itself

SLOW = stream(*[(20 * i, text("x")) for i in range(1, 26)], (500, fin(25)), (500, DONE))


def test_f29_a_blocked_event_loop_is_seen() -> None:
    def block(loop: VirtualLoop) -> None:
        loop.call_later(0.105, loop.be_busy, 200)

    result, _ = load(SLOW, concurrency=16, requests=16, max_tokens=25, heartbeat_ms=10, hook=block)
    assert result["client"]["loop_lag_max_ms"] == 195  # due 5 ms after the blockade began
    assert result["invalid_reasons"] == ["client_overloaded"]
    assert "195 ms lag" in result["invalid_details"]["client_overloaded"]


def test_f29_a_loop_that_is_not_blocked() -> None:
    result, _ = load(SLOW, concurrency=16, requests=16, max_tokens=25, heartbeat_ms=10)
    assert result["valid"]
    client = result["client"]
    assert (client["loop_lag_max_ms"], client["loop_lag_p99_ms"]) == (0, 0)
    assert client["loop_lag_beats"] in (49, 50)
    assert result["summary"]["p99_icl_ms"] == 20


def test_f29_a_blockade_that_lasts_until_the_end_of_the_window_counts() -> None:
    def block(loop: VirtualLoop) -> None:
        loop.call_later(0.499, loop.be_busy, 150)

    result, _ = load(SLOW, max_tokens=25, heartbeat_ms=400, hook=block)
    assert result["client"]["loop_lag_max_ms"] == 0  # the next beat would be at 800 ms
    result, _ = load(SLOW, max_tokens=25, heartbeat_ms=300, hook=block)
    assert result["client"]["loop_lag_max_ms"] == 49


def test_f29_a_beat_that_is_overdue_at_the_end_counts() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        heartbeat = Heartbeat(loop.clock_ns, 10)
        heartbeat.start()
        await asyncio.sleep(0.025)
        loop.be_busy(50)
        heartbeat.stop()  # before the loop could run the beat
        await asyncio.sleep(0.1)
        return heartbeat.lags_ns

    assert run_virtual(main) == [0, 0, 45_000_000]


def test_f29_limit_and_interval_are_settings() -> None:
    def block(loop: VirtualLoop) -> None:
        loop.call_later(0.105, loop.be_busy, 200)

    assert load(SLOW, max_tokens=25, heartbeat_ms=10, hook=block, max_loop_lag_ms=195)[0]["valid"]
    result, _ = load(SLOW, max_tokens=25, heartbeat_ms=0, hook=block)
    assert result["client"]["loop_lag_max_ms"] is None
    assert result["client"]["loop_lag_beats"] == 0


@pytest.mark.parametrize(("mode", "requests"), [("closed", 9), ("rounds", 6)])
def test_f30_streams_that_do_not_start_together_are_flagged(mode: str, requests: int) -> None:
    settings: dict[str, Any] = {
        "requests": requests,
        "concurrency": 3,
        "max_tokens": 2,
        "mode": mode,
    }
    result, _ = load(tokens(2), **settings)
    assert result["summary"]["start_spread_ms"] == 0
    # A client so slow that each look at the clock takes 1 ms, three of them for each send.
    result, _ = load(tokens(2), clock_costs_ms=1, max_start_spread_ms=6, **settings)
    assert result["summary"]["start_spread_ms"] == 6
    assert result["valid"], result["invalid_details"]
    result, _ = load(tokens(2), clock_costs_ms=1, max_start_spread_ms=5.9, **settings)
    assert result["invalid_reasons"] == ["start_spread"]

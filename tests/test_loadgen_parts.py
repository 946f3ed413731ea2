"""The parts of the load generator that need no server: reader, statistics, prompts, settings."""

import random
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from board.agent import prompts, stats
from board.agent.load_config import ConfigError, LoadConfig
from board.agent.loadgen import arrivals_ns
from board.agent.sse import Event, SseLimitError, SseReader


def read(*pieces: bytes, limit: int = 1000) -> list[Event]:
    reader = SseReader(limit)
    return [e for t, piece in enumerate(pieces) for e in reader.feed(piece, t)]


def data_of(*pieces: bytes) -> list[bytes]:
    return [e.data for e in read(*pieces)]


# -- the reader


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_each_line_end_ends_a_line(end: bytes) -> None:
    wire = end.join([b"data: a", b"", b"data: b", b"data:  c", b"data", b"", b""])
    assert data_of(wire) == [b"a", b"b\n c\n"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_cut_of_the_stream_gives_the_same_events(end: bytes) -> None:
    wire = end.join(
        [b": ping", b"", b"data: \xf0\x9f\x98\x80", b"", b"event: error", b"data: x", b"data: y"]
    )
    wire += end + end + b"error: z" + end + end
    expected = [e[1:] for e in read(wire)]
    assert expected == [
        (b"", b"\xf0\x9f\x98\x80", b""),
        (b"error", b"x\ny", b""),
        (b"", b"", b"z"),
    ]
    for cut in range(len(wire) + 1):
        assert [e[1:] for e in read(wire[:cut], wire[cut:])] == expected
    assert [e[1:] for e in read(*(wire[i : i + 1] for i in range(len(wire))))] == expected


def test_an_event_has_the_time_of_the_read_that_completed_it() -> None:
    assert [e.t_ns for e in read(b"data: a\n", b"\ndata: b", b"\r", b"\n\r", b"\ndata: c\n\n")] == [
        1,
        3,
        4,
    ]


def test_a_lone_cr_at_the_end_of_a_read_does_not_delay_the_event() -> None:
    assert data_of(b"data: a\r\r") == [b"a"]
    assert data_of(b"data: a\r\n\r", b"\n", b"data: b\n\n") == [b"a", b"b"]


def test_comments_other_fields_and_unfinished_events_give_nothing() -> None:
    assert data_of(b":\n\n: ping\n\nid: 1\nretry: 5\nfoo\n\ndata: cut") == []


def test_only_one_space_after_the_colon_is_stripped_and_a_byte_order_mark_at_the_start() -> None:
    assert data_of(b"\xef\xbb", b"\xbfdata:  a \n\n\xef\xbb\xbfdata: b\n\n") == [b" a "]


@pytest.mark.parametrize("unicode_end", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_what_only_unicode_takes_for_a_line_end_ends_no_line(unicode_end: str) -> None:
    wire = f"data: a{unicode_end}b\n\n".encode()
    assert data_of(wire) == [wire[6:-2]]


def test_600_kib_in_one_line_are_read_and_the_limit_is_kept() -> None:
    line = b"data: " + b"x" * (600 * 1024)
    reader = SseReader()
    pieces = [line[i : i + 65536] for i in range(0, len(line), 65536)]
    assert all(reader.feed(piece, 0) == [] for piece in pieces)
    assert len(reader.feed(b"\n\n", 0)[0].data) == 600 * 1024


@pytest.mark.parametrize("wire", [b"data: " + b"x" * 1000, b"data: 123456789\n" * 70, b"y" * 1001])
def test_an_event_above_the_limit_is_refused(wire: bytes) -> None:
    with pytest.raises(SseLimitError, match="larger than 1000 bytes"):
        read(wire)


def test_many_events_below_the_limit_and_long_comments_do_not_add_up() -> None:
    assert len(read(*([b"data: " + b"x" * 900 + b"\n: " + b"c" * 90 + b"\n\n"] * 5))) == 5


# -- percentiles


TABLE = [
    (1, 1, 1),
    (2, 1.95, 2),
    (4, 3.85, 4),
    (8, 7.65, 8),
    (10, 9.55, 10),
    (20, 19.05, 19),
    (21, 20.0, 20),
    (100, 95.05, 95),
]


@pytest.mark.parametrize(("n", "linear", "nearest"), TABLE)
def test_percentile_table(n: int, linear: float, nearest: int) -> None:
    samples = list(range(1, n + 1))
    random.Random(n).shuffle(samples)
    assert stats.percentile_linear(samples, 95) == pytest.approx(linear, abs=1e-12)
    assert stats.percentile_nearest_rank(samples, 95) == nearest


def test_percentiles_agree_with_numpy_for_all_small_sizes() -> None:
    stream = random.Random(0)
    for n in range(1, 401):
        samples = [stream.randrange(10**9) for _ in range(n)]
        for percent in (0, 50, 95, 99, 100):
            expected = float(np.percentile(samples, percent))
            assert stats.percentile_linear(samples, percent) == pytest.approx(expected, rel=1e-14)
        nearest = float(np.percentile(range(1, n + 1), 95, method="inverted_cdf"))
        exact = -(-95 * n // 100)
        assert stats.percentile_nearest_rank(range(1, n + 1), 95) == exact
        assert abs(nearest - exact) <= 1  # numpy's rank is computed in floating point


def test_statistics_of_few_samples() -> None:
    assert stats.percentile_linear([], 95) is None
    assert stats.percentile_nearest_rank([], 95) is None
    assert stats.mean([]) is None
    assert stats.standard_deviation([5]) is None
    assert stats.standard_deviation([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(2.13808993529939)


def test_in_flight_sweep() -> None:
    assert stats.in_flight([]) == []
    assert stats.in_flight([(0, 10), (10, 20)]) == [(0, 10, 1), (10, 20, 1)]  # touching
    assert stats.in_flight([(0, 10), (5, 20), (30, 40)]) == [
        (0, 5, 1),
        (5, 10, 2),
        (10, 20, 1),
        (20, 30, 0),
        (30, 40, 1),
    ]
    assert stats.in_flight([(5, 5)]) == []  # failed at once


# -- prompts


def test_the_word_list_is_what_the_model_maker_relies_on() -> None:
    content = prompts.WORDS_FILE.read_bytes()
    words = content.decode("ascii").split("\n")
    assert words.pop() == ""  # a line end after the last word
    assert words == sorted(set(words)) == prompts.read_words()
    assert len(words) == 512
    assert all(3 <= len(word) <= 8 and set(word) <= set(string.ascii_lowercase) for word in words)


def test_prompts_have_their_length_and_differ_from_the_first_word_on() -> None:
    words = prompts.read_words()
    made = prompts.make_prompts(words, 48, 512, 7)
    assert {len(prompt.split()) for prompt in made} == {48}
    assert all(prompt == "".join(f" {word}" for word in prompt.split()) for prompt in made)
    assert set(" ".join(made).split()) <= set(words)
    assert len({prompt.split()[0] for prompt in made}) == 512


def test_more_prompts_than_words_still_differ_within_two_words() -> None:
    made = prompts.make_prompts(["a", "b", "c"], 2, 9, 0)
    assert len(set(made)) == 9
    assert len({prompt.split()[0] for prompt in made[:3]}) == 3
    assert len({tuple(p.split()[:2]) for p in prompts.make_prompts(["a", "b", "c"], 5, 9, 0)}) == 9


@pytest.mark.parametrize(("words", "count"), [(1, 4), (2, 10)])
def test_too_many_prompts_are_refused(words: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} different prompts of {words} word"):
        prompts.make_prompts(["a", "b", "c"], words, count, 0)


def test_f31_seed_0_is_a_seed_and_streams_are_separate() -> None:
    words = prompts.read_words()
    assert prompts.make_prompts(words, 8, 9, 0) == prompts.make_prompts(words, 8, 9, 0)
    assert prompts.make_prompts(words, 8, 9, 0) != prompts.make_prompts(words, 8, 9, 1)
    # A longer run begins with the prompts of a shorter one.
    assert prompts.make_prompts(words, 8, 20, 0)[:9] == prompts.make_prompts(words, 8, 9, 0)
    opened: dict[str, Any] = {
        "url": "http://h",
        "mode": "open",
        "rate_rps": 3.0,
        "arrivals": "poisson",
    }
    planned = arrivals_ns(LoadConfig(**opened, seed=0, requests=5))
    assert planned == arrivals_ns(LoadConfig(**opened, seed=0, requests=5, prompt_words=9))
    assert planned != arrivals_ns(LoadConfig(**opened, seed=1, requests=5))
    # The very numbers, because they must be the same with every Python.
    assert planned == [702542055, 868733131, 1037147435, 1162943867, 1858719091]
    assert prompts.make_prompts(words, 3, 2, 0) == [" narrow gather wild", " find use key"]


def test_poisson_arrivals_have_their_rate() -> None:
    config = LoadConfig(
        url="http://h", mode="open", rate_rps=50.0, arrivals="poisson", requests=20000
    )
    planned = arrivals_ns(config)
    assert planned == sorted(planned)
    assert planned[-1] / 1e9 == pytest.approx(400, rel=0.03)


def test_whole_words_are_those_with_a_token_of_their_own() -> None:
    pieces: list[dict[str, Any]] = [
        {"piece": " able"},
        {"piece": " bel"},
        {"piece": [108]},
        {"piece": [111, 119]},
        {"piece": " cat"},
    ]
    assert prompts.whole_words(["able", "bellow", "cat"], pieces) == ["able", "cat"]
    assert prompts.whole_words(["able", "below", "cat"], pieces) == []  # not this text
    assert prompts.whole_words(["able"], []) == []
    assert prompts.whole_words(["able"], [{"id": 3}]) == []


# -- settings


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"url": "ftp://h"}, "url: expected http://HOST"),
        ({"url": "localhost:8080"}, "url: expected http://HOST"),
        ({"url": "http://h:99999"}, "url: expected http://HOST"),
        ({"url": "http://"}, "url: expected http://HOST"),
        ({"concurrency": 0}, "concurrency: expected a whole number from 1 on, got 0"),
        ({"concurrency": True}, "concurrency: expected a whole number from 1 on, got True"),
        ({"requests": 0}, "requests: expected a whole number from 1 on, got 0"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number from 1 to 2147483647, got 0"),
        ({"seed": -1}, "seed: expected a whole number from 0 to 4294967294, got -1"),
        ({"seed": 2**32 - 1}, "seed: expected a whole number from 0 to 4294967294"),
        ({"warmup_requests": -1}, "warmup_requests: expected a whole number from 0 on, got -1"),
        ({"prompt_words": 0}, "prompt_words: expected a whole number from 1 on, got 0"),
        ({"prompt_words": None}, "prompt_words: expected a number, got none"),
        ({"prompt": "x"}, "prompt_words: expected none beside a literal prompt"),
        ({"prompt": "", "prompt_words": None}, "prompt: expected some text, got an empty one"),
        ({"mode": "burst"}, "mode: expected closed, rounds or open, got 'burst'"),
        ({"mode": "rounds", "concurrency": 3}, "requests: expected a multiple of the concurrency"),
        ({"mode": "open"}, "rate_rps, arrivals: the open loop needs both"),
        ({"mode": "open", "rate_rps": 0, "arrivals": "poisson"}, "rate_rps: expected a number"),
        ({"mode": "open", "rate_rps": 1, "arrivals": "x"}, "arrivals: expected poisson"),
        ({"rate_rps": 2.0}, "rate_rps, arrivals: mean nothing in mode closed"),
        ({"stall_timeout_s": 0}, "stall_timeout_s: expected a number above 0, got 0"),
        ({"stall_timeout_s": float("nan")}, "stall_timeout_s: expected a number above 0, got nan"),
        ({"heartbeat_ms": -1}, "heartbeat_ms: expected a number from 0 on, got -1"),
        ({"max_loop_lag_ms": float("inf")}, "max_loop_lag_ms: expected a number from 0 on"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LoadConfig(**{"url": "http://127.0.0.1:1"} | settings)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_agent_needs_nothing_but_its_own_directory(tmp_path: Path) -> None:
    shutil.copytree(prompts.WORDS_FILE.parent, tmp_path / "board" / "agent")
    run = subprocess.run(
        [sys.executable, "-m", "board.agent.loadgen", "--help"],
        cwd=tmp_path,
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "--max-loop-lag-ms" in run.stdout

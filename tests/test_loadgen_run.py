"""The run as a whole: what is sent, when, what makes it invalid, and the program around it."""

import asyncio
import contextlib
import gc
import hashlib
import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    DONE,
    STAY,
    Answer,
    FakeServer,
    Request,
    Rule,
    error,
    fin,
    in_thread,
    load,
    plain,
    props,
    slots,
    stream,
    text,
    tokens,
)

import schemas
from board.agent import loadgen
from board.agent.load_config import ConfigError, LoadConfig
from board.agent.load_health import quiet_gc
from board.agent.loadgen import run_load
from board.agent.prompts import read_words
from toolchain.errors import InvalidData

REPO = Path(loadgen.__file__).parents[2]


# -- what is sent


def test_every_field_that_matters_is_sent_and_recorded() -> None:
    result, server = load(tokens(3), max_tokens=3, seed=0)
    body = server.bodies()[0]
    assert body.pop("prompt") == result["requests"][0]["prompt"]
    assert body == result["request_fields"]
    assert body["stream_options"] == {"include_usage": True}
    expected = {
        "stream": True,
        "n_predict": 3,
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "seed": 0,
        "cache_prompt": False,
        "n_cache_reuse": 0,
        "n_probs": 0,
        "timings_per_token": False,
        "return_progress": False,
        "sse_ping_interval": -1,
        "stop": [],
        "n": 1,
    }
    assert {key: body[key] for key in expected} == expected
    headers = server.requests[0].headers
    assert headers["accept-encoding"] == "identity"
    assert headers["connection"] == "close"


def test_prompts_of_a_run_are_unique_from_the_first_word_on_warm_up_and_probe_included() -> None:
    result, server = load(
        lambda request: tokens(request.body["n_predict"]),
        others=LLAMA,
        preflight=True,
        warmup_requests=4,
        requests=12,
        max_tokens=2,
        prompt_words=9,
    )
    assert result["valid"], result["invalid_details"]
    prompts = [body["prompt"] for body in server.bodies()]
    assert len(prompts) == 17
    assert {len(prompt.split()) for prompt in prompts} == {9}
    assert len({prompt.split()[0] for prompt in prompts}) == 17
    assert [r["phase"] for r in result["requests"]] == ["warmup"] * 4 + ["measured"] * 12
    assert [r["id"] for r in result["requests"]] == list(range(16))
    sent = "\n".join(r["prompt"] for r in result["requests"])
    assert result["prompts"]["sha256"] == hashlib.sha256(sent.encode()).hexdigest()
    assert result["summary"]["n_requests"] == 12


def test_a_literal_prompt_is_sent_as_it_is() -> None:
    prompt = "The capital of France is"
    answer = stream((9, text(" Paris")), (9, text(".")), (9, fin(2)), (9, DONE))
    result, server = load(answer, prompt=prompt, prompt_words=None, requests=2, max_tokens=2)
    assert result["valid"]
    assert [body["prompt"] for body in server.bodies()] == [prompt] * 2
    assert "Paris" in result["requests"][0]["text"]


def test_other_seed_other_prompts_same_seed_same_file() -> None:
    def run(seed: int) -> dict[str, Any]:
        result, _ = load(tokens(2), seed=seed, requests=4, concurrency=2, max_tokens=2)
        del result["client"], result["config"]["url"]
        return result

    assert run(0) == run(0)
    assert run(0)["prompts"]["sha256"] != run(1)["prompts"]["sha256"]
    assert run(0)["request_fields"]["seed"] == 0


def test_more_requests_than_the_words_can_tell_apart_are_refused() -> None:
    config = LoadConfig(url="http://127.0.0.1:9", requests=512, prompt_words=1)
    with pytest.raises(ConfigError, match="513 different prompts of 1 word"):
        asyncio.run(run_load(config))


# -- when it is sent

SHORT_AND_LONG = [tokens(2, gap_ms=10), tokens(2, gap_ms=90)]


def test_closed_loop_takes_the_next_request_when_one_ends() -> None:
    result, _ = load(
        [*SHORT_AND_LONG, tokens(2)], requests=6, concurrency=2, max_tokens=2, mode="closed"
    )
    assert result["valid"]
    sends = [(r["t_send_ms"], r["worker"]) for r in result["requests"]]
    assert sends == [(0, 0), (0, 1), (20, 0), (40, 0), (60, 0), (80, 0)]
    summary = result["summary"]
    assert (summary["concurrency_peak"], summary["concurrency_mean"]) == (2, 2)
    assert summary["window_ms"] == 100


def test_rounds_wait_for_all_and_start_together() -> None:
    result, _ = load(
        [*SHORT_AND_LONG, tokens(2)], requests=4, concurrency=2, max_tokens=2, mode="rounds"
    )
    assert result["valid"]
    records = result["requests"]
    assert [(r["round"], r["t_send_ms"]) for r in records] == [(0, 0), (0, 0), (1, 100), (1, 100)]
    assert result["summary"]["start_spread_ms"] == 0


def test_warm_up_is_over_before_the_window_and_in_no_number() -> None:
    result, _ = load(
        [tokens(2, first_ms=500, cache=3), tokens(2)],
        warmup_requests=1,
        requests=2,
        concurrency=2,
        max_tokens=2,
    )
    assert result["valid"]  # a cache hit in the warm-up is nobody's business
    assert [r["t_send_ms"] for r in result["requests"]] == [0, 510, 510]
    assert result["summary"]["max_ttft_ms"] == 10


def test_steady_rate_leaves_start_and_drain_out() -> None:
    # Both until 20 ms, then the long one alone until 100 ms.
    result, _ = load([tokens(2, gap_ms=10), tokens(2, gap_ms=90)], requests=2, concurrency=2,
                     max_tokens=2)  # fmt: skip
    summary = result["summary"]
    assert summary["steady_window_ms"] == 20
    assert summary["steady_output_tps"] == 150  # 3 chunks in 20 ms
    assert summary["output_tps"] == 40  # 4 tokens in 100 ms


def test_what_came_with_the_start_of_the_steady_time_was_made_before_it() -> None:
    answer = stream((100, text("A")), (200, text("B")), (200, fin(2)), (200, DONE))
    result, _ = load(answer, requests=2, concurrency=2, max_tokens=2, mode="open", rate_rps=10.0,
                     arrivals="constant")  # fmt: skip
    summary = result["summary"]
    assert (summary["steady_window_ms"], summary["steady_output_tps"]) == (100, 20)


def test_fewer_requests_than_workers() -> None:
    result, _ = load(tokens(2), requests=2, concurrency=8, max_tokens=2)
    assert result["valid"]
    assert result["summary"]["concurrency_peak"] == 2


def test_concurrency_that_was_not_reached_is_flagged() -> None:
    # The first request fails at once, so two never overlap for any time.
    result, _ = load([error(503, "x"), tokens(2)], requests=2, concurrency=2, max_tokens=2)
    assert result["summary"]["concurrency_peak"] == 1
    assert "concurrency_not_reached" in result["invalid_reasons"]


# -- slots, words, other gates

LLAMA: dict[str, Rule] = {
    "/health": plain({"status": "ok"}),
    "/props": plain(props()),
    "/slots": plain(slots()),
}


def test_each_worker_keeps_to_its_slot() -> None:
    result, server = load(
        tokens(2), others=LLAMA, preflight=True, requests=6, concurrency=3, max_tokens=2
    )
    assert result["valid"], result["invalid_details"]
    assert all(r["id_slot"] == r["worker"] for r in result["requests"])
    assert {body["id_slot"] for body in server.bodies()} == {0, 1, 2}
    assert result["server"] == {
        "build_info": "b1-fake",
        "model_path": "/model.gguf",
        "total_slots": 4,
        "slot_n_ctx": [512] * 4,
        "probe_attempts": 1,
    }


def test_without_preflight_nothing_else_is_asked() -> None:
    result, server = load(tokens(2), requests=2, max_tokens=2)
    assert result["valid"]
    assert {request.path for request in server.requests} == {"/v1/completions"}
    assert result["requests"][0]["id_slot"] is None


def tokenizer(cut: set[str], special: int) -> Rule:
    """A /tokenize that knows each word, but cuts those of `cut`, and adds `special` tokens."""

    def tokenize(request: Request) -> Answer:
        if not request.body["with_pieces"]:
            return plain({"tokens": [1] * special})
        pieces = []
        for word in request.body["content"].split():
            parts = [" " + word[:2], word[2:]] if word in cut else [" " + word]
            pieces += [{"id": 7, "piece": part} for part in parts]
        return plain({"tokens": pieces})

    return tokenize


def test_prompts_are_made_of_words_that_are_one_token() -> None:
    cut = set(read_words()[:200])
    others = {**LLAMA, "/tokenize": tokenizer(cut, 1)}
    result, server = load(
        tokens(2, prompt=9), others=others, preflight=True, requests=9, max_tokens=2, prompt_words=8
    )
    assert result["valid"], result["invalid_details"]
    assert not any(cut & set(body["prompt"].split()) for body in server.bodies())
    expected = {"words": 312, "expected_tokens": 9}
    assert {key: result["prompts"][key] for key in expected} == expected
    result, _ = load(tokens(2, prompt=8), others=others, preflight=True, max_tokens=2,
                     prompt_words=8)  # fmt: skip
    assert result["invalid_reasons"] == ["prompt_length_mismatch"]
    assert "8 tokens, asked for 9" in result["invalid_details"]["prompt_length_mismatch"]


def test_a_vocabulary_that_cuts_most_words_is_not_relied_on() -> None:
    others = {**LLAMA, "/tokenize": tokenizer(set(read_words()[:300]), 1)}
    result, _ = load(tokens(2, prompt=77), others=others, preflight=True, max_tokens=2)
    assert result["valid"]
    assert result["prompts"]["words"] == 512
    assert result["prompts"]["expected_tokens"] is None


def test_prompts_of_unequal_length_are_flagged() -> None:
    result, _ = load([tokens(2, prompt=9), tokens(2, prompt=10)], requests=2, max_tokens=2)
    assert result["invalid_reasons"] == ["prompt_length_mismatch"]
    assert "[9, 10]" in result["invalid_details"]["prompt_length_mismatch"]


def test_a_prompt_cache_hit_is_flagged() -> None:
    result, _ = load([tokens(2), tokens(2, cache=1)], requests=2, max_tokens=2)
    assert result["invalid_reasons"] == ["prompt_cache_hit"]
    assert result["invalid_details"]["prompt_cache_hit"] == (
        "1 of 2 requests; request 1: 1 prompt tokens came from a cache"
    )


def test_a_prompt_cache_hit_that_only_usage_tells_is_flagged() -> None:
    last = {
        "choices": [{"text": "", "finish_reason": "length"}],
        "usage": {
            "completion_tokens": 1,
            "prompt_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    wire = b"data: " + json.dumps(last).encode() + b"\n\n"
    result, _ = load(stream((1, text("A")), (1, wire), (1, DONE)), max_tokens=1)
    assert result["invalid_reasons"] == ["prompt_cache_hit"]


@pytest.mark.parametrize("wrong", [{"predicted_n": 3}, {"prompt_n": 4}])
def test_counts_of_the_server_that_disagree_are_flagged(wrong: dict[str, Any]) -> None:
    answer = stream((1, text("A")), (2, text("B")), (2, fin(2, **wrong)), (2, DONE))
    result, _ = load(answer, max_tokens=2)
    assert result["invalid_reasons"] == ["token_count_mismatch"]
    assert "usage says" in result["invalid_details"]["token_count_mismatch"]


@pytest.mark.parametrize(
    ("prompt_ms", "predicted_ms", "good"),
    [(100, 50, True), (101, 50, True), (102, 40, False), (99, 53, False), (99, None, True)],
)
def test_a_server_that_was_quicker_than_possible_is_flagged(
    prompt_ms: float, predicted_ms: float | None, good: bool
) -> None:
    last = fin(2, prompt_ms=prompt_ms, predicted_ms=predicted_ms)
    result, _ = load(stream((100, text("A")), (150, text("B")), (150, last), (150, DONE)),
                     max_tokens=2)  # fmt: skip
    assert result["invalid_reasons"] == ([] if good else ["clock_mismatch"])
    record = result["requests"][0]
    assert record["server_wait_est_ms"] == 100 - prompt_ms
    assert record["server_tpot_ms"] == predicted_ms
    assert record["timings"] == {
        "cache_n": 0,
        "prompt_n": 5,
        "prompt_ms": prompt_ms,
        "predicted_n": 2,
        "predicted_ms": predicted_ms,
        "draft_n": None,
        "draft_n_accepted": None,
    }


def test_a_failed_warm_up_is_flagged() -> None:
    result, _ = load([error(500, "x"), tokens(2)], warmup_requests=1, max_tokens=2)
    assert result["invalid_reasons"] == ["warmup_failed"]
    assert result["summary"]["n_failed"] == 0


def test_garbage_collection_is_off_inside_the_window_and_as_before_after_it() -> None:
    seen: list[bool] = []

    def answer(request: Request) -> Answer:
        seen.append(gc.isenabled())
        return tokens(1)

    load(answer, max_tokens=1)
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    with contextlib.suppress(KeyError), quiet_gc():
        raise KeyError
    assert not gc.isenabled()
    gc.enable()


# -- stopping


def test_stopping_keeps_what_there_is() -> None:
    result, _ = load(
        [tokens(2), stream((10, text("A")), (20, STAY))], requests=9, max_tokens=2, stop_after_s=0.1
    )
    assert result["invalid_reasons"] == ["failed_requests", "interrupted"]
    assert [r["status"] for r in result["requests"]] == ["ok", "cancelled"]
    assert result["requests"][1]["partial_tokens"] == 1
    assert result["requests"][1]["stream_ms"] == 80


def test_stopping_while_waiting_for_the_server() -> None:
    others: dict[str, Rule] = {"/health": error(503, "Loading model")}
    result, _ = load(tokens(2), others=others, preflight=True, stop_after_s=0.1)
    assert result["invalid_reasons"] == ["interrupted"]
    assert result["requests"] == []


def test_being_cancelled_is_passed_on() -> None:
    server = FakeServer({"/v1/completions": stream((0, STAY))})

    async def main() -> None:
        async with server.running():
            config = LoadConfig(url=server.url, preflight=False)
            task = asyncio.create_task(run_load(config))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not [t for t in others if "board" in repr(t.get_coro())]

    asyncio.run(main())


# -- the program


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "board.agent.loadgen", *arguments]


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=REPO, capture_output=True, text=True, timeout=60)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    rules: dict[str, Rule] = {
        "/v1/completions": lambda request: tokens(request.body["n_predict"], 1, 1),
        **LLAMA,
    }
    with in_thread(FakeServer(rules)) as running:
        yield running


def test_program_valid_run(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run = program(
        *("--url", server.url, "--concurrency", "2", "--requests", "4", "--max-tokens", "3"),
        *("--prompt-words", "6", "--seed", "0", "--warmup-requests", "1", "--out", str(out)),
    )
    assert (run.returncode, run.stderr) == (0, "")
    result = schemas.read(out, "loadgen")
    assert (result["valid"], result["summary"]["n_ok"]) == (True, 4)
    assert run.stdout.startswith("valid: 4 ok, 0 failed; output ")
    assert "P95 TTFT (n=4, near max)" in run.stdout
    assert out.read_text() == json.dumps(result, indent=1, sort_keys=True) + "\n"
    assert stat.S_IMODE(out.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [out]
    assert result["client"]["loop_lag_beats"] >= 0
    assert result["client"]["utc_start"].startswith("20")


def test_program_rounds_and_open(server: FakeServer, tmp_path: Path) -> None:
    common = ("--url", server.url, "--out", str(tmp_path / "o"), "--max-tokens", "2")
    run = program(*common, "--mode", "rounds", "--rounds", "3", "--concurrency", "2")
    assert run.returncode == 0, run.stderr
    rounds = schemas.read(tmp_path / "o", "loadgen")
    assert [r["round"] for r in rounds["requests"]] == [0, 0, 1, 1, 2, 2]
    run = program(*common, "--mode", "open", "--rate-rps", "200", "--requests", "4",
                  "--no-preflight")  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert schemas.read(tmp_path / "o", "loadgen")["config"]["arrivals"] == "poisson"


def test_program_invalid_run_writes_its_file_all_the_same(tmp_path: Path) -> None:
    with in_thread(FakeServer({"/v1/completions": tokens(2, 1, 1)})) as server:
        out = tmp_path / "o"
        run = program("--url", server.url, "--requests", "1", "--max-tokens", "9", "--out",
                      str(out), "--no-preflight")  # fmt: skip
    assert run.returncode == 4
    assert run.stdout.startswith("INVALID: 0 ok, 1 failed; output - tok/s")
    assert "loadgen: unequal_output: 1 of 1 requests; request 0: 2 tokens" in run.stderr
    assert schemas.read(out, "loadgen")["invalid_reasons"] == ["failed_requests", "unequal_output"]


def test_program_no_server(tmp_path: Path) -> None:
    out = tmp_path / "o"
    run = program("--url", "http://127.0.0.1:1", "--out", str(out), "--ready-timeout-s", "0.1")
    assert run.returncode == 4
    assert "loadgen: server_not_ready: not ready within 0.1 s: /health: Client" in run.stderr
    assert schemas.read(out, "loadgen")["requests"] == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "the following arguments are required: --url, --out"),
        (("--url", "http://h"), "the following arguments are required: --out"),
        (("--url", "h", "--out", "o"), "url: expected http://HOST[:PORT][/PATH], got 'h'"),
        (("--url", "http://h", "--out", "o", "--concurrency", "0"), "concurrency: expected a"),
        (("--url", "http://h", "--out", "o", "--concurrency", "x"), "--concurrency: invalid int"),
        (("--url", "http://h", "--out", "o", "--mode", "x"), "--mode: invalid choice: 'x'"),
        (("--url", "http://h", "--out", "o", "--rounds", "2"), "rounds: goes with --mode rounds"),
        (("--url", "http://h", "--out", "o", "--prompt", "x", "--prompt-words", "3"), "literal"),
        (("--url", "http://h", "--out", "o", "--mode", "open"), "the open loop needs both"),
        (("--url", "http://h", "--out", "o", "--rate-rps", "1"), "mean nothing in mode closed"),
        (("--url", "http://h", "--out", "no/such/o"), "--out: expected a file in a directory"),
        (("--url", "http://h", "--out", "board"), "--out: expected a file in a directory"),
        (("--url", "http://h", "--out", "o", "--bogus"), "unrecognized arguments: --bogus"),
        (
            ("--url", "http://h", "--out", "o", "--prompt-words", "1", "--requests", "900"),
            "901 different prompts of 1 word(s)",
        ),
    ],
)
def test_program_unusable_arguments(
    arguments: tuple[str, ...],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(REPO)
    with pytest.raises(SystemExit) as ended:
        loadgen.main(arguments)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err
    assert not (REPO / "o").exists()


def test_program_file_that_cannot_be_written(server: FakeServer) -> None:
    run = program("--url", server.url, "--requests", "1", "--max-tokens", "1", "--no-preflight",
                  "--out", "/proc/o")  # fmt: skip
    assert run.returncode == 3
    assert run.stderr.startswith("loadgen: cannot write /proc/o: ")
    assert "Traceback" not in run.stderr


def test_an_existing_file_survives_a_failed_write(tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.write_text("before")
    with pytest.raises(ValueError, match="not JSON compliant"):
        loadgen.write_result(out, {"x": float("nan")})
    assert out.read_text() == "before"
    loadgen.write_result(out, {"x": 1})
    assert json.loads(out.read_text()) == {"x": 1}
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_program_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "o"
    with in_thread(FakeServer({"/v1/completions": stream((1, text("A")), (2, STAY))})) as server:
        arguments = ("--url", server.url, "--out", str(out), "--no-preflight")
        child = subprocess.Popen(command(*arguments), cwd=REPO, stderr=subprocess.PIPE, text=True)
        while not server.requests:
            time.sleep(0.01)
        child.send_signal(number)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "loadgen: interrupted: the run was stopped" in errors
    result = schemas.read(out, "loadgen")
    assert "interrupted" in result["invalid_reasons"]
    assert [r["status"] for r in result["requests"]] == ["cancelled"]


def test_program_interrupted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def insist(_config: LoadConfig) -> dict[str, Any]:
        raise KeyboardInterrupt  # what the second Ctrl-C is, once the handler has been removed

    monkeypatch.setattr(loadgen, "_run_until_signal", insist)
    assert loadgen.main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path / "o")]) == 130
    assert capsys.readouterr().err == "loadgen: interrupted twice; nothing written\n"
    assert list(tmp_path.iterdir()) == []


def test_the_schema_refuses_what_the_program_never_writes() -> None:
    result, _ = load(tokens(2), max_tokens=2)
    for change in (
        {"valid": False},
        {"invalid_reasons": ["bad_luck"]},
        {"schema_version": "2"},
        {"extra": 1},
    ):
        with pytest.raises(InvalidData):
            schemas.check(result | change, "loadgen")
    for name in ("ttft_ms", "timings", "status"):
        record = dict(result["requests"][0])
        del record[name]
        with pytest.raises(InvalidData, match=name):
            schemas.check(result | {"requests": [record]}, "loadgen")

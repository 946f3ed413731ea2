"""Load generator for llama-server: concurrent streaming completions, measured honestly.

Promise: every request is recorded, a run is valid or invalid with named reasons, and what a number
means is written in schemas/loadgen.schema.json.  The prompts, and the arrivals of an open loop, are
functions of the seed.  As a program: exit code 0 valid run, 4 invalid run (the file is written all
the same), 2 unusable arguments, 3 the file cannot be written, 130 interrupted (a file with what
there is, marked invalid).
Limit: /v1/completions only; one process with one event loop, good for some dozens of streams.  A
closed loop waits for the server before it sends the next request, so its tail is not what clients
that arrive on their own would see; use the open loop for that.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import aiohttp

from board.agent.load_client import Clock, Reply, complete, open_session
from board.agent.load_config import ConfigError, LoadConfig
from board.agent.load_health import ClientMeter
from board.agent.load_records import Job, Outcome, Phase, as_json, conclude
from board.agent.load_server import NotReady, Server, ServerFacts
from board.agent.load_summary import findings, summarise
from board.agent.prompts import longest_run, make_prompts, read_words

SCHEMA_VERSION = "1"


def request_fields(config: LoadConfig) -> dict[str, Any]:
    """Return what every request carries besides `prompt` and `id_slot`.

    Every field that changes the work or the stream is explicit, because the server's defaults
    change between releases and can be changed by its options and by the model file.
    """
    return {
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "n_predict": config.max_tokens,
        "max_tokens": config.max_tokens,
        "ignore_eos": True,
        "stop": [],
        "temperature": 0,
        "seed": config.seed,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n_probs": 0,
        "n_keep": 0,
        "n_indent": 0,
        "t_max_predict_ms": -1,
        "cache_prompt": config.one_prompt,
        "n_cache_reuse": 0,
        "return_tokens": False,
        "return_progress": False,
        "timings_per_token": False,
        "sse_ping_interval": -1,
    }


@dataclass(frozen=True)
class Hooks:
    """What a caller wants done around the parts of a run; none of it is inside what is timed.

    load: entered when the server is up and has been asked what it is, before the first completion
        (the probe); left when all requests have ended.
    window: entered right before the first measured request, left right after the last one, for
        instruments that measure the same window.
    """

    load: Callable[[], AbstractContextManager[object]] = nullcontext
    window: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class _Sent:
    """A request and what came back, not judged yet: that waits until the window is over."""

    job: Job
    worker: int
    id_slot: int | None
    t_sched_ns: int
    replies: list[Reply] = field(default_factory=list)


class _Run:
    """One run against one server."""

    def __init__(
        self,
        config: LoadConfig,
        clock: Clock,
        session: aiohttp.ClientSession,
        stop: asyncio.Event,
        hooks: Hooks,
    ) -> None:
        self.config = config
        self.clock = clock
        self.session = session
        self.stop = stop
        self.hooks = hooks
        self.origin_ns = clock()
        self.server = Server(session, config, clock)
        self.facts = ServerFacts(words=read_words())
        self.prompts: list[str] = []
        self.probe_attempts = 0
        self.sent: list[_Sent] = []
        self.problems: dict[str, str] = {}
        self.measuring = False  # until there was a window, there is nothing to find fault with
        self.client = ClientMeter(clock, config.heartbeat_ms)

    # -- before the window

    async def prepare(self) -> None:
        """Find the server ready and able, or say in `problems` why it is not."""
        config = self.config
        if config.preflight:
            try:
                await self.server.wait_healthy()
                self.facts = await self.server.facts(
                    self.facts.words, count_words=config.prompt is None
                )
            except NotReady as error:
                self.problems["server_not_ready"] = str(error)
                return
        self._make_prompts()
        slots = self.facts.total_slots
        if slots is not None and slots < config.concurrency:
            self.problems["slots<concurrency"] = f"{slots} slots, concurrency {config.concurrency}"
        # Each word is a token at least.
        self._check_context(self.expected_prompt_tokens or config.prompt_words or 0)

    def _make_prompts(self) -> None:
        config = self.config
        count = 1 + config.warmup_requests + config.requests  # the first one is the probe's
        if config.prompt is not None or config.prompt_words is None:
            self.prompts = [config.prompt or ""] * count
            return
        words = self.facts.words
        if count > longest_run(words, config.prompt_words):
            words = read_words()  # enough of them: run_load has checked that
            self.facts.special_tokens = None
        if config.one_prompt:  # of its own for the probe, which must not put it into the cache
            probe, prompt = make_prompts(words, config.prompt_words, 2, config.seed)
            self.prompts = [probe, *[prompt] * (count - 1)]
            return
        self.prompts = make_prompts(words, config.prompt_words, count, config.seed)

    @property
    def expected_prompt_tokens(self) -> int | None:
        special, words = self.facts.special_tokens, self.config.prompt_words
        return None if special is None or words is None else words + special

    def _check_context(self, prompt_tokens: int) -> None:
        need, n_ctx = prompt_tokens + self.config.max_tokens, self.facts.smallest_n_ctx
        if n_ctx is not None and need > n_ctx:
            self.problems["context_too_small"] = (
                f"need {need} > {n_ctx} tokens per slot "
                f"({prompt_tokens} of prompt, {self.config.max_tokens} of output)"
            )

    async def _probe(self) -> None:
        """One completion of one token, so that the first measured request is not the first one."""
        job = Job(id=-1, phase="probe", prompt=self.prompts[0])
        while True:
            self.probe_attempts += 1
            sent = _Sent(job, 0, self._slot_of(0), self.clock())
            await self._send(sent, n_predict=1, max_tokens=1)
            outcome = self._conclude(sent, max_tokens=1)
            if outcome.status in ("ok", "short_output", "no_tokens"):
                self._check_context(outcome.prompt_tokens or 0)
                return
            line = f"probe completion: {outcome.status}: {outcome.error}"
            if outcome.status not in ("http_503", "connect_error"):
                self.problems["probe_failed"] = line
                return
            try:
                await self.server.pause_until_ready(line)
            except NotReady as error:
                self.problems["server_not_ready"] = str(error)
                return

    # -- sending

    def _slot_of(self, worker: int) -> int | None:
        """Return the slot that this worker's requests ask for, None to leave it to the server."""
        ids = self.facts.slot_ids
        return ids[worker] if ids is not None and len(ids) >= self.config.concurrency else None

    async def _send(self, sent: _Sent, **changed: int) -> None:
        content = request_fields(self.config) | {"prompt": sent.job.prompt} | changed
        if sent.id_slot is not None:
            content["id_slot"] = sent.id_slot
        body = json.dumps(content).encode()
        await complete(self.session, self.config, self.clock, body, sent.replies)

    async def _work(self, worker: int, jobs: list[Job], t_phase_ns: int) -> None:
        """Take the next job when one ends, until there are none (`jobs` is in reverse)."""
        while jobs:
            job = jobs.pop()
            t_sched_ns = self.clock()
            if job.t_planned_ns is not None:
                t_sched_ns = t_phase_ns + job.t_planned_ns
                await asyncio.sleep(max(0, t_sched_ns - self.clock()) / 1e9)
            sent = _Sent(job, worker, self._slot_of(worker), t_sched_ns)
            self.sent.append(sent)
            await self._send(sent)

    async def _phase(self, jobs: Sequence[Job]) -> None:
        t_phase_ns = self.clock()
        remaining = list(reversed(jobs))
        async with asyncio.TaskGroup() as group:
            for worker in range(min(self.config.concurrency, len(jobs))):
                group.create_task(self._work(worker, remaining, t_phase_ns))

    async def load(self) -> None:
        """Put the load on the server: the probe, then the warm-up, then what counts."""
        if self.config.preflight:
            await self._probe()
        if not self.problems:
            await self.warm_up()
        if not self.problems:
            await self.measure()

    async def warm_up(self) -> None:
        await self._phase(self._jobs("warmup", 0, self.config.warmup_requests))
        if self.config.preflight and self.config.warmup_requests:
            await self._drain()

    async def measure(self) -> None:
        config = self.config
        jobs = self._jobs("measured", config.warmup_requests, config.requests)
        size = config.concurrency if config.mode == "rounds" else len(jobs)
        self.measuring = True
        with self.hooks.window(), self.client.window():
            for start in range(0, len(jobs), size):
                await self._phase(jobs[start : start + size])

    def _jobs(self, phase: Phase, first_id: int, count: int) -> list[Job]:
        config, jobs = self.config, []
        opened = phase == "measured" and config.mode == "open"
        planned_ns = arrivals_ns(config) if opened else [None] * count
        for index in range(count):
            jobs.append(
                Job(
                    id=first_id + index,
                    phase=phase,
                    prompt=self.prompts[1 + first_id + index],
                    round=index // config.concurrency
                    if phase == "measured" and config.mode == "rounds"
                    else None,
                    t_planned_ns=planned_ns[index],
                )
            )
        return jobs

    async def unless_stopped(self, work: Awaitable[None]) -> None:
        """Await `work`, or cancel it when `stop` is set; what was in flight is kept."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return
            self.problems["interrupted"] = "the run was stopped before its end"
        finally:
            for each in (task, stopped):
                each.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    # -- after the window

    async def _drain(self) -> None:
        line = await self.server.drain(self.config.drain_timeout_s)
        if line is not None:
            self.problems["not_drained"] = line

    async def finish(self) -> None:
        await self._drain()
        line = await self.server.changed_since(self.facts)
        if line is not None:
            self.problems["server_changed"] = line

    def _conclude(self, sent: _Sent, max_tokens: int) -> Outcome:
        return conclude(
            sent.job, sent.worker, sent.id_slot, sent.t_sched_ns, sent.replies[0], max_tokens
        )

    def result(self) -> dict[str, Any]:
        """Judge everything that was sent and return the document of the schema."""
        config, facts = self.config, self.facts
        # A worker that was cancelled before it could send leaves no reply.
        outcomes = [self._conclude(sent, config.max_tokens) for sent in self.sent if sent.replies]
        outcomes.sort(key=lambda outcome: outcome.job.id)
        summary = summarise([o for o in outcomes if o.job.phase == "measured"], config)
        if self.measuring:
            self.problems |= findings(
                outcomes,
                summary,
                config,
                self.expected_prompt_tokens,
                self.client.loop_lag_max_ms,
            )
        used = self.prompts[1:]
        props = facts.props or {}
        return {
            "schema_version": SCHEMA_VERSION,
            "valid": not self.problems,
            "invalid_reasons": sorted(self.problems),
            "invalid_details": self.problems,
            "config": asdict(config),
            "request_fields": request_fields(config),
            "prompts": {
                "sha256": hashlib.sha256("\n".join(used).encode()).hexdigest() if used else None,
                "words": len(facts.words),
                "expected_tokens": self.expected_prompt_tokens,
            },
            "server": {
                "build_info": _string(props.get("build_info")),
                "model_path": _string(props.get("model_path")),
                "total_slots": facts.total_slots,
                "slot_n_ctx": facts.slot_n_ctx,
                "probe_attempts": self.probe_attempts,
            },
            "requests": [as_json(outcome, self.origin_ns) for outcome in outcomes],
            "summary": summary,
            "client": self.client.as_json(),
        }


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def arrivals_ns(config: LoadConfig) -> list[int]:
    """Return the planned sends of an open loop, in ns after its start.

    Absolute times, so that no delay shifts those that follow.  The stream of random numbers is the
    arrivals' own: other prompts do not mean other arrivals.
    """
    rate_rps = config.rate_rps or 0.0
    if config.arrivals == "constant":
        return [round(index * 1e9 / rate_rps) for index in range(config.requests)]
    stream = random.Random(f"arrivals:{config.seed}")
    planned_ns, t_s = [], 0.0
    for _ in range(config.requests):
        t_s += stream.expovariate(rate_rps)
        planned_ns.append(round(t_s * 1e9))
    return planned_ns


async def run_load(
    config: LoadConfig,
    clock: Clock = time.perf_counter_ns,
    stop: asyncio.Event | None = None,
    hooks: Hooks | None = None,
) -> dict[str, Any]:
    """Run one load and return its result, as schemas/loadgen.schema.json describes it.

    `clock` gives nanoseconds and must run with the event loop's clock.  Setting `stop` ends the run
    early with reason `interrupted`; requests in flight are recorded as `cancelled`.  Raises
    ConfigError if the word list cannot make that many different prompts; whatever the server does
    is in the result, not raised.
    """
    count = 1 + config.warmup_requests + config.requests
    if config.prompt_words is not None and count > longest_run(read_words(), config.prompt_words):
        raise ConfigError(
            f"requests: {count} different prompts of {config.prompt_words} word(s), probe and "
            f"warm-up included, are more than the word list can make; use longer prompts"
        )
    async with open_session(config) as session:
        run = _Run(config, clock, session, stop or asyncio.Event(), hooks or Hooks())
        await run.unless_stopped(run.prepare())
        if not run.problems:
            with run.hooks.load():
                await run.unless_stopped(run.load())
        if run.measuring and config.preflight and "interrupted" not in run.problems:
            await run.unless_stopped(run.finish())
        return run.result()


# -- the program


def _parser() -> argparse.ArgumentParser:
    default = {each.name: each.default for each in fields(LoadConfig)}
    parser = argparse.ArgumentParser(
        prog="python -m board.agent.loadgen",
        description="Measure a llama-server with concurrent streaming completions.",
        epilog=(
            "Exit code: 0 valid run; 4 invalid run, with the reasons in FILE and on standard "
            "error; 2 unusable arguments; 3 FILE cannot be written; 130 interrupted. Prompts are "
            "words of words.txt, unique from the first word on, so that no cache can help."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def add(name: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        key = name.replace("-", "_")
        parser.add_argument(
            f"--{name}", type=kind, default=default[key], metavar=metavar, help=text
        )

    parser.add_argument("--url", required=True, help="of the server: http://HOST:PORT")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="JSON file to write"
    )
    parser.add_argument(
        "--mode",
        choices=("closed", "rounds", "open"),
        default=default["mode"],
        help="closed: N workers, each sends its next request when its last one has ended; rounds: "
        "N requests at once, wait for all, repeat; open: requests arrive on a schedule of their "
        "own, at most N in flight",
    )
    add("concurrency", int, "N", "requests in flight")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="R",
        help=f"measured requests (default: {default['requests']}, or N times the rounds)",
    )
    parser.add_argument("--rounds", type=int, metavar="K", help="of mode rounds: R = K times N")
    parser.add_argument(
        "--rate-rps", type=float, metavar="X", help="of mode open: requests per second"
    )
    parser.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        help="of mode open: what the schedule is like (default: poisson)",
    )
    add("warmup-requests", int, "K", "sent first, recorded, never counted")
    add("max-tokens", int, "T", "output tokens of each request")
    parser.add_argument(
        "--prompt-words",
        type=int,
        metavar="W",
        help=f"words of each prompt (default: {default['prompt_words']})",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="one literal prompt instead, for all")
    parser.add_argument(
        "--one-prompt",
        action="store_true",
        help="the same words for every request, which the server may take from its cache; without "
        "it a cache hit makes the run invalid",
    )
    add("seed", int, "S", "of the prompts, the arrivals and the sampling; 0 is a seed too")
    parser.add_argument(
        "--no-preflight",
        dest="preflight",
        action="store_false",
        help="use nothing but /v1/completions: no waiting for the server, no /props, /slots, "
        "/tokenize, no probe completion, no pinned slots, no check that slots are idle afterwards",
    )
    add("ready-timeout-s", float, "S", "how long the preflight waits for the server")
    add("connect-timeout-s", float, "S", "limit for connecting")
    add("first-token-timeout-s", float, "S", "limit from sending to the first text")
    add("stall-timeout-s", float, "S", "limit between two events after that (pings do not count)")
    add("total-timeout-s", float, "S", "limit for one request")
    add("drain-timeout-s", float, "S", "how long the slots may take to be idle afterwards")
    add("heartbeat-ms", float, "MS", "interval of the event loop's lag probe; 0: none")
    add("max-loop-lag-ms", float, "MS", "above it the run is invalid: client_overloaded")
    add("max-start-spread-ms", float, "MS", "above it the run is invalid: start_spread")
    return parser


def _config(options: argparse.Namespace) -> LoadConfig:
    values = vars(options) | {}
    del values["out"]
    rounds = values.pop("rounds")
    if rounds is not None:
        if options.mode != "rounds" or options.requests is not None:
            raise ConfigError("rounds: goes with --mode rounds and without --requests")
        values["requests"] = rounds * options.concurrency
    elif options.requests is None:
        values["requests"] = LoadConfig.requests
    if options.prompt is None and options.prompt_words is None:
        values["prompt_words"] = LoadConfig.prompt_words
    if options.mode == "open" and options.arrivals is None:
        values["arrivals"] = "poisson"
    return LoadConfig(**values)


async def _run_until_signal(config: LoadConfig) -> dict[str, Any]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        # Once: whoever insists gets the default, at once.
        loop.remove_signal_handler(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return await run_load(config, stop=stop)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Replace `path` by the result, whole or not at all; OSError if that cannot be done."""
    text = json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _report(result: dict[str, Any]) -> None:
    summary = result["summary"]
    n = summary["n_ok"]
    near_max = ", near max" if summary["p95_low_n"] else ""

    def shown(key: str) -> str:
        return "-" if summary[key] is None else f"{summary[key]:.3f}"

    print(
        f"{'valid' if result['valid'] else 'INVALID'}: {n} ok, {summary['n_failed']} failed; "
        f"output {shown('output_tps')} tok/s; mean TTFT {shown('mean_ttft_ms')} ms; "
        f"P95 TTFT (n={n}{near_max}) {shown('p95_ttft_ms')} ms; "
        f"mean latency {shown('mean_latency_ms')} ms"
    )
    for reason, line in sorted(result["invalid_details"].items()):
        print(f"loadgen: {reason}: {line}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir() or options.out.is_dir():
        parser.error(f"--out: expected a file in a directory that exists, got {options.out}")
    try:
        config = _config(options)
        result = asyncio.run(_run_until_signal(config))
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("loadgen: interrupted twice; nothing written", file=sys.stderr)
        return 130
    try:
        write_result(options.out, result)
    except OSError as error:
        print(f"loadgen: cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 3
    _report(result)
    if "interrupted" in result["invalid_reasons"]:
        return 130
    return 0 if result["valid"] else 4


if __name__ == "__main__":
    sys.exit(main())

"""A scripted board for the runner's tests, and sample documents of what a board delivers.

Run as a program it is a reproduction on a slow board, for the tests that need another process:
    python tests/fake_board.py RESULTS EXPERIMENTS SECONDS_PER_CELL
"""

import copy
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from board.agent.load_config import LoadConfig
from board.agent.load_summary import summarise
from board.agent.loadgen import request_fields
from board.cell import Definitions
from board.runner import reproduce
from toolchain.command import Cancelled
from toolchain.errors import ArtifactError

Script = Callable[[Mapping[str, Any], Path, threading.Event], dict[str, Any]]

COST = {"cpu_s": 30, "disk_mib": 0.25}


def experiments(
    load: Mapping[str, int],
    server: Mapping[str, int],
    *,
    seeds: Sequence[int] = (1,),
    scope: str = "partial",
    instruments: Sequence[str] = ("observer", "profiler", "truth"),
    deadline_s: int = 60,
    cost: Mapping[str, float] = COST,
) -> str:
    """An experiments.toml of one load, "short", and one server, "small".

    A single run has them by default, under the instruments; E0 is such a cell without any.
    """
    defaults = {
        "board": "virtual",
        "model": "banana-tiny",
        "policy": "baseline",
        "scope": scope,
        "bystanders": 0,
        "concurrency": 2,
        "seed": 1,
        "load": "short",
        "server": "small",
        "instruments": list(instruments),
        "deadline_s": deadline_s,
        "cost": cost,
    }
    return (
        'schema_version = "1"\n'
        + _table("[loads.short]", {"mode": "closed", **load})
        + _table("[servers.small]", server)
        + _table("[run_defaults]", defaults)
        + _experiment("E0", "kick the tires", full_only=False)
        + _part("E0", seeds=list(seeds), deadline_s=deadline_s, cost=cost)
    )


def _experiment(name: str, title: str, *, full_only: bool) -> str:
    content = {"title": title, "purpose": "a purpose", "full_only": full_only}
    return _table(f"[experiments.{name}]", content)


def _part(experiment: str, **changed: Any) -> str:
    content = {
        "model": "banana-tiny",
        "policies": ["baseline"],
        "concurrencies": [2],
        "seeds": [1],
        "load": "short",
        "server": "small",
        "instruments": [],
        "deadline_s": 60,
        "cost": COST,
    }
    return _table(f"[[experiments.{experiment}.parts]]", content | changed)


def _table(head: str, content: Mapping[str, Any]) -> str:
    return head + "\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in content.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)  # words, numbers, truth values and lists of them are TOML as they are


EXPERIMENTS = (
    experiments(
        {"requests": 8, "warmup_requests": 1, "prompt_words": 48, "max_tokens": 16},
        {"threads": 4, "threads_batch": 8, "ctx_per_slot": 100, "poll": 50},
        seeds=[1, 2],
        scope="all",
        instruments=[],
    )
    + _part(
        "E0",
        model="smollm2",
        concurrencies=[1],
        load="france",
        cost={**COST, "cpu_s": 90},
        expect_text="Paris",
    )
    + _table(
        "[loads.france]",
        {
            "mode": "closed",
            "requests": 1,
            "warmup_requests": 0,
            "prompt": "The capital of France is",
            "max_tokens": 3,
        },
    )
    + _experiment("E9", "for a full reproduction", full_only=True)
    + _part("E9", concurrencies=[8])
)


def definitions(directory: Path, text: str = EXPERIMENTS) -> Definitions:
    """Definitions with `text` as experiments.toml and the project's own server and models."""
    path = directory / "experiments.toml"
    path.write_text(text, encoding="utf-8")
    return Definitions.read(experiments=path)


def agent() -> dict[str, Any]:
    """An agent.json of a run without trouble."""
    return copy.deepcopy(_AGENT)


def loadgen(
    cell: Mapping[str, Any], texts: Sequence[str] = (" Paris.",), reasons: Sequence[str] = ()
) -> dict[str, Any]:
    """A loadgen.json of the cell whose numbers follow from its seed, with these answers."""
    load, seed = cell["load"], cell["seed"]
    config = LoadConfig(url="http://127.0.0.1:8080", concurrency=cell["concurrency"], **load)
    requests = [
        _REQUEST | {"id": number, "text": text} for number, text in enumerate(texts, start=1)
    ]
    summary = summarise([], config) | {
        "output_tps": 5.0 + seed / 4,
        "mean_ttft_ms": 2000.0 + seed,
        "p95_ttft_ms": 2500.0 + seed,
        "mean_latency_ms": 4000.0 + seed,
        "n_ok": len(texts),
    }
    return {
        "schema_version": "1",
        "valid": not reasons,
        "invalid_reasons": list(reasons),
        "invalid_details": dict.fromkeys(reasons, "the figures"),
        "config": dataclasses.asdict(config),
        "request_fields": request_fields(config),
        "prompts": {"sha256": None, "words": 0, "expected_tokens": None},
        "server": dict.fromkeys(("build_info", "model_path", "total_slots", "slot_n_ctx"))
        | {"probe_attempts": 1},
        "requests": [_REQUEST | {"id": 0, "phase": "warmup", "text": "not counted"}, *requests],
        "summary": summary,
        "client": {
            "utc_start": "2026-01-01T00:00:04Z",
            "cpu_user_s": 0.5,
            "cpu_system_s": 0.25,
            "heartbeat_ms": 10.0,
            "loop_lag_beats": 0,
            "loop_lag_max_ms": None,
            "loop_lag_p99_ms": None,
            "affinity": [0],
            "policy": "SCHED_OTHER",
            "nice": 0,
            "python": "3.13.5",
            "aiohttp": "3.11",
            "machine": "riscv64",
            "platform": "linux",
        },
    }


_KERNEL = {
    "state": "disabled",
    "ops": None,
    "enable_seq": 0,
    "switch_all": 0,
    "base_slice_ns": 2800000,
}
_AGENT: dict[str, Any] = {
    "schema_version": "1",
    "invalid_reasons": [],
    "platform": {
        "kernel_release": "6.12.1",
        "kernel_version": "#1 SMP PREEMPT",
        "kernel_command_line": "nohlt",
        "architecture": "riscv64",
        "isa": "rv64imafdcv",
        "harts": 8,
        "memory_kib": 1000000,
        "governor": None,
        "python": "3.13.5",
        "boot_s": 4.25,
        "kernel_warnings": [],
        "server": None,
    },
    "scheduler": {
        "before": _KERNEL,
        "opened": _KERNEL | {"cpuset": None},
        "closed": _KERNEL | {"cpuset": None},
        "after": _KERNEL,
        "server_counts": {"prompt_tokens": 45, "output_tokens": 28, "batches": 20},
    },
    "bystanders": None,
}
_REQUEST: dict[str, Any] = {
    "phase": "measured",
    "round": None,
    "worker": 0,
    "id_slot": 0,
    "status": "ok",
    "error": None,
    "http_status": 200,
    "prompt": "a prompt",
    "finish_reason": "length",
    "t_sched_ms": 0.0,
    "t_send_ms": 0.0,
    "client_queue_ms": 0.0,
    "ttfr_ms": 2000.0,
    "ttft_ms": 2000.0,
    "tpot_ms": 1000.0,
    "icl_ms": [1000.0, 1000.0],
    "e2e_ms": 4000.0,
    "stream_ms": 4001.0,
    "decode_tps": 1.0,
    "e2e_tps": 0.75,
    "prompt_tokens": 5,
    "cached_tokens": 0,
    "output_tokens": 3,
    "partial_tokens": None,
    "chunks": 3,
    "tokens_per_chunk": 1.0,
    "token_source": "usage",
    "last_token_hidden": False,
    "timings": None,
    "server_tpot_ms": None,
    "server_wait_est_ms": None,
}


def calibration(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration of a machine that is perfectly parallel."""
    return {
        "schema_version": "1",
        "machine": cell["machine"],
        "inputs": cell["inputs"],
        "burn": {"1": [2.0e6], "8": [1.6e7]},
        "linear_error_ratio": 0.0,
        "barrier": {"8": [1500.0]},
        "server": [{"threads": 8, "prompt_ms": 1092.5, "predicted_ms": 656.25}],
        "valid": True,
        "invalid_reasons": [],
    }


def deliver(
    directory: Path,
    agent_document: Mapping[str, Any] | None,
    loadgen_document: Mapping[str, Any] | None,
) -> None:
    """Write a board's raw files; None leaves one out."""
    (directory / "console.log").write_text("booted\n", encoding="utf-8")
    for name, document in (("agent", agent_document), ("loadgen", loadgen_document)):
        if document is not None:
            path = directory / f"{name}.json"
            path.write_text(json.dumps(document), encoding="utf-8")


def good(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
    """A run without trouble."""
    deliver(directory, agent(), loadgen(cell))
    return {"host_cpu_s": 12.5, "host_wall_s": 13.0}


def slow(seconds: float) -> Script:
    """A run that takes its time and stops when it is told to."""

    def script(cell: Mapping[str, Any], directory: Path, cancel: threading.Event) -> dict[str, Any]:
        (directory / "console.log").write_text("booting\n", encoding="utf-8")
        if cancel.wait(seconds):
            raise Cancelled("the run was cancelled")
        return good(cell, directory, cancel)

    return script


class FakeBoard:
    """A board that does what its script says; a script by seed overrides the common one."""

    name = "virtual"
    platform = "virtual"
    parallel = True
    jobs = 2
    instruments: Sequence[str] = ("observer", "profiler", "truth")
    most_threads = None

    def __init__(self, script: Script = good, by_seed: Mapping[int, Script] | None = None) -> None:
        self.script = script
        self.by_seed = dict(by_seed or {})
        self.runs: list[Mapping[str, Any]] = []
        self.begun = 0
        self.prepared: list[str] = []
        self.deadlines_s: list[float] = []
        self.kernel = "1" * 64
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        return {
            "harts": 8,
            "parked_harts": 24,
            "vlen_bits": 256,
            "memory_mib": 1024,
            "icount_shift": 3,
            "quantum_us": 100,
            "cpu": "rv64,v=true",
            "append": "nohlt",
            **overrides,
        }

    def prepare(self, model: str, tools: Sequence[str] = ()) -> dict[str, str]:
        self.prepared.append(model)
        names = ("initramfs", "llama_server", "agent", "qemu", "quantum", *tools)
        filler = "a" if model == "smollm2" else "b"
        return {"kernel": self.kernel, "model": filler * 64, **dict.fromkeys(names, "0" * 64)}

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        return calibration(cell)

    def begin(self) -> None:
        self.begun += 1

    def run(
        self,
        cell: Mapping[str, Any],
        directory: Path,
        *,
        deadline_s: float,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        with self._lock:
            self.runs.append(cell)
            self.deadlines_s.append(deadline_s)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self.by_seed.get(cell["seed"], self.script)(cell, directory, cancel)
        finally:
            with self._lock:
                self.at_once -= 1


def _main() -> int:
    results, experiments, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    board = FakeBoard(slow(seconds))
    try:
        return reproduce(
            [], board, results, 2, False, definitions=Definitions.read(experiments=experiments)
        )
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_main())

"""Made-up runs for the tests of the analysis: no measurement, and never written to results/.

Promise: a run is a fake board's record (tests/fake_board.py), its numbers replaced by log-normal
ones around known ratios, from a fixed seed; so what the analysis ought to find is known.
"""

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fake_board import FakeBoard, calibration
from fake_board import agent as agent_document
from fake_board import loadgen as loadgen_document

import schemas
from analysis.collect import CollectedRun, collected, in_order, with_scheduler
from board.policies import Policies
from schemas.record import run_id

POLICIES = ("baseline", "baseline-long", "affinity", "long-slice", "vhot", "cooperative")
# What each policy multiplies the baseline's metrics by: made up, roughly as the report has it.
FACTORS: Mapping[str, Mapping[str, float]] = {
    "baseline": {},
    "baseline-long": {"save_count": 0.9},
    "affinity": {"save_count": 0.95, "output_tps": 1.02},
    "long-slice": {"save_count": 0.8, "output_tps": 1.04},
    "vhot": {"save_count": 0.7, "output_tps": 1.07, "context_switches": 0.85},
    "cooperative": {"save_count": 0.66, "output_tps": 1.25, "context_switches": 0.78,
                    "mean_ttft_ms": 0.8, "p95_ttft_ms": 0.8, "mean_latency_ms": 0.8},
}  # fmt: skip
BASE = {
    "output_tps": 6.0,
    "mean_ttft_ms": 9000.0,
    "p95_ttft_ms": 11000.0,
    "mean_latency_ms": 24000.0,
    "save_count": 140000.0,
    "context_switches": 220000.0,
}
SERVER = {
    "argv": ["llama-server"], "pid": 100, "exit_code": 0, "vector_threads": 8, "vlen_bits": 256,
    "threads_before": [], "threads_after": [],
}  # fmt: skip


def cell(policy: str, concurrency: int, seed: int, **changed: Any) -> dict[str, Any]:
    """A cell of the fake board."""
    board = FakeBoard()
    whole: dict[str, Any] = {
        "schema_version": "1",
        "board": "virtual",
        "model": "banana-tiny",
        "policy": policy,
        "scope": "partial" if (scoped := policy in with_scheduler()) else None,
        "variant": None,
        "scheduling": Policies.read().scheduling(policy, "partial" if scoped else None, None),
        "bystanders": 0,
        "concurrency": concurrency,
        "seed": seed,
        "load": {"mode": "closed", "requests": 16, "warmup_requests": 1, "prompt_words": 24,
                 "prompt": None, "max_tokens": 8, "seed": seed},
        "server": {"flags": ["--threads", "8"]},
        "machine": board.machine({}),
        "instruments": [],
        "inputs": board.prepare("banana-tiny"),
    }  # fmt: skip
    return whole | changed


def record(which: Mapping[str, Any], attempt: int = 1, reasons: Iterable[str] = ()) -> Any:
    """A schema-valid record of a run of this cell; each has a beginning and times of its own."""
    moment = which["seed"] * 1000 + which["concurrency"] * 10 + POLICIES.index(which["policy"])
    found = loadgen_document(which)
    for number, request in enumerate(found["requests"]):
        request["t_send_ms"] = moment + number / 7
    agent = agent_document()
    agent["platform"]["server"] = _server(moment)
    why = list(reasons)
    at = f"2026-01-01T{moment % 24:02d}:{moment % 60:02d}:{attempt % 60:02d}.{moment % 1000:03d}Z"
    return {
        "schema_version": "1",
        "run_id": run_id(which, attempt),
        "cell": which,
        "platform": agent["platform"],
        "environment": {
            "attempt": attempt, "started_at": at, "ended_at": at, "argv": ["./inv"],
            "git_commit": None, "git_dirty": None, "python_version": "3.11.7",
            "host_kernel": "6.1", "host_architecture": "x86_64", "host_cpu_model": "a CPU",
            "host_cpus": 2, "jobs": 2, "disk_bytes": 1000, "failure": None,
            "host_cpu_s": 100.0, "host_wall_s": 60.0 + moment / 1e4 + attempt,
        },
        "calibration": calibration(which) if which["machine"] else None,
        "loadgen": found,
        "observer": None,
        "profiler": None,
        "truth": None,
        "scheduler": {"kernel": agent["scheduler"], "document": None},
        "phase_tokens": None,
        "bystanders": None,
        "agreement": None,
        "valid": not why,
        "invalid_reasons": why,
    }  # fmt: skip


def _server(moment: int) -> dict[str, Any]:
    def threads(times: int) -> list[dict[str, Any]]:
        return [
            {
                "tid": 100 + n,
                "name": "llama-server",
                "policy": 0,
                "in_sched_ext": False,
                "harts": "0-7",
                "run_ns": times * (8_000_000_000 - 500_000_000 * n + moment),
                "wait_ns": times * 200_000_000 * n,
                "voluntary_switches": times * 100 * n,
                "involuntary_switches": times * 50,
            }
            for n in range(9)
        ]

    return SERVER | {"threads_before": threads(1), "threads_after": threads(2)}


def write(results: Path, records: Iterable[Mapping[str, Any]], experiment: str = "E2") -> None:
    """A results folder with these records and the raw files that belong to them."""
    hashes: dict[str, list[str]] = {}
    for one in records:
        directory = results / "runs" / one["run_id"]
        directory.mkdir(parents=True)
        schemas.write(directory / "record.json", one, "record")
        schemas.write(directory / "loadgen.json", one["loadgen"], "loadgen")
        agent = agent_document() | {"platform": one["platform"]}
        agent["scheduler"] = one["scheduler"]["kernel"]
        schemas.write(directory / "agent.json", agent, "agent")
        hashes.setdefault(one["cell"]["board"], []).append(one["run_id"].split("-")[0])
    cells = {board: sorted(set(those)) for board, those in hashes.items()}
    index = {"schema_version": "1", "experiments": {experiment: cells}}
    schemas.write(results / "index.json", index, "results")


def matrix(
    seeds: Iterable[int] = (1, 2, 3),
    *,
    policies: Iterable[str] = POLICIES,
    concurrencies: Iterable[int] = (2, 4, 8),
    experiment: str = "E2",
    spread: float = 0.03,
    factors: Mapping[str, Mapping[str, float]] = FACTORS,
    platform: str = "virtual",
    random_seed: int = 7,
) -> list[CollectedRun]:
    """Runs of a whole experiment with all metrics, each log-normal with the given spread."""
    random = np.random.default_rng(random_seed)
    runs = []
    for policy in policies:
        for concurrency in concurrencies:
            for seed in seeds:
                noise = {name: math.exp(random.normal(0, spread)) for name in BASE}
                values = {
                    name: BASE[name] * factors[policy].get(name, 1.0) * noise[name]
                    * (concurrency / 4 if name.endswith("_ms") else 1.0)
                    for name in BASE
                }  # fmt: skip
                runs.append(
                    changed(_plain(policy, concurrency, seed, experiment), platform, values)
                )
    return in_order(runs)


@functools.cache
def _plain(policy: str, concurrency: int, seed: int, experiment: str) -> CollectedRun:
    one = record(cell(policy, concurrency, seed))
    return collected(one, {experiment: {"virtual": [one["run_id"].split("-")[0]]}})


def changed(run: CollectedRun, platform: str, values: Mapping[str, float]) -> CollectedRun:
    """The run with other numbers, and those that follow from them."""
    row = dict(copy.deepcopy(run.row))
    saves, switches = round(values["save_count"]), round(values["context_switches"])
    window_ms = 16 * 64 / values["output_tps"] * 1000
    row |= dict(values) | {
        "platform": platform,
        "board": "virtual" if platform == "virtual" else "f3",
        "model": "banana-tiny" if platform == "virtual" else "qwen2.5-0.5b-instruct-q4_k_m",
        "save_count": saves,
        "undiscarded_save_count": saves * 2 // 3,
        "spin_save_count": saves // 6,
        "discarded_save_count": saves - saves * 2 // 3,
        "restore_count": saves,
        "save_total_ns": saves * 2500,
        "saves_per_s": saves / window_ms * 1000,
        "context_switches": switches,
        "context_switches_per_request": switches / 16,
        "window_ms": window_ms,
        "aggregate_tps": values["output_tps"],
        "vstate_total_ns": saves * 2500,
    }
    return CollectedRun(
        row, run.cell_hash, run.experiments, run.n_ok, run.texts, run.record, run.times_ms,
        run.fingerprint,
    )  # fmt: skip

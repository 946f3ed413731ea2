"""What the analysis costs: figures to print, never a test.

Promise: a folder of a thousand runs (56 seeds of 18 cells), copies of one real record with other
seeds, policies and times, is made in a temporary place, analysed as ./inv analyze does, and the
seconds are printed.
Limit: needs a valid run in results/; the copies are no measurements, and nothing of them is kept.
"""

import copy
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import schemas
from analysis.analyze import DEFAULT_RESULTS, analysed, write
from schemas.record import RECORD, RUNS, read_records, run_id

SEEDS = 56
_POLICIES = ("baseline", "baseline-long", "affinity", "long-slice", "vhot", "cooperative")
_CONCURRENCIES = (2, 4, 8)


def bench(results: Path = DEFAULT_RESULTS) -> None:
    """Print the seconds that a thousand runs take; says so when there is no run to copy."""
    template = next((one for one in read_records(results) if one["valid"]), None)
    if template is None:
        print(f"analysis of 1,008 runs  not measured: no valid run in {results}")
        return
    with tempfile.TemporaryDirectory(prefix="bananaos-bench-") as scratch:
        folder = Path(scratch, "results")
        fill(folder, template, SEEDS)
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        analysis = analysed([folder], any_commit=True)
        write(analysis, Path(scratch, "report"))
        seconds = time.monotonic() - started_s
        cpu_s = time.process_time() - started_cpu_s
    count = analysis.document["runs"]["valid"]
    print(f"analysis of {count} runs     {seconds:8.1f} s   ({cpu_s:.1f} s of it computing)")


def fill(results: Path, template: dict[str, Any], seeds: int) -> None:
    """Make a results folder of copies of a record, so many seeds of each of 18 cells."""
    hashes = []
    cells = [(policy, c) for policy in _POLICIES for c in _CONCURRENCIES]
    for number in range(seeds * len(cells)):
        policy, concurrency = cells[number % len(cells)]
        one = copy.deepcopy(template)
        seed = 1 + number // len(cells)
        one["cell"] |= {"policy": policy, "concurrency": concurrency, "seed": seed}
        one["cell"]["load"]["seed"] = seed
        one["loadgen"]["config"] |= {"concurrency": concurrency, "seed": seed}
        one["run_id"] = run_id(one["cell"], 1)
        one["environment"] |= {"attempt": 1, "host_wall_s": float(number)}
        factor = 1 + int(hashlib.sha256(one["run_id"].encode()).hexdigest()[:4], 16) / 2**19
        for metric in ("output_tps", "mean_ttft_ms", "p95_ttft_ms", "mean_latency_ms"):
            one["loadgen"]["summary"][metric] *= factor
        for request in one["loadgen"]["requests"]:
            request["t_send_ms"] += number
        directory = results / RUNS / one["run_id"]
        directory.mkdir(parents=True)
        text = schemas.canonical(one).decode()
        (directory / RECORD).write_text(text, encoding="utf-8")
        raw = schemas.canonical(one["loadgen"]).decode()
        (directory / "loadgen.json").write_text(raw, encoding="utf-8")
        hashes.append(one["run_id"].split("-")[0])
    index = {"schema_version": "1", "experiments": {"E2": {template["cell"]["board"]: hashes}}}
    schemas.write(results / "index.json", index, "results")

"""From run records to results/summary.csv: the tidy table, a row per run.

Promise: one row per run, valid or not, with the columns of summary-row.schema.json in their order;
the same records give the same bytes; the file is replaced whole.  A bad record stops the collection
and is named.  The last columns repeat facts under the names that the report's own summary used.
Limit: nothing is averaged here, what no instrument measured is an empty field, and records are
looked at one by one: whether they fit together is for analysis/admit.py.
"""

import csv
import functools
import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import schemas
from analysis.instruments import vstate_columns
from board.boards import VARIABLE, board_tables
from board.policies import Policies
from schemas.record import fingerprint, read_records, split_run_id
from toolchain.errors import InvalidData, UsageError

SUMMARY = "summary.csv"
INDEX = "index.json"
Index = Mapping[str, Mapping[str, list[str]]]
_SEPARATOR = ";"
_NS_PER_S = 1e9


@dataclass(frozen=True)
class CollectedRun:
    """A run as the analysis sees it.

    row: its row (summary-row.schema.json).  n_ok: requests its latencies come from.  texts: the
    answers to its measured requests.  record: its record without `loadgen`.  times_ms: when each
    measured request was sent, first answered and done, by which a copied run is known.
    fingerprint: SHA-256 of what two runs of one cell on a deterministic board share.
    """

    row: Mapping[str, Any]
    cell_hash: str
    experiments: tuple[str, ...]
    n_ok: int
    texts: tuple[str, ...]
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)
    times_ms: tuple[float | None, ...] = field(default=(), repr=False)
    fingerprint: str = ""


def collect(results: Path) -> list[CollectedRun]:
    """Write <results>/summary.csv; returns its runs in the file's order.

    Raises InvalidData (a bad record, nothing is written) and EnvironmentUnfit (cannot be written).
    """
    index = read_index(results)
    runs = in_order(collected(record, index) for record in read_records(results))
    schemas.replace_text(results / SUMMARY, summary_csv(runs))
    return runs


def read_index(results: Path) -> Index:
    """Which cells (hashes) each experiment consists of on each board.

    Raises UsageError for what is no results folder, InvalidData for one with a damaged index.
    """
    if not (results / INDEX).exists():
        raise UsageError(
            f"{results}: not a results folder (no {INDEX} in it); expected one of ./inv reproduce, "
            "run or merge"
        )
    index: Index = schemas.read(results / INDEX, "results")["experiments"]
    return index


def in_order(runs: Iterable[CollectedRun]) -> list[CollectedRun]:
    """Sorted by experiment, board, model, policy, scope, variant, concurrency, seed, attempt."""
    return sorted(runs, key=_order)


def summary_csv(runs: Iterable[CollectedRun]) -> str:
    """The text of summary.csv for these runs; raises InvalidData at a row that cannot be."""
    names = schemas.schema("summary-row")["required"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for run in runs:
        schemas.check(run.row, "summary-row")
        writer.writerow([_field(run.row[name]) for name in names])
    return text.getvalue()


def collected(record: Mapping[str, Any], index: Index) -> CollectedRun:
    """The run of a record that was read (schemas.record) from a folder with this index."""
    cell, loadgen = record["cell"], record["loadgen"]
    digits, _ = split_run_id(record["run_id"])
    experiments = tuple(
        sorted(name for name, cells in index.items() if digits in cells.get(cell["board"], ()))
    )
    summary = loadgen["summary"] if loadgen else {}
    measured = [r for r in loadgen["requests"] if r["phase"] == "measured"] if loadgen else []
    row: dict[str, Any] = dict.fromkeys(schemas.schema("summary-row")["required"])
    row |= {
        "run_id": record["run_id"],
        "experiment": _SEPARATOR.join(experiments) or None,
        "board": cell["board"],
        "platform": _platform(record),
        "model": cell["model"],
        "policy": cell["policy"],
        "concurrency": cell["concurrency"],
        "seed": cell["seed"],
        "valid": record["valid"],
        "invalid_reasons": _SEPARATOR.join(record["invalid_reasons"]) or None,
        "output_tps": summary.get("output_tps"),
        "mean_ttft_ms": summary.get("mean_ttft_ms"),
        "p95_ttft_ms": summary.get("p95_ttft_ms"),
        "mean_latency_ms": summary.get("mean_latency_ms"),
        "vlen_bits": _vlen_bits(record),
        "window_ms": summary.get("window_ms"),
        "requests_ok": summary.get("n_ok"),
        "experiment_mode": _mode(cell["policy"], record["profiler"] is not None),
        "aggregate_tps": summary.get("output_tps"),
        "scope": cell["scope"],
        "variant": cell["variant"],
        **_bystanders(cell["bystanders"], record["bystanders"]),
        **vstate_columns(record),
    }
    return CollectedRun(
        row=row,
        cell_hash=digits,
        experiments=experiments,
        n_ok=summary.get("n_ok", 0),
        texts=tuple(request["text"] for request in measured),
        record={key: value for key, value in record.items() if key != "loadgen"},
        times_ms=tuple(
            request[key] for request in measured for key in ("t_send_ms", "ttft_ms", "e2e_ms")
        ),
        fingerprint=fingerprint(record),
    )


def treatment(row: Mapping[str, Any]) -> str:
    """What was done to a run, in a few words: policy, variant, scope, what ran beside it."""
    words = [row[key] for key in ("policy", "variant", "scope") if row[key] is not None]
    return " ".join(words + ([f"beside {row['bystanders']}"] if row["bystanders"] else []))


def _platform(record: Mapping[str, Any]) -> str:
    board, platforms = record["cell"]["board"], _platforms(os.environ.get(VARIABLE))
    if board not in platforms:
        raise InvalidData(
            f"{record['run_id']}: its board is {board!r}, expected one of boards.toml: "
            f"{', '.join(platforms)}: add it there, or leave the run out"
        )
    return platforms[board]


@functools.cache
def _platforms(own: str | None) -> Mapping[str, str]:
    """Name to platform of every board; own: the user's file, on which they depend."""
    return {name: table["platform"] for name, table in board_tables().items()}


def _vlen_bits(record: Mapping[str, Any]) -> int | None:
    machine, platform = record["cell"]["machine"], record["platform"]
    if machine is not None:
        bits: int | None = machine["vlen_bits"]
        return bits
    server = platform["server"] if platform else None
    return server["vlen_bits"] if server else None


def _bystanders(count: int, seen: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of the bystanders; only their number where they were not seen twice."""
    columns: dict[str, Any] = {"bystanders": count}
    if seen is None or seen["opened"] is None or seen["closed"] is None:
        return columns
    opened, closed = seen["opened"], seen["closed"]
    lasted_ns = closed["at_ns"] - opened["at_ns"]

    def done(key: str) -> int:
        before, after = (sum(row[key] for row in edge["threads"]) for edge in (opened, closed))
        return int(after - before)

    return columns | {
        "bystander_share": done("run_ns") / (count * lasted_ns),
        "bystander_rounds_per_s": done("rounds") / lasted_ns * _NS_PER_S,
    }


@functools.cache
def with_scheduler() -> frozenset[str]:
    """Policies that scx_vstate serves; the others are the kernel's own scheduler."""
    policies = Policies.read()
    return frozenset(filter(policies.has_scope, policies.content["policies"]))


def _mode(policy: str, profiled: bool) -> str:
    if policy in with_scheduler():
        return "scx_profiler" if profiled else "scx"
    return "profiler" if profiled else "baseline"


def _order(run: CollectedRun) -> tuple[Any, ...]:
    row = run.row
    factors = ("board", "model", "policy", "scope", "variant")
    words = (row[key] or "" for key in ("experiment", *factors))
    counts = (row[key] for key in ("bystanders", "concurrency", "seed"))
    return (*words, *counts, *split_run_id(row["run_id"]))


def _field(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)

"""From run records to results/summary.csv.

Promise: one row per run, valid or not, with the columns of summary-row.schema.json in their order;
the same records give the same bytes; the file is replaced whole.  A bad record stops the collection
and is named.
Limit: nothing is averaged here, and what no instrument measured is an empty field.
"""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from schemas.record import read_records, split_run_id
from toolchain.paths import REPO

SUMMARY = "summary.csv"
INDEX = "index.json"
_BOARDS = REPO / "board" / "boards.toml"
_SEPARATOR = ";"


@dataclass(frozen=True)
class CollectedRun:
    """A run as the analysis sees it.

    row: its row (summary-row.schema.json).  n_ok: requests its latencies come from.  texts: the
    answers to its measured requests.
    """

    row: Mapping[str, Any]
    cell_hash: str
    experiments: tuple[str, ...]
    n_ok: int
    texts: tuple[str, ...]


def collect(results: Path) -> list[CollectedRun]:
    """Write <results>/summary.csv; returns its runs in the file's order.

    Raises InvalidData (a bad record, nothing is written) and EnvironmentUnfit (cannot be written).
    """
    boards = schemas.read_toml(_BOARDS, "boards")["boards"]
    index = schemas.read(results / INDEX, "results")["experiments"]
    runs = [_collected(record, index, boards) for record in read_records(results)]
    runs.sort(key=_order)
    columns = schemas.schema("summary-row")["required"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for run in runs:
        schemas.check(run.row, "summary-row")
        writer.writerow([_field(run.row[column]) for column in columns])
    schemas.replace_text(results / SUMMARY, text.getvalue())
    return runs


def _collected(
    record: Mapping[str, Any],
    index: Mapping[str, Mapping[str, list[str]]],
    boards: Mapping[str, Mapping[str, str]],
) -> CollectedRun:
    cell, loadgen = record["cell"], record["loadgen"]
    digits, _ = split_run_id(record["run_id"])
    experiments = tuple(
        sorted(name for name, cells in index.items() if digits in cells.get(cell["board"], ()))
    )
    summary = loadgen["summary"] if loadgen else {}
    row: dict[str, Any] = dict.fromkeys(schemas.schema("summary-row")["required"])
    row |= {
        "run_id": record["run_id"],
        "experiment": _SEPARATOR.join(experiments) or None,
        "board": cell["board"],
        "platform": boards[cell["board"]]["platform"],
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
    }
    requests = loadgen["requests"] if loadgen else []
    texts = tuple(request["text"] for request in requests if request["phase"] == "measured")
    return CollectedRun(row, digits, experiments, summary.get("n_ok", 0), texts)


def _order(run: CollectedRun) -> tuple[Any, ...]:
    row = run.row
    keys = ("board", "model", "policy", "concurrency", "seed")
    return (row["experiment"] or "", *(row[key] for key in keys), *split_run_id(row["run_id"]))


def _field(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)

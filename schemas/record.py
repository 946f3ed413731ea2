"""A run's record on disk: whose cell it is, how it is read back, what of it is compared.

Promise: a record that is returned here was checked against its schema, lies in the folder its run
id names and belongs to the cell it carries.
Limit: raw logs beside record.json are not looked at.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import schemas
from toolchain.errors import InvalidData

RECORD = "record.json"
RUNS = "runs"
_HASH_DIGITS = 12


def cell_hash(cell: Mapping[str, Any]) -> str:
    """The first 12 hex digits of the SHA-256 of the cell's canonical spelling."""
    return hashlib.sha256(schemas.canonical(cell)).hexdigest()[:_HASH_DIGITS]


def run_id(cell: Mapping[str, Any], attempt: int) -> str:
    """`<cell hash>-<attempt>`; attempts count from 1."""
    return f"{cell_hash(cell)}-{attempt}"


def split_run_id(identifier: str) -> tuple[str, int]:
    """The cell hash and the attempt of a run id that passed its schema."""
    digits, _, attempt = identifier.partition("-")
    return digits, int(attempt)


def read_record(directory: Path) -> dict[str, Any]:
    """Read <directory>/record.json; raises InvalidData naming it when it is not a run's record."""
    path = directory / RECORD
    record: dict[str, Any] = schemas.read(path, "record")
    digits, attempt = split_run_id(record["run_id"])
    if record["run_id"] != directory.name:
        raise InvalidData(
            f"{path}: run_id is {record['run_id']!r}, but its folder is called {directory.name!r}: "
            "move it out of the results folder or restore its name"
        )
    if digits != cell_hash(record["cell"]):
        raise InvalidData(
            f"{path}: run_id is {record['run_id']!r}, but its cell hashes to "
            f"{cell_hash(record['cell'])!r}: the record was changed after the run; "
            "move it out of the results folder"
        )
    if attempt != record["environment"]["attempt"]:
        raise InvalidData(
            f"{path}: run_id says attempt {attempt}, environment says "
            f"{record['environment']['attempt']}: move it out of the results folder"
        )
    return record


def read_records(results: Path) -> Iterator[dict[str, Any]]:
    """All records of a results folder, sorted by folder name; raises InvalidData at a bad one."""
    runs = results / RUNS
    for directory in sorted(runs.iterdir()) if runs.is_dir() else ():
        if not directory.is_dir():
            raise InvalidData(
                f"{directory}: not a run's folder: move it out of {runs}, which holds only runs"
            )
        yield read_record(directory)


def comparable(record: Mapping[str, Any]) -> bytes:
    """The bytes that two runs of one cell on the virtual board must share.

    That is the canonical spelling of the record without `environment` (host, wall time, attempt)
    and with the attempt taken off `run_id`; everything else is compared to the last digit.
    """
    kept = {key: value for key, value in record.items() if key != "environment"}
    kept["run_id"] = split_run_id(record["run_id"])[0]
    return schemas.canonical(kept)


def fingerprint(record: Mapping[str, Any]) -> str:
    """SHA-256 of what two runs of one cell on the virtual board share."""
    return hashlib.sha256(comparable(record)).hexdigest()


def window_switches(server: Mapping[str, Any] | None) -> dict[int, tuple[int, int]]:
    """Return per thread how often it was switched out in the window, (voluntarily, not), by /proc.

    server: `platform.server` of the record.  A thread that was made meanwhile counts from its
    start; one that has ended since is not there (`threads_ended`).
    """
    keys = ("voluntary_switches", "involuntary_switches")
    if not server:
        return {}
    before = {row["tid"]: row for row in server["threads_before"]}
    none = dict.fromkeys(keys, 0)
    found = {}
    for row in server["threads_after"]:
        voluntary, involuntary = (row[key] - before.get(row["tid"], none)[key] for key in keys)
        found[row["tid"]] = (voluntary, involuntary)
    return found


def threads_ended(server: Mapping[str, Any]) -> int:
    """Return how many of the server's threads ended in the window: /proc has lost their counts."""
    after = {row["tid"] for row in server["threads_after"]}
    return sum(row["tid"] not in after for row in server["threads_before"])

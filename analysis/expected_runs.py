"""artifact/expected/runs.json: what a cell of the virtual board gives everybody, bit for bit.

Promise: a run is looked up by its cell's hash, which covers kernel, server, model, agent, machine
and load; equal means the whole record but for its environment, to the last digit.  A cell that is
not in the file has other inputs: nothing is expected of it, so it cannot differ.  A cell whose run
came to its end and is invalid, and is so for everybody, stands there with the reasons.
Limit: what is accepted is what one machine saw; that a second one sees the same is the point.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import schemas
from analysis.collect import CollectedRun
from analysis.tables import label
from toolchain.paths import REPO

EXPECTED = REPO / "artifact" / "expected" / "runs.json"
_SCHEMA = "expected-runs"
_PLATFORM = "virtual"


@dataclass(frozen=True)
class Compared:
    """The cells compared: how many are equal, which differ (a line each), how many are unknown."""

    equal: int
    differing: tuple[str, ...]
    unknown: int

    @property
    def sentence(self) -> str:
        """The outcome in one line."""
        known = self.equal + len(self.differing)
        words = [f"{self.equal} of {known} equal, bit for bit"] if known else []
        if self.unknown:
            words.append(f"{self.unknown} not in it (other inputs): nothing to compare with")
        return f"cells of artifact/expected/{EXPECTED.name}: {'; '.join(words)}"


def compare(runs: Iterable[CollectedRun]) -> Compared:
    """Hold each valid run of the virtual board against the file; raises InvalidData (the file)."""
    cells = schemas.read(EXPECTED, _SCHEMA)["cells"]
    equal, unknown, differing = 0, 0, []
    for run in _judged(runs):
        expected = cells.get(run.cell_hash)
        if not run.row["valid"] and "invalid_reasons" not in (expected or {}):
            continue  # that it is invalid says it all
        if expected is None:
            unknown += 1
        elif expected["record_sha256"] == run.fingerprint:
            equal += 1
        else:
            differing.append(f"{_what(run)}: {_difference(expected['figures'], _figures(run))}")
    return Compared(equal, tuple(differing), unknown)


def remember(runs: Iterable[CollectedRun]) -> Sequence[str]:
    """Make these runs the expected ones; returns a line for each.  Raises InvalidData (the file).

    Other cells stay, so that an experiment can be accepted in parts and on several machines; what
    goes is a cell that these describe alike but with other inputs (an edited scheduler, say).
    """
    judged = [run for run in _judged(runs) if run.experiments]
    known = schemas.read(EXPECTED, _SCHEMA)["cells"]
    described = {(name, _words(run)) for run in judged for name in run.experiments}
    cells = {key: cell for key, cell in known.items() if described.isdisjoint(_names(cell))}
    for run in judged:
        before = _names(known[run.cell_hash]) if run.cell_hash in known else []
        cells[run.cell_hash] = {
            "what": _what(run, [name for name, _ in before]),
            "record_sha256": run.fingerprint,
            "figures": _figures(run),
            **({} if run.row["valid"] else {"invalid_reasons": run.record["invalid_reasons"]}),
        }
    schemas.write(EXPECTED, {"schema_version": "1", "cells": cells}, _SCHEMA)
    return [
        f"{_what(run)}: {run.fingerprint}"
        + ("" if run.row["valid"] else f" INVALID: {run.row['invalid_reasons']}")
        for run in judged
    ]


def invalid_for_everybody(cell_hash: str, fingerprint: str) -> bool:
    """Whether the cell's run is expected to be invalid, and to be exactly this one."""
    cell = schemas.read(EXPECTED, _SCHEMA)["cells"].get(cell_hash, {})
    return "invalid_reasons" in cell and bool(cell["record_sha256"] == fingerprint)


def _judged(runs: Iterable[CollectedRun]) -> list[CollectedRun]:
    """Of each cell of the virtual board the first valid run, else the first that came to an end."""
    first: dict[str, CollectedRun] = {}
    for run in sorted(runs, key=lambda run: not run.row["valid"]):
        at_its_end = run.record["platform"] is not None and run.row["requests_ok"] is not None
        if run.row["platform"] == _PLATFORM and (run.row["valid"] or at_its_end):
            first.setdefault(run.cell_hash, run)
    return list(first.values())


def _what(run: CollectedRun, also: Iterable[str] = ()) -> str:
    """The cell in words, after the experiments it belongs to: those of the run and `also`."""
    return f"{';'.join(sorted({*run.experiments, *also}))} {_words(run)}".lstrip()


def _names(cell: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each experiment of a cell of the file, with the cell's words."""
    experiments, _, words = cell["what"].partition(" ")
    return [(name, words) for name in experiments.split(";")]


def _words(run: CollectedRun) -> str:
    row = run.row
    words = [row["model"], label(row)]
    words += [row["scope"]] if row["scope"] else []
    words += [f"c={row['concurrency']}", f"seed={row['seed']}"]
    words += [f"bystanders={row['bystanders']}"] if row["bystanders"] else []
    words += [f"VLEN={row['vlen_bits']}"] if row["vlen_bits"] is not None else []
    return " ".join(words)


def _figures(run: CollectedRun) -> dict[str, Any]:
    """What a person looks at first when two runs differ."""
    names = schemas.schema(_SCHEMA)["$defs"]["figures"]["required"]
    return {name: run.row[name] for name in names}


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    words = [
        f"{name} {found[name]!r}, expected {expected[name]!r}"
        for name in expected
        if found[name] != expected[name]
    ]
    return "DIFFERS: " + ("; ".join(words) or "in its record, not in the figures of the table")

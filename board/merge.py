"""`./inv merge`: the runs of several results folders in one, as after `reproduce --shard`.

Promise: all folders are read and their records checked before anything is written; a run is copied
with all its raw files; one that is there already is left as it is if it says the same, and if it
does not, nothing is merged: two machines disagree about a deterministic cell, and that is a result.
Limit: copies; the folders that are read stay as they are.  Raw files beside a record are copied as
they are found.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.collect import Index, read_index
from board.results import Results, disk_trouble
from schemas.record import RUNS, comparable, read_records
from toolchain.errors import Differs, InvalidData, UsageError
from toolchain.say import say

_VIRTUAL = "virtual"


@dataclass(frozen=True)
class _Source:
    """A results folder, read: its index, and its records by run id."""

    folder: Path
    index: Index
    records: Mapping[str, Mapping[str, Any]]


def merge(sources: Sequence[Path], into: Path) -> None:
    """Copy the runs of `sources` to the results folder `into`, made if need be.

    Raises UsageError (a source that is none, or is `into`), InvalidData (a bad record), Differs
    (the same run, told otherwise), all before anything is copied, and EnvironmentUnfit.
    """
    if not sources:
        raise UsageError("merge: got no folder, expected results folders: ./inv merge one two")
    for source in sources:
        if source.resolve() == into.resolve():
            raise UsageError(f"{source}: is the folder to merge into; name another with --results")
    read = [_read(source) for source in sources]
    there: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    for one in read:
        _agree(one, there)
        there = _placed(one.folder, one.records) | there
    try:
        results = Results(into)
    except InvalidData as error:
        raise InvalidData(
            f"{error}; nothing was merged: name a new folder with --results"
        ) from error
    known = _placed(into, results.records)
    for one in read:
        _agree(one, known)
    with results.reproducing():
        for one in read:
            new = one.records.keys() - known.keys()
            for run_id in sorted(new):
                with disk_trouble(into):
                    _copy(one.folder / RUNS / run_id, into, run_id)
            known = _placed(one.folder, one.records) | known
            _remember(results, one.index)
            old = len(one.records) - len(new)
            say(f"merge: {one.folder}: {len(new)} runs copied, {old} there before")
    print(into)


def _read(source: Path) -> _Source:
    try:
        index = read_index(source)
        return _Source(source, index, {record["run_id"]: record for record in read_records(source)})
    except InvalidData as error:
        raise InvalidData(
            f"{error}; nothing was merged: fetch {source} anew, or leave it out, then run the same "
            "command again"
        ) from error


def _placed(
    folder: Path, records: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Path, Mapping[str, Any]]]:
    return {run_id: (folder / RUNS / run_id, record) for run_id, record in records.items()}


def _agree(one: _Source, there: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> None:
    for run_id in sorted(one.records.keys() & there.keys()):
        (place, mine), theirs = there[run_id], one.records[run_id]
        if comparable(mine) == comparable(theirs):
            continue
        if mine["cell"]["board"] == _VIRTUAL and mine["valid"] and theirs["valid"]:
            raise Differs(
                f"{one.folder / RUNS / run_id}: the same deterministic cell with other results "
                f"than {place}; nothing was merged: compare the two record.json"
            )
        raise InvalidData(
            f"{one.folder / RUNS / run_id}: another run than {place}, which has the same name; "
            "nothing was merged: merge into a new folder, without one of the two"
        )


def _copy(run: Path, into: Path, run_id: str) -> None:
    """Under another name first: a folder below runs/ is whole or not there."""
    partial = into / f".{run_id}.new"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(run, partial)
    partial.rename(into / RUNS / run_id)


def _remember(results: Results, index: Index) -> None:
    """Each experiment's cells are those of all folders together."""
    mine = read_index(results.root)
    for experiment, boards in index.items():
        for board, hashes in boards.items():
            before = mine.get(experiment, {}).get(board, [])
            results.remember(experiment, board, [*before, *hashes])


def shard_of(text: str) -> tuple[int, int]:
    """`k/n` as (k, n), 1 <= k <= n; raises UsageError."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise UsageError(f"--shard {text}: expected K/N with 1 <= K <= N, such as 1/2")
    return int(k), int(n)

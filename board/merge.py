"""`./inv merge`: the runs of several results folders in one, as after `reproduce --shard`.

Promise: a run is copied with all its raw files once its record was checked; one that is there
already is left as it is if it says the same, and if it does not, the merge stops before anything of
that folder is copied: two machines disagree about a deterministic cell, and that is a result.
Limit: copies; the folders that are read stay as they are.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.collect import INDEX, read_index
from board.results import Results, disk_trouble
from schemas.record import RUNS, comparable, read_records
from toolchain.errors import Differs, InvalidData, UsageError
from toolchain.say import say

_VIRTUAL = "virtual"


def merge(sources: Sequence[Path], into: Path) -> None:
    """Copy the runs of `sources` to the results folder `into`, made if need be.

    Raises UsageError (a source that is none, or is `into`), InvalidData (a bad record), Differs
    (the same run, told otherwise) and EnvironmentUnfit.
    """
    if not sources:
        raise UsageError("merge: got no folder, expected results folders: ./inv merge one two")
    for source in sources:
        if not (source / INDEX).is_file():
            raise UsageError(f"{source}: not a results folder (no {INDEX} in it)")
        if source.resolve() == into.resolve():
            raise UsageError(f"{source}: is the folder to merge into; name another with --results")
    results = Results(into)
    known = dict(results.records)
    with results.reproducing():
        for source in sources:
            records = {record["run_id"]: record for record in read_records(source)}
            _agree(source, records, known)
            new = records.keys() - known.keys()
            for run_id in sorted(new):
                with disk_trouble(into):
                    _copy(source / RUNS / run_id, into, run_id)
            known |= {run_id: records[run_id] for run_id in new}
            _remember(results, source)
            say(f"merge: {source}: {len(new)} runs copied, {len(records) - len(new)} there before")
    print(into)


def _agree(source: Path, records: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for run_id in sorted(records.keys() & known.keys()):
        mine, theirs = known[run_id], records[run_id]
        if comparable(mine) == comparable(theirs):
            continue
        if mine["cell"]["board"] == _VIRTUAL and mine["valid"] and theirs["valid"]:
            raise Differs(
                f"{source / RUNS / run_id}: the same deterministic cell with other results than "
                "the run that is there already: compare the two record.json"
            )
        raise InvalidData(
            f"{source / RUNS / run_id}: another run with the same name is there already: "
            "merge into a new folder"
        )


def _copy(run: Path, into: Path, run_id: str) -> None:
    """Under another name first: a folder below runs/ is whole or not there."""
    partial = into / f".{run_id}.new"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(run, partial)
    partial.rename(into / RUNS / run_id)


def _remember(results: Results, source: Path) -> None:
    """Each experiment's cells are those of all folders together."""
    mine = read_index(results.root)
    for experiment, boards in read_index(source).items():
        for board, hashes in boards.items():
            before = mine.get(experiment, {}).get(board, [])
            results.remember(experiment, board, [*before, *hashes])


def shard_of(text: str) -> tuple[int, int]:
    """`k/n` as (k, n), 1 <= k <= n; raises UsageError."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise UsageError(f"--shard {text}: expected K/N with 1 <= K <= N, such as 1/2")
    return int(k), int(n)

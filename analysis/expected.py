"""artifact/expected/verdicts.json: what everybody is to get on the virtual board.

Promise: verdicts are looked up by the hash of all they are a function of, the claims and the cells
that were run (a cell's hash covers kernel, server, model, machine and load); for inputs that are
not in the file nothing is expected, so nothing can differ.
Limit: a real board's verdicts are never expected: no two boards give the same numbers.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import schemas
from analysis.claims import Claims
from analysis.collect import CollectedRun
from analysis.verdicts import Verdict
from toolchain.paths import REPO

EXPECTED = REPO / "artifact" / "expected" / "verdicts.json"
_GROUP = "V"


def inputs_hash(claims: Claims, runs: Iterable[CollectedRun]) -> str:
    """SHA-256 over the claims' hash and the cells, of experiments that claims name, run validly."""
    experiments = {claim.experiment for claim in claims.claims if claim.group == _GROUP}
    cells = {
        run.cell_hash
        for run in runs
        if run.row["valid"]
        and run.row["platform"] == "virtual"
        and experiments.intersection(run.experiments)
    }
    return hashlib.sha256(schemas.canonical([claims.sha256, sorted(cells)])).hexdigest()


def compare(inputs: str, verdicts: Sequence[Verdict], path: Path = EXPECTED) -> dict[str, Any]:
    """`expected.V` of verdicts.schema.json; raises InvalidData when the file is damaged."""
    expected = schemas.read(path, "expected-verdicts")["by_inputs"].get(inputs)
    if expected is None:
        return {"inputs": inputs, "state": "not-applicable", "differing": []}
    found = _words(verdicts)
    differing = [
        {"id": name, "found": found.get(name, "absent"), "expected": expected.get(name, "absent")}
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]
    state = "differs" if differing else "as-expected"
    return {"inputs": inputs, "state": state, "differing": differing}


def remember(inputs: str, verdicts: Sequence[Verdict], path: Path = EXPECTED) -> None:
    """Make these verdicts the expected ones of these inputs; those of other claims are dropped."""
    by_inputs: dict[str, Mapping[str, str]] = {}
    if path.exists():
        known = schemas.read(path, "expected-verdicts")["by_inputs"]
        names = set(_words(verdicts))
        by_inputs = {key: words for key, words in known.items() if set(words) == names}
    by_inputs[inputs] = _words(verdicts)
    document = {"schema_version": "1", "by_inputs": by_inputs}
    schemas.write(path, document, "expected-verdicts")


def _words(verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {v.claim.row_id: v.word for v in verdicts if v.claim.group == _GROUP}

"""The verb ./inv analyze: results folders in, verdicts, tables, figures and one page out.

Promise: everything in the output folder is a function of the runs, the claims and the published
numbers: the same results give the same bytes, wherever they lie and whenever it is done.  Files are
replaced one by one, the page last.
Limit: files of an earlier analysis that this one does not make are removed only if their names are
of its making (tables/ and figures/).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import schemas
from analysis import published, x86
from analysis.accounting import accounting_table
from analysis.admit import Admitted, admit
from analysis.audit import result as audit_room
from analysis.claims import read_claims
from analysis.expected import EXPECTED, compare, inputs_hash, remember
from analysis.figures import figures
from analysis.goals import goals_table, read_goals
from analysis.page import Analysis, page
from analysis.screen import show
from analysis.split import split_table
from analysis.stats import Refused, anova
from analysis.tables import INFERENCE, VSTATE, Table, anova_table, groups, tables
from analysis.verdicts import Verdict, decide
from toolchain.errors import Differs, EnvironmentUnfit
from toolchain.paths import REPO
from toolchain.say import say

DEFAULT_RESULTS = Path("results")
_EXPERIMENTS = REPO / "artifact" / "experiments.toml"


def analyze(
    folders: Sequence[Path],
    *,
    report: Path,
    json_file: Path | None = None,
    skip_invalid: bool = False,
    any_commit: bool = False,
    accept: bool = False,
    audit: bool = True,
) -> None:
    """Analyse the folders (none: results/ if it is there), write the report, print the verdicts.

    accept: make the virtual board's verdicts the expected ones.  audit: print group A, too.
    Raises Differs when a verdict is not the expected one, after all is written; UsageError,
    EnvironmentUnfit and InvalidData before.
    """
    if json_file is not None:
        schemas.require_file_name(json_file)
    if not folders and DEFAULT_RESULTS.is_dir():
        folders = [DEFAULT_RESULTS]
    analysis = analysed(folders, skip_invalid=skip_invalid, any_commit=any_commit)
    if accept:
        remember(analysis.document["expected"]["V"]["inputs"], analysis.verdicts)
        analysis = analysed(folders, skip_invalid=skip_invalid, any_commit=any_commit)
    write(analysis, report)
    if json_file is not None:
        schemas.write(json_file, analysis.document, "verdicts")
    show(analysis.document, audit=audit)
    say(f"the report: {report / 'index.html'}")
    differing = _differing(analysis.document)
    if differing:
        raise Differs(
            f"{len(differing)} verdicts are not the expected ones: {'; '.join(differing[:5])}: "
            f"see {report / 'index.html'}; expected: {EXPECTED.parent.relative_to(REPO)}"
        )


def analysed(
    folders: Sequence[Path], *, skip_invalid: bool = False, any_commit: bool = False
) -> Analysis:
    """Everything that is to be shown; writes nothing.  Raises UsageError and InvalidData."""
    claims = read_claims()
    printed = published.read()
    admitted = admit(folders, skip_invalid=skip_invalid, any_commit=any_commit)
    experiments = schemas.read_toml(_EXPERIMENTS, "experiments")["experiments"]
    verdicts = decide(claims, admitted.runs, experiments, common_seeds=skip_invalid)
    audited = audit_room.audit(printed, audit_room.read_expected())
    cells = {**printed.tables["inference"].cells, **printed.tables["vstate"].cells}
    changes = {
        (metric, row["concurrency"]): value
        for row in printed.improvements["rows"]
        for metric, value in row["change_percent"].items()
    }
    split = [table for group in groups(admitted.runs) if (table := split_table(group))]
    aims = read_goals()
    reached = [table for group in groups(admitted.runs) if (table := goals_table(group, aims))]
    went = [table for group in groups(admitted.runs) if (table := accounting_table(group))]
    made = [*tables(admitted.runs, cells, changes), *reached, *went, *split, *_anovas(admitted)]
    measured = x86.read_measured(folders)
    made += x86.tables(admitted.runs, measured, printed)
    drawn = [*figures(admitted.runs), *x86.figures(admitted.runs, measured, printed)]
    inputs = inputs_hash(claims, admitted.runs)
    document = {
        "schema_version": "1",
        "claims_sha256": claims.sha256,
        "runs": {
            "valid": sum(run.row["valid"] for run in admitted.runs),
            "invalid": sum(not run.row["valid"] for run in admitted.runs),
            "refused": len({run for refusal in admitted.refused for run in refusal.runs}),
        },
        "refused": [
            {"name": one.name, "line": one.line, "runs": list(one.runs)} for one in admitted.refused
        ],
        "notes": list(admitted.notes),
        "audit": audited["findings"],
        "claims": [_row(verdict) for verdict in verdicts],
        "expected": {"A": audited["unexpected"], "V": compare(inputs, verdicts)},
    }
    schemas.check(document, "verdicts")
    return Analysis(
        admitted,
        claims,
        tuple(verdicts),
        tuple(made),
        tuple(drawn),
        audited,
        document,
        x86.sentences(admitted.runs, measured, printed),
    )


def _anovas(admitted: Admitted) -> list[Table]:
    """The committee's table of each group, for the metrics whose cells allow one."""
    made = []
    for group in groups(admitted.runs):
        found = {}
        for column in (*INFERENCE, *VSTATE):
            cells = group.cells(column.metric)
            try:
                found[column.title] = anova(
                    {(policy, c): one for (c, policy), one in cells.items()}
                )
            except Refused:
                continue  # a hole in the table, one run per cell: the cells' table shows it
        if found:
            made.append(anova_table(group, found))
    return made


def _row(verdict: Verdict) -> dict[str, Any]:
    claim = verdict.claim
    points = []
    for result in verdict.results:
        point = asdict(result)
        del point["missing"]
        points.append(point)
    return {
        "id": claim.row_id,
        "claim": claim.id,
        "group": claim.group,
        "platform": claim.platform,
        "statement": claim.statement,
        "section": list(claim.section),
        "metric": claim.metric,
        "relation": claim.wanted,
        "tolerance": claim.tolerance,
        "minimum_n": claim.minimum_n,
        "family": claim.family,
        "experiment": claim.experiment,
        "command": claim.command,
        "minutes": claim.minutes,
        "disk_mib": claim.disk_mib,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "n": verdict.n,
        "estimate": verdict.estimate,
        "low": verdict.low,
        "high": verdict.high,
        "p_for": verdict.p_for,
        "p_against": verdict.p_against,
        "permutation_p": verdict.permutation_p,
        "points": points,
        "runs": list(verdict.runs),
    }


# ------------------------------------------------------------------------------- what is written


def write(analysis: Analysis, report: Path) -> None:
    """Write verdicts.json, tables/, figures/ and index.html; raises EnvironmentUnfit."""
    texts = {"verdicts.json": json.dumps(analysis.document, indent=1, sort_keys=True) + "\n"}
    for table in analysis.tables:
        texts[f"tables/{table.name}.md"] = table.markdown()
        texts[f"tables/{table.name}.csv"] = table.csv()
    for figure in analysis.figures:
        if figure.svg is not None:
            texts[f"figures/{figure.name}.svg"] = figure.svg
    texts["index.html"] = page(analysis)
    try:
        for folder in ("tables", "figures"):
            (report / folder).mkdir(parents=True, exist_ok=True)
            for old in (report / folder).iterdir():
                if old.suffix in (".md", ".csv", ".svg") and f"{folder}/{old.name}" not in texts:
                    old.unlink()
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {error.filename or report}: {error.strerror}: pass --report DIR"
        ) from error
    for name, text in texts.items():
        schemas.replace_text(report / name, text)


def _differing(document: Mapping[str, Any]) -> list[str]:
    expected = document["expected"]
    return [
        f"{one['id']} is {one['found']}, expected {one['expected']}"
        for one in (*expected["A"], *expected["V"]["differing"])
    ]

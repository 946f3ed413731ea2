"""The whole audit as one document, and what differs from the expected verdicts.

Promise: the document passes schemas/audit.schema.json; equal tables give equal bytes.
Limit: `inputs` says which tables were audited; expected verdicts belong to the tables they name.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import schemas
from analysis.audit import anova, arithmetic, artefacts, cost, statements, trends
from analysis.audit.finding import Finding, Verdict
from analysis.published import BASELINE, CONCURRENCIES, COOPERATIVE, Published
from toolchain.errors import InvalidData
from toolchain.paths import REPO

EXPECTED = REPO / "artifact" / "expected" / "audit.json"


def findings_of(published: Published, tables: anova.Tables) -> list[Finding]:
    """Every finding, statements last; ids are unique."""
    found = list(
        chain(
            arithmetic.rules(published),
            cost.rules(published),
            trends.rules(published),
            artefacts.rules(published),
            anova.rules(published, tables),
            statements.parameters(published),
        )
    )
    return [*found, *statements.statements(published, found)]


def audit(published: Published, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document; without expected verdicts nothing is unexpected.

    Raises InvalidData when the numbers pass their schemas and still allow no statistics (an sd so
    large that a run would be negative, for example).
    """
    try:
        tables = anova.anova_tables(published)
        findings = findings_of(published, tables)
        contrasts = trends.contrast_table(published)
    except ValueError as error:
        raise InvalidData(f"the tables allow no statistics: {error}") from error
    verdicts = {finding.id: finding.verdict for finding in findings}
    document = {
        "schema_version": "1",
        "inputs": dict(published.inputs),
        "level": published.rules["level"],
        "summary": {word: list(verdicts.values()).count(word) for word in Verdict},
        "findings": [_finding(finding) for finding in findings],
        "derived": [
            _derived(published, policy, c)
            for c in CONCURRENCIES
            for policy in (BASELINE, COOPERATIVE)
        ],
        "contrasts": contrasts,
        "anova": anova.rows(tables),
        "parameters": statements.parameter_table(published),
        "unexpected": [] if expected is None else _unexpected(verdicts, expected["verdicts"]),
    }
    schemas.check(document, "audit")
    return document


def read_expected(path: Path = EXPECTED) -> dict[str, Any]:
    """The expected verdicts; raises InvalidData."""
    document: dict[str, Any] = schemas.read(path, "audit-expected")
    return document


def as_expected(document: Mapping[str, Any]) -> dict[str, Any]:
    """The verdicts of a result as the document of expected verdicts."""
    return {
        "schema_version": "1",
        "inputs": document["inputs"],
        "verdicts": {finding["id"]: finding["verdict"] for finding in document["findings"]},
    }


def _unexpected(found: Mapping[str, str], expected: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {
            "id": name,
            "expected": expected.get(name, "absent"),
            "found": str(found.get(name, "absent")),
        }
        for name in dict.fromkeys([*found, *expected])
        if found.get(name) != expected.get(name)
    ]


def _finding(finding: Finding) -> dict[str, Any]:
    sections: Sequence[str] = finding.sections
    return {
        "id": finding.id,
        "rule": finding.rule,
        "sections": list(sections),
        "verdict": str(finding.verdict),
        "text": finding.text,
        "by": finding.by,
        "numbers": dict(finding.numbers),
    }


def _derived(published: Published, policy: str, c: int) -> dict[str, Any]:
    """What follows from one cell: means of means, so ratios of averages, not averages of ratios."""
    inference, vstate = published.tables["inference"], published.tables["vstate"]

    def mean(metric: str) -> float:
        table = inference if metric in inference.columns else vstate
        return float(table.cell(metric, policy, c).mean)

    requests = arithmetic.stated_integer(published, "requests")
    limit = arithmetic.stated_integer(published, "output-limit")
    cpus = published.rules["tolerances"]["board_cpus"]
    window_s = mean("save_count") / mean("saves_per_s")
    latency_ms, ttft_ms = mean("mean_latency_ms"), mean("mean_ttft_ms")
    vlen_bits = arithmetic.stated_integer(published, "vlen")
    save_bytes = published.arithmetic["vector_registers"] * vlen_bits // 8
    return {
        "policy": policy,
        "concurrency": c,
        "tokens_per_request": mean("output_tps") * latency_ms / 1000 / c,
        "load_s": requests * latency_ms / 1000 / c,
        "window_s": window_s,
        "save_ns": arithmetic.save_ns(published, policy, c),
        "saves_per_request": mean("save_count") / requests,
        "saves_per_token": mean("save_count") / requests / limit,
        "switches_per_request": mean("context_switches") / requests,
        "switches_per_token": mean("context_switches") / requests / limit,
        "non_saving_switches": mean("context_switches") - mean("save_count"),
        "saved_kib_per_request": mean("save_count") * save_bytes / 1024 / requests,
        "capacity_ppm": 1e6 * mean("save_total_ms") / 1000 / window_s / cpus,
        "decode_step_ms": (latency_ms - ttft_ms) / (limit - 1),
        "ttft_share_of_latency": ttft_ms / latency_ms,
    }

"""The report's printed numbers, read from artifact/published.

Promise: what is returned is complete (every cell of every table, every column), in the units that
the schemas fix, and exact: a printed number is a fraction with its digits after the point, so its
rounding interval is known.  A file that is truncated, misspelt, in another unit, incomplete,
doubled, or more precise than it says is refused with one line (InvalidData).
Limit: whether the files hold what the report prints is for tests/test_published.py, which holds a
second transcription.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import schemas
from analysis.contrasts import LogSummary, Summary, log_of_summary
from toolchain.errors import InvalidData
from toolchain.paths import REPO

PUBLISHED = REPO / "artifact" / "published"
CONCURRENCIES = (2, 4, 8)
BASELINE, COOPERATIVE = "baseline", "cooperative"
_POLICIES = {
    "inference": (BASELINE, COOPERATIVE),
    "vstate": (BASELINE, COOPERATIVE),
    "x86": (BASELINE,),
}
_COLUMNS = {
    "inference": {"output_tps", "mean_ttft_ms", "p95_ttft_ms", "mean_latency_ms"},
    "vstate": {"save_count", "save_total_ms", "saves_per_s", "context_switches"},
    "x86": {
        "output_tps",
        "mean_ttft_ms",
        "p95_ttft_ms",
        "context_switches",
        "involuntary_switches",
        "switches_per_request",
        "xstate_per_request_kib",
    },
}
_FILES = {
    **dict.fromkeys(_POLICIES, "published-table"),
    "improvements": "published-improvements",
    "arithmetic": "published-arithmetic",
    "conditions": "published-conditions",
    "statements": "published-statements",
    "rules": "published-rules",
}


@dataclass(frozen=True)
class Printed:
    """A number as printed: its exact value and the digits after the point."""

    value: Fraction
    decimals: int

    @property
    def half(self) -> Fraction:
        """Half a unit of the last printed digit: the number rounded lies this near."""
        return Fraction(1, 2 * 10**self.decimals)

    @property
    def text(self) -> str:
        """The digits as printed, without separators of thousands."""
        return f"{float(self.value):.{self.decimals}f}"

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Cell:
    """Mean and sample sd of one metric in one cell, in the column's unit."""

    mean: Printed
    sd: Printed
    n: int

    @property
    def summary(self) -> Summary:
        return Summary(float(self.mean), float(self.sd), self.n)

    @cached_property
    def log(self) -> LogSummary:
        return log_of_summary(self.summary)


@dataclass(frozen=True)
class Column:
    """Unit, direction and digits of one metric of one table."""

    unit: str
    decimals: int
    higher_is_better: bool


@dataclass(frozen=True)
class Table:
    """One printed table; `cells` is keyed by (metric, policy, concurrency)."""

    id: str
    section: str
    runs_per_cell: int
    columns: Mapping[str, Column]
    cells: Mapping[tuple[str, str, int], Cell]

    def cell(self, metric: str, policy: str, concurrency: int) -> Cell:
        return self.cells[metric, policy, concurrency]


@dataclass(frozen=True)
class Published:
    """All of artifact/published.  The last five are the documents as their schemas describe them.

    `inputs` is file name to SHA-256 of the content's canonical spelling (comments do not count).
    """

    tables: Mapping[str, Table]
    improvements: Mapping[str, Any]
    arithmetic: Mapping[str, Any]
    conditions: Mapping[str, Any]
    statements: Mapping[str, Any]
    rules: Mapping[str, Any]
    inputs: Mapping[str, str]

    def board(self, metric: str) -> Table:
        """The board's table that has `metric`; raises KeyError when neither has."""
        for name in ("inference", "vstate"):
            if metric in self.tables[name].columns:
                return self.tables[name]
        raise KeyError(metric)


def read(directory: Path = PUBLISHED) -> Published:
    """Read and check every file of `directory`; raises InvalidData with one line."""
    paths = {name: directory / f"{name}.toml" for name in _FILES}
    documents = {name: schemas.read_toml(path, _FILES[name]) for name, path in paths.items()}
    tables = {name: _table(name, documents[name], paths[name]) for name in _POLICIES}
    _check_improvements(documents["improvements"], paths["improvements"])
    _check_arithmetic(documents["arithmetic"], paths["arithmetic"])
    parameters = (item["id"] for item in documents["conditions"]["parameters"])
    _unique(parameters, "the parameter", paths["conditions"])
    for item in documents["conditions"]["parameters"]:
        sections = (stated["section"] for stated in item["stated"])
        _unique(sections, f"of {item['id']} the section", paths["conditions"])
    statements = (item["id"] for item in documents["statements"]["statements"])
    _unique(statements, "the statement", paths["statements"])
    _check_rules(documents["rules"], tables, paths["rules"])
    return Published(
        tables=tables,
        improvements=documents["improvements"],
        arithmetic=documents["arithmetic"],
        conditions=documents["conditions"],
        statements=documents["statements"],
        rules=documents["rules"],
        inputs={
            paths[name].name: hashlib.sha256(schemas.canonical(document)).hexdigest()
            for name, document in documents.items()
        },
    )


def printed(value: float, decimals: int, where: str) -> Printed:
    """The number with that many digits after the point; InvalidData when it has more."""
    text = f"{value:.{decimals}f}"
    if float(text) != value:
        raise InvalidData(f"{where}: found {value}, expected at most {decimals} decimals")
    return Printed(Fraction(text), decimals)


def _table(name: str, document: Mapping[str, Any], path: Path) -> Table:
    if document["id"] != name:
        raise InvalidData(f"{path}: id is {document['id']!r}, expected {name!r} as the file's name")
    _same(set(document["columns"]), _COLUMNS[name], "column", f"{path}: at $.columns")
    columns = {
        metric: Column(
            unit=column["unit"],
            decimals=column["decimals"],
            higher_is_better=column["better"] == "higher",
        )
        for metric, column in document["columns"].items()
    }
    rows = [(row["policy"], row["concurrency"]) for row in document["rows"]]
    _unique((f"{policy} at c = {c}" for policy, c in rows), "the row", path)
    wanted = {(policy, c) for policy in _POLICIES[name] for c in CONCURRENCIES}
    _same(set(rows), wanted, "row", f"{path}: at $.rows")
    cells = {}
    for index, row in enumerate(document["rows"]):
        metrics = set(row) - {"policy", "concurrency"}
        _same(metrics, set(columns), "column", f"{path}: at $.rows[{index}]")
        for metric in metrics:
            where = f"{path}: at $.rows[{index}].{metric}"
            decimals = columns[metric].decimals
            cells[metric, row["policy"], row["concurrency"]] = Cell(
                mean=printed(row[metric]["mean"], decimals, f"{where}.mean"),
                sd=printed(row[metric]["sd"], decimals, f"{where}.sd"),
                n=document["runs_per_cell"],
            )
    return Table(name, document["section"], document["runs_per_cell"], columns, cells)


def _check_improvements(document: Mapping[str, Any], path: Path) -> None:
    rows = [row["concurrency"] for row in document["rows"]]
    _unique((f"c = {c}" for c in rows), "the row", path)
    _same(set(rows), set(CONCURRENCIES), "row", f"{path}: at $.rows")
    for index, row in enumerate(document["rows"]):
        for metric, value in row["change_percent"].items():
            where = f"{path}: at $.rows[{index}].change_percent.{metric}"
            printed(value, document["decimals"], where)
    for index, item in enumerate(document["quoted"]):
        where = f"{path}: at $.quoted[{index}].change_percent"
        printed(item["change_percent"], item["decimals"], where)


def _check_arithmetic(document: Mapping[str, Any], path: Path) -> None:
    lengths = [item["vlen_bits"] for item in document["save_bytes"]]
    _unique((f"vlen_bits = {bits}" for bits in lengths), "the entry", path)
    for index, item in enumerate(document["state_ratios"]):
        if item["vlen_bits"] not in lengths:
            raise InvalidData(
                f"{path}: at $.state_ratios[{index}]: no save_bytes entry has vlen_bits = "
                f"{item['vlen_bits']}"
            )
        printed(item["ratio"], item["decimals"], f"{path}: at $.state_ratios[{index}].ratio")
    growth = document["x86_growth"]
    printed(growth["ratio"], growth["decimals"], f"{path}: at $.x86_growth.ratio")
    for index, item in enumerate(document["x86_quoted"]):
        where = f"{path}: at $.x86_quoted[{index}]"
        printed(item["value"], item["decimals"], f"{where}.value")
        if item["metric"] not in _COLUMNS["x86"]:
            raise InvalidData(f"{where}.metric: the x86 table has no column {item['metric']}")


def _check_rules(document: Mapping[str, Any], tables: Mapping[str, Table], path: Path) -> None:
    board = _COLUMNS["inference"] | _COLUMNS["vstate"]
    for family in ("every_concurrency", "gain_grows", "stability"):
        for metric in document[family]["metrics"]:
            if metric not in board:
                raise InvalidData(
                    f"{path}: at $.{family}.metrics: the board's tables have no {metric}"
                )
    _unique((item["id"] for item in document["rises"]), "the trend", path)
    for index, item in enumerate(document["rises"]):
        if item["metric"] not in tables[item["table"]].columns:
            raise InvalidData(
                f"{path}: at $.rises[{index}]: table {item['table']} has no {item['metric']}"
            )


def _unique(names: Iterable[str], what: str, path: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidData(f"{path}: {what} {twice[0]} stands twice")


def _same(found: set[Any], expected: set[Any], what: str, where: str) -> None:
    def show(items: set[Any]) -> str:
        return ", ".join(
            item if isinstance(item, str) else str(item) for item in sorted(items, key=str)
        )

    if missing := expected - found:
        raise InvalidData(f"{where}: missing {what} {show(missing)}")
    if extra := found - expected:
        raise InvalidData(f"{where}: unknown {what} {show(extra)}, expected {show(expected)}")

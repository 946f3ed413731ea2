"""docs/fields.md: every field of the result files, its unit and its meaning, out of the schemas.

Promise: what the schemas say, followed through their references; each field has a row, and one
without a description is refused by name.  Nothing is typed a second time, and a test finds the page
that was not made anew.  The report's own names stand beside ours.
Limit: a unit is what the field's name ends in; constraints are for the schemas.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import schemas
from artifact.appendix import table
from toolchain.errors import InvalidData
from toolchain.paths import REPO
from toolchain.tomlfile import read_toml

PAGE = REPO / "docs" / "fields.md"
NAMES = REPO / "artifact" / "report-names.toml"
SUMMARY = "summary-row"
DOCUMENTS = (
    "record", "cell", "environment", "calibration", "loadgen", "observer", "profiler", "truth",
    "switches", "scheduler", "agent", "results", "verdicts",
)  # fmt: skip
"""In the order of the page; what one has of another is explained there and referred to."""
_UNITS = {
    "ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds", "s": "seconds",
    "bytes": "bytes", "kib": "KiB", "mib": "MiB", "bits": "bits", "ppm": "parts per million",
    "tps": "tokens per second", "rps": "requests per second", "instructions": "instructions",
    "hz": "hertz", "khz": "kilohertz", "c": "degrees Celsius",
}  # fmt: skip
_LONG = 12
"""Fields below one of a document's own from which on they get a table of their own."""
_HEAD = """\
# Fields of the result files

Made from `schemas/` by `./inv glossary`; do not edit. A run's folder has `record.json`, which holds
all of it, and beside it the files that its parts were read from: `loadgen.json` and `agent.json`,
and as far as the cell asks for them `observer.json`, `profiler.json`, `truth.json`, `switches.json`
and `scheduler.json`. `cell`, `environment` and `calibration` are in the record only. `results` is
`results/index.json`, `results/summary.csv` has one row per run, and `verdicts` is what
`./inv analyze --json` writes. Times of the virtual board are virtual.

`name[]` is an item of the list `name`; without a row of its own it is what the list's row says.
Where many fields have the same parts, these stand in a table of their own.
"""


def page() -> str:
    """The page; raises InvalidData for a field without a meaning, and for a name of the report
    that leads nowhere."""
    parts = [_HEAD, "## results/summary.csv\n", _summary()]
    for name in DOCUMENTS:
        parts += _Document(name).text()
    return "\n".join(parts)


def write() -> None:
    """Write the page; raises EnvironmentUnfit when it cannot be written."""
    schemas.replace_text(PAGE, page())
    print(PAGE)


def _summary() -> str:
    schema = schemas.schema(SUMMARY)
    report = {name["ours"]: name for name in read_toml(NAMES)["names"]}
    for ours in report:
        if ours not in schema["required"]:
            raise InvalidData(f"{NAMES}: {ours!r}: got no such column, expected one of {SUMMARY}")
    rows = []
    for column in schema["required"]:
        rules = _resolve(_Node(schema["properties"][column], schema)).rules
        if not (told := rules.get("description")):
            raise _unexplained(schema, SUMMARY, column)
        name = report.get(column, {})
        if differs := name.get("differs"):
            told += f" Differs from the report: {differs}."
        rows.append(
            [f"`{column}`", _unit(column, rules), told, f"`{name['report']}`" if name else ""]
        )
    return table(["column", "unit", "meaning", "in the report"], rows) + "\n"


@dataclass(frozen=True)
class _Node:
    """A schema within `root`; home: the document and pointer of the reference it was reached by."""

    rules: Mapping[str, Any]
    root: Mapping[str, Any]
    home: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Row:
    """A field of a table."""

    path: str
    unit: str
    told: str


@dataclass
class _Document:
    """One document of the page: its fields, and the definitions that several of them share."""

    name: str
    _parts: dict[str, list[_Row]] = field(default_factory=dict)

    def text(self) -> Iterator[str]:
        """Its section of the page."""
        schema = schemas.schema(self.name)
        yield f"## {self.name}\n\n{schema.get('description', schema['title'])}\n"
        own = list(self._fields(_Node(schema, schema), ""))
        below: dict[str, list[_Row]] = {}
        for row in own:
            top, inside, _ = row.path.replace("[]", "").partition(".")
            if inside:
                below.setdefault(top, []).append(row)
        long = {top: rows for top, rows in below.items() if len(rows) > _LONG}
        moved = {id(row) for rows in long.values() for row in rows}
        short = [row for row in own if id(row) not in moved]
        yield _rows(
            replace(row, told=f"{row.told} {self._see(row.path)}") if row.path in long else row
            for row in short
        )
        for title, rows in (*long.items(), *self._parts.items()):
            yield f"### {self.name}: {title}\n"
            yield _rows(rows)

    def _fields(self, node: _Node, path: str) -> Iterator[_Row]:
        """The fields below a schema, with their meanings."""
        written_in, node = node.root, _resolve(node)
        told = [str(node.rules.get("description", ""))]
        if path and not told[0] and not path.endswith(("[]", ".*")):
            raise _unexplained(written_in, self.name, path)
        below: list[_Row] = []
        for branch in _branches(node):
            fields = list(self._below(branch, path))
            if fields and (link := self._elsewhere(branch, path)):
                told.append(link)
            else:
                below += fields
        if path and any(told):
            yield _Row(path, _unit(path, node.rules), " ".join(filter(None, told)))
        yield from below

    def _below(self, node: _Node, path: str) -> Iterator[_Row]:
        rules = node.rules
        for name, child in rules.get("properties", {}).items():
            yield from self._fields(_Node(child, node.root), f"{path}.{name}" if path else name)
        for child in (
            *rules.get("patternProperties", {}).values(),
            rules.get("additionalProperties"),
        ):
            if isinstance(child, dict):
                yield from self._fields(_Node(child, node.root), f"{path}.*" if path else "*")
        if isinstance(items := rules.get("items"), dict):
            yield from self._fields(_Node(items, node.root), f"{path}[]")

    def _elsewhere(self, node: _Node, path: str) -> str:
        """Where the fields of a node are explained, unless it is here."""
        if node.home is None or not path:
            return ""
        document, pointer = node.home
        steps = pointer.split("/")[1:]
        if document != self.name:
            if document not in DOCUMENTS or set(steps[::2]) - {"properties"}:
                return ""
            inside = f"`{'.'.join(steps[1::2])}` of " if steps else ""
            return f"Fields: {inside}[{document}](#{document})."
        if len(steps) != 2 or json.dumps(node.root).count(f'"$ref": "#{pointer}"') < 2:
            return ""
        if steps[1] not in self._parts:
            bare = _Node(node.rules, node.root)
            self._parts[steps[1]] = list(self._below(bare, ""))
        return self._see(steps[1])

    def _see(self, part: str) -> str:
        return f"Fields: [{part}](#{self.name}-{part})."


def _rows(fields: Iterable[_Row]) -> str:
    rows = [[f"`{row.path}`", row.unit, row.told] for row in fields]
    return table(["field", "unit", "meaning"], rows) + "\n"


def _unexplained(schema: Mapping[str, Any], document: str, path: str) -> InvalidData:
    return InvalidData(
        f"schemas/{_name(schema)}.schema.json: the field {path} of {document} has no description, "
        "expected a sentence that says what it means: write it beside the field, or in what its "
        "$ref names, and run ./inv glossary"
    )


def _name(schema: Mapping[str, Any]) -> str:
    name: str = schema["$id"].split(":")[2]
    return name


def _branches(node: _Node) -> Iterator[_Node]:
    """A schema and the alternatives in it that may have fields."""
    yield node
    rules = node.rules
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in rules.get(key, ())]
    if "$ref" in rules.get("then", {}):  # else it only narrows what stands beside it
        inner.append(rules["then"])
    for one in inner:
        yield from _branches(_resolve(_Node(one, node.root, node.home)))


def _resolve(node: _Node) -> _Node:
    """Follow references; what stands beside a reference wins over what it refers to."""
    rules, root, home = node.rules, node.root, node.home
    while "$ref" in rules:
        urn, _, pointer = rules["$ref"].partition("#")
        if urn:
            root = schemas.schema(urn.split(":")[2])
        target: Any = root
        for step in filter(None, pointer.split("/")):
            target = target[step]
        home = (_name(root), pointer)
        rules = {**target, **{key: value for key, value in rules.items() if key != "$ref"}}
    return _Node(rules, root, home)


def _unit(path: str, rules: Mapping[str, Any]) -> str:
    if rules.get("type") == "boolean" or isinstance(rules.get("const"), bool):
        return ""
    name = path.rpartition(".")[2].removesuffix("[]")
    amount, per, what = name.partition("_per_")
    if per:
        unit = _UNITS.get(amount.rpartition("_")[2], "")
        return f"{unit} per {'second' if what == 's' else what}".strip()
    return _UNITS.get(name.rpartition("_")[2], "")

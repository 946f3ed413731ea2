"""docs/fields.md: every field of the result files, its unit and its meaning, out of the schemas.

Promise: what the schemas say, followed through their references; nothing is typed a second time,
and a test finds the page that was not made anew.  The report's own names stand beside ours.
Limit: a unit is what the field's name ends in; constraints are for the schemas.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import schemas
from artifact.appendix import table
from toolchain.errors import InvalidData, cannot_write
from toolchain.paths import REPO
from toolchain.tomlfile import read_toml

PAGE = REPO / "docs" / "fields.md"
NAMES = REPO / "artifact" / "report-names.toml"
SUMMARY = "summary-row"
DOCUMENTS = ("cell", "loadgen", "observer", "profiler", "truth", "scheduler", "agent", "verdicts")
"""In the order in which a run makes them."""
_UNITS = {
    "ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds", "s": "seconds",
    "bytes": "bytes", "mib": "MiB", "bits": "bits", "ppm": "parts per million",
    "tps": "tokens per second", "instructions": "instructions", "ticks": "ticks of 10 ms",
}  # fmt: skip
_HEAD = """\
# Fields of the result files

Made from `schemas/` by `./inv glossary`; do not edit. A run's folder has these files and
`record.json`, which holds them all; `results/summary.csv` has one row per run. Times of the virtual
board are virtual.
"""


def page() -> str:
    """The page; raises InvalidData for a name of the report that leads nowhere."""
    parts = [_HEAD, "## results/summary.csv\n", _summary()]
    for name in DOCUMENTS:
        schema = schemas.schema(name)
        parts.append(f"## {name}\n\n{schema.get('description', schema['title'])}\n")
        rows = [
            [f"`{path}`", _unit(path), text]
            for path, text in _fields(schema, schema, "")
            if text  # what has no meaning of its own is explained where it stands
        ]
        parts.append(table(["field", "unit", "meaning"], rows) + "\n")
    return "\n".join(parts)


def write() -> None:
    """Write the page; raises EnvironmentUnfit when it cannot be written."""
    text = page()
    try:
        PAGE.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise cannot_write(PAGE, exc) from exc
    print(PAGE)


def _summary() -> str:
    schema = schemas.schema(SUMMARY)
    report = {name["ours"]: name for name in read_toml(NAMES)["names"]}
    for ours in report:
        if ours not in schema["required"]:
            raise InvalidData(f"{NAMES}: {ours!r}: got no such column, expected one of {SUMMARY}")
    rows = []
    for column in schema["required"]:
        resolved = _resolve(schema["properties"][column], schema)[0]
        name = report.get(column, {})
        told = resolved.get("description", "")
        if differs := name.get("differs"):
            told += f" Differs from the report: {differs}."
        rows.append([f"`{column}`", _unit(column), told, f"`{name['report']}`" if name else ""])
    return table(["column", "unit", "meaning", "in the report"], rows) + "\n"


def _fields(
    node: Mapping[str, Any], root: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str]]:
    """The fields below a schema, with their descriptions; a list's items are `name[]`."""
    node, root = _resolve(node, root)
    if path:
        yield path, str(node.get("description", ""))
    for branch in (node, *node.get("anyOf", ()), *node.get("oneOf", ())):
        branch, where = _resolve(branch, root)
        for name, child in branch.get("properties", {}).items():
            yield from _fields(child, where, f"{path}.{name}" if path else name)
        if isinstance(items := branch.get("items"), dict):
            yield from _fields(items, where, f"{path}[]")


def _resolve(
    node: Mapping[str, Any], root: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Follow references; what stands beside a reference wins over what it refers to."""
    while "$ref" in node:
        document, _, pointer = node["$ref"].partition("#")
        if document:
            root = schemas.schema(document.split(":")[2])
        target: Any = root
        for step in filter(None, pointer.split("/")):
            target = target[step]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node, root


def _unit(path: str) -> str:
    name = path.rpartition(".")[2].removesuffix("[]")
    amount, per, what = name.partition("_per_")
    if per:
        unit = _UNITS.get(amount.rpartition("_")[2], "")
        return f"{unit} per {'second' if what == 's' else what}".strip()
    return _UNITS.get(name.rpartition("_")[2], "") if "_" in name else ""

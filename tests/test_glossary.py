"""The page of fields is what the schemas say, and says it for each column."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schemas
from artifact import glossary
from toolchain.errors import EnvironmentUnfit, InvalidData


def test_the_page_is_what_the_schemas_say() -> None:
    assert glossary.PAGE.read_text() == glossary.page(), "run ./inv glossary"


def test_each_column_of_the_summary_has_a_meaning() -> None:
    rows = [line for line in glossary.page().splitlines() if line.startswith("| `")]
    for column in schemas.schema("summary-row")["required"]:
        row = next(row for row in rows if row.startswith(f"| `{column}` |"))
        assert len(row.split("|")[3].strip()) > 5, row


def names(content: Any) -> Iterator[str]:
    """The names of all fields in a schema, at any depth; conditions only narrow them."""
    if isinstance(content, dict):
        yield from content.get("properties", {})
        for key, inner in content.items():
            if key not in ("if", "then", "else"):
                yield from names(inner)
    elif isinstance(content, list):
        for inner in content:
            yield from names(inner)


@pytest.mark.parametrize("document", glossary.DOCUMENTS)
def test_each_field_has_a_row(document: str) -> None:
    section = glossary.page().partition(f"\n## {document}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| (.+) \|$", section, re.MULTILINE)
    assert all(len(told) > 4 for _, _, told in rows)
    shown = {path.rpartition(".")[2].removesuffix("[]") for path, _, _ in rows}
    assert set(names(schemas.schema(document))) <= shown


def test_a_record_is_its_parts() -> None:
    """Those that are documents of their own are explained there and nowhere else."""
    page = glossary.page()
    section = page.partition("\n## record\n")[2].partition("\n## ")[0]
    for part in schemas.schema("record")["required"]:
        assert f"| `{part}` |" in section
    for part in set(schemas.schema("record")["properties"]) & set(glossary.DOCUMENTS):
        assert f"| `{part}." not in section.replace("`scheduler.kernel`", "").replace(
            "`scheduler.document`", ""
        )
    assert page.count("| `knobs.defer_ms` |") == 1


def test_links_lead_to_headings() -> None:
    page = glossary.page()
    headings = re.findall(r"^##+ (.+)$", page, re.MULTILINE)
    anchors = [re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in headings]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) <= set(anchors)


def without(
    monkeypatch: pytest.MonkeyPatch, document: str, find: Callable[[Any], dict[str, Any]]
) -> None:
    """Take the description from a part of a schema."""
    changed: Any = copy.deepcopy(schemas.schema(document))
    del find(changed)["description"]
    read = schemas.schema
    monkeypatch.setattr(schemas, "schema", lambda name: changed if name == document else read(name))


@pytest.mark.parametrize(
    ("document", "find", "says"),
    [
        (
            "scheduler",
            lambda schema: schema["properties"]["counters"]["properties"]["runs"],
            r"schemas/scheduler.schema.json: the field (scheduler\.document\.)?counters.runs of",
        ),
        (
            "observer",
            lambda schema: schema["$defs"]["outcomes"]["properties"]["clean"],
            r"schemas/observer.schema.json: the field \S*runnable.clean of \w+ has no description",
        ),
        (
            "profiler",
            lambda schema: schema["properties"]["problems"],
            r"the field (profiler\.)?problems of \w+ has no description, expected a sentence",
        ),
        (
            "cell",
            lambda schema: schema["$defs"]["inputs"]["properties"]["qemu"],
            "schemas/cell.schema.json: the field .*inputs.qemu of .*write it beside the field",
        ),
        (
            "summary-row",
            lambda schema: schema["properties"]["output_tps"],
            "schemas/summary-row.schema.json: the field output_tps of summary-row has no descript",
        ),
    ],
)
def test_a_field_without_a_meaning_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    document: str,
    find: Callable[[Any], dict[str, Any]],
    says: str,
) -> None:
    without(monkeypatch, document, find)
    with pytest.raises(InvalidData, match=says):
        glossary.page()


def test_an_item_that_only_repeats_its_list_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "| `audit[].sections[]` |" in glossary.page()
    without(
        monkeypatch,
        "audit",
        lambda schema: schema["properties"]["findings"]["items"]["properties"]["sections"]["items"],
    )
    assert "| `audit[].sections[]` |" not in glossary.page()


def test_units_come_from_the_names() -> None:
    page = glossary.page()
    assert "| `saves_per_s` | per second |" in page
    assert "| `vstate_ns_per_request` | nanoseconds per request |" in page
    assert "| `window_ms` | milliseconds |" in page
    assert "| `temperature_before_c` | degrees Celsius |" in page.replace("`board.", "`")
    assert "| `request_fields.timings_per_token` |  |" in page


def test_a_name_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tmp_path / "names.toml"
    names.write_text('[[names]]\nreport = "a"\nours = "no_such_column"\n')
    monkeypatch.setattr(glossary, "NAMES", names)
    with pytest.raises(InvalidData, match="'no_such_column': got no such column"):
        glossary.page()


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glossary, "PAGE", tmp_path / "none" / "fields.md")
    with pytest.raises(EnvironmentUnfit, match="cannot write"):
        glossary.write()

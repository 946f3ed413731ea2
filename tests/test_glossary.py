"""The page of fields is what the schemas say, and says it for each column."""

from pathlib import Path

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


def test_units_come_from_the_names() -> None:
    page = glossary.page()
    assert "| `saves_per_s` | per second |" in page
    assert "| `vstate_ns_per_request` | nanoseconds per request |" in page
    assert "| `window_ms` | milliseconds |" in page


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

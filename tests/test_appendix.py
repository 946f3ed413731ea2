"""The appendix: two pages, every claim and experiment in it, the same bytes, bad input named.

Limit: that it reads well, and how it looks, was judged by looking at it.
"""

from pathlib import Path

import pytest
import typst

from analysis.claims import read_claims
from artifact import appendix
from artifact.typeset import to_typst
from board.cell import Definitions
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError


@pytest.fixture(scope="module")
def text() -> str:
    return appendix.markdown()


def test_it_has_two_pages(text: str, tmp_path: Path) -> None:
    source = tmp_path / "a.typ"
    source.write_text(to_typst(text))
    typst.compile(str(source), output=str(tmp_path / "{n}.png"), format="png", ppi=20.0)
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_every_claim_and_experiment_is_in_it(text: str) -> None:
    claims = read_claims().claims
    for claim in claims:
        assert f"| {claim.id} | {claim.statement} |" in text
        assert claim.wanted in text
    for name, experiment in Definitions.read().experiments["experiments"].items():
        platform = experiment.get("platform", "virtual")
        assert f"| {name} | {experiment['title']} | {platform} |" in text
        if platform != "virtual":
            assert f"--experiment {name}`" not in text, "the virtual board would refuse it"
    assert "{{" not in text


def test_costs_are_those_of_the_cells_that_are_planned(text: str) -> None:
    """A scope multiplies only the policies that have one, a variant only its own."""
    definitions = Definitions.read()
    experiment = definitions.experiments["experiments"]["E2"]
    [part] = experiment["parts"]
    cells = list(definitions.cells_of(part))
    runs = len(part["concurrencies"]) * len(part["seeds"])
    scoped = sum(map(definitions.policies.has_scope, part["policies"]))
    ways = len(part["policies"]) + scoped * (len(part["scopes"]) - 1)
    assert len(cells) == ways * runs
    minutes = len(cells) * part["cost"]["cpu_s"] / 60 / appendix.CORES
    assert f"--experiment E2` | {minutes:.0f} |" in text


def test_claims_and_experiments_name_the_same_cost() -> None:
    """A board's is in claims.toml only."""
    definitions = Definitions.read()
    for claim in read_claims().claims:
        if claim.platform == "board":
            continue
        parts = definitions.experiments["experiments"][claim.experiment]["parts"]
        costs = [part["cost"] for part in parts for _ in definitions.cells_of(part)]
        minutes = sum(cost["cpu_s"] for cost in costs) / 60 / appendix.CORES
        assert (claim.minutes, claim.disk_mib) == (
            round(minutes),
            sum(c["disk_mib"] for c in costs),
        )


def test_the_same_bytes_every_time(text: str) -> None:
    first = appendix.pdf(text)
    assert first.startswith(b"%PDF")
    assert first == appendix.pdf(text)


def test_what_cannot_be_filled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "t.md"
    template.write_text("a {{ nothing }}")
    monkeypatch.setattr(appendix, "TEMPLATE", template)
    with pytest.raises(InvalidData, match=r"got \{\{ nothing \}\}, expected one of n_board"):
        appendix.markdown()


@pytest.mark.parametrize("name", ["TEMPLATE", "README"])
def test_a_text_that_is_gone_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(appendix, name, tmp_path / "x.md")
    with pytest.raises(InvalidData, match=r"x.md: cannot be read: No such file") as e:
        appendix.appendix(tmp_path / "a.pdf")
    assert e.value.exit_code == 4
    (tmp_path / "x.md").write_bytes(b"\xff")
    with pytest.raises(InvalidData, match=r"x.md: not UTF-8 text: "):
        appendix.appendix(tmp_path / "a.pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["x.md"]


@pytest.mark.parametrize("name", ["a.md", "a", ".pdf", "."])
def test_a_name_of_no_pdf_is_refused(tmp_path: Path, name: str) -> None:
    """Its Markdown would be written over it."""
    with pytest.raises(UsageError, match=r"expected a name that ends in .pdf") as e:
        appendix.appendix(tmp_path / name)
    assert e.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_text_is_never_markup(tmp_path: Path) -> None:
    strange = 'a #set $x$ <b> @c *d* "e" \\ _f_ ~ [g]'
    made = to_typst(strange.replace("*", "\\*").replace("_", "\\_").replace("<b>", "\\<b>"))
    source = tmp_path / "a.typ"
    source.write_text(made)
    typst.compile(str(source))
    assert '"e\\"' in made.replace('\\"e\\"', '"e\\"')


@pytest.mark.parametrize("markdown", ["![a](b.png)", "1. one\n2. two", "> quoted", "---"])
def test_other_markdown_is_refused_by_name(markdown: str) -> None:
    with pytest.raises(InvalidData, match="is not covered"):
        to_typst(markdown)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentUnfit, match="cannot write"):
        appendix.appendix(tmp_path / "file" / "a.pdf")


def test_pdf_and_markdown_are_written(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    appendix.appendix(tmp_path / "new" / "a.pdf")
    assert (tmp_path / "new" / "a.md").read_text() == text
    assert (tmp_path / "new" / "a.pdf").read_bytes().startswith(b"%PDF")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "new" / "a.pdf")

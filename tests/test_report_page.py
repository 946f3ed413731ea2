"""./inv analyze from folder to page: files, bytes, exit codes, and the page in a real browser."""

import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic
from rich.console import Console

import analysis.analyze as room
import schemas
from analysis import published
from analysis.admit import Admitted
from analysis.collect import CollectedRun, collected, in_order
from analysis.expected import compare
from analysis.page import Analysis, page
from analysis.screen import show
from toolchain.command import run
from toolchain.errors import Differs, InvalidData, UsageError

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
VOID = {"meta", "link", "br", "hr", "img", "input", "use", "path"}


def runs() -> list[CollectedRun]:
    """Those of E2, and an invalid one whose detail wants escaping."""
    bad = synthetic.record(synthetic.cell("vhot", 8, 4), reasons=["guest-panic"])
    bad["environment"]["failure"] = {"reason": "guest-panic", "detail": "<b>Oops</b> & more\nx"}
    index = {"E2": {"virtual": [bad["run_id"].split("-")[0]]}}
    return in_order([*synthetic.matrix(), collected(bad, index)])


@pytest.fixture(scope="module")
def whole() -> Analysis:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(room, "admit", lambda *_, **__: Admitted(tuple(runs()), (), ("a <note>",)))
        return room.analysed([])


@pytest.fixture(scope="module")
def report(whole: Analysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    room.write(whole, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_files_and_same_bytes(whole: Analysis, report: Path, tmp_path: Path) -> None:
    files = contents(report)
    assert {"index.html", "verdicts.json"} < set(files)
    assert sum(name.endswith(".md") for name in files) == sum(n.endswith(".csv") for n in files)
    assert sum(name.endswith(".svg") for name in files) == 8
    schemas.read(report / "verdicts.json", "verdicts")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "old.md").write_text("of an earlier analysis")
    (tmp_path / "tables" / "notes.txt").write_text("a reader's own")
    room.write(whole, tmp_path)
    again = contents(tmp_path)
    assert again.pop("tables/notes.txt")
    assert again == files


def test_real_folder_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    cells = [synthetic.cell(p, c, s) for p in ("baseline", "vhot") for c in (2, 8) for s in (1, 2)]
    records = [synthetic.record(cell) for cell in cells]
    for number, place in enumerate(("one", "two")):
        synthetic.write(tmp_path / place / "results", records)
        room.analyze(
            [tmp_path / place / "results"],
            report=tmp_path / place / "report",
            json_file=tmp_path / f"{number}.json",
        )
    assert contents(tmp_path / "one" / "report") == contents(tmp_path / "two" / "report")
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()


def test_nothing_is_written_when_a_run_is_refused(tmp_path: Path) -> None:
    records = [synthetic.record(synthetic.cell("baseline", 2, seed)) for seed in (1, 2)]
    synthetic.write(tmp_path / "results", records)
    path = tmp_path / "results" / "runs" / records[0]["run_id"] / "record.json"
    path.write_text("{")
    with pytest.raises(InvalidData):
        room.analyze([tmp_path / "results"], report=tmp_path / "report")
    assert not (tmp_path / "report").exists()
    room.analyze([tmp_path / "results"], report=tmp_path / "report", skip_invalid=True)
    document = json.loads((tmp_path / "report" / "verdicts.json").read_text())
    assert document["runs"] == {"valid": 1, "invalid": 0, "refused": 1}
    assert document["refused"][0]["name"] == "damaged-record"
    assert "Left out" in (tmp_path / "report" / "index.html").read_text()
    with pytest.raises(UsageError):
        room.analyze([tmp_path / "nowhere"], report=tmp_path / "report")


def test_results_are_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [synthetic.record(synthetic.cell("baseline", 2, 1))]
    synthetic.write(tmp_path / "results", records)
    monkeypatch.chdir(tmp_path)
    room.analyze([], report=Path("report"))
    document = json.loads((tmp_path / "report" / "verdicts.json").read_text())
    assert document["runs"]["valid"] == 1


def test_printed_tables_that_were_edited_are_not_as_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "published"
    shutil.copytree(published.PUBLISHED, edited)
    table = edited / "inference.toml"
    text = table.read_text()
    assert text.count("output_tps = { mean = 5.520") == 1
    table.write_text(text.replace("output_tps = { mean = 5.520", "output_tps = { mean = 9.990"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published.read, "__defaults__", (edited,))
    with pytest.raises(Differs, match="percent/output_tps"):
        room.analyze([], report=tmp_path)
    said = capsys.readouterr().out
    assert "A against what is expected: " in said and "A is as expected" not in said


def test_a_verdict_that_is_not_expected_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no results are
    room.analyze([], report=tmp_path)

    def planted(*arguments: Any) -> dict[str, Any]:
        one = {"id": "V/saves-fall", "found": "NOT-RUN", "expected": "DIRECTION-SHOWN"}
        return compare(*arguments) | {"state": "differs", "differing": [one]}

    monkeypatch.setattr(room, "compare", planted)
    with pytest.raises(Differs, match="V/saves-fall is NOT-RUN, expected DIRECTION-SHOWN") as got:
        room.analyze([], report=tmp_path)
    assert got.value.exit_code == 1
    assert "V: 1 verdicts are not the expected ones" in (tmp_path / "index.html").read_text()


def test_the_screen_is_plain_and_has_three_groups(whole: Analysis) -> None:
    file = io.StringIO()
    show(whole.document, Console(file=file, highlight=False))
    text = file.getvalue()
    assert text.isascii() or "\x1b" not in text
    places = [text.index(title) for title in ("A  Audit", "V  Virtual board", "B  Board and x86")]
    assert places == sorted(places)
    assert "54 valid runs, 1 invalid (kept, never averaged), 0 left out" in text


class Reader(HTMLParser):
    """Collects what matters: balance of tags, ids, addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else(whole: Analysis) -> None:
    text = page(whole)
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert all(address[:1] == "#" or address == "data:," for address in reader.addresses)
    assert {address[1:] for address in reader.addresses if address[:1] == "#"} <= set(reader.ids)
    assert "script" not in reader.tags
    assert not re.search(r"@import|url\((?!#)", text)
    assert "&lt;b&gt;Oops&lt;/b&gt; &amp; more" in text and "<b>Oops" not in text
    assert "a &lt;note&gt;" in text
    order = ["verdicts", "audit", "tables", "figures", "runs", "environment", "rerun"]
    assert [name for name in reader.ids if name in order] == order


def test_every_claim_and_how_to_rerun_it_is_on_the_page(whole: Analysis) -> None:
    text = page(whole)
    for verdict in whole.verdicts:
        assert f"<code>{verdict.claim.row_id}</code>" in text
        assert f"<code>{verdict.claim.command}</code>" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_in_a_real_browser(report: Path, tmp_path: Path) -> None:
    """Loaded from disk: no error on the console, the table is there, a row opens, a picture."""
    probe = """<script>
      window.addEventListener("error", e => document.title = "ERROR " + e.message);
      window.addEventListener("load", () => {
        const row = document.querySelector("#verdicts-v details");
        const closed = row.getBoundingClientRect().height;
        row.querySelector("summary").click();
        requestAnimationFrame(() => {
          const open = row.getBoundingClientRect().height;
          const rows = document.querySelector("#verdicts-v").tBodies[0].rows.length;
          const wide = document.documentElement.scrollWidth <= window.innerWidth;
          document.body.dataset.probe = JSON.stringify({closed, open, rows, wide,
            figures: document.querySelectorAll("figure svg").length});
        });
      });
    </script>"""
    page_ = tmp_path / "index.html"
    text = (report / "index.html").read_text(encoding="utf-8")
    # The probe is the test's; the page that is shipped has no script.
    page_.write_text(text.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    common = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
        "--virtual-time-budget=5000", "--window-size=1200,2600",
    ]  # fmt: skip
    log = tmp_path / "dump.log"
    run([*common, "--dump-dom", page_.as_uri()], what="loading the page", log=log, timeout_s=300)
    dump = log.read_text(encoding="utf-8")
    assert "CONSOLE" not in dump
    assert "<title>ERROR" not in dump
    found = re.search(r'data-probe="([^"]+)"', dump)
    assert found, "the browser did not run the probe"
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert 0 < seen["closed"] < 80 < 200 < seen["open"]
    assert seen["rows"] == 20
    assert seen["figures"] == 8
    assert seen["wide"], "the page is wider than its window"
    picture = report / "screenshot.png"
    run(
        [*common, f"--screenshot={picture}", (report / "index.html").as_uri()],
        what="taking a picture of the page", log=tmp_path / "shot.log", timeout_s=300,
    )  # fmt: skip
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 50_000

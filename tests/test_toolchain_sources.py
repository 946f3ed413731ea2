"""Source archives from the machine's Debian archive: fetched once, checked, pinned completely."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolchain_checkout import Mirror, names

from toolchain import fetch, mirror, sources
from toolchain.errors import EnvironmentUnfit, InvalidData

CONTENT = os.urandom(100_000)
POOL = "pool/main/q/q/q_1.0+ds.orig.tar.xz"
PIN = {
    "package": '"q"',
    "version": '"1.0+ds"',
    "kind": '"debian"',
    "sha256": f'"{hashlib.sha256(CONTENT).hexdigest()}"',
    "licence": '"GPL-2.0-or-later"',
    "pool_path": f'"{POOL}"',
    "size_bytes": str(len(CONTENT)),
}


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A Debian archive with one source, which is pinned as `q`."""
    server = Mirror()
    server.files[POOL] = CONTENT
    monkeypatch.setenv(mirror.VARIABLE, server.address)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SOURCES", tmp_path / "sources.toml")
    pin({})
    yield server
    server.stop()


def pin(changes: dict[str, str | None]) -> None:
    values = {key: value for key, value in {**PIN, **changes}.items() if value is not None}
    sources.SOURCES.write_text("[q]\n" + "".join(f"{k} = {v}\n" for k, v in values.items()))


def test_a_source_comes_once_from_the_archive(archive: Mirror) -> None:
    path = sources.source("q")
    assert path.read_bytes() == CONTENT
    assert sources.source("q") == path
    assert len(archive.requests) == 1
    assert names(fetch.downloads_dir()) == {path.name}


def test_a_damaged_one_is_fetched_anew(archive: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    sources.source("q").write_bytes(b"x")
    assert sources.source("q").read_bytes() == CONTENT
    assert "q 1.0+ds source: the download in the cache is damaged" in capsys.readouterr().err


def test_altered_and_missing_ones_are_told_apart(archive: Mirror) -> None:
    archive.files[POOL] = b"x" * len(CONTENT)
    with pytest.raises(InvalidData, match="altered or damaged on the way"):
        sources.source("q")
    del archive.files[POOL]
    with pytest.raises(EnvironmentUnfit, match="no longer carried by the mirror"):
        sources.source("q")


@pytest.mark.parametrize(
    "changes",
    [{"pool_path": None}, {"size_bytes": None}, {"kind": '"sdist"'}],
    ids=["no path", "no size", "of an index"],
)
def test_a_pin_is_complete(archive: Mirror, changes: dict[str, str | None]) -> None:
    pin(changes)
    with pytest.raises(InvalidData, match="pool_path and size_bytes are for kind 'debian'"):
        sources.source("q")

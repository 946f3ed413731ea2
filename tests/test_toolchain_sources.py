"""Source archives, of Debian's archive and of an index: fetched once, checked, pinned whole."""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolchain_checkout import Mirror, names

from toolchain import fetch, mirror, sources
from toolchain.errors import EnvironmentUnfit, InvalidData

METADATA = "Metadata-Version: 2.2\nName: q\nVersion: 1.0\n"
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


# --- what comes from a package index ------------------------------------------------------------


def test_a_source_distribution_needs_no_program_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip asks its build backend for metadata; that one would look for CMake."""
    project = '[build-system]\nrequires = []\nbuild-backend = "scikit_build_core.build"\n'
    project += '[project]\nname = "q"\nversion = "1.0"\n'
    index = tmp_path / "index"
    index.mkdir()
    with tarfile.open(index / "q-1.0.tar.gz", "w:gz") as sdist:
        for name, text in (("pyproject.toml", project), ("PKG-INFO", METADATA)):
            info = tarfile.TarInfo(f"q-1.0/{name}")
            info.size = len(text)
            sdist.addfile(info, io.BytesIO(text.encode()))
    content = (index / "q-1.0.tar.gz").read_bytes()
    monkeypatch.setattr(sources, "SOURCES", tmp_path / "sources.toml")
    sha256 = f'"{hashlib.sha256(content).hexdigest()}"'
    of_index = {"version": '"1.0"', "kind": '"sdist"', "pool_path": None, "size_bytes": None}
    pin({**of_index, "sha256": sha256})
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", os.fspath(index))
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert sources.source("q").read_bytes() == content


def test_an_index_out_of_reach_is_one_line_with_a_next_step(
    archive: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin({"version": '"1.0"', "kind": '"wheel"', "pool_path": None, "size_bytes": None})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # discard: nobody listens
    with pytest.raises(EnvironmentUnfit) as caught:
        sources.source("q")
    assert str(caught.value) == (
        "download q 1.0 with pip: No matching distribution found for q==1.0: check the network or "
        "pip's settings, then run the same command again to go on"
    )
    assert caught.value.exit_code == 3
    assert names(fetch.downloads_dir()) == set()

"""What comes out of the results port: taken over whole, or named, on any Python from 3.11."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from board.base import RunFailed
from board.virtual.boot import _unpack


def archive(directory: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(directory / "results.tar", "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_files_in_folders_come_back(tmp_path: Path) -> None:
    archive(tmp_path, {"a": b"1", "deep/er/b": b"22", "exit": b"7\n"})
    assert _unpack(tmp_path) == 7
    found = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert found == {"a": b"1", "deep/er/b": b"22"}


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside"])
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    room = tmp_path / "room"
    room.mkdir()
    archive(room, {name: b"x", "exit": b"0\n"})
    with pytest.raises(RunFailed, match="neither a file nor a folder of results") as caught:
        _unpack(room)
    assert caught.value.reason == "no-results"
    assert [p.name for p in tmp_path.iterdir()] == ["room"]


def test_a_device_is_no_result(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "results.tar", "w") as tar:
        device = tarfile.TarInfo("sda")
        device.type = tarfile.BLKTYPE
        tar.addfile(device)
        tar.addfile(tarfile.TarInfo("exit"))
    with pytest.raises(RunFailed, match="sda: neither"):
        _unpack(tmp_path)


@pytest.mark.parametrize("members", [{}, {"a": b"1"}, {"exit": b"0\n", "a": b"1"}])
def test_an_archive_that_does_not_end_with_exit_is_incomplete(
    tmp_path: Path, members: Mapping[str, bytes]
) -> None:
    archive(tmp_path, members)
    with pytest.raises(RunFailed, match="results end early"):
        _unpack(tmp_path)

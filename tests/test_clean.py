"""./inv clean removes what nothing needs, and only that."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from board.virtual import boot
from toolchain import cache, clean
from toolchain.errors import UsageError
from toolchain.lock import read_lock

DAY_S = 86400


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    return tmp_path / "bananaos"


def entry(name: str) -> Path:
    def make(out: Path) -> None:
        (out / "a").write_bytes(b"x" * 2_000_000)

    return cache.entry(name, {"of": name}, make)


def old(path: Path, days: int) -> None:
    then = time.time() - days * DAY_S
    os.utime(path / cache.MANIFEST, (then, then))


def test_artifacts_go_by_their_last_use(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, gone, used = entry("kept"), entry("gone"), entry("used")
    for path in (gone, used):
        old(path, 30)
    assert entry("used") == used  # the use is what counts
    clean.clean(14, everything=False)
    assert kept.is_dir() and used.is_dir() and not gone.exists()
    told = capsys.readouterr()
    assert f"clean: artifacts/{gone.name}: last used 30 days ago, 2.0 MB" in told.err
    assert told.out.startswith("2 MB of ")


def test_leftovers_and_what_is_locked_no_more(place: Path) -> None:
    package = read_lock()[0].sha256
    for name in (
        "build/left/x",
        "artifacts/damaged-a-1/x",
        "rootfs/build-0123/etc/x",
        "rootfs/build-0123.census",
        "rootfs/build-4567/etc/x",
        "rootfs/build-4567.census",
        "rootfs/build-89ab.census",
        "verify/elsewhere-x/userns-kernel-x/out/x",
        "verify/progress.json",
        f"downloads/{'0' * 64}",
        f"downloads/{package}",
        f"downloads/{package}.part",
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    then = time.time() - 15 * DAY_S
    os.utime(place / "rootfs" / "build-4567.census", (then, then))
    clean.clean(14, everything=False)
    left = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert left == {
        "rootfs/build-0123/etc/x",
        "rootfs/build-0123.census",
        "verify/progress.json",
        f"downloads/{package}",
        f"downloads/{package}.part",
    }


def test_what_somebody_makes_is_left_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "build" / "room-name-0123").mkdir(parents=True)
    (place / "locks").mkdir()
    with (place / "locks" / "room-name-0123.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        clean.clean(0, everything=True)
    assert (place / "build" / "room-name-0123").is_dir()
    assert "room-name-0123: in use, left alone" in capsys.readouterr().err


def test_what_verify_is_at_is_left_alone(place: Path) -> None:
    left = place / "verify" / "elsewhere-x"
    left.mkdir(parents=True)
    with cache.exclusive("verify"):
        clean.clean(14, everything=False)
    assert left.is_dir()
    clean.clean(14, everything=False)
    assert not left.exists()


@pytest.mark.parametrize(
    ("path", "lock"),
    [
        ("verify/elsewhere-x/f", "verify"),
        ("downloads/x", "downloads"),
        ("build/nix-x/f", "nix-store"),
        ("downloads/.name.new", "source-name"),
    ],
)
def test_what_one_lock_guards_for_all_is_left_alone(place: Path, path: str, lock: str) -> None:
    (place / path).parent.mkdir(parents=True)
    (place / path).touch()
    with cache.exclusive(lock):
        clean.clean(14, everything=False)
        clean.clean(14, everything=True)
        assert (place / path).exists()
    clean.clean(14, everything=True)
    assert not (place / path).exists()


def test_a_running_guest_s_folder_is_left_alone(place: Path) -> None:
    with boot._scratch() as scratch:
        clean.clean(14, everything=False)
        clean.clean(14, everything=True)
        assert scratch.is_dir()
    left = place / "build" / "boot-killed"
    left.mkdir()
    clean.clean(14, everything=False)
    assert not left.exists()


def test_all_of_it(place: Path) -> None:
    entry("one")
    (place / "downloads").mkdir()
    (place / "downloads" / "x").touch()
    clean.clean(14, everything=True)
    assert [path for path in place.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_an_empty_cache_is_no_fault(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean.clean(14, everything=False)
    assert capsys.readouterr().out.startswith("0 MB of ")


def test_a_number_of_days_that_is_none(place: Path) -> None:
    with pytest.raises(UsageError, match="--days -1: expected an integer from 0"):
        clean.clean(-1, everything=False)

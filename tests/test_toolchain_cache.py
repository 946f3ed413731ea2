"""toolchain.cache: an entry is whole and unharmed or made anew; it is made once."""

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from toolchain import bundled, cache
from toolchain.errors import EnvironmentUnfit, UsageError

INPUTS = {"of": ["anything", 1, 2.5, None], "a": {"b": "c"}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "_fresh", set())
    return tmp_path / "bananaos" / "artifacts"


class Maker:
    """Makes two files and counts how often."""

    def __init__(self, content: bytes = b"content") -> None:
        self.times, self.content = 0, content

    def __call__(self, directory: Path) -> None:
        self.times += 1
        (directory / "a").write_bytes(self.content)
        (directory / "b").write_bytes(b"")


def _entry(make: Callable[[Path], None]) -> Path:
    return cache.entry("room/name", INPUTS, make)


def _left(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_an_entry_is_made_once_and_names_its_files(place: Path) -> None:
    make = Maker()
    directory = _entry(make)
    assert _entry(make) == directory
    assert make.times == 1
    assert directory.name == f"room-name-{cache.key_of(INPUTS)[:16]}"
    assert (directory / "a").read_bytes() == b"content"
    assert cache.manifest(directory).keys() == {"a", "b"}
    assert _left(place) == [directory.name]


def test_other_inputs_are_another_entry() -> None:
    make = Maker()
    assert _entry(make) != cache.entry("room/name", {**INPUTS, "a": None}, make)
    assert make.times == 2


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: _flip(d / "a"), "a has other bytes"),
        (lambda d: (d / "a").unlink(), "a is missing"),
        (lambda d: (d / "c").touch(), "c is not of this entry"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json: "),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json: "),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json: "),
        (lambda d: (d / "manifest.json").write_text('{"inputs": 1}'), "is of other inputs"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff"), "manifest.json: "),
        (
            lambda d: (d / "manifest.json").write_text(
                (d / "manifest.json").read_text().replace("anything", "something")
            ),
            "manifest.json is of other inputs",
        ),
        (
            lambda d: (d / "manifest.json").write_text(
                (d / "manifest.json").read_text().replace('"b": "e3', '"b": "f3')
            ),
            "b has other bytes",
        ),
    ],
)
def test_a_damaged_entry_is_set_aside_and_made_anew(
    place: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], said: str
) -> None:
    make = Maker()
    directory = _entry(make)
    harm(directory)
    harmed = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert _entry(make) == directory
    assert make.times == 2
    assert (directory / "a").read_bytes() == b"content"
    err = capsys.readouterr().err
    assert f"{directory.name}: damaged (" in err
    assert said in err
    (aside,) = [place / name for name in _left(place) if name.startswith("damaged-")]
    assert f"set aside as {aside.name} and built anew" in err
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == harmed, "nothing is lost"


def test_a_failed_making_leaves_nothing(place: Path) -> None:
    class Oops(Exception):
        pass

    def fails(directory: Path) -> None:
        (directory / "half").touch()
        raise Oops

    with pytest.raises(Oops):
        _entry(fails)
    assert _left(place) == []


def test_a_full_disk_names_the_entry_and_the_cure(place: Path) -> None:
    def fails(directory: Path) -> None:
        raise OSError(28, os.strerror(28), "somewhere")

    with pytest.raises(EnvironmentUnfit, match="cannot write: No space left on device; free some"):
        _entry(fails)
    assert _left(place) == []


def test_what_a_killed_process_left_is_removed(place: Path) -> None:
    left = place / f".room-name-{cache.key_of(INPUTS)[:16]}.new"
    (left / "sub").mkdir(parents=True)
    (left / "a").write_bytes(b"half")
    (left / "sub").chmod(0o500)
    directory = _entry(Maker())
    assert _left(place) == [directory.name]
    assert cache.manifest(directory).keys() == {"a", "b"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(EnvironmentUnfit, match="Permission denied; make it writable"):
        _entry(Maker())


def test_a_file_where_the_cache_should_be(tmp_path: Path) -> None:
    (tmp_path / "bananaos").touch()
    with pytest.raises(EnvironmentUnfit, match="cannot write"):
        _entry(Maker())


# --- switched off -----------------------------------------------------------------------------


def test_switched_off_everything_is_built_once_more_in_a_process(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Maker()
    directory = _entry(make)
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr(cache, "_fresh", set())  # as another process would begin
    for _ in range(3):
        assert _entry(make) == directory
    assert make.times == 2
    assert capsys.readouterr().err == "", "the same bytes again are nothing to speak of"
    assert _left(place) == [directory.name]


def test_switched_off_a_difference_is_said_and_both_are_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = _entry(Maker(b"first"))
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr(cache, "_fresh", set())
    _entry(Maker(b"second"))
    assert (directory / "a").read_bytes() == b"second"
    assert "built anew it differs (a); the old one is set aside as " in capsys.readouterr().err
    (aside,) = [place / name for name in _left(place) if name.startswith("damaged-")]
    assert (aside / "a").read_bytes() == b"first"


def test_switched_off_a_failed_build_does_not_lose_the_old_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = _entry(Maker())
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr(cache, "_fresh", set())
    with pytest.raises(ZeroDivisionError):
        _entry(lambda _: [][1 // 0])
    assert (directory / "a").read_bytes() == b"content"


@pytest.mark.parametrize("value", ["OFF", "0", "no"])
def test_another_value_of_the_switch_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(cache.VARIABLE, value)
    with pytest.raises(UsageError, match=f"BANANAOS_CACHE='{value}': expected on or off"):
        _entry(Maker())


# --- at the same time -------------------------------------------------------------------------


def _wanting(began: Path, go: Path) -> None:
    def make(directory: Path) -> None:
        began.touch()
        while not go.exists():
            pass
        (directory / "a").write_text(str(os.getpid()))

    _entry(make)


def test_two_processes_that_want_an_entry_make_it_once(tmp_path: Path, place: Path) -> None:
    context = multiprocessing.get_context("spawn")
    began, go = tmp_path / "began", tmp_path / "go"
    wanting = [context.Process(target=_wanting, args=(began, go)) for _ in range(3)]
    for process in wanting:
        process.start()
    while not began.exists():
        pass
    go.touch()
    for process in wanting:
        process.join()
    assert [process.exitcode for process in wanting] == [0, 0, 0]
    (name,) = _left(place)
    assert (place / name / "a").read_text() in {str(process.pid) for process in wanting}


def test_two_threads_that_want_an_entry_make_it_once() -> None:
    make = Maker()
    threads = [threading.Thread(target=_entry, args=(make,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.times == 1


def test_waiting_is_said_and_a_killed_holder_does_not_block(tmp_path: Path) -> None:
    hold = (
        "import time; from toolchain.cache import exclusive\n"
        "with exclusive('x'): print('held', flush=True); time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    want = "from toolchain.cache import exclusive\nwith exclusive('x'): print('mine')\n"
    waiter = subprocess.Popen(
        [sys.executable, "-c", want], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert waiter.stderr is not None
    assert "another process is making x; waiting for it" in waiter.stderr.readline()
    holder.kill()
    holder.communicate()
    assert waiter.communicate()[0] == "mine\n"
    assert waiter.returncode == 0


def _bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """Move a finished entry into the bundle; return where it is now."""
    monkeypatch.setattr(bundled, "FOLDER", tmp_path / "bundle")
    prebuilt = tmp_path / "bundle" / "artifacts" / directory.name
    prebuilt.parent.mkdir(parents=True)
    directory.rename(prebuilt)
    return prebuilt


def test_a_prebuilt_entry_is_checked_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make = Maker()
    (first := _entry(make) / "a").chmod(0o755)
    prebuilt = _bundle(tmp_path, monkeypatch, first.parent)
    again = _entry(make)
    assert make.times == 1
    assert cache.manifest(again) == cache.manifest(prebuilt)
    assert (again / "a").stat().st_mode & 0o777 == 0o755
    assert "prebuilt, from the bundle; its hashes were checked" in capfd.readouterr().err


def test_a_damaged_prebuilt_entry_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make = Maker()
    prebuilt = _bundle(tmp_path, monkeypatch, _entry(make))
    (prebuilt / "a").write_bytes(b"other")
    assert (_entry(make) / "a").read_bytes() == b"content"
    assert make.times == 2
    assert "a has other bytes" in capfd.readouterr().err


def test_switched_off_no_prebuilt_entry_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    _bundle(tmp_path, monkeypatch, _entry(make))
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr(cache, "_fresh", set())
    _entry(make)
    assert make.times == 2

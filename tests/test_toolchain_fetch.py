"""toolchain.fetch, mirror and lock: every way a download or what it rests on can be wrong."""

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolchain_checkout import (
    Answer,
    Checkout,
    Handler,
    Mirror,
    drops_after,
    eventually,
    hangs_after,
    instead,
    make_checkout,
    names,
    small_deb,
    status,
    whole,
)

from toolchain import fetch, lock, mirror, sources
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.fetch import Wanted
from toolchain.tomlfile import read_toml

CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
POOL = "pool/main/p/p_1.0+b1_all.deb"
WANTED = Wanted("p 1.0 all", POOL, len(CONTENT), SHA256)


@pytest.fixture
def server() -> Iterator[Mirror]:
    started = Mirror()
    started.files[POOL] = CONTENT
    yield started
    started.stop()


@pytest.fixture
def checkout(tmp_path: Path, server: Mirror) -> Checkout:
    return make_checkout(tmp_path / "checkout", tmp_path / "home", server)


def _answer(server: Mirror, answer: Answer) -> None:
    server.answers = dict.fromkeys(server.files, answer)


def _fetch(server: Mirror, directory: Path, *more: Mirror) -> None:
    fetch.fetch([WANTED], lambda: [m.address for m in (server, *more)], directory)


def test_a_file_appears_under_its_sha256(server: Mirror, tmp_path: Path) -> None:
    _fetch(server, tmp_path)
    assert names(tmp_path) == {SHA256}
    assert (tmp_path / SHA256).read_bytes() == CONTENT


def test_what_is_there_is_not_asked_for_again(server: Mirror, tmp_path: Path) -> None:
    _fetch(server, tmp_path)
    fetch.fetch([WANTED, WANTED], lambda: pytest.fail("asked for a mirror"), tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("damage", ["other byte", "shorter", "empty"])
def test_a_damaged_download_in_the_cache_is_fetched_anew(
    server: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    wrong = {"other byte": b"x" + CONTENT[1:], "shorter": CONTENT[:-1], "empty": b""}[damage]
    (tmp_path / SHA256).write_bytes(wrong)
    _fetch(server, tmp_path)
    assert (tmp_path / SHA256).read_bytes() == CONTENT
    assert "p 1.0 all: the download in the cache is damaged; fetching it anew" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("code", [404, 410])
def test_a_file_the_mirror_has_no_longer(server: Mirror, tmp_path: Path, code: int) -> None:
    _answer(server, status(code))
    with pytest.raises(
        EnvironmentUnfit, match=r"p 1\.0 all: no longer carried.*\./inv lock --accept"
    ):
        _fetch(server, tmp_path)
    assert names(tmp_path) == set()


def test_the_next_mirror_is_asked_whatever_was_wrong_with_the_first(
    server: Mirror, tmp_path: Path
) -> None:
    for number, answer in enumerate([status(404), status(503), instead(b"x"), drops_after(9)]):
        first = Mirror()
        try:
            first.files = server.files
            _answer(first, answer)
            _fetch(first, tmp_path / str(number), server)
            assert names(tmp_path / str(number)) == {SHA256}
            assert first.requests, number
        finally:
            first.stop()


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (b"x" + CONTENT[1:], f"{len(CONTENT)} bytes with sha256"),
        (CONTENT[:-1], f"got {len(CONTENT) - 1} bytes; expected {len(CONTENT)} bytes"),
        (CONTENT + b"x", f"got {len(CONTENT) + 1} bytes; expected {len(CONTENT)} bytes"),
    ],
)
def test_an_altered_file_is_told_apart_and_thrown_away(
    server: Mirror, tmp_path: Path, other: bytes, got: str
) -> None:
    _answer(server, instead(other))
    with pytest.raises(InvalidData, match="altered or damaged on the way") as raised:
        _fetch(server, tmp_path)
    assert got in str(raised.value)
    assert names(tmp_path) == set()


def test_another_size_is_seen_before_its_bytes_are_taken(server: Mirror, tmp_path: Path) -> None:
    _answer(server, hangs_after(0))
    server.files = dict.fromkeys(server.files, CONTENT + b"x")
    with pytest.raises(InvalidData):
        _fetch(server, tmp_path)


def test_a_dropped_connection_is_resumed_where_it_broke(server: Mirror, tmp_path: Path) -> None:
    _answer(server, drops_after(100_000))
    with pytest.raises(EnvironmentUnfit, match="kept, run the same command again") as raised:
        _fetch(server, tmp_path)
    assert "cannot write" not in str(raised.value)
    assert names(tmp_path) == {f"{SHA256}.part"}
    have = (tmp_path / f"{SHA256}.part").stat().st_size
    assert 0 < have <= 100_000
    server.answers = {}
    server.requests.clear()
    _fetch(server, tmp_path)
    (request,) = server.requests
    assert request.range == f"bytes={have}-"
    assert request.sent_bytes == len(CONTENT) - have
    assert (tmp_path / SHA256).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_the_whole_again(server: Mirror, tmp_path: Path) -> None:
    (tmp_path / f"{SHA256}.part").write_bytes(CONTENT[:1000])
    _answer(server, whole)
    _fetch(server, tmp_path)
    assert server.requests[0].range == "bytes=1000-"
    assert (tmp_path / SHA256).read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"y" * 1000, CONTENT + b"z", b"y" * len(CONTENT)])
def test_a_bad_part_costs_one_fresh_start(server: Mirror, tmp_path: Path, part: bytes) -> None:
    (tmp_path / f"{SHA256}.part").write_bytes(part)
    _fetch(server, tmp_path)
    assert server.requests[-1].range is None
    assert names(tmp_path) == {SHA256}


def test_a_server_that_goes_on_elsewhere_is_not_believed(server: Mirror, tmp_path: Path) -> None:
    """A 206 from another place than the one asked for, as caches and balancers have sent."""

    def elsewhere(handler: Handler, content: bytes) -> None:
        if handler.request_seen.range is None:
            whole(handler, content)
            return
        rest = content[500:]
        handler.head(206, len(rest), Content_Range=f"bytes 500-{len(content) - 1}/{len(content)}")
        handler.body(rest)

    (tmp_path / f"{SHA256}.part").write_bytes(CONTENT[:1000])
    _answer(server, elsewhere)
    _fetch(server, tmp_path)
    assert [request.range for request in server.requests] == ["bytes=1000-", None]
    assert names(tmp_path) == {SHA256}


def test_a_part_as_long_as_the_mirrors_file_does_not_get_stuck(
    server: Mirror, tmp_path: Path
) -> None:
    """The server answers 416 to a range that starts at its end."""
    (tmp_path / f"{SHA256}.part").write_bytes(CONTENT[:1000])
    _answer(server, instead(CONTENT[:1000]))
    with pytest.raises(InvalidData, match="got 1000 bytes"):
        _fetch(server, tmp_path)
    server.answers = {}
    _fetch(server, tmp_path)
    assert names(tmp_path) == {SHA256}


@pytest.mark.parametrize("code", [403, 500, 503])
def test_another_status_is_the_networks_trouble(server: Mirror, tmp_path: Path, code: int) -> None:
    _answer(server, status(code))
    with pytest.raises(EnvironmentUnfit, match=f"HTTP {code}"):
        _fetch(server, tmp_path)


def test_a_silent_server_is_given_up_and_its_bytes_are_kept(
    server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SILENCE_S", 0.5)
    _answer(server, hangs_after(100_000))
    with pytest.raises(EnvironmentUnfit, match=r"imeout.*kept, run the same command") as raised:
        _fetch(server, tmp_path)
    assert "cannot write" not in str(raised.value), "a time-out is an OSError, too"
    assert (tmp_path / f"{SHA256}.part").stat().st_size == 100_000


def test_no_server_at_all(server: Mirror, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match=r"127\.0\.0\.1"):
        fetch.fetch([WANTED], lambda: ["http://127.0.0.1:9/debian"], tmp_path)


def test_one_failure_does_not_lose_what_the_others_have(server: Mirror, tmp_path: Path) -> None:
    """The parts of the files that were on their way are kept for the next call."""
    began = threading.Event()

    def waits(handler: object, content: bytes) -> None:
        began.wait(60)
        status(404)(handler, content)  # type: ignore[arg-type]

    def starts(handler: object, content: bytes) -> None:
        threading.Timer(0.5, began.set).start()
        hangs_after(200_000)(handler, content)  # type: ignore[arg-type]

    server.files["gone"] = b"1"
    server.answers = {POOL: starts, "gone": waits}
    gone = Wanted("gone", "gone", 1, hashlib.sha256(b"1").hexdigest())
    with pytest.raises(EnvironmentUnfit, match="no longer carried"):
        fetch.fetch([WANTED, gone], lambda: [server.address], tmp_path)
    assert (tmp_path / f"{SHA256}.part").stat().st_size > 0


# --- the verb ---------------------------------------------------------------------------------


def _two_trees(checkout: Checkout) -> None:
    for tree in ("build", "guest"):
        checkout.add_package(f"p-{tree}", small_deb(f"p-{tree}", os.urandom(200_000)), tree)


def test_the_verb_fetches_all_trees(checkout: Checkout) -> None:
    """Also what only `verify` or a board needs: whoever fetches goes offline next."""
    _two_trees(checkout)
    checkout.add_package("p-hostile", small_deb("p-hostile"), "hostile")
    done = checkout.run("fetch")
    assert done.code == 0, done.err
    assert names(checkout.downloads) == {row[-1] for row in checkout.rows}


def test_interrupting_a_download_keeps_what_came(checkout: Checkout) -> None:
    _two_trees(checkout)
    checkout.mirror.answers = {checkout.rows[0][5]: hangs_after(100_000)}
    running = checkout.start("fetch")
    part = checkout.downloads / f"{checkout.rows[0][-1]}.part"
    eventually(lambda: part.is_file() and part.stat().st_size == 100_000, running)
    ended = running.interrupt()
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert part.stat().st_size == 100_000
    checkout.mirror.answers = {}
    checkout.mirror.requests.clear()
    assert checkout.run("fetch").code == 0
    assert checkout.mirror.requests[0].range == "bytes=100000-"


def test_two_fetches_at_once_download_each_file_once(checkout: Checkout) -> None:
    _two_trees(checkout)
    runs = [checkout.start("fetch") for _ in range(2)]
    assert [run.end().code for run in runs] == [0, 0]
    assert len(checkout.mirror.requests) == 2


def test_an_unwritable_cache(checkout: Checkout) -> None:
    _two_trees(checkout)
    checkout.home.joinpath(".cache").write_text("a file where a directory should be")
    done = checkout.run("fetch")
    assert done.code == 3
    assert "cannot write" in done.error
    assert "XDG_CACHE_HOME" in done.error


def test_no_home_and_no_cache_named(checkout: Checkout) -> None:
    """A user ID that no password file knows, as in many containers."""
    _two_trees(checkout)
    prefix = ("unshare", "--user", "--map-user=54321")
    done = checkout.run("fetch", prefix=prefix, env={"HOME": ""})
    if "unshare" in done.err:
        pytest.skip(f"needs user namespaces: {done.err}")
    assert done.code == 3
    assert "user 54321 has no home directory; set XDG_CACHE_HOME" in done.error


# --- which mirror -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "ftp://x/debian",
        "example",
        "http://",
        "http:///debian",
        "http://x y/",
        "http://x/?a",
        "http://x:a/",
    ],
)
def test_a_malformed_mirror(checkout: Checkout, value: str) -> None:
    _two_trees(checkout)
    done = checkout.run("fetch", env={"BANANAOS_DEBIAN_MIRROR": value})
    assert done.code == 2
    assert f"BANANAOS_DEBIAN_MIRROR={value!r} is not the http(s) address" in done.error


def test_no_debian_sources_and_no_variable(checkout: Checkout, tmp_path: Path) -> None:
    """A machine without apt; nothing is downloaded and the variable is named."""
    _two_trees(checkout)
    programs = tmp_path / "bin"
    programs.mkdir()
    done = checkout.run("fetch", env={"BANANAOS_DEBIAN_MIRROR": "", "PATH": os.fspath(programs)})
    assert done.code == 3
    assert "no Debian archive" in done.error
    assert "BANANAOS_DEBIAN_MIRROR" in done.error


def test_only_debian_archives_of_apts_sources_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = ["http://b/debian/", "http://a/debian", "http://c/ubuntu", "file:/x/debian", ""]
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in listed))
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv(mirror.VARIABLE, raising=False)
    assert mirror.find_mirrors() == ["http://a/debian", "http://b/debian"]


def test_the_variable_goes_before_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mirror.VARIABLE, "https://example.org:8080/debian/")
    assert mirror.find_mirrors() == ["https://example.org:8080/debian"]
    monkeypatch.setenv(mirror.VARIABLE, "https://[::1/")
    with pytest.raises(UsageError):
        mirror.find_mirrors()


# --- sources from a package index ---------------------------------------------------------------

WHEEL = "made_here-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes for its only index, with one package; pinned as source `x`."""
    directory = tmp_path / "index"
    directory.mkdir()
    with zipfile.ZipFile(directory / WHEEL, "w") as wheel:
        wheel.writestr("made_here-1.0.dist-info/METADATA", "Name: made-here\nVersion: 1.0\n")
        wheel.writestr("made_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("made_here-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", os.fspath(directory))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SOURCES", tmp_path / "sources.toml")
    _pin(fetch.sha256_file(directory / WHEEL))
    return directory


def _pin(sha256: str, kind: str = "wheel") -> None:
    sources.SOURCES.write_text(
        f'[x]\npackage = "made-here"\nversion = "1.0"\nkind = "{kind}"\n'
        f'sha256 = "{sha256}"\nlicence = "MIT"\n'
    )


def test_a_source_is_downloaded_once(index: Path) -> None:
    path = sources.source("x")
    assert path.read_bytes() == (index / WHEEL).read_bytes()
    (index / WHEEL).unlink()
    assert sources.source("x") == path
    assert names(path.parent) == {path.name}


def test_a_damaged_source_is_fetched_anew(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sources.source("x")
    path.write_bytes(b"x")
    (path.parent / ".x.new").mkdir()
    (path.parent / ".x.new" / "left by a killed process").touch()
    assert sources.source("x").read_bytes() == (index / WHEEL).read_bytes()
    assert "x: the download in the cache is damaged; fetching it anew" in capsys.readouterr().err
    assert names(path.parent) == {path.name}


def test_an_altered_source_is_told_apart(index: Path) -> None:
    _pin("0" * 64)
    with pytest.raises(InvalidData, match="other bytes than the pinned sha256 0000"):
        sources.source("x")
    assert names(fetch.downloads_dir()) == set()


def test_a_source_the_index_does_not_have(index: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(EnvironmentUnfit, match=r"download made-here 1\.0 with pip"):
        sources.source("x")


def test_an_unknown_source(index: Path) -> None:
    with pytest.raises(UsageError, match=r"source .y. is unknown; sources\.toml has x"):
        sources.source("y")


def test_a_source_in_an_unwritable_cache(index: Path) -> None:
    fetch.downloads_dir().parent.mkdir(parents=True)
    fetch.downloads_dir().touch()
    with pytest.raises(EnvironmentUnfit, match="cannot write"):
        sources.source("x")


@pytest.mark.parametrize(
    ("sha256", "kind", "why"),
    [("0" * 63, "wheel", "not 64 hex digits"), ("0" * 64, "egg", "expected sdist or wheel")],
)
def test_a_damaged_pin(index: Path, sha256: str, kind: str, why: str) -> None:
    _pin(sha256, kind)
    with pytest.raises(InvalidData, match=why):
        sources.source("x")


def test_the_real_pins_can_be_read() -> None:
    assert sources.sources().keys() >= {"llama-cpp", "smollm2"}


# --- the lock ---------------------------------------------------------------------------------

ROW = ["build", "p", "all", "1.0", "trixie", "pool/p.deb", "7", "0" * 64]


def _lock(path: Path, *rows: list[str]) -> Path:
    header = list(lock.Package.__dataclass_fields__)
    path.write_text("".join("\t".join(row) + "\n" for row in (header, *rows)))
    return path


def test_the_real_lock_is_of_the_documented_form() -> None:
    packages = lock.read_lock()
    assert {package.tree for package in packages} == set(read_toml(lock.WANTED)["trees"])


def test_a_lock_survives_being_written_and_read(tmp_path: Path) -> None:
    packages = lock.read_lock(_lock(tmp_path / "a", ROW))
    (tmp_path / "b").write_text(lock.lock_text(packages))
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        (7, "0" * 63, "not 64 hex digits"),
        (7, "0" * 62 + "zz", "not 64 hex digits"),
        (7, "A" * 64, "not 64 hex digits"),
        (7, " " + "0" * 64, "not 64 hex digits"),
        (6, "-7", "not a positive whole number"),
        (6, "0", "not a positive whole number"),
        (6, "seven", "not a positive whole number"),
        (5, "/etc/passwd", "not a path below pool/"),
        (5, "pool/../x", "not a path below pool/"),
        (3, "", "none of them empty"),
        (3, "1\t0", "9 columns"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, column: int, value: str, why: str) -> None:
    row = [*ROW[:column], value, *ROW[column + 1 :]]
    path = _lock(tmp_path / "lock", ROW, row)
    with pytest.raises(InvalidData, match=why) as raised:
        lock.read_lock(path)
    assert str(raised.value).startswith(f"{path}:3: ")


def test_a_row_that_is_there_twice(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=":3: build p all is there twice"):
        lock.read_lock(_lock(tmp_path / "lock", ROW, ROW))


def test_a_row_cut_short(tmp_path: Path) -> None:
    path = _lock(tmp_path / "lock", ROW, ROW)
    path.write_bytes(path.read_bytes()[:-80])
    with pytest.raises(InvalidData, match=":3: "):
        lock.read_lock(path)


@pytest.mark.parametrize("content", [b"", b"tree\tname\n", b"\xff\xfe", b"\0\0\0\n"])
def test_a_lock_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lock"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match="restore"):
        lock.read_lock(path)


def test_a_lock_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="No such file"):
        lock.read_lock(tmp_path / "lock")


def test_a_damaged_lock_ends_a_verb_with_4(checkout: Checkout) -> None:
    _two_trees(checkout)
    checkout.rows[1][7] = "0"
    checkout.write_lock()
    done = checkout.run("fetch")
    assert done.code == 4
    assert "debian.lock:3: sha256 '0' is not 64 hex digits" in done.error
    assert checkout.mirror.requests == []


def test_a_tree_without_packages_is_a_damaged_lock(checkout: Checkout) -> None:
    checkout.add_package("p", small_deb())
    done = checkout.run("fetch")
    assert done.code == 4
    assert "no package of tree 'guest'" in done.error

"""toolchain.rootfs: what a tree is made of, and all that can go wrong while it is made."""

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolchain_checkout import (
    REPO,
    Checkout,
    Ended,
    Mirror,
    Running,
    deb,
    eventually,
    file,
    make_checkout,
    names,
    small_deb,
    special,
)

from toolchain import fetch, lock, rootfs
from toolchain.cache import remove_tree
from toolchain.errors import EnvironmentUnfit, InvalidData, cannot_write
from toolchain.paths import cache_dir
from toolchain.tomlfile import read_toml

MAKE = (
    "import sys; sys.path[0] = sys.argv[1]\n"
    "from toolchain.errors import ArtifactError\n"
    "from toolchain.rootfs import rootfs\n"
    "try: print(rootfs('build'))\n"
    "except ArtifactError as error: sys.exit(print('error:', error, file=sys.stderr) or "
    "error.exit_code)\n"
    "except KeyboardInterrupt: sys.exit(130)\n"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    mirror = Mirror()
    yield make_checkout(tmp_path / "checkout", tmp_path / "home", mirror)
    mirror.stop()


def _make(checkout: Checkout, *prefix: str, python: str = "", **env: str) -> Ended:
    argv = [*prefix, python or sys.executable, "-c", MAKE, os.fspath(checkout.root)]
    return checkout.run_command(argv, env=env)


def _tree(checkout: Checkout, **env: str) -> Path:
    done = _make(checkout, **env)
    assert done.code == 0, done.err
    return Path(done.out.strip())


def _facts(tree: Path) -> dict[str, tuple[object, ...]]:
    """All that two makings of a tree must agree in, times included; owners are not."""
    found: dict[str, tuple[object, ...]] = {}
    for path in tree.rglob("*"):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        found[os.fspath(path.relative_to(tree))] = (
            oct(status.st_mode),
            status.st_mtime,
            content,
        )
    return found


def _rich_deb() -> bytes:
    return deb(
        [
            special("./", tarfile.DIRTYPE),
            special("./usr/bin/", tarfile.DIRTYPE),
            file("./usr/bin/tool", b"#!/bin/sh\n", 0o6777),
            file("./usr/bin/secret", b"s", 0o000),
            special("./usr/bin/again", tarfile.LNKTYPE, "./usr/bin/tool"),
            special("./usr/bin/soft", tarfile.SYMTYPE, "tool"),
            file("./usr/share/deep/er/without directory members", b"1"),
            file("./usr/share/n\xe4me \n\t%2B", b"2"),
            file("./usr/share/man/page", b"excluded"),
            special("./usr/share/manlink", tarfile.LNKTYPE, "./usr/share/man/page"),
            special("./bin", tarfile.SYMTYPE, "usr/bin"),
            special("./lib/", tarfile.DIRTYPE),
            file("./lib/through a link", b"3"),
            special("./usr/share/empty", tarfile.DIRTYPE),
        ]
    )


def test_what_is_in_a_tree(checkout: Checkout) -> None:
    checkout.add_package("rich", _rich_deb())
    tree = _tree(checkout)
    assert stat.S_IMODE((tree / "usr/bin/tool").stat().st_mode) == 0o755, "no set-id, no o+w"
    assert (tree / "usr/bin/secret").read_bytes() == b"s", "its owner may read everything"
    assert (tree / "usr/bin/again").samefile(tree / "usr/bin/tool")
    assert (tree / "usr/bin/soft").readlink() == Path("tool")
    assert (tree / "usr/share/deep/er/without directory members").read_bytes() == b"1"
    assert (tree / "usr/share/n\xe4me \n\t%2B").read_bytes() == b"2"
    assert not (tree / "usr/share/man").exists()
    assert (tree / "usr/share/manlink").read_bytes() == b"excluded", "linked to what is not there"
    assert (tree / "bin").readlink() == Path("usr/bin")
    assert (tree / "usr/lib/through a link").read_bytes() == b"3"
    assert (tree / "etc/hostname").read_text() == "bananaos\n"
    assert not (tree / "made-here").exists(), "control data is not unpacked"
    assert {path.name for path in tree.parent.iterdir()} == {tree.name, f"{tree.name}.census"}


def test_the_same_tree_with_any_umask_and_from_any_place(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.add_package("rich", _rich_deb())
    first = _tree(checkout)
    second = _make(
        checkout,
        *("sh", "-c", 'umask 077; exec "$@"', "sh"),
        XDG_CACHE_HOME=os.fspath(tmp_path / "an other"),
    )
    assert second.code == 0, second.err
    assert Path(second.out.strip()).name == first.name
    assert _facts(Path(second.out.strip())) == _facts(first)


@pytest.mark.parametrize(
    "python", ["python3.11", "python3.12", "python3.13", "python3.14", "/usr/bin/python3"]
)
def test_the_same_tree_with_any_python(checkout: Checkout, tmp_path: Path, python: str) -> None:
    """Python 3.11.2, Debian 12's, has no extraction filters; later versions warn or differ."""
    stand_in = tmp_path / "stand-in"  # fetch.py's aiohttp is compiled for one Python only
    stand_in.mkdir()
    (stand_in / "aiohttp.py").write_text("class ClientError(Exception): pass\nClientSession = 0\n")
    shutil.copytree(Path(_package_directory("debian")), stand_in / "debian")
    probe = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no such Python here: {error}")
    sha256 = checkout.add_package("rich", _rich_deb())
    first = _tree(checkout)
    other = tmp_path / "other"
    (other / "bananaos" / "downloads").mkdir(parents=True)
    shutil.copy(checkout.downloads / sha256, other / "bananaos" / "downloads")
    done = _make(
        checkout,
        python=python,
        PATH=os.environ["PATH"],
        PYTHONPATH=os.fspath(stand_in),
        PYTHONWARNINGS="error",
        XDG_CACHE_HOME=os.fspath(other),
    )
    assert done.code == 0, done.err
    assert _facts(Path(done.out.strip())) == _facts(first)


def _package_directory(name: str) -> str:
    return os.fspath(Path(__import__(name).__file__ or "").parent)


def test_a_later_architecture_may_bring_the_same_file(checkout: Checkout) -> None:
    checkout.add_package("p", small_deb("same"), arch="amd64")
    checkout.add_package("p", small_deb("same", b"2"), arch="riscv64")
    assert (_tree(checkout) / "usr/share/same").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (special("./dev/sda", tarfile.BLKTYPE), "is a device or a pipe"),
        (special("./pipe", tarfile.FIFOTYPE), "is a device or a pipe"),
        (file("./usr/../../outside"), "points out of the tree"),
        (file("/etc/passwd"), "points out of the tree"),
    ],
)
def test_a_member_no_tree_can_hold(
    checkout: Checkout, member: tuple[tarfile.TarInfo, bytes], why: str
) -> None:
    checkout.add_package("bad", deb([member]))
    done = _make(checkout)
    assert done.code == 4
    assert why in done.error
    assert names(checkout.cache / "rootfs") == set()


def test_two_packages_with_the_same_file_are_refused(checkout: Checkout) -> None:
    """Which of them won would depend on which thread was quicker."""
    checkout.add_package("one", small_deb("same"))
    checkout.add_package("two", small_deb("same", b"other"))
    done = _make(checkout)
    assert done.code == 4
    assert "both hold usr/share/same" in done.error


def test_a_download_that_is_no_package(checkout: Checkout) -> None:
    checkout.add_package("text", b"this is not an ar archive\n")
    done = _make(checkout)
    assert done.code == 4
    assert "text 1.0 is not a Debian package" in done.error


def test_damaged_downloads_are_all_healed_in_one_run(checkout: Checkout) -> None:
    good = checkout.add_package("good", small_deb("good"))
    bad = [checkout.add_package(f"bad{n}", small_deb(f"bad{n}")) for n in range(3)]
    checkout.downloads.mkdir(parents=True)
    for row in checkout.rows:
        (checkout.downloads / row[7]).write_bytes(checkout.mirror.files[row[5]])
    for sha256 in bad:
        path = checkout.downloads / sha256
        content = path.read_bytes()
        path.write_bytes(content[:-9] + b"?" + content[-8:])
    done = _make(checkout)
    assert done.code == 0, done.err
    assert done.err.count("the download in the cache is damaged; fetching it anew") == 3
    asked = {request.path for request in checkout.mirror.requests}
    assert asked == {row[5] for row in checkout.rows if row[7] != good}


def test_a_tree_is_made_from_the_cache_without_any_mirror(checkout: Checkout) -> None:
    checkout.add_package("p", small_deb())
    tree = _tree(checkout)
    shutil.rmtree(tree)
    checkout.mirror.requests.clear()
    _tree(checkout, BANANAOS_DEBIAN_MIRROR="not even an address")
    assert checkout.mirror.requests == []


@pytest.mark.parametrize("damage", ["file missing", "file longer", "mode", "link", "census", "new"])
def test_a_changed_tree_is_set_aside_and_made_anew(checkout: Checkout, damage: str) -> None:
    checkout.add_package("rich", _rich_deb())
    tree = _tree(checkout)
    before = _facts(tree)
    assert "unpacking" not in _make(checkout).err
    victim = tree / "usr/bin/tool"
    if damage == "file missing":
        victim.unlink()
    elif damage == "file longer":
        victim.write_bytes(b"longer than it was")
    elif damage == "mode":
        victim.chmod(0o600)
    elif damage == "link":
        (tree / "usr/bin/soft").unlink()
        (tree / "usr/bin/soft").symlink_to("elsewhere")
    elif damage == "census":
        tree.with_name(f"{tree.name}.census").unlink()
    else:
        (tree / "etc/new").touch()
    done = _make(checkout)
    assert done.code == 0, done.err
    assert f"rootfs: {tree.name}: changed since it was made" in done.err
    assert f"set aside as damaged-{tree.name}-" in done.err
    assert _facts(tree) == before
    assert len([name for name in names(tree.parent) if name.startswith("damaged-")]) == 1


def test_two_processes_make_a_tree_once(checkout: Checkout) -> None:
    checkout.add_package("p", small_deb("p", os.urandom(3_000_000)))
    runs = [_start(checkout) for _ in range(3)]
    ended = [run.end() for run in runs]
    assert [run.code for run in ended] == [0, 0, 0]
    assert "".join(run.err for run in ended).count("rootfs: unpacking") == 1


def test_a_failing_package_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    fetch.downloads_dir().mkdir(parents=True)
    many = deb(file(f"./many/{number}") for number in range(5000))
    packages = []
    for name, content in (("bad", b"no package"), ("many", many)):
        sha256 = hashlib.sha256(content).hexdigest()
        (fetch.downloads_dir() / sha256).write_bytes(content)
        packages.append(lock.Package("build", name, "all", "1", "x", "pool/x", 1, sha256))
    with pytest.raises(InvalidData, match="bad 1 is not a Debian package"):
        rootfs._unpack_batch(packages, tmp_path / "root", [])
    assert len(names(tmp_path / "root" / "many")) < 5000


def _big_checkout(checkout: Checkout) -> None:
    """Many files, so that there is time to interrupt."""
    for number in range(20):
        members = [file(f"./usr/share/big{number}/{n}", bytes(5000)) for n in range(200)]
        checkout.add_package(f"big{number}", deb(members))


def _start(checkout: Checkout) -> Running:
    return Running([sys.executable, "-c", MAKE, os.fspath(checkout.root)], checkout)


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_ending_while_unpacking_leaves_nothing_and_the_next_run_works(
    checkout: Checkout, how: str
) -> None:
    _big_checkout(checkout)
    running = _start(checkout)
    root = checkout.cache / "rootfs"
    eventually(
        lambda: any((root / name / "usr/share/big1").exists() for name in names(root)), running
    )
    ended = running.interrupt() if how == "interrupt" else running.kill()
    assert "Traceback" not in ended.err
    with pytest.raises(ProcessLookupError):  # threads end with their process, a pool would not
        os.killpg(running.process.pid, 0)
    left = names(root)
    if how == "interrupt":
        assert ended.code == 130
        assert left == set()
    else:
        assert ended.code == -9
        assert {name.rpartition(".")[2] for name in left} <= {"new", "census"}
    tree = _tree(checkout)
    assert names(root) == {tree.name, f"{tree.name}.census"}, "what a killed run left is gone"
    assert len(names(tree / "usr/share")) == 20


def _in_small_file_system(checkout: Checkout, options: str, script: str) -> Ended:
    """Run a shell script where ~/.cache is a tmpfs; "$@" is the making of a tree."""
    cache = checkout.home / ".cache"
    cache.mkdir(exist_ok=True)
    mounting = f'mount -t tmpfs -o {options} tmpfs "$0" || exit 77\n'
    done = _make(
        checkout, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounting + script,
        os.fspath(cache),
    )  # fmt: skip
    if "unshare" in done.err or done.code == 77:
        pytest.skip(f"needs user namespaces: {done.err}")
    return done


def test_a_full_disk_while_downloading(checkout: Checkout) -> None:
    """One line; with space the next run goes on where it stopped."""
    sha256 = checkout.add_package("big", small_deb("big", os.urandom(3_000_000)))
    done = _in_small_file_system(
        checkout,
        "size=1m",
        '"$@"; echo "code $?"; ls "$0/bananaos/downloads"\n'
        'mount -t tmpfs -o remount,size=64m tmpfs "$0"\n'
        '"$@"; echo "code $?"; ls "$0/bananaos/downloads"',
    )
    first, second = done.out.split("code 0\n")
    assert first.splitlines()[:2] == ["code 3", f"{sha256}.part"]
    assert second.splitlines() == [sha256]
    assert f"{sha256}.part: cannot write: {os.strerror(errno.ENOSPC)}; free some space" in (
        done.error
    )
    resumed = checkout.mirror.requests[-1]
    assert resumed.range is not None, "went on where it stopped"
    assert resumed.sent_bytes < len(checkout.mirror.files[resumed.path])


def test_a_full_disk_while_unpacking(checkout: Checkout) -> None:
    checkout.add_package("zeros", small_deb("zeros", bytes(30_000_000)))
    done = _in_small_file_system(
        checkout,
        "size=9m",
        '"$@"; echo "code $?"; ls -A "$0/bananaos/rootfs"\n'
        'mount -t tmpfs -o remount,size=64m tmpfs "$0"; "$@"; echo "code $?"',
    )
    assert done.out.startswith("code 3\n/"), "nothing half-made is left"
    assert done.out.endswith("code 0\n")
    assert f"cannot write: {os.strerror(errno.ENOSPC)}; free some space" in done.error


def test_an_unwritable_place_for_trees(checkout: Checkout) -> None:
    checkout.add_package("p", small_deb())
    checkout.cache.mkdir(parents=True)
    (checkout.cache / "rootfs").write_text("a file where a directory should be")
    done = _make(checkout)
    assert done.code == 3
    assert "cannot write" in done.error


def test_a_read_only_cache(checkout: Checkout) -> None:
    """With all in it, it does; with something missing, one line says that it cannot be written."""
    checkout.add_package("p", small_deb())
    script = '"$@" || exit\nmount -t tmpfs -o remount,ro tmpfs "$0"\n"$@"; echo "code $?"\n'
    done = _in_small_file_system(checkout, "size=9m", script)
    assert done.out.endswith("code 0\n")
    script = 'mount -t tmpfs -o remount,ro tmpfs "$0"\n"$@"; echo "code $?"\n'
    done = _in_small_file_system(checkout, "size=9m", script)
    assert done.out == "code 3\n"
    assert "Read-only file system; make it writable, or set XDG_CACHE_HOME" in done.error


# --- the small parts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "make it writable"),
        (errno.EROFS, "make it writable"),
        (errno.EIO, "see to it"),
    ],
)
def test_the_cure_fits_the_trouble(number: int, cure: str) -> None:
    failure = cannot_write(Path("/x/y"), OSError(number, os.strerror(number)))
    assert failure.exit_code == 3
    assert str(failure).startswith(f"/x/y: cannot write: {os.strerror(number)}; {cure}")


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nest")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_dir() == Path("/c/bananaos")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path("/nest/.cache/bananaos")

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(EnvironmentUnfit, match="set XDG_CACHE_HOME to an absolute path"):
        cache_dir()


def test_removing_a_tree_with_read_only_directories(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    inner = tmp_path / "tree" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner / "link").symlink_to(outside)
    inner.chmod(0o500)
    inner.parent.chmod(0o000)
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500, "what a link points to is left alone"


@pytest.mark.parametrize(
    ("content", "why"), [(b"a = ", "not TOML"), (b"\xff", "not TOML"), (None, "cannot read")]
)
def test_damaged_data_files(checkout: Checkout, content: bytes | None, why: str) -> None:
    checkout.add_package("p", small_deb())
    path = checkout.root / "toolchain" / "fixups.toml"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    done = _make(checkout)
    assert done.code == 4
    assert f"{path}: {why}" in done.error


def test_the_repositorys_own_data_files_can_be_read() -> None:
    for path in sorted((REPO / "toolchain").glob("*.toml")):
        assert read_toml(path), path

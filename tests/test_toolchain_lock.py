"""`./inv lock` against a mirror with signed lists that moves on, misbehaves or is not there.

The archive is served from this machine and signed by a key made here, so apt itself decides what is
newest and what is signed.
"""

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from toolchain_checkout import Checkout, Mirror, make_checkout, small_deb, status

from toolchain import resolve
from toolchain.errors import EnvironmentUnfit

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("apt-get", "gpg", "gpgv"))),
    reason="no apt-get, gpg and gpgv on this machine",
)

TREES = """
suite = "trixie"
component = "main"
[trees.build]
architecture = "amd64"
foreign = ["riscv64"]
packages = [{wanted}]
"""
PIN = """
[tool]
package = "tool"
version = "{version}"
kind = "debian"
pool_path = "pool/main/tool_{version}.orig.tar.xz"
size_bytes = {size}
sha256 = "{sha256}"
licence = "MIT"
"""
RELEASE = "dists/trixie/InRelease"
LISTS = "dists/trixie/main/binary-amd64/Packages"


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Archive:
    """A Debian archive of a few packages, served by `mirror`."""

    mirror: Mirror
    keys: Path
    packages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    source: tuple[str, bytes] = ("1.0", b"source one")

    def gpg(self, *words: str | Path, content: bytes = b"") -> bytes:
        argv = ["gpg", "--homedir", self.keys, "--batch", "--quiet", *words]
        return subprocess.run(argv, input=content, stdout=subprocess.PIPE, check=True).stdout

    def has(self, name: str, version: str, content: bytes) -> None:
        """Carry this version of the package and no other."""
        self.packages[name] = (version, content)
        pool_path = f"pool/main/{name}_{version}_all.deb"
        for path in [p for p in self.mirror.files if p.startswith(f"pool/main/{name}_")]:
            del self.mirror.files[path]
        self.mirror.files[pool_path] = content
        self.publish()

    def publish(self) -> None:
        """Write the lists anew and sign them."""
        packages = "".join(
            f"Package: {name}\nVersion: {version}\nArchitecture: all\n"
            f"Maintainer: a <a@example.org>\n"
            f"Filename: pool/main/{name}_{version}_all.deb\nSize: {len(content)}\n"
            f"SHA256: {sha256_of(content)}\nDescription: made here\n\n"
            for name, (version, content) in sorted(self.packages.items())
        )
        version, content = self.source
        archive = f"tool_{version}.orig.tar.xz"
        sources = (
            f"Package: tool\nBinary: tool\nVersion: {version}-1\nDirectory: pool/main\n"
            f"Format: 3.0 (quilt)\nArchitecture: any\nMaintainer: a <a@example.org>\n"
            f"Checksums-Sha256:\n {sha256_of(content)} {len(content)} {archive}\n"
            f" {sha256_of(b'signature')} 9 {archive}.asc\n"  # upstream's, beside many archives
            f"Files:\n {hashlib.md5(content).hexdigest()} {len(content)} {archive}\n\n"
        )
        lists = {
            "main/binary-amd64/Packages": packages.encode(),
            "main/binary-riscv64/Packages": b"",
            "main/source/Sources": sources.encode(),
        }
        rows = "".join(f" {sha256_of(text)} {len(text)} {name}\n" for name, text in lists.items())
        release = (
            "Origin: Debian\nLabel: Debian\nSuite: stable\nCodename: trixie\nVersion: 13\n"
            "Date: Thu, 01 Jan 2026 00:00:00 UTC\nArchitectures: amd64 riscv64\n"
            f"Components: main\nSHA256:\n{rows}"
        )
        self.mirror.files |= {f"dists/trixie/{name}": text for name, text in lists.items()}
        self.mirror.files[RELEASE] = self.gpg("--clearsign", content=release.encode())
        self.mirror.files[f"pool/main/{archive}"] = content


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A GnuPG home with one key; its public part is `archive.gpg` there."""
    # Short: GnuPG's agent listens on a socket below it.
    place = tmp_path_factory.mktemp("gpg")
    place.chmod(0o700)
    words = ["gpg", "--homedir", os.fspath(place), "--batch", "--quiet"]
    make = ["--passphrase", "", "--quick-generate-key", "archive@example.org", "ed25519", "sign"]
    subprocess.run([*words, *make, "never"], check=True, capture_output=True)
    subprocess.run([*words, "--output", place / "archive.gpg", "--export"], check=True)
    yield place
    subprocess.run(["gpgconf", "--homedir", place, "--kill", "gpg-agent"], check=True)


@pytest.fixture
def archive(keys: Path) -> Iterator[Archive]:
    mirror = Mirror()
    made = Archive(mirror, keys)
    made.has("first", "1.0", small_deb("first", b"one"))
    made.has("second", "1.0", small_deb("second", b"two"))
    yield made
    mirror.stop()


@pytest.fixture
def checkout(archive: Archive, tmp_path: Path) -> Checkout:
    """A checkout whose lock is what the archive has."""
    made = make_checkout(tmp_path / "checkout", tmp_path / "home", archive.mirror)
    want(made, "first", "second")
    content = archive.source[1]
    pin = PIN.format(version="1.0", size=len(content), sha256=sha256_of(content))
    (made.root / "toolchain" / "sources.toml").write_text("# kept\n" + pin)
    for name, (version, content) in archive.packages.items():
        pool_path = f"pool/main/{name}_{version}_all.deb"
        row = ["build", name, "all", version, "trixie", pool_path]
        made.rows.append([*row, str(len(content)), sha256_of(content)])
    made.write_lock()
    return made


def want(checkout: Checkout, *names: str) -> None:
    text = TREES.format(wanted=", ".join(f'"{name}"' for name in names))
    (checkout.root / "toolchain" / "packages.toml").write_text(text)


def state(checkout: Checkout) -> list[str]:
    """What a lock may change."""
    names = ("debian.lock", "sources.toml")
    return [(checkout.root / "toolchain" / name).read_text() for name in names]


def lock(checkout: Checkout, *words: str, **env: str) -> "tuple[int, list[str], str]":
    """Run the verb; returns exit code, the lines it printed, and the failure's line."""
    keyring = os.fspath(Path(checkout.home.parent, "archive.gpg"))
    done = checkout.run("lock", *words, env={"BANANAOS_DEBIAN_KEYRING": keyring, **env})
    return done.code, done.out.splitlines(), done.error if done.code else ""


@pytest.fixture(autouse=True)
def keyring(keys: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(keys / "archive.gpg", tmp_path))


def test_a_mirror_that_has_not_moved(checkout: Checkout) -> None:
    before = state(checkout)
    assert lock(checkout) == (0, ["the lock is what the mirror has"], "")
    assert lock(checkout, "--accept")[0] == 0
    assert state(checkout) == before


def test_what_moved_is_shown_and_taken_only_when_told(checkout: Checkout, archive: Archive) -> None:
    before = state(checkout)
    archive.source = ("1.1", b"source one and more")
    archive.has("first", "1.1+deb13u1", small_deb("first", b"newer"))
    archive.has("third", "3.0", small_deb("third", b"three"))
    want(checkout, "first", "third")
    moved = [
        "moved   build first all 1.0 -> 1.1+deb13u1",
        "removed build second all 1.0",
        "added   build third all 3.0",
        "moved   sources tool source 1.0 -> 1.1",
    ]
    code, lines, error = lock(checkout)
    assert (code, lines) == (1, moved)
    assert "4 differences; nothing was changed; ./inv lock --accept takes them" in error
    assert state(checkout) == before
    code, lines, _ = lock(checkout, "--accept")
    assert (code, lines) == (0, moved)
    text, pins = state(checkout)
    assert [line.split("\t")[1:4] for line in text.splitlines()[1:]] == [
        ["first", "all", "1.1+deb13u1"],
        ["third", "all", "3.0"],
    ]
    assert pins.startswith("# kept\n") and 'version = "1.1"' in pins
    assert sha256_of(archive.source[1]) in pins
    assert lock(checkout)[:2] == (0, ["the lock is what the mirror has"])


def test_a_mirror_that_went_back_says_so(checkout: Checkout, archive: Archive) -> None:
    archive.has("first", "0.9", small_deb("first", b"old"))
    assert lock(checkout)[1] == ["moved   build first all 1.0 -> 0.9 (older!)"]


def test_lock_and_pins_change_together_or_not_at_all(checkout: Checkout, archive: Archive) -> None:
    archive.has("first", "2.0", small_deb("first", b"two"))
    archive.source = ("1.1", b"new")
    archive.publish()
    before = state(checkout)
    for name in ("debian.new", "sources.new"):
        (checkout.root / "toolchain" / name).mkdir()  # what is to be written there cannot be
        code, _, error = lock(checkout, "--accept")
        assert code == 3
        assert f"{name}: cannot write: Is a directory; nothing changed" in error
        assert state(checkout) == before
        (checkout.root / "toolchain" / name).rmdir()
    assert lock(checkout, "--accept")[0] == 0


def test_another_content_of_a_locked_version_is_tampering(
    checkout: Checkout, archive: Archive
) -> None:
    """Signed as it is: the archive's key may be stolen, and a lock may be edited."""
    before = state(checkout)
    archive.has("first", "1.0", small_deb("first", b"evil"))
    for words in ((), ("--accept",)):
        code, lines, error = lock(checkout, *words)
        assert (code, lines) == (4, [])
        assert "first all 1.0: the same version with another sha256 than the lock's" in error
    archive.has("first", "1.0", small_deb("first", b"one"))
    archive.source = ("1.0", b"evil")
    archive.publish()
    code, _, error = lock(checkout, "--accept")
    assert code == 4 and "tool source 1.0: the same version with another sha256" in error
    assert state(checkout) == before


def test_lists_that_are_not_what_was_signed(checkout: Checkout, archive: Archive) -> None:
    lists = archive.mirror.files[LISTS]
    archive.mirror.files[LISTS] = lists.replace(b"1.0", b"1.1")
    code, _, error = lock(checkout, "--accept")
    assert code == 4
    assert "its lists are not those that its Release file is signed for" in error


def test_lists_that_nobody_signed(checkout: Checkout, archive: Archive) -> None:
    signed = archive.mirror.files[RELEASE].decode()
    text = signed.partition("\n\n")[2].partition("-----BEGIN PGP SIGNATURE")[0]
    for content in (text, signed.replace("Label: Debian", "Label: Debiam")):
        archive.mirror.files[RELEASE] = content.encode()
        code, _, error = lock(checkout, "--accept")
        assert code == 4, error
        assert "its lists are not signed by the archive's key" in error


def test_lists_signed_by_somebody_else(checkout: Checkout, keyring: Path, tmp_path: Path) -> None:
    """The mirror signs with its key; the machine trusts another."""
    home = tmp_path / "g"
    home.mkdir(mode=0o700)
    words = ["gpg", "--homedir", os.fspath(home), "--batch", "--quiet"]
    make = ["--passphrase", "", "--quick-generate-key", "other@example.org", "ed25519", "sign"]
    subprocess.run([*words, *make, "never"], check=True, capture_output=True)
    subprocess.run([*words, "--yes", "--output", keyring, "--export"], check=True)
    subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], check=True)
    code, _, error = lock(checkout, "--accept")
    assert code == 4
    assert "its lists are not signed by the archive's key" in error


def test_a_mirror_that_is_not_there_or_has_no_lists(checkout: Checkout, archive: Archive) -> None:
    archive.mirror.answers[RELEASE] = status(503)
    code, _, error = lock(checkout, "--accept")
    assert code == 3
    assert "cannot read its package lists" in error and "nothing was changed" in error
    gone = "http://127.0.0.1:9/debian"
    code, _, error = lock(checkout, "--accept", BANANAOS_DEBIAN_MIRROR=gone)
    assert code == 3
    assert f"{gone}: cannot read its package lists" in error


def test_what_the_mirror_does_not_have(checkout: Checkout) -> None:
    before = state(checkout)
    want(checkout, "first", "nowhere")
    code, _, error = lock(checkout, "--accept")
    assert code == 3
    assert "tree build: the mirror cannot satisfy packages.toml" in error and "nowhere" in error
    assert state(checkout) == before


def test_no_keyring(checkout: Checkout) -> None:
    code, _, error = lock(checkout, BANANAOS_DEBIAN_KEYRING="/nonexistent/keys.gpg")
    assert code == 3
    assert "/nonexistent/keys.gpg is missing: a new lock needs a Debian host" in error
    code, _, error = lock(checkout, BANANAOS_DEBIAN_KEYRING="keys.gpg")
    assert code == 2
    assert "BANANAOS_DEBIAN_KEYRING='keys.gpg': expected an absolute path" in error


def test_a_point_release_in_one_sitting(small: Checkout, keys: Path, keyring: Path) -> None:
    """The mirror moves on and drops what is locked: fetch says so, lock and verify take it over."""
    archive = Archive(small.mirror, keys)
    small.add_recipe("x", "cat /usr/share/first >/out/out\n")
    assert small.run("verify", "--accept").code == 0
    packages = {row[1]: row for row in small.rows}
    trees = "".join(
        f'[trees.{tree}]\narchitecture = "amd64"\nforeign = []\npackages = [{names}]\n'
        for tree, names in (("build", '"busybox", "first"'), ("hostile", '"others"'))
    )
    (small.root / "toolchain" / "packages.toml").write_text(
        f'suite = "trixie"\ncomponent = "main"\n{trees}'
    )
    for name, row in packages.items():
        content = small.mirror.files.pop(row[5])
        archive.packages[name] = (row[3], content)
    for name, (version, content) in list(archive.packages.items()):
        archive.has(name, version, content)
    sources = small.root / "toolchain" / "sources.toml"
    tables = sources.read_text()
    sources.write_text(tables.partition("[qemu]")[0])
    env = {"BANANAOS_DEBIAN_KEYRING": os.fspath(keyring)}
    # Another path in the pool is of no tree and of no artifact.
    done = small.run("lock", "--accept", env=env)
    assert "moved   build first all pool/main/first_1.0+deb13u1_all.deb -> " in done.out
    assert small.run("verify").code == 0

    archive.has("first", "1.1", small_deb("first", b"newer"))
    shutil.rmtree(small.cache / "rootfs")
    (small.downloads / packages["first"][-1]).unlink()
    done = small.run("build", "--artifact", "kernel/x", env={"BANANAOS_CACHE": "off"})
    assert done.code == 3
    assert "first 1.0 all" in done.error
    assert "no longer carried by the mirror" in done.error and "./inv lock" in done.error
    done = small.run("lock", env=env)
    assert (done.code, done.out) == (1, "moved   build first all 1.0 -> 1.1\n")
    assert small.run("lock", "--accept", env=env).code == 0
    done = small.run("verify")
    assert done.code == 1
    assert "other inputs than those of binaries.json: package first:all changed" in done.error
    done = small.run("verify", "--accept", "--rebuild")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    why = "because package first:all changed"
    assert f"build: config_sha256 changed, layer_sha256 changed; {why}" in lines
    assert any(line.startswith("kernel/x: out changed; because ") for line in lines)
    assert (small.run("build", "--artifact", "kernel/x").built / "out").read_bytes() == b"newer"
    assert small.run("verify").code == 0


def test_the_first_of_the_two_is_put_back_when_the_second_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the two cannot be put in its place: the first one is put back."""
    paths = [tmp_path / "debian.lock", tmp_path / "sources.toml"]
    for path in paths:
        path.write_text("old")
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target == paths[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(EnvironmentUnfit, match=r"sources\.toml: cannot write: .*nothing changed"):
        resolve._replace(dict.fromkeys(paths, "new"))
    assert [path.read_text() for path in paths] == ["old", "old"]
    assert not list(tmp_path.glob("*.new"))

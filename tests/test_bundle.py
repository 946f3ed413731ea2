"""The bundle: the same bytes twice, every change found, and an unpacked one that needs no network.

Promise: archives are written, damaged and checked for real; a small checkout with a bundle beside
it fetches from a mirror that has nothing.
Limit: the real bundle has 1.6 GB; making one and a run from it is for the hand (README).
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import synthetic
import zstandard
from toolchain_checkout import Checkout, Mirror, make_checkout, names, small_deb

from analysis import analyze
from artifact import archive, bundle
from artifact.archive import MANIFEST, SIGNATURE, Checked, Member
from toolchain import bundled
from toolchain.errors import Differs, EnvironmentUnfit, InvalidData, UsageError

MEMBERS = [
    Member("inv", b"#!/bin/sh\n", executable=True),
    Member("bundle/commit", b"0" * 40 + b"\n"),
    Member("a/b", b"\0" * 100_000),
]
SHA256 = hashlib.sha256


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "b.tar.zst"
    archive.write(path, "top", MEMBERS)
    return path


def unpack(packed: Path, to: Path) -> Path:
    with (
        packed.open("rb") as stream,
        zstandard.ZstdDecompressor().stream_reader(stream) as content,
        tarfile.open(fileobj=content, mode="r|") as tar,
    ):
        for info in tar:
            target = to / info.name
            target.parent.mkdir(parents=True, exist_ok=True)
            member = tar.extractfile(info)
            assert member is not None
            target.write_bytes(member.read())
            target.chmod(info.mode)
    return to / "top"


def repack(packed: Path, change: Callable[[tarfile.TarInfo, bytes], bytes | None]) -> None:
    """Write the archive anew with each member as `change` wants it; None leaves it out."""
    out = io.BytesIO()
    with (
        packed.open("rb") as stream,
        zstandard.ZstdDecompressor().stream_reader(stream) as content,
        tarfile.open(fileobj=content, mode="r|") as tar,
        tarfile.open(fileobj=out, mode="w") as new,
    ):
        for info in tar:
            member = tar.extractfile(info)
            assert member is not None
            changed = change(info, member.read())
            if changed is not None:
                info.size = len(changed)
                new.addfile(info, io.BytesIO(changed))
    packed.write_bytes(zstandard.compress(out.getvalue()))


def test_the_same_members_give_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    sha256 = archive.write(again, "top", reversed(MEMBERS))
    assert again.read_bytes() == packed.read_bytes()
    assert sha256 == SHA256(packed.read_bytes()).hexdigest()


def test_what_is_whole_passes_packed_and_unpacked(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive.check(packed) == Checked(3)
    folder = unpack(packed, tmp_path)
    assert archive.check(folder) == Checked(3)
    assert (folder / "inv").stat().st_mode & 0o777 == 0o755
    for left in ("results/runs", ".venv/bin", "toolchain/__pycache__", "board/__pycache__"):
        (folder / left).mkdir(parents=True)
        (folder / left / "x").touch()
    assert archive.check(folder).files == 3, "what using it leaves there is no change"
    bundle.check(packed, None)
    bundle.check(folder, None)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("b.tar.zst: 3 files as MANIFEST.sha256 says, no other")
    assert said[1].endswith("no other; not looked at: .venv, 2 __pycache__, results")
    done = subprocess.run(["sha256sum", "--quiet", "-c", MANIFEST], cwd=folder, check=False)
    assert done.returncode == 0, "coreutils alone can check it"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda info, old: old + b"x" if info.name == "top/inv" else old,
            r"1 of 3 .*: inv: changed",
        ),
        (lambda info, old: None if info.name == "top/a/b" else old, r"a/b: missing"),
    ],
)
def test_a_change_is_named(
    packed: Path, change: Callable[[tarfile.TarInfo, bytes], bytes | None], words: str
) -> None:
    repack(packed, change)
    with pytest.raises(Differs, match=words):
        archive.check(packed)


def test_a_file_that_nobody_named(packed: Path, tmp_path: Path) -> None:
    folder = unpack(packed, tmp_path)
    (folder / "more").touch()
    with pytest.raises(Differs, match=r"more: not in MANIFEST"):
        archive.check(folder)


def test_a_name_that_use_leaves_at_the_top_hides_nothing_elsewhere(
    packed: Path, tmp_path: Path
) -> None:
    folder = unpack(packed, tmp_path)
    (folder / "a" / "results").mkdir()
    (folder / "a" / "results" / "more").touch()
    (folder / "linked").symlink_to(tmp_path)
    with pytest.raises(Differs, match=r"a/results/more: not in .*; linked: not in MANIFEST"):
        archive.check(folder)


def test_a_link_in_the_place_of_a_file(packed: Path, tmp_path: Path) -> None:
    """Its bytes are right today, and somebody else's tomorrow."""
    folder = unpack(packed, tmp_path)
    (folder / "inv").rename(tmp_path / "inv")
    (folder / "inv").symlink_to(tmp_path / "inv")
    with pytest.raises(Differs, match=r"inv: changed: sha256 none: a symbolic link, expected"):
        archive.check(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[: len(content) // 2], "not a whole .tar.zst archive"),
        (lambda content: b"no archive", "not a whole .tar.zst archive"),
        (lambda content: b"", "not a whole|no MANIFEST"),
    ],
)
def test_what_is_no_bundle(packed: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    packed.write_bytes(damage(packed.read_bytes()))
    with pytest.raises(InvalidData, match=words):
        archive.check(packed)


def other_tar() -> bytes:
    """An archive as it may be put after another one: GNU tar -i unpacks both."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("top/evil"))
    return out.getvalue()


@pytest.mark.parametrize("frames", [1, 2], ids=["in its frame", "in a frame of its own"])
@pytest.mark.parametrize(
    "more",
    [other_tar(), b"\0" * 20_000 + other_tar(), b"trailing\n"],
    ids=["an archive", "an archive further behind", "a word"],
)
def test_what_stands_after_the_end_of_the_archive(packed: Path, more: bytes, frames: int) -> None:
    first = zstandard.ZstdDecompressor().stream_reader(packed.read_bytes()).read()
    contents = [first + more] if frames == 1 else [first, more]
    packed.write_bytes(b"".join(map(zstandard.compress, contents)))
    with pytest.raises(InvalidData, match=r"something stands after the end of the archive, .*anew"):
        archive.check(packed)


@pytest.mark.parametrize("more", [b"trailing\n", b"x", b"\0" * 4, zstandard.compress(b"x")[:5]])
def test_what_stands_after_the_last_frame(packed: Path, more: bytes) -> None:
    packed.write_bytes(packed.read_bytes() + more)
    with pytest.raises(InvalidData, match="something stands after the end of the archive"):
        archive.check(packed)


def test_the_end_of_the_archive_is_where_its_first_empty_block_is(packed: Path) -> None:
    """The reader has the whole record by then: what the rest of it says counts, too."""
    first = zstandard.ZstdDecompressor().stream_reader(packed.read_bytes()).read()
    end = len(first.rstrip(b"\0"))
    end += -end % 512 + 1024
    assert len(first) % tarfile.RECORDSIZE == 0
    assert end + 4 <= len(first), "the record is not full: other members are needed here"
    packed.write_bytes(zstandard.compress(first[:end] + b"evil" + first[end + 4 :]))
    with pytest.raises(InvalidData, match="something stands after the end of the archive"):
        archive.check(packed)
    packed.write_bytes(zstandard.compress(first[: end - 1024] + b"half a header"))
    with pytest.raises(InvalidData, match="something stands after the end of the archive"):
        archive.check(packed)
    packed.write_bytes(zstandard.compress(first + b"\0" * 50_000))
    assert archive.check(packed) == Checked(3), "more padding says nothing"


def test_an_archive_whose_last_byte_is_missing(packed: Path) -> None:
    packed.write_bytes(packed.read_bytes()[:-1])
    with pytest.raises(InvalidData, match=r"not a whole \.tar\.zst archive: it ends too early"):
        archive.check(packed)


def test_a_bundle_without_its_manifest(packed: Path) -> None:
    repack(packed, lambda info, old: None if info.name.endswith(MANIFEST) else old)
    with pytest.raises(InvalidData, match=f"no {MANIFEST} in it"):
        archive.check(packed)


def test_a_line_of_the_manifest_that_is_none(packed: Path) -> None:
    repack(packed, lambda info, old: b"abc\n" + old if info.name.endswith(MANIFEST) else old)
    with pytest.raises(InvalidData, match=r"MANIFEST\.sha256:1: got 'abc'"):
        archive.check(packed)


def test_a_member_that_would_leave_the_folder(packed: Path) -> None:
    def escape(info: tarfile.TarInfo, old: bytes) -> bytes:
        if info.name == "top/inv":
            info.name = "top/../inv"
        return old

    repack(packed, escape)
    with pytest.raises(InvalidData, match="not a plain file below one folder"):
        archive.check(packed)


def test_nothing_is_left_when_a_member_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match="gone: cannot read"):
        archive.write(tmp_path / "b", "top", [Member("x", tmp_path / "gone")])
    assert names(tmp_path) == set()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a@b", "-f", str(path)]
    subprocess.run(words, check=True)
    return path


def signers(key: Path, name: str = "author@example.org") -> Path:
    path = key.with_name("signers")
    path.write_text(f"{name} {key.with_suffix('.pub').read_text()}")
    return path


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen on this machine")
def test_a_signature(tmp_path: Path, key: Path) -> None:
    signed, plain = tmp_path / "signed", tmp_path / "plain"
    archive.write(signed, "top", MEMBERS, key)
    archive.write(plain, "top", MEMBERS)
    assert archive.check(signed, signers(key)) == Checked(3)
    with pytest.raises(Differs, match=f"{SIGNATURE} is missing: the bundle was not signed"):
        archive.check(plain, signers(key))
    other = b"0" * 64 + b"  inv\n"
    repack(signed, lambda info, old: other if info.name == f"top/{MANIFEST}" else old)
    with pytest.raises(Differs):
        archive.check(signed, signers(key))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen on this machine")
def test_a_signature_of_somebody_else(tmp_path: Path, key: Path) -> None:
    signed = tmp_path / "signed"
    archive.write(signed, "top", MEMBERS, key)
    key.unlink()
    key.with_suffix(".pub").unlink()
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a@b", "-f", str(key)]
    subprocess.run(words, check=True)
    with pytest.raises(Differs, match="of none of the signers"):
        archive.check(signed, signers(key))


# --- refusals of the verb -----------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_a_changed_clone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)

    git("init", "-q")
    (tmp_path / "file").touch()
    git("add", "file")
    git("commit", "-qm", "one")
    (tmp_path / "other").touch()
    monkeypatch.setattr(bundle, "REPO", tmp_path)
    with pytest.raises(UsageError, match=r"has changes that are in no commit \(\?\? other"):
        bundle.bundle(tmp_path / "out", None)
    with pytest.raises(UsageError, match=r"has changes that are in no commit"):
        bundle.write_bill(tmp_path / "bom.cdx.json")
    assert names(tmp_path) == {".git", "file", "other"}


def test_an_unpacked_bundle_makes_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    with pytest.raises(EnvironmentUnfit, match="this is an unpacked bundle"):
        bundle.bundle(tmp_path / "out", None)


def test_what_to_check_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        bundle.check(tmp_path / "nothing", None)


@pytest.mark.parametrize("name", ["nobody", "."])
def test_signers_that_are_no_file(packed: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"--signers .*: no such file, expected an allowed-sign"):
        bundle.check(packed, tmp_path / name)


# --- what a committee reads first ----------------------------------------------------------------


def test_runs_are_packed_with_their_page(tmp_path: Path) -> None:
    """Unpacked, they are a results folder that gives the same verdicts."""
    results = tmp_path / "results"
    cells = [synthetic.cell(policy, 2, seed) for policy in ("baseline", "vhot") for seed in (1, 2)]
    synthetic.write(results, [synthetic.record(cell) for cell in cells])
    made = [[*bundle._results(results), *bundle._report(results)] for _ in range(2)]
    sums = [archive.write(tmp_path / str(n), "top", members) for n, members in enumerate(made)]
    assert sums[0] == sums[1]
    folder = unpack(tmp_path / "0", tmp_path) / "bundle"
    assert (folder / "report" / "appendix.pdf").read_bytes().startswith(b"%PDF")
    again = analyze.analysed([folder / "results"], skip_invalid=True, any_commit=True)
    page = (folder / "report" / "index.html").read_text()
    assert again.document["runs"]["valid"] == 4
    assert "4 valid runs" in page
    assert json.loads((folder / "report" / "verdicts.json").read_text()) == again.document


def test_without_runs_the_page_audits_the_printed_numbers() -> None:
    names = {member.name for member in (*bundle._results(None), *bundle._report(None))}
    assert {"bundle/report/index.html", "bundle/report/appendix.md"} <= names
    assert not any(name.startswith("bundle/results/") for name in names)


def test_what_is_no_results_folder_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        list(bundle._report(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"not a results folder \(no index\.json in it\)"):
        list(bundle._report(tmp_path / "empty"))


# --- an unpacked bundle, offline ----------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    mirror = Mirror()
    yield make_checkout(tmp_path / "checkout", tmp_path / "home", mirror)
    mirror.stop()


def test_packages_come_from_the_bundle(checkout: Checkout) -> None:
    for tree in ("build", "guest"):
        checkout.add_package(f"p-{tree}", small_deb(f"p-{tree}"), tree)
    folder = checkout.root / "bundle" / "downloads"
    folder.mkdir(parents=True)
    for row in checkout.rows:
        (folder / row[-1]).write_bytes(checkout.mirror.files[row[5]])
    checkout.mirror.files.clear()
    done = checkout.run("fetch")
    assert done.code == 0, done.err
    assert names(checkout.downloads) == {row[-1] for row in checkout.rows}
    assert checkout.mirror.requests == []


def test_a_damaged_package_of_the_bundle_is_fetched(checkout: Checkout) -> None:
    for tree in ("build", "guest"):
        checkout.add_package(f"p-{tree}", small_deb(f"p-{tree}"), tree)
    folder = checkout.root / "bundle" / "downloads"
    folder.mkdir(parents=True)
    sha256 = checkout.rows[0][-1]
    (folder / sha256).write_bytes(b"damaged")
    done = checkout.run("fetch")
    assert done.code == 0, done.err
    assert "the download in the cache is damaged; fetching it anew" in done.err
    assert SHA256((checkout.downloads / sha256).read_bytes()).hexdigest() == sha256

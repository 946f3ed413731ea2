"""toolchain.image: the archive's bytes, read back with tarfile; test_docker.py asks an engine."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from toolchain.errors import InvalidData, UsageError
from toolchain.image import Config, Digest, Image, tree_entries, write

LONG = "a-directory-with-a-long-name/" * 5


def _tree(root: Path) -> Path:
    """A tree with all that a pinned tree may hold; its times are set, its modes are not ours."""
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "usr" / "bin" / "sh").write_bytes(b"#!" * 700)
    (root / "usr" / "bin" / "sh").chmod(0o755)
    (root / "usr" / "bin" / "bash").hardlink_to(root / "usr" / "bin" / "sh")
    (root / "usr" / "t\xe4st").write_text("not ASCII")
    (root / LONG).mkdir(parents=True)
    (root / LONG / "file").write_bytes(b"")
    (root / "tmp").mkdir()
    for directory, names, files in os.walk(root, topdown=False):
        for name in (*names, *files):
            os.utime(Path(directory, name), (1, 1700000000), follow_symlinks=False)
    return root


def _write(tree: Path, *args: object, **named: object) -> tuple[Image, bytes]:
    out = io.BytesIO()
    image = write(out, "made-here:1", tree, *args, **named)  # type: ignore[arg-type]
    return image, out.getvalue()


def _members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {
            member.name: stream.read()
            for member in tar.getmembers()
            if (stream := tar.extractfile(member)) is not None
        }


def test_the_same_tree_elsewhere_gives_the_same_archive(tmp_path: Path) -> None:
    files = {"/opt/x/program": tmp_path / "program", "/etc/note": b"text"}
    (tmp_path / "program").write_text("x")
    (tmp_path / "program").chmod(0o700)
    first = _write(_tree(tmp_path / "a"), files, Config(labels={"b": "1", "a": "2"}))
    (tmp_path / "program").chmod(0o711)
    os.utime(tmp_path / "program", (5, 5))
    old = os.umask(0o077)
    try:
        other = _tree(tmp_path / "somewhere else" / "b")
        for path in other.rglob("*"):  # made with another umask; the tree's modes count
            if not path.is_symlink():
                path.chmod((tmp_path / "a" / path.relative_to(other)).stat().st_mode)
    finally:
        os.umask(old)
    second = _write(other, dict(reversed(files.items())), Config(labels={"a": "2", "b": "1"}))
    assert first == second


def test_what_the_archive_holds(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "tree")
    config = Config(("sh", "-c", "id"), {"B": "2", "A": "1"}, "/build", {"l": "v"})
    image, archive = _write(tree, {"/usr/bin/new": b"n", "/srv/deep/file": b"f"}, config)
    members = _members(archive)
    (manifest,) = json.loads(members["manifest.json"])
    assert manifest == {
        "Config": f"{image.config_sha256}.json",
        "RepoTags": ["made-here:1"],
        "Layers": ["0.tar", "1.tar"],
    }
    text = members[manifest["Config"]]
    assert hashlib.sha256(text).hexdigest() == image.config_sha256
    document = json.loads(text)
    assert document["config"] == {
        "Cmd": ["sh", "-c", "id"],
        "Env": ["A=1", "B=2"],
        "WorkingDir": "/build",
        "Labels": {"l": "v"},
    }
    assert len(document["history"]) == 2
    digests = tuple(hashlib.sha256(members[name]).hexdigest() for name in manifest["Layers"])
    assert digests == image.layers_sha256
    assert document["rootfs"]["diff_ids"] == [f"sha256:{digest}" for digest in digests]

    with tarfile.open(fileobj=io.BytesIO(members["0.tar"])) as layer:
        seen = {member.name: member for member in layer.getmembers()}
        assert set(seen) == {p.relative_to(tree).as_posix() for p in tree.rglob("*")}
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in seen.values()} == {
            (0, 0, "", "", 1700000000)
        }
        assert seen["bin"].issym() and seen["bin"].linkname == "usr/bin"
        assert seen["usr/bin/bash"].isreg() and seen["usr/bin/sh"].islnk()
        assert seen["usr/bin/sh"].linkname == "usr/bin/bash"
        assert seen["usr/bin/bash"].mode == 0o755
        assert (stream := layer.extractfile("usr/bin/sh")) and stream.read() == b"#!" * 700
    with tarfile.open(fileobj=io.BytesIO(members["1.tar"])) as layer:
        assert layer.getnames() == ["srv", "srv/deep", "srv/deep/file", "usr/bin/new"]


def test_a_change_anywhere_is_another_digest(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "tree")
    before = _write(tree)[0]
    (tree / "usr" / "t\xe4st").write_text("not ascii")
    os.utime(tree / "usr" / "t\xe4st", (1, 1700000000))
    changed = _write(tree)[0]
    assert changed.layers_sha256 != before.layers_sha256
    assert changed.config_sha256 != before.config_sha256
    (tree / "tmp").chmod(0o700)
    assert _write(tree)[0].layers_sha256 != changed.layers_sha256
    other = _write(tree, None, Config(environment={"A": "1"}))[0]
    assert other.layers_sha256 == _write(tree)[0].layers_sha256
    assert other.config_sha256 != _write(tree)[0].config_sha256


@pytest.mark.parametrize("name", ["relative", "/", "/../x", "/bin/x", "/usr/bin/sh/x"])
def test_a_path_that_the_image_cannot_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        _write(_tree(tmp_path / "tree"), {name: b""})


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "tree")

    class Grows(Digest):
        def write(self, data: bytes, /) -> None:
            (tree / "usr" / "t\xe4st").write_text("not ASCII any longer")
            super().write(data)

    with pytest.raises(InvalidData, match="changed while the image was written"):
        write(Grows(), "made-here:1", tree)


def test_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither file, directory nor symbolic link"):
        list(tree_entries(tmp_path))

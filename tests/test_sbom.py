"""artifact.sbom: a bill that names everything, states licences as found, and is CycloneDX."""

import email
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schemas
from artifact import binaries, bundle, sbom
from toolchain import lock, recipe
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.lock import Package, read_lock
from toolchain.paths import REPO

DEP5 = """Format: copyright-format/1.0
Files: *
License: GPL-2+
 the text, which says License: nothing

Files: debian/*
License:  Expat

License: Redistribution and use in source and binary forms, with or without modification, are
"""
OLD = (
    "On Debian systems: `/usr/share/common-licenses/LGPL-2.1', /usr/share/common-licenses/GPL-3.\n"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (DEP5, ["Expat", "GPL-2+"]),
        (OLD, ["GPL-3", "LGPL-2.1"]),
        (DEP5.replace("License:", "Licence:") + OLD, ["GPL-3", "LGPL-2.1"]),
        ("Licensed in prose.  License: none of these\n", []),
    ],
)
def test_licences_of_a_debian_package(text: str, names: list[str]) -> None:
    assert sbom.debian_licences(text) == names


@pytest.mark.parametrize(
    ("header", "stated"),
    [
        (
            "License-Expression: MIT OR GPL-2.0-only\nLicense: x",
            [{"expression": "MIT OR GPL-2.0-only"}],
        ),
        ("License: BSD-2-Clause", [{"license": {"id": "BSD-2-Clause"}}]),
        ("License: PSFL", [{"license": {"name": "PSFL"}}]),
        (
            "License: a licence whose whole text is in this one field, which is not what it is for"
            "\nClassifier: License :: OSI Approved :: BSD License\nClassifier: Topic :: License",
            [{"license": {"name": "BSD License"}}],
        ),
        ("Name: x", []),
    ],
)
def test_licences_of_a_wheel(header: str, stated: list[dict[str, Any]]) -> None:
    assert sbom.licences(sbom.wheel_licences(email.message_from_string(header))) == stated


def _wheel(path: Path, metadata: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a_b-1.0.dist-info/METADATA", metadata)
    return path


def test_a_wheel_and_what_is_none(tmp_path: Path) -> None:
    path = _wheel(tmp_path / "a_b-1.0-py3-none-any.whl", "Name: A.b\nVersion: 1.0+c\n")
    component = sbom.wheel_component(path)
    assert (component["name"], component["version"]) == ("A.b", "1.0+c")
    assert component["purl"] == "pkg:pypi/a.b@1.0%2Bc"
    assert component["licenses"] == [{"license": {"name": "not stated"}}]
    path.write_bytes(b"no archive")
    with pytest.raises(InvalidData, match="not a wheel"):
        sbom.wheel_component(path)
    with pytest.raises(EnvironmentUnfit, match="cannot read"):
        sbom.wheel_component(tmp_path / "gone.whl")


def test_what_is_not_cyclonedx_is_refused() -> None:
    whole = {"bomFormat": "CycloneDX", "specVersion": "1.6"}
    sbom.validate(json.dumps(whole))
    for wrong in (
        {**whole, "surprise": 1},
        {**whole, "components": [{"type": "library"}]},
        {
            **whole,
            "components": [
                {"type": "library", "name": "a", "licenses": [{"license": {"id": "My-Own"}}]}
            ],
        },
    ):
        with pytest.raises(InvalidData, match=r"not CycloneDX 1\.6"):
            sbom.validate(json.dumps(wrong))


def test_what_is_trusted_is_in_the_bill_and_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPO / "docs" / "bytes.md").read_text()
    entries = schemas.read_toml(sbom.TRUSTED, "trusted")
    for entry in (*entries["trusted"], *entries["by_hash_only"]):
        assert entry["name"] in text, "docs/bytes.md lists what trusted.toml has"
    assert len(sbom.trusted()) == len(entries["trusted"]) + len(entries["by_hash_only"])
    (tmp_path / "trusted.toml").write_text(sbom.TRUSTED.read_text().replace("lessen", "less", 1))
    monkeypatch.setattr(sbom, "TRUSTED", tmp_path / "trusted.toml")
    with pytest.raises(InvalidData, match=r"trusted\.toml.*less"):
        sbom.trusted()


def _check(document: dict[str, Any], rows: list[Package], wheel: Path) -> dict[str, Any]:
    """What holds for any bill; returns the components by reference."""
    components = {each["bom-ref"]: each for each in document["components"]}
    assert len(components) == len(document["components"])
    known = {sha["content"] for each in components.values() for sha in each.get("hashes", [])}
    assert {package.sha256 for package in rows} <= known
    for artifact, entry in binaries.read()["artifacts"].items():
        for name, file in entry["files"].items():
            if not name.endswith(binaries.EMBEDDED):
                hashes = components[f"built:{artifact}/{name}"]["hashes"]
                assert hashes == [{"alg": "SHA-256", "content": file["sha256"]}]
    empty = {f"tree:{tree}" for tree in lock.trees()} - {f"tree:{row.tree}" for row in rows}
    assert {ref for ref, each in components.items() if not each.get("licenses")} == empty
    stated = {
        ref: {
            row["license"].get("id", row["license"].get("name"))
            for row in components[ref]["licenses"]
        }
        for ref in (
            "built:llama.cpp/server-riscv64/llama-server",
            "built:board/bystander/bystander",
            "built:board/initramfs/initramfs.cpio",
        )
    }
    assert stated["built:llama.cpp/server-riscv64/llama-server"] >= {"MIT", "GPL-2.0-only"}
    assert "MIT" not in stated["built:board/bystander/bystander"], "it has its own, and libc's"
    assert "LGPL-2.1+" in stated["built:board/initramfs/initramfs.cpio"], "what is in the guest"
    for row in document["dependencies"]:
        assert {row["ref"], *row["dependsOn"]} <= set(components)
    made = {row["ref"]: set(row["dependsOn"]) for row in document["dependencies"]}
    server = made["built:llama.cpp/server-riscv64/llama-server"]
    assert server == {"tree:build", "source:llama-cpp"}
    assert "built:kernel/image/vmlinux.btf" in made["built:kernel/vstate-observer/vstate_observer"]
    libc = next(row for ref, row in components.items() if ref.startswith("deb:libc6:riscv64:"))
    assert {"license": {"id": "LGPL-2.1+"}} in libc["licenses"]
    assert f"wheel:{wheel.name}" in components
    assert document["metadata"]["component"]["version"] == "c0ffee"
    return components


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return _wheel(tmp_path / "a_b-1.0-py3-none-any.whl", "Name: a-b\nVersion: 1.0\n")


@pytest.mark.boot
def test_the_bill_of_what_is_built_here(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the trees that builds see; those of tests and of other kernels are in the long one."""
    rows = [package for package in read_lock() if package.tree in binaries.trees()]
    usual = {name: each for name, each in recipe.recipes().items() if not each.on_demand}
    monkeypatch.setattr(sbom, "read_lock", lambda: rows)
    monkeypatch.setattr(recipe, "recipes", lambda: usual)
    content = sbom.bill("c0ffee", [wheel])
    _check(json.loads(content), rows, wheel)
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert sbom.bill("c0ffee", [Path(shutil.copy(wheel, other))]) == content
    assert sbom.bill("c0ffef", [wheel]) != content
    texts = sbom.licence_texts()
    assert any(b"GNU C Library" in path.read_bytes() for path in texts.values())
    assert b"GNU GENERAL PUBLIC LICENSE" in texts["common-licenses/GPL-2"].read_bytes()
    assert all(path.is_file() for path in texts.values())


@pytest.mark.long
def test_the_whole_bill(wheel: Path) -> None:
    components = _check(json.loads(sbom.bill("c0ffee", [wheel])), read_lock(), wheel)
    assert "built:kernel/stock-image/Image" in components


def test_a_package_that_is_not_linked_because_it_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = replace(recipe.recipes()["board/burn"], artifact="board/odd", links=("libc6:vax",))
    monkeypatch.setattr(recipe, "recipes", lambda: {"board/odd": own})
    with pytest.raises(InvalidData, match=r"\[odd\]: links: tree build has no 'libc6:vax'"):
        sbom._of_built("board/odd")


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        bundle.write_bill(tmp_path / "none" / "bom.cdx.json")

"""artifact/expected/binaries.json: the bytes everybody is to get, and what decided them.

Promise: every output of every recipe, every model and every pinned tree is in it with its sha256
and with each input that decided it, so that a difference can be told from a change of inputs.
Limit: it says nothing of test results (runs.json, verdicts.json), nor of what is built on demand.
Of the container of x86-compare it has the tree and each file put above it, not the layer they make.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from board import models
from board.cell import Definitions
from toolchain import cache, lock, recipe
from toolchain.docker_driver import image_digests
from toolchain.errors import Differs
from toolchain.image import layer_bytes, tree_entries
from toolchain.nix_driver import busybox_digest
from toolchain.paths import REPO
from toolchain.rootfs import rootfs, tree_inputs

EXPECTED = REPO / "artifact" / "expected" / "binaries.json"
MODEL = "model"
BPF_MACHINE = 247
EMBEDDED = "!bpf.o"
OTHER_TREES = frozenset({"hostile", "x86"})
"""What no recipe looks into: verify's clock and processor, and the container of x86-compare."""


@dataclass(frozen=True)
class File:
    """The bytes of one file."""

    sha256: str
    size_bytes: int


def read(path: Path = EXPECTED) -> dict[str, Any]:
    """Return the expected binaries (schemas/binaries.schema.json); raises InvalidData."""
    document: dict[str, Any] = schemas.read(path, "binaries")
    return document


def artifacts() -> list[str]:
    """Return all that is built: recipes, needed ones first, then models as model/NAME."""
    order: list[str] = []
    known = recipe.recipes()

    def add(name: str) -> None:
        for need in known[name].needs:
            add(need)
        if name not in order:
            order.append(name)

    for name in sorted(name for name in known if not known[name].on_demand):
        add(name)
    return [*order, *(f"{MODEL}/{name}" for name in Definitions.read().models)]


def trees() -> list[str]:
    """Return the pinned trees that builds see, and those of OTHER_TREES that there are."""
    known = [each for each in recipe.recipes().values() if not each.on_demand]
    seen = {"build", *(tree for each in known for tree in each.trees)}
    return sorted(seen | (OTHER_TREES & set(lock.trees())))


def inputs(artifact: str, needed: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return what decides the artifact's bytes: name of an input -> its sha256 or value.

    needed: artifact -> file -> sha256 of each artifact it needs.
    """
    room, _, name = artifact.partition("/")
    if room == MODEL:
        return dict(_flat(models.inputs(name)))
    return dict(_flat(recipe.inputs(recipe.recipes()[artifact], needed)))


def _flat(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key} ")
        elif key != "artifact" or above:
            yield f"{above}{key}", ", ".join(value) if isinstance(value, list) else str(value)


def files(directory: Path) -> dict[str, File]:
    """Return what a build left, and each BPF object that a loader carries as LOADER!bpf.o."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.name != cache.MANIFEST:
            content = path.read_bytes()
            found[path.name] = _file(content)
            embedded = bpf_object(content)
            if embedded is not None:
                found[path.name + EMBEDDED] = _file(embedded)
    return found


def content(directory: Path, name: str) -> bytes:
    """Return the bytes of a file that `files` names."""
    whole = (directory / name.removesuffix(EMBEDDED)).read_bytes()
    embedded = bpf_object(whole) if name.endswith(EMBEDDED) else whole
    assert embedded is not None, f"{name} was named by files()"
    return embedded


def bpf_object(content: bytes) -> bytes | None:
    """Return the first BPF object within a program (its skeleton's), or None."""
    if not content.startswith(b"\x7fELF"):
        return None  # an archive is no program
    at = 0
    while (at := content.find(b"\x7fELF\x02\x01\x01", at + 1)) > 0:
        header = content[at : at + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == BPF_MACHINE:
            table, entry_bytes, count = (
                struct.unpack_from("<Q", header, 40)[0],
                *struct.unpack_from("<HH", header, 58),
            )
            return content[at : at + table + entry_bytes * count]  # libelf writes the table last
    return None


def _file(content: bytes) -> File:
    return File(hashlib.sha256(content).hexdigest(), len(content))


def ordinary(artifact: str) -> Path:
    """Return the directory of the ordinary build, from the cache or made now."""
    room, _, name = artifact.partition("/")
    return models.model(name).parent if room == MODEL else recipe.build(artifact)


def needed(artifact: str) -> dict[str, dict[str, str]]:
    """Return artifact -> file -> sha256 of the ordinary builds of what `artifact` needs."""
    room, _, _ = artifact.partition("/")
    names = () if room == MODEL else recipe.recipes()[artifact].needs
    return {name: cache.manifest(recipe.build(name)) for name in names}


def accepted(artifact: str, expected: Mapping[str, Any]) -> dict[str, str]:
    """Return file -> sha256 of what binaries.json has of the artifact; no BPF object by itself."""
    files = expected["artifacts"][artifact]["files"]
    return {name: file["sha256"] for name, file in files.items() if not name.endswith(EMBEDDED)}


def refuse_trees_of_others() -> None:
    """Raise Differs when flake.nix, which reads binaries.json, asks for other trees than ours."""
    known = read()
    moved = [
        tree
        for tree in set(trees()) - OTHER_TREES
        if known["trees"].get(tree, {}).get("layer_sha256") != image_digests(tree).layers_sha256[0]
    ]
    if moved or known["busybox_nar_sha256"] != busybox_digest():
        raise Differs(
            f"tree {', '.join(sorted(moved)) or 'build'}: the store has what this checkout's lock "
            f"says, flake.nix asks for that of {EXPECTED.name}: ./inv verify --accept"
        )


def describe() -> dict[str, Any]:
    """Return binaries.json as the ordinary builds say, building what is missing."""
    described = {}
    for artifact in artifacts():
        directory = ordinary(artifact)
        described[artifact] = {
            "inputs": inputs(artifact, needed(artifact)),
            "files": {name: vars(file) for name, file in files(directory).items()},
        }
    return {
        "schema_version": "1",
        "busybox_nar_sha256": busybox_digest(),
        "trees": {tree: _tree(tree) for tree in trees()},
        "artifacts": described,
    }


def _tree(tree: str) -> dict[str, Any]:
    image = image_digests(tree)
    return {
        "inputs": tree_inputs(tree),
        "layer_sha256": image.layers_sha256[0],
        "layer_bytes": layer_bytes(tree_entries(rootfs(tree))),
        "config_sha256": image.config_sha256,
    }


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the inputs that differ, in words."""
    words = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            words.append(f"{name} is new")
        elif name not in new:
            words.append(f"{name} is gone")
        elif old[name] != new[name]:
            words.append(f"{name} changed")
    return words

"""`./inv sbom`, and part of every bundle: the bill of materials, as CycloneDX 1.6 JSON.

Promise: each package of the lock, source pin, Python package, pinned tree and built file is a
component with its sha256, and says what it came of; licences are those that the things state of
themselves; what is trusted (trusted.toml) is in it, too.  The same checkout gives the same bytes,
which are held against the specification's strict schema before anybody sees them.
Limit: a Debian package's licences are all those its copyright file names, also of files that are in
its source only; names are Debian's where SPDX has no such identifier.  It says nothing of
vulnerabilities.
"""

import email
import functools
import hashlib
import json
import re
import urllib.parse
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.spdx import is_expression, is_supported_id
from cyclonedx.validation.json import JsonStrictValidator

import schemas
from artifact import binaries
from board.cell import Definitions
from board.models import FILE
from toolchain import cache, recipe
from toolchain.docker_driver import image_digests
from toolchain.errors import InvalidData, cannot_read
from toolchain.lock import Package, read_lock, trees
from toolchain.paths import REPO
from toolchain.rootfs import rootfs, tree_key
from toolchain.sources import DEBIAN, Source, sources

TRUSTED = REPO / "artifact" / "trusted.toml"
OWN_LICENCE = "GPL-2.0-only"
NAME_CHARACTERS = 60
"""A longer "name" of a licence is a text whose author left out the name."""
MACHINE_READABLE = re.compile(r"\s*Format(-Specification)?:", re.IGNORECASE)
LICENCE = re.compile(r"^License:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9+])")
Component = dict[str, Any]


def bill(commit: str, wheels: Sequence[Path]) -> bytes:
    """Return the bill of this checkout at `commit`; builds and unpacks what it must describe.

    wheels: the Python packages that are shipped along.  Raises InvalidData when a description is
    damaged, or when what came out is not CycloneDX.
    """
    components: list[Component] = [
        *(package_component(group) for group in _packages().values()),
        *(_source(pin) for pin in sources().values()),
        *(wheel_component(path) for path in wheels),
        *(_tree(tree) for tree in trees()),
        *_built(),
    ]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "bananaos",
                "name": "bananaos-artifact",
                "version": commit,
                "licenses": licences([OWN_LICENCE]),
            },
            "properties": trusted(),
        },
        "components": sorted(components, key=lambda each: str(each["bom-ref"])),
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(of)} for ref, of in sorted(_dependencies().items())
        ],
    }
    # A name for this bill and no other, as the specification wants, but no random one.
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, digest).urn
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    validate(text)
    return text.encode()


def validate(text: str) -> None:
    """Raise InvalidData when `text` is not CycloneDX 1.6."""
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise InvalidData(f"bill of materials: not CycloneDX 1.6: {str(wrong).splitlines()[0]}")


def trusted() -> list[dict[str, str]]:
    """Return what is trusted, and what is not, as properties."""
    document = schemas.read_toml(TRUSTED, "trusted")
    found = []
    for entry in document["trusted"]:
        text = f"{entry['name']}: {entry['why']}; to rely on it less: {entry['lessen']}"
        found.append({"name": "bananaos:trusted", "value": text})
    for entry in document["by_hash_only"]:
        text = f"{entry['name']}: {entry['how']}"
        found.append({"name": "bananaos:taken-by-hash-only", "value": text})
    return found


# --- licences ---------------------------------------------------------------------------------


def licences(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return licence names in CycloneDX's form: SPDX where it is one."""
    if len(names) == 1 and not is_supported_id(names[0]) and is_expression(names[0]):
        return [{"expression": names[0]}]
    return [
        {"license": {"id" if is_supported_id(name) else "name": name}}
        for name in dict.fromkeys(names)
    ]


def debian_licences(text: str) -> list[str]:
    """Return the licence names of a Debian copyright file, sorted.

    Machine-readable ones (DEP 5) have fields; of others, and of those whose fields hold no name,
    the common licences they refer to.
    """
    fields = LICENCE.findall(text) if MACHINE_READABLE.match(text) else []
    names = {" ".join(name.split()) for name in fields} or set(COMMON.findall(text))
    return sorted(name for name in names if len(name) <= NAME_CHARACTERS)


def wheel_licences(metadata: Message) -> list[str]:
    """Return the licences that a wheel's METADATA states, in the order of their worth."""
    expression = metadata.get("License-Expression")
    if expression is not None:
        return [str(expression)]
    # Some put the whole text into this field.
    name = str(metadata.get("License") or "").strip()
    if name and "\n" not in name and len(name) <= NAME_CHARACTERS:
        return [name]
    rows = [str(row).split(" :: ") for row in metadata.get_all("Classifier", [])]
    return sorted({row[-1] for row in rows if row[0] == "License"})


def copyright_file(package: Package) -> Path | None:
    """Return the package's copyright file within its tree; None if it came with one left out."""
    tree = rootfs(package.tree)
    path = tree / "usr" / "share" / "doc" / package.name / "copyright"
    # Links between packages' folders are relative; what is not in the tree is not the host's.
    found = path.resolve()
    return found if found.is_relative_to(tree.resolve()) and found.is_file() else None


def licence_texts() -> dict[str, Path]:
    """Return file name -> copyright file, each text once, and the licences they refer to."""
    texts: dict[str, Path] = {}
    seen: set[str] = set()
    for package in read_lock():
        path = copyright_file(package)
        digest = _sha256(path) if path is not None else ""
        if path is not None and digest not in seen:
            seen.add(digest)
            texts[f"{package.name}-{digest[:8]}.copyright"] = path
    common = rootfs("build") / "usr" / "share" / "common-licenses"
    for path in sorted(common.iterdir()):
        texts[f"common-licenses/{path.name}"] = path
    return texts


# --- components -------------------------------------------------------------------------------


@functools.cache
def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _properties(**values: str) -> list[dict[str, str]]:
    return [{"name": f"bananaos:{name}", "value": value} for name, value in values.items()]


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe=":~")


def _packages() -> dict[str, list[Package]]:
    """The lock's packages by sha256: several trees may have the same."""
    found: dict[str, list[Package]] = {}
    for package in read_lock():
        found.setdefault(package.sha256, []).append(package)
    return found


def _ref(package: Package) -> str:
    return f"deb:{package.name}:{package.architecture}:{package.version}"


@functools.cache
def _stated(sha256: str) -> tuple[str, ...]:
    """The licences that the locked package of this sha256 states."""
    rows = _packages()[sha256]
    path = _copyright(rows)
    names = debian_licences(path.read_text(errors="replace")) if path is not None else []
    return tuple(names) or (
        f"see the copyright file of Debian's source package {_source_package(rows[0])}",
    )


def _copyright(rows: Sequence[Package]) -> Path | None:
    """The first copyright file that one of a package's trees has of it."""
    return next(filter(None, map(copyright_file, rows)), None)


def _source_package(package: Package) -> str:
    return package.pool_path.split("/")[-2]


def _of_tree(tree: str) -> set[str]:
    return {name for p in read_lock() if p.tree == tree for name in _stated(p.sha256)}


@functools.cache
def _of_built(artifact: str) -> frozenset[str]:
    """The licences of all that gets into a built file: ours, sources, packages, other files.

    Raises InvalidData for a recipe that names a package which its tree has not.
    """
    room, _, model = artifact.partition("/")
    pins = sources()
    if room == binaries.MODEL:
        return frozenset({pins[model].licence if model in pins else OWN_LICENCE})
    own = recipe.recipes()[artifact]
    names = {OWN_LICENCE, *(pins[name].licence for name in own.sources)}
    names |= {name for tree in own.trees for name in _of_tree(tree)}
    names |= {name for need in own.needs for name in _of_built(need)}
    packages = {f"{p.name}:{p.architecture}": p for p in read_lock() if p.tree == "build"}
    for link in own.links:
        if link not in packages:
            raise InvalidData(
                f"{own.room / 'recipe.toml'}: [{own.name}]: links: tree build has no {link!r}"
            )
        names |= set(_stated(packages[link].sha256))
    return frozenset(names)


def package_component(rows: Sequence[Package]) -> Component:
    """Return the component of a package, given its rows of the lock, one for each tree."""
    package = rows[0]
    path = _copyright(rows)
    distro = f"{_quoted(package.version)}?arch={package.architecture}&distro={package.archive}"
    return {
        "type": "library",
        "bom-ref": _ref(package),
        "name": package.name,
        "version": package.version,
        "hashes": _hashes(package.sha256),
        "licenses": licences(_stated(package.sha256)),
        "purl": f"pkg:deb/debian/{_quoted(package.name)}@{distro}",
        "properties": _properties(
            source=_source_package(package),
            trees=", ".join(row.tree for row in rows),
            **({"copyright_sha256": _sha256(path)} if path is not None else {}),
        ),
    }


def _source(pin: Source) -> Component:
    kind = "deb/debian" if pin.kind == DEBIAN else "pypi"
    suffix = "?arch=source" if pin.kind == DEBIAN else ""
    return {
        "type": "library",
        "bom-ref": f"source:{pin.name}",
        "name": pin.package,
        "version": pin.version,
        "hashes": _hashes(pin.sha256),
        "licenses": licences([pin.licence]),
        "purl": f"pkg:{kind}/{_quoted(pin.package)}@{_quoted(pin.version)}{suffix}",
        "properties": _properties(kind=pin.kind),
    }


def wheel_component(path: Path) -> Component:
    """Return the component of a wheel, by its own METADATA.

    Raises InvalidData for what is no wheel, EnvironmentUnfit for what cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(name))
        sha256 = _sha256(path)
    except OSError as exc:
        raise cannot_read(path, exc) from exc
    except (zipfile.BadZipFile, ValueError) as exc:
        raise InvalidData(f"{path}: not a wheel: {exc}; remove it and run this again") from exc
    package, version = str(metadata["Name"]), str(metadata["Version"])
    return {
        "type": "library",
        "bom-ref": f"wheel:{path.name}",
        "name": package,
        "version": version,
        "hashes": _hashes(sha256),
        "licenses": licences(wheel_licences(metadata) or ["not stated"]),
        "purl": f"pkg:pypi/{_quoted(package.lower())}@{_quoted(version)}",
    }


def _tree(tree: str) -> Component:
    component: Component = {
        "type": "container",
        "bom-ref": f"tree:{tree}",
        "name": f"bananaos-{tree}",
        "version": tree_key(tree)[:16],
        "description": "packages unpacked side by side, under a key of all that decides the tree",
        "licenses": licences(sorted(_of_tree(tree))),
    }
    if tree not in binaries.trees():  # of the others nobody needs an image
        return component
    image = image_digests(tree)
    return component | {
        "description": "packages unpacked side by side; the sha256 is that of its archive, which "
        "is the one layer of its image",
        "hashes": _hashes(image.layers_sha256[0]),
        "properties": _properties(config_sha256=image.config_sha256),
    }


def _built() -> Iterator[Component]:
    artifacts = [*recipe.recipes(), *(f"{binaries.MODEL}/{n}" for n in Definitions.read().models)]
    for artifact in artifacts:
        for name, sha256 in cache.manifest(binaries.ordinary(artifact)).items():
            yield {
                "type": "file",
                "bom-ref": f"built:{artifact}/{name}",
                "name": f"{artifact}/{name}",
                "hashes": _hashes(sha256),
                "licenses": licences(sorted(_of_built(artifact))),
            }


def _dependencies() -> Mapping[str, set[str]]:
    """Return what each tree holds and what each built file was made of."""
    found: dict[str, set[str]] = {}
    for package in read_lock():
        found.setdefault(f"tree:{package.tree}", set()).add(_ref(package))
    files = {name: list(cache.manifest(recipe.build(name))) for name in recipe.recipes()}
    for artifact, own in recipe.recipes().items():
        of = {f"tree:{tree}" for tree in ("build", *own.trees)}
        of |= {f"source:{name}" for name in own.sources}
        of |= {f"built:{need}/{file}" for need in own.needs for file in files[need]}
        found |= {f"built:{artifact}/{file}": of for file in files[artifact]}
    for name in set(Definitions.read().models) & set(sources()):
        found[f"built:{binaries.MODEL}/{name}/{FILE}"] = {f"source:{name}"}
    return found

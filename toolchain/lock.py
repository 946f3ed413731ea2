"""debian.lock: every package of the pinned trees, by name, version, pool path, size, sha256.

Promise: reading refuses anything that is not exactly the documented table; `relock` resolves
packages.toml with the machine's own apt in private directories, so that neither the machine's
packages nor its configuration leak into the result.
Limit: relocking needs a Debian host (apt-get and its archive keyring); using the lock does not.
"""

import csv
import fnmatch
import io
import re
import tempfile
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from debian.deb822 import Packages

from toolchain.command import run
from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.paths import REPO
from toolchain.tomlfile import read_toml

LOCK = REPO / "toolchain" / "debian.lock"
WANTED = REPO / "toolchain" / "packages.toml"
# apt-get -s prints: Inst NAME[:ARCH] (VERSION Debian:13.8/stable [ARCH])
INSTALLED = re.compile(r"^Inst ([^ :]+)\S* \((\S+) .*?\[(\w+)\]\)", re.MULTILINE)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, order=True)
class Package:
    """One row of the lock: a .deb file that belongs to one tree."""

    tree: str
    name: str
    architecture: str
    version: str
    archive: str
    pool_path: str
    size_bytes: int
    sha256: str


def read_lock(path: Path = LOCK) -> list[Package]:
    """Return the rows of the lock, in file order.

    Raises InvalidData when the header or a row is not of the documented form.
    """
    header = [field.name for field in fields(Package)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise InvalidData(f"{path}: cannot read the package lock: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidData(f"{path}: not UTF-8: {exc}; restore the file from git") from exc
    if not lines or lines[0].split("\t") != header:
        raise InvalidData(f"{path}:1: header is not {' '.join(header)!r}; restore it from git")
    packages: list[Package] = []
    seen: set[tuple[str, str, str]] = set()
    for number, line in enumerate(lines[1:], start=2):
        try:
            package = _parse_row(line.split("\t"), header)
            key = (package.tree, package.name, package.architecture)
            if key in seen:
                raise ValueError(f"{' '.join(key)} is there twice")
        except ValueError as exc:
            raise InvalidData(f"{path}:{number}: {exc}; restore the file from git") from exc
        seen.add(key)
        packages.append(package)
    return packages


def _parse_row(row: list[str], header: list[str]) -> Package:
    if len(row) != len(header) or not all(row):
        raise ValueError(f"{len(row)} columns {row}, expected {len(header)}, none of them empty")
    tree, name, architecture, version, archive, pool_path, size, sha256 = row
    if not pool_path.startswith("pool/") or ".." in pool_path.split("/"):
        raise ValueError(f"pool_path {pool_path!r} is not a path below pool/")
    if not re.fullmatch(r"[1-9][0-9]*", size):
        raise ValueError(f"size_bytes {size!r} is not a positive whole number")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 {sha256!r} is not 64 hex digits")
    return Package(tree, name, architecture, version, archive, pool_path, int(size), sha256)


def write_lock(packages: Iterable[Package], path: Path = LOCK) -> None:
    """Write the lock, sorted, atomically; raises EnvironmentUnfit in an unwritable checkout."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(field.name for field in fields(Package))
    writer.writerows(astuple(package) for package in sorted(packages))
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(text.getvalue(), encoding="utf-8")
        temporary.replace(path)
    except OSError as exc:
        raise EnvironmentUnfit(f"{path}: cannot write: {exc.strerror}; nothing changed") from exc


def relock(mirror: str) -> list[Package]:
    """Resolve packages.toml against `mirror` (a Debian archive's base URL).

    Raises EnvironmentUnfit on a host without apt or without Debian's archive keys.
    """
    if not KEYRING.exists():
        raise EnvironmentUnfit(
            f"{KEYRING} is missing: relocking needs a Debian host (package debian-archive-keyring)"
        )
    wanted = read_toml(WANTED)
    packages: list[Package] = []
    for tree, spec in wanted["trees"].items():
        with tempfile.TemporaryDirectory(prefix="relock-") as directory:
            apt = _PrivateApt(Path(directory), spec["architecture"], spec["foreign"])
            suite = spec.get("suite", wanted["suite"])
            apt.update(f"deb [signed-by={KEYRING}] {mirror} {suite} {wanted['component']}")
            kept = spec.get("only", ["*"])
            packages += [
                package
                for package in apt.resolve(tree, suite, spec["packages"])
                if any(fnmatch.fnmatchcase(package.name, glob) for glob in kept)
            ]
    return packages


class _PrivateApt:
    """The machine's apt-get, looking at nothing but one directory."""

    def __init__(self, root: Path, architecture: str, foreign: list[str]) -> None:
        for name in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d"):
            (root / name).mkdir(parents=True)
        (root / "status").touch()
        settings = {
            "Dir": root,
            "Dir::State": root / "state",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
            "Dir::Etc": root / "etc",
            "Dir::Log": root,
            "Dir::Bin::dpkg": "/usr/bin/dpkg",
            "APT::Architecture": architecture,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        self.root = root
        self.options = [f"-o{key}={value}" for key, value in settings.items()]
        self.options += [f"-oAPT::Architectures::={name}" for name in (architecture, *foreign)]

    def update(self, source: str) -> None:
        (self.root / "etc/sources.list").write_text(source + "\n")
        run(["apt-get", *self.options, "-qq", "update"], what="read the archive's package lists")

    def resolve(self, tree: str, archive: str, names: list[str]) -> list[Package]:
        simulated = run(
            ["apt-get", *self.options, "-s", "-y", "install", *names],
            what=f"resolve the packages of tree {tree}",
        ).stdout
        chosen = [
            f"{name}={version}" if architecture == "all" else f"{name}:{architecture}={version}"
            for name, version, architecture in INSTALLED.findall(simulated)
        ]
        stanzas = run(
            ["apt-cache", *self.options, "show", *chosen],
            what=f"describe the packages of tree {tree}",
        ).stdout
        return [
            Package(
                tree=tree,
                name=stanza["Package"],
                architecture=stanza["Architecture"],
                version=stanza["Version"],
                archive=archive,
                pool_path=stanza["Filename"],
                size_bytes=int(stanza["Size"]),
                sha256=stanza["SHA256"],
            )
            for stanza in Packages.iter_paragraphs(stanzas, use_apt_pkg=False)
        ]

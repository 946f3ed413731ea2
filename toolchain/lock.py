"""debian.lock: every package of the pinned trees, by name, version, pool path, size, sha256.

Promise: reading refuses all that is not exactly the documented table; writing replaces it whole.
Limit: how it comes about is resolve.py's affair.
"""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from toolchain.errors import InvalidData
from toolchain.paths import REPO

LOCK = REPO / "toolchain" / "debian.lock"
WANTED = REPO / "toolchain" / "packages.toml"


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


def trees() -> list[str]:
    """Return the names of the locked trees, in file order; raises as read_lock does."""
    return list(dict.fromkeys(package.tree for package in read_lock()))


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


def lock_text(packages: Iterable[Package]) -> str:
    """Return the lock of these packages, sorted."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(field.name for field in fields(Package))
    writer.writerows(astuple(package) for package in sorted(packages))
    return text.getvalue()

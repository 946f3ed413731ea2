"""`./inv lock`: resolve the packages anew against the machine's mirror, and tell what differs.

Promise: packages.toml is resolved with the machine's own apt in private directories, so that
neither the machine's packages nor its configuration leak into the result; the lists must be signed
by Debian's archive key.  A mirror that has moved on (other versions) is told apart from one that
tampers (another content of a version that is locked, lists that nobody signed), whose result cannot
be accepted.  Lock and source pins change together and only when told to.
Limit: needs a Debian host (apt-get and the archive's keyring); using the lock does not.
"""

import contextlib
import fnmatch
import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from debian.deb822 import Packages, Sources
from debian.debian_support import Version

from toolchain.command import CommandFailed, run
from toolchain.errors import Differs, EnvironmentUnfit, InvalidData, UsageError
from toolchain.lock import LOCK, WANTED, Package, lock_text, read_lock
from toolchain.mirror import find_mirrors
from toolchain.say import say
from toolchain.sources import SOURCES, Source, sources, with_pin
from toolchain.tomlfile import read_toml

# apt-get -s prints: Inst NAME[:ARCH] (VERSION Debian:13.8/stable [ARCH])
INSTALLED = re.compile(r"^Inst ([^ :]+)\S* \((\S+) .*?\[(\w+)\]\)", re.MULTILINE)
ORIGINAL = re.compile(r"\.orig\.tar\.[a-z0-9]+$")
"""Of a source package the upstream archive, and not its signature (.asc)."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
KEYRING_VARIABLE = "BANANAOS_DEBIAN_KEYRING"
UNSIGNED = ("NO_PUBKEY", "BADSIG", "is not signed", "EXPKEYSIG", "REVKEYSIG", "Clearsigned file")
TAMPERED = ("Hash Sum mismatch", "File has unexpected size")
"""What apt says of lists that are not what the signed Release file says; also a mirror that is
being updated just now."""
REFUSED = re.compile(r"Failed to fetch \S+ +[45]\d\d ")
"""An HTTP status in place of lists: apt then adds that they are not signed."""


@dataclass(frozen=True)
class Resolved:
    """What a mirror offers today for packages.toml, and for the sources of kind "debian"."""

    packages: list[Package]
    sources: list[Source]


def lock(accept: bool) -> None:
    """Print what a new lock would change; with `accept` change it.

    Raises Differs when there is something to accept and `accept` is not given, InvalidData for a
    mirror that tampers, EnvironmentUnfit on a host without apt or a mirror that cannot be reached.
    """
    before = Resolved(read_lock(), [pin for pin in sources().values() if pin.kind == "debian"])
    after = resolve(find_mirrors()[0])
    _refuse_tampered(before, after)
    lines = difference(before, after)
    for line in lines:
        print(line)
    if not lines:
        print("the lock is what the mirror has")
        return
    if not accept:
        raise Differs(
            f"the mirror has moved on: {len(lines)} differences; nothing was changed; "
            "./inv lock --accept takes them, ./inv verify --accept then the new bytes"
        )
    pins = functools.reduce(with_pin, after.sources, SOURCES.read_text(encoding="utf-8"))
    _replace({LOCK: lock_text(after.packages), SOURCES: pins})
    say("lock: written; next: ./inv verify --accept, which builds all anew, and ./inv test")


def _replace(texts: Mapping[Path, str]) -> None:
    """Give the files these contents, all of them or none; raises EnvironmentUnfit."""
    new = {path: path.with_suffix(".new") for path in texts}
    old = {path: path.read_text(encoding="utf-8") for path in texts}
    replaced: list[Path] = []
    try:
        for path, text in texts.items():
            new[path].write_text(text, encoding="utf-8")
        for path, temporary in new.items():
            temporary.replace(path)
            replaced.append(path)
    except OSError as exc:
        for path in replaced:
            with contextlib.suppress(OSError):
                path.write_text(old[path], encoding="utf-8")
        for temporary in new.values():
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise EnvironmentUnfit(
            f"{exc.filename}: cannot write: {exc.strerror}; nothing changed; see to it and run the "
            "same command again"
        ) from exc


def difference(before: Resolved, after: Resolved) -> list[str]:
    """Return a line for each package of a tree that is added, removed or moved, and each source.

    One that has another place in the pool and nothing else is told, too: it could not be fetched.
    """
    old, new = _places(before), _places(after)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        name = " ".join(key)
        if key not in old:
            lines.append(f"added   {name} {new[key][0]}")
        elif key not in new:
            lines.append(f"removed {name} {old[key][0]}")
        elif (was := old[key]) != (now := new[key]):
            back = " (older!)" if Version(now[0]) < Version(was[0]) else ""
            at = was[0] == now[0]  # the same version elsewhere
            lines.append(f"moved   {name} {was[at]} -> {now[at]}{back}")
    return lines


def _places(resolved: Resolved) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Tree, name and architecture -> version and path in the pool."""
    found = {(p.tree, p.name, p.architecture): (p.version, p.pool_path) for p in resolved.packages}
    for pin in resolved.sources:
        found["sources", pin.package, "source"] = (pin.version, str(pin.pool_path))
    return found


def _refuse_tampered(before: Resolved, after: Resolved) -> None:
    """Raise InvalidData for a version that is locked and has another content now."""
    known = {(p.name, p.architecture, p.version): p.sha256 for p in before.packages}
    known |= {(pin.package, "source", pin.version): pin.sha256 for pin in before.sources}
    offered = {(p.name, p.architecture, p.version): p.sha256 for p in after.packages}
    offered |= {(pin.package, "source", pin.version): pin.sha256 for pin in after.sources}
    bad = sorted(key for key in known.keys() & offered.keys() if known[key] != offered[key])
    if bad:
        names = ", ".join(" ".join(key) for key in bad)
        raise InvalidData(
            f"{names}: the same version with another sha256 than the lock's: an archive never does "
            "that, so the lock or this mirror was tampered with; nothing was changed; restore the "
            "lock from git, or name another mirror"
        )


# --- apt --------------------------------------------------------------------------------------


def resolve(mirror: str) -> Resolved:
    """Resolve packages.toml against `mirror` (a Debian archive's base URL)."""
    keyring = _keyring()
    wanted = read_toml(WANTED)
    packages: list[Package] = []
    pins = [pin for pin in sources().values() if pin.kind == "debian"]
    found: list[Source] = []
    with tempfile.TemporaryDirectory(prefix="lock-") as directory:
        apts: dict[tuple[str, ...], _PrivateApt] = {}
        for tree, spec in wanted["trees"].items():
            suite = spec.get("suite", wanted["suite"])
            key = (suite, spec["architecture"], *spec["foreign"])
            if key not in apts:
                place = Path(directory, str(len(apts)))
                apts[key] = _PrivateApt(place, spec["architecture"], spec["foreign"])
                line = f"[signed-by={keyring}] {mirror} {suite} {wanted['component']}"
                with_sources = suite == wanted["suite"] and not found
                apts[key].update([f"deb {line}", *([f"deb-src {line}"] if with_sources else [])])
                if with_sources:
                    found = [apts[key].source(pin) for pin in pins]
            kept = spec.get("only", ["*"])
            packages += [
                package
                for package in apts[key].resolve(tree, suite, spec["packages"])
                if any(fnmatch.fnmatchcase(package.name, glob) for glob in kept)
            ]
    return Resolved(packages, found)


def _keyring() -> Path:
    named = os.environ.get(KEYRING_VARIABLE, "")
    path = Path(named) if named else KEYRING
    if named and not path.is_absolute():
        raise UsageError(f"{KEYRING_VARIABLE}={named!r}: expected an absolute path")
    if not path.exists():
        raise EnvironmentUnfit(
            f"{path} is missing: a new lock needs a Debian host (package debian-archive-keyring), "
            f"or {KEYRING_VARIABLE} set to a file with the archive's keys"
        )
    return path


class _PrivateApt:
    """The machine's apt-get, looking at nothing but one directory."""

    def __init__(self, root: Path, architecture: str, foreign: list[str]) -> None:
        for name in (
            "state/lists/partial",
            "cache/archives/partial",
            "etc/apt.conf.d",
            "etc/preferences.d",
        ):
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
            "Acquire::AllowInsecureRepositories": "false",
        }
        self.root = root
        self.options = [f"-o{key}={value}" for key, value in settings.items()]
        self.options += [f"-oAPT::Architectures::={name}" for name in (architecture, *foreign)]

    def update(self, lines: Sequence[str]) -> None:
        """Read the archive's lists; raises InvalidData where not signed, or not as signed."""
        (self.root / "etc/sources.list").write_text("".join(f"{line}\n" for line in lines))
        try:
            run(
                ["apt-get", *self.options, "-q", "-oAPT::Update::Error-Mode=any", "update"],
                what="read the archive's package lists",
            )
        except CommandFailed as exc:
            said = str(exc)
            refused = REFUSED.search(said) is not None
            if not refused and any(word in said for word in UNSIGNED):
                raise InvalidData(
                    f"{lines[0].split()[2]}: its lists are not signed by the archive's key: this "
                    "mirror was tampered with, or is none of Debian; nothing was changed; name "
                    "another one"
                ) from exc
            if any(word in said for word in TAMPERED):
                raise InvalidData(
                    f"{lines[0].split()[2]}: its lists are not those that its Release file is "
                    "signed for: tampered with, or being updated just now; nothing was changed; "
                    "run it again in an hour, or name another mirror"
                ) from exc
            raise EnvironmentUnfit(
                f"{lines[0].split()[2]}: cannot read its package lists: "
                f"{_reason(said)}; nothing was changed"
            ) from exc

    def resolve(self, tree: str, archive: str, names: list[str]) -> list[Package]:
        """Return what apt would install for `names`."""
        try:
            simulated = run(
                ["apt-get", *self.options, "-s", "-y", "install", *names],
                what=f"resolve the packages of tree {tree}",
            ).stdout
        except CommandFailed as exc:
            raise EnvironmentUnfit(
                f"tree {tree}: the mirror cannot satisfy packages.toml: {_reason(str(exc))}; "
                "nothing was changed"
            ) from exc
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

    def source(self, pin: Source) -> Source:
        """Return the pin of the newest source package of that name: its .orig archive."""
        shown = run(
            ["apt-cache", *self.options, "showsrc", "--only-source", pin.package],
            what=f"look up the source of {pin.package}",
        ).stdout
        found = list(Sources.iter_paragraphs(shown, use_apt_pkg=False))
        if not found:
            raise EnvironmentUnfit(f"{pin.package}: the mirror has no source of it")
        newest: Any = max(found, key=lambda stanza: Version(stanza["Version"]))
        archives = [row for row in newest["Checksums-Sha256"] if ORIGINAL.search(row["name"])]
        if len(archives) != 1:
            raise EnvironmentUnfit(
                f"{pin.package} {newest['Version']}: expected one archive *.orig.tar.* of its "
                f"source, got {[row['name'] for row in archives]}; nothing was changed"
            )
        (archive,) = archives
        return replace(
            pin,
            version=str(Version(newest["Version"]).upstream_version),
            pool_path=f"{newest['Directory']}/{archive['name']}",
            size_bytes=int(archive["size"]),
            sha256=archive["sha256"],
        )


def _reason(said: str) -> str:
    """The line of apt's output that says most of a failure: the first error, else a warning."""
    lines = [line.strip(" |") for line in said.splitlines()]
    found = (line for kind in ("E:", "Err:", "W:") for line in lines if line.startswith(kind))
    return next(found, lines[0])

"""`./inv verify`: rebuild without trusting the cache, under hostile conditions, and compare bytes.

Promise: each file of binaries.json gets one line for each driver: MATCH, DIFFER (and where),
NOT-BUILT or SKIPPED (and why).  What is rebuilt is rebuilt from locked packages, pinned sources and
files of the checkout, somewhere else, as somebody else, with another number of jobs and a clock a
year ahead; a tree is unpacked anew.  Only `accept` changes binaries.json, and says what and why.
Limit: what a rebuilt artifact needs is the ordinary build, held against binaries.json like the
rest; kernel and llama-server are rebuilt with `full` only.  Where the inputs are others than those
accepted, nothing is expected: a rebuild is held against the ordinary build, and verify fails all
the same, naming the inputs, since they are not what binaries.json is about.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import schemas
from artifact import binaries
from artifact.binaries import EXPECTED, MODEL
from artifact.explain import explain
from board import models
from toolchain import cache, docker_driver, inside, recipe
from toolchain.command import run
from toolchain.errors import ArtifactError, Differs, EnvironmentUnfit, UsageError, cannot_write
from toolchain.fetch import sha256_file
from toolchain.image import Digest, Entry, tree_entries, write, write_layer
from toolchain.paths import REPO, cache_dir
from toolchain.recipe import Setting
from toolchain.rootfs import ENVIRONMENT, fetch_tree, rootfs, tree_inputs, unpack
from toolchain.say import say

CHEAP_MINUTES = 1.0
"""What takes longer is rebuilt with --full only."""
HOST = "host"
VERDICTS = MATCH, DIFFER, NOT_BUILT, SKIPPED = "MATCH", "DIFFER", "NOT-BUILT", "SKIPPED"
PLACE_CHARACTERS = 150
CLOCK = "usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
ACCEPT = "./inv verify --accept"
OTHER_CPU = "/other-cpu"
WRAPPER = REPO / "toolchain" / "other_cpu.sh"
COMPILERS = ("cc", "gcc", "c++", "g++", "x86_64-linux-gnu-gcc", "x86_64-linux-gnu-g++")
DIFFOSCOPE_S = 120.0
EARLIER = "by the --full that this one goes on with"
NAMED = 5
"""How many members of a tree are named where it differs."""
TREE_FILES = ("layer.tar", "config.json")


@dataclass(frozen=True)
class Row:
    """What came of one file with one driver; see schemas/verify.schema.json."""

    artifact: str
    file: str
    driver: str
    verdict: str
    expected_sha256: str = ""
    found_sha256: str = ""
    reason: str = ""


def hostile() -> tuple[Setting, dict[str, str]]:
    """Return the setting that must not show in any byte, and what it varies in words."""
    jobs = len(os.sched_getaffinity(0)) + 1
    place = ("/hostile" + "/another-place" * PLACE_CHARACTERS)[:PLACE_CHARACTERS]
    setting = Setting(
        directory=place,
        env={
            "USER": "somebody",
            "LOGNAME": "somebody",
            "HOME": "/nonexistent",
            "LC_ALL": "C",
            "TZ": "XST+11:30",
            "TMPDIR": "/var/tmp",
            "PATH": f"{OTHER_CPU}:{ENVIRONMENT['PATH']}",
            "LD_PRELOAD": "/clock.so",
            "FAKETIME": "+366d",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        },
        binds={
            "/clock.so": rootfs("hostile") / CLOCK,
            f"{OTHER_CPU}/qemu-x86_64": rootfs("hostile") / "usr/bin/qemu-x86_64",
            **{f"{OTHER_CPU}/{name}": WRAPPER for name in COMPILERS},
        },
        jobs=jobs,
    )
    words = {
        "directory": f"{len(place)} characters, inside and outside of the tree",
        "user": "another name and home; its number is the caller's",
        "umask": "077 outside; with namespaces on the checkout's files, too (docker and nix give "
        "them modes of their own); inside it is fixed",
        "locale": "C (the tree has no other than C.UTF-8)",
        "timezone": setting.env["TZ"],
        "jobs": str(jobs),
        "clock": "a year ahead for dynamic programs (libfaketime); files keep their times",
        "cpu": "for the host's compilers that of 2008 (qemu-user), so that 'native' means another",
    }
    return setting, words


def verify(
    drivers: Sequence[str],
    *,
    full: bool = False,
    json_file: Path | None = None,
    only: Sequence[str] = (),
    accepting: bool = False,
) -> list[Row]:
    """Rebuild, compare, print a line for each file; return the rows.

    drivers: names (default: the machine's own).  only: artifacts (default: all).  accepting: other
    inputs than the accepted ones are what this is about.  Raises Differs when a file or an input
    differs, EnvironmentUnfit when one could not be rebuilt or a driver that was named cannot be
    used here, UsageError for an unknown name.
    """
    names = _named(drivers, only)
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json {json_file}: no directory {json_file.parent}: make it first")
    setting, words = hostile()
    _announce(names, only, full)
    rows: list[Row] = []
    broken: Broken = {}
    with cache.exclusive("verify"), _umask(0o077), _Progress(full, whole=not only) as progress:
        expected = binaries.read()
        for artifact in _chosen(only):
            if artifact.startswith(f"{MODEL}/"):
                rows += _show(_rebuild(artifact, HOST, setting, expected, broken))
        for name in names:
            refused = inside.refusal(name)
            inside.use(name)
            for artifact in _chosen(only):
                if artifact.startswith(f"{MODEL}/"):
                    continue
                if refused is not None:
                    rows += _show(_without(artifact, name, SKIPPED, refused, expected))
                elif not full and _takes_long(artifact):
                    rows += _show(_kept(artifact, name, expected))
                elif (known := progress.get(artifact, name, expected)) is not None:
                    rows += _show(known)
                else:
                    own = _show(_rebuild(artifact, name, setting, expected, broken))
                    progress.put(artifact, name, expected, own)
                    rows += own
        if not only:
            for tree in binaries.trees():
                rows += _show(_or_not_built(f"tree/{tree}", HOST, expected, _tree))
            if "docker" in names and inside.refusal("docker") is None:
                rows += _show(_or_not_built("image/build", "docker", expected, _engine_image))
    if json_file is not None:
        document = {"schema_version": "1", "variation": words, "rows": [asdict(r) for r in rows]}
        schemas.write(json_file, document, "verify")
    unused = [f"{name}: {why}" for name in names if (why := inside.refusal(name)) is not None]
    _conclude(rows, [] if accepting else _all_other_inputs(only, expected), unused)
    return rows


def accept(*, rebuild: bool, drivers: Sequence[str] = (), full: bool = False) -> None:
    """Make the ordinary builds the expected ones, and print what changed and why.

    rebuild: only if a hostile rebuild gives the same.  Raises Differs, changing nothing, when a
    file changed without any change of its inputs, or differs when it is rebuilt; UsageError when
    what is to be rebuilt takes long and `full` was not said.
    """
    new = binaries.describe()
    old = binaries.read() if EXPECTED.exists() else {"trees": {}, "artifacts": {}}
    lines, unexplained = _difference(old, new)
    if unexplained:
        raise Differs(
            f"{', '.join(unexplained)}: other bytes from the same inputs: the build is not "
            "reproducible; nothing was accepted (./inv verify shows where)"
        )
    dear = [name for name in _moved(old, new) if _takes_long(name)]
    if rebuild and dear and not full:
        raise UsageError(
            f"--rebuild: {', '.join(dear)} changed, which only --full rebuilds: add it"
        )
    if rebuild:
        verify(drivers, full=full, accepting=True)
    schemas.write(EXPECTED, new, "binaries")
    for line in lines or ["nothing changed"]:
        print(line)


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return a line for each change, and what changed without a reason."""
    lines: list[str] = []
    unexplained: list[str] = []
    for kind in ("trees", "artifacts"):
        for name in sorted(old[kind].keys() | new[kind].keys()):
            before, after = old[kind].get(name), new[kind].get(name)
            if before == after:
                continue
            if before is None or after is None:
                lines.append(f"{name}: {'new' if before is None else 'gone'}")
                continue
            why = binaries.changes(before["inputs"], after["inputs"])
            files = _files_of(before), _files_of(after)
            what = binaries.changes(*files) or ["same bytes"]
            if not why:
                unexplained.append(name)
            lines.append(f"{name}: {', '.join(what)}; because {', '.join(why)}")
    return lines, unexplained


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the artifacts that are new or others."""
    before, after = old["artifacts"], new["artifacts"]
    return sorted(name for name in after if after[name] != before.get(name))


def _takes_long(artifact: str) -> bool:
    known = recipe.recipes()
    return artifact in known and known[artifact].minutes > CHEAP_MINUTES


def _files_of(entry: Mapping[str, Any]) -> dict[str, str]:
    if "files" in entry:
        return {name: file["sha256"] for name, file in entry["files"].items()}
    return {key: str(entry[key]) for key in ("layer_sha256", "config_sha256")}


# --- one artifact -----------------------------------------------------------------------------


Broken = dict[str, str]
"""What could not be built for others, and why: it is not tried again."""


def _rebuild(
    artifact: str, driver: str, setting: Setting, expected: Mapping[str, Any], broken: Broken
) -> list[Row]:
    """Build the artifact anew in the setting, and compare."""
    place = _elsewhere() / f"{driver}-{artifact.replace('/', '-')}"
    out = place / "out"
    say(f"verify: {artifact} ({driver})")
    try:
        cache.remove_tree(place)
        out.mkdir(parents=True)
        if driver == HOST:
            models.make(artifact.partition("/")[2], out)
        else:
            own = recipe.recipes()[artifact]
            needed = {name: _needed(name, broken) for name in own.needs}
            log = cache_dir() / "logs" / f"verify-{driver}-{artifact.replace('/', '-')}.log"
            if driver in inside.UNSHARE:  # the others give the checkout's files modes of their own
                copies = _private_copies(own, place / "recipe")
                setting = replace(setting, binds={**setting.binds, **copies})
            recipe.make(own, needed, out, place / "scratch", log, setting)
        rows = _compare(artifact, driver, out, expected)
    except (ArtifactError, OSError) as exc:
        failure = exc if isinstance(exc, ArtifactError) else cannot_write(place, exc)
        with contextlib.suppress(OSError):
            cache.remove_tree(place)
        reason = str(failure).splitlines()[0]
        return _without(artifact, driver, NOT_BUILT, reason, expected)
    if all(row.verdict != DIFFER for row in rows):
        cache.remove_tree(place)
    return rows


def _needed(artifact: str, broken: Broken) -> Path:
    """Return the ordinary build of what another one needs, trying it once."""
    if artifact not in broken:
        try:
            return recipe.build(artifact)
        except ArtifactError as exc:
            broken[artifact] = str(exc).splitlines()[0]
    raise EnvironmentUnfit(f"it needs {artifact}: {broken[artifact]}")


def _private_copies(own: recipe.Recipe, place: Path) -> dict[str, Path]:
    """Copy what the recipe reads of the checkout as a clone made with umask 077 has it."""
    copies: dict[str, Path] = {}
    for name, path in own.files().items():
        copy = place / str(len(copies)) / path.name
        copy.parent.mkdir(parents=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o700 if os.access(path, os.X_OK) else 0o600)
        copies[f"/recipe/{name}"] = copy
    return copies


def _compare(artifact: str, driver: str, out: Path, expected: Mapping[str, Any]) -> list[Row]:
    """Hold what was rebuilt against what is expected, or against the ordinary build."""
    other = _other_inputs(artifact, expected)
    found = {name: file.sha256 for name, file in binaries.files(out).items()}
    if other:
        wanted = _usual(artifact)
    else:
        known = expected["artifacts"][artifact]["files"]
        wanted = {name: file["sha256"] for name, file in known.items()}
    usual = {} if wanted == found else _usual(artifact)  # may have to be built for it
    rows = []
    for name in sorted(wanted.keys() | found.keys()):
        want, got = wanted.get(name, ""), found.get(name, "")
        if want == got:
            verdict, reason = (SKIPPED, _not_accepted(other)) if other else (MATCH, "")
        elif usual.get(name) != want:
            verdict, reason = DIFFER, "and so does the ordinary build, so none shows where"
        else:
            ordinary = binaries.ordinary(artifact)
            verdict = DIFFER
            reason = explain(
                binaries.content(ordinary, name),
                binaries.content(out, name) if name in found else b"",
            )
            reason += _diffoscope(ordinary / name, out / name)
        rows.append(Row(artifact, name, driver, verdict, want, got, reason))
    return rows


def _usual(artifact: str) -> dict[str, str]:
    """Return file -> sha256 of the ordinary build."""
    return {name: file.sha256 for name, file in binaries.files(binaries.ordinary(artifact)).items()}


def _not_accepted(other: Sequence[str]) -> str:
    return f"rebuilt alike, but not accepted yet: {', '.join(other)}; {ACCEPT}"


def _other_inputs(artifact: str, expected: Mapping[str, Any]) -> list[str]:
    """Return how the artifact's inputs differ from those that were accepted, in words.

    Nothing is built for it: what the artifact needs counts as accepted where its inputs are.
    """
    known = expected["artifacts"].get(artifact)
    if known is None:
        return [f"{artifact} is new"]
    needs = () if artifact.startswith(f"{MODEL}/") else recipe.recipes()[artifact].needs
    others = [other for need in needs for other in _other_inputs(need, expected)]
    if others:
        return others
    files = {need: binaries.accepted(need, expected) for need in needs}
    return binaries.changes(known["inputs"], binaries.inputs(artifact, files))


def _all_other_inputs(only: Sequence[str], expected: Mapping[str, Any]) -> list[str]:
    """Return every input that is not the accepted one, of trees and chosen artifacts."""
    others = []
    for tree in binaries.trees():
        known = expected["trees"].get(tree, {"inputs": {}})
        others += binaries.changes(known["inputs"], tree_inputs(tree))
    # A changed tree is in each artifact's inputs, too, but says less there.
    return others or [o for name in _chosen(only) for o in _other_inputs(name, expected)]


def _kept(artifact: str, driver: str, expected: Mapping[str, Any]) -> list[Row]:
    """The rows of what is not rebuilt; the ordinary build is compared all the same."""
    other = _other_inputs(artifact, expected)
    if other:
        reason = f"not accepted yet: {', '.join(other)}"
        return _without(artifact, driver, SKIPPED, reason, expected)
    if recipe.to_build(artifact):
        reason = "not in this cache: --full builds it and compares"
        return _without(artifact, driver, SKIPPED, reason, expected)
    rows = []
    found = binaries.files(binaries.ordinary(artifact))
    for name, file in sorted(expected["artifacts"][artifact]["files"].items()):
        got = found[name].sha256 if name in found else ""
        same = got == file["sha256"]
        verdict = NOT_BUILT if same else DIFFER
        reason = "--full rebuilds it; the ordinary build has " + (
            "the expected bytes" if same else "other bytes"
        )
        rows.append(Row(artifact, name, driver, verdict, file["sha256"], got, reason))
    return rows


def _without(
    artifact: str, driver: str, verdict: str, reason: str, expected: Mapping[str, Any]
) -> list[Row]:
    known = expected["artifacts"].get(artifact, {"files": {"(all)": {"sha256": ""}}})
    return [
        Row(artifact, name, driver, verdict, file["sha256"], "", reason)
        for name, file in sorted(known["files"].items())
    ]


def _diffoscope(expected: Path, found: Path) -> str:
    """Save diffoscope's report beside the rebuilt file, if there is one; say where things are."""
    if not found.exists():
        return ""
    words = f"; rebuilt file: {found}"
    if shutil.which("diffoscope") is None:
        return words
    report = found.with_name(f"{found.name}.diffoscope.txt")
    command = ["diffoscope", "--text", os.fspath(report), os.fspath(expected), os.fspath(found)]
    with contextlib.suppress(ArtifactError):  # it takes long on large files: no report then
        run(command, what="diffoscope", timeout_s=DIFFOSCOPE_S, check=False)
    return f"{words}; diffoscope: {report}" if report.exists() else words


# --- trees and images -------------------------------------------------------------------------


def _or_not_built(
    name: str,
    driver: str,
    expected: Mapping[str, Any],
    compare: Callable[[str, Mapping[str, Any]], list[Row]],
) -> list[Row]:
    """The rows of a tree or its image; a row with the reason where they cannot be had."""
    try:
        return compare(name, expected)
    except (EnvironmentUnfit, OSError) as exc:  # an altered package ends it all
        failure = exc if isinstance(exc, EnvironmentUnfit) else cannot_write(cache_dir(), exc)
        reason = str(failure).splitlines()[0]
        return [Row(name, file, driver, NOT_BUILT, reason=reason) for file in TREE_FILES]


def _tree(name: str, expected: Mapping[str, Any]) -> list[Row]:
    """Unpack the tree anew, elsewhere; compare its image's digests and the tree that is used."""
    tree = name.partition("/")[2]
    known = expected["trees"].get(tree)
    say(f"verify: {name} (unpacked anew)")
    place = _elsewhere() / tree
    try:
        fetch_tree(tree)
        unpack(tree, place)
        image = write(Digest(), f"bananaos-{tree}:verify", place, None, docker_driver.config(tree))
        found = dict(zip(TREE_FILES, (image.layers_sha256[0], image.config_sha256), strict=True))
        used = rootfs(tree)  # what every build of this machine runs in
        deviates = write_layer(Digest(), tree_entries(used)).hexdigest() != found["layer.tar"]
        other = members_that_differ(place, used) if deviates else ""
        why = ["new"] if known is None else binaries.changes(known["inputs"], tree_inputs(tree))
        rows = []
        for file, key in zip(TREE_FILES, ("layer_sha256", "config_sha256"), strict=True):
            want = "" if known is None else known[key]
            verdict, reason = MATCH, ""
            if not why and want != found[file]:
                verdict = DIFFER
                reason = "unpacked anew it has another digest, and the tree in the cache " + (
                    f"differs from it in {other}"
                    if deviates
                    else "is the same, so none shows where"
                )
            elif deviates and file == "layer.tar":
                verdict = DIFFER
                reason = (
                    f"the tree in the cache, in which all was built, differs in {other}: remove "
                    f"{used}"
                )
            elif why:
                verdict, reason = SKIPPED, _not_accepted(why)
            rows.append(Row(name, file, HOST, verdict, want, found[file], reason))
        return rows
    finally:
        cache.remove_tree(place)


def members_that_differ(one: Path, other: Path) -> str:
    """Return the first names below two trees whose kind, mode, time, target or bytes differ."""
    entries = [
        {info.name: (info, content) for info, content in tree_entries(tree)}
        for tree in (one, other)
    ]
    names = []
    for name in sorted(entries[0].keys() | entries[1].keys()):
        if not all(name in below and _same(entries, name) for below in entries):
            names.append(name)
        if len(names) > NAMED:
            return ", ".join(names[:NAMED]) + " and more"
    return ", ".join(names)


def _same(entries: Sequence[Mapping[str, Entry]], name: str) -> bool:
    """Whether the member is the same in all; the bytes are read where the rest is."""
    members = [below[name] for below in entries if name in below]
    facts = {(m.type, m.mode, m.mtime, m.size, m.linkname) for m, _ in members}
    files = [content for m, content in members if m.isreg() and isinstance(content, Path)]
    return len(facts) == 1 and len({sha256_file(path) for path in files}) <= 1


def _engine_image(name: str, expected: Mapping[str, Any]) -> list[Row]:
    """What the Docker engine itself computed when it loaded the build tree's image."""
    known = expected["trees"]["build"]
    layers, identity = docker_driver.engine_digests(docker_driver.have_image())
    same = layers == (known["layer_sha256"],)
    rows = [
        Row(
            *(name, "layer.tar", "docker", MATCH if same else DIFFER, known["layer_sha256"]),
            layers[0] if layers else "",
            "" if same else "the engine computed another digest",
        )
    ]
    verdict, reason = MATCH, ""
    if identity != known["config_sha256"]:
        verdict, identity = SKIPPED, ""
        reason = "the engine names images by a manifest of its own (containerd's image store)"
    rows.append(
        Row(name, "config.json", "docker", verdict, known["config_sha256"], identity, reason)
    )
    return rows


# --- the command ------------------------------------------------------------------------------


def _named(drivers: Sequence[str], only: Sequence[str]) -> list[str]:
    for name in drivers:
        if name not in inside.DRIVERS:
            raise UsageError(f"--driver {name}: expected one of {', '.join(inside.DRIVERS)}")
    for artifact in only:
        if artifact not in binaries.artifacts():
            raise UsageError(
                f"--artifact {artifact}: expected one of {', '.join(binaries.artifacts())}"
            )
    return list(dict.fromkeys(drivers)) or [inside.driver()]


def _chosen(only: Sequence[str]) -> list[str]:
    return [name for name in binaries.artifacts() if not only or name in only]


def _announce(drivers: Sequence[str], only: Sequence[str], full: bool) -> None:
    chosen = [recipe.recipes()[name] for name in _chosen(only) if not name.startswith(f"{MODEL}/")]
    rebuilt = [each for each in chosen if full or each.minutes <= CHEAP_MINUTES]
    first = {
        each.artifact: each
        for needed in sorted({need for one in rebuilt for need in one.needs})
        for each in recipe.to_build(needed)
    }
    minutes = sum(each.minutes for each in rebuilt) + (0 if only else 2)
    text = f"verify: with {', '.join(drivers)}: about {minutes:.0f} min each on 2 cores"
    if first:
        before = sum(each.minutes for each in first.values())
        text += f", after about {before:.0f} min for what these need and this cache lacks"
    say(text)


def _show(rows: list[Row]) -> list[Row]:
    for row in rows:
        digest = (row.found_sha256 or row.expected_sha256)[:16]
        reason = f"  ({row.reason})" if row.reason else ""
        print(
            f"{row.verdict:<9} {row.driver:<6} {row.artifact} {row.file} {digest}{reason}",
            flush=True,
        )
    return rows


def _conclude(rows: Sequence[Row], others: Sequence[str], unused: Sequence[str]) -> None:
    counts = {word: sum(row.verdict == word for row in rows) for word in VERDICTS}
    print(", ".join(f"{count} {word}" for word, count in counts.items() if count))
    differing = sorted({row.artifact for row in rows if row.verdict == DIFFER})
    if differing:
        raise Differs(f"{', '.join(differing)}: not the expected bytes")
    if others:
        raise Differs(
            f"other inputs than those of {EXPECTED.name}: {', '.join(sorted(set(others)))}; "
            f"if that is meant: {ACCEPT}"
        )
    # What is only kept has a digest.
    failed = {row.artifact for row in rows if row.verdict == NOT_BUILT and not row.found_sha256}
    if failed:
        raise EnvironmentUnfit(f"{', '.join(sorted(failed))}: could not be rebuilt, see above")
    if unused:
        raise EnvironmentUnfit(f"nothing was rebuilt with {'; '.join(unused)}")


def _elsewhere() -> Path:
    """Where rebuilds are done: a long path of the host, too."""
    return cache_dir() / "verify" / ("elsewhere-" + "x" * PLACE_CHARACTERS)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class _Progress:
    """What a --full that did not get to its end had rebuilt alike, for the next one."""

    def __init__(self, full: bool, *, whole: bool) -> None:
        self._path = cache_dir() / "verify" / "progress.json"
        self._full, self._whole, self._alike = full, whole, True
        self._done: dict[str, list[dict[str, str]]] = {}

    def __enter__(self) -> "_Progress":
        if self._full and self._path.exists():
            with contextlib.suppress(ValueError, OSError):
                document = json.loads(self._path.read_text())
                self._done = document if isinstance(document, dict) else {}
            say(f"verify: going on after {len(self._done)} artifacts of an earlier --full")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._full and self._whole and kind is None and self._alike:
            self._path.unlink(missing_ok=True)

    def _key(self, artifact: str, driver: str, expected: Mapping[str, Any]) -> str:
        setting, _ = hostile()
        known = expected["artifacts"].get(artifact)
        return cache.key_of([artifact, driver, setting.directory, dict(setting.env), known])

    def get(self, artifact: str, driver: str, expected: Mapping[str, Any]) -> list[Row] | None:
        """The rows of an artifact that has the inputs it was rebuilt from; they say so."""
        if not self._full or _other_inputs(artifact, expected):
            return None
        try:
            rows = self._done[self._key(artifact, driver, expected)]
            return [replace(Row(**row), reason=EARLIER) for row in rows]
        except (KeyError, TypeError):  # not there, or of another form
            return None

    def put(
        self, artifact: str, driver: str, expected: Mapping[str, Any], rows: Sequence[Row]
    ) -> None:
        """Keep these rows if all match: what does not is to be looked at again."""
        if not self._full:
            return
        if not all(row.verdict == MATCH for row in rows):
            self._alike = False
            return
        self._done[self._key(artifact, driver, expected)] = [asdict(row) for row in rows]
        schemas.replace_text(self._path, json.dumps(self._done, indent=1) + "\n")

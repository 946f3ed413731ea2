"""Recipes: what a room builds inside the pinned tree, declared in its recipe.toml.

Promise: an artifact is a pure function of its recipe, its input files, its sources, the artifacts
it needs and the pinned tree; all of these make its key in the cache.  A build sees nothing else:
no network, no clock that matters, no path of the host.
Limit: the recipe names the outputs; whatever else a script leaves in /build is thrown away.

recipe.toml, a table per artifact (`kernel/image` is [image] of kernel/recipe.toml):
  script   the room's POSIX shell script, run as `sh -eu /recipe/SCRIPT NAME` with /build as
           working directory; results go to /out; $JOBS tells how many jobs to run
  inputs   files of the room the script reads, below /recipe; a pattern stands for all it matches
  sources  names of toolchain/sources.toml, each at /src/NAME
  needs    other artifacts, each a directory /in/ROOM/NAME
  trees    pinned trees to look into, each at /trees/NAME
  outputs  the files that must be in /out afterwards, no more and no fewer
  links    packages of the tree whose code gets into the outputs, NAME:ARCHITECTURE (for licences;
           decides no byte)
  minutes  what a build takes on two cores, told beforehand
  on_demand  true: built where it is named, not by a build of all; its tree is not for ever
"""

import contextlib
import errno
import graphlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain import cache
from toolchain.command import CommandFailed
from toolchain.errors import InvalidData, UsageError, cannot_write
from toolchain.fetch import sha256_file
from toolchain.inside import DIRECTORY, driver, run_inside
from toolchain.paths import REPO, cache_dir
from toolchain.rootfs import rootfs, tree_key
from toolchain.say import say
from toolchain.sources import source, sources
from toolchain.tomlfile import read_toml

ROOMS = ("kernel", "llama.cpp", "sched_ext", "board")
FULL_BYTES = 1 << 20
"""A disk with less room than this failed a build, whatever the build itself says."""


@dataclass(frozen=True)
class Recipe:
    """One table of a room's recipe.toml; `artifact` is ROOM/NAME."""

    artifact: str
    room: Path
    script: str
    outputs: tuple[str, ...]
    minutes: float
    inputs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    on_demand: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, Path]:
        """Return name below /recipe -> file: the script and all inputs, patterns resolved."""
        found: dict[str, Path] = {}
        for pattern in (self.script, *self.inputs):
            matches = sorted(path for path in self.room.glob(pattern) if path.is_file())
            if not matches:
                raise InvalidData(f"{self.room / 'recipe.toml'}: {pattern}: no such file")
            found |= {str(path.relative_to(self.room)): path for path in matches}
        return found

    @property
    def name(self) -> str:
        """The artifact's name within its room."""
        return self.artifact.rpartition("/")[2]


def recipes() -> dict[str, Recipe]:
    """Return every recipe of the repository by artifact name.

    Raises InvalidData, naming the file and the key, for a recipe of another form.
    """
    found: dict[str, Recipe] = {}
    for room in ROOMS:
        path = REPO / room / "recipe.toml"
        for name, table in read_toml(path).items():
            try:
                found[f"{room}/{name}"] = Recipe(f"{room}/{name}", REPO / room, **_values(table))
            except TypeError as exc:
                raise InvalidData(f"{path}: [{name}]: {exc}") from exc
    known = sources()
    for recipe in found.values():
        for name in {*recipe.needs} - found.keys() | {*recipe.sources} - known.keys():
            raise InvalidData(f"{recipe.room / 'recipe.toml'}: [{recipe.name}]: no {name!r}")
    try:
        graphlib.TopologicalSorter({name: r.needs for name, r in found.items()}).prepare()
    except graphlib.CycleError as exc:
        raise InvalidData(f"recipes that need one another: {', '.join(exc.args[1])}") from exc
    return found


def _values(table: Any) -> dict[str, Any]:
    """Return a recipe's table as arguments of Recipe; raises TypeError for a value of no use."""
    if not isinstance(table, dict):
        raise TypeError(f"{table!r} is not a table")
    kinds = {"script": (str,), "minutes": (int, float), "env": (dict,), "on_demand": (bool,)}
    for key, value in table.items():
        if not isinstance(value, kinds.get(key, (list,))):
            raise TypeError(f"{key} = {value!r} has the wrong type")
    return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}


def build(artifact: str) -> Path:
    """Return the directory that holds the artifact's outputs, building what is missing.

    Raises UsageError for an unknown artifact; a failed build keeps its log and names it.
    """
    known = recipes()
    if artifact not in known:
        raise UsageError(f"artifact {artifact!r} is unknown; there are {', '.join(sorted(known))}")
    recipe = known[artifact]
    needed = {need: build(need) for need in recipe.needs}
    decided = inputs(recipe, {need: cache.manifest(path) for need, path in needed.items()})
    return cache.entry(artifact, decided, lambda out: _run(recipe, needed, out))


def to_build(artifact: str) -> list[Recipe]:
    """Return what `build` of this artifact would have to make, needed ones first."""
    recipe = recipes()[artifact]
    missing = {each.artifact: each for need in recipe.needs for each in to_build(need)}
    if not missing:
        needed = {need: cache.manifest(build(need)) for need in recipe.needs}
        if cache.has(artifact, inputs(recipe, needed)):
            return []
    return [*missing.values(), recipe]


def inputs(recipe: Recipe, needed: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return everything that decides the artifact's bytes, as a JSON document.

    needed: artifact -> file -> sha256 of each artifact it needs.
    """
    known = sources()
    return {
        "artifact": recipe.artifact,
        "tree": tree_key("build"),
        "files": {name: sha256_file(path) for name, path in recipe.files().items()},
        "env": dict(recipe.env),
        "sources": {name: known[name].sha256 for name in recipe.sources},
        "needs": {name: dict(needed[name]) for name in recipe.needs},
        "trees": {name: tree_key(name) for name in recipe.trees},
        "outputs": list(recipe.outputs),
    }


@dataclass(frozen=True)
class Setting:
    """Where and as whom a build runs: what must not show in the bytes (verify.py varies it).

    directory: the build's place inside the tree; env: on top of that of every build; binds: more
    to see; jobs: $JOBS, by default one for each CPU.
    """

    directory: str = DIRECTORY
    env: Mapping[str, str] = field(default_factory=dict)
    binds: Mapping[str, Path] = field(default_factory=dict)
    jobs: int = 0


def _run(recipe: Recipe, needed: Mapping[str, Path], out: Path) -> None:
    log = cache_dir() / "logs" / f"{recipe.artifact.replace('/', '-')}.log"
    # The entry's lock, which cache.entry holds, makes this name ours.
    scratch = cache_dir() / "build" / out.name
    say(f"build: {recipe.artifact} (about {recipe.minutes:g} min on 2 cores), log {log}")
    seconds = make(recipe, needed, out, scratch, log, Setting())
    say(f"build: {recipe.artifact} done in {seconds / 60:.1f} min")


def make(
    recipe: Recipe,
    needed: Mapping[str, Path],
    out: Path,
    scratch: Path,
    log: Path,
    setting: Setting,
) -> float:
    """Build the recipe's outputs into the empty directory `out`; return the seconds it took.

    needed: artifact -> directory of each artifact it needs.  scratch is cleared, used as the
    build's directory and removed.  Raises CommandFailed, EnvironmentUnfit for a full disk,
    InvalidData for other outputs than the recipe promises.
    """
    binds = {f"/recipe/{name}": path for name, path in recipe.files().items()}
    binds |= {f"/src/{name}": source(name) for name in recipe.sources}
    binds |= {f"/in/{name}": path for name, path in needed.items()}
    binds |= {f"/trees/{name}": rootfs(name) for name in recipe.trees}
    jobs = setting.jobs or len(os.sched_getaffinity(0))
    log.parent.mkdir(parents=True, exist_ok=True)
    cache.remove_tree(scratch)
    scratch.mkdir(parents=True)
    try:
        if driver() == "nix":
            from toolchain import nix_driver

            done = nix_driver.build(recipe, needed, out, scratch, log, setting, jobs)
        else:
            done = run_inside(
                ["sh", "-eu", f"/recipe/{recipe.script}", recipe.name],
                what=f"build {recipe.artifact}",
                binds={**binds, **setting.binds},
                writable={setting.directory: scratch, "/out": out},
                scratch=[setting.directory],
                directory=setting.directory,
                env={"JOBS": str(jobs), **recipe.env, **setting.env},
                log=log,
            )
    except CommandFailed as exc:
        # The log lies on the same disk: what the tools said of it may not have found room.
        if _is_full(scratch):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise cannot_write(scratch, full) from exc
        raise
    finally:
        with contextlib.suppress(OSError):  # the next build of this entry removes it or tells
            cache.remove_tree(scratch)
    made = {path.name for path in out.iterdir()}
    if made != set(recipe.outputs):
        raise InvalidData(
            f"{recipe.artifact}: the script left {sorted(made)} in /out, recipe.toml promises "
            f"{sorted(recipe.outputs)}"
        )
    for path in out.iterdir():
        if path.is_symlink() or not path.is_file():
            raise InvalidData(f"{recipe.artifact}: output {path.name} is not a plain file")
    return done.seconds


def _is_full(directory: Path) -> bool:
    status = os.statvfs(directory)
    no_inodes = status.f_files > 0 and status.f_favail == 0
    return no_inodes or status.f_bavail * status.f_frsize < FULL_BYTES

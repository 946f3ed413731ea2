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
  minutes  what a build takes on two cores, told beforehand
"""

import os
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolchain import cache
from toolchain.errors import InvalidData, UsageError
from toolchain.fetch import sha256_file
from toolchain.inside import run_inside
from toolchain.paths import REPO, cache_dir
from toolchain.rootfs import rootfs, tree_key
from toolchain.say import say
from toolchain.sources import source, sources

ROOMS = ("kernel", "llama.cpp", "board")


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
    env: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, Path]:
        """Return name below /recipe -> file: the script and all inputs, patterns resolved."""
        found: dict[str, Path] = {}
        for pattern in (self.script, *self.inputs):
            matches = sorted(self.room.glob(pattern))
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
        for name, table in tomllib.loads(path.read_text()).items():
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in table.items()
            }
            try:
                found[f"{room}/{name}"] = Recipe(f"{room}/{name}", REPO / room, **values)
            except TypeError as exc:
                raise InvalidData(f"{path}: [{name}]: {exc}") from exc
    return found


def build(artifact: str) -> Path:
    """Return the directory that holds the artifact's outputs, building what is missing.

    Raises UsageError for an unknown artifact; a failed build keeps its log and names it.
    """
    known = recipes()
    if artifact not in known:
        raise UsageError(f"artifact {artifact!r} is unknown; there are {', '.join(sorted(known))}")
    recipe = known[artifact]
    needed = {need: build(need) for need in recipe.needs}
    return cache.entry(artifact, _inputs(recipe, needed), lambda out: _run(recipe, needed, out))


def _inputs(recipe: Recipe, needed: Mapping[str, Path]) -> dict[str, Any]:
    """Everything that decides the artifact's bytes, as a JSON document."""
    known = sources()
    return {
        "artifact": recipe.artifact,
        "tree": tree_key("build"),
        "files": {name: sha256_file(path) for name, path in recipe.files().items()},
        "env": dict(recipe.env),
        "sources": {name: known[name].sha256 for name in recipe.sources},
        "needs": {name: cache.manifest(path) for name, path in needed.items()},
        "trees": {name: tree_key(name) for name in recipe.trees},
        "outputs": list(recipe.outputs),
    }


def _run(recipe: Recipe, needed: Mapping[str, Path], out: Path) -> None:
    log = cache_dir() / "logs" / f"{recipe.artifact.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    binds = {f"/recipe/{name}": path for name, path in recipe.files().items()}
    binds |= {f"/src/{name}": source(name) for name in recipe.sources}
    binds |= {f"/in/{name}": path for name, path in needed.items()}
    binds |= {f"/trees/{name}": rootfs(name) for name in recipe.trees}
    scratch_root = cache_dir() / "build"
    scratch_root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{recipe.name}-", dir=scratch_root))
    jobs = len(os.sched_getaffinity(0))
    say(f"build: {recipe.artifact} (about {recipe.minutes:g} min on 2 cores), log {log}")
    try:
        done = run_inside(
            ["sh", "-eu", f"/recipe/{recipe.script}", recipe.name],
            what=f"build {recipe.artifact}",
            binds=binds,
            writable={"/build": scratch, "/out": out},
            env={"JOBS": str(jobs), **recipe.env},
            log=log,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    made = {path.name for path in out.iterdir()}
    if made != set(recipe.outputs):
        raise InvalidData(
            f"{recipe.artifact}: the script left {sorted(made)} in /out, recipe.toml promises "
            f"{sorted(recipe.outputs)}"
        )
    say(f"build: {recipe.artifact} done in {done.seconds / 60:.1f} min")

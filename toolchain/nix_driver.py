"""The driver `nix`: build a recipe as a Nix derivation, in Nix's sandbox, over the pinned tree.

Promise: tree and sources are put into the store under their sha256, in the manner of requireFile;
the derivation is that of flake.nix, made by the same artifacts.nix from the same data; the sandbox
is on, nothing is substituted, and a store that lacks something says which command adds it.
Limit: builds only: what must run and not be built (the virtual board) needs another driver.  What a
recipe needs is taken from the cache of ./inv, where the flake builds it by Nix, too.
"""

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from toolchain import cache
from toolchain.command import Completed, run
from toolchain.docker_driver import image_digests
from toolchain.errors import EnvironmentUnfit, InvalidData, cannot_write
from toolchain.image import Digest, tree_entries, write_layer
from toolchain.paths import REPO, cache_dir
from toolchain.rootfs import rootfs
from toolchain.say import say
from toolchain.sources import source, sources

if TYPE_CHECKING:
    from toolchain.recipe import Recipe, Setting

EXPRESSION = REPO / "toolchain" / "artifacts.nix"
OLDEST = (2, 4)
"""The first whose fromTOML and path functions are what artifacts.nix uses."""
# An ordinary user of a shared Nix may not set these; then the machine's own settings hold.
OPTIONS = (
    *("--option", "sandbox", "true"),
    *("--option", "sandbox-fallback", "false"),
    *("--option", "substitute", "false"),
)
BUSYBOX = "bananaos-busybox"
LOCK = "nix-store"
"""Of the cache, held while the store is filled from places whose names begin with PLACES."""
PLACES = "nix-"


def refusal() -> str | None:
    """Return why Nix cannot be used here, in words; None when it can."""
    missing = [name for name in ("nix-build", "nix-store") if shutil.which(name) is None]
    if missing:
        return f"no Nix ({' and '.join(missing)} not found in PATH): install Nix"
    said = run(["nix-build", "--version"], what="ask Nix for its version", check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        return f"Nix is too old: got {said.strip()!r}, needed is {'.'.join(map(str, OLDEST))}"
    return None


def refuse() -> None:
    """Raise EnvironmentUnfit where Nix cannot be used."""
    if (why := refusal()) is not None:
        raise EnvironmentUnfit(why)


def tree_digest(tree: str) -> str:
    """Return the sha256 of the tree's archive, which is the layer of its Docker image."""
    return image_digests(tree).layers_sha256[0]


def busybox_digest() -> str:
    """Return the sha256 of the Nix archive (NAR) of a directory that holds the tree's busybox."""
    content = (rootfs("build") / "usr" / "bin" / "busybox").read_bytes()
    words = [b"nix-archive-1", b"(", b"type", b"directory", b"entry", b"(", b"name", b"busybox"]
    words += [b"node", b"(", b"type", b"regular", b"executable", b"", b"contents", content]
    words += [b")", b")", b")"]
    digest = Digest()
    for word in words:
        digest.write(struct.pack("<Q", len(word)) + word + bytes(-len(word) % 8))
    return digest.hexdigest()


def fill_store(trees: Iterable[str], names: Iterable[str]) -> None:
    """Put busybox, the trees' archives and the sources `names` into the store, where they lack."""
    with cache.exclusive(LOCK):
        _have_busybox()
        for tree in trees:
            _have_tree(tree)
        for name in names:
            store_name = f"bananaos-source-{name}"
            if not _is_there(store_name, sources()[name].sha256):
                with _named(store_name) as place:
                    shutil.copyfile(source(name), place)
                    _add(place)


def fill_store_for_flake() -> None:
    """Put into the store what this checkout's lock and pins say; flake.nix asks for it by hash.

    Raises EnvironmentUnfit for a full disk.
    """
    from toolchain.recipe import recipes

    built = [each for each in recipes().values() if not each.on_demand]
    trees = {"build", *(tree for each in built for tree in each.trees)}
    fill_store(sorted(trees), sorted({name for each in built for name in each.sources}))


def _have_busybox() -> None:
    if _is_there(BUSYBOX, busybox_digest(), "--recursive"):
        return
    with _named(BUSYBOX) as place:
        place.mkdir()
        shutil.copy(rootfs("build") / "usr" / "bin" / "busybox", place / "busybox")
        _add(place, "--recursive")


def _have_tree(tree: str) -> None:
    name = f"bananaos-tree-{tree}.tar"
    wanted = tree_digest(tree)
    if _is_there(name, wanted):
        return
    say(f"nix: adding the tree {tree} to the store")
    with _named(name) as place:
        with place.open("wb") as out:
            got = write_layer(Digest(out), tree_entries(rootfs(tree))).hexdigest()
        if got != wanted:
            raise InvalidData(f"{name}: got sha256 {got}, expected {wanted}; run it again")
        _add(place)


def _is_there(name: str, sha256: str, *recursive: str) -> bool:
    """Whether the store has the path of this name and hash, whole."""
    path = run(
        ["nix-store", "--print-fixed-path", *recursive, "sha256", sha256, name],
        what=f"name {name} in the Nix store",
    ).stdout.strip()
    valid = run(
        ["nix-store", "--check-validity", path], what="look into the Nix store", check=False
    )
    return valid.returncode == 0


def _add(place: Path, *recursive: str) -> str:
    added = run(
        ["nix-store", "--add-fixed", *recursive, "sha256", os.fspath(place)],
        what=f"add {place.name} to the Nix store",
    )
    return added.stdout.strip()


@contextlib.contextmanager
def _named(name: str) -> Iterator[Path]:
    """A place of this name, below a directory of its own in the cache."""
    parent = cache_dir() / "build"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PLACES, dir=parent) as directory:
            yield Path(directory) / name
    except OSError as exc:
        raise cannot_write(parent, exc) from exc


def build(
    recipe: "Recipe",
    needed: Mapping[str, Path],
    out: Path,
    scratch: Path,
    log: Path,
    setting: "Setting",
    jobs: int,
) -> Completed:
    """Build the recipe's outputs into `out`, with the help of `scratch`; see toolchain.recipe.make.

    A setting of its own, other than the usual, is built anew even if the store has the result.
    """
    trees = ("build", *recipe.trees)
    fill_store(trees, recipe.sources)
    given = {name: _given(name, path) for name, path in needed.items()}
    salt = "" if _is_usual(setting) else uuid.uuid4().hex
    arguments = {
        "trees": {tree: tree_digest(tree) for tree in trees},
        "busybox": busybox_digest(),
        "setting": {
            "directory": setting.directory,
            "env": dict(setting.env),
            "binds": {inside: _added(path) for inside, path in setting.binds.items()},
            "jobs": str(jobs) if salt else "",
            "salt": salt,
        },
    }
    expression = (
        f"import {_path(EXPRESSION)} (builtins.fromJSON {_quoted(json.dumps(arguments))} // "
        f"{{ root = {_path(REPO)}; given = {{ {' '.join(given.values())} }}; }})"
    )
    result = scratch / "result"
    done = run(
        [
            *("nix-build", *OPTIONS, "--out-link", os.fspath(result)),
            *("--expr", expression, "--attr", f'"{recipe.artifact}"'),
        ],
        what=f"build {recipe.artifact}",
        log=log,
        # The caller's umask is not Nix's affair, and no setting of his may change what is built.
        env={key: value for key, value in os.environ.items() if key != "NIX_PATH"},
    )
    _bring(os.fspath(result.readlink()), scratch / "brought", out)
    result.unlink()
    return done


def _bring(store_path: str, brought: Path, out: Path) -> None:
    """Copy what a store path holds to `out`; the store need not be a directory of this machine."""
    run(
        [
            *("sh", "-c"),
            'nix --extra-experimental-features nix-command store dump-path "$1" '
            '| nix-store --restore "$2"',
            *("sh", store_path, os.fspath(brought)),
        ],
        what=f"read {store_path}",
    )
    for path in brought.iterdir():
        target = out / path.name
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, target)
            target.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
        else:
            path.rename(target)  # recipe.make refuses it


def _is_usual(setting: "Setting") -> bool:
    from toolchain.recipe import Setting

    return setting == Setting()


def _given(artifact: str, path: Path) -> str:
    return f'"{artifact}" = builtins.storePath "{_added(path)}";'


def _added(path: Path) -> str:
    """Return the store path of a file or directory, adding it."""
    return run(
        ["nix-store", "--add", os.fspath(path.resolve())], what=f"add {path.name} to the Nix store"
    ).stdout.strip()


def _path(path: Path) -> str:
    """Return a path of the Nix language, whatever its name is: a literal may have no space."""
    return f"(/. + {_quoted(os.fspath(path))})"


def _quoted(text: str) -> str:
    """Return the text as a string of the Nix language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("${", "\\${")
    return f'"{escaped}"'

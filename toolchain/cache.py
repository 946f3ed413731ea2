"""The content-addressed cache: what was built once from the same inputs is not built again.

Promise: an entry appears whole or not at all, holds the sha256 of each of its files, and is checked
against them on every use; a damaged entry is set aside and built anew, and that is said; two
processes that want the same entry build it once; what a killed process left is removed by the next.
Limit: the checks defend against accidents and bit rot, not against somebody who can write to the
cache and forge its manifest; `verify` never trusts it.  BANANAOS_CACHE=off builds every entry anew
once in a process and says when it came out differently; it takes the trees (rootfs.py) as they are.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolchain import bundled
from toolchain.errors import EnvironmentUnfit, UsageError, cannot_write
from toolchain.fetch import sha256_file
from toolchain.paths import cache_dir
from toolchain.say import say

MANIFEST = "manifest.json"
VARIABLE = "BANANAOS_CACHE"
_fresh: set[Path] = set()  # with BANANAOS_CACHE=off: what this process has already built


def key_of(inputs: object) -> str:
    """Return the hex sha256 of a JSON document in canonical form."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entry(name: str, inputs: object, make: Callable[[Path], None]) -> Path:
    """Return the directory of the entry `name` for `inputs`, calling `make(directory)` if need be.

    `inputs` is any JSON document that names all that decides the content.  `make` fills an empty
    directory with plain files.  Raises EnvironmentUnfit when the cache cannot be written.
    """
    key = key_of(inputs)
    final = _place(name, key)
    anew = _is_off() and final not in _fresh
    if not anew and final.is_dir() and not _damage(final, key):
        with contextlib.suppress(OSError):  # a cache that is read only is used all the same
            os.utime(final / MANIFEST)  # clean.py removes what was not used for long
        return final
    with exclusive(final.name):
        if final.is_dir():
            damaged = _damage(final, key)
            if damaged:
                aside = set_aside(final)
                say(
                    f"cache: {final.name}: damaged ({', '.join(damaged)}); "
                    f"set aside as {aside.name} and built anew"
                )
        if (anew and final not in _fresh) or not final.is_dir():
            _build(
                final, inputs, make if anew else lambda new: _take_or_make(final, key, new, make)
            )
        _fresh.add(final)
    return final


def has(name: str, inputs: object) -> bool:
    """Whether `entry` would find this one, here or in an unpacked bundle; no byte is checked."""
    final = _place(name, key_of(inputs))
    if _is_off():
        return final in _fresh
    return final.is_dir() or bundled.entry(final.name) is not None


def _place(name: str, key: str) -> Path:
    return cache_dir() / "artifacts" / f"{name.replace('/', '-')}-{key[:16]}"


def manifest(directory: Path) -> dict[str, str]:
    """Return file name -> sha256 of an entry."""
    document: dict[str, Any] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    return dict(document["files"])


def set_aside(path: Path) -> Path:
    """Move a damaged directory of the cache out of the way; return where it is now.

    It is not removed: a program that is running in it goes on, and somebody may want to look.
    """
    try:
        aside = Path(tempfile.mkdtemp(prefix=f"damaged-{path.name}-", dir=path.parent))
        path.rename(aside)
    except OSError as exc:
        raise cannot_write(path, exc) from exc
    return aside


def remove_tree(path: Path) -> None:
    """Remove a directory with all in it, even what a build made read-only; it need not exist."""
    for directory, names, _ in os.walk(path):
        for name in names:
            below = Path(directory, name)
            if not below.is_symlink():
                below.chmod(0o700)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock `name` of this cache; say so when somebody else holds it, and wait."""
    path = cache_dir() / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    except OSError as exc:
        raise cannot_write(path, exc) from exc
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"cache: another process is making {name}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as exc:
            raise EnvironmentUnfit(
                f"{path}: this file system has no locks ({exc.strerror}); "
                "set XDG_CACHE_HOME to a directory on a local disk"
            ) from exc
        yield


def _take_or_make(final: Path, key: str, new: Path, make: Callable[[Path], None]) -> None:
    """Copy what an unpacked bundle has of this entry, if it is whole; else make it."""
    prebuilt = bundled.entry(final.name)
    if prebuilt is None:
        make(new)
    elif damaged := _damage(prebuilt, key):
        say(f"cache: {prebuilt}: damaged ({', '.join(damaged)}); built anew instead")
        make(new)
    else:
        for name in manifest(prebuilt):
            shutil.copy(prebuilt / name, new)
        say(f"cache: {final.name}: prebuilt, from the bundle; its hashes were checked")


def _is_off() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "on", "off"):
        raise UsageError(f"{VARIABLE}={value!r}: expected on or off")
    return value == "off"


def _build(final: Path, inputs: object, make: Callable[[Path], None]) -> None:
    """Fill a directory beside `final` and put it in its place; the caller holds the lock."""
    # The lock makes this name ours: whatever lies there was left by a process that was killed.
    temporary = final.parent / f".{final.name}.new"
    try:
        remove_tree(temporary)
        temporary.mkdir(parents=True)
        temporary.chmod(0o755)
        make(temporary)
        files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
        document = {"inputs": inputs, "files": files}
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        (temporary / MANIFEST).write_text(text, encoding="utf-8")
        _put(temporary, final)
    except OSError as exc:
        raise cannot_write(final, exc) from exc
    finally:
        with contextlib.suppress(OSError):
            remove_tree(temporary)


def _put(temporary: Path, final: Path) -> None:
    """Rename; an entry that is there already (BANANAOS_CACHE=off) stays if it is the same."""
    if final.is_dir():
        old, new = manifest(final), manifest(temporary)
        if old == new:
            return
        differing = sorted(name for name in old | new if old.get(name) != new.get(name))
        aside = set_aside(final)
        say(
            f"cache: {final.name}: built anew it differs ({', '.join(differing)}); "
            f"the old one is set aside as {aside.name}"
        )
    temporary.rename(final)


def _damage(directory: Path, key: str) -> list[str]:
    """Return what is wrong with an entry, in words; nothing when it is as it was made."""
    try:
        document = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if key_of(document["inputs"]) != key:
            return [f"{MANIFEST} is of other inputs"]
        expected = dict(document["files"])
        present = {path.name for path in directory.iterdir()} - {MANIFEST}
        damaged = [f"{name} is not of this entry" for name in sorted(present - expected.keys())]
        for name, sha256 in expected.items():
            if name not in present:
                damaged.append(f"{name} is missing")
            elif sha256_file(directory / name) != sha256:
                damaged.append(f"{name} has other bytes")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return [f"{MANIFEST}: {exc}"]
    return damaged

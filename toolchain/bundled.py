"""What an unpacked bundle brings along, in the checkout's folder `bundle`.

    bundle/commit                  the commit it was made from
    bundle/downloads/<sha256>      packages and sources, as in the cache
    bundle/artifacts/<entry>/      prebuilt artifacts, as in the cache
    bundle/wheels/                 what ./inv installs, instead of asking a package index
    bundle/supply/                 bill of materials and licence texts, for the reader only
    bundle/report/                 the report page and the appendix, for the reader only
    bundle/results/                runs, if some were packed (./inv analyze takes the folder)

Promise: nothing is taken that does not have the sha256 that was asked for; a plain clone has no
such folder and goes its own way.
Limit: read only; `./inv verify` and BANANAOS_CACHE=off do without the prebuilt artifacts.
"""

import os
import shutil
from pathlib import Path

from toolchain.errors import cannot_write
from toolchain.paths import REPO

FOLDER = REPO / "bundle"
DOWNLOADS, ARTIFACTS, WHEELS, COMMIT = "downloads", "artifacts", "wheels", "commit"
SUPPLY, REPORT, RESULTS = "supply", "report", "results"


def take_download(sha256: str, target: Path) -> bool:
    """Put the download into its place in the cache, to be checked there; False: not bundled."""
    bundled = FOLDER / DOWNLOADS / sha256
    if not bundled.is_file():
        return False
    _copy(bundled, target)
    return True


def entry(name: str) -> Path | None:
    """The bundled cache entry of this name, to be checked by the caller; None: not bundled."""
    path = FOLDER / ARTIFACTS / name
    return path if path.is_dir() else None


def commit() -> str | None:
    """The commit the bundle was made from; None in a clone, which has Git for that."""
    path = FOLDER / COMMIT
    return path.read_text(encoding="ascii").strip() if path.is_file() else None


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except OSError as exc:
        raise cannot_write(target, exc) from exc
    finally:
        temporary.unlink(missing_ok=True)

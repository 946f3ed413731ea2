"""What runs on the board, packed so that it travels with each connection and is never installed.

Promise: the board gets the files of board/onboard and what they import, as one archive on standard
input that is kept in memory there (memfd) and is gone with the process; the same bytes for the same
files.
Limit: Python 3.11 or later on the board; Linux.
"""

import base64
import functools
import io
import zipfile

from toolchain.paths import REPO

PATTERNS = (
    "board/__init__.py",
    "board/onboard/*.py",
    "board/agent/__init__.py",
    "board/agent/perf.py",
    "board/agent/system.py",
    "kernel/__init__.py",
    "kernel/sites.py",
    "kernel/btf.py",
    "toolchain/__init__.py",
    "toolchain/errors.py",
)

# Reads itself from the first line of standard input; the questions follow, a line each.
BOOT = """
import base64, os, runpy, sys
if sys.version_info < (3, 11):
    sys.exit(f"python3 is {sys.version.split()[0]}, expected 3.11 or later")
handle = os.memfd_create("bananaos")
with os.fdopen(handle, "wb", closefd=False) as archive:
    archive.write(base64.b64decode(sys.stdin.buffer.readline()))
sys.path.insert(0, f"/proc/self/fd/{handle}")
runpy.run_module("board.onboard", run_name="__main__")
""".strip()


@functools.cache
def package() -> str:
    """Return the archive in base64, without a line break."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in PATTERNS:
            for path in sorted(REPO.glob(pattern)):
                info = zipfile.ZipInfo(str(path.relative_to(REPO)))
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, path.read_bytes())
    return base64.b64encode(content.getvalue()).decode()

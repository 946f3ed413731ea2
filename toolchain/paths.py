"""Where things lie: the checkout and the cache outside it.

Promise: every path of this package starts from one of these two.
Limit: nothing is created here; whoever writes creates.
"""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """Return the content-addressed cache's directory (XDG Base Directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification tells to ignore a relative value.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "bananaos"

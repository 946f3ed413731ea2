"""Where things lie: the checkout and the cache outside it.

Promise: every path of this package starts from one of these two.
Limit: nothing is created here; whoever writes creates.
"""

import os
from pathlib import Path

from toolchain.errors import EnvironmentUnfit

REPO = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """Return the content-addressed cache's directory (XDG Base Directory specification).

    Raises EnvironmentUnfit for a user without a home directory who names no other place.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification tells to ignore a relative value.
    if base.startswith("/"):
        return Path(base) / "bananaos"
    try:
        return Path.home() / ".cache" / "bananaos"
    except RuntimeError as exc:
        raise EnvironmentUnfit(
            f"user {os.getuid()} has no home directory; set XDG_CACHE_HOME to an absolute path"
        ) from exc

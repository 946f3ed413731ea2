"""Where things lie: the checkout, and outside it the cache and what is known of boards.

Promise: every path of this package starts from one of these three.
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
    return _base("XDG_CACHE_HOME", ".cache") / "bananaos"


def state_dir() -> Path:
    """Return the directory of what is known and cannot be made anew: keys and pins of boards."""
    return _base("XDG_STATE_HOME", ".local/state") / "bananaos"


def _base(variable: str, default: str) -> Path:
    base = os.environ.get(variable, "")
    # The specification tells to ignore a relative value.
    if base.startswith("/"):
        return Path(base)
    try:
        return Path.home() / default
    except RuntimeError as exc:
        raise EnvironmentUnfit(
            f"user {os.getuid()} has no home directory; set {variable} to an absolute path"
        ) from exc

"""What Git says of this checkout.

Promise: where there is no Git, or it refuses, the answer is None: an unpacked archive needs none.
Limit: what must have an answer (artifact/bundle.py) runs Git itself, and its error is the reason.
"""

from collections.abc import Sequence

from toolchain.command import run
from toolchain.errors import EnvironmentUnfit
from toolchain.paths import REPO


def git_output(words: Sequence[str]) -> str | None:
    """Return what `git WORDS` prints in this checkout, without the end of its last line."""
    try:
        done = run(["git", "-C", str(REPO), *words], what="asking Git of the checkout", check=False)
    except EnvironmentUnfit:
        return None  # no Git on this host
    return done.stdout.strip() if done.returncode == 0 else None

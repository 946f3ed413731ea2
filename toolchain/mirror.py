"""Which Debian archive this machine may ask.

Promise: the address comes from BANANAOS_DEBIAN_MIRROR or from the machine's own apt sources, never
from this repository; where there is neither, one line says which variable to set.
Limit: the archive's trustworthiness does not matter, every file is checked against the lock; its
reach does: a mirror that has dropped a file is reported by fetch.py.
"""

import os
import shutil
import urllib.parse

from toolchain.command import run
from toolchain.errors import EnvironmentUnfit, UsageError

VARIABLE = "BANANAOS_DEBIAN_MIRROR"


def find_mirrors() -> list[str]:
    """Return base URLs of Debian archives (the part before /dists or /pool), best first.

    Raises UsageError for a malformed variable, EnvironmentUnfit where no archive is known.
    """
    named = os.environ.get(VARIABLE, "")
    if named:
        if not _is_address(named):
            raise UsageError(
                f"{VARIABLE}={named!r} is not the http(s) address of a Debian archive "
                "(the directory that holds dists/ and pool/)"
            )
        return [named.rstrip("/")]
    mirrors: list[str] = []
    if shutil.which("apt-get"):
        # apt itself knows how to read its sources, in either of their two formats.
        listed = run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
            what="read this machine's apt sources",
            check=False,
        )
        addresses = {line.rstrip("/") for line in listed.stdout.splitlines()}
        mirrors = sorted(a for a in addresses if a.startswith("http") and a.endswith("/debian"))
    if not mirrors:
        raise EnvironmentUnfit(
            "no Debian archive among this machine's apt sources; set "
            f"{VARIABLE} to the address of one (the directory that holds dists/ and pool/)"
        )
    return mirrors


def _is_address(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half a bracket of an IPv6 address
        return False
    return valid and text.isascii() and text.isprintable() and not set(text) & set(" ?#")

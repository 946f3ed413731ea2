"""Which processes still use a file: to assert that nothing was left running.

Promise: compares device and inode, so bind mounts and other namespaces do not hide a user.
Limit: sees only processes that this user may look at (its own, or all as root).
"""

from pathlib import Path


def users_of(path: Path) -> list[int]:
    """Return the ids of processes that have the file at `path` open; none if it is not there."""
    if not path.exists():
        return []
    wanted = path.stat()
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            seen = link.stat()  # follows the link, whatever its text says
        except OSError:
            continue
        if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.add(int(link.parts[2]))
    return sorted(found)

"""What is changed on the board as root, and how it is put back.

Promise: `plan` says what would be changed and changes nothing; `apply` writes each change down
before it makes it; `undo` puts everything back in reverse order, says what it could not, and may be
repeated; a value that somebody else has changed since is left as it is, and that is said.  A reboot
has undone everything: what was written down in another boot is forgotten.
Limit: mounts and small files (governors, sysctls) only; as root.
"""

import glob
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from board.agent.system import text
from board.onboard.lock import boot_id
from board.onboard.refused import Refused

MOUNTS = (("debugfs", "/sys/kernel/debug"), ("bpf", "/sys/fs/bpf"))
VALUES = (
    ("/proc/sys/net/core/bpf_jit_enable", ("0",), "1", "kfunc calls need the JIT"),
    ("/proc/sys/kernel/kptr_restrict", ("2",), "1", "the save sites are found by their symbols"),
)
GOVERNOR = "performance"
Change = dict[str, str]


def plan(governors: str) -> list[Change]:
    """The changes that a run needs and that are not made yet.

    Each is {what: mount, type, path} or {what: value, path, old, new, why}.
    """
    found: list[Change] = []
    for kind, path in MOUNTS:
        if kind not in _mounted(path) and kind in _file_systems() and Path(path).is_dir():
            found.append({"what": "mount", "type": kind, "path": path})
    for path, old_values, new, why in VALUES:
        old = text(path)
        if old in old_values:
            found.append({"what": "value", "path": path, "old": str(old), "new": new, "why": why})
    for path in sorted(glob.glob(governors)):  # noqa: PTH207 (the pattern is absolute)
        old = text(path)
        if old is not None and old != GOVERNOR:
            found.append(
                {"what": "value", "path": path, "old": old, "new": GOVERNOR, "why": "a fixed clock"}
            )
    return found


def apply(directory: str, governors: str, flashed: bool) -> list[Change]:
    """Make the planned changes; returns them.  flashed: they stay until `unflash`."""
    root = Path(directory)
    known = state(directory)
    made: list[Change] = known["changes"]
    done = []
    try:
        for change in plan(governors):
            made.append(change)
            _remember(root, made, known["flashed"] or flashed)
            _make(change)
            done.append(change)
    except OSError as error:
        left = undo(directory)["left"]
        after = f"not undone: {'; '.join(left)}" if left else "all is as it was"
        raise Refused(f"{error.filename}: {error.strerror}; {after}") from error
    _remember(root, made, known["flashed"] or flashed)
    return done


def undo(directory: str) -> dict[str, list[str]]:
    """Put back what was changed; returns what was undone and what could not be, a line each.

    What is still in force afterwards stays written down, for the next try.
    """
    root = Path(directory)
    undone: list[str] = []
    left: list[str] = []
    kept: list[Change] = []
    for change in reversed(state(directory)["changes"]):
        line = _put_back(change)
        if line is None:
            undone.append(words(change))
        else:
            left.append(line)
            if _in_force(change):  # what somebody else changed meanwhile is theirs
                kept.insert(0, change)
    if kept:
        _remember(root, kept, flashed=False)
    else:
        (root / "state.json").unlink(missing_ok=True)
    return {"undone": undone, "left": left}


def state(directory: str) -> dict[str, Any]:
    """What is changed now: `changes`, and whether the board was flashed."""
    try:
        content = json.loads((Path(directory) / "state.json").read_text())
    except (OSError, ValueError):
        return {"flashed": False, "changes": []}
    changes = content["changes"] if content["boot_id"] == boot_id() else []
    return {"flashed": content["flashed"], "changes": changes}


def words(change: Change) -> str:
    """A change in words."""
    if change["what"] == "mount":
        return f"mount {change['type']} at {change['path']}"
    return f"set {change['path']} from {change['old']} to {change['new']}"


def _make(change: Change) -> None:
    if change["what"] == "value":
        Path(change["path"]).write_text(change["new"] + "\n")
        return
    kind, path = change["type"], change["path"]
    argv = ["mount", "-n", "-t", kind, kind, path]  # -n: nothing below /run/mount
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.returncode, done.stderr.strip() or "mount failed", path)


def _put_back(change: Change) -> str | None:
    """Undo one change; returns why it could not be."""
    path = change["path"]
    if change["what"] == "mount":
        if change["type"] not in _mounted(path):
            return None
        done = subprocess.run(["umount", "-n", path], capture_output=True, text=True, check=False)
        return f"{path}: {done.stderr.strip()}" if done.returncode else None
    now = text(path)
    if now == change["old"]:
        return None
    if now != change["new"]:
        return f"{path}: is {now}, was set to {change['new']}: somebody changed it: left as it is"
    try:
        Path(path).write_text(change["old"] + "\n")
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _in_force(change: Change) -> bool:
    if change["what"] == "mount":
        return change["type"] in _mounted(change["path"])
    return text(change["path"]) == change["new"]


def _remember(root: Path, changes: Sequence[Change], flashed: bool) -> None:
    content = {"boot_id": boot_id(), "flashed": flashed, "changes": list(changes)}
    temporary = root / ".state.json.new"
    with temporary.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(root / "state.json")


def _mounted(path: str) -> set[str]:
    """The file system types mounted exactly there."""
    lines = (text("/proc/self/mounts") or "").splitlines()
    rows = [line.split() for line in lines]
    return {row[2] for row in rows if len(row) > 2 and row[1] == path}


def _file_systems() -> set[str]:
    return {line.split()[-1] for line in (text("/proc/filesystems") or "").splitlines()}

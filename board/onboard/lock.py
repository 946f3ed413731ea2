"""One driver at a time: who uses the board, since when, and when he was last heard of.

Promise: taking the lock is atomic; the second driver learns the first one's name and age.  What is
taken over, and said to be: a lock of another boot, and the lock of a driver that left no run going
and whose connection has been gone for a minute, or that has been silent for ten.
Limit: drivers that use other directories on the board do not see each other here; doctor sees
their processes.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from board.agent.system import text
from board.onboard import runs, store
from board.onboard.refused import Refused

GONE_S, SILENT_S = 60.0, 600.0


def boot_id() -> str:
    """The kernel's random name for this boot."""
    return text("/proc/sys/kernel/random/boot_id") or ""


def take(directory: str, token: str, owner: str) -> dict[str, str | None]:
    """Take the lock for the driver `token`; returns the owner it was taken over from, or None."""
    root = store.opened(directory)
    with _exclusive(root):
        held = _held(root)
        before = None
        if held is not None and held["token"] != token:
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            silent_s = now_s - held["beat_s"]
            going = runs.going(root)
            connected = runs.start_time(held["pid"]) == held["started"]
            if silent_s < (SILENT_S if connected else GONE_S) or going:
                state = f"last heard of {silent_s:.0f} s ago"
                if going:
                    state += f", its run {going[0]} is going on"
                raise Refused(
                    f"in use by {held['owner']} for {_words(now_s - held['since_s'])}, {state}: "
                    "wait for it, or end it with ./inv unflash"
                )
            before = f"{held['owner']}, not heard of for {_words(silent_s)}"
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        since_s = held["since_s"] if held and held["token"] == token else now_s
        content = {"token": token, "owner": owner, "since_s": since_s}
        _write(root, content | _now())
    return {"taken_over_from": before}


def beat(directory: str, token: str) -> dict[str, bool]:
    """Say that the driver `token` is there; whether it still holds the lock."""
    root = Path(directory)
    if not root.is_dir():
        return {"held": False}
    with _exclusive(root):
        held = _held(root)
        mine = held is not None and held["token"] == token
        if held is not None and mine:
            _write(root, held | _now())
    return {"held": mine}


def release(directory: str, token: str) -> dict[str, bool]:
    """Give the lock back, if `token` holds it."""
    root = Path(directory)
    if not root.is_dir():
        return {"released": False}
    with _exclusive(root):
        held = _held(root)
        mine = held is not None and held["token"] == token
        if mine:
            (root / "lock.json").unlink(missing_ok=True)
    return {"released": mine}


def holder(directory: str) -> dict[str, str | None]:
    """Who holds the lock, without touching it."""
    held = _held(Path(directory))
    return {"owner": held["owner"] if held else None}


def _now() -> dict[str, Any]:
    """Of this boot, this moment, and this process, which ends with the driver's connection."""
    return {
        "boot_id": boot_id(),
        "beat_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        "pid": os.getpid(),
        "started": runs.start_time(os.getpid()),
    }


def _held(root: Path) -> dict[str, Any] | None:
    try:
        held: dict[str, Any] = json.loads((root / "lock.json").read_text())
        return held if held["boot_id"] == boot_id() else None
    except (OSError, ValueError, KeyError):
        return None


def _write(root: Path, content: dict[str, Any]) -> None:
    temporary = root / ".lock.json.new"
    temporary.write_text(json.dumps(content))
    temporary.replace(root / "lock.json")


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    with (root / store.MARK).open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

"""The results folder: runs that count, runs under way, runs that are void.

    results/index.json             marks the folder, its version, and each experiment's cells
    results/runs/<run-id>/         record.json and the raw files of a finished run
    results/partial/<run-id>/      a run under way, locked by the process that runs it
    results/void/<run-id>/         what an interrupted run left, with void.txt saying why
    results/reproduce.lock         locked, and naming the process, while a reproduction runs here

Promise: a folder appears under runs/ at once and with a checked record, or not at all; nothing
under runs/ is ever changed or removed; two processes may run the same cell at the same time and get
different attempts; what a killed process left is found and voided.
Limit: one machine; the locks are those of the local file system.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from schemas.record import RECORD, RUNS, read_records, run_id, split_run_id
from toolchain.errors import EnvironmentUnfit, InvalidData

_DISK_TROUBLE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
)
_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class Partial:
    """A run under way; `path` is its folder until it is finished or void."""

    run_id: str
    attempt: int
    path: Path
    _lock: int


class Results:
    """One results folder, made if need be.

    Raises InvalidData when the folder is of another version or holds a bad record, and
    EnvironmentUnfit when it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._runs, self._partial, self._void = (
            self.root / name for name in (RUNS, "partial", "void")
        )
        self._index = self.root / "index.json"
        with self._same_version():
            # Looked at before anything is written: a folder of another version stays as it is.
            index = schemas.read(self._index, "results") if self._index.exists() else None
            self._records = {record["run_id"]: record for record in read_records(self.root)}
        with disk_trouble(self.root):
            for directory in (self._runs, self._partial, self._void):
                directory.mkdir(parents=True, exist_ok=True)
        if not os.access(self._partial, os.W_OK):
            raise EnvironmentUnfit(
                f"{self._partial}: cannot be written by this user: pass --results DIR"
            )
        if index is None:
            schemas.write(self._index, {"schema_version": "1", "experiments": {}}, "results")

    @property
    def records(self) -> Mapping[str, dict[str, Any]]:
        """Run id to record of every run that was finished when this folder was opened."""
        return self._records

    def valid_record(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first valid record of exactly this cell, or None."""
        matching = [r for r in self._records.values() if r["valid"] and r["cell"] == cell]
        return min(matching, key=lambda r: split_run_id(r["run_id"])[1], default=None)

    @contextlib.contextmanager
    def reproducing(self) -> Iterator[None]:
        """Hold the folder for one reproduction; EnvironmentUnfit names who holds it already."""
        path = self.root / "reproduce.lock"
        with disk_trouble(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
                raise EnvironmentUnfit(
                    f"another reproduction is at work in {self.root} (process {owner or '?'}): "
                    "wait for it or pass --results DIR"
                ) from None
            with disk_trouble(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def remember(self, experiment: str, board: str, hashes: Sequence[str]) -> None:
        """Note which cells the experiment consists of on this board, in place of what was noted."""
        index = schemas.read(self._index, "results")
        index["experiments"].setdefault(experiment, {})[board] = sorted(set(hashes))
        schemas.write(self._index, index, "results")

    def require_space(self, mib: float) -> None:
        """Raise EnvironmentUnfit unless that much is free where the folder lies."""
        free_mib = shutil.disk_usage(self.root).free / 2**20
        if free_mib < mib:
            raise EnvironmentUnfit(
                f"{self.root}: {free_mib:.0f} MiB free, {mib:.0f} MiB needed: "
                "free some space or pass --results DIR"
            )

    def is_full(self) -> bool:
        """Whether there is no room left to tell a failed run from one that could not write."""
        return shutil.disk_usage(self.root).free < _FULL_BYTES

    def begin(self, cell: Mapping[str, Any]) -> Partial:
        """Take the cell's next attempt; raises EnvironmentUnfit when the folder is not writable."""
        with disk_trouble(self._partial), self._allocating():
            attempt = 1
            while True:
                name = run_id(cell, attempt)
                path = self._partial / name
                taken = (self._runs / name).exists() or (self._void / name).exists()
                if not taken:
                    with contextlib.suppress(FileExistsError):
                        path.mkdir()
                        return Partial(name, attempt, path, _lock_directory(path))
                attempt += 1

    def finish(self, partial: Partial, record: Mapping[str, Any]) -> Path:
        """Write the checked record and move the run to runs/; returns its folder there."""
        schemas.write(partial.path / RECORD, record, "record")
        final = self._runs / partial.run_id
        with disk_trouble(final):
            partial.path.rename(final)
        os.close(partial._lock)
        return final

    def void(self, partial: Partial, why: str) -> Path:
        """Move an interrupted run out of the way, its logs kept; returns its folder under void/."""
        with self._allocating():
            final = self._make_void(partial.path, why)
        os.close(partial._lock)
        return final

    def discard(self, partial: Partial) -> None:
        """Remove a run that could not be written: it holds nothing and takes up the space."""
        shutil.rmtree(partial.path, ignore_errors=True)
        os.close(partial._lock)

    def sweep(self) -> list[Path]:
        """Void what killed processes left under partial/; returns the folders under void/."""
        swept: list[Path] = []
        with disk_trouble(self._partial), self._allocating():
            for path in sorted(self._partial.iterdir()):
                try:
                    lock = _lock_directory(path)
                except BlockingIOError:
                    continue
                swept.append(self._make_void(path, "left behind by a process that was killed"))
                os.close(lock)
        return swept

    def _make_void(self, path: Path, why: str) -> Path:
        final = self._void / path.name
        with disk_trouble(final):
            path.rename(final)
        # The note is a courtesy; a disk too full for it must not hide what went wrong.
        with contextlib.suppress(OSError):
            (final / "void.txt").write_text(f"{why}\n", encoding="utf-8")
        return final

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """Exclude other processes and threads between looking at the folders and making one."""
        descriptor = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _same_version(self) -> Iterator[None]:
        try:
            yield
        except schemas.OtherVersion as error:
            raise InvalidData(
                f"{self.root} was made by another version of this project ({error}): "
                "pass --results DIR for a new folder, or move this one away"
            ) from None


@contextlib.contextmanager
def disk_trouble(path: Path) -> Iterator[None]:
    """Turn the file system's refusals into EnvironmentUnfit."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {error.filename or path}: {error.strerror}: earlier results are "
            "untouched; free some space or pass --results DIR, then run the same again"
        ) from error


def is_disk_trouble(error: OSError) -> bool:
    """Whether the file system refused: full, over quota, read-only, not permitted, broken."""
    return error.errno in _DISK_TROUBLE


def _lock_directory(path: Path) -> int:
    """Lock a run's folder for as long as the descriptor is open; BlockingIOError if it is held."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

"""Download the locked files: parallel, resumable, each checked for size and sha256.

Promise: a file appears under its sha256 only after its bytes were checked; an interrupted download
goes on where it stopped; a file that a mirror no longer carries, one that came altered, and a full
disk are three different messages.
Limit: one try per mirror and file, plus a fresh start after a bad resume; no retry loop hides a
sick network.
"""

import asyncio
import errno
import hashlib
import os
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.paths import cache_dir
from toolchain.say import say

CONNECTIONS = 8
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """A file to have: its place below a mirror, its size and its sha256."""

    label: str
    relative_url: str
    size_bytes: int
    sha256: str


def downloads_dir() -> Path:
    """Return the directory of checked downloads, one file per sha256."""
    return cache_dir() / "downloads"


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(files: Sequence[Wanted], mirrors: Sequence[str], directory: Path | None = None) -> None:
    """Have every wanted file in `directory` (default: the cache), downloading what is missing.

    A file is trusted once it lies there under its sha256; rootfs.py checks again when it unpacks.
    Raises EnvironmentUnfit (mirror, network, disk) or InvalidData (altered bytes).
    """
    directory = directory or downloads_dir()
    _guard_disk(directory, lambda: directory.mkdir(parents=True, exist_ok=True))
    missing = {f.sha256: f for f in files if not _present(directory / f.sha256, f.size_bytes)}
    if missing:
        asyncio.run(_fetch_all(list(missing.values()), mirrors, directory))


def _present(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


async def _fetch_all(files: list[Wanted], mirrors: Sequence[str], directory: Path) -> None:
    total_bytes = sum(f.size_bytes for f in files)
    say(f"fetch: {len(files)} files, {total_bytes / 1e6:.0f} MB")
    progress = _Progress(len(files), total_bytes)
    turn = asyncio.Semaphore(CONNECTIONS)
    # No limit on the whole, only on silence: a slow line is no error.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:

        async def one(wanted: Wanted) -> None:
            async with turn:
                await _fetch_one(session, wanted, mirrors, directory, progress)

        tasks = [asyncio.ensure_future(one(f)) for f in files]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _fetch_one(
    session: aiohttp.ClientSession,
    wanted: Wanted,
    mirrors: Sequence[str],
    directory: Path,
    progress: "_Progress",
) -> None:
    gone: list[str] = []
    for mirror in mirrors:
        url = f"{mirror}/{urllib.parse.quote(wanted.relative_url)}"
        part = directory / f"{wanted.sha256}.part"
        try:
            if not await _download(session, url, part, wanted, progress):
                gone.append(url)
                continue
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise EnvironmentUnfit(
                f"{wanted.label}: {url}: {exc or type(exc).__name__}; "
                "what came so far is kept, run the same command again to go on"
            ) from exc
        got = sha256_file(part)
        if got != wanted.sha256 or part.stat().st_size != wanted.size_bytes:
            size = part.stat().st_size
            part.unlink()
            raise InvalidData(
                f"{wanted.label}: {url}: altered or damaged on the way: got {size} bytes with "
                f"sha256 {got}, expected {wanted.size_bytes} bytes with {wanted.sha256}; thrown "
                "away, run the same command again, or name another mirror"
            )
        part.replace(directory / wanted.sha256)
        progress.file_done()
        return
    raise EnvironmentUnfit(
        f"{wanted.label}: no longer carried by the mirror (404 for {' and '.join(gone)}): Debian "
        "has moved to a newer point release; name a mirror that still has it, use the bundle, or "
        "make a new lock (./inv relock)"
    )


async def _download(
    session: aiohttp.ClientSession,
    url: str,
    part: Path,
    wanted: Wanted,
    progress: "_Progress",
) -> bool:
    """Bring `part` to its full length; return False when the mirror has no such file."""
    have_bytes = part.stat().st_size if part.exists() else 0
    if have_bytes >= wanted.size_bytes:
        part.unlink()
        have_bytes = 0
    headers = {"Range": f"bytes={have_bytes}-"} if have_bytes else {}
    async with session.get(url, headers=headers) as response:
        if response.status == 404:
            return False
        if response.status not in (200, 206):
            raise aiohttp.ClientError(f"HTTP {response.status} {response.reason}")
        resumed = response.status == 206 and have_bytes > 0
        progress.add(have_bytes if resumed else 0)
        received = have_bytes if resumed else 0
        try:
            with part.open("ab" if resumed else "wb") as stream:
                async for block in response.content.iter_chunked(READ_BYTES):
                    stream.write(block)
                    received += len(block)
                    progress.add(len(block))
                    if received > wanted.size_bytes:
                        break  # the length check above this call tells
        except OSError as exc:
            raise _disk_error(part, exc) from exc
    if received < wanted.size_bytes:
        raise aiohttp.ClientError(f"ended after {received} of {wanted.size_bytes} bytes")
    return True


def _guard_disk(path: Path, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as exc:
        raise _disk_error(path, exc) from exc


def _disk_error(path: Path, exc: OSError) -> EnvironmentUnfit:
    hint = "free some space" if exc.errno == errno.ENOSPC else "make it writable"
    return EnvironmentUnfit(
        f"{path}: cannot write: {os.strerror(exc.errno or 0)}; {hint} "
        "(the cache follows XDG_CACHE_HOME) and run the same command again"
    )


class _Progress:
    """A line every few seconds; enough for a terminal and a log alike."""

    INTERVAL_S = 5.0

    def __init__(self, files: int, total_bytes: int) -> None:
        self.files, self.total_bytes = files, total_bytes
        self.done_files, self.done_bytes = 0, 0
        self.started = self.last = time.monotonic()

    def add(self, count_bytes: int) -> None:
        self.done_bytes += count_bytes
        now = time.monotonic()
        if now - self.last >= self.INTERVAL_S:
            self.last = now
            self._print(now)

    def file_done(self) -> None:
        self.done_files += 1
        if self.done_files == self.files:
            self._print(time.monotonic())

    def _print(self, now: float) -> None:
        rate = self.done_bytes / 1e6 / max(now - self.started, 1e-3)
        say(
            f"fetch: {self.done_files}/{self.files} files, {self.done_bytes / 1e6:.0f} of "
            f"{self.total_bytes / 1e6:.0f} MB, {rate:.1f} MB/s"
        )

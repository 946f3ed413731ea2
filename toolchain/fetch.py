"""Download the locked files: parallel, resumable, each checked for size and sha256.

Promise: a file appears under its sha256 only after its bytes were checked, and is checked again
before it is relied on; an interrupted download goes on where it stopped; a file that no mirror
carries any longer, one that came altered, a sick network and a full disk are different messages.
Limit: one try per mirror and file, plus a fresh start after a bad resume; no retry loop hides a
sick network.  Two callers at once would write the same parts: rootfs.py holds a lock.
"""

import asyncio
import concurrent.futures
import hashlib
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from toolchain import bundled
from toolchain.errors import EnvironmentUnfit, InvalidData, cannot_read, cannot_write
from toolchain.paths import cache_dir
from toolchain.say import say

CONNECTIONS = 8
READ_BYTES = 1 << 20
CONNECT_S, SILENCE_S = 30.0, 60.0  # no limit on the whole: a slow line is no error
CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")
GONE = (404, 410)
NETWORK_TROUBLE = (aiohttp.ClientError, TimeoutError)
# What is asked for is the file itself, never a compressed form of it.
HEADERS = {"Accept-Encoding": "identity"}


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


def fetch(
    files: Sequence[Wanted],
    find_mirrors: Callable[[], Sequence[str]],
    directory: Path | None = None,
) -> None:
    """Have every wanted file in `directory` (default: the cache), downloading what is missing.

    find_mirrors is asked only if anything is missing.  A file that lies there with other bytes is
    thrown away, which is said, and fetched anew.
    Raises EnvironmentUnfit (mirror, network, disk) or InvalidData (altered bytes).
    """
    directory = directory or downloads_dir()
    unique = {wanted.sha256: wanted for wanted in files}.values()
    with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as pool:
        present = pool.map(lambda wanted: _present(wanted, directory), unique)
        missing = [wanted for wanted, here in zip(unique, present, strict=True) if not here]
    if not missing:
        return
    mirrors = find_mirrors()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise cannot_write(directory, exc) from exc
    asyncio.run(_fetch_all(missing, mirrors, directory))


def _present(wanted: Wanted, directory: Path) -> bool:
    path = directory / wanted.sha256
    try:
        if not path.is_file() and not bundled.take_download(wanted.sha256, path):
            return False
        if path.stat().st_size == wanted.size_bytes and sha256_file(path) == wanted.sha256:
            return True
    except OSError as exc:
        raise cannot_read(path, exc) from exc
    say(f"fetch: {wanted.label}: the download in the cache is damaged; fetching it anew")
    try:
        path.unlink()
    except OSError as exc:
        raise cannot_write(path, exc) from exc
    return False


async def _fetch_all(files: list[Wanted], mirrors: Sequence[str], directory: Path) -> None:
    total_bytes = sum(f.size_bytes for f in files)
    say(f"fetch: {len(files)} files, {total_bytes / 1e6:.0f} MB")
    progress = _Progress(len(files), total_bytes)
    turn = asyncio.Semaphore(CONNECTIONS)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True, headers=HEADERS) as session:

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
    """Ask one mirror after the other; what they all said decides the message."""
    gone: list[str] = []
    broken: list[str] = []
    altered: list[InvalidData] = []
    for mirror in mirrors:
        url = f"{mirror}/{urllib.parse.quote(wanted.relative_url)}"
        try:
            if await _download(session, url, directory, wanted, progress):
                progress.file_done()
                return
            gone.append(url)
        except NETWORK_TROUBLE as exc:
            broken.append(f"{url}: {str(exc) or type(exc).__name__}")
        except InvalidData as exc:
            altered.append(exc)
    if altered:
        raise altered[0]
    if broken:
        raise EnvironmentUnfit(
            f"{wanted.label}: {' and '.join(broken)}; "
            "what came so far is kept, run the same command again to go on"
        )
    raise EnvironmentUnfit(
        f"{wanted.label}: no longer carried by the mirror (404 for {' and '.join(gone)}): Debian "
        "has moved to a newer point release; name a mirror that still has it, use the bundle, or "
        "make a new lock (./inv lock --accept)"
    )


async def _download(
    session: aiohttp.ClientSession,
    url: str,
    directory: Path,
    wanted: Wanted,
    progress: "_Progress",
) -> bool:
    """Bring the file to its place in `directory`; return False when the mirror has none.

    Raises InvalidData for other bytes, what NETWORK_TROUBLE lists, and EnvironmentUnfit (disk).
    """
    part = directory / f"{wanted.sha256}.part"
    have_bytes = part.stat().st_size if part.exists() else 0
    # A part that is not shorter than the whole never came to its check: start afresh.
    starts = [have_bytes, 0] if 0 < have_bytes < wanted.size_bytes else [0]
    for start in starts:
        if not await _receive(session, url, part, start, wanted, progress):
            return False
        try:
            got = await asyncio.to_thread(sha256_file, part)
            size_bytes = part.stat().st_size
            if got == wanted.sha256:
                part.replace(directory / wanted.sha256)
                return True
            part.unlink()
        except OSError as exc:
            raise cannot_write(part, exc) from exc
        progress.add(-size_bytes)
    raise _altered(wanted, url, f"{size_bytes} bytes with sha256 {got}, thrown away")


async def _receive(
    session: aiohttp.ClientSession,
    url: str,
    part: Path,
    start: int,
    wanted: Wanted,
    progress: "_Progress",
) -> bool:
    """Bring `part` from `start` bytes to its full length; return False when there is no such file.

    A mirror that cannot go on at `start` sends the whole, which replaces the part, or leaves a part
    that the check of its sum rejects.
    """
    headers = {"Range": f"bytes={start}-"} if start else {}
    async with session.get(url, headers=headers) as response:
        if response.status in GONE:
            return False
        if response.status == 416 and start:
            return True
        if response.status not in (200, 206):
            raise aiohttp.ClientError(f"HTTP {response.status} {response.reason}")
        total_bytes = response.content_length
        if response.status == 206:
            served = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            total_bytes = int(served[1]) if served else None
        # Before a byte is taken: a login page or another file under the same name is no download.
        if total_bytes is not None and total_bytes != wanted.size_bytes:
            raise _altered(wanted, url, f"{total_bytes} bytes")
        received = start if response.status == 206 else 0
        progress.add(received)
        try:
            with part.open("ab" if received else "wb") as stream:
                async for block in response.content.iter_chunked(READ_BYTES):
                    stream.write(block)
                    received += len(block)
                    progress.add(len(block))
                    if received > wanted.size_bytes:
                        break  # the check of the sum rejects it
        except NETWORK_TROUBLE:  # some of these are OSErrors, too
            raise
        except OSError as exc:
            raise cannot_write(part, exc) from exc
    if received < wanted.size_bytes:
        raise aiohttp.ClientError(f"ended after {received} of {wanted.size_bytes} bytes")
    return True


def _altered(wanted: Wanted, url: str, got: str) -> InvalidData:
    return InvalidData(
        f"{wanted.label}: {url}: altered or damaged on the way: got {got}; expected "
        f"{wanted.size_bytes} bytes with sha256 {wanted.sha256}; run the same command again, or "
        "name another mirror"
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

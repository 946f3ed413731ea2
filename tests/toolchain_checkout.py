"""A small checkout with its own lock, packages, recipes, cache and Debian mirror.

Promise: what runs in it is a copy of the real toolchain and of the real verbs, in a process of its
own; only the data differ: packages of a few bytes made here, served by a local server that can be
told to misbehave.  The machine's own cache is never touched.
"""

import hashlib
import http.server
import io
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from toolchain.lock import Package
from toolchain.recipe import ROOMS

REPO = Path(__file__).resolve().parents[1]
HEADER = list(Package.__dataclass_fields__)
START = "import sys; sys.path[0] = sys.argv.pop(1); from toolchain.cli import main; " + (
    "main(sys.argv[1:])"
)
PATIENCE_S = 600.0  # for what must happen sooner or later; no test measures time


# --- packages ---------------------------------------------------------------------------------


def file(name: str, content: bytes = b"", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    """A regular file of a package."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), mode, 1700000000
    return member, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    """A directory, a link or a device of a package."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.mtime = kind, target, 0o777, 1700000000
    return member, b""


def deb(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return the bytes of a .deb: an ar archive of a version, control data and an xz tar."""

    def tar(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:xz", preset=0) as archive:
            for member, content in entries:
                archive.addfile(member, io.BytesIO(content))
        return out.getvalue()

    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": tar([file("./control", b"Package: made-here\n")]),
        "data.tar.xz": tar(members),
    }
    out = b"!<arch>\n"
    for name, content in parts.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


def small_deb(name: str = "made-here", content: bytes = b"") -> bytes:
    """Return a package of one file, usr/share/NAME."""
    return deb([special("./", tarfile.DIRTYPE), file(f"./usr/share/{name}", content)])


# --- the mirror -------------------------------------------------------------------------------

Answer = Callable[["Handler", bytes], None]


@dataclass
class Request:
    """What a client asked for and how many bytes of the file it was sent."""

    path: str
    range: str | None
    sent_bytes: int = 0


class Mirror(http.server.ThreadingHTTPServer):
    """A Debian archive at `address`; `files` and `answers` are by pool path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}/debian"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what many tests are about."""

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the mirror's `answers` say; otherwise honestly."""

    protocol_version = "HTTP/1.1"
    server: Mirror

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path).removeprefix("/debian/")
        self.request_seen = Request(path, self.headers.get("Range"))
        self.server.requests.append(self.request_seen)
        content = self.server.files.get(path)
        if content is None:
            self.send_error(404)
        else:
            self.server.answers.get(path, whole_or_range)(self, content)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def head(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def body(self, content: bytes) -> None:
        self.wfile.write(content)
        self.request_seen.sent_bytes += len(content)


def whole_or_range(handler: Handler, content: bytes) -> None:
    """The honest answer."""
    asked = handler.request_seen.range
    if asked is None:
        handler.head(200, len(content))
        handler.body(content)
        return
    start = int(asked.removeprefix("bytes=").rstrip("-"))
    if start >= len(content):
        handler.head(416, 0, Content_Range=f"bytes */{len(content)}")
        return
    rest = content[start:]
    served = f"bytes {start}-{len(content) - 1}/{len(content)}"
    handler.head(206, len(rest), Content_Range=served)
    handler.body(rest)


def whole(handler: Handler, content: bytes) -> None:
    """A server that does not know ranges."""
    handler.head(200, len(content))
    handler.body(content)


def status(code: int) -> Answer:
    """Nothing but a status."""
    return lambda handler, _: handler.head(code, 0)


def instead(other: bytes) -> Answer:
    """Other bytes than the file's."""
    return lambda handler, _: whole_or_range(handler, other)


def drops_after(count_bytes: int) -> Answer:
    """Promise the whole, send some, then reset the connection."""

    def answer(handler: Handler, content: bytes) -> None:
        handler.head(200, len(content))
        handler.body(content[:count_bytes])
        handler.wfile.flush()
        time.sleep(0.2)  # so that the bytes are read before the reset throws them away
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()
        handler.close_connection = True

    return answer


def hangs_after(count_bytes: int) -> Answer:
    """Send some and then nothing, until the client goes away."""

    def answer(handler: Handler, content: bytes) -> None:
        handler.head(200, len(content))
        handler.body(content[:count_bytes])
        handler.wfile.flush()
        handler.connection.settimeout(PATIENCE_S)
        handler.connection.recv(1)
        handler.close_connection = True

    return answer


# --- the checkout -----------------------------------------------------------------------------


@dataclass
class Checkout:
    """A checkout at `root` whose cache is `cache` and whose only mirror is `mirror`."""

    root: Path
    home: Path
    mirror: Mirror
    rows: list[list[str]] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "bananaos"

    @property
    def downloads(self) -> Path:
        return self.cache / "downloads"

    def add_package(self, name: str, content: bytes, tree: str = "build", arch: str = "all") -> str:
        """Lock a package and put it on the mirror; return its sha256."""
        sha256 = hashlib.sha256(content).hexdigest()
        pool_path = f"pool/main/{name}_1.0+deb13u1_{arch}.deb"
        self.mirror.files[pool_path] = content
        row = [tree, name, arch, "1.0", "trixie", pool_path, str(len(content)), sha256]
        self.rows.append(row)
        self.write_lock()
        return sha256

    def write_lock(self) -> None:
        lines = ["\t".join(row) for row in [HEADER, *self.rows]]
        (self.root / "toolchain" / "debian.lock").write_text("\n".join(lines) + "\n")

    def add_recipe(
        self, name: str, script: str, outputs: Sequence[str] = ("out",), minutes: float = 0.1
    ) -> None:
        """Declare the artifact kernel/NAME, built by `script`; minutes: what it says to take."""
        (self.root / "kernel" / f"{name}.sh").write_text(script)
        with (self.root / "kernel" / "recipe.toml").open("a") as recipes:
            recipes.write(f'[{name}]\nscript = "{name}.sh"\nminutes = {minutes}\n')
            recipes.write(f"outputs = [{', '.join(repr(output) for output in outputs)}]\n")

    def environment(self, **changes: str) -> dict[str, str]:
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": os.fspath(self.home),
            "BANANAOS_DEBIAN_MIRROR": self.mirror.address,
            "PYTHONDONTWRITEBYTECODE": "1",
            "DOCKER_HOST": "unix:///nonexistent/docker.sock",  # not the machine's by chance
        }
        return {name: value for name, value in {**environment, **changes}.items() if value}

    def command(self, *verb: str) -> list[str]:
        return [sys.executable, "-c", START, os.fspath(self.root), *verb]

    def run(
        self,
        *verb: str,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "Ended":
        """Run a verb; an empty value in `env` unsets a variable."""
        return self.run_command([*prefix, *self.command(*verb)], env=env, cwd=cwd)

    def run_on_a_full_disk(
        self,
        *verb: str,
        sizes_mib: tuple[int, int],
        show: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> "Ended":
        """Run a verb, its cache on a disk of the first size, and again when it has the second.

        Each prints its exit code; in between is what lies in the folders `show` of the cache.
        Skips without user namespaces.
        """
        place = self.home / ".cache"
        place.mkdir()
        small, large = (f"size={size}m" for size in sizes_mib)
        folders = " ".join(f'"$0/{self.cache.name}/{name}"' for name in show)
        script = (
            f'mount -t tmpfs -o {small} tmpfs "$0" || exit 77\n'
            f'"$@"; echo "code $?"; ls -A {folders}\n'
            f'mount -t tmpfs -o remount,{large} tmpfs "$0"; "$@"; echo "code $?"'
        )
        unshare = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script)
        done = self.run(*verb, prefix=(*unshare, os.fspath(place)), env=env)
        if done.code == 77 or "unshare: unshare failed" in done.err:
            pytest.skip(f"needs user namespaces: {done.err}")
        return done

    def run_command(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "Ended":
        done = subprocess.run(
            argv,
            env=self.environment(**(env or {})),
            cwd=cwd or self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def start(self, *verb: str, env: Mapping[str, str] | None = None) -> "Running":
        return Running(self.command(*verb), self, env)


@dataclass(frozen=True)
class Ended:
    """How a verb ended."""

    code: int
    out: str
    err: str

    @property
    def built(self) -> Path:
        """The folder that `build`, which must have ended well, printed last."""
        assert self.code == 0, self.err
        return Path(self.out.splitlines()[-1].partition(" ")[2])

    @property
    def error(self) -> str:
        """The one line a failure prints, checked to be the only one of its kind."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


class Running:
    """A command that runs, in a process group of its own as a terminal would start it."""

    def __init__(
        self, argv: Sequence[str], checkout: Checkout, env: Mapping[str, str] | None = None
    ) -> None:
        self._errors = io.StringIO()
        self.process = subprocess.Popen(
            argv,
            env=checkout.environment(**(env or {})),
            cwd=checkout.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.write(line)

    @property
    def err(self) -> str:
        return self._errors.getvalue()

    def interrupt(self) -> Ended:
        """Press Ctrl-C: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.end()

    def kill(self) -> Ended:
        self.process.kill()
        return self.end()

    def end(self) -> Ended:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return Ended(code, "", self.err)


def make_checkout(root: Path, home: Path, mirror: Mirror) -> Checkout:
    """Copy the toolchain and the verbs to `root`; no package, no recipe, no source yet."""
    shutil.copytree(
        REPO / "toolchain", root / "toolchain", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(REPO / "tasks.py", root)
    (root / "toolchain" / "sources.toml").write_text("")
    for room in ROOMS:
        (root / room).mkdir()
        (root / room / "recipe.toml").write_text("")
    home.mkdir(parents=True, exist_ok=True)
    checkout = Checkout(root, home, mirror)
    checkout.write_lock()
    return checkout


def add_rooms(checkout: Checkout) -> None:
    """Copy what `./inv verify` needs beside the toolchain; recipes stay those of the checkout.

    Of models only the smallest made one and the real one, and of experiments the one with these.
    """
    ignored = shutil.ignore_patterns("__pycache__", "recipe.toml")
    for room in ("schemas", "artifact", *ROOMS):
        shutil.copytree(REPO / room, checkout.root / room, ignore=ignored, dirs_exist_ok=True)
    for name, second in (
        ("artifact/experiments.toml", "[experiments.E1]"),
        ("llama.cpp/shapes.toml", "[shapes.banana-small]"),
    ):
        text = (REPO / name).read_text()
        assert second in text, f"{name} has another second table now"
        (checkout.root / name).write_text(text.partition(second)[0])


def eventually(condition: Callable[[], object], running: Running) -> None:
    """Wait until `condition` holds; it must come while `running` runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert running.process.poll() is None, running.end()
        assert time.monotonic() < deadline, running.err
        time.sleep(0.01)


def names(directory: Path) -> set[str]:
    """What lies in a directory; nothing if it is not there."""
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def processes_with(argument: str) -> list[int]:
    """Return the processes that have `argument` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argument.encode() in words:
                found.append(int(entry.name))
    return found

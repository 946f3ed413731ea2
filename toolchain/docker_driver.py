"""The driver `docker`: run a program in a container whose image is the pinned tree.

Promise: works with any Docker engine from 20.10 on that runs amd64 Linux containers, near or far:
what the program reads is copied into the container and what it wrote is copied back, so nothing of
the host is mounted and no file of the host becomes root's.  The image is written by image.py, so
its digests are the same everywhere; an image of that name with other layers is replaced.  The
program sees the environment, directories and loopback that it sees with the other drivers.
However the caller ends, even killed, the container is removed.
Limit: what the program writes outside its own directories is not refused, but lost with the
container.  An engine that dies meanwhile keeps the container: remove those labelled "bananaos".

Two processes take part, so that an interrupt and a time limit end a container as they end any other
command: `command` is what run_inside runs, and it starts a janitor that outlives it by the removal.
"""

import contextlib
import dataclasses
import json
import os
import posixpath
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar, cast

import docker
import requests  # this and the next: what the SDK lets through when the engine goes away
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container

from toolchain import cache
from toolchain.errors import ArtifactError, EnvironmentUnfit, InvalidData, UsageError
from toolchain.image import COPY_BYTES, Config, Digest, Image, tree_entries, write, write_layer
from toolchain.lock import trees
from toolchain.paths import REPO, cache_dir
from toolchain.rootfs import ENVIRONMENT, SOURCE_DATE_EPOCH, rootfs, tree_key
from toolchain.say import say

OLDEST_API = (1, 41)
"""Of Docker 20.10."""
LABEL = "bananaos"
"""Of every container; its value is the caller's cache."""
PATIENCE_S = 900  # for one answer of the engine: it may be unpacking an image on a slow disk
REFUSED = 125
"""Exit code when the engine, not the program, failed (that of `docker run`)."""
TEMPORARY = ("/tmp", "/run", "/var/tmp")
# As enter.sh does; HOSTNAME is the engine's addition.
ENTER = 'umask 022; cd "$1" || exit; shift; unset HOSTNAME _ SHLVL OLDPWD; exec "$@"'
MERGED = f"{ENTER} 2>&1"
"""Two streams may overtake each other on their way; what goes into one log must be one."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """What one container does; paths inside -> paths of the host."""

    image: str
    argv: list[str]
    env: Mapping[str, str]
    directory: str
    binds: Mapping[str, str]
    writable: Mapping[str, str]
    scratch: list[str]
    """Writable directories that nobody wants back."""
    one_stream: bool


def config(tree: str = "build") -> Config:
    """Return what a tree's image says of itself; docker/Dockerfile says the same of `build`."""
    return Config(
        ("/bin/sh",), ENVIRONMENT, "/build", {"org.opencontainers.image.title": f"bananaos-{tree}"}
    )


def refusal() -> str | None:
    """Return why this machine's engine cannot be used, in words; None when it can."""
    try:
        with _client() as client:
            version: dict[str, Any] = client.version()
    except EnvironmentUnfit as exc:
        where = os.environ.get("DOCKER_HOST") or "/var/run/docker.sock"
        reason = "permission denied" if "Permission denied" in str(exc) else "none answers"
        cure = "join the group docker" if reason == "permission denied" else "start one"
        return f"no Docker engine at {where} ({reason}): {cure}, or set DOCKER_HOST"
    api = tuple(int(part) for part in str(version["ApiVersion"]).split("."))
    if api < OLDEST_API:
        return (
            f"Docker {version.get('Version', '?')} is too old: its API is {version['ApiVersion']}, "
            f"needed is {'.'.join(map(str, OLDEST_API))} (Docker 20.10)"
        )
    if (version.get("Os"), version.get("Arch")) != ("linux", "amd64"):
        return f"the Docker engine runs {version.get('Os')}/{version.get('Arch')}, not linux/amd64"
    return None


def image_digests(tree: str = "build") -> Image:
    """Return name and digests of the tree's image; read once from the whole tree, then kept."""
    tag = _tag(tree)
    inputs = {"image": tag, "tree": tree_key(tree), "config": dataclasses.asdict(config(tree))}

    def make(out: Path) -> None:
        say(f"docker: computing the digests of {tag} (about a minute)")
        image = write(Digest(), tag, rootfs(tree), None, config(tree))
        (out / "image.json").write_text(json.dumps(dataclasses.asdict(image), indent=1) + "\n")

    text = (cache.entry(f"image-{tree}", inputs, make) / "image.json").read_text()
    document = json.loads(text)
    return Image(document["name"], document["config_sha256"], tuple(document["layers_sha256"]))


def write_image(tree: str, path: Path) -> None:
    """Write the tree's image to `path` and print its digests.

    Raises UsageError for a tree that is none, EnvironmentUnfit for a path that cannot be written.
    """
    if tree not in (known := trees()):
        raise UsageError(f"--tree {tree}: expected one of {', '.join(known)}")
    if not path.name or path.is_dir():
        raise UsageError(f"{path}: a directory; expected the name of the archive to write")
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as out:
            image = write(out, _tag(tree), rootfs(tree), None, config(tree))
        temporary.replace(path)
    except OSError as exc:
        raise EnvironmentUnfit(f"{path}: cannot write: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    print(f"image  {image.name}")
    print(f"config sha256:{image.config_sha256}")
    print(f"layer  sha256:{image.layers_sha256[0]}")


def _tag(tree: str) -> str:
    return f"bananaos-{tree}:{tree_key(tree)[:16]}"


def have_image() -> str:
    """Return the name of the build tree's image, loading it into the engine if it is not there.

    Raises EnvironmentUnfit for a sick engine, InvalidData when it made something else of it.
    """
    wanted = image_digests()
    with (
        cache.exclusive(f"docker-{wanted.name.replace(':', '-')}"),
        _client("load the image") as client,
    ):
        if _layers(client, wanted.name) != wanted.layers_sha256:
            say(f"docker: loading {wanted.name} into the engine (about a minute)")
            _piped(
                lambda out: write(out, wanted.name, rootfs("build"), None, config()),
                lambda blocks: client.images.load(blocks),  # type: ignore[arg-type]
            )
            if _layers(client, wanted.name) != wanted.layers_sha256:
                raise InvalidData(
                    f"{wanted.name}: the engine has layers {_layers(client, wanted.name)}, "
                    f"expected {wanted.layers_sha256}"
                )
    return wanted.name


def engine_digests(name: str) -> tuple[tuple[str, ...], str]:
    """Return layers and Id of an image as the engine computed them, in hex; see image.Image."""
    with _client() as client:
        identity = str(client.images.get(name).id)
        return _layers(client, name) or (), identity.removeprefix("sha256:")


def command(job: Job, file: Path) -> list[str]:
    """Return the host command that does the job; writes it to `file`."""
    file.write_text(json.dumps(dataclasses.asdict(job)))
    code = "import sys; sys.path[0] = sys.argv[1]; from toolchain import docker_driver as d; "
    return [sys.executable, "-c", code + "sys.exit(d.main(sys.argv[2]))", str(REPO), str(file)]


def main(file: str) -> int:
    """Do the job in `file`; return the program's exit code, or REFUSED after a line with why."""
    document = json.loads(Path(file).read_text())
    try:
        with _stoppable():
            return _run(Job(**document))
    except ArtifactError as exc:
        print(exc, file=sys.stderr)
        return REFUSED


# --- the container ----------------------------------------------------------------------------


class _Stopped(Exception):
    """SIGTERM came: the container is to be stopped and its results are to be brought."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Stopped:
        sys.exit(128 + signal.SIGTERM)


def _run(job: Job) -> int:
    name = f"{LABEL}-{uuid.uuid4().hex}"
    enter = MERGED if job.one_stream else ENTER
    with _client("run a container") as client, _removed(name) as is_there:
        container = client.containers.create(
            job.image,
            ["/bin/sh", "-c", enter, "sh", job.directory, *job.argv],
            name=name,
            environment=dict(job.env),
            hostname="bananaos",
            network_mode="none",
            user="0:0",
            working_dir="/",
            tmpfs=dict.fromkeys(TEMPORARY, "exec,mode=755"),
            labels={LABEL: os.fspath(cache_dir())},
            log_config=docker.types.LogConfig(type="none"),
        )
        is_there()
        _piped(
            lambda out: write_layer(Digest(out), _inputs(job)),
            lambda blocks: container.put_archive("/", blocks),
        )
        try:
            return _follow(container)
        finally:
            for inside, host in job.writable.items():
                if inside not in job.scratch:
                    _bring(container, inside, Path(host))


def _follow(container: Container) -> int:
    """Start the container, pass on what it says, and return its exit code."""
    output = container.attach(stdout=True, stderr=True, stream=True, demux=True)
    container.start()
    try:
        for out, err in output:
            for stream, block in ((sys.stdout.buffer, out), (sys.stderr.buffer, err)):
                if block:
                    stream.write(block)
                    stream.flush()
        return int(container.wait()["StatusCode"])
    except _Stopped:
        with contextlib.suppress(APIError):  # it ended by itself
            container.kill()
        raise


def _inputs(job: Job) -> Iterator[tuple[tarfile.TarInfo, Path | bytes]]:
    """Yield what the program finds at its start, each directory before what is in it."""
    made = {"."}
    for inside, host in sorted({**job.binds, **job.writable}.items()):
        name, path = posixpath.normpath(inside).lstrip("/"), Path(host)
        for above in reversed(PurePosixPath(name).parents):
            if str(above) not in made:
                made.add(str(above))
                yield _member(str(above), tarfile.DIRTYPE, 0o755, 0), b""
        if not path.is_dir():
            status = path.stat()
            mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
            yield _member(name, tarfile.REGTYPE, mode, status.st_size), path
            continue
        made.add(name)
        yield _member(name, tarfile.DIRTYPE, 0o755, 0), b""
        for info, content in tree_entries(path):
            info.name = f"{name}/{info.name}"
            if info.islnk():
                info.linkname = f"{name}/{info.linkname}"
            yield info, content


def _member(name: str, kind: bytes, mode: int, size_bytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.mtime = kind, mode, size_bytes, SOURCE_DATE_EPOCH
    return info


def _bring(container: Container, inside: str, host: Path) -> None:
    """Copy a directory of the container to the host; names that are there are replaced."""
    blocks, _ = container.get_archive(inside)
    try:
        reader = cast(IO[bytes], _Reader(blocks))  # all that a streamed archive asks for
        with tarfile.open(fileobj=reader, mode="r|") as archive:
            for member in archive:
                _place(archive, member, host)
    except requests.RequestException:  # of the line to the engine; it is an OSError, too
        raise
    except tarfile.TarError as exc:
        raise EnvironmentUnfit(f"docker: what the engine sends of {inside} is cut: {exc}") from exc
    except OSError as exc:
        raise EnvironmentUnfit(f"{host}: cannot write: {exc.strerror or exc}") from exc
    finally:
        # The engine keeps the container busy, so that it cannot be removed, until all is read.
        for _ in blocks:
            pass


def _place(archive: tarfile.TarFile, member: tarfile.TarInfo, host: Path) -> None:
    """Put a member, whose name starts with the directory's own, below `host`."""
    relative = PurePosixPath(*PurePosixPath(member.name).parts[1:])
    if ".." in relative.parts:
        raise InvalidData(f"the engine hands out {member.name!r}")
    target = host / relative
    if member.isdir():
        target.mkdir(exist_ok=True)
        return
    target.unlink(missing_ok=True)
    if member.issym():
        target.symlink_to(member.linkname)
    elif member.islnk():
        target.hardlink_to(host / PurePosixPath(*PurePosixPath(member.linkname).parts[1:]))
    elif (stream := archive.extractfile(member)) is not None:
        with stream, target.open("xb") as out:
            shutil.copyfileobj(stream, out, COPY_BYTES)
        target.chmod(member.mode & 0o777)


class _Reader:
    """What tarfile reads from, made of the blocks that the engine sends."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._left = b""

    def read(self, size_bytes: int) -> bytes:
        while len(self._left) < size_bytes and (block := next(self._blocks, b"")):
            self._left += block
        out, self._left = self._left[:size_bytes], self._left[size_bytes:]
        return out


# --- the janitor ------------------------------------------------------------------------------

JANITOR = (
    "import sys; sys.path[0] = sys.argv[1]; from toolchain.docker_driver import remove; "
    "remove(sys.argv[2], was_there=bool(sys.stdin.read()))"
)
CREATION_S = 60.0
"""How long the engine is asked for a container whose caller was killed while it was made."""


@contextlib.contextmanager
def _removed(name: str) -> Iterator[Callable[[], None]]:
    """Remove the container of this name at the end, even at that of a killed process.

    The janitor is there before the container and waits for its pipe to close.  What is yielded is
    to be called when the container is there; without that it may still be in the making.
    """
    janitor = subprocess.Popen(
        [sys.executable, "-c", JANITOR, str(REPO), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert janitor.stdin is not None, "it is a pipe"
    pipe = janitor.stdin

    def is_there() -> None:
        pipe.write("there")
        pipe.flush()

    refused = False
    try:
        yield is_there
    except APIError:  # the engine says that it made none
        refused = True
        raise
    finally:
        if refused:
            with contextlib.suppress(OSError):
                is_there()
        _, said = janitor.communicate()
        if janitor.returncode != 0:
            why = (said.strip().splitlines() or ["killed"])[-1]
            say(f"docker: the container {name} could not be removed ({why}): docker rm -fv {name}")


def remove(name: str, *, was_there: bool) -> None:
    """Remove a container with its volumes, running or not; one that is still made, when it is."""
    deadline = time.monotonic() + CREATION_S
    with _client("remove a container") as client:
        while True:
            try:
                client.containers.get(name).remove(force=True, v=True)
            except NotFound:
                if was_there or time.monotonic() > deadline:
                    return
                time.sleep(0.5)
            else:
                return


# --- the engine -------------------------------------------------------------------------------


@contextlib.contextmanager
def _client(what: str = "ask the engine") -> Iterator[docker.DockerClient]:
    """A connection, closed at the end; what the engine refuses becomes EnvironmentUnfit."""
    try:
        client = docker.from_env(timeout=PATIENCE_S)
    except (DockerException, ValueError) as exc:  # the latter: DOCKER_HOST is no address
        raise _engine(exc, "reach the engine") from exc
    try:
        yield client
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as exc:
        raise _engine(exc, what) from exc
    finally:
        client.close()


def _layers(client: docker.DockerClient, name: str) -> tuple[str, ...] | None:
    try:
        attributes: dict[str, Any] = client.images.get(name).attrs
    except ImageNotFound:
        return None
    return tuple(
        layer.removeprefix("sha256:") for layer in attributes["RootFS"].get("Layers") or ()
    )


def _engine(exc: Exception, what: str) -> EnvironmentUnfit:
    said = str(getattr(exc, "explanation", None) or exc) or type(exc).__name__
    reason = said.splitlines()[0]
    if "no space left" in reason.lower():
        reason += " (No space left on device): free some space where the engine keeps its images"
    return EnvironmentUnfit(f"docker: cannot {what}: {reason}")


def _piped(
    writer: Callable[[IO[bytes]], object], reader: Callable[[Iterator[bytes]], Result]
) -> Result:
    """Return what `reader` makes of what `writer` writes meanwhile; the writer's failure counts."""
    failures: list[BaseException] = []
    source, sink = os.pipe()

    def write_all() -> None:
        try:
            with open(sink, "wb") as out:  # noqa: PTH123 (a descriptor)
                writer(out)
        except BrokenPipeError:  # the reader has failed and tells why
            pass
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=write_all)
    thread.start()
    try:
        with open(source, "rb") as stream:  # noqa: PTH123
            return reader(iter(lambda: stream.read(COPY_BYTES), b""))
    finally:
        thread.join()
        if failures:
            raise failures[0]

"""The engines docker and podman, through the one HTTP interface that both speak.

Promise: the image is the one we wrote, layer for layer, or it is refused; a container gets no
network, a read-only root, no capability that the job does not keep, and is removed when its job has
ended, whatever way; one that a killed process left behind is removed by the next.  Results belong
to the user who asked.
Limit: the daemon must run on this machine, for it mounts folders of ours.
"""

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import Mount

from board.x86.job import (
    CONTAINER,
    OBSERVER_CAPABILITIES,
    OLDER_CAPABILITIES,
    Ended,
    Job,
    TimedOut,
    container,
    files,
)
from toolchain import cache
from toolchain.command import Cancelled, timeout_scale
from toolchain.errors import EnvironmentUnfit, InvalidData
from toolchain.fetch import sha256_file
from toolchain.image import Config, Digest, Image, write
from toolchain.paths import cache_dir
from toolchain.rootfs import rootfs, tree_key
from toolchain.say import say

OWNER = "bananaos.owner"
"""Label of our containers: PROCESS.START of who made it, so that orphans are known."""
_POLL_S = 0.5
_ANSWER_LIMIT_S = 600
_ANY_VERSION = "1.24"
"""Only for the question which version there is, which has none."""
_TITLES = {"docker": "Docker", "podman": "Podman"}


class ContainerEngine:
    """See board.x86.job.Engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._address = ""
        self._image: Image | None = None

    # -- the engine

    def check(self) -> None:
        """Find the address where it answers."""
        self._address = self._address or _address(self.name)

    def prepare(self) -> None:
        """Remove what was left behind, load the image unless it is there."""
        self.check()
        with self._client() as client:
            self._remove_orphans(client)
            self._image = self._loaded(client)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """A connection, closed at the end; what the engine refuses becomes EnvironmentUnfit."""
        try:
            with contextlib.closing(_open(self._address)) as client:
                yield client
        # A broken connection is an OSError; the SDK reads some answers through urllib3 unwrapped.
        except (DockerException, OSError, urllib3.exceptions.HTTPError) as error:
            line = (str(error) or type(error).__name__).splitlines()[0][:400]
            raise EnvironmentUnfit(
                f"{self.name}: the engine refused or went away: {line}; see to it and run the same "
                "command again, or pass --engine none"
            ) from error

    def facts(self) -> dict[str, Any]:
        """What the engine says of itself, and the image's digests."""
        assert self._image is not None, "prepare comes first"
        with self._client() as client:
            version = client.version()["Version"]
            rootless = _rootless(client)
        return {
            "engine": self.name,
            "engine_version": version,
            "rootless": rootless,
            "image": {
                "name": self._image.name,
                "layers_sha256": list(self._image.layers_sha256),
            },
            "memory_by": "cgroup",
        }

    def _remove_orphans(self, client: Any) -> None:
        for one in client.containers.list(all=True, filters={"label": OWNER}):
            if not _alive(one.labels[OWNER]):
                say(f"{self.name}: removing {one.name}, which a killed process left behind")
                one.remove(force=True)

    # -- the image

    def _loaded(self, client: Any) -> Image:
        """Return the image, loading it into the engine unless it is there; raises InvalidData."""
        content = container()
        wanted = {path: sha256_file(file) for path, file in sorted(files().items())}
        key = cache.key_of([tree_key(content["tree"]), wanted, content["environment"]])
        name = f"bananaos-x86:{key[:16]}"
        with cache.exclusive(f"x86-image-{self.name}"):
            found = _layers(client, name)
            expected = _digests(name, content)
            if found is None:
                self._load(client, name, content)
                found = _layers(client, name)
        if found != expected.layers_sha256:
            raise InvalidData(
                f"{self.name}: image {name} has other layers than we wrote: remove it "
                f"({self.name} image rm {name}) and run the same command again"
            )
        return expected

    def _load(self, client: Any, name: str, content: Mapping[str, Any]) -> None:
        """Write the archive and hand it over; the engine names the image when it has all of it."""
        say(f"{self.name}: loading image {name} (about a minute)")
        parent = cache_dir() / "build"
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent) as archive:
            write(archive, name, rootfs(content["tree"]), files(), _config(content))
            archive.seek(0)
            client.images.load(archive)

    # -- a job

    def observer_capabilities(self) -> tuple[str, ...]:
        """Ask the engine whether it knows them (Docker 20.10 of Debian does not)."""
        assert self._image is not None, "prepare comes first"
        with self._client() as client:
            try:
                one = client.containers.create(
                    self._image.name,
                    labels={OWNER: _owner(os.getpid())},
                    cap_add=list(OBSERVER_CAPABILITIES),
                )
            except APIError as error:
                if "unknown capability" not in str(error):
                    raise
                return OLDER_CAPABILITIES
            one.remove(force=True)
        return OBSERVER_CAPABILITIES

    def run(self, job: Job, *, log: Path, deadline_s: float, cancel: threading.Event) -> Ended:
        """Run it in a fresh container."""
        started_s = time.monotonic()
        with self._client() as client:
            strange = os.getuid() != 0 and not _rootless(client)
            one = client.containers.create(**self._arguments(job, strange_root=strange))
            try:
                one.start()
                self._wait(one, started_s + deadline_s * timeout_scale(), cancel)
                state = one.attrs["State"]
                seconds = time.monotonic() - started_s
                return Ended(state["ExitCode"], bool(state["OOMKilled"]), seconds)
            finally:
                try:
                    log.write_bytes(one.logs())
                finally:
                    self._remove(one)
                    if strange and job.capabilities:
                        self._give_back(client, job)

    def _arguments(self, job: Job, *, strange_root: bool) -> dict[str, Any]:
        """strange_root: root in there is another user than we are."""
        assert self._image is not None, "prepare comes first"
        limits = container()["limits"]
        # Capabilities are root's to keep; then it must be able to write into our folder.
        kept = list(job.capabilities)
        if kept and strange_root:
            kept.append("DAC_OVERRIDE")
        # The daemon has another working directory than we have.
        mounts = [
            Mount(path, os.fspath(file.absolute()), "bind", True)
            for path, file in job.inputs.items()
        ]
        mounts.append(Mount("/results", os.fspath(job.results.absolute()), "bind", False))
        return {
            "image": self._image.name,
            "command": list(job.argv),
            "name": f"bananaos-x86-{uuid.uuid4().hex[:12]}",
            "labels": {OWNER: _owner(os.getpid())},
            "cpuset_cpus": ",".join(map(str, job.cpus)),
            "mem_limit": f"{job.memory_mib}m",
            "memswap_limit": f"{job.memory_mib}m",
            "pids_limit": limits["processes"],
            "tmpfs": {"/tmp": f"size={limits['tmp_mib']}m,mode=1777"},
            "mounts": mounts,
            "network_mode": "none",
            "read_only": True,
            "cap_drop": ["ALL"],
            "cap_add": kept,
            "security_opt": ["no-new-privileges"],
            "user": f"{os.getuid()}:{os.getgid()}" if strange_root and not kept else "0:0",
            "working_dir": "/tmp",
        }

    def _wait(self, one: Any, deadline_s: float, cancel: threading.Event) -> None:
        """Wait until it has ended; raises Cancelled and TimedOut."""
        while True:
            one.reload()
            if one.status not in ("created", "running"):
                return
            if cancel.is_set():
                raise Cancelled(f"{self.name}: cancelled")
            if time.monotonic() > deadline_s:
                raise TimedOut("the container did not end within its time limit and was stopped")
            cancel.wait(_POLL_S)

    def _remove(self, one: Any) -> None:
        try:
            one.remove(force=True)
        except NotFound:
            say(f"{self.name}: {one.name} was removed by somebody else")

    def _give_back(self, client: Any, job: Job) -> None:
        """Change the owner of what root in there wrote: only the engine's root may."""
        arguments = self._arguments(job, strange_root=True) | {
            "command": ["chown", "-R", f"{os.getuid()}:{os.getgid()}", "/results"],
            "cap_add": ["CHOWN", "DAC_OVERRIDE"],
            "user": "0:0",
        }
        one = client.containers.create(**arguments)
        try:
            one.start()
            one.wait(timeout=60)
        finally:
            self._remove(one)


def _rootless(client: Any) -> bool:
    options = client.info().get("SecurityOptions") or []
    return any("rootless" in option for option in options)


def _layers(client: Any, name: str) -> tuple[str, ...] | None:
    """The digests of an image's layers, None if there is no such image."""
    try:
        image = client.images.get(name)
    except ImageNotFound:
        return None
    layers = image.attrs["RootFS"]["Layers"]
    return tuple(layer.removeprefix("sha256:") for layer in layers)


def _config(content: Mapping[str, Any]) -> Config:
    return Config(environment=content["environment"], directory="/tmp")


def _digests(name: str, content: Mapping[str, Any]) -> Image:
    """What the image's digests must be: they are hashed once and kept in the cache."""

    def make(out: Path) -> None:
        image = write(Digest(), name, rootfs(content["tree"]), files(), _config(content))
        text = json.dumps({"config": image.config_sha256, "layers": image.layers_sha256})
        (out / "digests.json").write_text(text)

    entry = cache.entry("x86-image", {"name": name, "file": sha256_file(CONTAINER)}, make)
    document = json.loads((entry / "digests.json").read_text())
    return Image(name, document["config"], tuple(document["layers"]))


# ------------------------------------------------------------------------------- finding it


def _address(name: str) -> str:
    """Where the engine answers.  Raises EnvironmentUnfit."""
    if name == "docker":
        addresses = [os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"]
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
        named = os.environ.get("CONTAINER_HOST")
        sockets = ["/run/podman/podman.sock"] if os.geteuid() == 0 else []
        sockets.append(f"{runtime}/podman/podman.sock")
        addresses = [named] if named else [f"unix://{path}" for path in sockets]
    said = []
    for address in addresses:
        try:
            _reach(address)
            with contextlib.closing(_open(address)) as client:
                client.ping()
            return address
        except (DockerException, OSError, ValueError) as error:
            said.append(f"{address}: {_why(error)}")
    raise EnvironmentUnfit(
        f"--engine {name}: no {_TITLES[name]} engine can be used here ({'; '.join(said)}); "
        f"{_CURES[name]}, or pass --engine none"
    )


def _open(address: str) -> Any:
    """A client that speaks the newest interface that its engine speaks."""
    with contextlib.closing(docker.APIClient(address, version=_ANY_VERSION)) as asking:
        version = asking.version(api_version=False)["ApiVersion"]
    return docker.DockerClient(address, version=version, timeout=_ANSWER_LIMIT_S)


def _reach(address: str) -> None:
    """Connect to a socket of this machine once: the SDK tells its refusals worse than it does."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(address.removeprefix("unix://"))


_CURES = {
    "docker": "start it (systemctl start docker) and see that this user may use it (group docker)",
    "podman": "start its API (systemctl --user start podman.socket)",
}


def _why(error: Exception) -> str:
    match error:
        case FileNotFoundError():
            return "no such socket"
        case PermissionError():
            return "permission denied"
        case ConnectionRefusedError():
            return "nobody answers"
    text = str(error)
    return text.splitlines()[0][:200] if text else type(error).__name__


def _owner(pid: int) -> str:
    """A process, told apart from a later one of the same number and from one of another machine."""
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}.{pid}.{start}"


def _alive(owner: str) -> bool:
    host, pid, _ = owner.rsplit(".", 2)
    if host != socket.gethostname():
        return True  # not ours to judge
    try:
        return _owner(int(pid)) == owner
    except OSError:
        return False

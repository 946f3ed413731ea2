"""What all tests share: the checkout and the markers.

Promise: tests run against the checkout this file lies in, whatever the working directory is.
"""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
from toolchain_checkout import Checkout, Mirror, deb, make_checkout, special

from toolchain import fetch, lock, mirror

APPLETS = (
    *("sh", "env", "cat", "ls", "sleep", "touch", "id", "stat", "mkdir", "dd", "ip", "hostname"),
    *("nc", "sort", "seq", "ln", "pwd", "grep", "sync", "true", "chmod", "mknod", "cp", "rm"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "boot: builds or boots the virtual board; minutes at first")
    config.addinivalue_line("markers", "long: does not fit into the budget; ./inv test --all")


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The real busybox-static package, from the cache or from the machine's mirror."""
    (package,) = (p for p in lock.read_lock() if (p.tree, p.name) == ("build", "busybox-static"))
    path = fetch.downloads_dir() / package.sha256
    if not path.is_file():
        directory = tmp_path_factory.mktemp("downloads")
        path = directory / package.sha256
        wanted = fetch.Wanted("busybox", package.pool_path, package.size_bytes, package.sha256)
        fetch.fetch([wanted], mirror.find_mirrors, directory)
    return path.read_bytes()


@pytest.fixture
def checkout(busybox: bytes) -> Iterator[Checkout]:
    """A checkout that every user may read, with a tree that can run shell scripts."""
    place = Path(tempfile.mkdtemp(prefix="toolchain-test-"))
    place.chmod(0o755)
    served = Mirror()
    try:
        made = make_checkout(place / "checkout", place / "home", served)
        made.add_package("busybox", busybox)
        links = [special(f"./usr/bin/{name}", tarfile.SYMTYPE, "busybox") for name in APPLETS]
        made.add_package("applets", deb(links))
        yield made
    finally:
        served.stop()
        subprocess.run(["chmod", "-R", "u+rwX", place], check=False)
        shutil.rmtree(place)


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """DOCKER_HOST of a real engine."""
    with engines.docker_engine() as host:
        yield host


@pytest.fixture(scope="session")
def podman_host() -> Iterator[str]:
    """CONTAINER_HOST of a real engine."""
    with engines.podman_engine() as host:
        yield host


@pytest.fixture(scope="session")
def nix_bin() -> Iterator[Path]:
    """A directory with a real Nix, whose store is its own."""
    with engines.nix() as directory:
        yield directory

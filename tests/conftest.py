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
from toolchain_checkout import (
    Checkout,
    Mirror,
    add_rooms,
    deb,
    file,
    make_checkout,
    small_deb,
    special,
)

from artifact.verify import CLOCK
from toolchain import fetch, lock, mirror
from toolchain.paths import REPO
from toolchain.rootfs import rootfs
from toolchain.sources import source

IN_TURN = ("docker", "nix")
APPLETS = (
    *("sh", "env", "cat", "ls", "sleep", "touch", "id", "stat", "mkdir", "dd", "ip", "hostname"),
    *("nc", "sort", "seq", "ln", "pwd", "grep", "sync", "true", "chmod", "mknod", "cp", "rm"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "boot: builds or boots the virtual board; minutes at first")
    config.addinivalue_line("markers", "long: does not fit into the budget; ./inv test --all")
    config.addinivalue_line("markers", "turn(driver): long, but at every second commit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Docker and Nix take turns with the real tree, a minute or two: by the commit's number."""
    number = 0  # in an unpacked bundle, and without Git
    if shutil.which("git") is not None:
        words = ["git", "-C", str(REPO), "rev-list", "--count", "HEAD"]
        done = subprocess.run(words, capture_output=True, text=True)
        number = int(done.stdout) if done.returncode == 0 else 0
    for item in items:
        mark = item.get_closest_marker("turn")
        if mark is not None and mark.args[0] != IN_TURN[number % len(IN_TURN)]:
            item.add_marker(pytest.mark.long)


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


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Checkout]:
    """A checkout whose trees are a package or two, with a shell, and whose recipes are none."""
    served = Mirror()
    try:
        made = make_checkout(tmp_path / "checkout", tmp_path / "home", served)
        add_rooms(made)
        shutil.copy(REPO / "toolchain" / "sources.toml", made.root / "toolchain")
        made.downloads.mkdir(parents=True)
        model = source("smollm2")
        (made.downloads / model.name).symlink_to(model)
        busybox = (rootfs("build") / "usr" / "bin" / "busybox").read_bytes()
        applets = [
            special(f"./usr/bin/{name}", tarfile.SYMTYPE, "busybox")
            for name in ("sh", "echo", "cat")
        ]
        made.add_package("busybox", deb([file("./usr/bin/busybox", busybox, 0o755), *applets]))
        made.add_package("first", small_deb("first", b"one"))
        others = [file(f"./{CLOCK}"), file("./usr/bin/qemu-x86_64")]
        made.add_package("others", deb(others), tree="hostile")
        done = made.run("verify", "--accept")
        assert done.code == 0, done.err
        yield made
    finally:
        served.stop()

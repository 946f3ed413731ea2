"""toolchain.docker_driver with a real engine: the same bytes, and nothing left however it ends.

The tree is a small one but where the real one is meant.
"""

import contextlib
import http.server
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import cast

import docker
import pytest
import requests
import urllib3
from docker.models.containers import Container
from toolchain_checkout import Checkout, Ended, eventually, names, small_deb

from artifact import binaries, verify
from toolchain import docker_driver, inside
from toolchain.errors import EnvironmentUnfit
from toolchain.paths import REPO
from toolchain.rootfs import ENVIRONMENT

pytestmark = pytest.mark.boot

BUILD = ("build", "--artifact", "kernel/x")
SMALL, SMALL_BYTES = "bananaos-build", 100 << 20
"""What the images of these tests are called, and what they are smaller than."""
SEEN = """
    { env | sort; umask; pwd; hostname; id -u; id -g; touch f; mkdir d; stat -c '%a %u %n' f d
    grep -o lo: /proc/net/dev; ip addr show lo | grep -o 127.0.0.1; ip route
    ls / /usr/bin; stat -c '%a %u %g %n' /usr/bin/busybox /build /out /recipe/x.sh
    } >/out/out
    """


@pytest.fixture
def client(docker_host: str, checkout: Checkout) -> Iterator[docker.DockerClient]:
    """The engine; a container of this test that is left fails it.  Others may use it, too."""
    client = docker.DockerClient(base_url=docker_host)
    before = {image.id for image in client.images.list()}
    try:
        yield client
        assert _containers(client, checkout) == []
    finally:
        for container in _containers(client, checkout):
            container.remove(force=True)
        for image in client.images.list(SMALL):
            if image.id not in before and image.attrs["Size"] < SMALL_BYTES:
                client.images.remove(str(image.id), force=True)
        client.close()


def _containers(client: docker.DockerClient, checkout: Checkout) -> list[Container]:
    found = client.containers.list(
        all=True, filters={"label": docker_driver.LABEL}, ignore_removed=True
    )
    home = os.fspath(checkout.home)
    return [each for each in found if each.labels[docker_driver.LABEL].startswith(home)]


@pytest.fixture
def env(client: docker.DockerClient, docker_host: str) -> Mapping[str, str]:
    return {"BANANAOS_DRIVER": "docker", "DOCKER_HOST": docker_host}


def _both(checkout: Checkout, env: Mapping[str, str]) -> list[Ended]:
    """The same build with namespaces and with docker, each in a cache of its own."""
    return [
        checkout.run(*BUILD, env={**chosen, "XDG_CACHE_HOME": f"{checkout.home}/{number}"})
        for number, chosen in enumerate(({}, env))
    ]


def test_a_program_sees_what_it_sees_with_namespaces(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    checkout.add_recipe("x", SEEN)
    first, second = (done.built / "out" for done in _both(checkout, env))
    assert second.read_text() == first.read_text()
    assert first.stat().st_mode == second.stat().st_mode
    assert "127.0.0.1" in second.read_text()


def test_needs_trees_and_files_are_there(checkout: Checkout, env: Mapping[str, str]) -> None:
    checkout.add_package("of-guest", small_deb("of-guest", b"g"), tree="guest")
    checkout.add_recipe("a", "echo 1 >/out/out\n")
    checkout.add_recipe(
        "x",
        "cat /in/kernel/a/out /trees/guest/usr/share/of-guest /recipe/a.sh >/out/out\n",
    )
    with (checkout.root / "kernel" / "recipe.toml").open("a") as recipes:
        recipes.write('needs = ["kernel/a"]\ntrees = ["guest"]\ninputs = ["a.sh"]\n')
    first, second = (done.built / "out" for done in _both(checkout, env))
    assert first.read_text() == second.read_text() == "1\ngecho 1 >/out/out\n"


def test_taken_by_itself_where_namespaces_do_not_work(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    prefix = (
        *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
        'echo 0 >/proc/sys/user/max_user_namespaces || exit 77; exec "$@"',
        *("sh", "setpriv", "--bounding-set=-sys_admin"),
    )
    done = checkout.run(*BUILD, prefix=prefix, env={**env, "BANANAOS_DRIVER": ""})
    if done.code == 77 or "unshare: unshare failed" in done.err:
        pytest.skip(f"needs user namespaces: {done.err}")
    assert (done.built / "out").read_text() == "made\n"
    assert "forbids user namespaces" in done.err
    assert "falling back to docker" in done.err


def test_a_failing_script_keeps_its_log_and_names_it(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    checkout.add_recipe("x", "echo first; echo last words >&2; exit 9\n")
    done = checkout.run(*BUILD, env=env)
    assert done.code == 3
    log = checkout.cache / "logs" / "kernel-x.log"
    assert f"ended with exit code 9; log: {log}" in done.error
    assert log.read_text().splitlines()[-2:] == ["first", "last words"]
    assert names(checkout.cache / "artifacts") <= {
        name for name in names(checkout.cache / "artifacts") if name.startswith("image-build")
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("true\n", "left [] in /out"),
        ("mkdir /out/out\n", "output out is not a plain file"),
        ("ln -s /etc/passwd /out/out\n", "output out is not a plain file"),
    ],
)
def test_other_outputs_than_promised(
    checkout: Checkout, env: Mapping[str, str], script: str, why: str
) -> None:
    checkout.add_recipe("x", script)
    done = checkout.run(*BUILD, env=env)
    assert done.code == 4
    assert why in done.error


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL],
)
def test_no_container_is_left_of_an_ended_build(
    checkout: Checkout,
    env: Mapping[str, str],
    client: docker.DockerClient,
    number: signal.Signals,
) -> None:
    checkout.add_recipe("x", "echo started; sleep 600\n")
    running = checkout.start(*BUILD, env=env)
    eventually(lambda: any(c.status == "running" for c in _containers(client, checkout)), running)
    if number == signal.SIGINT:
        assert running.interrupt().code == 130
    else:
        running.process.send_signal(number)
        assert running.end().code == -number
    for _ in range(1500):
        if not _containers(client, checkout):
            break
        time.sleep(0.02)
    assert _containers(client, checkout) == []
    assert not any(name.startswith("kernel-x") for name in names(checkout.cache / "artifacts"))
    (checkout.root / "kernel" / "x.sh").write_text("echo made >/out/out\n")
    assert (checkout.run(*BUILD, env=env).built / "out").read_text() == "made\n"


def test_a_cancelled_program_leaves_what_it_wrote(
    checkout: Checkout, env: Mapping[str, str]
) -> None:
    """The virtual board's console is read after a time-out, which ends a program as this does."""
    code = (
        "import sys; sys.path[0] = sys.argv[1]\n"
        "import threading, time\n"
        "from pathlib import Path; from toolchain.inside import run_inside\n"
        "from toolchain.command import Cancelled\n"
        "out = Path(sys.argv[2]); out.mkdir(); (out / 'before').write_text('kept')\n"
        "cancel = threading.Event()\n"
        "def watch():\n"
        "    while not ((out / 'log').exists() and 'kept' in (out / 'log').read_text()):\n"
        "        time.sleep(0.05)\n"
        "    cancel.set()\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "try:\n"
        "    run_inside(['sh', '-c', 'echo text >/out/console; cat /out/before; sleep 600'],\n"
        "        what='wait', writable={'/out': out}, cancel=cancel, log=out / 'log')\n"
        "except Cancelled:\n"
        "    print('cancelled')\n"
    )
    out = checkout.home / "out"
    argv = [sys.executable, "-c", code, os.fspath(checkout.root), os.fspath(out)]
    done = checkout.run_command(argv, env=env)
    assert done.out == "cancelled\n", done.err
    assert (out / "console").read_text() == "text\n"
    assert (out / "before").read_text() == "kept"


@pytest.mark.long
def test_two_builds_at_once(checkout: Checkout, env: Mapping[str, str]) -> None:
    checkout.add_recipe("x", "sleep 1; echo made >/out/out\n")
    runs = [checkout.start(*BUILD, env=env) for _ in range(2)]
    runs.append(checkout.start(*BUILD, env={**env, "XDG_CACHE_HOME": f"{checkout.home}/other"}))
    ended = [run.end() for run in runs]
    assert [run.code for run in ended] == [0, 0, 0], ended
    assert "".join(run.err for run in ended).count("build: kernel/x (about") == 2, "one per cache"


def test_a_full_disk_of_the_host(checkout: Checkout, env: Mapping[str, str]) -> None:
    checkout.add_recipe("x", "dd if=/dev/zero of=/out/out bs=1M count=30 2>/dev/null\n")
    done = checkout.run_on_a_full_disk(*BUILD, sizes_mib=(14, 90), show=["build"], env=env)
    lines = done.out.splitlines()
    assert (lines[0], lines[-1]) == ("code 3", "code 0")
    assert "No space left on device" in done.error


def test_a_container_whose_caller_was_killed_while_it_was_made(
    client: docker.DockerClient, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on making it; the janitor waits for it."""
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    dockerfile = io.BytesIO(b'FROM scratch\nLABEL late=1\nCMD ["/none"]\n')
    image = client.images.build(fileobj=dockerfile, tag=f"{SMALL}:late")[0]
    name = f"bananaos-{os.getpid()}-late"
    janitor = subprocess.Popen(
        [sys.executable, "-c", docker_driver.JANITOR, os.fspath(REPO), name],
        stdin=subprocess.PIPE,
    )
    assert janitor.stdin is not None
    janitor.stdin.close()  # killed, and has not said that the container is there
    try:
        time.sleep(1)  # so that it has asked at least once
        client.containers.create(image, ["/none"], name=name)
        assert janitor.wait(60) == 0
        assert not client.containers.list(all=True, filters={"name": name})
    finally:
        janitor.kill()
        for left in client.containers.list(all=True, filters={"name": name}):
            left.remove(force=True)


# --- the image ---------------------------------------------------------------------------------


def test_the_engine_computes_the_digests_that_we_wrote(
    checkout: Checkout, env: Mapping[str, str], client: docker.DockerClient
) -> None:
    """Written twice, from two paths, and loaded: the same configuration, the same layer."""
    said = []
    for number in range(2):
        done = checkout.run(
            *("image", f"{checkout.home}/{number}.tar"),
            env={**env, "XDG_CACHE_HOME": f"{checkout.home}/cache{number}"},
        )
        assert done.code == 0, done.err
        said.append(done.out)
    first, second = ((checkout.home / f"{number}.tar").read_bytes() for number in range(2))
    assert first == second
    assert said[0] == said[1]
    name, config, layer = (line.split()[1] for line in said[0].splitlines())
    (image,) = client.images.load(first)
    assert image.tags == [name]
    assert image.attrs["RootFS"]["Layers"] == [layer]
    if not _containerd(client):
        assert image.id == config
    assert image.attrs["Created"] == "2026-01-01T00:00:00Z"


def _containerd(client: docker.DockerClient) -> bool:
    return any("containerd" in str(row) for row in client.info().get("DriverStatus") or [])


def test_another_image_of_our_name_is_replaced(
    checkout: Checkout, env: Mapping[str, str], client: docker.DockerClient
) -> None:
    checkout.add_recipe("x", "cat /usr/share/more >/out/out\n")
    checkout.add_package("more", small_deb("more", b"ours"))
    name = checkout.run("image", f"{checkout.home}/i.tar").out.split()[1]
    evil = client.images.build(
        fileobj=__import__("io").BytesIO(b'FROM scratch\nLABEL evil=1\nCMD ["/none"]\n'), tag=name
    )[0]
    done = checkout.run(*BUILD, env=env)
    assert (done.built / "out").read_text() == "ours"
    assert "loading" in done.err
    assert client.images.get(name).id != evil.id


def test_the_dockerfile_states_the_same_image(
    checkout: Checkout, env: Mapping[str, str], client: docker.DockerClient
) -> None:
    checkout.run("image", f"{checkout.home}/i.tar")
    context = checkout.home / "context"
    with tarfile.open(checkout.home / "i.tar") as archive:
        archive.extractall(context)
    (ours,) = client.images.load((checkout.home / "i.tar").read_bytes())
    shutil.copy(REPO / "docker" / "Dockerfile", context)
    built = client.images.build(path=os.fspath(context), rm=True)[0]
    keys = ("Env", "Cmd", "WorkingDir", "Labels", "Entrypoint", "User", "Volumes", "ExposedPorts")
    said = [
        {key: sorted(value) if isinstance(value := i.attrs["Config"].get(key), list) else value
         for key in keys if i.attrs["Config"].get(key)}
        for i in (ours, built)
    ]  # fmt: skip
    assert said[0] == said[1]
    assert dict(row.split("=", 1) for row in said[0]["Env"]) == ENVIRONMENT
    listings = [_listing(client, image.id or "") for image in (ours, built)]
    assert listings[0] == listings[1]
    assert listings[0], "an image of something"


def _listing(client: docker.DockerClient, image: str) -> list[tuple[object, ...]]:
    """What the image's file system holds; WORKDIR gives /build a time of its own."""
    container = client.containers.create(image)
    try:
        content = io.BytesIO()
        for block in container.export():
            content.write(cast(bytes, block))
        content.seek(0)
    finally:
        container.remove()
    with tarfile.open(fileobj=content) as archive:
        return sorted(
            (m.name.rstrip("/"), m.mode, m.size, m.linkname, m.uid, m.gid, m.isfile() and m.mtime)
            for m in archive
            if m.name.split("/")[0] not in ("dev", "proc", "sys", ".dockerenv", "etc")
        )


# --- no engine that can be used ----------------------------------------------------------------


def test_no_engine(checkout: Checkout) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    done = checkout.run(*BUILD, "--driver", "docker")
    assert done.code == 3
    assert "no Docker engine at unix:///nonexistent/docker.sock (none answers)" in done.error
    assert "start one, or set DOCKER_HOST" in done.error
    assert checkout.mirror.requests == [], "said before anything is downloaded"


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (
            {"Version": "19.03.15", "ApiVersion": "1.40", "Os": "linux", "Arch": "amd64"},
            "Docker 19.03.15 is too old: its API is 1.40, needed is 1.41 (Docker 20.10)",
        ),
        (
            {"Version": "28.0", "ApiVersion": "1.48", "Os": "linux", "Arch": "arm64"},
            "the Docker engine runs linux/arm64, not linux/amd64",
        ),
    ],
)
def test_an_engine_of_no_use(checkout: Checkout, version: Mapping[str, str], why: str) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    with _fake_engine(version) as host:
        done = checkout.run(*BUILD, env={"BANANAOS_DRIVER": "docker", "DOCKER_HOST": host})
    assert done.code == 3
    assert why in done.error


def test_an_image_needs_the_name_of_a_file(checkout: Checkout) -> None:
    for name in (".", "/", os.fspath(checkout.home)):
        done = checkout.run("image", name)
        assert done.code == 2
        assert "a directory; expected the name of the archive to write" in done.error


def test_an_address_that_is_none(checkout: Checkout) -> None:
    checkout.add_recipe("x", "echo made >/out/out\n")
    done = checkout.run(
        *(*BUILD, "--driver", "docker"), env={"DOCKER_HOST": "tcp://localhost:port"}
    )
    assert done.code == 3
    assert "no Docker engine at tcp://localhost:port (none answers)" in done.error


@pytest.mark.parametrize(
    "gone",
    [
        requests.ConnectionError("Connection aborted."),
        urllib3.exceptions.ProtocolError("Response ended prematurely"),
        docker.errors.APIError("500 Server Error"),
    ],
)
def test_an_engine_that_goes_away_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, gone: Exception
) -> None:
    """It is no full disk, which a broken connection, an OSError, was taken for."""

    class Gone:
        @property
        def images(self) -> object:
            raise gone

        def close(self) -> None:
            pass

    monkeypatch.setattr(docker, "from_env", lambda **_: Gone())
    with pytest.raises(EnvironmentUnfit, match="docker: cannot ask the engine: "):
        docker_driver.engine_digests("x")


@contextlib.contextmanager
def _fake_engine(version: Mapping[str, str]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(version).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --- the real tree -----------------------------------------------------------------------------


@pytest.mark.turn("docker")
def test_the_real_tree_gives_the_expected_bytes(
    docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    monkeypatch.setenv(inside.VARIABLE, "docker")
    inside.refusal.cache_clear()
    inside.driver.cache_clear()
    try:
        rows = verify.verify(["docker"], only=["kernel/vstate-observer", "kernel/rvv-probe"])
        assert {(row.driver, row.verdict) for row in rows} == {("docker", "MATCH")}
        assert {row.verdict for row in verify._engine_image("image/build", binaries.read())} <= {
            *("MATCH", "SKIPPED")
        }
    finally:
        inside.refusal.cache_clear()
        inside.driver.cache_clear()


def test_nothing_of_docker_shadows_the_sdk() -> None:
    assert not (REPO / "docker" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-c", "import docker; print(docker.from_env)"],
        cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    assert "from_env" in done.stdout

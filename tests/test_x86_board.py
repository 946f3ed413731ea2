"""The x86 board: cells in a container and in namespaces, confined alike, and every way to fail.

Promise: with each engine that can be had here a cell runs to a valid record, the confinement is
what the record says, /proc and BPF count the same switches to the last one, and whatever stops a
run leaves no container and no process.
Limit: Podman is here only refused, unless its socket is there; what only root may do is skipped for
others.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker as docker_sdk
import pytest

import schemas
from board.base import RunFailed
from board.cell import Definitions, Overrides, plan_run
from board.runner import run_one
from board.x86 import board as x86
from board.x86.board import ContainerBoard, cpus, deviations, engine
from board.x86.job import Engine, Job, TimedOut, container, files
from board.x86.layout import layout
from schemas.record import read_record, threads_ended, window_switches
from toolchain.command import Cancelled
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.rootfs import rootfs

REPO = Path(__file__).resolve().parents[1]
WAIT_S = 120.0
"""How long a test waits for something that must happen; never a measure of speed."""
AVX_MODE_SHARE = 0.4
"""Of switch_bench's switches about half are with AVX state; what its start and end are is not."""
AVX_COMPONENTS = 0xE4
"""Of XCR0: the upper halves of YMM (2), and what AVX-512 adds (5, 6, 7)."""


def _usable(name: str) -> Engine:
    one = engine(name)
    try:
        x86.require_processor()
        one.prepare()
    except EnvironmentUnfit as error:
        pytest.skip(str(error))
    return one


@contextlib.contextmanager
def _engine(name: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that can be used, started for the tests where none runs."""
    variable = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}.get(name)
    with pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv(variable, request.getfixturevalue(f"{name}_host"))
        yield _usable(name)


ENGINES = ("none", "docker", pytest.param("podman", marks=pytest.mark.long))


@pytest.fixture(scope="module", params=ENGINES)
def used(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine that can be had here."""
    with _engine(request.param, request) as one:
        yield one


@pytest.fixture(scope="module")
def docker(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with _engine("docker", request) as one:
        yield one


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def job(results: Path, script: str, **changed: Any) -> Job:
    whole = Job(argv=["sh", "-c", script], results=results, cpus=cpus(), memory_mib=512)
    return dataclasses.replace(whole, **changed)


def talking(name: str = "docker") -> "contextlib.closing[Any]":
    """A connection of our own to an engine."""
    address = os.environ["DOCKER_HOST" if name == "docker" else "CONTAINER_HOST"]
    return contextlib.closing(docker_sdk.DockerClient(address))


def containers(one: Engine) -> list[str]:
    """Names of the containers that the engine still has of ours."""
    if one.name == "none":
        return []
    with talking(one.name) as client:
        found = client.containers.list(all=True, filters={"label": "bananaos.owner"})
        return [each.name for each in found]


def run(one: Engine, what: Job, log: Path, deadline_s: float = WAIT_S) -> tuple[int, str]:
    ended = one.run(what, log=log, deadline_s=deadline_s, cancel=threading.Event())
    assert containers(one) == []
    return ended.exit_code, log.read_text(errors="replace")


@contextlib.contextmanager
def only_cpu(number: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ------------------------------------------------------------------------------ what a cell is


@pytest.mark.boot
def test_a_cell_runs_and_its_record_tells_how(used: Engine, tmp_path: Path) -> None:
    overrides = Overrides(model="banana-tiny", instruments="none")
    directory = run_one(ContainerBoard(used), overrides, tmp_path / "results")
    record = read_record(directory)
    assert record["valid"] and record["cell"]["board"] == f"x86-{used.name}"
    assert record["cell"]["machine"] is None and record["calibration"] is None
    box = record["environment"]["container"]
    assert (box["engine"], box["cpus"], box["capabilities"]) == (used.name, cpus(), [])
    assert (box["image"] is None) is (used.name == "none")
    flags = record["cell"]["server"]["flags"]
    assert flags[flags.index("--threads") + 1] == str(min(8, len(cpus())))
    assert all(r["cached_tokens"] == 0 for r in record["loadgen"]["requests"])
    server = record["platform"]["server"]
    assert sum(map(sum, window_switches(server).values())) > 0
    assert threads_ended(server) == 0
    assert record["platform"]["perf"]["events"].keys() >= {"context_switches", "cycles_user"}
    assert {path.stat().st_uid for path in directory.rglob("*")} == {os.getuid()}
    assert containers(used) == []


LOOK = r"""
import json, os, resource, socket
status = dict(l.split(":\t") for l in open("/proc/self/status") if ":\t" in l)
def refused(path):
    try:
        open(path, "w")
    except OSError as error:
        return error.errno
try:
    socket.create_connection(("192.0.2.1", 80), 2)
    reached = True
except OSError:
    reached = False
print(json.dumps({
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "cpus": sorted(os.sched_getaffinity(0)),
    "devices": [l.split(":")[0].strip() for l in open("/proc/net/dev") if ":" in l],
    "refused": [refused(path) for path in ("/x", "/usr/x", "/payload/x", "/payload/agent.tar")],
    "tmp": refused("/tmp/x"),
    "reached": reached,
}))
open("/results/mine", "w").write("x")
"""


@pytest.mark.boot
def test_a_job_is_confined(used: Engine, results: Path, tmp_path: Path) -> None:
    one = cpus()[-1]
    what = job(results, "", argv=["python3", "-c", LOOK], cpus=[one])
    code, said = run(used, what, tmp_path / "log")
    assert code == 0, said
    seen = json.loads(said.splitlines()[-1])
    assert seen["capabilities"] == 0
    assert seen["no_new_privileges"] == "1"
    assert seen["cpus"] == [one]
    assert seen["devices"] == ["lo"]
    assert seen["reached"] is False
    assert None not in seen["refused"]
    assert seen["tmp"] is None
    assert (results / "mine").stat().st_uid == os.getuid()


@pytest.mark.boot
def test_one_cpu_means_one_thread(tmp_path: Path) -> None:
    one = _usable("none")
    with only_cpu(cpus()[0]):
        overrides = Overrides(model="banana-tiny", instruments="none")
        directory = run_one(ContainerBoard(one), overrides, tmp_path / "results")
    record = read_record(directory)
    flags = record["cell"]["server"]["flags"]
    assert flags[flags.index("--threads") + 1] == "1"
    box = record["environment"]["container"]
    assert len(box["cpus"]) == 1
    told = {row["what"]: row for row in box["deviations"]}
    assert (told["threads"]["report"], told["threads"]["here"]) == ("4", "1")
    assert "CPUs" in told["threads"]["why"]


# -------------------------------------------------------------------------- context switches


@pytest.mark.boot
def test_proc_and_bpf_count_the_same_switches(used: Engine, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may load the BPF program")
    overrides = Overrides(model="banana-tiny", instruments="switches")
    record = read_record(run_one(ContainerBoard(used), overrides, tmp_path / "results"))
    assert record["valid"]
    if record["switches"]["unavailable"]:
        pytest.skip(record["switches"]["unavailable"])
    counted = record["switches"]["counted"]
    by_bpf = {row["tid"]: (row["voluntary"], row["involuntary"]) for row in counted["threads"]}
    by_proc = window_switches(record["platform"]["server"])
    assert {tid: sum(pair) for tid, pair in by_proc.items() if sum(pair)} == {
        tid: sum(pair) for tid, pair in by_bpf.items()
    }
    assert counted["lost"] == 0
    if layout() is not None:
        # A thread comes back as often as it goes, but for where it was at the two edges.
        switches = sum(map(sum, by_bpf.values()))
        assert abs(counted["resumed"] - switches) <= len(by_proc)
    # Without any other capability than those, and on this engine only.
    assert record["environment"]["container"]["capabilities"]


DRIVER = r"""
import json, os, signal, subprocess, sys, time
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    argv = ["/payload/switch_bench", "--rounds", "20", "--repeats", "50"]
    argv += ["--out", "/results/b.json"]
    os.execv(argv[0], argv)
os.waitpid(child, os.WUNTRACED)
status = dict(l.split(":\t") for l in open(f"/proc/{child}/status") if ":\t" in l)
before = sum(int(status[n]) for n in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
argv = ["python3", "/payload/switch_observer.py", "--headers", "/payload/headers", "--hold"]
argv += ["--layout", sys.argv[1], "--pid", str(child), "--out", "/results/switches.json"]
observer = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
assert observer.stdout.readline() == "loaded\n"
observer.send_signal(signal.SIGUSR1)
assert observer.stdout.readline() == "ready\n"
os.kill(child, signal.SIGCONT)
_, code, usage = os.wait4(child, 0)
observer.send_signal(signal.SIGINT)
assert observer.wait() == 0 and code == 0
print(json.dumps({"whole": usage.ru_nvcsw + usage.ru_nivcsw - before}))
"""


@pytest.mark.boot
def test_threads_that_end_are_counted(used: Engine, results: Path, tmp_path: Path) -> None:
    """switch_bench makes two threads a turn and lets them end: /proc has lost all of them."""
    if os.geteuid() != 0:
        pytest.skip("only root may load the BPF program")
    what = job(
        results,
        "",
        argv=["python3", "-c", DRIVER, json.dumps(layout())],
        inputs={"/payload/headers": rootfs("headers")},
        capabilities=used.observer_capabilities(),
        memory_mib=2048,
    )
    code, said = run(used, what, tmp_path / "log")
    assert code == 0, said
    document = schemas.read(results / "switches.json", "switches")
    if document["unavailable"]:
        pytest.skip(document["unavailable"])
    counted = document["counted"]
    switches = sum(row["voluntary"] + row["involuntary"] for row in counted["threads"])
    whole = json.loads(said.splitlines()[-1])["whole"]
    modes = schemas.read(results / "b.json", "switch_bench")["modes"]
    assert len(counted["threads"]) == 1 + 2 * 50 * len(modes)
    # The kernel's own sum for the process, which lacks the very last switch of each thread, as BPF
    # does: a thread that is dead has no number any more.
    assert switches == whole
    masks = [mode["in_use"] for mode in modes]
    if counted["resumed_with_avx"] is not None and len(modes) > 1 and None not in masks:
        # A mode's turns are with AVX state if its program says so, and else without: where there
        # is AVX-512 the C library leaves registers in use, also in the mode that fills none.
        with_avx = sum(bool(int(mask, 16) & AVX_COMPONENTS) for mask in masks)
        share = counted["resumed_with_avx"] / counted["resumed"]
        assert AVX_MODE_SHARE <= share <= with_avx / len(modes) + 0.1


@pytest.mark.boot
def test_without_headers_the_record_says_so(results: Path, tmp_path: Path) -> None:
    one = _usable("none")
    script = (
        "python3 /payload/switch_observer.py --pid 1 --out /results/switches.json & p=$!; "
        "sleep 2; kill -USR1 $p; sleep 1; kill -INT $p; wait $p"
    )
    kept = one.observer_capabilities() if os.geteuid() == 0 else ()
    code, said = run(one, job(results, script, capabilities=kept), tmp_path / "log")
    assert code == 0, said
    document = schemas.read(results / "switches.json", "switches")
    assert document["counted"] is None
    expected = "kernel headers are missing" if kept else "rights are missing: CAP_BPF and CAP_PERF"
    assert expected in document["unavailable"]


# ------------------------------------------------------------------------------------- faults


def faulty(one: Engine, tmp_path: Path, script: str, **changed: Any) -> dict[str, Any]:
    """Run a cell whose server is a shell script; return its record."""
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)

    class Replaced:
        """The engine, with another server in the place of ours, which is /payload/real."""

        def __getattr__(self, name: str) -> Any:
            return getattr(one, name)

        def run(self, what: Job, **rest: Any) -> Any:
            inputs = dict(what.inputs)
            inputs["/payload/real"] = files()["/payload/llama-server"]
            inputs["/payload/llama-server"] = program
            return one.run(dataclasses.replace(what, inputs=inputs, **changed), **rest)

    replaced: Any = Replaced()
    overrides = Overrides(model="banana-tiny", instruments="none")
    with pytest.raises(InvalidData):
        run_one(ContainerBoard(replaced), overrides, tmp_path / "results")
    [directory] = (tmp_path / "results" / "runs").iterdir()
    assert containers(one) == []
    return read_record(directory)


@pytest.mark.boot
def test_a_server_that_crashes_is_named(used: Engine, tmp_path: Path) -> None:
    # At its first task, which is before the first measured request.
    script = """mkfifo /tmp/said; /payload/real "$@" >/tmp/said 2>&1 & server=$!
while read -r line; do
	echo "$line"
	case $line in *task*) kill -SEGV $server;; esac
done </tmp/said
wait $server"""
    record = faulty(used, tmp_path, script)
    # Which of the two depends on who is faster: its end, or the load that notices it.
    assert {"server-died", "server-exit-code"} & set(record["invalid_reasons"])
    assert record["platform"]["server"]["exit_code"] not in (0, None)
    assert record["environment"]["container"]["engine"] == used.name


@pytest.mark.boot
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    one = _usable("none")
    taken = """
import pathlib, socket, time
one = socket.socket()
one.bind(('127.0.0.1', 8080))
one.listen()
pathlib.Path('/tmp/taken').touch()
time.sleep(600)
"""
    script = f'python3 -c "{taken}" & while [ ! -e /tmp/taken ]; do sleep 0.1; done\n'
    script += 'exec /payload/real "$@"'
    record = faulty(one, tmp_path, script)
    assert "server-died" in record["invalid_reasons"]
    [directory] = (tmp_path / "results" / "runs").iterdir()
    assert "couldn't bind" in (directory / "server.log").read_text()


@pytest.mark.boot
def test_out_of_memory_in_the_middle_is_named(docker: Engine, tmp_path: Path) -> None:
    hog = "b = []\nwhile True: b.append(bytearray(1 << 20))"
    script = f"exec python3 -c '{hog}'"
    record = faulty(docker, tmp_path, script, memory_mib=128)
    assert record["invalid_reasons"][0] == "container-oom"
    assert "MiB were wanted" in record["environment"]["failure"]["detail"]
    assert record["environment"]["container"]["memory_by"] == "cgroup"


@pytest.mark.boot
def test_a_job_that_takes_too_long_is_stopped(used: Engine, results: Path, tmp_path: Path) -> None:
    with pytest.raises(TimedOut):
        run(used, job(results, "sleep 1000"), tmp_path / "log", deadline_s=2)
    assert containers(used) == []


@pytest.mark.boot
def test_a_job_that_is_cancelled_leaves_nothing(
    used: Engine, results: Path, tmp_path: Path
) -> None:
    cancel = threading.Event()
    threading.Timer(2, cancel.set).start()
    with pytest.raises(Cancelled):
        used.run(job(results, "sleep 1000"), log=tmp_path / "log", deadline_s=99, cancel=cancel)
    assert containers(used) == []


@pytest.mark.boot
def test_a_container_of_a_killed_process_is_removed(docker: Engine, tmp_path: Path) -> None:
    program = """
import sys, threading
from pathlib import Path
from board.x86.board import cpus, engine
from board.x86.job import Job
one = engine("docker")
one.prepare()
print("go", flush=True)
one.run(Job(["sleep", "1000"], Path(sys.argv[1]), cpus(), 256), log=Path(sys.argv[1]) / "log",
        deadline_s=900, cancel=threading.Event())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], cwd=REPO, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        deadline_s = time.monotonic() + WAIT_S
        while not containers(docker) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert len(containers(docker)) == 1
    finally:
        child.kill()
        child.communicate()
    engine("docker").prepare()
    assert containers(docker) == []


@pytest.mark.boot
def test_an_image_that_is_not_ours_is_refused(docker: Engine) -> None:
    name = docker.facts()["image"]["name"]
    with talking() as client:
        other = client.images.load(_empty_image())[0]
        try:
            other.tag(name)
            with pytest.raises(InvalidData, match="has other layers than we wrote: remove it"):
                engine("docker").prepare()
        finally:
            client.images.remove(name)
            client.images.remove(other.id, force=True)
    engine("docker").prepare()


def _empty_image() -> bytes:
    import io
    import tempfile

    from toolchain.image import write

    out = io.BytesIO()
    with tempfile.TemporaryDirectory() as tree:
        write(out, "bananaos-nothing:1", Path(tree), {"/nothing": b""})
    return out.getvalue()


@pytest.mark.boot
def test_results_belong_to_whoever_asked(
    docker: Engine, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can play another user")
    for kept in ((), docker.observer_capabilities()):
        folder = results / str(len(kept))
        folder.mkdir()
        os.chown(folder, 4711, 4712)
        with monkeypatch.context() as played:
            played.setattr(os, "getuid", lambda: 4711)
            played.setattr(os, "getgid", lambda: 4712)
            what = job(folder, "id -u >/results/a; mkdir /results/b", capabilities=kept)
            code, said = run(docker, what, tmp_path / "log")
        assert code == 0, said
        found = [(path.stat().st_uid, path.stat().st_gid) for path in folder.iterdir()]
        assert found == [(4711, 4712)] * 2


# ---------------------------------------------------------------------- refused before it begins


def test_no_engine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(EnvironmentUnfit) as caught:
        engine("docker").check()
    said = str(caught.value)
    assert said.startswith("--engine docker: no Docker engine can be used here (unix:///nowhere/")
    assert "no such socket" in said and "--engine none" in said and "\n" not in said


def test_podman_without_its_socket_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_HOST", "unix:///nowhere/podman.sock")
    with pytest.raises(EnvironmentUnfit, match="--engine podman: no Podman engine can be used"):
        engine("podman").check()


def test_an_engine_without_rights_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a user that may not use root's socket")
    path = tmp_path / "docker.sock"
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o001 == 0 and above.stat().st_uid == os.getuid():
            above.chmod(above.stat().st_mode | 0o001)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        path.chmod(0o600)
        listening.listen()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                engine("docker").check()
            except EnvironmentUnfit as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(read, 4096).decode()
        os.close(read)
        os.close(write)
    assert "permission denied" in said and "group docker" in said


def test_an_unknown_engine_is_usage() -> None:
    with pytest.raises(UsageError, match="--engine lxc: expected one of docker, podman, none"):
        engine("lxc")


def test_bpf_without_an_engine_is_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("none")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentUnfit, match="--bpf without an engine is for root"):
        one.run(
            job(tmp_path, "true", capabilities=("BPF",)),
            log=tmp_path / "log", deadline_s=1, cancel=threading.Event(),
        )  # fmt: skip


def test_instruments_of_the_virtual_board_are_refused() -> None:
    with pytest.raises(UsageError, match="truth: not on board x86-none"):
        ContainerBoard(engine("none")).prepare("banana-tiny", ["truth"])


def test_deviations_name_what_differs() -> None:
    class Prepared(ContainerBoard):
        """A board for planning."""

        def prepare(self, model: str, instruments: Any) -> dict[str, str]:
            return dict.fromkeys(("llama_server", "agent", "model", "tree"), "0" * 64)

    overrides = Overrides(model="banana-tiny", instruments="none", concurrency=8)
    cell = plan_run(Definitions.read(), overrides, Prepared(engine("none"))).cell
    rows = {row["what"]: row for row in deviations(cell, 2)}
    assert rows["model"]["here"] == "banana-tiny"
    context = rows["context tokens of all slots"]
    assert (context["report"], context["here"]) == ("1024", "2048")
    assert context["why"].startswith("1024 leave 128 for each of eight")
    assert rows["prompts"]["here"] == "all different, no cache"
    flags = cell["server"]["flags"]
    assert int(flags[flags.index("--threads") + 1]) == min(8, len(cpus()))


def test_a_run_that_failed_keeps_what_it_was_confined_to() -> None:
    error = RunFailed("container-oom", "why", {"container": {"engine": "docker"}})
    assert error.facts == {"container": {"engine": "docker"}}
    assert RunFailed("no-results", "why").facts == {}


def test_the_container_is_defined_by_data() -> None:
    content = container()
    assert set(content["files"].values()) == {
        "board/x86/switch_observer.py", "board/x86/switch_observer.bpf.c",
    }  # fmt: skip
    for name in content["files"].values():
        assert (REPO / name).is_file()


# ------------------------------------------------------------------------------- the verb itself


def verb(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REPO / "inv", "x86-compare", *words],
        capture_output=True, text=True, env={**os.environ, **(env or {})},
    )  # fmt: skip


@pytest.mark.boot
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--model", "nope"), 2, "--model nope: no such model; known: banana-tiny"),
        (("--model", "./none.gguf"), 2, "--model none.gguf: cannot be read: No such file"),
        (("--model", "tasks.py", "--engine", "none"), 2, "--model tasks.py: no such model"),
        (("--model", "./tasks.py"), 4, "begins with b'\"\"\"T', expected b'GGUF': no GGUF file"),
        (("--seeds", "101"), 2, "--seeds 101: expected an integer from 1 to 100"),
        (("--engine", "lxc"), 2, "--engine lxc: expected one of docker, podman, none"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_done(
    words: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    done = verb(*words, "--results", os.fspath(tmp_path / "results"))
    assert done.returncode == code
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "results").exists()


@pytest.mark.boot
def test_a_processor_without_avx2_is_refused(tmp_path: Path) -> None:
    text = Path("/proc/cpuinfo").read_text()
    fake = tmp_path / "cpuinfo"
    fake.write_text(text.replace(" avx2 ", " "))
    script = 'mount --bind "$1" /proc/cpuinfo && shift && exec "$@"'
    words: list[str | Path] = [
        REPO / "inv", "x86-compare", "--results", tmp_path / "results"
    ]  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "--user", "sh", "-c", script, "sh", fake, *words],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: this processor lacks avx2 (/proc/cpuinfo)")
    assert not (tmp_path / "results").exists()


SMALL = """
import dataclasses, sys
from pathlib import Path
from board.cell import Definitions
from board.x86.compare import compare
from toolchain.errors import ArtifactError
known = Definitions.read()
loads = {
    name: {**load, "max_tokens": 4, **({"rounds": 2} if "rounds" in load else {})}
    for name, load in known.experiments["loads"].items()
}
known = dataclasses.replace(known, experiments={**known.experiments, "loads": loads})
try:
    sys.exit(compare(engine_name=sys.argv[1], seeds=1, model="banana-tiny", virtual=False,
                     results=Path(sys.argv[2]), known=known))
except ArtifactError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
"""./inv x86-compare --seeds 1 --model banana-tiny --no-virtual with short answers."""


@pytest.mark.boot
def test_the_comparison_runs_to_its_end_and_goes_on_where_it_stopped(
    used: Engine, tmp_path: Path
) -> None:
    """An interrupt leaves nothing, the next call does the rest."""
    results = tmp_path / "results"
    # As the default is: relative to where the verb is called.
    argv = [sys.executable, "-c", SMALL, used.name, os.path.relpath(results, REPO)]
    child = subprocess.Popen(argv, cwd=REPO, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if "cell 2 of" in line and "RUN" in line:
            time.sleep(0.5)
            child.send_signal(signal.SIGINT)
            break
    rest = child.communicate()[1]
    assert child.returncode == 130, rest
    assert "nothing is left running" in rest
    assert containers(used) == []
    assert len(list((results / "runs").iterdir())) == 1

    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 done before" in done.stderr
    assert containers(used) == []
    records = [read_record(path) for path in (results / "runs").iterdir()]
    _check(records, rounds=2)
    for text in ("section 3.7", "printed (Core i9-13900HX, WSL2)", "RVV, VLEN 65536"):
        assert text in done.stdout
    folder = results / "x86" / f"x86-{used.name}"
    assert sorted(path.name for path in folder.iterdir()) == ["switch_bench.json", "xstate.json"]


def _check(records: list[dict[str, Any]], rounds: int) -> None:
    """One run of each cell: the waves equal, the report's form as it was."""
    assert len(records) == 6 and all(record["valid"] for record in records)
    waves = [r for r in records if not r["cell"]["load"].get("one_prompt")]
    for record in waves:
        assert record["cell"]["load"]["requests"] == rounds * record["cell"]["concurrency"]
        assert all(r["cached_tokens"] == 0 for r in record["loadgen"]["requests"])
        prompts = [r["prompt"] for r in record["loadgen"]["requests"]]
        assert len(set(prompts)) == len(prompts)
    hits = {
        r["cell"]["concurrency"]: sum(bool(q["cached_tokens"]) for q in r["loadgen"]["requests"])
        for r in records
        if r["cell"]["load"].get("one_prompt")
    }
    # Eight requests: all but the first of each slot find their prompt in it.
    assert hits == {2: 6, 4: 4, 8: 0}


@pytest.mark.boot
@pytest.mark.long
def test_the_verb_does_all_of_it_and_analyze_judges(used: Engine, tmp_path: Path) -> None:
    results = os.fspath(tmp_path / "results")
    done = verb("--engine", used.name, "--model", "banana-tiny", "--seeds", "1",
                "--results", results)  # fmt: skip
    assert done.returncode == 0, done.stderr
    _check([read_record(path) for path in (tmp_path / "results" / "runs").iterdir()], rounds=4)
    assert "what V state adds to a context switch" in done.stdout
    words = [results, "--report", os.fspath(tmp_path / "report")]
    judged = subprocess.run([REPO / "inv", "analyze", *words], capture_output=True, text=True)
    assert judged.returncode == 0, judged.stderr
    page = (tmp_path / "report" / "index.html").read_text()
    assert 'id="x86"' in page and "x86-switches" in page
    assert (tmp_path / "report" / "tables" / "x86-load.csv").is_file()

"""A board at the end of a cable, for real: doctor, flash, run, unflash over SSH, and its faults.

One emulated board serves the whole file, in the order of the tests: they share what was flashed.
Nothing is simulated but the frequency governors and the sensor, which the emulator does not have.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ssh_board
from fake_board import definitions, experiments
from processes import users_of
from ssh_board import TestBoard

import schemas
from analysis.collect import collect
from board.base import opened
from board.boards import VARIABLE, SshSettings
from board.cell import Overrides
from board.runner import run_one
from board.ssh import payload
from board.ssh.board import SshBoard
from board.ssh.doctor import Check, doctor, examine
from board.ssh.external import build_for_board
from board.ssh.flash import flash, unflash
from board.ssh.link import Link, LinkLost
from board.ssh.payload import Item
from board.ssh.session import Session
from board.virtual.interactive import Interactive
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.paths import REPO, state_dir
from toolchain.recipe import build

pytestmark = pytest.mark.boot

EXPERIMENTS = experiments(
    {"requests": 2, "warmup_requests": 0, "prompt_words": 4, "max_tokens": 2},
    {"threads": 2, "threads_batch": 2, "ctx_per_slot": 100, "poll": 0},
    deadline_s=900,
    cost={"cpu_s": 30, "disk_mib": 1},
)
INV = "import sys; from toolchain.cli import main; main(sys.argv[1:])"
SNAPSHOT = """
cut -d' ' -f1-3 /proc/mounts
cut -d' ' -f1 /proc/modules
head -n 99 /run/fake/policy*/scaling_governor /run/fake/temp
find /srv /tmp /root /run /dev/shm -not -path '/run/sudo*' | sort
for pid in /proc/[0-9]*; do
    tr '\\0' ' ' <$pid/cmdline 2>/dev/null | grep -v '^$' || true
done | grep -v 'sshd\\|sudo\\|^sh \\|sort\\|tr ' | sort
cat /proc/sys/net/core/bpf_jit_enable /proc/sys/kernel/kptr_restrict
ls /sys/fs/cgroup
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBoard]:
    with ssh_board.board(tmp_path_factory.mktemp("board")) as made:
        # The tree has no grep: a busybox of the same name is enough for these scripts.
        made.root("ln -s busybox /usr/bin/grep")
        yield made


@pytest.fixture(scope="module")
def before(machine: TestBoard) -> list[str]:
    """The board as it was before anything of this project touched it."""
    return snapshot(machine)


def snapshot(machine: TestBoard) -> list[str]:
    return machine.root(SNAPSHOT).splitlines()


def check(checks: list[Check], name: str) -> Check:
    [found] = [check for check in checks if check.name == name]
    return found


def test_doctor_finds_a_fit_board_and_leaves_it_as_it_was(
    machine: TestBoard, before: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="--model nope: no such model"):
        doctor(machine.settings, None, "nope")
    doctor(machine.settings, tmp_path / "doctor.json", "banana-tiny")
    document = schemas.read(tmp_path / "doctor.json", "doctor")
    assert document["fit"] and document["board"] == machine.settings.name
    found = {check["name"]: check for check in document["checks"]}
    assert found["VLEN"]["got"] == "256 bits"
    assert found["sched_ext"]["level"] == "ok"
    assert found["debugfs"]["level"] == "warning" and "mount it" in found["debugfs"]["fix"]
    assert found["governor of policy4"]["got"] == "schedutil"
    assert found["temperature"]["got"] == "45.0 degrees C"
    out = capsys.readouterr().out
    assert out.count("; expected ") == len(document["checks"])
    assert snapshot(machine) == before


def test_flash_asks_first(machine: TestBoard, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--model nope: no such model; known: banana-tiny"):
        flash(machine.settings, "nope", yes=True)
    with pytest.raises(UsageError, match="pass --yes"):
        flash(machine.settings, None, yes=False)
    said = capfd.readouterr().err
    assert "mount debugfs at /sys/kernel/debug" in said
    assert "policy0/scaling_governor from schedutil to performance" in said
    assert "schedutil" in machine.root("cat /run/fake/policy0/scaling_governor")


def test_flash_sends_what_differs(
    machine: TestBoard, before: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    # What a transfer left that was cut off, and what one left that went wrong.
    items = payload.items(machine.settings, None, payload.ALL)
    server, observer = items["llama-server"], items["vstate_observer"]
    blobs = "/srv/banana/bananaos/blobs"
    with Session(machine.settings, yes=True) as session:
        session.lock_only()
        cut = 1_000_000
        half = machine.settings.state / "half"
        half.write_bytes(server.path.read_bytes()[:cut])
        session.link.put({f"{server.sha256}.part": (half, 0)}, blobs)
        half.write_bytes(bytes(observer.path.stat().st_size))
        session.link.put({f"{observer.sha256}.part": (half, 0)}, blobs)
        there = session.ask("have", files={server.sha256: 1 << 30, observer.sha256: 1 << 20})
        assert there == {server.sha256: cut, observer.sha256: 0}
        session.ask("release", token=session.token)
    flash(machine.settings, "banana-tiny", yes=True)
    assert "put -a " in machine.log
    assert "new or changed" in capfd.readouterr().err
    sent = machine.log.count(" sftp ")
    flash(machine.settings, "banana-tiny", yes=True)
    assert "had all files already" in capfd.readouterr().err
    assert machine.log.count(" sftp ") == sent
    # A bad disk: what was verified once is read again.
    machine.root(
        f"printf x | dd of={blobs}/{server.sha256} bs=1 seek=5000 conv=notrunc 2>/dev/null"
    )
    flash(machine.settings, "banana-tiny", yes=True)
    assert machine.log.count(" sftp ") == sent + 1
    state = machine.root("cat /run/fake/policy*/scaling_governor; cat /proc/mounts")
    assert state.startswith("performance\nperformance\n")
    assert "debugfs" in state and "bpf" in state


def run_cell(machine: TestBoard, results: Path, policy: str = "baseline") -> Path:
    """Run the least cell; returns its folder."""
    known = definitions(results.parent, EXPERIMENTS)
    with opened(machine.settings.name, yes=True) as board:
        return run_one(board, Overrides(policy=policy), results, definitions=known)


@contextlib.contextmanager
def meanwhile(results: Path, do: Callable[[], None], seen: str = "agent: ") -> Iterator[None]:
    """Do something as soon as the agent has said so much in a run."""
    failed: list[BaseException] = []
    over = threading.Event()

    def wait_and_do() -> None:
        try:
            while not over.is_set():
                logs = [path.read_text() for path in results.glob("partial/*/console.log")]
                if any(seen in log for log in logs):
                    return do()
                time.sleep(0.2)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=wait_and_do, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


def test_a_cell_survives_heat_and_a_pulled_cable(
    machine: TestBoard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    machine.root("echo 90000 >/run/fake/temp")

    def cool() -> None:
        while "waiting for 70" not in capfd.readouterr().err:
            time.sleep(0.2)
        machine.root("echo 45000 >/run/fake/temp")

    def pull() -> None:
        machine.cable(plugged=False)
        lost = machine.log.count(" lost ")
        while machine.log.count(" lost ") == lost:
            time.sleep(0.2)
        machine.cable(plugged=True)

    cooler = threading.Thread(target=cool, daemon=True)
    cooler.start()
    with meanwhile(results, pull):
        directory = run_cell(machine, results, "cooperative")
    cooler.join()
    record = schemas.read(directory / "record.json", "record")
    assert record["valid"]
    assert record["cell"]["instruments"] == ["observer", "profiler"]
    assert record["agreement"]["agrees"]
    assert record["scheduler"]["kernel"]["opened"]["ops"] == "vstate"
    environment = record["environment"]["board"]
    assert environment["host_key"].startswith("SHA256:")
    assert environment["temperature_before_c"] == 45.0
    assert environment["waited_for_cooling_s"] > 0
    assert [row["governor"] for row in environment["frequencies"]] == ["performance"] * 2
    assert " lost " in (directory / "commands.log").read_text()
    assert not machine.root("ls /srv/banana/bananaos/runs")
    [run] = collect(results)
    assert run.row["platform"] == "emulated" and run.row["vlen_bits"] == 256


def test_a_second_driver_is_refused(machine: TestBoard) -> None:
    with (
        Session(machine.settings, yes=True) as first,
        Session(machine.settings, yes=True) as second,
    ):
        first.lock_only()
        with pytest.raises(
            EnvironmentUnfit, match=r"in use by .*process \d+.* for \d+ s, last heard"
        ):
            second.open()
        assert "process" in check(examine(machine.settings), "other drivers").got
        first.ask("release", token=first.token)


def test_another_host_key_is_refused(machine: TestBoard) -> None:
    known = machine.settings.state / "known_hosts"
    pinned = known.read_text()
    other = re.sub(r"(AAAA\S{30})\S{8}", r"\g<1>AAAAAAAA", pinned)
    known.write_text(other)
    try:
        with (
            Link(machine.settings) as link,
            pytest.raises(EnvironmentUnfit, match="another host key than at the first contact"),
        ):
            link.ask("hello", {"directory": "bananaos"})
    finally:
        known.write_text(pinned)


def test_a_sudo_that_asks_is_named(machine: TestBoard) -> None:
    machine.root(
        "cp /etc/sudoers.d/banana /etc/banana.sudoers\n"
        "printf '#!/bin/sh\\nmv /etc/banana.sudoers /etc/sudoers.d/banana\\n' >/usr/bin/allow\n"
        "chmod 755 /usr/bin/allow\n"
        "printf 'banana ALL=(ALL) ALL\\nbanana ALL=(ALL) NOPASSWD: /usr/bin/allow\\n' "
        ">/etc/sudoers.d/banana\n"
    )
    try:
        found = check(examine(machine.settings), "root")
        assert found.level == "error" and "asks for a password" in found.got
        with pytest.raises(EnvironmentUnfit, match="asks for a password, which is never typed"):
            flash(machine.settings, None, yes=True)
    finally:
        with Link(machine.settings) as link:
            assert link.interactive(["sudo", "-n", "/usr/bin/allow"]) == 0


def test_doctor_sees_a_wrong_clock_and_a_read_only_directory(machine: TestBoard) -> None:
    machine.root(
        f"date -s @{time.time() - 2 * 365 * 86400:.0f} >/dev/null\n"
        "mkdir -p /srv/ro; busybox mount -t tmpfs -o ro tmpfs /srv/ro\n"
    )
    settings = dataclasses.replace(machine.settings, directory="/srv/ro/here")
    try:
        # It is asked for more than there is, too.
        checks = examine(settings, model_mib=1 << 20)
        for name in ("memory", "disk"):
            found = check(checks, name)
            assert found.level == "error" and "(1048576 of them for the model)" in found.expected
        clock, directory = check(checks, "clock"), check(checks, "directory")
        assert clock.level == "error" and "behind" in clock.got and "date" in clock.fix
        assert directory.level == "error" and directory.got == "cannot be written"
        with pytest.raises(EnvironmentUnfit, match="read-only"):
            flash(settings, None, yes=True)
    finally:
        machine.root(
            f"busybox umount /srv/ro; rmdir /srv/ro; date -s @{time.time():.0f} >/dev/null"
        )


def test_a_small_disk_is_named_before_anything_is_sent(machine: TestBoard) -> None:
    machine.root("mkdir /srv/small; busybox mount -t tmpfs -o size=1m,mode=777 tmpfs /srv/small")
    settings = dataclasses.replace(machine.settings, directory="/srv/small/here")
    sent = machine.log.count(" sftp ")
    try:
        with pytest.raises(EnvironmentUnfit, match=r"0 MiB free, [\d.]+ MiB needed"):
            flash(settings, None, yes=True)
        assert machine.log.count(" sftp ") == sent
    finally:
        machine.root("busybox umount /srv/small; rmdir /srv/small")


def other_module(settings: SshSettings, change: tuple[bytes, bytes]) -> Path:
    """Put a module that differs in these bytes where the owner's own would lie."""
    data = payload.module_file(settings).read_bytes()
    assert change[0] in data
    path = settings.state / "kernel" / "vstate_profiler.ko"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data.replace(*change))
    return path


def test_a_module_of_another_kernel_is_never_loaded(machine: TestBoard) -> None:
    path = other_module(machine.settings, (b"vermagic=6.12", b"vermagic=6.18"))
    try:
        with pytest.raises(InvalidData, match=r"is for kernel 6\.18\S*, the board runs 6\.12"):
            flash(machine.settings, None, yes=True)
    finally:
        path.unlink()
        path.parent.rmdir()


def test_a_program_of_another_machine_is_never_sent(machine: TestBoard) -> None:
    with Session(machine.settings, yes=True) as session:
        session.lock_only()
        with pytest.raises(InvalidData, match="/bin/sh: not a RISC-V program: it was not sent"):
            session.supply({"llama-server": Item(Path("/bin/sh"), payload.PROGRAM)})
        session.ask("release", token=session.token)


def test_a_killed_agent_is_an_invalid_run_and_leaves_nothing(
    machine: TestBoard, tmp_path: Path
) -> None:
    def kill() -> None:
        machine.root(
            "for pid in /proc/[0-9]*; do\n"
            "if tr '\\0' ' ' <$pid/cmdline | grep -q '^python3 -m board.agent'; then\n"
            "kill -9 ${pid#/proc/}; fi; done"
        )

    results = tmp_path / "results"
    with meanwhile(results, kill), pytest.raises(InvalidData, match="agent-failed"):
        run_cell(machine, results)
    [directory] = (results / "runs").iterdir()
    failure = schemas.read(directory / "record.json", "record")["environment"]["failure"]
    assert "killed by signal 9" in failure["detail"]
    assert "llama-server" not in machine.root("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert not machine.root("cat /proc/modules; ls -d /sys/fs/cgroup/bananaos* || true")


@pytest.mark.long
def test_a_disk_that_fills_up_is_named(machine: TestBoard, tmp_path: Path) -> None:
    machine.root("mkdir /srv/small; busybox mount -t tmpfs -o size=64m,mode=777 tmpfs /srv/small")
    settings = dataclasses.replace(machine.settings, directory="/srv/small/here")
    known = definitions(tmp_path, EXPERIMENTS)

    def fill() -> None:
        machine.root("dd if=/dev/zero of=/srv/small/filler bs=64k 2>/dev/null || true")

    results = tmp_path / "results"
    try:
        with (
            SshBoard(settings, yes=True) as board,
            meanwhile(results, fill),
            pytest.raises(
                EnvironmentUnfit, match=r"/srv/small/here\S*: the disk is full: free some"
            ),
        ):
            run_one(board, Overrides(), results, definitions=known)
    finally:
        machine.root("rm -f /srv/small/filler")
        unflash(settings, yes=True)
        machine.root("busybox umount /srv/small; rmdir /srv/small")
    assert len(list((results / "void").iterdir())) == 1
    assert list((results / "runs").iterdir()) == []


@pytest.mark.long
def test_a_board_that_stays_hot_is_given_up(machine: TestBoard, tmp_path: Path) -> None:
    machine.root("echo 90000 >/run/fake/temp")
    settings = dataclasses.replace(machine.settings, cooling_s=0)
    known = definitions(tmp_path, EXPERIMENTS)
    try:
        with (
            SshBoard(settings, yes=True) as board,
            pytest.raises(
                EnvironmentUnfit, match=r"90\.0 degrees C after \d+ s, expected at most 70"
            ),
        ):
            run_one(board, Overrides(), tmp_path / "results", definitions=known)
    finally:
        machine.root("echo 45000 >/run/fake/temp")


def test_unflash_puts_all_back(machine: TestBoard, before: list[str]) -> None:
    unflash(machine.settings, yes=True)
    assert snapshot(machine) == before


@pytest.mark.long
def test_a_killed_driver_is_taken_over_from_once_its_run_has_ended(
    machine: TestBoard, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    code = "import test_ssh_board as t, sys; t.drive(sys.argv[1], sys.argv[2])"
    argv = [sys.executable, "-c", code, machine.settings.name, os.fspath(results)]
    paths = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    driver = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": paths})
    with meanwhile(results, driver.kill):
        driver.wait()
    with (
        Session(machine.settings, yes=True) as session,
        pytest.raises(EnvironmentUnfit, match=r"in use by .*its run \S+ is going on"),
    ):
        session.open()
    unflash(machine.settings, yes=True)
    assert "llama-server" not in machine.root("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def drive(name: str, results: str) -> None:
    """What the driver does that is killed."""
    Path(results).mkdir()
    known = definitions(Path(results), EXPERIMENTS)
    with opened(name, yes=True) as board:
        run_one(board, Overrides(), Path(results), definitions=known)


def test_a_kernel_tree_of_the_owners_own(
    machine: TestBoard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive = build("kernel/image") / "modules-devel.tar"
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
    tree = tmp_path / "linux-devel"
    kept = build_for_board(tree, machine.settings)
    try:
        said = capfd.readouterr().err
        assert "CONFIG_PROC_KCORE" in said and "SCHED_CLASS_EXT" not in said
        ours = build("kernel/vstate-profiler") / "vstate_profiler.ko"
        assert (kept / "vstate_profiler.ko").read_bytes() == ours.read_bytes()
        assert "struct task_struct {" in (kept / "vmlinux.h").read_text()
        assert not machine.root("ls /srv/banana")
        (tree / "include" / "config" / "kernel.release").write_text("6.18.37-current-spacemit\n")
        with pytest.raises(InvalidData, match=r"is for kernel 6\.18\.37\S*, the board runs 6\.12"):
            build_for_board(tree, machine.settings)
        (tree / "Module.symvers").unlink()
        with pytest.raises(UsageError, match=r"has no Module\.symvers: expected a kernel tree in"):
            build_for_board(tree, machine.settings)
    finally:
        shutil.rmtree(kept)


def test_commands_are_logged_without_what_they_carry(machine: TestBoard) -> None:
    lines = machine.log.splitlines()
    assert all(
        re.match(r"\S+\+00:00 (answer|refused|lost|\d+) \d+\.\d\ds (ask|sftp) ", x) for x in lines
    )
    assert json.dumps(lines).count("base64") == 0


def test_a_killed_emulator_is_noticed(machine: TestBoard) -> None:
    session = machine.emulated.pid()
    for pid in users_of(machine.emulated.console_log):
        os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while machine.emulated.pid() is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert session is not None and machine.emulated.pid() is None
    with Link(machine.settings) as link, pytest.raises(LinkLost, match=r"\./inv board up --board"):
        link.ask("hello", {"directory": "bananaos"})
    machine.up()


def test_a_restarted_board_voids_the_cell_and_it_is_run_again(
    machine: TestBoard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"

    def restart() -> None:
        machine.emulated.monitor("system_reset")

    with meanwhile(results, restart):
        directory = run_cell(machine, results)
    assert directory.name.endswith("-2")
    [void] = (results / "void").iterdir()
    assert "board-restarted" in (void / "void.txt").read_text()
    assert "restarted: setting it up again" in capfd.readouterr().err
    record = schemas.read(directory / "record.json", "record")
    assert record["valid"] and record["agreement"]["agrees"]
    assert (record["cell"]["policy"], record["cell"]["concurrency"]) == ("baseline", 2)


# ----------------------------------------------------------- boards that do not come up


def another(machine: TestBoard, **changes: object) -> Interactive:
    """A board of the same kind, not up."""
    other = dataclasses.replace(
        machine.settings,
        name=f"{machine.settings.name}-2",
        **changes,  # type: ignore[arg-type]
    )
    return Interactive(other)


def test_a_board_is_up_once_and_needs_its_port(machine: TestBoard) -> None:
    with pytest.raises(EnvironmentUnfit, match=r"is up already \(process \d+\); ./inv board down"):
        machine.emulated.up()
    other = another(machine)
    try:
        with pytest.raises(EnvironmentUnfit, match=f"port {machine.settings.port} .*in use"):
            other.up()
        assert other.down() is False
    finally:
        shutil.rmtree(other.console_log.parents[1], ignore_errors=True)


def test_a_board_that_is_not_ready_in_time_shows_its_console_and_is_gone(
    machine: TestBoard,
) -> None:
    other = another(machine, port=ssh_board.free_port())
    try:
        with pytest.raises(EnvironmentUnfit, match=r"no SSH server after 2 s; stopped") as failure:
            other.up(ready_s=2)
        assert re.search(r"^  \| ", str(failure.value), re.MULTILINE)
        assert other.pid() is None
        assert users_of(other.console_log) == []
    finally:
        shutil.rmtree(other.console_log.parents[1], ignore_errors=True)


def test_an_interrupted_up_leaves_nothing(machine: TestBoard) -> None:
    text = Path(os.environ[VARIABLE]).read_text()
    name, port = f"{machine.settings.name}-3", ssh_board.free_port()
    file = machine.settings.state / "other.toml"
    file.write_text(
        text.replace(machine.settings.name, name).replace(str(machine.settings.port), str(port))
    )
    argv = [sys.executable, "-c", INV, "board", "up", "--board", name]
    env = {**os.environ, VARIABLE: os.fspath(file), "PYTHONPATH": os.fspath(REPO)}
    process = subprocess.Popen(argv, env=env, cwd=REPO, stderr=subprocess.PIPE, text=True)
    state = state_dir() / "boards" / name
    try:
        while not (state / "run" / "console.log").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in said
        assert not (state / "run" / "pid").exists()
        assert users_of(state / "run" / "console.log") == []
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(state, ignore_errors=True)

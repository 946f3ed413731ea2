"""Boards as data, and the parts of the way to a board that need none: refusals, order, voids."""

import base64
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_board import FakeBoard, definitions, good

from board import boards
from board.actions import act
from board.base import RunVoid, opened
from board.boards import ssh_settings
from board.cell import Overrides, plan_experiments
from board.execute import VOID_ATTEMPTS
from board.onboard import changes, lock, runs, store
from board.onboard.refused import Refused
from board.runner import interleaved, reproduce, run_one
from board.ssh import program
from board.ssh.board import SshBoard
from board.ssh.consent import require_consent
from board.ssh.link import Link, LinkLost
from board.ssh.session import Patience
from board.virtual.interactive import Interactive
from toolchain.command import Cancelled
from toolchain.errors import ArtifactError, EnvironmentUnfit, InvalidData, UsageError

needs_ssh = pytest.mark.skipif(
    shutil.which("ssh") is None, reason="no ssh here: apt-get install openssh-client"
)

OWN = """
schema_version = "1"
[boards.mine]
title = "an Orange Pi RV2"
platform = "board"
[boards.mine.ssh]
address = "127.0.0.1"
port = 1
user = "orange"
directory = "bananaos"
emulator = false
[boards.mine.expect]
soc = "spacemit,k1"
harts = 8
vlen_bits = 256
[boards.mine.limits]
memory_mib = 1
disk_mib = 1
temperature_c = 75
cooling_s = 0
[boards.mine.paths]
governors = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
temperatures = "/sys/class/thermal/thermal_zone*/temp"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "boards.toml"
    file.write_text(OWN)
    monkeypatch.setenv(boards.VARIABLE, os.fspath(file))
    monkeypatch.setenv("XDG_STATE_HOME", os.fspath(tmp_path / "state"))
    return file


def test_a_board_of_the_users_own_is_added(own: Path) -> None:
    assert {"virtual", "virtual-ssh", "f3", "mine"} <= boards.board_tables().keys()
    assert ssh_settings("mine").destination == "orange@127.0.0.1"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("port = 1", "prot = 1", '"prot"'),
        ("port = 1", "port = 99999", "boards.mine.ssh.port"),
        ('address = "127.0.0.1"', 'address = "-oProxyCommand=x"', "boards.mine.ssh.address"),
        ('directory = "bananaos"', 'directory = "../x"', "boards.mine.ssh.directory"),
        ('directory = "bananaos"', 'directory = "a b; rm"', "boards.mine.ssh.directory"),
        ("vlen_bits = 256", "vlen_bits = 200", "boards.mine.expect.vlen_bits"),
        ("[boards.mine.limits]", "[boards.mine.limit]", '"limit"'),
        ("emulator = false", "", '"emulator"'),
        ("[boards.mine", "[boards.virtual", "boards.virtual"),
    ],
)
def test_what_is_wrong_in_a_boards_file_is_named(own: Path, old: str, new: str, named: str) -> None:
    own.write_text(OWN.replace(old, new))
    with pytest.raises(InvalidData) as refused:
        boards.board_tables()
    assert named in str(refused.value) and os.fspath(own) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_boards_that_cannot_be_used_so_are_refused(own: Path) -> None:
    with pytest.raises(UsageError, match="--board virtual: is not reached over SSH; expected one"):
        ssh_settings("virtual")
    with pytest.raises(UsageError, match="--board mine: is a real board: switch it on yourself"):
        Interactive(ssh_settings("mine"))
    own.unlink()
    with pytest.raises(UsageError, match="no such file"):
        opened("mine")


@needs_ssh
def test_a_board_that_does_not_answer_is_one_line(own: Path) -> None:
    with Link(ssh_settings("mine")) as link:
        with pytest.raises(
            LinkLost, match=r"no connection to orange@127\.0\.0\.1 port 1: .*refused"
        ):
            link.ask("hello", {"directory": "bananaos"})
        with pytest.raises(EnvironmentUnfit, match="no pinned host key"):
            _ = link.host_key
    log = (ssh_settings("mine").state / "commands.log").read_text()
    assert " lost " in log and log.endswith("s ask hello\n")


@needs_ssh
def test_a_board_out_of_reach_is_told_first(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with opened("mine"):
        assert "board mine: no connection to orange@127.0.0.1 port 1" in capfd.readouterr().err


def test_no_consent_no_change(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="nothing was done: pass --yes"):
        require_consent("f3", ["mount debugfs"], yes=False)
    require_consent("f3", ["mount debugfs"], yes=True)
    assert capfd.readouterr().err.count("    mount debugfs\n") == 2


# ------------------------------------------------------------- one cell at a time, in the runner


class OneByOne(FakeBoard):
    parallel = False
    jobs = 1


def two_policies(directory: Path) -> str:
    from fake_board import EXPERIMENTS

    return EXPERIMENTS.replace("seeds = [1, 2]", "seeds = [1, 2, 3, 4]")


def test_cells_of_a_real_board_come_one_by_one_in_a_recorded_order(tmp_path: Path) -> None:
    board = OneByOne(good)
    known = definitions(tmp_path, two_policies(tmp_path))
    with pytest.raises(UsageError, match="--jobs 2: board virtual runs one cell at a time"):
        reproduce(["E9"], board, tmp_path / "r", 2, True, definitions=known)
    assert reproduce(["E0"], board, tmp_path / "r", None, True, definitions=known) in (0, 1)
    assert board.begun == 1 and board.most_at_once == 1
    import schemas

    orders = [
        schemas.read(path, "record")["environment"]["order"]
        for path in (tmp_path / "r").glob("runs/*/record.json")
    ]
    assert sorted(order["position"] for order in orders) == [1, 2, 3, 4, 5]
    assert {order["of"] for order in orders} == {5} and len({o["seed"] for o in orders}) == 1
    assert reproduce(["E0"], board, tmp_path / "r", None, True, definitions=known) in (0, 1)
    assert board.begun == 1, "nothing to run: the board is left alone"


def test_the_order_follows_from_the_cells(tmp_path: Path) -> None:
    known = definitions(tmp_path, two_policies(tmp_path))
    plans = plan_experiments(known, ["E0", "E9"], FakeBoard())
    first, again = interleaved(plans), interleaved(plans[::-1])
    assert [plan.hash for plan in first] == [plan.hash for plan in again]
    assert {plan.hash for plan in first} == {plan.hash for plan in plans}


def test_a_cell_whose_board_restarts_is_run_again(tmp_path: Path) -> None:
    known = definitions(tmp_path)
    attempts = 0

    def restarts_once(
        cell: Mapping[str, Any], directory: Path, cancel: threading.Event
    ) -> dict[str, Any]:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RunVoid("board-restarted", "it was")
        return good(cell, directory, cancel)

    directory = run_one(FakeBoard(restarts_once), Overrides(), tmp_path / "r", definitions=known)
    assert directory.name.endswith("-2")
    [void] = (tmp_path / "r" / "void").iterdir()
    assert "board-restarted" in (void / "void.txt").read_text()


def test_a_board_that_keeps_restarting_ends_it(tmp_path: Path) -> None:
    def restarts(*_: Any) -> dict[str, Any]:
        raise RunVoid("board-restarted", "it was")

    with pytest.raises(EnvironmentUnfit, match=f"void {VOID_ATTEMPTS} times: board-restarted"):
        run_one(FakeBoard(restarts), Overrides(), tmp_path / "r", definitions=definitions(tmp_path))
    assert len(list((tmp_path / "r" / "void").iterdir())) == VOID_ATTEMPTS


# ------------------------------------------ the program on the board, here: no root, no emulator


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    for touch in (lambda: store.opened(os.fspath(tmp_path)), lambda: store.remove(str(tmp_path))):
        with pytest.raises(Refused, match="not of this project"):
            touch()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_names_change_only_when_all_has_arrived(tmp_path: Path) -> None:
    root = os.fspath(tmp_path / "d")
    import hashlib

    one, two = (hashlib.sha256(data).hexdigest() for data in (b"one", b"two"))
    assert store.have(root, {one: 3, two: 3}) == {one: 0, two: 0}
    (tmp_path / "d" / "blobs" / f"{one}.part").write_bytes(b"one")
    (tmp_path / "d" / "blobs" / f"{two}.part").write_bytes(b"twX")
    names: dict[str, list[Any]] = {"a/one": [one, 0o755], "two": [two, 0o644]}
    assert store.install(root, names) == {"damaged": [two], "changed": []}
    assert not (tmp_path / "d" / "artifacts" / "a").exists()
    (tmp_path / "d" / "blobs" / f"{two}.part").write_bytes(b"tw")
    assert store.have(root, {one: 3, two: 3}) == {one: -1, two: 2}
    (tmp_path / "d" / "blobs" / f"{two}.part").write_bytes(b"two")
    assert store.install(root, names)["changed"] == ["a/one", "two"]
    assert store.install(root, {"two": [two, 0o644]})["changed"] == []
    assert (tmp_path / "d" / "artifacts" / "two").read_bytes() == b"two"


def test_what_was_changed_by_somebody_else_stays(tmp_path: Path) -> None:
    root = tmp_path / "d"
    store.opened(os.fspath(root))
    files = [tmp_path / name for name in ("one", "two", "three")]
    for file in files:
        file.write_text("schedutil\n")
    files[2].write_text("performance\n")
    pattern = f"{tmp_path}/[ot]*"
    mine = [change for change in changes.plan(pattern) if change["path"].startswith(str(tmp_path))]
    assert [change["path"] for change in mine] == [str(files[0]), str(files[1])]
    changes._remember(root, mine, False)
    for change in mine:
        changes._make(change)
    files[1].write_text("powersave\n")
    answer = changes.undo(os.fspath(root))
    assert [line for line in answer["left"] if "somebody changed it" in line]
    assert files[0].read_text() == "schedutil\n" and files[1].read_text() == "powersave\n"
    assert changes.undo(os.fspath(root)) == {"undone": [], "left": []}


def test_what_cannot_be_put_back_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = os.fspath(tmp_path / "d")
    store.opened(root)
    file = tmp_path / "governor"
    file.write_text("schedutil\n")
    monkeypatch.setattr(changes, "MOUNTS", ())
    monkeypatch.setattr(changes, "VALUES", ())
    changes.apply(root, os.fspath(file), False)
    put_back = changes._put_back
    monkeypatch.setattr(changes, "_put_back", lambda change: f"{change['path']}: busy")
    assert changes.undo(root) == {"undone": [], "left": [f"{file}: busy"]}
    monkeypatch.setattr(changes, "_put_back", put_back)
    assert len(changes.undo(root)["undone"]) == 1 and file.read_text() == "schedutil\n"
    assert changes.undo(root) == {"undone": [], "left": []}


def test_changes_that_fail_half_way_say_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = os.fspath(tmp_path / "d")
    store.opened(root)
    for name in ("a", "b"):
        (tmp_path / name).write_text("schedutil\n")
    monkeypatch.setattr(changes, "MOUNTS", ())
    monkeypatch.setattr(changes, "VALUES", ())
    make = changes._make

    def fail(change: changes.Change) -> None:
        if change["path"].endswith("b"):
            raise OSError(16, "Device or resource busy", change["path"])
        make(change)

    monkeypatch.setattr(changes, "_make", fail)
    with pytest.raises(Refused, match="b: Device or resource busy; all is as it was"):
        changes.apply(root, f"{tmp_path}/[ab]", False)
    assert (tmp_path / "a").read_text() == "schedutil\n"
    monkeypatch.setattr(changes, "_put_back", lambda change: f"{change['path']}: gone")
    with pytest.raises(Refused, match=r"busy; not undone: .*b: gone; .*a: gone"):
        changes.apply(root, f"{tmp_path}/[ab]", False)


def test_a_log_is_handed_over_byte_by_byte(tmp_path: Path) -> None:
    """A character that ends in the next piece decodes to more bytes than it had."""
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    text = "x" * 65535 + "\u00b5" + "y" * 10
    (run / "agent.log").write_text(text)
    got, offset = "", 0
    while offset < len(text.encode()):
        state = runs.status(os.fspath(tmp_path), "r", offset, "")
        got, offset = got + state["log"], offset + state["log_bytes"]
    assert got.count("y") == 10 and got.startswith("x" * 65535)


def test_a_lost_link_is_not_waited_for_once_cancelled() -> None:
    cancel = threading.Event()
    cancel.set()
    patience = Patience("mine", time.monotonic() + 1e6, cancel)
    with pytest.raises(Cancelled, match="board mine: cancelled while the link was lost"):
        patience.lost(LinkLost("no connection"))


def test_an_interrupted_question_leaves_no_answer_behind(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class Asked:
        def ask(self, _question: Mapping[str, Any], _timeout_s: float) -> dict[str, Any]:
            raise KeyboardInterrupt

    with Link(ssh_settings("mine")) as link:
        monkeypatch.setattr(link, "_channel", lambda root: Asked())
        monkeypatch.setattr(link, "_close", lambda: closed.append(True))
        with pytest.raises(KeyboardInterrupt):
            link.ask("facts")
        assert closed == [True]


def test_without_an_ssh_client(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with Link(ssh_settings("mine")) as link:
        with pytest.raises(EnvironmentUnfit, match="ssh: not in PATH: install the package openssh"):
            link.ask("hello", {"directory": "bananaos"})
        with pytest.raises(EnvironmentUnfit, match="ssh: not in PATH"):
            link.interactive([])


def test_words_that_are_none(own: Path) -> None:
    with pytest.raises(UsageError, match=r"--command \"it's\": No closing quotation; expected"):
        act("ssh", "mine", model="banana-tiny", command="it's")


@needs_ssh
def test_a_login_that_fails_says_what_to_do(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        act("ssh", "mine", model="banana-tiny", command="true")
    assert str(caught.value) == (
        "board mine: no connection to orange@127.0.0.1, or it broke (ssh ended with exit code 255):"
        " is it on, is the cable in? ./inv doctor --board mine tells"
    )
    assert caught.value.exit_code == 3
    assert "Connection refused" in capfd.readouterr().err
    monkeypatch.setattr(Link, "interactive", lambda *_: 255)
    with pytest.raises(EnvironmentUnfit, match=r": ./inv board up --board virtual-ssh starts it$"):
        act("ssh", "virtual-ssh", model="banana-tiny", command="")
    monkeypatch.setattr(Link, "interactive", lambda *_: 7)
    assert act("ssh", "mine", model="banana-tiny", command="exit 7") == 7


def test_changes_of_another_boot_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.opened(os.fspath(tmp_path / "d"))
    changes._remember(tmp_path / "d", [{"what": "mount", "path": "/x", "type": "bpf"}], True)
    assert len(changes.state(os.fspath(tmp_path / "d"))["changes"]) == 1
    monkeypatch.setattr(changes, "boot_id", lambda: "another")
    assert changes.state(os.fspath(tmp_path / "d")) == {"flashed": True, "changes": []}


def test_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.fspath(tmp_path / "d")
    assert lock.take(root, "a", "ann (process 1)") == {"taken_over_from": None}
    with pytest.raises(Refused, match=r"in use by ann \(process 1\) for 0 s, last heard of 0"):
        lock.take(root, "b", "bob")
    assert lock.beat(root, "b") == {"held": False} and lock.beat(root, "a") == {"held": True}
    # Its connection is gone, and has been for longer than a link takes to come back.
    monkeypatch.setattr(runs, "start_time", lambda pid: "another")
    with pytest.raises(Refused, match="in use by ann"):
        lock.take(root, "b", "bob")
    monkeypatch.setattr(lock, "GONE_S", -1.0)
    monkeypatch.setattr(runs, "going", lambda root: ["run-1"])
    with pytest.raises(Refused, match="its run run-1 is going on"):
        lock.take(root, "b", "bob")
    monkeypatch.setattr(runs, "going", lambda root: [])
    assert "ann" in str(lock.take(root, "b", "bob")["taken_over_from"])
    assert lock.release(root, "a") == {"released": False}
    assert lock.release(root, "b") == {"released": True}
    assert lock.holder(root) == {"owner": None}


EVERY_VERB = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from board.onboard.__main__ import MODULES
for verb, module in MODULES.items():
    found = importlib.import_module(f"board.onboard.{module}")
    assert found.__file__.startswith(sys.argv[1]), found.__file__
    getattr(found, verb)
"""


def test_the_program_for_the_board_lacks_nothing_that_it_imports(tmp_path: Path) -> None:
    archive = tmp_path / "program.zip"
    archive.write_bytes(base64.b64decode(program.package()))
    argv = [sys.executable, "-I", "-S", "-c", EVERY_VERB, os.fspath(archive)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_emulated_harts_get_no_more_threads_than_there_are_cpus(own: Path) -> None:
    assert SshBoard(ssh_settings("virtual-ssh")).most_threads == len(os.sched_getaffinity(0))
    assert SshBoard(ssh_settings("mine")).most_threads is None


def test_a_failure_of_the_program_there_is_one_line() -> None:
    from board.onboard import __main__ as answering

    answer = answering._answer({"verb": "have", "arguments": {"directory": "/proc/x", "files": {}}})
    assert answer["code"] == 3 and "\n" not in answer["refused"]
    assert "Traceback" in answering._answer({"verb": "have", "arguments": {}})["fault"]
    assert issubclass(LinkLost, ArtifactError)

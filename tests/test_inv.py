"""./inv and toolchain.cli: the environment is made rightly; each failure has its line and code.

A checkout is played by a directory with the real inv and toolchain, a small tasks.py, and a lock
that holds only invoke, packed anew from this environment: so no test needs a package index.
Limit: that the full requirements.txt installs is shown by the ./inv that runs these tests.
"""

import base64
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

BOUND_S = 300
TASKS = '''
import time
from toolchain.cli import task
from toolchain.command import Cancelled
from toolchain.errors import Differs, EnvironmentUnfit, InvalidData, UsageError

FAILURES = {kind.__name__: kind for kind in (Differs, EnvironmentUnfit, InvalidData, UsageError)}


@task(group="Second letter last", help={"times": "how often"}, iterable=["name"])
def zebra(c, times=1, name=None):
    """Greet.

    Long explanation.
    """
    print("hello " * times)


@task(group="Checks")
def fail(c, kind):
    """Fail as told."""
    raise FAILURES[kind]("file x: got 1, expected 2")


@task(group="Checks")
def cancel(c):
    """Be cancelled."""
    raise Cancelled("run 3")


@task(group="Checks")
def bug(c):
    """Divide by zero."""
    1 / 0


@task(group="Second letter last")
def alpaca(c):
    """Wait for the interrupt."""
    print("waiting", flush=True)
    time.sleep(1000)
'''


@dataclass(frozen=True)
class Checkout:
    root: Path
    env: dict[str, str]

    def start(self, *words: str, way: str = "inv", **env: str) -> "subprocess.Popen[str]":
        """Start ./inv, or the invoke of its environment, in another directory."""
        if way == "invoke":
            command = [str(self.venv / "bin" / "invoke"), "-r", str(self.root)]
        else:
            command = [str(self.root / way)]
        return subprocess.Popen(
            [*command, *words],
            cwd="/",
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, way: str = "inv", **env: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with self.start(*words, way=way, **env) as process:
            stdout, stderr = process.communicate(timeout=BOUND_S)
        return process.returncode, stdout, stderr

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def making(self) -> str:
        return f"inv: making the Python environment {self.venv} (once; about 700 MB)\n"


def _pack_invoke(directory: Path) -> str:
    """Write invoke as a wheel into `directory`; returns its line for requirements.txt."""
    invoke = distribution("invoke")
    directory.mkdir()
    wheel = directory / f"invoke-{invoke.version}-py3-none-any.whl"
    records = []
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in invoke.files or []:
            name = str(file)
            if name.startswith("..") or "__pycache__" in name or name.endswith("/RECORD"):
                continue
            data = Path(str(file.locate())).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            archive.writestr(name, data)
            records.append(f"{name},sha256={digest},{len(data)}\n")
        record = f"invoke-{invoke.version}.dist-info/RECORD"
        archive.writestr(record, "".join([*records, f"{record},,\n"]))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"invoke=={invoke.version} --hash=sha256:{digest}\n"


def _make_checkout(repo: Path, root: Path, wheels: Path) -> Checkout:
    root.mkdir(parents=True)
    requirement = _pack_invoke(wheels)
    (root / "requirements.txt").write_text(requirement)
    (root / "tasks.py").write_text(TASKS)
    shutil.copy(repo / "inv", root)
    (root / "toolchain").mkdir()
    for module in ("__init__", "cli", "command", "errors", "say"):
        shutil.copy(repo / "toolchain" / f"{module}.py", root / "toolchain")
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "BANANAOS_", "INVOKE_"))
    }
    return Checkout(
        root,
        {
            **kept,
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        },
    )


@pytest.fixture
def fresh(repo: Path, tmp_path: Path) -> Checkout:
    """A checkout nobody has used yet."""
    return _make_checkout(repo, tmp_path / "with space" / "checkout", tmp_path / "wheels")


@pytest.fixture(scope="module")
def used(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose environment stands; do not change it."""
    directory = tmp_path_factory.mktemp("used")
    checkout = _make_checkout(repo, directory / "checkout", directory / "wheels")
    code, _, stderr = checkout.run("--list")
    assert (code, stderr) == (0, checkout.making)
    return checkout


LIST = """\
Usage: {program} VERB [--options]

Second letter last:
  zebra    Greet.
  alpaca   Wait for the interrupt.

Checks:
  fail     Fail as told.
  cancel   Be cancelled.
  bug      Divide by zero.

{program} --help VERB explains a verb and its options.
"""


@pytest.mark.parametrize("words", [(), ("--list",), ("--help",)])
def test_the_list_is_grouped_and_the_environment_silent(
    used: Checkout, words: tuple[str, ...]
) -> None:
    assert used.run(*words) == (0, LIST.format(program="./inv"), "")


def test_a_verb_explains_itself(used: Checkout) -> None:
    code, stdout, _ = used.run("--help", "zebra")
    assert code == 0
    assert "Long explanation." in stdout
    assert "how often" in stdout


def test_plain_invoke_shows_the_same_list(used: Checkout) -> None:
    assert used.run(way="invoke") == (0, LIST.format(program="inv[oke]"), "")


both_ways = pytest.mark.parametrize("way", ["inv", "invoke"])
ADVICE = "(./inv --list shows the verbs, ./inv --help VERB the options of one)"


@both_ways
def test_a_verb_runs(used: Checkout, way: str) -> None:
    assert used.run("zebra", "--times", "2", way=way) == (0, "hello hello \n", "")


@both_ways
@pytest.mark.parametrize(
    ("kind", "code"),
    [("Differs", 1), ("UsageError", 2), ("EnvironmentUnfit", 3), ("InvalidData", 4)],
)
def test_a_foreseen_failure_is_one_line(used: Checkout, way: str, kind: str, code: int) -> None:
    expected = (code, "", "error: file x: got 1, expected 2\n")
    assert used.run("fail", "--kind", kind, way=way) == expected


@both_ways
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zoo"], "'zoo' is no verb and nothing that fits here"),
        (["zebra", "--stripes"], "'--stripes' is no verb and nothing that fits here"),
        (
            ["zebra", "--times", "many"],
            "an option takes a whole number, got 'many'",
        ),
        (["zebra", "--times"], "--times: a value is missing"),
        (["zebra", "--name"], "--name: a value is missing"),
        (["zebra", "--name", "--times", "2"], "--name: a value is missing"),
        (["zebra", "--name", ""], "--name: got an empty value"),
        (["zebra", "-n", "a"], "'-n' is no verb and nothing that fits here"),
        (["fail"], "'fail' did not receive required positional arguments: 'kind'"),
        (["--help", "zoo"], "'zoo' is no verb and nothing that fits here"),
        (["--list", "zoo"], "Sub-collection 'zoo' not found!"),
        (
            ["--list", "--list-format", "xml"],
            "--list-format: got 'xml', expected flat, nested, json",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    used: Checkout, way: str, words: list[str], message: str
) -> None:
    assert used.run(*words, way=way) == (2, "", f"error: usage: {message} {ADVICE}\n")


@both_ways
def test_a_bug_is_not_hidden(used: Checkout, way: str) -> None:
    code, _, stderr = used.run("bug", way=way)
    assert code == 1
    assert stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


@both_ways
def test_interrupt_is_130(used: Checkout, way: str) -> None:
    with used.start("alpaca", way=way) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=BOUND_S)
    assert (process.returncode, stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_gone_is_no_traceback(used: Checkout, unbuffered: str) -> None:
    """As in `./inv --list | head -1`, whether it shows at the first line or at the end."""
    read, write = os.pipe()
    os.close(read)
    command = [str(used.root / "inv"), "--list"]
    env = {**used.env, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@both_ways
def test_cancelled_is_130(used: Checkout, way: str) -> None:
    assert used.run("cancel", way=way) == (130, "", "interrupted\n")


def test_packages_outside_the_lock_are_not_seen(used: Checkout, tmp_path: Path) -> None:
    (tmp_path / "invoke.py").write_text("raise SystemExit('the wrong invoke')\n")
    assert used.run("zebra", PYTHONPATH=str(tmp_path)) == (0, "hello \n", "")


def test_reached_through_a_link(used: Checkout, tmp_path: Path) -> None:
    (tmp_path / "inv").symlink_to(used.root / "inv")
    linked = Checkout(tmp_path, used.env)
    assert linked.run("zebra") == (0, "hello \n", "")


def test_when_the_environment_has_to_be_made_anew(fresh: Checkout, tmp_path: Path) -> None:
    # Without a Python to make it from, an environment that should be made anew is a failure.
    path = _path_with(tmp_path / "bin", TOOLS, {})

    def stands(checkout: Checkout) -> bool:
        code, stdout, stderr = checkout.run("zebra", PATH=path)
        if code != 3:
            assert (code, stdout, stderr) == (0, "hello \n", "")
            return True
        assert stderr.startswith("error: no usable Python: ")
        return False

    assert fresh.run("zebra") == (0, "hello \n", fresh.making)
    assert stands(fresh)

    requirements = fresh.root / "requirements.txt"
    before = requirements.read_text()
    requirements.write_text(before + "# changed\n")
    assert not stands(fresh)
    requirements.write_text(before)
    assert stands(fresh)

    python = fresh.venv / "bin" / "python"
    target = python.readlink()
    python.unlink()
    python.symlink_to("/no/such/python")
    assert not stands(fresh)
    python.unlink()
    python.symlink_to(target)
    assert stands(fresh)

    moved = Checkout(fresh.root.with_name("moved"), fresh.env)
    fresh.root.rename(moved.root)
    assert not stands(moved)
    moved.root.rename(fresh.root)
    assert stands(fresh)

    (fresh.venv / "complete").unlink()  # half made
    (fresh.venv / "bin" / "invoke").unlink()
    (fresh.venv / "left-over").write_text("")
    assert not stands(fresh)
    assert fresh.run("zebra") == (0, "hello \n", fresh.making)
    assert fresh.run("zebra", way="invoke") == (0, "hello \n", "")
    assert not (fresh.venv / "left-over").exists()


def test_two_first_uses_at_once(fresh: Checkout) -> None:
    processes = [fresh.start("zebra") for _ in range(3)]
    results = []
    for process in processes:
        with process:
            results.append((*process.communicate(timeout=BOUND_S), process.returncode))
    assert [(out, code) for out, _, code in results] == [("hello \n", 0)] * 3
    errors = [err for _, err, _ in results]
    assert errors.count(fresh.making) == 1
    waiting = f"inv: waiting for another ./inv that makes {fresh.venv}\n"
    assert all(err in (fresh.making, waiting, "") for err in errors)


@pytest.mark.parametrize(("sent", "code"), [("INT", 130), ("TERM", 143), ("KILL", -9)])
def test_stopped_while_making(fresh: Checkout, sent: str, code: int) -> None:
    with fresh.start("zebra") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == fresh.making
        while not (fresh.venv / "pyvenv.cfg").exists():
            time.sleep(0.01)
        os.killpg(process.pid, getattr(signal, f"SIG{sent}"))
        process.communicate(timeout=BOUND_S)
    assert process.returncode == code
    assert not (fresh.venv / "complete").exists()
    if sent == "KILL":  # the worst of the three: nothing could be put in order
        assert fresh.run("zebra") == (0, "hello \n", fresh.making)


def test_another_directory_for_the_environment(fresh: Checkout, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    code, stdout, stderr = fresh.run("zebra", BANANAOS_VENV=str(elsewhere))
    assert (code, stdout) == (0, "hello \n")
    assert stderr == fresh.making.replace(str(fresh.venv), str(elsewhere))
    assert not fresh.venv.exists()


def test_a_directory_of_somebody_else_is_not_touched(fresh: Checkout, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("42")
    assert fresh.run("zebra", BANANAOS_VENV=str(precious)) == (
        3,
        "",
        f"error: {precious} was not made by ./inv: remove it, or set BANANAOS_VENV to a new "
        "directory\n",
    )
    assert [path.name for path in precious.iterdir()] == ["thesis"]


def _cannot_write(directory: Path) -> tuple[int, str, str]:
    advice = "set BANANAOS_VENV to a directory that can be written"
    return 3, "", f"error: cannot write {directory}: {advice}\n"


def test_unwritable_place(fresh: Checkout, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "venv"
    assert fresh.run("zebra", BANANAOS_VENV=str(place)) == _cannot_write(place)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_unwritable_checkout(fresh: Checkout) -> None:
    fresh.root.chmod(0o555)
    try:
        assert fresh.run("zebra") == _cannot_write(fresh.venv)
    finally:
        fresh.root.chmod(0o755)


TOOLS = ["cat", "find", "flock", "grep", "ls", "mkdir", "mount", "mv", "readlink", "rm"]
TOOLS += ["sha256sum", "tail", "unshare"]


def _path_with(directory: Path, tools: list[str], pythons: dict[str, str]) -> str:
    """A PATH of nothing but `tools` and made-up Pythons (name: what it answers to -c CODE)."""
    directory.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        assert found is not None
        (directory / tool).symlink_to(found)
    for name, script in pythons.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    return str(directory)


OLD = "case $2 in *print*) echo 3.9;; *exit*) exit 1;; esac"
WITHOUT_VENV = "case $2 in *print*) echo 3.12;; *ensurepip*) exit 1;; esac"


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({}, "none"),
        ({"python3": "exit 127"}, "none"),
        (
            {"python3": OLD, "python3.12": WITHOUT_VENV},
            "python3 is 3.9, python3.12 is 3.12 without venv (install the package python3-venv)",
        ),
    ],
)
def test_no_usable_python(
    fresh: Checkout, tmp_path: Path, pythons: dict[str, str], found: str
) -> None:
    path = _path_with(tmp_path / "bin", TOOLS, pythons)
    assert fresh.run("zebra", PATH=path) == (
        3,
        "",
        "error: no usable Python: need at least 3.11 with venv; tried python3 python3.13 "
        f"python3.12 python3.11 python3.14; found {found}\n",
    )


def test_a_later_python_is_taken_when_the_first_is_too_old(fresh: Checkout, tmp_path: Path) -> None:
    real = f'exec {sys.base_prefix}/bin/python3 "$@"'
    path = _path_with(tmp_path / "bin", TOOLS, {"python3": OLD, "python3.11": real})
    assert fresh.run("zebra", PATH=path) == (0, "hello \n", fresh.making)


@pytest.mark.parametrize("missing", ["unshare", "mount", "flock"])
def test_missing_util_linux(fresh: Checkout, tmp_path: Path, missing: str) -> None:
    path = _path_with(tmp_path / "bin", [tool for tool in TOOLS if tool != missing], {})
    assert fresh.run("zebra", PATH=path) == (
        3,
        "",
        f"error: {missing} not found in PATH: install the package util-linux\n",
    )


def _wrong_hash(checkout: Checkout) -> dict[str, str]:
    lock = checkout.root / "requirements.txt"
    name, _, _ = lock.read_text().partition("sha256:")
    lock.write_text(f"{name}sha256:{'0' * 64}\n")
    return {}


def _no_hash(checkout: Checkout) -> dict[str, str]:
    lock = checkout.root / "requirements.txt"
    name, _, _ = lock.read_text().partition(" --hash")
    lock.write_text(f"{name}\n")
    return {}


def _no_network(checkout: Checkout) -> dict[str, str]:
    # Port 9 of this machine: nobody listens there, so the connection is refused at once.
    return {
        "PIP_NO_INDEX": "0",
        "PIP_FIND_LINKS": "",
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_RETRIES": "1",
    }


def _package_gone(checkout: Checkout) -> dict[str, str]:
    return {"PIP_FIND_LINKS": ""}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_wrong_hash, "a downloaded package does not have the locked hash"),
        (_no_hash, "a package has no hash in {root}/requirements.txt"),
        (_no_network, "no connection to the package index"),
        (_package_gone, "the package index has no wheel of a locked package for this Python"),
    ],
)
def test_pip_fails(
    fresh: Checkout, fault: Callable[[Checkout], dict[str, str]], reason: str
) -> None:
    log = fresh.venv / "make.log"
    reason = reason.format(root=fresh.root)
    assert fresh.run("zebra", **fault(fresh)) == (
        3,
        "",
        f"{fresh.making}error: cannot install the Python packages: {reason}; log: {log}\n",
    )
    assert "invoke" in log.read_text()
    assert not (fresh.venv / "complete").exists()

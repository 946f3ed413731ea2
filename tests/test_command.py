"""toolchain.command.run: every way a command can end, and that nothing of it is left.

Every process started here writes its id to a file, so "nothing left" is checked by id.
Limit: time limits are provoked with commands that never end, so no test depends on speed; the
bounds on waiting only keep a broken run() from hanging the suite.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolchain import command
from toolchain.command import Cancelled, CommandFailed, Completed, run
from toolchain.errors import EnvironmentUnfit, UsageError

BOUND_S = 30.0
FOREVER = "while :; do sleep 1; done"
# A shell whose child ignores TERM, in the same group; both leave their ids.
STUBBORN = f"""
sh -c 'trap "" TERM; echo $$ >grandchild.part; mv grandchild.part grandchild; {FOREVER}' &
echo $$ >child.part; mv child.part child
{FOREVER}
"""


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _ids(directory: Path) -> list[int]:
    names = ("child", "grandchild")
    assert _wait_for(lambda: all((directory / name).exists() for name in names))
    return [int((directory / name).read_text()) for name in names]


def _own_children() -> set[int]:
    """Children of this process, zombies included."""
    found: set[int] = set()
    for tasks in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended now
            found.update(int(pid) for pid in (tasks / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    before = _own_children()
    yield
    assert _own_children() <= before, "run() left a process or a zombie behind"


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE_S", 0.3)


def _failure(script: str, **options: object) -> CommandFailed:
    with pytest.raises(CommandFailed) as caught:
        run(["sh", "-c", script], what="trying", **options)  # type: ignore[arg-type]
    return caught.value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def test_output_and_input_are_passed() -> None:
    done = run(["cat"], what="copying", input_text="grüße\n" * 100_000)
    assert done.stdout == "grüße\n" * 100_000
    assert (done.argv, done.returncode) == (("cat",), 0)
    assert done.seconds > 0


def test_without_input_standard_input_is_empty() -> None:
    assert run(["cat"], what="copying").stdout == ""


def test_exit_code_is_told_with_the_last_lines_of_stderr() -> None:
    error = _failure("echo to-stdout; seq 40 >&2; exit 7")
    assert _first_line(error) == "trying: sh ended with exit code 7"
    assert [line for line in str(error).splitlines() if line.startswith("  | ")] == [
        f"  | {n}" for n in range(26, 41)
    ]
    assert error.exit_code == 3
    assert error.completed.returncode == 7
    assert error.completed.stdout == "to-stdout\n"


def test_check_false_returns_the_exit_code() -> None:
    argv = ("sh", "-c", "echo out; exit 7")
    done = run(argv, what="trying", check=False)
    assert done == Completed(argv, 7, done.seconds, "out\n")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -SEGV $$", "sh was killed by signal 11 (SIGSEGV)"),
        ("kill -KILL $$", "sh was killed by signal 9 (SIGKILL), by hand or because memory ran out"),
        ("sh -c 'kill -ABRT $$'; exit $?", "exit code 134: what it ran was killed by signal 6"),
        ("no-such-program-here", "exit code 127: a program it calls was not found"),
        ("echo x >file; ./file", "exit code 126: a program it calls cannot be executed"),
        ("echo 'cc: No space left on device' >&2; exit 1", "the disk is full"),
    ],
)
def test_the_reason_is_explained(script: str, said: str, tmp_path: Path) -> None:
    assert said in _first_line(_failure(script, cwd=tmp_path))


def test_signal_without_check_is_a_negative_return_code() -> None:
    assert run(["sh", "-c", "kill -TERM $$"], what="trying", check=False).returncode == -15


@pytest.mark.parametrize("check", [True, False])
def test_missing_program_is_named_even_unchecked(check: bool) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(["no-such-program"], what="trying", check=check, env={"PATH": "/nowhere"})
    assert _first_line(caught.value) == (
        "trying: program not found: no-such-program (not in PATH=/nowhere); "
        "install the package that holds bin/no-such-program"
    )
    assert caught.value.completed.returncode == 127


def test_missing_host_program_names_its_package() -> None:
    with pytest.raises(CommandFailed, match="install the package util-linux"):
        run(["unshare"], what="trying", env={"PATH": "/nowhere"})


def test_missing_directory_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"working directory .*/gone does not exist"):
        run(["true"], what="trying", cwd=tmp_path / "gone")


def test_missing_interpreter_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(CommandFailed, match="the interpreter it names in its head does not exist"):
        run([script], what="trying")


def test_program_for_another_machine_is_explained(tmp_path: Path) -> None:
    program = tmp_path / "program"
    # An ELF header for a machine number nobody has.
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xff\x7f" + bytes(44))
    program.chmod(0o755)
    with pytest.raises(CommandFailed, match="not a program for this machine") as caught:
        run([program], what="trying")
    assert caught.value.completed.returncode == 126


def test_log_holds_command_and_both_streams_and_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "step.log"
    error = _failure("echo out; echo err >&2; exit 1", log=log, cwd=tmp_path)
    assert log.read_text().splitlines()[1:] == ["out", "err"]
    assert _first_line(error) == f"trying: sh ended with exit code 1; log: {log}"
    assert str(error).splitlines()[2:] == ["  | out", "  | err"]
    assert error.log == log
    assert run(["echo", "new"], what="again", log=log).stdout == ""
    assert log.read_text().splitlines()[1:] == ["new"], "the log is replaced"


def test_last_lines_cannot_disturb_the_terminal(tmp_path: Path) -> None:
    error = _failure(r"printf 'one\r\n 10%%\r 90%%\n\033[2J\033[31mred\007\n\n' >&2; exit 1")
    assert str(error).splitlines()[2:] == ["  | one", "  |  90%", "  | red"]


def test_unwritable_log_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnfit) as caught:
        run(["true"], what="trying", log=tmp_path / "file" / "step.log")
    assert str(caught.value).startswith(f"cannot write the log {tmp_path}/file/step.log: ")


def test_full_disk_under_the_log_is_explained() -> None:
    with pytest.raises(EnvironmentUnfit, match="cannot write the log /dev/full: No space left"):
        run(["true"], what="trying", log=Path("/dev/full"))


def test_too_small_disk_for_the_input_is_explained() -> None:
    script = (
        "import resource, signal; from toolchain.command import run\n"
        "from toolchain.errors import EnvironmentUnfit\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "before = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))\n"
        "try: run(['cat'], what='x', input_text='y' * 100)\n"
        "except EnvironmentUnfit as error:\n"
        "  resource.setrlimit(resource.RLIMIT_FSIZE, before); print(error)\n"
    )
    done = run([sys.executable, "-c", script], what="a small disk", cwd=Path(__file__).parents[1])
    assert done.stdout == (
        "cannot write a temporary file: File too large; free some space or set TMPDIR\n"
    )


def test_shown_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANANAOS_GONE", "1")
    directory = tmp_path / "with space & 'quote'"
    directory.mkdir()
    probe = "import json, os, sys; print(json.dumps([os.getcwd(), sys.argv, dict(os.environ)]))"
    argv = [sys.executable, "-c", probe, "a b", "$HOME", "it's"]
    changed = {**os.environ, "BANANAOS_NEW": "x y"}
    del changed["BANANAOS_GONE"]
    for env in (dict(os.environ), changed, {"ONLY": "this one"}):
        log = tmp_path / "step.log"
        run(argv, what="probing", cwd=directory, env=env, log=log)
        first, _, output = log.read_text().partition("\n")
        pasted = subprocess.run(
            ["sh", "-c", first.removeprefix("$ ")],
            env=dict(os.environ),  # without what readline put into the C environment only
            capture_output=True,
            text=True,
            check=True,
        )
        # The shell between adds these; everything else is the same.
        assert _without_shell_variables(pasted.stdout) == _without_shell_variables(output)


def _without_shell_variables(output: str) -> tuple[str, list[str], set[tuple[str, str]]]:
    directory, argv, environment = json.loads(output)
    added = ("PWD", "OLDPWD", "_", "LC_CTYPE")
    return directory, argv, {(k, v) for k, v in environment.items() if k not in added}


def test_every_command_is_appended_to_the_command_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANANAOS_COMMAND_LOG", str(tmp_path / "commands"))
    run(["echo", "a b"], what="one", cwd=tmp_path)
    run(["false"], what="two", check=False, cwd=tmp_path)
    here = shlex.quote(str(tmp_path))
    assert (tmp_path / "commands").read_text() == (
        f"(cd {here} && echo 'a b')\n(cd {here} && false)\n"
    )
    monkeypatch.setenv("BANANAOS_COMMAND_LOG", str(tmp_path))
    with pytest.raises(EnvironmentUnfit, match="BANANAOS_COMMAND_LOG: cannot append to"):
        run(["true"], what="three")


@pytest.mark.usefixtures("short_grace")
def test_timeout_stops_a_grandchild_that_ignores_term(tmp_path: Path) -> None:
    # One second is no speed limit: the script never ends, and _ids waits for its files.
    error = _failure(f"{STUBBORN}", cwd=tmp_path, timeout_s=1.0, check=False)
    assert _first_line(error) == (
        "trying: sh did not end within its time limit of 1 s and was stopped; "
        "on a slow machine set BANANAOS_TIMEOUT_SCALE=2 to double every limit"
    )
    assert error.timed_out
    assert not any(_runs(pid) for pid in _ids(tmp_path))


def test_timeout_scale_multiplies_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANANAOS_TIMEOUT_SCALE", "0.5")
    assert "time limit of 0.1 s" in str(_failure(FOREVER, timeout_s=0.2))
    for wrong in ("0", "-1", "nan", "inf", "two"):
        monkeypatch.setenv("BANANAOS_TIMEOUT_SCALE", wrong)
        with pytest.raises(UsageError, match=f"got '{wrong}', expected a positive number"):
            run(["true"], what="trying", timeout_s=1)


def test_a_command_that_obeys_term_may_end_in_order(tmp_path: Path) -> None:
    script = f"trap 'echo in order >ended; exit 0' TERM; echo >started; {FOREVER}"
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, ["sh", "-c", script], what="serving", cwd=tmp_path, cancel=cancel)
        assert _wait_for((tmp_path / "started").exists)
        cancel.set()
        with pytest.raises(Cancelled, match="serving: cancelled after"):
            future.result(BOUND_S)
    assert (tmp_path / "ended").read_text() == "in order\n"


@pytest.mark.usefixtures("short_grace")
def test_cancel_from_another_thread_leaves_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, ["sh", "-c", STUBBORN], what="x", cwd=tmp_path, cancel=cancel)
        ids = _ids(tmp_path)
        assert all(_runs(pid) for pid in ids)
        cancel.set()
        with pytest.raises(Cancelled):
            future.result(BOUND_S)
    assert not any(_runs(pid) for pid in ids)


def test_cancelled_before_the_start_starts_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled, match="touching: cancelled before it started"):
        run(["touch", tmp_path / "file"], what="touching", cancel=cancel)
    assert not (tmp_path / "file").exists()


def test_what_a_command_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    script = f"(echo $BASHPID; {FOREVER}) & echo $! >background; exit 0"
    run(["sh", "-c", script], what="leaving", cwd=tmp_path)
    assert not _runs(int((tmp_path / "background").read_text()))


def test_a_killed_group_is_gone_though_its_leader_ends_before_the_others(tmp_path: Path) -> None:
    """Half a GiB to give back makes the other process's end take long enough to be seen."""
    large = "import pathlib, time; held = b'x' * (512 << 20); pathlib.Path('held').touch(); "
    words = [sys.executable, "-c", large + "time.sleep(3600)"]
    script = f"{shlex.join(words)} & echo $! >member; wait"
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, start_new_session=True) as leader:
        assert _wait_for((tmp_path / "held").exists)
        member = int((tmp_path / "member").read_text())
        assert _runs(member)
        command.kill_group(leader.pid)
        assert not _runs(member) and not _runs(leader.pid)
    assert leader.returncode == -signal.SIGKILL
    command.kill_group(leader.pid)  # nobody's by now


def _start_python(directory: Path) -> "subprocess.Popen[str]":
    program = (
        "from pathlib import Path; from toolchain import command\n"
        f"command.GRACE_S = 0.3\n"
        f"command.run(['sh', '-c', {STUBBORN!r}], what='x', cwd=Path({str(directory)!r}))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_this_program_is_stopped(sent: signal.Signals, tmp_path: Path) -> None:
    with _start_python(tmp_path) as python:
        ids = _ids(tmp_path)
        python.send_signal(sent)
        _, stderr = python.communicate(timeout=BOUND_S)
    # After TERM and KILL only the guard is left to clean up, so this is not immediate.
    left = [] if _wait_for(lambda: not any(map(_runs, ids))) else [p for p in ids if _runs(p)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert ("KeyboardInterrupt" in stderr) == (sent == signal.SIGINT)
    assert python.returncode == -sent


def test_many_threads_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda n: run(["echo", str(n)], what="x").stdout, range(64))
        assert list(results) == [f"{n}\n" for n in range(64)]

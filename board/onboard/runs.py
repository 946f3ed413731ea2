"""The agent on the board: started so that it outlives the connection, watched, stopped, collected.

    DIRECTORY/runs/<token>/supervisor   pid and start time of what watches the agent
    DIRECTORY/runs/<token>/in/          the files of the run, given as text
    DIRECTORY/runs/<token>/out/         what the agent writes
    DIRECTORY/runs/<token>/agent.log    what it says
    DIRECTORY/runs/<token>/before.json  what a policy may change, as it was
    DIRECTORY/runs/<token>/exit         its exit code, once it has ended; negative for a signal

Promise: the agent and all it starts are one session; when the agent ends, or is stopped, nothing of
the session is left (and with its loader a scheduler is gone), the target's cgroup is thawed and
gone, the profiler is unloaded, and base slice and cgroup controllers are as they were.
Limit: as root.  A supervisor that was killed as well leaves no exit file, and `status` says so.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from board.agent.system import BASE_SLICE, text
from board.onboard.refused import Refused, why

GRACE_S = 75.0
"""Between TERM and KILL: the agent stops llama-server, which may take a minute."""
CGROUP = Path("/sys/fs/cgroup/bananaos-target")
CONTROLLERS = Path("/sys/fs/cgroup/cgroup.subtree_control")
PROFILER = "vstate_profiler"


def start(
    directory: str, token: str, argv: Sequence[str], files: Mapping[str, str], cwd: str
) -> dict[str, int]:
    """Start `argv` (in the directory `cwd`) detached from this connection.

    `{in}` and `{out}` in argv stand for the run's folders; files: name -> text, put into `in`.
    """
    root = Path(directory)
    if busy := going(root):
        raise Refused(f"run {busy[0]} is going on already; ./inv unflash ends it")
    run = root / "runs" / token
    for name in ("in", "out", "tmp"):
        (run / name).mkdir(parents=True)
    for name, content in files.items():
        (run / "in" / name).write_text(content)
    before = {"base_slice": text(BASE_SLICE), "controllers": text(CONTROLLERS)}
    (run / "before.json").write_text(json.dumps(before))
    words = [word.replace("{in}", f"{run}/in").replace("{out}", f"{run}/out") for word in argv]
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:  # whose child is nobody's, so that nobody has to wait for it
        if os.fork() == 0:
            _become_supervisor(run, words, cwd, writing)
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading) as stream:
        said = stream.read()
    if not said.isdecimal():
        raise Refused(f"the agent could not be started: {said or 'no reason given'}")
    return {"pid": int(said)}


def _become_supervisor(run: Path, argv: Sequence[str], cwd: str, writing: int) -> None:
    """Leave the connection's session, start the agent, wait for it; never returns."""
    try:
        os.setsid()
        (run / "supervisor").write_text(f"{os.getpid()} {start_time(os.getpid())}\n")
        nothing = os.open(os.devnull, os.O_RDWR)
        log = os.open(run / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(nothing, 0)
        try:
            settings = {"TMPDIR": str(run / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
            agent = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**os.environ, **settings, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"},
                stdin=nothing,
                stdout=log,
                stderr=log,
            )
        except OSError as error:
            os.write(writing, f"{argv[0]}: {error.strerror}".encode())
            os._exit(1)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.write(writing, str(agent.pid).encode())
        os.close(writing)
        code = agent.wait()
        _clean(run, os.getpid())
        temporary = run / ".exit.new"
        temporary.write_text(f"{code}\n")
        temporary.replace(run / "exit")
    except BaseException as error:
        print(f"supervisor: {error!r}", file=sys.stderr, flush=True)
    os._exit(0)


def status(directory: str, token: str, log_offset: int, temperatures: str) -> dict[str, Any]:
    """What the run is doing: going, exit code, new lines of its log, and the board's state."""
    from board.onboard.hello import hottest_c
    from board.onboard.lock import boot_id

    run = Path(directory) / "runs" / token
    alive = _alive(run)  # before the exit file is looked for: it is written last
    code = text(run / "exit")
    log = b""
    with contextlib.suppress(OSError), (run / "agent.log").open("rb") as stream:
        stream.seek(log_offset)
        log = stream.read(65536)
    return {
        "known": run.is_dir(),
        "going": code is None and alive,
        "exit_code": None if code is None else int(code),
        "log": log.decode(errors="replace"),
        "log_bytes": len(log),  # a character that is cut in two decodes to more
        "boot_id": boot_id(),
        "free_bytes": shutil.disk_usage(directory).free if Path(directory).is_dir() else 0,
        "temperature_c": hottest_c(temperatures),
    }


def stop(directory: str, token: str) -> dict[str, bool]:
    """Stop the run's agent in order, then whatever is left of its session."""
    run = Path(directory) / "runs" / token
    sid = _supervisor(run)
    if sid is None:
        _release(run)
        return {"stopped": False}
    # The agent alone: it stops the server and its instruments in order.
    for pid in _session(sid):
        if (fields := _stat(pid)) and int(fields[1]) == sid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
    deadline_s = time.monotonic() + GRACE_S
    while _alive(run) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    _clean(run, sid, supervisor_too=True)
    return {"stopped": True}


def stop_all(directory: str) -> list[str]:
    """Stop every run that is going on; returns their tokens."""
    stopped = going(Path(directory))
    for token in stopped:
        stop(directory, token)
    if not stopped:
        _release(None)
    return stopped


def going(root: Path) -> list[str]:
    """The tokens of the runs whose supervisor lives."""
    return [run.name for run in sorted((root / "runs").glob("*")) if _alive(run)]


def collect(directory: str, token: str, uid: int) -> dict[str, Any]:
    """Put what the run left into one archive that the login user can fetch; size and sha256."""
    import tarfile  # the first thing of a connection is never this

    from board.onboard import store

    run = Path(directory) / "runs" / token
    archive = run / "results.tar"
    try:
        with tarfile.open(archive, "w") as tar:
            for name in ("out", "agent.log"):
                if (run / name).exists():
                    tar.add(run / name, arcname=name)
    except OSError as error:
        archive.unlink(missing_ok=True)
        raise Refused(f"{archive}: {why(error)}") from error
    os.chown(archive, uid, -1)
    return {"size_bytes": archive.stat().st_size, "sha256": store.sha256_of(archive)}


def discard(directory: str, token: str) -> dict[str, bool]:
    """Remove what the run left on the board."""
    run = Path(directory) / "runs" / token
    if _alive(run):
        raise Refused(f"run {token} is going on")
    shutil.rmtree(run, ignore_errors=True)
    return {"removed": not run.exists()}


# -- the session


def _clean(run: Path, sid: int, *, supervisor_too: bool = False) -> None:
    """Kill what is left of the session and undo what only a killed agent leaves undone."""
    _freeze(False)  # a frozen process does not die
    spared = None if supervisor_too else sid
    deadline_s = time.monotonic() + 10
    while (left := [pid for pid in _session(sid) if pid != spared]) and (
        time.monotonic() < deadline_s
    ):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _release(run)


def _release(run: Path | None) -> None:
    """Undo what a run does to the system, whether or not its agent came to that."""
    _freeze(False)
    with contextlib.suppress(OSError):
        CGROUP.rmdir()
    if run is not None:
        _put_back(run)
    if Path("/sys/module", PROFILER).exists():
        subprocess.run(["rmmod", PROFILER], capture_output=True, check=False)


def _put_back(run: Path) -> None:
    try:
        before = json.loads((run / "before.json").read_text())
    except (OSError, ValueError):
        return
    with contextlib.suppress(OSError):
        if before["base_slice"] not in (None, text(BASE_SLICE)):
            BASE_SLICE.write_text(before["base_slice"])
    added = set((text(CONTROLLERS) or "").split()) - set((before["controllers"] or "").split())
    for controller in sorted(added & {"cpuset"}):  # what is not ours may be needed by others
        with contextlib.suppress(OSError):
            CONTROLLERS.write_text(f"-{controller}")


def _freeze(frozen: bool) -> None:
    with contextlib.suppress(OSError):
        (CGROUP / "cgroup.freeze").write_text(str(int(frozen)))


def _session(sid: int) -> list[int]:
    """The processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdecimal() else None
        if fields and int(fields[3]) == sid and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def _supervisor(run: Path) -> int | None:
    try:
        pid, started = (run / "supervisor").read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def _alive(run: Path) -> bool:
    return _supervisor(run) is not None


def start_time(pid: int) -> str | None:
    """Clock ticks since boot: with the pid it names a process for good."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state first."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None

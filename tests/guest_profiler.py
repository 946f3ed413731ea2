"""Runs in the guest, as root: what vstate_profiler promises, and each fault it must refuse.

Writes /results/profiler-faults.json: for each case the exit code and the message of load.py, or
what the case found; tests/test_profiler.py judges.  Standard library only.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAYLOAD = Path("/payload")
sys.path.insert(0, str(PAYLOAD))
from kernel.vstate_profiler import load  # noqa: E402 (the path is made above)

MODULE, SITES = PAYLOAD / "vstate_profiler.ko", PAYLOAD / "sites.json"
KPROBES = Path("/sys/kernel/debug/kprobes")
FREEZER = Path("/sys/fs/cgroup/target")
found: dict[str, Any] = {}


def attempt(action: Callable[[], None]) -> dict[str, Any]:
    """Run one verb; return its exit code and message."""
    try:
        action()
    except load.Refused as exc:
        return {"code": exc.code, "message": str(exc)}
    return {"code": 0, "message": ""}


def load_with(change: Callable[[list[dict[str, Any]]], None]) -> dict[str, Any]:
    """Try to load with a changed site list; unload if it was taken."""
    document = json.loads(SITES.read_text())
    change(document["sites"])
    path = Path("/tmp/sites.json")
    path.write_text(json.dumps(document))
    outcome = attempt(lambda: load.load(MODULE, path, 0))
    load.unload()
    return outcome


def load_module_with(old: bytes, new: bytes) -> dict[str, Any]:
    """Try to load a module in whose file `old` is replaced."""
    data = MODULE.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path = Path("/tmp/other.ko")
    path.write_bytes(data.replace(old, new))
    return attempt(lambda: load.load(path, SITES, 0))


def each_save_renamed(sites: list[dict[str, Any]]) -> None:
    for number, site in enumerate(site for site in sites if site["kind"] == "save"):
        site["anchor"] = f"no_such_function_{number}"


def one_of_two_left_out(sites: list[dict[str, Any]]) -> None:
    sites.remove([site for site in sites if site["symbol"] == "__schedule"][1])


def no_saves(sites: list[dict[str, Any]]) -> None:
    sites[:] = [site for site in sites if site["kind"] == "restore"]


def first_save(sites: list[dict[str, Any]]) -> dict[str, Any]:
    return next(site for site in sites if site["symbol"] == "__schedule")


def shifted(sites: list[dict[str, Any]]) -> None:
    first_save(sites)["vsetvli_offset_bytes"] += 4


def in_an_instruction(sites: list[dict[str, Any]]) -> None:
    site = first_save(sites)
    site["first_offset_bytes"] = site["vsetvli_offset_bytes"] + 2


def end_before_first(sites: list[dict[str, Any]]) -> None:
    site = first_save(sites)
    site["end_offset_bytes"] = site["first_offset_bytes"]


def refusals() -> None:
    found["every save missing"] = load_with(each_save_renamed)
    found["one of two missing"] = load_with(one_of_two_left_out)
    found["no saves"] = load_with(no_saves)
    found["wrong site"] = load_with(shifted)
    found["in an instruction"] = load_with(in_an_instruction)
    found["end before first"] = load_with(end_before_first)
    build_id = load.running_build_id()
    found["other build-id"] = load_module_with(build_id.encode(), b"0" * 40)
    release = os.uname().release.encode()
    found["other vermagic"] = load_module_with(b"vermagic=" + release, b"vermagic=7" + release[1:])
    found["no module"] = attempt(lambda: load.load(PAYLOAD / "pingpong", SITES, 0))
    (KPROBES / "enabled").write_text("0")
    found["kprobes disabled at load"] = attempt(lambda: load.load(MODULE, SITES, 0))
    (KPROBES / "enabled").write_text("1")
    found["not loaded"] = attempt(lambda: load.control("start"))
    found["left after refusals"] = [KPROBES.joinpath("list").read_text(), load.MODULE.exists()]


def freeze(wanted: str) -> None:
    """Freeze or thaw the target and wait until all its threads are."""
    (FREEZER / "cgroup.freeze").write_text(wanted)
    while f"frozen {wanted}" not in (FREEZER / "cgroup.events").read_text():
        time.sleep(0.001)


def pingpong(rounds: int) -> subprocess.Popen[str]:
    """Start the workload in its cgroup; it waits for a line before it begins."""
    FREEZER.mkdir(exist_ok=True)
    target = subprocess.Popen(
        [PAYLOAD / "pingpong", str(rounds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    (FREEZER / "cgroup.procs").write_text(str(target.pid))
    assert target.stdout and target.stdout.readline().strip() == str(target.pid)
    return target


def tell(target: subprocess.Popen[str]) -> None:
    assert target.stdin
    target.stdin.write("\n")


def count_saves(rounds: int) -> None:
    """The windows nest: profiler around truth, the target frozen at all four edges."""
    target = pingpong(rounds)
    freeze("1")
    load.control("start", target.pid)
    found["started twice"] = attempt(lambda: load.control("start"))
    found["reset while active"] = attempt(lambda: load.control("reset"))
    # A number for truth: the profiler's own code, which is outside the kernel's image.
    name, size, _, _, _, start = Path("/proc/modules").read_text().split()[:6]
    assert name == load.NAME
    end = f"{int(start, 16) + int(size):x}"
    subprocess.run([PAYLOAD / "mark", "range", "7", start, end], check=True)
    subprocess.run([PAYLOAD / "mark", "open", str(target.pid)], check=True)
    freeze("0")
    tell(target)
    assert target.stdout and target.stdout.readline() == "done\n"
    freeze("1")
    subprocess.run([PAYLOAD / "mark", "close"], check=True)
    load.control("stop")
    freeze("0")
    found["stopped twice"] = attempt(lambda: load.control("stop"))
    load.read(Path("/results/profiler.json"))
    found["stats"] = (load.DEBUGFS / "stats").read_text()
    tell(target)
    assert target.wait() == 0


def read_problems() -> list[str]:
    path = Path("/tmp/profiler.json")
    load.read(path)
    problems: list[str] = json.loads(path.read_text())["problems"]
    return problems


def faults_while_loaded() -> None:
    found["loaded twice"] = attempt(lambda: load.load(MODULE, SITES, 0))
    found["target unknown"] = attempt(lambda: load.control("start", 4194303))

    load.control("reset")
    target = pingpong(1)
    load.control("start", target.pid)
    tell(target)
    tell(target)
    assert target.wait() == 0
    load.control("stop")
    found["target exits"] = read_problems()

    load.control("reset")
    load.control("start", 0)
    found["window open"] = read_problems()
    (KPROBES / "enabled").write_text("0")
    load.control("stop")
    found["disabled in the window"] = read_problems()
    found["disabled at start"] = attempt(lambda: load.control("start", 0))
    (KPROBES / "enabled").write_text("1")
    found["enabled again"] = attempt(lambda: load.control("start", 0))
    load.control("stop")
    load.control("reset")
    found["after reset"] = read_problems()

    full = Path("/tmp/full")
    full.mkdir()
    subprocess.run(
        ["busybox", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", full.as_posix()], check=True
    )
    full.joinpath("profiler.json").write_text("old")
    found["folder full"] = attempt(lambda: load.read(full / "profiler.json"))
    found["folder full, left"] = sorted(p.name for p in full.iterdir())
    subprocess.run(["busybox", "mount", "-o", "remount,ro", full.as_posix()], check=True)
    found["folder read-only"] = attempt(lambda: load.read(full / "profiler.json"))
    found["folder read-only, left"] = full.joinpath("profiler.json").read_text()


def main() -> None:
    refusals()
    load.load(MODULE, SITES, 0)
    count_saves(200)
    faults_while_loaded()
    load.unload()
    load.unload()
    found["left at the end"] = [KPROBES.joinpath("list").read_text(), load.MODULE.exists()]


if __name__ == "__main__":
    try:
        main()
    finally:
        Path("/results/profiler-faults.json").write_text(json.dumps(found, indent=1) + "\n")

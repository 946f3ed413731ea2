"""Instruments going wrong in an agent's run: one guest, one run of the real agent per fault.

Each row of CASES breaks one thing while the window is open, or before.  Whatever it is, it is
named, the server has ended, and no module and no BPF program stays loaded.  What the record makes
of the files is checked, too.  The emulator has one window per boot, so its faults are elsewhere
(test_truth.py, test_instruments_disagree.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_agent_faults import CRASH, cell
from test_agent_faults import Case as AgentCase

import schemas
from board.agreement import agreement
from board.execute import _instruments
from board.models import model
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from board.virtual.tools import Tools
from toolchain.recipe import build

pytestmark = pytest.mark.boot

# Few harts: nothing is timed here, and each one that is off costs the host time.
MACHINE = default_machine({"memory_mib": 512, "parked_harts": 0, "harts": 2})
DEADLINE_S = 3600.0
ASKED = ("observer", "profiler")
UNFIT, INVALID = 3, 4


@dataclass(frozen=True)
class Case:
    """What is broken, and what must be said of it.

    before: shell text run before the agent.  broken: run in the open window.  after: run after the
    agent.  server: what the agent is given.  code: the agent's exit code; agent: invalid reasons in
    agent.json.  record: what the record adds to them.  says: on the console.  left: files of
    instruments that are there.  modules: how many profilers are loaded in the end.
    """

    code: int
    agent: tuple[str, ...] = ()
    record: tuple[str, ...] = ()
    before: str = ""
    broken: str = ""
    after: str = ""
    server: str = "/payload/llama-server"
    says: str = ""
    left: tuple[str, ...] = ASKED
    modules: int = 0


CASES = {
    "fine": Case(0),
    "observer-killed": Case(
        INVALID,
        ("observer-failed",),
        broken="busybox killall -KILL vstate_observer",
        says="observer: ended with -9",
        left=("profiler",),
    ),
    "disarmed": Case(
        INVALID,
        ("kernel-warning",),  # the module says itself which probes
        record=("profiler-problem",),
        broken="echo 0 >/sys/kernel/debug/kprobes/enabled",
        after="echo 1 >/sys/kernel/debug/kprobes/enabled",
    ),
    "server-dies": Case(
        INVALID,
        ("server-died",),
        record=("observer-target-exited", "profiler-problem"),
        before=CRASH.replace("/results/crash/", "/results/server-dies/"),
        server="/tmp/crashing",
    ),
    "loaded-before": Case(
        INVALID,
        ("profiler-failed",),
        before="python3 load.py load --module vstate_profiler.ko --sites sites.json",
        says="profiler: vstate_profiler is loaded already",
        left=("observer",),
        modules=1,  # somebody else's is left alone
    ),
    "second-observer": Case(
        INVALID,
        ("observer-failed",),
        before="python3 load.py unload\n"
        "./vstate_observer --pid 1 --out /tmp/other.json >/tmp/other & other=$!\n"
        "until grep -q ready /tmp/other; do busybox usleep 10000; done",
        after="busybox kill $other; wait $other",
        says="another vstate_observer is running",
        left=("profiler",),
    ),
    "full": Case(
        UNFIT,
        before="busybox mount -t tmpfs -o size=128k tmpfs /results/full",
        broken="busybox dd if=/dev/zero of=/results/full/fill bs=4k 2>/dev/null",
        after="rm -f /results/full/fill",
        says="/results/full/loadgen.json: cannot write: No space left on device",
        left=(),
    ),
    "read-only": Case(
        UNFIT,
        # Not a remount, which the server's open log would forbid.
        broken="busybox mount -t tmpfs -o ro tmpfs /results/read-only",
        after="busybox umount /results/read-only",
        says="/results/read-only/loadgen.json: cannot write: Read-only file system",
        left=(),
    ),
}

ONE = """
echo '=== {name}'
mkdir /results/{name}
{before}
(until grep -qs '^active 1' /sys/kernel/debug/vstate_profiler/stats; do busybox usleep 1000; done
{broken}) & breaking=$!
python3 -m board.agent --cell /payload/cell.json --server {server} --model /payload/model.gguf \\
	--tools tools.json --out /results/{name}
code=$?
busybox kill $breaking 2>/dev/null
{after}
echo $code >/results/{name}/code
ps >/results/{name}/ps
grep -c vstate_profiler /proc/modules >/results/{name}/modules
./workload programs >/results/{name}/programs
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("instruments")
    told = directory / "cell.json"
    told.write_text(json.dumps(cell(AgentCase([], [], max_tokens=2))))
    lines = ["#!/bin/sh", "cd /payload && busybox tar -x -f agent.tar || exit 1"]
    for name, case in CASES.items():
        fields = {key: getattr(case, key) for key in ("before", "broken", "after", "server")}
        fields["broken"] = fields["broken"] or ":"
        lines.append(ONE.format(name=name, **fields))
    boot(
        MACHINE,
        seed=1,
        payload={
            **Tools.of(ASKED, directory).payload,
            "agent.tar": build("board/agent") / "agent.tar",
            "llama-server": build("llama.cpp/server-riscv64") / "llama-server",
            "model.gguf": model("banana-tiny"),
            "workload": build("kernel/observer-workload") / "workload",
            "cell.json": told,
        },
        script="\n".join([*lines, "echo '=== end'", "exit 0", ""]),
        directory=directory,
        deadline_s=DEADLINE_S,
    )
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_an_instrument_is_named_and_leaves_nothing(name: str, guest: Path) -> None:
    case, directory = CASES[name], guest / name
    said = (guest / "console.log").read_text().split(f"=== {name}\n")[1].split("===")[0]
    assert case.says in said.replace("\r", "")
    assert "Traceback" not in said
    assert (directory / "code").read_text() == f"{case.code}\n"
    assert "llama-server" not in (directory / "ps").read_text(), "the server is gone"
    assert (directory / "modules").read_text() == f"{case.modules}\n"
    assert (directory / "programs").read_text() == "0\n"
    assert tuple(n for n in ASKED if (directory / f"{n}.json").exists()) == case.left
    if case.code == UNFIT:
        assert not (directory / "agent.json").exists()
        return
    reasons = list(schemas.read(directory / "agent.json", "agent")["invalid_reasons"])
    assert tuple(reasons) == case.agent
    details: list[str] = []
    counted = _instruments(ASKED, directory, reasons, details)
    assert tuple(dict.fromkeys(reasons)) == case.agent + case.record, details
    if name == "fine":
        agreed = agreement(**counted)
        assert agreed is not None and agreed["agrees"], agreed
        assert agreed["saves"]["observer"] > 0

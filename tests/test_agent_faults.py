"""Server or policy going wrong on the virtual board: one guest, one agent run per fault.

Each row of CASES is a run of the real agent against the real server with one thing broken; the
guest is booted once, since booting costs more than a fault.  It keeps to the one hart it booted on:
seven polling harts would make every start of Python eight times as long.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import schemas
from board.cell import Definitions, server_flags
from board.models import model
from board.phase_tokens import phase_tokens
from board.policies import Policies
from board.virtual.boot import boot
from board.virtual.machine import Machine, default_machine
from toolchain.recipe import build

pytestmark = pytest.mark.boot

# No parked harts: nothing is timed here, and each halted hart costs the host time (machine.toml).
MACHINE = default_machine({"memory_mib": 512, "parked_harts": 0})
LOAD = {"mode": "closed", "requests": 2, "warmup_requests": 0, "prompt_words": 12}


@dataclass(frozen=True)
class Case:
    """What is broken, and what must be said of it.

    before: shell text run in the guest before the agent.  server, model: what the agent is given.
    agent, load: invalid reasons that agent.json and loadgen.json must have (None: no such file).
    says: what the guest's console must show between this case's marks.  policy, scope: the cell's.
    scheduler: the document's invalid reasons (None: no such file).
    """

    agent: list[str]
    load: list[str] | None
    before: str = ""
    server: str = "/payload/llama-server"
    model: str = "/payload/model.gguf"
    max_tokens: int = 4
    says: str = ""
    policy: str = "baseline"
    scope: str | None = None
    scheduler: list[str] | None = None


# The first completion is the probe's, the second one is in the window.
CRASH = """cat >/tmp/crashing <<'END'
#!/bin/sh
(until [ "$(grep -c 'launch_slot_' /results/crash/server.log)" -ge 2 ]; do :; done; kill -SEGV $$) &
exec /payload/llama-server "$@"
END
chmod +x /tmp/crashing"""
WARN = """insmod /payload/lkdtm.ko
(until grep -q 'launch_slot_' /results/kernel-warning/server.log 2>/dev/null; do :; done
echo WARNING >/sys/kernel/debug/provoke-crash/DIRECT) &"""


def in_window(name: str, commands: str) -> str:
    """Commands for the middle of the window: its first request has begun, there is a second."""
    log = f"/results/{name}/server.log"
    return f"""(until [ "$(grep -cs 'launch_slot_' {log})" -ge 2 ] 2>/dev/null; do
	busybox usleep 1000  # a fair thread that spins would starve a server in partial scope
done
{commands}) &"""


SLICE = "/sys/kernel/debug/sched/base_slice_ns"
# One hart is up here, so that a thread can be pinned to it and to no other.
CASES = {
    "fine": Case(agent=[], load=[]),
    "crash": Case(
        ["server-died"],
        ["failed_requests", "server_changed"],
        before=CRASH,
        server="/tmp/crashing",
    ),
    # llama.cpp gives no slot less than 256 tokens.
    "out-of-context": Case([], ["context_too_small"], max_tokens=250, says="load invalid"),
    "truncated-model": Case(
        ["server-died"],
        None,
        before="busybox dd if=/payload/model.gguf of=/tmp/cut.gguf bs=1024 count=512 2>/dev/null",
        model="/tmp/cut.gguf",
        says="tensor",
    ),
    "not-gguf": Case(
        ["server-died"],
        None,
        before="echo this is no model >/tmp/text.gguf",
        model="/tmp/text.gguf",
        says="magic",
    ),
    "kernel-warning": Case(["kernel-warning"], [], before=WARN),
    "cooperative": Case([], [], policy="cooperative", scope="partial", scheduler=[]),
    "killed": Case(
        ["scheduler-ended", "scheduler-failed", "scheduler-not-active", "thread-not-in-class"],
        [],
        before=in_window("killed", "busybox killall -KILL scx_vstate"),
        policy="vhot",
        scope="all",
        says="scheduler-failed: ended with -9",
    ),
    "ejected": Case(
        ["scheduler-ended", "scheduler-not-active", "thread-not-in-class"],
        [],
        before=in_window("ejected", "echo S >/proc/sysrq-trigger"),
        policy="long-slice",
        scope="partial",
        scheduler=["scheduler-ejected"],
    ),
    "no-hint-map": Case(
        ["scheduler-failed", "scheduler-not-active", "thread-not-in-class"],
        [],
        before="busybox mount -t tmpfs none /sys/fs/bpf",
        policy="cooperative",
        scope="all",
        says="scheduler-failed: ended with 3 before it was loaded: scx_vstate: /sys/fs/bpf: no BPF",
    ),
    "somebody-else-s": Case(
        ["scheduler-active", "scheduler-changed", "scheduler-left"],
        [],
        before=f"""busybox umount /sys/fs/bpf
busybox sleep 1000 & other=$!
/payload/scx_vstate --policy vhot --pid $other --out /tmp/x --hold >/tmp/said &
until grep -q loaded /tmp/said; do busybox sleep 0.05; done
{in_window("somebody-else-s", "busybox killall -USR1 scx_vstate")}""",
    ),
    "other-slice": Case(
        ["base-slice-not-set"],
        [],
        before=f"""busybox killall scx_vstate
kill $other
wait
{in_window("other-slice", f"echo 3000000 >{SLICE}")}""",
        policy="baseline-long",
    ),
    "long-slice-of-the-kernel": Case([], [], policy="baseline-long"),
    "one-hart-for-eight": Case(["affinity-not-set"], [], policy="affinity"),
    "pinned": Case(
        ["affinity-not-set"],
        [],
        before=in_window("pinned", "busybox taskset -p 1 $(busybox pidof llama-server)"),
    ),
}


def cell(case: Case) -> dict[str, Any]:
    definitions = Definitions.read()
    flags = definitions.policies.flags(case.policy, definitions.flags)
    shape = {"threads": 1, "threads_batch": 1, "poll": 50, "ctx_per_slot": 64}
    return {
        "machine": MACHINE.as_cell(),
        "concurrency": 2,
        "load": {**LOAD, "max_tokens": case.max_tokens, "prompt": None, "seed": 1},
        "server": {"flags": server_flags(flags, shape, 2)},
        "scheduling": definitions.policies.scheduling(case.policy, case.scope, None),
        "bystanders": 0,
    }


def guest_script() -> str:
    lines = ["#!/bin/sh", "cd /payload && busybox tar -x -f agent.tar || exit 1"]
    for name, case in CASES.items():
        lines += [
            f"echo '=== {name}'",
            f"mkdir /results/{name}",
            case.before,
            f"python3 -m board.agent --cell /payload/{name}.json --server {case.server} "
            f"--model {case.model} --tools /payload/tools.json --out /results/{name}",
            f"echo $? >/results/{name}/code",
            f"cat /sys/kernel/sched_ext/state {SLICE} >/results/{name}/left",
            f"ps >/results/{name}/ps",
        ]
    return "\n".join([*lines, "echo '=== end'", "exit 0", ""])


def boot_all(directory: Path, machine: Machine = MACHINE) -> None:
    payload = {
        "agent.tar": build("board/agent") / "agent.tar",
        "llama-server": build("llama.cpp/server-riscv64") / "llama-server",
        "lkdtm.ko": build("kernel/image") / "lkdtm.ko",
        "model.gguf": model("banana-tiny"),
        "scx_vstate": build("sched_ext/scx-vstate") / "scx_vstate",
        "tools.json": directory / "tools.json",
    }
    directory.mkdir(parents=True, exist_ok=True)
    payload["tools.json"].write_text(json.dumps({"scheduler": "/payload/scx_vstate"}))
    for name, case in CASES.items():
        payload[f"{name}.json"] = directory / f"{name}.json"
        payload[f"{name}.json"].write_text(json.dumps(cell(case)))
    boot(
        machine,
        seed=1,
        payload=payload,
        script=guest_script(),
        directory=directory,
        deadline_s=3600,
    )


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    boot_all(directory)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_fault_is_named(name: str, guest: Path) -> None:
    case, directory = CASES[name], guest / name
    report: Mapping[str, Any] = schemas.read(directory / "agent.json", "agent")
    assert report["invalid_reasons"] == case.agent
    load = directory / "loadgen.json"
    if case.load is None:
        assert not load.exists()
    else:
        assert schemas.read(load, "loadgen")["invalid_reasons"] == case.load
    document = directory / "scheduler.json"
    if case.scheduler is None:
        assert not document.exists()
    else:
        assert schemas.read(document, "scheduler")["invalid_reasons"] == case.scheduler
    expected_code = 4 if case.agent or case.load else 0
    assert (directory / "code").read_text() == f"{expected_code}\n"
    said = (guest / "console.log").read_text().split(f"=== {name}\n")[1].split("===")[0]
    assert case.says in said.replace("\r", "")
    assert "Traceback" not in said
    assert "llama-server" not in (directory / "ps").read_text(), "the server is gone"


@pytest.mark.parametrize("name", CASES)
def test_the_machine_is_back_on_its_default_scheduler(name: str, guest: Path) -> None:
    left = (guest / name / "left").read_text()
    state = "enabled" if name == "somebody-else-s" else "disabled"
    assert left == (guest / "fine" / "left").read_text().replace("disabled", state)


def test_the_server_s_hints_add_up_to_its_own_counts(guest: Path) -> None:
    directory = guest / "cooperative"
    agent, load, scheduler = (
        schemas.read(directory / f"{name}.json", name) for name in ("agent", "loadgen", "scheduler")
    )
    which = {"scheduling": Policies.read().scheduling("cooperative", "partial", None)}
    told = phase_tokens(which, agent, load, scheduler)
    assert told is not None
    assert told["agrees"], told["differences"]
    assert told["prefill"]["counted"] > 24
    assert told["decode"]["counted"] == 6  # of 4 tokens each of 2 requests, and 1 of the probe
    assert scheduler["counters"]["hint_accepted"] > 0
    assert scheduler["counters"]["prefill_runtime_ns"] > 0


def test_the_class_of_each_thread_is_seen(guest: Path) -> None:
    for name, inside in (("cooperative", True), ("fine", False)):
        server = schemas.read(guest / name / "agent.json", "agent")["platform"]["server"]
        rows = server["threads_before"] + server["threads_after"]
        assert {row["in_sched_ext"] for row in rows} == {inside}
        assert {row["policy"] for row in rows} == {7 if inside else 0}

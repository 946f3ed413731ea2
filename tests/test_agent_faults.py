"""llama-server going wrong on the virtual board: one guest, one agent run per fault.

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
    says: what the guest's console must show between this case's marks.
    """

    agent: list[str]
    load: list[str] | None
    before: str = ""
    server: str = "/payload/llama-server"
    model: str = "/payload/model.gguf"
    max_tokens: int = 4
    says: str = ""


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
}


def cell(max_tokens: int) -> dict[str, Any]:
    shape = {"threads": 1, "threads_batch": 1, "poll": 50, "ctx_per_slot": 64}
    return {
        "machine": MACHINE.as_cell(),
        "concurrency": 2,
        "load": {**LOAD, "max_tokens": max_tokens, "prompt": None, "seed": 1},
        "server": {"flags": server_flags(Definitions.read().flags, shape, 2)},
    }


def guest_script() -> str:
    lines = ["#!/bin/sh", "cd /payload && busybox tar -x -f agent.tar || exit 1"]
    for name, case in CASES.items():
        lines += [
            f"echo '=== {name}'",
            f"mkdir /results/{name}",
            case.before,
            f"python3 -m board.agent --cell /payload/{name}.json --server {case.server} "
            f"--model {case.model} --out /results/{name}",
            f"echo $? >/results/{name}/code",
            f"ps >/results/{name}/ps",
        ]
    return "\n".join([*lines, "echo '=== end'", "exit 0", ""])


def boot_all(directory: Path, machine: Machine = MACHINE) -> None:
    payload = {
        "agent.tar": build("board/agent") / "agent.tar",
        "llama-server": build("llama.cpp/server-riscv64") / "llama-server",
        "lkdtm.ko": build("kernel/image") / "lkdtm.ko",
        "model.gguf": model("banana-tiny"),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        payload[f"{name}.json"] = directory / f"{name}.json"
        payload[f"{name}.json"].write_text(json.dumps(cell(case.max_tokens)))
    boot(
        machine,
        seed=1,
        payload=payload,
        script=guest_script(),
        directory=directory,
        deadline_s=900,
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
    expected_code = 4 if case.agent or case.load else 0
    assert (directory / "code").read_text() == f"{expected_code}\n"
    said = (guest / "console.log").read_text().split(f"=== {name}\n")[1].split("===")[0]
    assert case.says in said.replace("\r", "")
    assert "Traceback" not in said
    assert "llama-server" not in (directory / "ps").read_text(), "the server is gone"

"""This x86-64 machine as a board: one cell in one container, or in namespaces of the pinned tree.

Promise: what a cell runs is exactly what its `inputs` name; server, load generator and probes are
confined alike by every engine, and what they were confined to is in the run's environment.
Limit: a real machine, shared with whatever else runs on it: its times are its own, and no two runs
are the same.  A memory limit that strikes is named only where the engine's is one of the whole.
"""

import functools
import json
import os
import platform
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import schemas
from board.agent import system
from board.base import AGENT_INVALID, RunFailed, for_agent, tail
from board.models import model as model_file
from board.times import cpu_seconds
from board.x86.job import Engine, Job, TimedOut, container, files
from board.x86.layout import layout
from toolchain.cache import key_of
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.fetch import sha256_file
from toolchain.paths import REPO
from toolchain.rootfs import rootfs, tree_key

ENGINES = ("docker", "podman", "none")
SWITCHES = "switches"
CONDITIONS = REPO / "artifact" / "published" / "conditions.toml"
SECTION = "3.7"

# The agent's byte code is for the tree's Python; nothing can be written but /tmp and /results.
SCRIPT = """
mkdir /tmp/agent && busybox tar -x -f /payload/agent.tar -C /tmp/agent && cd /tmp/agent || exit 1
python3 -m board.agent --cell /payload/cell.json --server /payload/llama-server \\
	--model /payload/model.gguf --tools /payload/tools.json --out /results
code=$?
times >/results/times
exit $code
"""


def cpus() -> list[int]:
    """The CPUs that this process may use, and that its containers get."""
    return sorted(os.sched_getaffinity(0))


class ContainerBoard:
    """See board.base.Board; `models` adds models by name that board/models.py does not know."""

    platform = "container-x86"
    parallel = False
    jobs = 1
    instruments: Sequence[str] = (SWITCHES,)

    def __init__(self, engine: Engine, models: Mapping[str, Path] | None = None) -> None:
        self.name = f"x86-{engine.name}"
        self.engine = engine
        self.most_threads: int | None = len(cpus())
        self._models = dict(models or {})

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        """None: a real machine is what it is."""
        return None

    def prepare(self, model: str, tools: Sequence[str]) -> dict[str, str]:
        """Build or fetch all a run needs, the image included.

        Raises EnvironmentUnfit for a processor that cannot run the server, or an engine that cannot
        be used; UsageError for an instrument of another board.
        """
        require_processor()
        if unknown := [name for name in tools if name != SWITCHES]:
            raise UsageError(
                f"{unknown[0]}: not on board {self.name}, which has {SWITCHES}: pass --instruments "
                f"none or --instruments {SWITCHES}, and no policy with a scheduler"
            )
        self.engine.prepare()
        inside = files()
        inputs = {
            "llama_server": sha256_file(inside["/payload/llama-server"]),
            "agent": sha256_file(inside["/payload/agent.tar"]),
            "model": sha256_file(self._model(model)),
            "tree": tree_key(container()["tree"]),
        }
        if tools:
            names = ("switch_observer.py", "switch_observer.bpf.c")
            inputs[SWITCHES] = key_of([sha256_file(inside[f"/payload/{name}"]) for name in names])
            rootfs("headers")
        return inputs

    def begin(self) -> None:
        """Nothing: prepare() has asked the engine."""

    def _model(self, name: str) -> Path:
        return self._models[name] if name in self._models else model_file(name)

    def calibration(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """None: nothing is emulated."""
        return None

    def run(
        self,
        cell: Mapping[str, Any],
        directory: Path,
        *,
        deadline_s: float,
        cancel: threading.Event,
    ) -> dict[str, Any]:
        """Run the cell; see board.base.Board.run."""
        observes = SWITCHES in cell["instruments"]
        with tempfile.TemporaryDirectory(prefix="bananaos-x86-") as scratch:
            # An engine's user need not be the one who may look into a temporary folder.
            Path(scratch).chmod(0o755)
            inputs = {
                "/payload/cell.json": _written(Path(scratch) / "cell.json", for_agent(cell)),
                "/payload/tools.json": _written(
                    Path(scratch) / "tools.json", _instruments(observes)
                ),
                "/payload/model.gguf": self._model(cell["model"]),
            }
            if observes:
                inputs["/payload/headers"] = rootfs("headers")
            job = Job(
                argv=["sh", "-c", SCRIPT],
                results=directory,
                cpus=cpus(),
                memory_mib=container()["limits"]["memory_mib"],
                inputs=inputs,
                capabilities=self.engine.observer_capabilities() if observes else (),
            )
            facts = {"container": self._facts(job, cell)}
            try:
                ended = self.engine.run(
                    job, log=directory / "console.log", deadline_s=deadline_s, cancel=cancel
                )
            except TimedOut as error:
                raise RunFailed(
                    "container-timeout", f"{error}\n{_tail(directory)}", facts
                ) from error
        if ended.out_of_memory:
            limit = f"more than {job.memory_mib} MiB were wanted; the kernel killed a process"
            raise RunFailed("container-oom", f"{limit}\n{_tail(directory)}", facts)
        if ended.exit_code not in (0, AGENT_INVALID):
            detail = f"exit code {ended.exit_code}\n{_tail(directory)}"
            raise RunFailed("agent-failed", detail, facts)
        times = directory / "times"
        cpu_s = cpu_seconds(times.read_text())
        times.unlink()
        return {"host_cpu_s": cpu_s, "host_wall_s": ended.seconds, **facts}

    def probe(self, argv: Sequence[str], directory: Path, cancel: threading.Event) -> None:
        """Run one of the probes of /payload in the container; its files go to `directory`.

        Raises EnvironmentUnfit when it fails, with the last lines of its output.
        """
        job = Job(
            argv=argv,
            results=directory,
            cpus=cpus(),
            memory_mib=container()["limits"]["memory_mib"],
        )
        log = directory / "console.log"
        try:
            ended = self.engine.run(job, log=log, deadline_s=300, cancel=cancel)
        except TimedOut as error:
            raise EnvironmentUnfit(f"{argv[0]}: {error}") from error
        if ended.exit_code != 0:
            raise EnvironmentUnfit(
                f"{argv[0]} ended with exit code {ended.exit_code}\n{_tail(directory)}"
            )
        log.unlink()

    def _facts(self, job: Job, cell: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self.engine.facts(),
            "cpus": list(job.cpus),
            "memory_mib": job.memory_mib,
            "network": "loopback",
            "read_only_root": True,
            "capabilities": [f"CAP_{name}" for name in job.capabilities],
            "deviations": deviations(cell, len(job.cpus)),
        }


def container_board(name: str) -> ContainerBoard:
    """The board x86-ENGINE of boards.toml."""
    return ContainerBoard(engine(name.removeprefix("x86-")))


def engine(name: str) -> Engine:
    """The engine called `name`; raises UsageError.  Nothing is looked for yet."""
    # Imported late: the SDK takes its time, and the engine "none" needs none.
    if name == "none":
        from board.x86.namespaces import Namespaces

        return Namespaces()
    if name in ENGINES:
        from board.x86.engine import ContainerEngine

        return ContainerEngine(name)
    raise UsageError(f"--engine {name}: expected one of {', '.join(ENGINES)}")


def require_processor() -> None:
    """Raise EnvironmentUnfit unless llama-server for x86-64-v3 runs on this machine."""
    if platform.machine() != "x86_64":
        raise EnvironmentUnfit(
            f"this machine is {platform.machine()}: the x86 comparison needs x86-64"
        )
    if missing := system.missing_extensions(system.isa()):
        raise EnvironmentUnfit(
            f"this processor lacks {', '.join(missing)} (/proc/cpuinfo): llama-server is built for "
            "x86-64-v3 (AVX2, FMA; Haswell, Zen and later); use another machine"
        )


def require_model(path: Path) -> Path:
    """Return the GGUF file; raises UsageError (no such file) and InvalidData (not one)."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise UsageError(f"--model {path}: cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise InvalidData(f"--model {path}: begins with {magic!r}, expected b'GGUF': no GGUF file")
    return path.absolute()


def deviations(cell: Mapping[str, Any], count: int) -> list[dict[str, str]]:
    """Where a cell is not what section 3.7 ran, as the environment's `deviations`."""
    flags = cell["server"]["flags"]
    threads = int(flags[flags.index("--threads") + 1])
    found = [("model", "Llama-3.2-1B-Instruct or Qwen2.5-0.5B-Instruct, Q4_K_M", cell["model"],
              "the report's models are not on the package index, and it names two")]  # fmt: skip
    if threads != int(wanted := _stated("threads")):
        why = "more threads than CPUs would measure ggml's spinning at its barrier"
        found.append(("threads", wanted, str(threads), f"{count} CPUs: {why}"))
    context = int(flags[flags.index("--ctx-size") + 1])
    if context != int(wanted := _stated("context")):
        why = f"{wanted} leave {int(wanted) // 8} for each of eight, too few for prompt and answer"
        found.append(("context tokens of all slots", wanted, str(context), why))
    if not cell["load"].get("one_prompt"):
        why = "a prompt served from the cache has no prefill to switch in"
        found.append(("prompts", "one for all requests", "all different, no cache", why))
    return [dict(zip(("what", "report", "here", "why"), row, strict=True)) for row in found]


@functools.cache
def _stated(parameter: str) -> str:
    """What the section prints as the value of one of its conditions."""
    parameters = schemas.read_toml(CONDITIONS, "published-conditions")["parameters"]
    [stated] = (one["stated"] for one in parameters if one["id"] == parameter)
    [value] = (one["value"] for one in stated if one["section"] == SECTION)
    return str(value)


def _instruments(observes: bool) -> dict[str, Any]:
    """What the agent is told: to stop the server at the window's edges, and what counts."""
    tools: dict[str, Any] = {"stop": True}
    if observes:
        argv = ["python3", "/payload/switch_observer.py", "--headers", "/payload/headers"]
        if (found := layout()) is not None:
            argv += ["--layout", json.dumps(found)]
        tools[SWITCHES] = argv
    return tools


def _written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return path


def _tail(directory: Path) -> str:
    return tail(directory / "console.log", "no output")

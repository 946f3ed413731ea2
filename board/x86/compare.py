"""./inv x86-compare: the matrix of section 3.7 on this machine, then the comparison.

Promise: what can be refused is refused before anything is built; cells that have a valid run are
not run again; when it ends, or is interrupted, no container and no server is left.
Limit: one cell at a time: two at once would take each other's CPUs.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.x86 import show
from board import runner
from board.cell import Definitions
from board.x86 import probes
from board.x86.board import (
    ENGINES,
    SWITCHES,
    ContainerBoard,
    engine,
    require_model,
    require_processor,
)
from board.x86.job import Engine
from toolchain.errors import EnvironmentUnfit, UsageError
from toolchain.say import say

EXPERIMENTS = ("X86", "X86-report")
LARGEST_SEEDS = 100


def compare(
    *,
    engine_name: str = "",
    seeds: int | None = None,
    model: str = "",
    bpf: bool = False,
    virtual: bool = True,
    results: Path,
    known: Definitions | None = None,
) -> int:
    """Run what is missing, measure what is missing, print the comparison; return the exit code.

    engine_name: docker, podman or none; "" takes the first that can be used.  seeds: runs of each
    cell (default: artifact/experiments.toml's).  model: a name, or a GGUF file.  bpf: count
    switches by BPF, too.  virtual: also the virtual board's instructions per switch.
    """
    require_processor()
    definitions, models = _definitions(known or Definitions.read(), seeds, model, bpf)
    board = ContainerBoard(_engine(engine_name), models)
    code = runner.reproduce(
        list(EXPERIMENTS), board, results, jobs=1, full=True, definitions=definitions
    )
    if code != 0:
        return code
    probes.measure(board, results)
    if virtual:
        probes.measure_virtual(results)
    show([results], board.name)
    return 0


def _engine(name: str) -> Engine:
    """The engine asked for, or the first that can be used."""
    if name:
        one = engine(name)
        one.check()
        return one
    for each in ENGINES:
        one = engine(each)
        try:
            one.check()
        except EnvironmentUnfit as error:
            say(f"{error}")
            continue
        say(f"engine: {each} (--engine names another)")
        return one
    raise EnvironmentUnfit("no engine can be used here, and no namespaces either: see above")


def _definitions(
    known: Definitions, seeds: int | None, model: str, bpf: bool
) -> tuple[Definitions, Mapping[str, Path]]:
    """The experiments with what the command line says, and the models that are files."""
    if seeds is not None and not 1 <= seeds <= LARGEST_SEEDS:
        raise UsageError(f"--seeds {seeds}: expected an integer from 1 to {LARGEST_SEEDS}")
    models: dict[str, Path] = {}
    if model and model not in known.models:
        path = Path(model)
        if "/" not in model and path.suffix != ".gguf":
            raise UsageError(
                f"--model {model}: no such model; known: {', '.join(known.models)}; or the path of "
                "a GGUF file"
            )
        models[_name(path)] = require_model(path)
    changed: dict[str, Any] = {}
    if seeds is not None:
        changed["seeds"] = list(range(1, seeds + 1))
    if model:
        changed["model"] = next(iter(models), model)
    if bpf:
        changed["instruments"] = [SWITCHES]
    experiments = dict(known.experiments["experiments"])
    for name in EXPERIMENTS:
        parts = [{**part, **changed} for part in experiments[name]["parts"]]
        experiments[name] = {**experiments[name], "parts": parts}
    return (
        replace(
            known,
            experiments={**known.experiments, "experiments": experiments},
            models=(*known.models, *models),
        ),
        models,
    )


def _name(path: Path) -> str:
    """A model's name, as a cell may have it, from its file's."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    return kept.lower().lstrip("._-") or "model"

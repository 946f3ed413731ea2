"""From experiments and options to cells.

Promise: a cell is complete (every default that matters is written into it) and checked; whatever a
person typed is refused with one line before anything is built.
Limit: what goes into a cell's `machine` and `inputs` is the board's word.
"""

import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from board.base import Board
from schemas.record import cell_hash
from toolchain.errors import EnvironmentUnfit, InvalidData, UsageError
from toolchain.paths import REPO

EXPERIMENTS = REPO / "artifact" / "experiments.toml"
SERVER = REPO / "llama.cpp" / "server.toml"
SHAPES = REPO / "llama.cpp" / "shapes.toml"
REAL_MODEL = "smollm2"
_POLICIES_WITHOUT_SCHEDULER = ("baseline",)


@dataclass(frozen=True)
class Overrides:
    """What the command line of one run says; None where it says nothing.

    Values may be as typed: text is read as a number where a number is wanted.
    """

    policy: str | None = None
    concurrency: int | str | None = None
    seed: int | str | None = None
    model: str | None = None
    vlen: int | str | None = None
    instruments: str | None = None


@dataclass(frozen=True)
class Plan:
    """A cell to run, with what is not part of its identity.

    deadline_s: wall seconds on the host.  cost_cpu_s, cost_disk_mib: expected, for the host.
    """

    cell: Mapping[str, Any]
    experiment: str | None
    deadline_s: float
    cost_cpu_s: float
    cost_disk_mib: float
    expect_text: str | None

    @functools.cached_property
    def hash(self) -> str:
        """The cell's identity, the first part of its runs' ids."""
        return cell_hash(self.cell)

    @property
    def what(self) -> str:
        """The cell in a few words for a person."""
        cell = self.cell
        words = [self.experiment] if self.experiment else []
        words += [cell["model"], cell["policy"], f"c={cell['concurrency']}", f"seed={cell['seed']}"]
        return " ".join(words)


@dataclass(frozen=True)
class Definitions:
    """The files that define cells, read and checked."""

    path: Path
    experiments: Mapping[str, Any]
    flags: Mapping[str, str | bool]
    models: tuple[str, ...]

    @classmethod
    def read(
        cls, experiments: Path = EXPERIMENTS, server: Path = SERVER, shapes: Path = SHAPES
    ) -> "Definitions":
        """Read them; raises InvalidData when one is not as its schema says or refers to nothing."""
        content = schemas.read_toml(experiments, "experiments")
        flags = schemas.read_toml(server, "server")["flags"]
        models = (*tomllib.loads(shapes.read_text(encoding="utf-8"))["shapes"], REAL_MODEL)
        definitions = cls(experiments, content, flags, models)
        definitions._check_references()
        return definitions

    def _check_references(self) -> None:
        places = [("run_defaults", self.experiments["run_defaults"])]
        for name, experiment in self.experiments["experiments"].items():
            places += [
                (f"experiments.{name}.parts[{index}]", part)
                for index, part in enumerate(experiment["parts"])
            ]
        for place, part in places:
            for key, known in (
                ("load", self.experiments["loads"]),
                ("server", self.experiments["servers"]),
                ("model", self.models),
            ):
                if part[key] not in known:
                    raise InvalidData(
                        f"{self.path}: at {place}.{key}: no such {key} {part[key]!r}; "
                        f"known: {', '.join(known)}"
                    )

    def chosen(self, names: Sequence[str], *, full: bool) -> list[str]:
        """The experiments to run: those named, else all but the full-only ones, or all if full.

        Raises UsageError at an unknown name.
        """
        known = self.experiments["experiments"]
        for name in names:
            if name not in known:
                raise UsageError(
                    f"--experiment {name}: no such experiment; known: {', '.join(known)}"
                )
        if names:
            return list(dict.fromkeys(names))
        return [name for name, content in known.items() if full or not content["full_only"]]


def plan_run(definitions: Definitions, overrides: Overrides, board: Board) -> Plan:
    """The plan of one run.

    Raises UsageError (a value is not of the documented form) and EnvironmentUnfit (a policy that
    this version cannot run) before the board prepares anything.
    """
    defaults = definitions.experiments["run_defaults"]
    policy: str = defaults["policy"] if overrides.policy is None else overrides.policy
    chosen = {
        "model": defaults["model"] if overrides.model is None else overrides.model,
        "policy": policy,
        "concurrency": _number("concurrency", overrides.concurrency, defaults["concurrency"]),
        "seed": _number("seed", overrides.seed, defaults["seed"]),
    }
    if chosen["model"] not in definitions.models:
        raise UsageError(
            f"--model {chosen['model']}: no such model; known: {', '.join(definitions.models)}"
        )
    _refuse_policy(policy)
    asked = overrides.instruments
    instruments = defaults["instruments"] if asked is None else _instruments(asked)
    machine_overrides: dict[str, int] = {}
    if overrides.vlen is not None:
        choices = schemas.schema("cell")["$defs"]["vlen_bits"]["enum"]
        vlen = overrides.vlen
        if str(vlen) not in map(str, choices):
            raise UsageError(
                f"--vlen {vlen}: expected one of {', '.join(map(str, choices))} (bits)"
            )
        if board.machine({}) is None:
            raise UsageError(f"--vlen {vlen}: board {board.name} is real: its VLEN is what it is")
        machine_overrides["vlen_bits"] = int(vlen)
    part = {**defaults, **chosen, "instruments": instruments}
    return _plan(definitions, part, chosen, board, machine_overrides, board.prepare, None)


def plan_experiments(definitions: Definitions, names: Sequence[str], board: Board) -> list[Plan]:
    """The plans of the experiments called `names` (see `Definitions.chosen`), in that order.

    Raises like `plan_run`.
    """
    parts = [
        (name, part)
        for name in names
        for part in definitions.experiments["experiments"][name]["parts"]
    ]
    for _, part in parts:
        for policy in part["policies"]:
            _refuse_policy(policy)

    @functools.cache
    def prepare(model: str, instruments: tuple[str, ...]) -> dict[str, str]:
        return board.prepare(model, instruments)

    return [
        _plan(definitions, part, chosen_values, board, overrides, prepare, name)
        for name, part in parts
        for overrides in _machines(part)
        for chosen_values in _combinations(part)
    ]


def _machines(part: Mapping[str, Any]) -> list[dict[str, int]]:
    return [{"vlen_bits": bits} for bits in part["vlens"]] if "vlens" in part else [{}]


def _combinations(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for policy in part["policies"]:
        for concurrency in part["concurrencies"]:
            for seed in part["seeds"]:
                yield {
                    "model": part["model"],
                    "policy": policy,
                    "concurrency": concurrency,
                    "seed": seed,
                }


def _plan(
    definitions: Definitions,
    part: Mapping[str, Any],
    chosen: Mapping[str, Any],
    board: Board,
    machine_overrides: Mapping[str, int],
    prepare: Callable[[str, tuple[str, ...]], dict[str, str]],
    experiment: str | None,
) -> Plan:
    load = definitions.experiments["loads"][part["load"]]
    server = definitions.experiments["servers"][part["server"]]
    cell: dict[str, Any] = {
        "schema_version": "1",
        "board": board.name,
        **chosen,
        "load": {"prompt": None, "prompt_words": None, **load, "seed": chosen["seed"]},
        "server": {"flags": server_flags(definitions.flags, server, chosen["concurrency"])},
        "machine": board.machine(machine_overrides),
        "instruments": list(part["instruments"]),
        "inputs": prepare(chosen["model"], tuple(part["instruments"])),
    }
    schemas.check(cell, "cell")
    return Plan(
        cell=cell,
        experiment=experiment,
        deadline_s=part["deadline_s"],
        cost_cpu_s=part["cost"]["cpu_s"],
        cost_disk_mib=part["cost"]["disk_mib"],
        expect_text=part.get("expect_text"),
    )


def server_flags(
    flags: Mapping[str, str | bool], server: Mapping[str, int], concurrency: int
) -> list[str]:
    values = {
        "threads": server["threads"],
        "threads_batch": server["threads_batch"],
        "poll": server["poll"],
        "concurrency": concurrency,
        "ctx_size": server["ctx_per_slot"] * concurrency,
    }
    words: list[str] = []
    for flag, value in flags.items():
        words.append(flag)
        if isinstance(value, str):
            try:
                words.append(value.format_map(values))
            except (KeyError, ValueError, IndexError):
                raise InvalidData(
                    f"{SERVER}: at $.flags.{flag}: found {value!r}, "
                    f"expected text with no braces but {{{'}, {'.join(values)}}}"
                ) from None
    return words


def _refuse_policy(policy: str) -> None:
    known = schemas.schema("cell")["$defs"]["policy"]["enum"]
    if policy not in known:
        raise UsageError(f"--policy {policy}: no such policy; known: {', '.join(known)}")
    if policy not in _POLICIES_WITHOUT_SCHEDULER:
        raise EnvironmentUnfit(
            f"--policy {policy}: needs the scheduler, which this version does not ship yet; "
            f"it runs: {', '.join(_POLICIES_WITHOUT_SCHEDULER)}"
        )


def _instruments(typed: str) -> list[str]:
    """The instruments of a list with commas, in their usual order; "none" is none."""
    known: list[str] = schemas.schema("cell")["$defs"]["instruments"]["items"]["enum"]
    words = [] if typed == "none" else typed.split(",")
    for word in words:
        if word not in known:
            raise UsageError(f"--instruments {typed}: expected none, or some of {','.join(known)}")
    return [name for name in known if name in words]


def _number(name: str, typed: int | str | None, default: int) -> int:
    if typed is None:
        return default
    limits = schemas.schema("cell")["$defs"][name]
    low, high = limits["minimum"], limits["maximum"]
    text = str(typed)
    # Plain digits only: int() also takes "1_0", " 7" and digits of other scripts, and not 5000 of
    # them.
    if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise UsageError(f"--{name} {typed}: expected an integer from {low} to {high}")
    return int(text)

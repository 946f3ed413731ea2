"""From experiments and options to cells.

Promise: a cell is complete (every default that matters is written into it) and checked; whatever a
person typed is refused with one line before anything is built.
Limit: what goes into a cell's `machine` and `inputs` is the board's word.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from board.base import Board
from board.policies import Policies
from schemas.record import cell_hash
from toolchain.errors import InvalidData, UsageError
from toolchain.paths import REPO

EXPERIMENTS = REPO / "artifact" / "experiments.toml"
SERVER = REPO / "llama.cpp" / "server.toml"
SHAPES = REPO / "llama.cpp" / "shapes.toml"
REAL_MODEL = "smollm2"


@dataclass(frozen=True)
class Overrides:
    """What the command line of one run says; None where it says nothing.

    Values may be as typed: text is read as a number where a number is wanted.
    """

    policy: str | None = None
    scope: str | None = None
    variant: str | None = None
    bystanders: int | str | None = None
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
    order: Mapping[str, int] | None = None
    """Of a board that runs one cell after the other: seed, position (from 1), of (cells)."""

    @functools.cached_property
    def hash(self) -> str:
        """The cell's identity, the first part of its runs' ids."""
        return cell_hash(self.cell)

    @property
    def what(self) -> str:
        """The cell in a few words for a person."""
        cell = self.cell
        words = [self.experiment] if self.experiment else []
        words += [cell["model"], cell["policy"]]
        words += [word for word in (cell["variant"], cell["scope"]) if word]
        words += [f"c={cell['concurrency']}", f"seed={cell['seed']}"]
        if cell["bystanders"]:
            words.append(f"bystanders={cell['bystanders']}")
        return " ".join(words)


@dataclass(frozen=True)
class Definitions:
    """The files that define cells, read and checked."""

    path: Path
    experiments: Mapping[str, Any]
    flags: Mapping[str, str | bool]
    models: tuple[str, ...]
    policies: Policies

    @classmethod
    def read(
        cls, experiments: Path = EXPERIMENTS, server: Path = SERVER, shapes: Path = SHAPES
    ) -> "Definitions":
        """Read them; raises InvalidData when one is not as its schema says or refers to nothing."""
        content = schemas.read_toml(experiments, "experiments")
        flags = schemas.read_toml(server, "server")["flags"]
        models = (*schemas.read_toml(shapes, "shapes")["shapes"], REAL_MODEL)
        definitions = cls(experiments, content, flags, models, Policies.read())
        definitions._check_references()
        return definitions

    def require_model(self, name: str) -> None:
        """Raise UsageError unless there is a model of this name."""
        if name not in self.models:
            raise UsageError(f"--model {name}: no such model; known: {', '.join(self.models)}")

    def _check_references(self) -> None:
        self._check_tuning()
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
            self._check_policies(place, part)

    def _check_tuning(self) -> None:
        """A seed that something was chosen by must not judge it."""
        seeds: dict[bool, set[int]] = {True: set(), False: set()}
        for experiment in self.experiments["experiments"].values():
            for part in experiment["parts"]:
                seeds["tuning" in experiment].update(part["seeds"])
        if both := sorted(seeds[True] & seeds[False]):
            raise InvalidData(
                f"{self.path}: at experiments: seed {both[0]} is both for tuning and for judging; "
                "expected other seeds"
            )

    def _check_policies(self, place: str, part: Mapping[str, Any]) -> None:
        policies: Sequence[str] = part.get("policies", [])
        scoped = [policy for policy in policies if self.policies.has_scope(policy)]
        if policies and bool(scoped) is not ("scopes" in part):
            found, wanted = ("none", "some") if scoped else (part["scopes"], "none")
            raise InvalidData(
                f"{self.path}: at {place}.scopes: found {found}, expected {wanted}: "
                f"{', '.join(scoped) if scoped else 'no policy of the part'} has a scope"
            )
        for variant in part.get("variants", []):
            if not any(variant in self.policies.variants_of(policy) for policy in policies):
                raise InvalidData(
                    f"{self.path}: at {place}.variants: no policy of the part has a variant "
                    f"{variant!r}"
                )

    def chosen(self, names: Sequence[str], *, full: bool, platform: str = "virtual") -> list[str]:
        """The experiments to run: those named, else all but the full-only ones, or all if full.

        Only those of the board's platform; one for tuning is run only when it is named.  Raises
        UsageError at an unknown name, or one of another platform.
        """
        x86 = "container-x86"
        known = {
            name: content
            for name, content in self.experiments["experiments"].items()
            if (content.get("platform") == x86) is (platform == x86)
        }
        for name in names:
            if name not in known:
                other = name in self.experiments["experiments"]
                what = (
                    "not for this board (see ./inv x86-compare)" if other else "no such experiment"
                )
                raise UsageError(f"--experiment {name}: {what}; known: {', '.join(known)}")
        if names:
            return list(dict.fromkeys(names))
        return [
            name
            for name, content in known.items()
            if "tuning" not in content and (full or not content["full_only"])
        ]

    def cells_of(self, part: Mapping[str, Any]) -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
        """The cells of an experiment's part: what each changes of the machine, and its values."""
        return itertools.product(_machines(part), _combinations(part, self.policies))


def plan_run(definitions: Definitions, overrides: Overrides, board: Board) -> Plan:
    """The plan of one run.

    Raises UsageError (a value is not of the documented form) before the board prepares anything.
    """
    defaults = definitions.experiments["run_defaults"]
    policies = definitions.policies
    policy = policies.known(defaults["policy"] if overrides.policy is None else overrides.policy)
    chosen = {
        "model": defaults["model"] if overrides.model is None else overrides.model,
        "policy": policy,
        "scope": policies.scope(policy, overrides.scope, defaults["scope"]),
        "variant": policies.variant(policy, overrides.variant),
        "bystanders": _number("bystanders", overrides.bystanders, defaults["bystanders"]),
        "concurrency": _number("concurrency", overrides.concurrency, defaults["concurrency"]),
        "seed": _number("seed", overrides.seed, defaults["seed"]),
    }
    definitions.require_model(str(chosen["model"]))
    asked = overrides.instruments
    # By default what the board can have; a wish it cannot fulfil is refused by its prepare().
    usual = [name for name in defaults["instruments"] if name in board.instruments]
    instruments = usual if asked is None else _instruments(asked)
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

    @functools.cache
    def prepare(model: str, tools: tuple[str, ...]) -> dict[str, str]:
        return board.prepare(model, tools)

    return [
        _plan(definitions, part, chosen_values, board, overrides, prepare, name)
        for name, part in parts
        for overrides, chosen_values in definitions.cells_of(part)
    ]


def _machines(part: Mapping[str, Any]) -> list[dict[str, int]]:
    other = dict(part.get("machine", {}))
    return [{**other, "vlen_bits": bits} for bits in part["vlens"]] if "vlens" in part else [other]


def _combinations(part: Mapping[str, Any], policies: Policies) -> Iterator[dict[str, Any]]:
    for policy in part["policies"]:
        variants: list[str | None] = [None]
        if "variants" in part:
            variants = [v for v in part["variants"] if v in policies.variants_of(policy)]
        scopes = part["scopes"] if policies.has_scope(policy) else [None]
        factors = (variants, scopes, part["concurrencies"], part["seeds"])
        for variant, scope, concurrency, seed in itertools.product(*factors):
            yield {
                "model": part["model"],
                "policy": policy,
                "scope": scope,
                "variant": variant,
                "bystanders": part.get("bystanders", 0),
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
    server = _capped(definitions.experiments["servers"][part["server"]], board.most_threads)
    policies, policy = definitions.policies, chosen["policy"]
    flags = policies.flags(policy, definitions.flags)
    scheduling = policies.scheduling(policy, chosen["scope"], chosen["variant"])
    instruments = part["instruments"]
    if experiment is not None:
        instruments = [name for name in instruments if name in board.instruments]
    cell: dict[str, Any] = {
        "schema_version": "1",
        "board": board.name,
        **chosen,
        "load": _load(load, chosen["concurrency"], chosen["seed"]),
        "server": {"flags": server_flags(flags, server, chosen["concurrency"])},
        "scheduling": scheduling,
        "machine": board.machine(machine_overrides),
        "instruments": list(instruments),
    }
    cell["inputs"] = prepare(chosen["model"], tuple(tools_of(cell)))
    schemas.check(cell, "cell")
    return Plan(
        cell=cell,
        experiment=experiment,
        deadline_s=part["deadline_s"],
        cost_cpu_s=part["cost"]["cpu_s"],
        cost_disk_mib=part["cost"]["disk_mib"],
        expect_text=part.get("expect_text"),
    )


def tools_of(cell: Mapping[str, Any]) -> list[str]:
    """What a run of the cell needs on the board beside server, model and agent."""
    tools = list(cell["instruments"])
    if cell["scheduling"]["scheduler"]:
        tools.append("scheduler")
    if cell["bystanders"]:
        tools.append("bystander")
    return tools


def _capped(server: Mapping[str, int], most_threads: int | None) -> dict[str, int]:
    """The server's numbers with no more threads than the board can run at once."""
    if most_threads is None:
        return dict(server)
    return {
        **server,
        **{key: min(server[key], most_threads) for key in ("threads", "threads_batch")},
    }


def _load(load: Mapping[str, Any], concurrency: int, seed: int) -> dict[str, Any]:
    """The cell's load: rounds become requests."""
    whole = {"prompt": None, "prompt_words": None, **load, "seed": seed}
    rounds = whole.pop("rounds", None)
    return whole if rounds is None else {**whole, "requests": rounds * concurrency}


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

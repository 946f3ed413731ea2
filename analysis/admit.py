"""Which runs may be analysed together: folders of results in, admitted runs and refusals out.

Promise: what does not fit is refused by name, with one line that says which runs, what was found
and what to do; nothing is repaired, nothing is left out in silence.  Strict (the default) the first
refusal is raised; with skip the runs it names are left out, counted and listed.

The names:
  damaged-record        not readable, not as its schema says, changed after the run, misplaced
  duplicate-run         one run id in two folders
  copied-run            two runs with one beginning and end, or one set of times under two seeds
  swapped-files         a raw file beside the record, or its load, is of another run
  another-commit        made by a commit from which something that decides a run has changed since
  mixed-platforms       runs of one board that were made on different kernels or machines
  changed-definition    runs of one cell, seeds apart, that were asked for different things
  changed-calibration   one machine with two calibrations
  missing-seed          a cell lacks a seed that the experiment's other cells have

Limit: a forger who changes a record, its raw files and its times consistently is not found out.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from analysis.collect import CollectedRun, collected, in_order, read_index, treatment
from schemas.record import RUNS, read_record
from toolchain.errors import InvalidData, UsageError
from toolchain.git import git_output
from toolchain.paths import REPO

EXPERIMENTS = REPO / "artifact" / "experiments.toml"
DECIDES_A_RUN = (
    "artifact/experiments.toml",
    "artifact/policies.toml",
    "board",
    "kernel",
    "llama.cpp",
    "sched_ext",
    # The compilers, the emulator and the sources that all of these are built with.
    "toolchain/debian.lock",
    "toolchain/environment.toml",
    "toolchain/fixups.toml",
    "toolchain/sources.toml",
)
"""Paths of the checkout on which the outcome of a run depends."""

_PLATFORM_FACTS = (
    "kernel_release",
    "kernel_version",
    "architecture",
    "isa",
    "harts",
    "memory_kib",
    "governor",
)
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Refusal:
    """Runs that may not be analysed with the others: a name of this module, one line, run ids."""

    name: str
    line: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Admitted:
    """What is analysed.

    runs: valid and invalid ones, in order.  refused: what was left out.  notes: what a reader
    should know and is no reason to refuse.
    """

    runs: tuple[CollectedRun, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]


def admit(
    folders: Sequence[Path], *, skip_invalid: bool = False, any_commit: bool = False
) -> Admitted:
    """Read the results folders and take what fits together.

    Raises UsageError (no such folder, one that is no results folder, or one named twice) and
    InvalidData (the first refusal, unless `skip_invalid`; always for a damaged index.json).
    """
    _check_folders(folders)
    refused: list[Refusal] = []

    def refuse(found: Iterable[Refusal]) -> None:
        for refusal in found:
            if not skip_invalid:
                raise InvalidData(
                    f"{refusal.name}: {refusal.line} (--skip-invalid analyses the others)"
                )
            refused.append(refusal)

    runs: dict[str, CollectedRun] = {}
    for folder in folders:
        index = read_index(folder)
        for one in _read(folder, index):
            if isinstance(one, Refusal):
                refuse([one])
            elif (run_id := one.row["run_id"]) in runs:
                line = f"run {run_id} is in {folder} and in another folder given with it: name one"
                refuse([Refusal("duplicate-run", line, ())])
            else:
                runs[run_id] = one
    notes = _leave_out_tuning(runs)
    checks: list[Callable[[Sequence[CollectedRun]], Iterator[Refusal]]] = [
        _copied,
        lambda those: _other_commits(those, any_commit, notes),
        _platforms,
        _definitions,
        _calibrations,
        _missing_seeds,
    ]
    for check in checks:
        for refusal in list(check(list(runs.values()))):
            refuse([refusal])
            for run_id in refusal.runs:
                runs.pop(run_id, None)
    admitted = in_order(runs.values())
    notes += _repeats(admitted)
    return Admitted(tuple(admitted), tuple(refused), tuple(notes))


def _leave_out_tuning(runs: dict[str, CollectedRun]) -> list[str]:
    """Take away the runs that something was chosen by; returns what a reader should know of it."""
    experiments = schemas.read_toml(EXPERIMENTS, "experiments")["experiments"]
    tuning = {name for name, content in experiments.items() if "tuning" in content}
    of_it = [key for key, one in runs.items() if set(one.experiments) & tuning]
    for key in of_it:
        del runs[key]
    return [f"{len(of_it)} runs for tuning ({', '.join(sorted(tuning))}) left out"] if of_it else []


def _check_folders(folders: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; expected a results folder of ./inv run")
        if (whole := folder.resolve()) in seen:
            raise UsageError(f"{folder} and {seen[whole]} are one folder: name it once")
        seen[whole] = folder


# --------------------------------------------------------------------- one record at a time


def _read(
    folder: Path, index: Mapping[str, Mapping[str, list[str]]]
) -> Iterator[CollectedRun | Refusal]:
    runs = folder / RUNS
    for directory in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            if not directory.is_dir():
                raise InvalidData(f"{directory}: not a run's folder: move it out of {runs}")
            record = read_record(directory)
            one = collected(record, index)
            schemas.check(one.row, "summary-row")
        except InvalidData as error:
            yield Refusal("damaged-record", str(error), (directory.name,))
            continue
        if strange := _foreign_file(record, directory):
            yield Refusal("swapped-files", f"{directory}: {strange}", (directory.name,))
            continue
        yield one


def _foreign_file(record: Mapping[str, Any], directory: Path) -> str | None:
    """How a valid record and the files beside it are not of one run, or None."""
    if not record["valid"]:
        return None  # what an invalid run left may be anything
    loadgen, cell = record["loadgen"], record["cell"]
    for key, asked in {**cell["load"], "concurrency": cell["concurrency"]}.items():
        if loadgen["config"][key] != asked:
            return (
                f"the load has {key} {loadgen['config'][key]!r}, the cell {asked!r}: "
                "it is of another run: restore the folder from where it was made"
            )
    for name, parts in (
        ("loadgen", {"loadgen": loadgen}),
        ("scheduler", {"scheduler": record["scheduler"]["document"]}),
        ("agent", _agent_parts(record)),
    ):
        path = directory / f"{name}.json"
        if not path.exists():
            continue
        try:
            raw = json.loads(path.read_bytes())
            same = all((raw if key == name else raw[key]) == part for key, part in parts.items())
        except (ValueError, TypeError, KeyError):
            same = False
        if not same:
            return (
                f"{path.name} is not what record.json holds: it is of another run, or changed: "
                "restore the folder from where it was made"
            )
    return None


def _agent_parts(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "platform": record["platform"],
        "scheduler": record["scheduler"]["kernel"],
        "bystanders": record["bystanders"],
    }


# ------------------------------------------------------------------------ runs side by side


def _copied(runs: Sequence[CollectedRun]) -> Iterator[Refusal]:
    """Two attempts cannot begin and end in the same millisecond; two seeds differ in their times.

    On a board where cells run side by side two may begin together, and end together by chance: so
    the host's wall time, to the last digit, must be the same, too.
    """
    by_time: dict[Key, list[CollectedRun]] = defaultdict(list)
    by_times_ms: dict[Key, list[CollectedRun]] = defaultdict(list)
    for one in runs:
        at = one.record["environment"]
        by_time[at["started_at"], at["ended_at"], at["host_wall_s"]].append(one)
        if one.row["valid"] and any(time is not None for time in one.times_ms):
            by_times_ms[one.times_ms].append(one)
    told: set[str] = set()
    for group in by_time.values():
        if len(group) > 1:
            names = _ids(group)
            told |= set(names)
            line = f"{_list(names)} began and ended at the same moment: one run under several names"
            yield Refusal("copied-run", f"{line}: remove the copy", names)
    for group in by_times_ms.values():
        names = _ids(group)
        if len({one.row["seed"] for one in group}) > 1 and not told.issuperset(names):
            line = f"{_list(names)} have other seeds but the same times of every request"
            yield Refusal("copied-run", f"{line}: remove the copy", names)


def _other_commits(
    runs: Sequence[CollectedRun], any_commit: bool, notes: list[str]
) -> Iterator[Refusal]:
    by_commit: dict[str | None, list[CollectedRun]] = defaultdict(list)
    for one in runs:
        by_commit[one.record["environment"]["git_commit"]].append(one)
    unknown = by_commit.pop(None, [])
    if unknown:
        notes.append(f"{len(unknown)} runs do not say by which commit they were made")
    head = git_output(["rev-parse", "HEAD"])
    if head is None:
        if by_commit:
            notes.append("not a Git checkout: the commits of the runs were not compared with it")
        return
    for commit, group in by_commit.items():
        if commit is None or commit == head:
            continue
        known = git_output(["cat-file", "-e", f"{commit}^{{commit}}"]) is not None
        changed = git_output(["diff", "--name-only", commit, head, "--", *DECIDES_A_RUN]) or ""
        if known and not changed:
            continue
        first = changed.split("\n")[0]
        why = (
            f"since then {first} has changed"
            if known
            else "which is not in the history of this checkout"
        )
        line = (
            f"{_list(_ids(group))}: made by commit {commit[:12]}, this is {head[:12]}: {why}: "
            "analyse them with that commit, run them again, or pass --any-commit"
        )
        if any_commit:
            notes.append(f"{len(group)} runs are of another commit, {commit[:12]}: {why}")
        else:
            yield Refusal("another-commit", line, _ids(group))


def _platforms(runs: Sequence[CollectedRun]) -> Iterator[Refusal]:
    def facts(one: CollectedRun) -> dict[str, Any]:
        # The virtual board's memory is in its cell; what Linux calls MemTotal there is less by what
        # the payload, another one for each model, happens to leave of a page.
        known = one.record["cell"]["machine"] is not None
        names = [name for name in _PLATFORM_FACTS if not (known and name == "memory_kib")]
        return {name: one.record["platform"][name] for name in names}

    groups = _grouped(runs, lambda one: (one.row["board"], one.row["vlen_bits"], _inputs(one)))
    yield from _minorities("mixed-platforms", groups, facts, "is")


def _inputs(one: CollectedRun) -> tuple[Any, Any]:
    """On the virtual board the kernel is an input: another kernel is another definition."""
    inputs = one.record["cell"]["inputs"]
    return inputs.get("kernel"), inputs.get("initramfs")


def _definitions(runs: Sequence[CollectedRun]) -> Iterator[Refusal]:
    """Between policies the load and the machine are the same; between seeds all is."""

    def common(one: CollectedRun) -> dict[str, Any]:
        cell = one.record["cell"]
        load = {key: value for key, value in cell["load"].items() if key != "seed"}
        return {
            "load": load,
            "machine": cell["machine"],
            "instruments": cell["instruments"],
            "inputs": cell["inputs"],
        }

    def all_of_it(one: CollectedRun) -> dict[str, Any]:
        cell = one.record["cell"]
        return {**common(one), "server": cell["server"], "scheduling": cell["scheduling"]}

    def block(one: CollectedRun) -> Key:
        row = one.row
        keys = ("experiment", "board", "model", "vlen_bits", "concurrency", "bystanders")
        return tuple(row[key] for key in keys)

    alike = ("load", "machine", "instruments")
    whole = _grouped(runs, lambda one: (*block(one), treatment(one.row)))
    told: set[str] = set()
    for refusal in _minorities("changed-definition", whole, all_of_it, "asks for"):
        told |= set(refusal.runs)
        yield refusal
    rest = _grouped([one for one in runs if one.row["run_id"] not in told], block)
    yield from _minorities(
        "changed-definition", rest, lambda one: {k: common(one)[k] for k in alike}, "asks for"
    )


def _calibrations(runs: Sequence[CollectedRun]) -> Iterator[Refusal]:
    def machine(one: CollectedRun) -> Key:
        return (one.row["board"], schemas.canonical(one.record["cell"]["machine"]), _inputs(one))

    chosen = [one for one in runs if one.record["calibration"] is not None]
    groups = _grouped(chosen, machine)
    yield from _minorities(
        "changed-calibration", groups, lambda one: dict(one.record["calibration"]), "has"
    )


def _missing_seeds(runs: Sequence[CollectedRun]) -> Iterator[Refusal]:
    """Of each experiment, board, model and VLEN; an invalid run is not a missing one."""
    cells: dict[Key, dict[Key, set[int]]] = defaultdict(lambda: defaultdict(set))
    for one in runs:
        row = one.row
        for experiment in one.experiments:
            group = (experiment, row["board"], row["model"], row["vlen_bits"])
            cells[group][treatment(row), row["concurrency"]].add(row["seed"])
    for (experiment, board, model, _), policies in sorted(cells.items(), key=lambda i: i[0][:3]):
        wanted = set().union(*policies.values())
        lacking: dict[Key, list[str]] = defaultdict(list)  # one line for each set of seeds
        for (what, concurrency), seeds in sorted(policies.items()):
            if missing := tuple(sorted(wanted - seeds)):
                lacking[missing].append(f"{what} c={concurrency}")
        for missing, names in lacking.items():
            few = _list(names, what="")
            which = f"cell {few} has"
            if len(names) > 1:
                which = f"{len(names)} of {len(policies)} cells ({few}) have"
            line = (
                f"{experiment} on {board}: {model}: {which} no run of seed "
                f"{', '.join(map(str, missing))}, other cells have: "
                f"./inv reproduce --experiment {experiment} --board {board} runs what is missing"
            )
            yield Refusal("missing-seed", line, ())


def _repeats(runs: Sequence[CollectedRun]) -> list[str]:
    """What repeats of one cell on a deterministic board say of its determinism."""
    groups = _grouped(
        [one for one in runs if one.row["platform"] == "virtual"], lambda one: (one.cell_hash,)
    )
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return []
    differing = [group for group in repeated if len({one.fingerprint for one in group}) > 1]
    line = f"{len(repeated)} cells of the virtual board were run more than once; "
    if not differing:
        return [line + "their records are the same to the last byte; each counts once"]
    names = _list(_ids(differing[0]))
    return [
        line + f"of {len(differing)} the records DIFFER ({names}): "
        "the board was not deterministic there; the first run of each cell counts"
    ]


# ---------------------------------------------------------------------------------- helpers


def _grouped(
    runs: Iterable[CollectedRun], key: Callable[[CollectedRun], Key]
) -> dict[Key, list[CollectedRun]]:
    """The valid runs by key; invalid ones are never compared, so they may be anything."""
    groups: dict[Key, list[CollectedRun]] = defaultdict(list)
    for one in runs:
        if one.row["valid"]:
            groups[key(one)].append(one)
    return groups


def _minorities(
    name: str,
    groups: Mapping[Key, Sequence[CollectedRun]],
    facts: Callable[[CollectedRun], dict[str, Any]],
    verb: str,
) -> Iterator[Refusal]:
    """Per group: the runs whose facts are not those of most (of the first ones, in a tie)."""
    for group in groups.values():
        kinds: dict[bytes, list[CollectedRun]] = defaultdict(list)
        for one in group:
            kinds[schemas.canonical(facts(one))].append(one)
        if len(kinds) < 2:
            continue
        usual, *others = sorted(kinds.values(), key=len, reverse=True)
        for those in others:
            place, found, expected = _difference(facts(those[0]), facts(usual[0]), "$")
            line = (
                f"{_list(_ids(those))} {verb} {place} {_short(found)}, but "
                f"{_list(_ids(usual))} {_short(expected)}: they cannot be one sample: "
                "keep them in folders of their own"
            )
            yield Refusal(name, line, _ids(those))


def _difference(one: Any, other: Any, place: str) -> tuple[str, Any, Any]:
    """Where two documents first differ, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                return _difference(one.get(key), other.get(key), f"{place}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            if left != right:
                return _difference(left, right, f"{place}[{number}]")
    return place, one, other


def _ids(runs: Iterable[CollectedRun]) -> tuple[str, ...]:
    return tuple(sorted(one.row["run_id"] for one in runs))


def _list(names: Sequence[str], what: str = "runs ") -> str:
    shown = ", ".join(names[:3])
    return f"{what}{shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."

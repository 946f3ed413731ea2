"""The verbs of ./inv, each a few lines that call a room; `./inv --list` shows them in groups.

Promise: nothing is decided here.  Limit: see toolchain/cli.py for how failures end.
"""

from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit

from toolchain.cli import task
from toolchain.errors import UsageError
from toolchain.paths import REPO
from toolchain.say import say

RESULTS = "folder for results (default: results)"


@task(
    group="Reproduce",
    help={
        "full": "also the experiments that take hours",
        "experiment": "only this experiment of artifact/experiments.toml; may be repeated",
        "board": "a board of board/boards.toml (default: virtual)",
        "jobs": "cells to run at the same time (default: one per CPU)",
        "results": RESULTS,
        "accept": "make these runs the expected ones (artifact/expected/runs.json)",
        "shard": "K/N: only the K-th of N parts of the cells, for N machines; see ./inv merge",
    },
    iterable=["experiment"],
)
def reproduce(
    _: Context,
    full: bool = False,
    experiment: list[str] | None = None,
    board: str = "virtual",
    jobs: int = 0,
    results: str = "results",
    accept: bool = False,
    shard: str = "1/1",
) -> None:
    """Run the experiments that have no valid run yet; end with a table.  Resumes where it stopped.

    Exit codes: 0 done, 1 an answer or a run is not the expected one, 2 usage, 3 environment unfit,
    4 a cell has no valid run, 130 interrupted.
    """
    from board import runner
    from board.base import get_board
    from board.merge import shard_of

    code = runner.reproduce(
        experiment or [],
        get_board(board),
        Path(results),
        jobs if jobs else None,
        full,
        accept=accept,
        shard=shard_of(shard),
    )
    if code:
        raise Exit(code=code)
    say(f"next: ./inv analyze {results} judges the report's claims by these runs")


@task(
    group="Reproduce",
    help={
        "board": "a board of board/boards.toml (default: virtual)",
        "policy": "baseline, baseline-long, affinity, long-slice, vhot or cooperative",
        "scope": "whom the last three schedule: partial (the server) or all (default)",
        "variant": "of the policy, such as no-hints (artifact/policies.toml)",
        "bystanders": "scalar threads beside the server (default 0)",
        "concurrency": "requests in flight, and slots of the server",
        "seed": "of the machine and of the prompts, an integer from 0",
        "model": "a shape of llama.cpp/shapes.toml, or smollm2",
        "vlen": "VLEN in bits: 128, 256, 512 or 1024 (virtual board only)",
        "instruments": "some of observer,profiler,truth, or none",
        "results": RESULTS,
    },
)
def run(
    _: Context,
    board: str = "virtual",
    policy: str = "",
    scope: str = "",
    variant: str = "",
    bystanders: str = "",
    concurrency: str = "",
    seed: str = "",
    model: str = "",
    vlen: str = "",
    instruments: str = "",
    results: str = "results",
) -> None:
    """Run one cell; the last line of standard output is the run's directory.

    What is not said comes from [run_defaults] of artifact/experiments.toml.  Exit codes: 0 valid
    run, 2 usage, 3 environment unfit, 4 invalid run (kept all the same), 130 interrupted.
    """
    from board import runner
    from board.base import get_board
    from board.cell import Overrides

    overrides = Overrides(
        policy=policy or None,
        scope=scope or None,
        variant=variant or None,
        bystanders=bystanders or None,
        concurrency=concurrency or None,
        seed=seed or None,
        model=model or None,
        vlen=vlen or None,
        instruments=instruments or None,
    )
    runner.run_one(get_board(board), overrides, Path(results))


@task(
    group="Reproduce",
    help={"folder": "a results folder to read; may be repeated", "results": "the folder to fill"},
    iterable=["folder"],
    words="folder",
)
def merge(_: Context, folder: list[str] | None = None, results: str = "results") -> None:
    """Put the runs of several results folders into one: ./inv merge one two --results all.

    Exit codes: 0 done, 1 two runs of a deterministic cell differ, 2 usage, 3 environment unfit,
    4 a record is damaged.
    """
    from board.merge import merge as room

    room([Path(name) for name in folder or []], Path(results))


@task(
    group="Reproduce",
    help={
        "engine": "docker, podman or none (default: the first that can be used)",
        "seeds": "runs of each cell, seeds 1 to N (default: 3)",
        "model": "a shape of llama.cpp/shapes.toml, smollm2, or the path of a GGUF file",
        "bpf": "count context switches with BPF, too; needs root, or the engine's",
        "virtual": "also the virtual board's instructions per switch (builds and boots it)",
        "results": RESULTS,
    },
)
def x86_compare(
    _: Context,
    engine: str = "",
    seeds: int = 0,
    model: str = "",
    bpf: bool = False,
    virtual: bool = True,
    results: str = "results",
) -> None:
    """The load of section 3.7 on this x86-64 machine, in a container; its vector state, measured.

    Resumes where it stopped.  Exit codes: 0 done, 2 usage, 3 environment unfit (no engine, no
    AVX2), 4 a cell has no valid run or the model is no GGUF file, 130 interrupted.
    """
    from board.x86.compare import compare

    code = compare(
        engine_name=engine,
        seeds=seeds or None,
        model=model,
        bpf=bpf,
        virtual=virtual,
        results=Path(results),
    )
    if code:
        raise Exit(code=code)
    say(f"next: ./inv analyze {results} judges the report's claims by these runs")


@task(
    group="Reproduce",
    help={
        "json": "also write the calibration to this file (schemas/calibration.schema.json)",
        "vlen": "VLEN in bits (default: that of board/virtual/machine.toml)",
        "shift": "icount shift: one instruction takes 2^N ns of virtual time",
        "quantum": "round-robin quantum in virtual microseconds",
    },
)
def calibrate(_: Context, json: str = "", vlen: int = 0, shift: int = 0, quantum: int = 0) -> None:
    """Show whether the virtual board is a parallel machine; measured once for each machine.

    Exit codes: 0 it is, 4 it is not (runs on it would be invalid).
    """
    from board.virtual.calibrate import calibration, show
    from board.virtual.machine import default_machine

    asked = {"vlen_bits": vlen, "icount_shift": shift, "quantum_us": quantum}
    machine = default_machine({name: value for name, value in asked.items() if value})
    show(calibration(machine), Path(json) if json else None)


@task(
    group="Check",
    help={
        "json": "also write the result to this file (schemas/audit.schema.json)",
        "tables": "audit the tables of this folder instead (default: artifact/published)",
        "accept": "make the verdicts found the expected ones (artifact/expected/audit.json)",
    },
)
def check_published(_: Context, json: str = "", tables: str = "", accept: bool = False) -> None:
    """Audit the report's printed numbers: do they agree, do they bear what is stated?  No run.

    Exit codes: 0 every verdict is the expected one, 1 one differs, 2 usage, 4 invalid data.
    """
    from analysis.audit.run import check

    check(Path(json) if json else None, Path(tables) if tables else None, accept)


@task(
    group="Check",
    help={
        "results": "a results folder; may be repeated (default: results, if it is there)",
        "json": "also write the verdicts to this file (schemas/verdicts.schema.json)",
        "skip-invalid": "leave out what does not fit, count it, and analyse the rest",
        "any-commit": "take runs of another commit, too; the page says so",
        "report": "folder for page, tables and figures (default: report)",
        "accept": "make the virtual board's verdicts the expected ones",
    },
    iterable=["results"],
    words="results",
)
def analyze(
    _: Context,
    results: list[str] | None = None,
    json: str = "",
    skip_invalid: bool = False,
    any_commit: bool = False,
    report: str = "report",
    accept: bool = False,
) -> None:
    """Judge the claims by the runs: verdicts in three groups, report/index.html.

    Exit codes: 0 done, 1 a verdict is not the expected one, 2 usage, 3 environment unfit,
    4 the runs do not fit together or one is damaged.
    """
    from analysis import analyze as room

    room.analyze(
        [Path(folder) for folder in results or []],
        report=Path(report),
        json_file=Path(json) if json else None,
        skip_invalid=skip_invalid,
        any_commit=any_commit,
        accept=accept,
    )


@task(
    group="Board",
    positional=["action"],
    help={"action": "shell: boot with this terminal as console", "model": "model in /payload"},
)
def board(_: Context, action: str, model: str = "banana-tiny") -> None:
    """Have a look at the virtual board: ./inv board shell."""
    from board.virtual.shell import shell

    if action != "shell":
        raise UsageError(f"board {action!r}: expected shell")
    raise Exit(code=shell(model))


@task(group="Build", help={"artifact": "such as kernel/image (default: all but those on demand)"})
def build(_: Context, artifact: str = "") -> None:
    """Build an artifact (or all) in the pinned tree; prints the folder of each."""
    from toolchain import recipe

    known = recipe.recipes()
    for name in [artifact] if artifact else sorted(n for n in known if not known[n].on_demand):
        print(name, recipe.build(name))


@task(group="Build")
def fetch(_: Context) -> None:
    """Download every locked package, source and model that is not in the cache."""
    from toolchain.rootfs import fetch_tree
    from toolchain.sources import source, sources

    for tree in ("build", "guest"):
        fetch_tree(tree)
    for name in sources():
        source(name)


@task(
    group="Build",
    help={
        "out": "the archive (default: bananaos-artifact-COMMIT.tar.zst)",
        "sign": "private key of ssh-keygen to sign the manifest with",
        "check": "instead: hold this bundle, packed or unpacked, against its manifest",
        "signers": "with --check: allowed-signers file; the signature must be there and be good",
    },
)
def bundle(_: Context, out: str = "", sign: str = "", check: str = "", signers: str = "") -> None:
    """Pack all that a rebuild and a run need, offline; or check such an archive.

    Exit codes: 0 done, 1 a file differs from the manifest, 2 usage, 3 environment unfit, 4 not a
    bundle.
    """
    from artifact import bundle as room

    if check:
        if out or sign:
            raise UsageError("--check goes with --signers only")
        room.check(Path(check), Path(signers) if signers else None)
    elif signers:
        raise UsageError("--signers goes with --check only")
    else:
        room.bundle(Path(out) if out else None, Path(sign) if sign else None)


@task(group="Build")
def relock(_: Context) -> None:
    """Resolve toolchain/packages.toml anew into toolchain/debian.lock (Debian hosts only)."""
    from toolchain.lock import LOCK, read_lock, relock, write_lock
    from toolchain.mirror import find_mirrors

    before = {(p.tree, p.name, p.architecture): p for p in read_lock()} if LOCK.exists() else {}
    packages = relock(find_mirrors()[0])
    write_lock(packages)
    after = {(p.tree, p.name, p.architecture): p for p in packages}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old != new:
            print(*key, old.version if old else "-", "->", new.version if new else "-")


@task(group="Check", help={"out": "the PDF; the Markdown goes beside it"})
def appendix(_: Context, out: str = "report/appendix.pdf") -> None:
    """Typeset the artifact appendix, two pages, from the claims and experiments.

    Exit codes: 0 done, 3 cannot be written, 4 the template or a data file is damaged.
    """
    from artifact.appendix import appendix as room

    room(Path(out))


@task(group="Develop")
def glossary(_: Context) -> None:
    """Make docs/fields.md anew: the fields of the result files, out of the schemas."""
    from artifact.glossary import write

    write()


@task(
    group="Develop",
    help={
        "days": "artifacts that were not used for this many days go",
        "all": "the whole cache goes: everything is fetched and built anew",
    },
)
def clean(_: Context, days: int = 14, all: bool = False) -> None:
    """Give back disk: old artifacts, damaged ones, packages that are locked no more.

    Results and reports are never touched.
    """
    from toolchain.clean import clean as room

    room(days, all)


@task(group="Develop")
def bench(_: Context) -> None:
    """Print what instruments, virtual board and analysis cost (minutes; figures, no tests)."""
    from analysis.bench import bench as analysis_bench
    from board.bench import bench as board_bench
    from kernel.overhead import overhead
    from kernel.plain import plain

    overhead()
    plain()
    analysis_bench()
    board_bench()


@task(
    group="Develop",
    help={
        "all": "also the tests that take long",
        "unit": "only the tests that need no build and no boot",
        "k": "only tests whose name matches (pytest's -k)",
    },
)
def test(_: Context, all: bool = False, unit: bool = False, k: str = "") -> None:
    """Run the tests: unit tests, then those that build and boot.  CI runs this."""
    import os

    import pytest

    os.chdir(REPO)
    marks = "not boot and not long" if unit else "" if all else "not long"
    arguments = ["tests", "--durations=15", "-m", marks, *(["-k", k] if k else [])]
    code = pytest.main(arguments)
    if code:
        raise Exit(code=int(code))

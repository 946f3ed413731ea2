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
REPORT = "folder for page, tables and figures (default: report)"
BOARD = "a board of board/boards.toml, or of the file in BANANAOS_BOARDS"
YES = "agree to what is done as root on a real board, which is listed first"


@task(
    group="Reproduce",
    help={
        "full": "also the experiments that take hours",
        "experiment": "only this experiment of artifact/experiments.toml; may be repeated",
        "board": f"{BOARD} (default: virtual)",
        "yes": YES,
        "jobs": "cells at the same time (0, the default: one per CPU, or thread of a worker)",
        "results": RESULTS,
        "accept": "make these runs the expected ones (artifact/expected/runs.json)",
        "dask": "address of a Dask scheduler whose workers run the cells (docs/scale.md)",
        "report": REPORT,
        "shard": "K/N: only the K-th of N parts of the cells, for N machines; see ./inv merge",
        "policy": "only cells of this policy; may be repeated",
        "scope": "of the policies that have one, only cells with this scope; may be repeated",
        "concurrency": "only cells with this concurrency; may be repeated",
        "seed": "only cells with this seed; may be repeated",
    },
    iterable=["experiment", "policy", "scope", "concurrency", "seed"],
)
def reproduce(
    _: Context,
    full: bool = False,
    experiment: list[str] | None = None,
    board: str = "virtual",
    jobs: int = 0,
    results: str = "results",
    accept: bool = False,
    dask: str = "",
    report: str = "report",
    shard: str = "1/1",
    policy: list[str] | None = None,
    scope: list[str] | None = None,
    concurrency: list[str] | None = None,
    seed: list[str] | None = None,
    yes: bool = False,
) -> None:
    """Run the experiments that have no valid run yet, judge the claims.  Resumes where it stopped.

    A part of an experiment: --experiment E2 --seed 101 --policy baseline --policy vhot.  Ends with
    a table of the runs, then the verdicts by all runs of the results folder that fit together
    (./inv analyze), unless only a shard was run.  Exit codes: 0 done, 1 an answer, a run
    or a verdict is not the expected one, 2 usage, 3 environment unfit, 4 a cell has no valid run,
    130 interrupted.
    """
    from analysis.analyze import analyze as judge
    from board import runner
    from board.base import opened
    from board.merge import shard_of

    with opened(board, yes=yes, dask=dask) as machine:
        code = runner.reproduce(
            experiment or [],
            machine,
            Path(results),
            jobs if jobs else None,
            full,
            accept=accept,
            shard=shard_of(shard),
            only={"policy": policy, "scope": scope, "concurrency": concurrency, "seed": seed},
        )
    if code:
        raise Exit(code=code)
    if shard == "1/1":
        judge(
            [Path(results)],
            report=Path(report),
            skip_invalid=True,
            any_commit=True,
            audit=False,
        )


@task(
    group="Reproduce",
    help={
        "board": f"{BOARD} (default: virtual)",
        "yes": YES,
        "policy": "of artifact/policies.toml: baseline, affinity, vhot, cooperative, ...",
        "scope": "whom the scx_vstate policies schedule: partial (the server; default) or all",
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
    yes: bool = False,
) -> None:
    """Run one cell; the last line of standard output is the run's directory.

    What is not said comes from [run_defaults] of artifact/experiments.toml; one cell of another
    experiment: ./inv reproduce --experiment E2 --policy vhot --seed 101.  Exit codes: 0 valid run,
    1 not the expected one, 2 usage, 3 environment unfit, 4 invalid run (kept all the same),
    130 interrupted.
    """
    from board import runner
    from board.base import opened
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
    with opened(board, yes=yes) as machine:
        runner.run_one(machine, overrides, Path(results))


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
    seeds: int = 3,
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
        seeds=seeds,
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
def calibrate(
    _: Context, json: str = "", vlen: str = "", shift: str = "", quantum: str = ""
) -> None:
    """Show whether the virtual board is a parallel machine; measured once for each machine.

    Exit codes: 0 it is, 4 it is not (runs on it would be invalid).
    """
    from board.virtual.calibrate import calibration, show
    from board.virtual.machine import default_machine, typed
    from toolchain.command import interrupt_stops_all

    asked = {"vlen_bits": vlen, "icount_shift": shift, "quantum_us": quantum}
    machine = default_machine(typed(asked))
    with interrupt_stops_all():
        document = calibration(machine)
    show(document, Path(json) if json else None)


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
        "report": REPORT,
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
    group="Check",
    help={
        "driver": "userns, chroot, docker or nix; may be repeated (default: what works here)",
        "full": "also rebuild kernel and llama-server, half an hour and more; resumes",
        "artifact": "only this one, such as kernel/vstate-profiler; may be repeated",
        "json": "also write the rows to this file (schemas/verify.schema.json)",
        "accept": "make the ordinary builds the expected ones; prints what changed and why",
        "rebuild": "with --accept: only if a rebuild gives the same",
    },
    iterable=["driver", "artifact"],
)
def verify(
    _: Context,
    driver: list[str] | None = None,
    full: bool = False,
    artifact: list[str] | None = None,
    json: str = "",
    accept: bool = False,
    rebuild: bool = False,
) -> None:
    """Rebuild under hostile conditions and compare each byte with artifact/expected/binaries.json.

    Exit codes: 0 all as expected, 1 a file differs, 2 usage, 3 environment unfit, 4 invalid data.
    """
    from artifact import verify as room

    if accept:
        if artifact or json:
            raise UsageError("--accept takes all: it goes with --rebuild, --driver and --full only")
        room.accept(rebuild=rebuild, drivers=driver or [], full=full)
        return
    if rebuild:
        raise UsageError("--rebuild goes with --accept only: verify always rebuilds")
    room.verify(
        driver or [], full=full, json_file=Path(json) if json else None, only=artifact or []
    )


@task(
    group="Board",
    help={
        "board": BOARD,
        "model": "also: is there room for this model",
        "json": "also write the checks here (schemas/doctor.schema.json)",
    },
)
def doctor(_: Context, board: str = "virtual-ssh", model: str = "", json: str = "") -> None:
    """Is the board fit for runs?  Each check with what was found, expected, and how to mend it.

    Nothing is changed on the board.  Exit codes: 0 fit, 2 usage, 3 unfit or out of reach.
    """
    from board.boards import ssh_settings
    from board.ssh.doctor import doctor as examine

    examine(ssh_settings(board), Path(json) if json else None, model or None)


@task(group="Board", help={"board": BOARD, "model": "also send this model", "yes": YES})
def flash(_: Context, board: str = "virtual-ssh", model: str = "", yes: bool = False) -> None:
    """Send the artifacts to the board, and set it up; ./inv unflash puts all back.

    Only what differs is sent, and its sha256 is read back there; nothing is installed outside the
    board's one directory.  Exit codes: 0 done, 2 usage or not agreed, 3 unfit, 4 damaged.
    """
    from board.boards import ssh_settings
    from board.ssh.flash import flash as send

    send(ssh_settings(board), model or None, yes=yes)


@task(group="Board", help={"board": BOARD, "yes": YES})
def unflash(_: Context, board: str = "virtual-ssh", yes: bool = False) -> None:
    """End what is left of runs on the board, undo all changes there, remove the directory."""
    from board.boards import ssh_settings
    from board.ssh.flash import unflash as undo

    undo(ssh_settings(board), yes=yes)


@task(
    group="Board",
    positional=["action"],
    help={
        "action": "up, down, ssh, console or log (of a board reached over SSH), or shell",
        "board": f"{BOARD} (default: virtual-ssh)",
        "model": "for shell: the model in /payload",
        "command": "for ssh: a command in place of a shell",
    },
)
def board(
    _: Context,
    action: str,
    board: str = "virtual-ssh",
    model: str = "banana-tiny",
    command: str = "",
) -> None:
    """Bring the virtual board up or down, log in to a board, look at its console.

    up, down: the emulator with an SSH server; ssh: a shell on any board; console, log: the
    emulator's serial line; shell: the deterministic board's userland on this terminal.  Exit codes:
    0 done, 2 usage, 3 unfit or out of reach; ssh and shell: else that of what ran there.
    """
    from board import actions

    code = actions.act(action, board, model=model, command=command)
    if code:
        raise Exit(code=code)


@task(
    group="Build",
    help={
        "artifact": "such as kernel/image; may be repeated (default: all but those on demand)",
        "driver": "userns, chroot, docker or nix (default: the first of these that works)",
        "kernel-src": "a kernel tree of yours: build the module, BTF header for --board against it",
        "board": f"with --kernel-src: {BOARD}",
    },
    iterable=["artifact"],
    words="artifact",
)
def build(
    _: Context,
    artifact: list[str] | None = None,
    driver: str = "",
    kernel_src: str = "",
    board: str = "",
) -> None:
    """Build what is missing in the pinned tree, some artifacts or all; prints the folder of each.

    Whichever driver builds it, an artifact has the same bytes; what the cache has is not built.
    With --kernel-src: compare its configuration with kernel/config/board.fragment, and build the
    profiler module and the C header of the board's types for the kernel that runs on --board.
    """
    from toolchain import inside, recipe

    inside.use(driver)
    if bool(kernel_src) != bool(board):
        raise UsageError("build: --kernel-src and --board belong together")
    if kernel_src:
        from board.boards import ssh_settings
        from board.ssh.external import build_for_board

        print(build_for_board(Path(kernel_src), ssh_settings(board)))
        return

    known = recipe.recipes()
    for name in artifact or sorted(n for n in known if not known[n].on_demand):
        print(name, recipe.build(name))


@task(
    group="Build",
    words="out",
    help={"out": "the archive to write", "tree": "a tree of packages.toml (default: build)"},
)
def image(_: Context, out: str, tree: str = "build") -> None:
    """Write a pinned tree as a container image, for `docker load`; prints its digests."""
    from toolchain import docker_driver

    docker_driver.write_image(tree, Path(out))


@task(group="Build", help={"nix": "also put trees and sources into the Nix store, for flake.nix"})
def fetch(_: Context, nix: bool = False) -> None:
    """Download every locked package, source and model that is not in the cache."""
    from toolchain.lock import trees
    from toolchain.rootfs import fetch_tree
    from toolchain.sources import source, sources

    if nix:
        from toolchain import nix_driver

        nix_driver.refuse()
    for tree in dict.fromkeys(("build", "guest", *trees())):  # without the first two nothing runs
        fetch_tree(tree)
    for name in sources():
        source(name)
    if nix:
        from artifact import binaries

        nix_driver.fill_store_for_flake()
        binaries.refuse_trees_of_others()


@task(
    group="Build",
    help={
        "out": "the archive (default: bananaos-artifact-COMMIT.tar.zst)",
        "results": "a results folder to pack, whose runs the report page in it judges",
        "sign": "private key of ssh-keygen to sign the manifest with",
        "check": "instead: hold this bundle, packed or unpacked, against its manifest",
        "signers": "with --check: allowed-signers file; the signature must be there and be good",
    },
)
def bundle(
    _: Context,
    out: str = "",
    results: str = "",
    sign: str = "",
    check: str = "",
    signers: str = "",
) -> None:
    """Pack all that a rebuild and a run need, offline; or check such an archive.

    Exit codes: 0 done, 1 a file differs from the manifest, 2 usage, 3 environment unfit, 4 not a
    bundle.
    """
    from artifact import bundle as room

    if check:
        if out or sign or results:
            raise UsageError("--check goes with --signers only")
        room.check(Path(check), Path(signers) if signers else None)
    elif signers:
        raise UsageError("--signers goes with --check only")
    else:
        room.bundle(
            Path(out) if out else None,
            Path(sign) if sign else None,
            Path(results) if results else None,
        )


@task(group="Build", words="out", help={"out": "the file to write (CycloneDX JSON)"})
def sbom(_: Context, out: str = "bom.cdx.json") -> None:
    """Write the bill of materials: hashes, licences, what came of what, what is trusted.

    The same bytes as in the bundle of this commit.  Exit codes: 0 done, 2 a clone with changes,
    3 environment unfit.
    """
    from artifact import bundle as room

    room.write_bill(Path(out))


@task(
    group="Build",
    help={"accept": "write the new lock; ./inv verify --accept then takes the new bytes"},
)
def lock(_: Context, accept: bool = False) -> None:
    """Resolve the locked packages anew against this machine's mirror; show what moved.

    Exit codes: 0 nothing moved or accepted, 1 the mirror has moved on, 3 environment unfit (no
    Debian host, no mirror), 4 the mirror or the lock was tampered with.
    """
    from toolchain import resolve

    resolve.lock(accept)


@task(group="Check", help={"out": "the PDF; the Markdown goes beside it"})
def appendix(_: Context, out: str = "report/appendix.pdf") -> None:
    """Typeset the artifact appendix, two pages, from the claims and experiments.

    Exit codes: 0 done, 2 usage, 3 cannot be written, 4 the template or a data file is damaged or
    gone.
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
        "days": "artifacts and trees that were not used for this many days go",
        "all": "the whole cache goes: everything is fetched and built anew",
    },
)
def clean(_: Context, days: int = 14, all: bool = False) -> None:
    """Give back disk: artifacts and trees of old, damaged ones, packages that are locked no more.

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
    """Run the tests: unit tests, then those that build and boot.  CI runs this.

    Exit codes: 0 all passed, 1 one failed or pytest itself did, 2 no test has such a name, 130
    interrupted.
    """
    import os

    import pytest

    os.chdir(REPO)
    marks = "not boot and not long" if unit else "" if all else "not long"
    # A file at a time on each CPU: its tests share a guest, and an emulator has one thread.
    workers = ["-n", str(len(os.sched_getaffinity(0))), "--dist", "loadfile"]
    arguments = ["tests", *workers, "--durations=15", "-m", marks, *(["-k", k] if k else [])]
    code = pytest.main(arguments)
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        raise UsageError(f"test: no test is selected by -k {k!r}: expected a part of a test's name")
    if code:
        raise Exit(code=1)

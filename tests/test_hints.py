"""llama-server's phase hints: what is written, when, and that a missing or wrong map harms nobody.

Promise: server-vstate.cpp itself writes, on this machine where there is no map, and on the virtual
board into the map of the real scheduler, into maps that are not its, and where there is none.
Limit: what llama-server computes is not here: that its tokens are announced is checked in each run
of the policy `cooperative`.
"""

import difflib
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

import schemas
from board.virtual.boot import boot
from board.virtual.machine import default_machine
from toolchain.inside import run_inside
from toolchain.recipe import build
from toolchain.sources import source

pytestmark = pytest.mark.boot

LLAMA = Path(__file__).resolve().parents[1] / "llama.cpp"
PATH = "/sys/fs/bpf/scx_vstate/phase_hints"
PATCHED = "tools/server/server-context.cpp"
# No parked harts: no speed is measured here.
MACHINE = default_machine({"memory_mib": 512, "parked_harts": 0})
DEADLINE_S = 1800.0

SCRIPT = """
cd /payload
export LLAMA_VSTATE_PHASE_HINTS=1
hints() { # NAME PAUSE_MS BATCH...
	said=/results/$1
	shift
	./hints-riscv64 "$@" >$said.phases 2>$said.err
	echo $? >$said.code
}
schedule() { # NAME: watch $writer until told to stop
	name=$1
	./scx_vstate --policy cooperative --pid $writer --out /results/$name.json >/results/$name.said &
	loader=$!
	until busybox grep -q '^ready$' /results/$name.said; do busybox sleep 0.01; done
}
wrong() { # NAME TYPE SIZE
	./workload pin $2 $3
	hints $1 0 2,0 0,1
	busybox rm -r /sys/fs/bpf/scx_vstate
}
hints no-map 0 2,0 0,1 3,1
wrong old-value 1 32
wrong array 2 56
busybox mount -t tmpfs tmpfs /sys/fs/bpf
busybox mkdir /sys/fs/bpf/scx_vstate
echo >/sys/fs/bpf/scx_vstate/phase_hints
hints plain-file 0 2,0 0,1
busybox umount /sys/fs/bpf

# Stopped while a scheduler loads, so that the batches meet it as they are meant to.
./hints-riscv64 400 7,0 2,3 5,0! 0,4 0,4 0,4 0,4 0,4 0,4 0,4 0,4 \\
	>/results/one.phases 2>/results/one.err &
writer=$!
busybox kill -STOP $writer
schedule one
busybox kill -CONT $writer
until [ "$(busybox wc -l </results/one.phases)" = 4 ]; do busybox sleep 0.01; done
busybox kill -STOP $writer
busybox kill -TERM $loader
wait $loader
schedule two
busybox kill -CONT $writer
until [ "$(busybox wc -l </results/one.phases)" = 11 ]; do busybox sleep 0.01; done
busybox kill -TERM $loader
wait $loader
wait $writer
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hints")
    boot(
        MACHINE,
        seed=1,
        payload={
            "hints-riscv64": build("llama.cpp/hints") / "hints-riscv64",
            "scx_vstate": build("sched_ext/scx-vstate") / "scx_vstate",
            "workload": build("sched_ext/scx-workload") / "workload",
        },
        script=SCRIPT,
        directory=directory,
        deadline_s=DEADLINE_S,
    )
    return directory


def _here(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    program = build("llama.cpp/hints") / "hints-x86_64"
    environment = {**os.environ, **environment}
    return subprocess.run(
        [program, *argv], capture_output=True, text=True, check=True, env=environment
    )


def test_a_batch_is_classified_by_its_tokens() -> None:
    done = _here("0", "0,0", "5,0", "0,3", "2,1", "1,200")
    # idle, prefill, decode, mixed: the numbers of scx_vstate.h
    assert done.stdout.split() == ["1", "2", "3", "4", "4"]


@pytest.mark.parametrize("value", [None, "", "0", "2", "11", "yes"])
def test_hints_are_off_unless_asked_for(value: str | None) -> None:
    asked = {} if value is None else {"LLAMA_VSTATE_PHASE_HINTS": value}
    assert _here("0", "5,0", "0,1", **asked).stderr == ""


@pytest.mark.skipif(Path(PATH).exists(), reason="this machine runs scx_vstate")
def test_no_scheduler_is_one_line_and_the_work_goes_on() -> None:
    done = _here("0", "5,0", "0,1", "0,1", LLAMA_VSTATE_PHASE_HINTS="1")
    assert re.fullmatch(rf"server-vstate: {PATH}: no map: .*\n", done.stderr)
    assert done.stdout.split() == ["2", "3", "3"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no-map", "no map: No such file or directory"),
        (
            "old-value",
            r"not a map of phase hints, version 3 \(type 1, key 4 bytes, value 32 bytes\)",
        ),
        ("array", r"not a map of phase hints, version 3 \(type 2, key 4 bytes, value 56 bytes\)"),
        ("plain-file", "cannot open: .*"),
    ],
)
def test_what_is_not_the_scheduler_s_map_is_one_line(guest: Path, name: str, why: str) -> None:
    assert re.fullmatch(rf"server-vstate: {PATH}: {why}\n", (guest / f"{name}.err").read_text())
    assert (guest / f"{name}.code").read_text() == "0\n"
    assert (guest / f"{name}.phases").read_text().split()[:2] == ["2", "3"]


def test_the_scheduler_sees_what_was_announced(guest: Path) -> None:
    document = schemas.read(guest / "one.json", "scheduler")
    # The batch that failed was announced, and its tokens taken back: 7 + 2, 3 + 4.
    assert document["announced"] == {"batches": 4, "prefill_tokens": 9, "decode_tokens": 7}


def test_the_next_scheduler_is_found(guest: Path) -> None:
    document = schemas.read(guest / "two.json", "scheduler")
    assert document["announced"] == {"batches": 11, "prefill_tokens": 9, "decode_tokens": 35}
    assert (guest / "one.err").read_text() == f"server-vstate: {PATH}: hints are written\n"
    assert (guest / "one.phases").read_text().split() == ["2", "4", "2", *["3"] * 8]


def _apply(work: Path) -> str:
    """Run apply.sh in `work` inside the pinned tree; return what it says, and its exit code."""
    binds = {f"/recipe/{path.name}": path for path in LLAMA.glob("server-vstate.*")}
    binds["/recipe/apply.sh"] = LLAMA / "apply.sh"
    binds["/sched_ext/scx_vstate.h"] = LLAMA.parent / "sched_ext" / "scx_vstate.h"
    done = run_inside(
        ["sh", "-c", "cd /build && sh /recipe/apply.sh 2>&1; echo $?"],
        what="apply the patch",
        binds=binds,
        writable={"/build": work},
    )
    return done.stdout


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    """The file of the pin that is patched."""
    with tarfile.open(source("llama-cpp")) as archive:
        member = next(m for m in archive if m.name.endswith(f"vendor/llama.cpp/{PATCHED}"))
        stream = archive.extractfile(member)
        assert stream is not None
        file = tmp_path / PATCHED
        file.parent.mkdir(parents=True)
        file.write_bytes(stream.read())
    return file


def test_the_patch_fits_the_pin(tmp_path: Path, pinned: Path) -> None:
    before = pinned.read_text()
    assert _apply(tmp_path).endswith("0\n")
    added = len(pinned.read_text().splitlines()) - len(before.splitlines())
    assert added == 5
    assert (pinned.parent / "server-vstate.cpp").is_file()
    # What was not added is as it was.
    lines = difflib.ndiff(before.splitlines(), pinned.read_text().splitlines())
    assert {line[:2] for line in lines} == {"  ", "+ "}


def test_a_moved_pin_is_named(tmp_path: Path, pinned: Path) -> None:
    pinned.write_text(pinned.read_text().replace("ret = llama_process(", "ret = llama_compute("))
    said = _apply(tmp_path)
    assert said.endswith("1\n")
    assert f"patching file {PATCHED}" in said
    assert "Hunk 3 FAILED" in said
    assert "does not fit this llama.cpp" in said
    assert not (pinned.parent / "server-vstate.cpp").exists()

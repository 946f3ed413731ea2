"""Each kind of policy as a run, by the runner, on the virtual board with all its harts.

Promise: a run under a scheduler is valid, says in its record that the policy was in force from one
end of the window to the other, and is the same to the last byte when it is run again; a base slice,
masks and a cpuset, and a bystander's progress are seen by the kernel and in the record.
Limit: no parked harts and a small load: nothing here is a measurement.
"""

import copy
import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from analysis.collect import collected
from board.cell import Definitions, Overrides
from board.runner import run_one
from board.virtual.board import VirtualBoard
from schemas.record import comparable, read_record

pytestmark = pytest.mark.boot

RUNS = {
    "first": Overrides(policy="cooperative", scope="all"),
    "again": Overrides(policy="cooperative", scope="all"),
    "target": Overrides(policy="vhot", scope="partial", bystanders=1),
    "pinned": Overrides(policy="affinity"),
    "long": Overrides(policy="baseline-long", bystanders=1),
}
LOAD = {"requests": 4, "warmup_requests": 0, "prompt_words": 12, "max_tokens": 4}


class Unparked(VirtualBoard):
    """The virtual board without the parked harts, and without their calibration."""

    def machine(self, overrides: Mapping[str, int]) -> dict[str, Any] | None:
        return super().machine({**overrides, "parked_harts": 0})

    def calibration(self, cell: Mapping[str, Any]) -> None:
        return None


@dataclass(frozen=True)
class Run:
    directory: Path
    record: Mapping[str, Any]

    def row(self) -> Mapping[str, Any]:
        return collected(self.record, {}).row


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    own = Definitions.read()
    experiments = copy.deepcopy(dict(own.experiments))
    load = experiments["run_defaults"]["load"]
    experiments["loads"][load] |= LOAD
    experiments["run_defaults"]["instruments"] = ["observer"]
    definitions = dataclasses.replace(own, experiments=experiments)
    root = tmp_path_factory.mktemp("policies")

    def run(name: str) -> Run:
        directory = run_one(Unparked(), RUNS[name], root / name, definitions=definitions)
        return Run(directory, read_record(directory))

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def test_a_run_under_the_scheduler_is_the_same_when_it_is_run_again(
    runs: Mapping[str, Run],
) -> None:
    first, again = runs["first"], runs["again"]
    for name in ("scheduler.json", "observer.json", "server.log", "dmesg.log", "console.log"):
        one, other = ((run.directory / name).read_bytes() for run in (first, again))
        assert one == other, name
    assert comparable(first.record) == comparable(again.record)


def test_the_record_proves_that_the_policy_was_in_force(runs: Mapping[str, Run]) -> None:
    for name, scope in (("first", 1), ("target", 0)):
        record = runs[name].record
        assert record["valid"]
        kernel = record["scheduler"]["kernel"]
        for edge in (kernel["opened"], kernel["closed"]):
            assert (edge["state"], edge["ops"], edge["switch_all"]) == ("enabled", "vstate", scope)
            assert edge["enable_seq"] == 1
        assert kernel["after"]["state"] == "disabled"
        server = record["platform"]["server"]
        for rows in (server["threads_before"], server["threads_after"]):
            assert all(row["in_sched_ext"] for row in rows)
        document = record["scheduler"]["document"]
        assert document["knobs"] == record["cell"]["scheduling"]["scheduler"]["knobs"]
        assert document["restarts"] == 0
        assert document["counters"]["vector_runs"] > 0


def test_what_the_server_announced_is_what_it_counted(runs: Mapping[str, Run]) -> None:
    told = runs["first"].record["phase_tokens"]
    assert told["agrees"], told["differences"]
    assert told["decode"]["counted"] == LOAD["requests"] * (LOAD["max_tokens"] - 1)
    assert runs["target"].record["phase_tokens"] is None


def test_masks_and_cpuset_are_as_they_were_set(runs: Mapping[str, Run]) -> None:
    record = runs["pinned"].record
    assert record["valid"]
    for edge in ("opened", "closed"):
        assert record["scheduler"]["kernel"][edge]["cpuset"] == "0-7"
    # One compute thread each; a thread that a pinned one starts later inherits its mask.
    harts = {row["harts"] for row in record["platform"]["server"]["threads_after"]}
    assert {hart for hart in harts if hart.isdigit()} == {str(n) for n in range(8)}


def test_the_base_slice_is_set_for_the_window_and_gone_afterwards(runs: Mapping[str, Run]) -> None:
    kernel = runs["long"].record["scheduler"]["kernel"]
    assert kernel["opened"]["base_slice_ns"] == kernel["closed"]["base_slice_ns"] == 50_000_000
    assert kernel["before"]["base_slice_ns"] < kernel["after"]["base_slice_ns"] < 5_000_000


def test_the_bystander_s_progress_is_in_record_and_row(runs: Mapping[str, Run]) -> None:
    for name in ("target", "long"):
        row = runs[name].row()
        assert row["bystanders"] == 1
        # Above 1 by what lies between reading the clock and reading the thread, at both edges.
        assert 0.2 < row["bystander_share"] < 1.01
        assert row["bystander_rounds_per_s"] > 100
    assert runs["pinned"].record["bystanders"] is None

"""Where the time went: kinds that add up, a gain that shows where it was made, what is refused."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import synthetic

from analysis.accounting import VSTATE_INSTRUCTIONS_AT_MOST, accounting_table, window_kinds
from analysis.collect import CollectedRun
from analysis.tables import MINUS, groups
from toolchain.errors import InvalidData

MACHINE = {"icount_shift": 3}
WINDOW = 1000.0
"""Million instructions: 8 seconds at 8 ns each."""


def _run(
    policy: str, seed: int, waiting: float, window: float = WINDOW, **changed: object
) -> CollectedRun:
    """A run of 600 million instructions of work."""
    [run] = synthetic.matrix([seed], policies=[policy], concurrencies=[4])
    row = {**run.row, "window_ms": window * 8, "save_count": 1_000_000}
    record: Mapping[str, object] = {
        **run.record,
        "truth": {"instructions": 600_000_000, "spin_instructions": int(waiting * 1e6)},
        "cell": {**run.record["cell"], "machine": MACHINE},
        **changed,
    }
    return replace(run, row=row, record=record)


def test_the_kinds_of_a_window_add_up() -> None:
    kinds = window_kinds(_run("baseline", 1, 300))
    assert kinds == {
        "window": 1e9,
        "work": 600e6,
        "waiting": 300e6,
        "rest": 100e6,
        "vector state, at most": 1e6 * VSTATE_INSTRUCTIONS_AT_MOST,
    }


def test_a_gain_shows_in_the_kind_it_was_made_in() -> None:
    runs = [_run("baseline", seed, 300 + seed) for seed in (1, 2)]
    runs += [_run("vhot", seed, 200 + seed, 910) for seed in (1, 2)]
    [group] = groups(runs)
    table = accounting_table(group)
    assert table is not None
    baseline, vhot = table.rows
    assert [str(entry) for entry in baseline[3:8]] == [
        "1,000 ± 0", "600 ± 0", "302 ± 1", "98 ± 1", "116.00 ± 0.00",
    ]  # fmt: skip
    assert baseline[8:] == (None,) * 5
    assert vhot[8:] == (
        f"{MINUS}9.0 %", "+0.0 %", f"{MINUS}10.0 %", "+1.0 %", "+0.000 %",
    )  # fmt: skip


def test_without_a_baseline_there_is_no_change_and_without_counts_no_table() -> None:
    [group] = groups([_run("vhot", 1, 200)])
    table = accounting_table(group)
    assert table is not None
    assert table.rows[0][8:] == (None,) * 5
    real = {"cell": {**_run("vhot", 1, 200).record["cell"], "machine": None}}
    for without in ({"truth": None}, real):
        [group] = groups([_run("vhot", 1, 200, **without)])
        assert accounting_table(group) is None


def test_more_instructions_than_the_window_has_are_refused() -> None:
    run = _run("baseline", 1, 401)
    with pytest.raises(InvalidData) as refused:
        window_kinds(run)
    assert str(refused.value) == (
        f"{run.row['run_id']}: truth: 1001000000 instructions of the server, expected at most the "
        "1000000000 of its window (8000 ms of 2^3 ns each): leave the run out, or run its cell "
        "again"
    )

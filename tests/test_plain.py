"""A plain vector workload whose split of saves is known beforehand, counted three times.

Promise: computing only, blocking only and mixed, each in a guest of its own under observer,
profiler and truth (kernel/plain.py): the three agree, and the split is what the workload did.
Limit: by default at the VLEN of the K1; the others with --all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from observer_windows import OUTCOMES, switched

from kernel import plain

pytestmark = pytest.mark.boot

EDGES = 2
"""Switches at the window's edges: thawed, a thread goes back to sleep (a discarded save); frozen,
it sleeps with nothing left to save."""
OTHERS = [pytest.param(bits, marks=pytest.mark.long) for bits in (128, 512, 1024)]


def assert_split(mode: str, row: Mapping[str, Any]) -> None:
    """Assert what a thread of this mode must have been counted for."""
    rounds = plain.MODES[mode].rounds
    sleeps = {"compute": 1, "block": rounds + 1, "mixed": rounds + 1}[mode]
    # Once more where both edges meet it asleep (seen at VLEN 1024): nothing is left to save then.
    assert switched(row, OUTCOMES, "blocking") - sleeps - EDGES in (0, 1)
    assert switched(row, ["discarded_saves"]) == sleeps + EDGES - 1
    assert switched(row, ["compute_saves", "spin_saves"], "blocking") == 0
    compute, spin = (row["runnable"][f"{kind}_saves"] for kind in ("compute", "spin"))
    if mode == "compute":
        assert (compute >= 3, spin) == (True, 0)
    elif mode == "block":
        assert (compute, spin) == (0, 0)
    else:
        assert (compute >= rounds, spin) == (True, rounds)


@pytest.mark.parametrize("vlen_bits", [256, *OTHERS])
@pytest.mark.parametrize("mode", plain.MODES)
def test_three_instruments_see_the_known_split(mode: str, vlen_bits: int, tmp_path: Path) -> None:
    found = plain.run(mode, vlen_bits, tmp_path)
    agreed, truth = found["agreement"], found["truth"]["saves"]["target"]
    assert agreed["agrees"], agreed["differences"]
    saves = agreed["saves"]
    assert saves["observer"] == saves["truth"] == truth["count"] > 0
    assert saves["profiler"] + agreed["profiler_missed"] == saves["truth"]
    assert truth["bytes"] == truth["count"] * 32 * vlen_bits // 8
    rows = found["observer"]["threads"]
    main = found["observer"]["target"]["tgid"]
    assert len(rows) == 1 + plain.THREADS
    for row in rows:
        if row["tid"] == main:
            assert switched(row, OUTCOMES) == switched(row, ["off"])
        else:
            assert_split(mode, row)


def test_a_row_of_the_table_says_what_was_found() -> None:
    found = {
        "agreement": {"saves": {"observer": 7, "profiler": 6, "truth": 7}, "profiler_missed": 1},
        "observer": {"totals": {"compute_saves": 3, "spin_saves": 0, "discarded_saves": 4}},
        "truth": {"saves": {"target": {"count": 7, "bytes": 7 * 512}}},
    }
    assert plain.row("mixed", 128, found) == (
        "| mixed | 128 | 7 | 6 + 1 | 7 | 3 | 0 | 4 | 512 | 512 |"
    )

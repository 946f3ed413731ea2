"""Sizes of section 3.7 anew: what is printed is read, never typed.

Promise: table and text of one save's bytes follow artifact/published/arithmetic.toml, in which a
number is changed here.
Limit: what a processor has is made up; the probe that asks one is for tests/test_xstate.py.
"""

import copy
import dataclasses
from typing import Any

import pytest

from analysis import published, x86
from analysis.published import Published

XSTATE: dict[str, Any] = {
    "cpu": {"brand": "a processor"},
    "xcr0": "0x7",
    "enabled_standard_bytes": 2048,
    "enabled_compacted_bytes": None,
    "components": [{"number": 2, "bytes": 256}],
    "measured_components": "0x7",
    "measurements": [],
}
MEASURED = x86.Measured(xstate={"x86-none": XSTATE})


@pytest.fixture(scope="module")
def printed() -> Published:
    return published.read()


@pytest.fixture
def misprinted(printed: Published) -> Published:
    """The report with another ratio and another area."""
    arithmetic: Any = copy.deepcopy(printed.arithmetic)
    arithmetic["state_ratios"][0]["ratio"] = 9.75
    arithmetic["x86_state"]["xsave_area_bytes"] = 999
    return dataclasses.replace(printed, arithmetic=arithmetic)


def test_the_text_says_what_is_printed(printed: Published, misprinted: Published) -> None:
    [said] = x86.sentences([], MEASURED, printed)
    assert "(1024 bytes) is 0.50 times that; printed is 1.23 times 832 bytes." in said
    [said] = x86.sentences([], MEASURED, misprinted)
    assert "(1024 bytes) is 0.50 times that; printed is 9.75 times 999 bytes." in said


def test_the_table_says_what_is_printed(printed: Published, misprinted: Published) -> None:
    sizes, costs = x86.tables([], MEASURED, printed)
    assert (sizes.name, costs.rows) == ("x86-sizes", ())
    rows = {row[0]: row[1:] for row in sizes.rows}
    assert rows["RVV, VLEN 256 (SpacemiT K1)"][:4] == ("1024", "1.23", "4.00", "0.50")
    assert "1.23 (VLEN 256, XSAVE area), 4 (VLEN 256, AVX component)" in sizes.note
    sizes, _ = x86.tables([], MEASURED, misprinted)
    rows = {row[0]: row[1:] for row in sizes.rows}
    assert rows["RVV, VLEN 256 (SpacemiT K1)"][:4] == ("1024", "1.03", "4.00", "0.50")
    assert "9.75 (VLEN 256, XSAVE area)" in sizes.note

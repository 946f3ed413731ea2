"""Bare words after a verb: whose option they belong to."""

import pytest

from toolchain.cli import _named


def verb(results: list[str], json: str = "", skip_invalid: bool = False) -> None:
    """A verb with an option that may be repeated, one with a value, and a switch."""


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("", ""),
        ("a", "--results a"),
        ("a b", "--results a --results b"),
        ("--results a b", "--results a --results b"),
        ("--skip-invalid a", "--skip-invalid --results a"),
        ("--json out a", "--json out --results a"),
        ("--json=out a", "--json=out --results a"),
        ("a --json out --skip-invalid", "--results a --json out --skip-invalid"),
    ],
)
def test_bare_words_are_the_repeatable_option(typed: str, means: str) -> None:
    assert list(_named(typed.split(), "results", verb)) == means.split()

"""The verdicts on standard output: three groups, a summary; plain text unless on a terminal.

Promise: what is shown is what the document (verdicts.schema.json) says, no more.
Limit: of the audit's findings only those that are not CONSISTENT; the page has all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.tables import p_text

_PLAIN_WIDTH = 160
GROUPS = {
    "A": "A  Audit of the printed numbers: needs no run",
    "V": "V  Virtual board: shows directions, never a board's numbers",
    "B": "B  Board and x86: needs hardware",
}


def show(
    document: Mapping[str, Any], console: Console | None = None, *, audit: bool = True
) -> None:
    """Print the verdicts in their three groups to standard output; plain if it is no terminal.

    audit: group A, too, which no run changes.
    """
    console = console or Console(highlight=False)
    plain = not console.is_terminal
    if plain:
        console.width = _PLAIN_WIDTH
    if audit:
        _show_audit(document["audit"], console, plain=plain)
    for group in ("V", "B"):
        header = ("verdict", "claim", "ratio [95 %]", "n", "p", "why")
        screen = _screen(GROUPS[group], header, plain=plain)
        for row in document["claims"]:
            if row["group"] == group:
                screen.add_row(
                    row["verdict"],
                    row["id"],
                    interval(row),
                    str(row["n"] or "-"),
                    p_text(row["p_for"]),
                    Text(row["reason"]),
                )
        console.print(screen)
        console.print()
    for line in summary(document):
        console.print(Text(line), soft_wrap=True)


def _show_audit(findings: Sequence[Mapping[str, Any]], console: Console, *, plain: bool) -> None:
    screen = _screen(GROUPS["A"], ("verdict", "finding", "what", "by how much"), plain=plain)
    calm = 0
    for one in findings:
        if one["verdict"] == "CONSISTENT":
            calm += 1
        else:
            screen.add_row(one["verdict"], one["id"], Text(one["text"]), Text(one["by"]))
    console.print(screen)
    console.print(f"  and {calm} findings CONSISTENT; all of them: ./inv check-published\n")


def _screen(title: str, header: Sequence[str], *, plain: bool) -> Table:
    screen = Table(title=title, title_justify="left", box=box.ASCII if plain else box.ROUNDED)
    for name in header:
        screen.add_column(name, no_wrap=name in ("verdict", "claim", "finding"))
    return screen


def interval(row: Mapping[str, Any]) -> str:
    """A verdict's or a point's number with its interval, or a hyphen."""
    if row["estimate"] is None:
        return "-"
    if row["low"] is None:
        return f"{row['estimate']:.4g}"
    return f"{row['estimate']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"


def _as_expected(document: Mapping[str, Any]) -> str:
    words = [row["verdict"] for row in document["claims"] if row["group"] == "V"]
    if all(word == "NOT-RUN" for word in words):
        return f"V: all {len(words)} claims are NOT-RUN: no verdict to compare"
    return "V is as expected for these inputs"


def summary(document: Mapping[str, Any]) -> list[str]:
    """What stands below the table: counts, refusals, notes, and the comparison in words."""
    runs = document["runs"]
    lines = [
        f"{runs['valid']} valid runs, {runs['invalid']} invalid (kept, never averaged), "
        f"{runs['refused']} left out"
    ]
    lines += [f"left out: {one['name']}: {one['line']}" for one in document["refused"]]
    lines += [f"note: {note}" for note in document["notes"]]
    expected = document["expected"]
    lines.append(
        f"A against what is expected: {len(expected['A'])} findings differ"
        if expected["A"]
        else "A is as expected"
    )
    virtual = expected["V"]
    lines.append(
        {
            "as-expected": _as_expected(document),
            "differs": f"V: {len(virtual['differing'])} verdicts are not the expected ones",
            "not-applicable": "V: no verdicts are expected for these inputs "
            f"({virtual['inputs'][:12]}): not applicable",
        }[virtual["state"]]
    )
    return lines

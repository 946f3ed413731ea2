"""The audit for a person: one line a finding, in groups, and a summary.

Promise: the same facts as the JSON, no line cut.  Limit: colours on a terminal only.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from analysis.audit.finding import Verdict

GROUPS = {
    "Arithmetic of the printed numbers": (
        "percent",
        "quoted",
        "order",
        "tokens",
        "window",
        "save-cost",
        "counts",
        "integers",
        "x86",
        "save-bytes",
        "state-ratio",
    ),
    "Cost accounting": ("cost",),
    "Trends and contrasts, as ratios with intervals": (
        "every-c",
        "gain-grows",
        "trend",
        "rises",
        "anova",
    ),
    "Signs of an artefact": ("artefact",),
    "Parameters by section": ("parameter",),
    "Statements": ("statement",),
}
_STYLES = {
    Verdict.CONSISTENT: "green",
    Verdict.INCONSISTENT: "bold red",
    Verdict.NOISE: "yellow",
    Verdict.UNSUPPORTED: "magenta",
    Verdict.NOT_CHECKABLE: "cyan",
}


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print the result document (schemas/audit.schema.json)."""
    width = max(len(finding["id"]) for finding in document["findings"])
    for title, rules in GROUPS.items():
        here = [finding for finding in document["findings"] if finding["rule"] in rules]
        _line(console, Text(title, style="bold"))
        for finding in here:
            verdict = Verdict(finding["verdict"])
            line = Text.assemble(
                (f"  {verdict:<14}", _STYLES[verdict]),
                f"{finding['id']:<{width}}  {finding['text']}",
            )
            if finding["by"]:
                line.append(f" -> {finding['by']}", style=_STYLES[verdict])
            _line(console, line)
        _line(console, Text())
    summary = ", ".join(f"{count} {word}" for word, count in document["summary"].items())
    _line(console, Text(f"{len(document['findings'])} findings: {summary}", style="bold"))
    for item in document["unexpected"]:
        _line(
            console,
            Text(
                f"unexpected: {item['id']}: expected {item['expected']}, found {item['found']}",
                style="bold red",
            ),
        )


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)

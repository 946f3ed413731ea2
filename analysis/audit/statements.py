"""Parameters that sections state differently, and what the findings mean for each statement.

Promise: every statement gets a verdict: the worst of the findings that bear on it, or UNSUPPORTED /
NOT-CHECKABLE with the number that is missing.
Limit: which finding bears on which statement is data (statements.toml), for a reader to judge.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.audit.finding import Finding, Verdict, worst
from analysis.published import Published
from toolchain.errors import InvalidData


def parameter_table(published: Published) -> list[dict[str, Any]]:
    """Each parameter with its different values and the sections that state them."""
    table = []
    for item in published.conditions["parameters"]:
        sections: dict[str, list[str]] = {}
        for stated in item["stated"]:
            sections.setdefault(stated["value"], []).append(stated["section"])
        values = [{"value": value, "sections": where} for value, where in sections.items()]
        table.append({key: item[key] for key in ("id", "about", "unit")} | {"values": values})
    return table


def parameters(published: Published) -> Iterator[Finding]:
    """One finding for each parameter."""
    for item in parameter_table(published):
        values: Sequence[Mapping[str, Any]] = item["values"]
        unit = "" if item["unit"] == "none" else f" {item['unit']}"
        shown = "; ".join(f"{v['value']}{unit} ({', '.join(v['sections'])})" for v in values)
        verdict = Verdict.CONSISTENT if len(values) == 1 else Verdict.INCONSISTENT
        by = f"{len(values)} different values" if len(values) > 1 else ""
        if not values:
            verdict, shown = Verdict.NOT_CHECKABLE, "no value is printed"
        sections = sorted({section for value in values for section in value["sections"]})
        text = f"{item['about']}: {shown}"
        yield Finding(f"parameter/{item['id']}", sections or ["4.2"], verdict, text, by)


def statements(published: Published, findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for each statement; raises InvalidData when it names a finding that is not."""
    verdicts = {finding.id: finding.verdict for finding in findings}
    for item in published.statements["statements"]:
        if "missing" in item:
            lacks = item["missing"]["lacks"]
            verdict = Verdict.UNSUPPORTED if lacks == "number" else Verdict.NOT_CHECKABLE
            by = f"not printed: {item['missing']['what']}"
        else:
            unknown = [name for name in item["checked_by"] if name not in verdicts]
            if unknown:
                raise InvalidData(
                    f"statements.toml: statement {item['id']}: there is no finding {unknown[0]}"
                )
            verdict = worst(verdicts[name] for name in item["checked_by"])
            guilty = [name for name in item["checked_by"] if verdicts[name] is verdict]
            by = "" if verdict is Verdict.CONSISTENT else ", ".join(guilty)
        yield Finding(f"statement/{item['id']}", [item["section"]], verdict, item["text"], by)

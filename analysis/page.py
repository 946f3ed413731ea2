"""report/index.html: one page that needs nothing else, from disk, on paper, without a script.

Promise: no external resource, no script, no time stamp: the same analysis gives the same bytes.
Every text that comes from data is escaped.  Verdicts come first; each row opens to its points, its
runs and the command that makes it anew.
Limit: it shows what analysis.analyze found; it judges nothing.
"""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.admit import Admitted
from analysis.claims import Claims
from analysis.collect import CollectedRun, treatment
from analysis.figures import Figure
from analysis.screen import GROUPS, interval, summary
from analysis.tables import MeanSd, Table, p_text, shown
from analysis.verdicts import Verdict

_CSS = Path(__file__).with_name("page.css")
_CLASSES = {
    "REPRODUCED": "for",
    "DIRECTION-SHOWN": "for",
    "CONSISTENT": "for",
    "CONTRADICTED": "against",
    "DIRECTION-OPPOSED": "against",
    "INCONSISTENT": "against",
    "UNSUPPORTED": "against",
    "NOT-RUN": "notrun",
}
_WORDS = {
    "REPRODUCED": "the runs on this platform bear the claim, minimum effect included",
    "CONTRADICTED": "the runs on this platform exclude the claim",
    "INCONCLUSIVE": "the runs decide neither way",
    "DIRECTION-SHOWN": "the virtual board's counts or times go the claimed way, by more than the"
    " minimum effect",
    "DIRECTION-OPPOSED": "they go the other way, by more than the minimum effect",
    "UNRESOLVED": "they decide neither way",
    "NOT-RUN": "there is no run that could decide it; the reason is named",
    "CONSISTENT": "the printed numbers agree with each other",
    "INCONSISTENT": "they cannot all be right",
    "NOISE": "the difference is within the printed spread",
    "UNSUPPORTED": "no printed number bears the statement",
    "NOT-CHECKABLE": "what is printed does not suffice to check it",
}
_INTRO = """
<p>This page judges the claims of a report on vector-state-aware scheduling for concurrent LLM
inference on RISC-V: first whether the report's printed numbers agree with themselves (group A),
then what the runs at hand show on an emulated RISC-V machine (group V) and on real hardware
(group B).</p>
<p><b>What it is not.</b> The virtual board is an idealised machine of eight harts: one instruction
per tick, no caches, a vector store as cheap as an addition. It shows counts, orderings and
directions. It never reproduces a board's number, and its milliseconds are <b>virtual</b>: they are
never compared with a board's. Seeds sample the randomness of one simulator with one binary; they
say nothing about how boards differ.</p>
<p>The sample is the run, never the request. Times and counts are compared as ratios of geometric
means with 95&nbsp;% Welch intervals on logarithms; a difference below the minimum effect does not
count, however small its p. <code>p</code> is that of the claim holding at every point, adjusted
within its family (Holm). The method is in <code>docs/statistics.md</code>.</p>
"""


@dataclass(frozen=True)
class Analysis:
    """All that the page shows; `document` is what --json writes (verdicts.schema.json)."""

    admitted: Admitted
    claims: Claims
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    audit: Mapping[str, Any]
    document: Mapping[str, Any]
    x86: tuple[str, ...] = ()
    """Section 3.7 in words, made of what was found on x86."""


def page(analysis: Analysis) -> str:
    """The page's text."""
    sections = [
        ("verdicts", "Verdicts", _verdicts(analysis)),
        ("audit", "Audit of the printed numbers", _audit(analysis.audit)),
        ("tables", "Tables", _tables(analysis.tables)),
        ("figures", "Figures", _figures(analysis.figures)),
        *([("x86", "x86 with AVX2 (section 3.7)", _x86(analysis.x86))] if analysis.x86 else []),
        ("runs", "Runs that do not count", _not_counted(analysis)),
        ("environment", "Environment", _environment(analysis.admitted.runs)),
        ("rerun", "Run it again", _rerun(analysis)),
    ]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{text}</section>\n' for name, title, text in sections
    )
    css = _CSS.read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>bananaOS artifact: verdicts</title>\n<style>\n{css}</style></head>\n<body>\n"
        "<header><h1>bananaOS artifact: what the numbers and the runs bear</h1>"
        f"{_INTRO}<nav>{links}</nav></header>\n<main>\n{body}</main></body></html>\n"
    )


# --------------------------------------------------------------------------------------- verdicts


def _verdicts(analysis: Analysis) -> str:
    document = analysis.document
    parts = []
    for group, title in GROUPS.items():
        if group == "A":
            rows = [
                (one["verdict"], _e(one["text"]), _e(one["by"]), _e(", ".join(one["sections"])))
                for one in document["audit"]
                if one["verdict"] != "CONSISTENT"
            ]
            calm = len(document["audit"]) - len(rows)
            table = _rows(
                ("verdict", "what is printed", "by how much", "section"),
                [(_word(word), *rest) for word, *rest in rows],
                "verdicts-a",
            )
            table += f'<p class="note">And {calm} findings CONSISTENT: see the audit below.</p>'
            words = Counter(one["verdict"] for one in document["audit"])
        else:
            mine = [row for row in document["claims"] if row["group"] == group]
            table = _rows(
                ("verdict", "claim", "ratio [95 %]", "n", "p"),
                [_claim(row) for row in mine],
                f"verdicts-{group.lower()}",
            )
            words = Counter(row["verdict"] for row in mine)
        parts.append(f"<h3>{_e(title)}</h3>{_counts(words)}{table}")
    lines = "".join(f"<li>{_e(line)}</li>" for line in summary(document))
    legend = "".join(f"<dt>{_word(word)}</dt><dd>{text}</dd>" for word, text in _WORDS.items())
    return (
        f"<ul>{lines}</ul>{''.join(parts)}"
        f"<details><summary>What the words mean</summary><div><dl>{legend}</dl></div></details>"
    )


def _counts(words: Counter[str]) -> str:
    items = "".join(f"<li>{count} {_word(word)}</li>" for word, count in sorted(words.items()))
    return f'<ul class="counts">{items}</ul>'


def _claim(row: Mapping[str, Any]) -> tuple[str, ...]:
    facts = {
        "claim": f"<code>{_e(row['id'])}</code>, section {_e(', '.join(row['section']))}",
        "wanted": f"<code>{_e(row['metric'])}</code> {_e(row['relation'])}, "
        f"at least {row['minimum_n']} runs per cell",
        "why": _e(row["reason"]),
        "family": f"{_e(row['family'])}; p against the claim {p_text(row['p_against'])}, "
        f"permutation p {p_text(row['permutation_p'])}",
        "run it": f"<code>{_e(row['command'])}</code> (about {row['minutes']:g} min, "
        f"{row['disk_mib']:g} MiB)",
        "runs": _e(", ".join(row["runs"])) or "none",
    }
    inside = "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in facts.items()) + "</dl>"
    if row["points"]:
        inside += _rows(
            ("point", "n", "ratio [95 %]", "p (no effect)", "p (for)", "p (against)", ""),
            [
                (
                    _e(point["label"]),
                    str(point["n"]),
                    _whole(interval(point)),
                    p_text(point["p"]),
                    p_text(point["p_for"]),
                    p_text(point["p_against"]),
                    _e(point["note"] or ""),
                )
                for point in row["points"]
            ],
        )
    claim = (
        f"<details><summary>{_e(row['statement'])}</summary><div>{inside}</div></details>"
        f'<span class="note">{_e(row["reason"])}</span>'
    )
    return (
        _word(row["verdict"]),
        claim,
        _whole(interval(row)),
        str(row["n"] or "-"),
        _whole(p_text(row["p_for"])),
    )


def _word(word: str) -> str:
    return f'<span class="word {_CLASSES.get(word, "open")}">{_e(word)}</span>'


# ------------------------------------------------------------------------------------------ audit


def _audit(audit: Mapping[str, Any]) -> str:
    findings = [
        (
            _word(one["verdict"]),
            f"<code>{_e(one['id'])}</code>",
            _e(one["text"]),
            _e(one["by"]),
            _e(", ".join(one["sections"])),
        )
        for one in audit["findings"]
    ]
    contrasts = [
        (
            _e(one["metric"]),
            str(one["concurrency"]),
            _whole(f"{one['ratio']:.4f} [{one['low']:.4f}, {one['high']:.4f}]"),
            p_text(one["p"]),
            p_text(one["p_holm"]),
            f"{one['power']:.2f}",
        )
        for one in audit["contrasts"]
    ]
    parameters = [
        (
            _e(one["about"]),
            "; ".join(
                f"{_e(value['value'])} <span class=note>({_e(', '.join(value['sections']))})</span>"
                for value in one["values"]
            )
            or "not given",
        )
        for one in audit["parameters"]
    ]
    return (
        "<p>Each rule is derived in <code>docs/audit.md</code>; "
        "<code>./inv check-published</code> prints the same findings.</p>"
        f"<details><summary>All {len(findings)} findings</summary><div>"
        + _rows(("verdict", "finding", "what", "by how much", "section"), findings)
        + "</div></details>"
        "<details><summary>Contrasts from the printed means, sds and n</summary><div>"
        + _rows(("metric", "c", "ratio [95 %]", "p", "p (Holm)", "power"), contrasts)
        + "</div></details>"
        "<details><summary>Parameters, and the sections that state them</summary><div>"
        + _rows(("parameter", "value (section)"), parameters)
        + "</div></details>"
    )


# ----------------------------------------------------------------------------- tables and figures


def _tables(tables: Sequence[Table]) -> str:
    if not tables:
        return "<p>There is no valid run, so there is no table.</p>"
    parts = ["<p>The same as Markdown and CSV: <code>report/tables/</code>.</p>"]
    for table in tables:
        numeric = [
            all(_is_number(row[place]) for row in table.rows) for place in range(len(table.header))
        ]
        head = "".join(
            f'<th scope="col"{_number_class(n)}>{_e(name)}</th>'
            for name, n in zip(table.header, numeric, strict=True)
        )
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td{_number_class(n)}>{_e(shown(entry))}</td>"
                for entry, n in zip(row, numeric, strict=True)
            )
            + "</tr>"
            for row in table.rows
        )
        parts.append(
            f'<div class="scroll"><table class="numbers"><caption>{_e(table.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
            f'<p class="note">{_e(table.note)}</p>'
        )
    return "".join(parts)


def _is_number(entry: MeanSd | str | None) -> bool:
    return not isinstance(entry, str) or entry[:1] in "0123456789+<-\N{MINUS SIGN}"


def _number_class(number: bool) -> str:
    return ' class="number"' if number else ""


def _figures(figures: Sequence[Figure]) -> str:
    parts = []
    for figure in figures:
        caption = f"<figcaption><b>{_e(figure.title)}.</b> {_e(figure.caption)}</figcaption>"
        parts.append(f'<figure id="figure-{_e(figure.name)}">{figure.svg or ""}{caption}</figure>')
    return "".join(parts)


def _x86(sentences: Sequence[str]) -> str:
    """The text; its tables and its figure stand with the others, under x86-."""
    return "".join(f"<p>{_e(line)}</p>" for line in sentences)


# ------------------------------------------------------------------------------------------- runs


def _not_counted(analysis: Analysis) -> str:
    invalid = [run for run in analysis.admitted.runs if not run.row["valid"]]
    parts = []
    if invalid:
        parts.append(
            _rows(
                ("run", "experiment", "cell", "reasons", "what was seen"),
                [
                    (
                        f"<code>{_e(run.row['run_id'])}</code>",
                        _e(run.row["experiment"] or "-"),
                        _e(_cell(run)),
                        _e(", ".join(run.record["invalid_reasons"])),
                        _e(_first_line(run)),
                    )
                    for run in invalid
                ],
            )
        )
    else:
        parts.append("<p>No run is invalid.</p>")
    if refused := analysis.admitted.refused:
        parts.append("<h3>Left out (--skip-invalid)</h3>")
        rows = [(_e(one.name), _e(one.line), _e(", ".join(one.runs))) for one in refused]
        parts.append(_rows(("name", "why", "runs"), rows))
    for note in analysis.admitted.notes:
        parts.append(f'<p class="warning">{_e(note)}</p>')
    return "".join(parts)


def _first_line(run: CollectedRun) -> str:
    failure = run.record["environment"]["failure"]
    return str(failure["detail"]).partition("\n")[0] if failure else "-"


def _cell(run: CollectedRun) -> str:
    row = run.row
    return (
        f"{row['board']} {row['model']} {treatment(row)} c={row['concurrency']} seed {row['seed']}"
    )


def _environment(runs: Sequence[CollectedRun]) -> str:
    """What the valid runs were made on and with; how often each value occurs."""
    valid = [run for run in runs if run.row["valid"]]
    if not valid:
        return "<p>There is no valid run.</p>"
    parts = []
    for board in sorted({run.row["board"] for run in valid}):
        those = [run for run in valid if run.row["board"] == board]
        facts: dict[str, Counter[str]] = {}
        for run in those:
            for name, value in _facts(run).items():
                facts.setdefault(name, Counter())[value] += 1
        rows = [
            (
                _e(name),
                "<br>".join(
                    _e(value) + (f' <span class="note">({n} runs)</span>' if len(c) > 1 else "")
                    for value, n in sorted(c.items())
                ),
            )
            for name, c in facts.items()
        ]
        parts.append(f"<h3>Board {_e(board)}: {len(those)} valid runs</h3>")
        parts.append(_rows(("fact", "value"), rows))
    return "".join(parts)


def _facts(run: CollectedRun) -> dict[str, str]:
    record = run.record
    platform, cell, host = record["platform"], record["cell"], record["environment"]
    facts = {
        "kernel": f"{platform['kernel_release']} {platform['kernel_version']}",
        "harts at boot": str(platform["harts"]),
        "ISA": str(platform["isa"]),
        "frequency governor": str(platform["governor"] or "none"),
        "load": ", ".join(
            f"{key} {value}"
            for key, value in sorted(cell["load"].items())
            if key != "seed" and value is not None
        ),
        "commit": f"{host['git_commit'] or 'unknown'}"
        + (" with uncommitted changes" if host["git_dirty"] else ""),
        "host": f"{host['host_cpu_model']}, {host['host_cpus']} CPUs, Linux {host['host_kernel']}",
    }
    if (machine := cell["machine"]) is not None:
        facts["machine"] = ", ".join(f"{key} {value}" for key, value in sorted(machine.items()))
    facts |= {f"SHA-256 of {key}": value for key, value in sorted(cell["inputs"].items())}
    return facts


# ------------------------------------------------------------------------------------------ rerun


def _rerun(analysis: Analysis) -> str:
    costs: dict[tuple[str, str, str], tuple[float, float, list[str]]] = {}
    for row in analysis.document["claims"]:
        key = (row["experiment"], row["platform"], row["command"])
        costs.setdefault(key, (row["minutes"], row["disk_mib"], []))[2].append(row["claim"])
    rows = [
        (
            _e(experiment),
            _e(platform),
            f"<code>{_e(command)}</code>",
            f"{minutes:g}",
            f"{disk:g}",
            _e(", ".join(claims)),
        )
        for (experiment, platform, command), (minutes, disk, claims) in sorted(costs.items())
    ]
    return (
        "<p><code>./inv analyze</code> makes this page anew from the same results, byte for byte;"
        " <code>./inv check-published</code> needs no run. The minutes are estimates.</p>"
        + _rows(("experiment", "platform", "command", "minutes", "MiB", "decides"), rows)
    )


# ---------------------------------------------------------------------------------------- helpers


def _rows(header: Iterable[str], rows: Iterable[Sequence[str]], name: str | None = None) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f'<th scope="col">{_e(word)}</th>' for word in header)
    body = "".join("<tr>" + "".join(f"<td>{x}</td>" for x in row) + "</tr>\n" for row in rows)
    anchor = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll"><table{anchor}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _whole(text: str) -> str:
    """Text that is not to be broken into lines."""
    return f'<span class="whole">{_e(text)}</span>'


def _e(text: object) -> str:
    return html.escape(str(text))

"""Tables in the form of the report's, as Markdown, CSV and rows for the page.

Promise: one row per cell, mean ± sample standard deviation (divisor n - 1) with n beside; invalid
runs and repeats of a cell are never in a mean.  Published numbers stand beside measured ones only
where both are of the same platform; of a virtual board only the changes in per cent have the
published ones beside them, as a direction.  The same runs give the same bytes.
Limit: nothing is tested here; analysis/verdicts.py judges.
"""

import csv
import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.collect import CollectedRun
from analysis.published import Cell
from analysis.stats import Anova, Refused, Sample, Value, first_valid, log_contrast, sample
from toolchain.paths import REPO
from toolchain.tomlfile import read_toml

MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class MeanSd:
    """A cell's mean and sample sd; sd is None for one run.  decimals: how it is shown."""

    mean: float
    sd: float | None
    decimals: int

    def __str__(self) -> str:
        mean = f"{self.mean:,.{self.decimals}f}"
        return mean if self.sd is None else f"{mean} ± {self.sd:,.{self.decimals}f}"


Entry = MeanSd | str | None


@dataclass(frozen=True)
class Table:
    """name: of its files.  note: what a reader must know, below the table."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    note: str

    def markdown(self) -> str:
        """The table as GitHub's Markdown, title above and note below."""
        lines = [
            f"**{self.title}**",
            "",
            "| " + " | ".join(self.header) + " |",
            "|" + "---|" * len(self.header),
            *("| " + " | ".join(map(shown, row)) + " |" for row in self.rows),
        ]
        return "\n".join([*lines, "", self.note, ""])

    def csv(self) -> str:
        """The numbers unrounded: a mean ± sd column becomes two."""
        double = [
            any(isinstance(row[place], MeanSd) for row in self.rows)
            for place in range(len(self.header))
        ]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            word
            for name, two in zip(self.header, double, strict=True)
            for word in ((f"{name} mean", f"{name} sd") if two else (name,))
        )
        for row in self.rows:
            words: list[str] = []
            for entry, two in zip(row, double, strict=True):
                if isinstance(entry, MeanSd):
                    words += [repr(entry.mean), "" if entry.sd is None else repr(entry.sd)]
                else:
                    words += [entry or "", ""] if two else [entry or ""]
            writer.writerow(words)
        return text.getvalue()


@dataclass(frozen=True)
class Group:
    """Runs that belong into one table: those of one experiment, board, model, VLEN and scope.

    scope: None where no policy of the experiment has one; runs of policies without a scope are in
    the groups of all scopes.  bystanders: how many threads ran beside the server.
    """

    experiment: str
    board: str
    platform: str
    model: str
    vlen_bits: int | None
    scope: str | None
    bystanders: int
    runs: tuple[CollectedRun, ...]

    @property
    def name(self) -> str:
        """For file names and headings' anchors."""
        words = [self.experiment, self.board, self.model]
        words += [str(self.vlen_bits)] if self.vlen_bits else []
        words += [self.scope] if self.scope else []
        return "-".join([*words, f"beside-{self.bystanders}"] if self.bystanders else words)

    @property
    def title(self) -> str:
        """For a heading."""
        words = [self.experiment, f"board {self.board}", self.model]
        words += [f"VLEN {self.vlen_bits}"] if self.vlen_bits else []
        words += [f"scope {self.scope}"] if self.scope else []
        words += [f"bystanders: {self.bystanders}"] if self.bystanders else []
        return ", ".join(words)

    def cells(self, metric: str) -> dict[tuple[int, str], Sample]:
        """(concurrency, label of the policy) to the sample of a metric, where there is one."""
        found: dict[tuple[int, str], list[Value]] = {}
        for run in self.runs:
            row = run.row
            if row[metric] is not None:
                value = Value(row["run_id"], row["platform"], row["seed"], float(row[metric]))
                found.setdefault((row["concurrency"], label(row)), []).append(value)
        return {
            key: sample(f"{key[1]} c={key[0]}", values)
            for key, values in sorted(found.items(), key=lambda item: _cell_order(item[0]))
        }

    def has(self, metric: str) -> bool:
        """Whether any run has the metric."""
        return any(run.row[metric] is not None for run in self.runs)


def groups(runs: Iterable[CollectedRun]) -> list[Group]:
    """The valid runs, each cell once, by experiment, board, model, VLEN, scope; in order."""
    found: dict[tuple[str, str, str, str, int, int], list[CollectedRun]] = {}
    for run in first_valid(runs):
        row = run.row
        for experiment in run.experiments:
            key = (
                experiment,
                row["board"],
                row["platform"],
                row["model"],
                row["vlen_bits"] or 0,
                row["bystanders"],
            )
            found.setdefault(key, []).append(run)
    made = []
    for key in sorted(found):
        scopes = sorted({one.row["scope"] for one in found[key]} - {None}) or [None]
        for scope in scopes:
            those = tuple(one for one in found[key] if one.row["scope"] in (None, scope))
            made.append(Group(*key[:4], key[4] or None, scope, key[5], those))
    return made


@functools.cache
def _policies() -> tuple[str, ...]:
    return tuple(read_toml(REPO / "artifact" / "policies.toml")["policies"])


def label(row: Mapping[str, Any]) -> str:
    """A policy as tables and figures name it: with its variant, if it is one."""
    return f"{row['policy']} {row['variant']}" if row["variant"] else str(row["policy"])


def policy_of(name: str) -> str:
    """The policy that `label` named."""
    return name.partition(" ")[0]


def policy_number(name: str) -> int:
    """The place of a label's policy in artifact/policies.toml; one that is not there is last."""
    known, policy = _policies(), policy_of(name)
    return known.index(policy) if policy in known else len(known)


def policy_order(name: str) -> tuple[int, str]:
    """Sorts labels: policies in their order, each before its variants."""
    return policy_number(name), name


def _cell_order(key: tuple[int, str]) -> tuple[int, tuple[int, str]]:
    return key[0], policy_order(key[1])


@dataclass(frozen=True)
class Column:
    """A metric of the report's tables.

    published: its name in artifact/published.  factor: what to multiply ours by for its unit.
    """

    metric: str
    title: str
    unit: str
    decimals: int
    published: str
    factor: float = 1.0

    def heading(self, platform: str) -> str:
        """With its unit; times of the virtual board are called virtual."""
        return f"{self.title}, {unit_on(platform, self.unit)}" if self.unit else self.title


def unit_on(platform: str, unit: str) -> str:
    """The unit, with the virtual board's seconds called virtual."""
    virtual = {"ms": "virtual ms", "per s": "per virtual s", "tokens/s": "tokens/virtual s"}
    return virtual.get(unit, unit) if platform == "virtual" else unit


INFERENCE = (
    Column("output_tps", "TPS", "tokens/s", 3, "output_tps"),
    Column("mean_ttft_ms", "mean TTFT", "ms", 2, "mean_ttft_ms"),
    Column("p95_ttft_ms", "P95 TTFT", "ms", 2, "p95_ttft_ms"),
    Column("mean_latency_ms", "mean latency", "ms", 2, "mean_latency_ms"),
)
VSTATE = (
    Column("save_count", "V-state saves", "", 0, "save_count"),
    Column("save_total_ns", "save time", "ms", 2, "save_total_ms", 1e-6),
    Column("saves_per_s", "save rate", "per s", 2, "saves_per_s"),
    Column("context_switches", "switches", "", 0, "context_switches"),
)
Published = Mapping[tuple[str, str, int], Cell]
"""(column of artifact/published, policy, concurrency) to the printed numbers of the board."""

Changes = Mapping[tuple[str, int], float]
"""(column of artifact/published, concurrency) to the printed change in per cent."""


def tables(runs: Iterable[CollectedRun], published: Published, changes: Changes) -> list[Table]:
    """All tables for these runs: per group inference, vector state, changes against baseline.

    published: the cells of the board's tables (analysis.published), inference and vstate.
    changes: what the report's table of improvements prints.
    """
    made: list[Table] = []
    for group in groups(runs):
        beside = published if group.platform == "board" else {}
        for kind, title, columns in (
            ("inference", "Inference", INFERENCE),
            ("vstate", "Vector state", VSTATE),
        ):
            present = [column for column in columns if group.has(column.metric)]
            if present:
                made.append(_cells_table(group, kind, title, present, beside))
                change = _change_table(group, kind, title, present, changes)
                made += [change] if change.rows else []
    return made


def _cells_table(
    group: Group, kind: str, title: str, columns: Sequence[Column], published: Published
) -> Table:
    header = ["c", "policy", "n"]
    for column in columns:
        header.append(column.heading(group.platform))
        if published:
            header.append(f"{column.title}, published")
    samples = {column.metric: group.cells(column.metric) for column in columns}
    keys = sorted({key for cells in samples.values() for key in cells}, key=_cell_order)
    rows: list[tuple[Entry, ...]] = []
    for key in keys:
        concurrency, policy = key
        n = max(cells[key].n for cells in samples.values() if key in cells)
        row: list[Entry] = [str(concurrency), policy, str(n)]
        for column in columns:
            one = samples[column.metric].get(key)
            row.append(None if one is None else _mean_sd(one, column))
            if published:
                cell = published.get((column.published, policy, concurrency))
                row.append(None if cell is None else _printed(cell, column))
        rows.append(tuple(row))
    return Table(
        f"{group.name}-{kind}",
        f"{title}: {group.title}",
        tuple(header),
        tuple(rows),
        _note(group, bool(published)),
    )


def _printed(cell: Cell, column: Column) -> MeanSd:
    return MeanSd(cell.summary.mean, cell.summary.sd, column.decimals)


def _mean_sd(one: Sample, column: Column) -> MeanSd:
    factor = column.factor
    sd = one.sd
    return MeanSd(one.mean * factor, None if sd is None else sd * factor, column.decimals)


def _note(group: Group, beside: bool) -> str:
    words = "Mean ± sample standard deviation over runs (seeds), n runs each."
    if group.platform == "virtual":
        words += (
            " Virtual board: its clock counts instructions, so its times and rates are virtual"
            " and are not to be compared with a real board's."
        )
    if beside:
        words += " Published: section 4.4, three runs each."
    return words


def _change_table(
    group: Group, kind: str, title: str, columns: Sequence[Column], changes: Changes
) -> Table:
    """Change of each policy against the baseline of the same concurrency, in per cent of means."""
    samples = {column.metric: group.cells(column.metric) for column in columns}
    keys = sorted({key for cells in samples.values() for key in cells}, key=_cell_order)
    keys = [key for key in keys if key[1] != "baseline"]
    rows: list[tuple[Entry, ...]] = []
    for concurrency, policy in keys:
        row: list[Entry] = [str(concurrency), policy]
        for column in columns:
            cells = samples[column.metric]
            treatment, control = (
                cells.get((concurrency, policy)),
                cells.get((concurrency, "baseline")),
            )
            row.append(
                None if treatment is None or control is None else _change(treatment, control)
            )
            printed = (
                changes.get((column.published, concurrency)) if policy == "cooperative" else None
            )
            row.append(None if printed is None else percent(1 + printed / 100))
        rows.append(tuple(row))
    header = ["c", "policy"]
    for column in columns:
        header += [column.title, "published (board)"]
    note = (
        "Change of the means against the baseline of the same concurrency, positive is more;"
        " in brackets the 95 % interval of the ratio of geometric means (Welch, on logarithms)."
    )
    if group.platform == "virtual":
        note += (
            " Published changes are a board's: a virtual board can show their direction, never"
            " their size."
        )
    return Table(
        f"{group.name}-{kind}-change",
        f"{title}, change: {group.title}",
        tuple(header),
        tuple(rows),
        note,
    )


def _change(treatment: Sample, control: Sample) -> str:
    if control.mean == 0:
        return "-"
    text = percent(treatment.mean / control.mean)
    try:
        found = log_contrast([(1.0, treatment), (-1.0, control)])
    except Refused as refusal:
        return f"{text} ({refusal.name})"
    low, high = (percent(bound, 1).removesuffix(" %") for bound in (found.low, found.high))
    return f"{text} [{low}, {high}]"


def percent(ratio: float, decimals: int = 2) -> str:
    """A ratio as a change in per cent with its sign: 1.1 is +10.00 %."""
    return f"{100 * (ratio - 1):+z.{decimals}f} %".replace("-", MINUS)


def shown(entry: Entry) -> str:
    """An entry as text; a hyphen for what there is not."""
    return "-" if entry is None else str(entry)


def anova_table(group: Group, found: Mapping[str, Anova]) -> Table:
    """The committee's table: per metric (its title) the effects, F and p."""

    def number(value: float | None, form: Callable[[float], str]) -> str | None:
        return None if value is None else form(value)

    note = next(iter(found.values())).note
    return Table(
        f"{group.name}-anova",
        f"Two-way ANOVA, policy x concurrency: {group.title}",
        ("metric", "source", "sum of squares", "df", "F", "p", "partial eta squared"),
        tuple(
            (
                title,
                effect.source,
                f"{effect.sum_sq:.5g}",
                str(effect.df),
                number(effect.f, "{:.2f}".format),
                number(effect.p, p_text),
                number(effect.partial_eta_sq, "{:.3f}".format),
            )
            for title, one in found.items()
            for effect in one.effects
        ),
        f"{note[0].upper()}{note[1:]}. The verdicts rest on planned contrasts, not on this table.",
    )


def p_text(p: float | None) -> str:
    """A p-value with three digits; below 0.001 as that."""
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"

"""Figures as SVG text: matplotlib, the same bytes from the same runs.

Promise: bars begin at zero, every run is visible as a point, colours are told apart by colour-blind
readers (Okabe and Ito) and by their hatching, times of the virtual board are called virtual.  A
figure that the runs at hand cannot fill is not drawn; its place says what is missing.
Limit: text is drawn by the reader's own sans-serif font, so its width may differ a little.
"""

import functools
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from analysis.collect import CollectedRun
from analysis.tables import (
    Column,
    Group,
    groups,
    policy_number,
    policy_order,
    unit_on,
)
from analysis.tables import label as label_of

# Okabe and Ito's palette without yellow and black, which are hard to see as bars.  A seventh policy
# begins again; the legend tells it apart.
_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#0072b2", "#009e73", "#d55e00")
_HATCHES = ("", "//", "\\\\", "..", "xx", "")
_SPLIT = (
    ("undiscarded, compute", "#d55e00", ""),
    ("undiscarded, spin", "#e69f00", "//"),
    ("discarded", "#56b4e9", ".."),
)
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#e69f00")
_MARKERS = ("o", "s", "^", "D")
AXES_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}

BY_CONCURRENCY = (
    Column("save_count", "V-state saves", "per run", 0, ""),
    Column("saves_per_s", "V-state saves", "per s", 0, ""),
    Column("context_switches", "Context switches", "per run", 0, ""),
    Column("output_tps", "Output tokens", "per s", 0, ""),
    Column("mean_ttft_ms", "Mean TTFT", "ms", 0, ""),
)


@dataclass(frozen=True)
class Figure:
    """svg: None when it could not be drawn; the caption then says what is missing."""

    name: str
    title: str
    caption: str
    svg: str | None


def figures(runs: Iterable[CollectedRun]) -> list[Figure]:
    """All figures for these runs, in the page's order."""
    made: list[Figure] = []
    those = groups(runs)
    with mpl.rc_context(AXES_STYLE):
        for column in BY_CONCURRENCY:
            made += _each(
                f"by-concurrency-{column.metric}",
                f"{column.title} by concurrency and policy",
                [group for group in those if group.has(column.metric)],
                functools.partial(_by_concurrency, column),
                f"no run has {column.metric}",
            )
        made += _model_sizes(those)
        made += _each(
            "split",
            "What the saves held",
            [group for group in those if group.has("discarded_save_count")],
            _split,
            "no run has discarded_save_count",
        )
        made += _each(
            "threads",
            "Time and switches of each thread of the server",
            [group for group in those if any(map(_threads, group.runs))],
            _per_thread,
            "no run has the threads of its server",
        )
        made += _calibrations(those)
    return made


def _each(
    name: str,
    title: str,
    those: Sequence[Group],
    draw: Callable[[Group], tuple[Canvas, str]],
    missing: str,
) -> list[Figure]:
    if not those:
        return [Figure(name, title, f"Not drawn: {missing}.", None)]
    made = []
    for group in those:
        canvas, caption = draw(group)
        whole = f"{name}-{group.name}"
        made.append(Figure(whole, f"{title}: {group.title}", caption, svg(canvas, whole)))
    return made


def svg(canvas: Canvas, name: str) -> str:
    """The figure as an <svg> element whose ids begin with its name, so that many fit a page."""
    FigureCanvasSVG(canvas)
    with mpl.rc_context({"svg.hashsalt": name}):
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    body = text.getvalue()
    body = body[body.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", body)
    # matplotlib's font list is the machine's; the page names a family every reader has.
    body = body.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return re.sub(r"[ \t]+\n", "\n", body)


def axes_of(
    width: float = 6.4, height: float = 3.2, columns: int = 1, rows: int = 1
) -> tuple[Canvas, list[Axes]]:
    canvas = Canvas(figsize=(width, height), layout="constrained")
    found = canvas.subplots(rows, columns, squeeze=False)
    return canvas, list(found.flat)


def _legend(axes: Axes, **options: Any) -> None:
    axes.legend(frameon=False, fontsize=8, **options)


def _by_concurrency(column: Column, group: Group) -> tuple[Canvas, str]:
    cells = group.cells(column.metric)
    concurrencies = sorted({concurrency for concurrency, _ in cells})
    policies = sorted({name for _, name in cells}, key=policy_order)
    width = 0.8 / len(policies)
    canvas, [axes] = axes_of()
    for place, policy in enumerate(policies):
        offset = (place - (len(policies) - 1) / 2) * width
        label = policy
        for tick, concurrency in enumerate(concurrencies):
            one = cells.get((concurrency, policy))
            if one is None:
                continue
            axes.bar(
                tick + offset,
                one.mean,
                0.9 * width,
                color=_COLOURS[policy_number(policy) % len(_COLOURS)],
                hatch=_HATCHES[policy_number(policy) % len(_HATCHES)],
                edgecolor="white",
                linewidth=0,
                label=label,
            )
            label = "_"  # one entry of the legend per policy
            spread = [(n - (one.n - 1) / 2) * width * 0.6 / max(one.n, 3) for n in range(one.n)]
            axes.plot(
                [tick + offset + shift for shift in spread],
                one.values,
                "o",
                color="black",
                markersize=3,
                markerfacecolor="white",
                markeredgewidth=0.8,
            )
    axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(f"{column.title}, {unit_on(group.platform, column.unit)}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.6, len(concurrencies) - 0.4)
    axes.grid(axis="y", color="#dddddd")
    _legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    least, most = min(one.n for one in cells.values()), max(one.n for one in cells.values())
    n = str(least) if least == most else f"{least} to {most}"
    return canvas, f"Bars: mean of the runs; points: the runs themselves, n = {n} per bar."


def _shared(those: Sequence[Group]) -> set[int]:
    """The concurrencies at which each of these groups has runs."""
    return set.intersection(*({run.row["concurrency"] for run in group.runs} for group in those))


def _model_sizes(those: Sequence[Group]) -> list[Figure]:
    """Saves and TTFT versus concurrency, a line per model, under the baseline."""
    title = "Model size: saves and time to first token under the default scheduler"
    by_experiment: dict[tuple[str, str, int | None], list[Group]] = {}
    for group in those:
        if group.scope not in (None, "all"):
            continue  # the baseline of one scope is that of the other
        key = (group.experiment, group.board, group.vlen_bits)
        by_experiment.setdefault(key, []).append(group)
    several = [found for found in by_experiment.values() if len(found) > 1 and _shared(found)]
    if not several:
        return [
            Figure(
                "models",
                title,
                "Not drawn: no experiment has several models at one concurrency.",
                None,
            )
        ]
    made = []
    for models in several:
        columns = [
            column
            for column in (BY_CONCURRENCY[0], BY_CONCURRENCY[4])
            if any(group.has(column.metric) for group in models)
        ]
        canvas, axes = axes_of(3.6 * len(columns), columns=len(columns))
        for panel, column in zip(axes, columns, strict=True):
            _by_model(panel, column, models)
        _legend(axes[0])
        first = models[0]
        name = f"models-{first.experiment}-{first.board}"
        made.append(
            Figure(
                name,
                f"{title}: {first.experiment}, board {first.board}",
                "Filled: mean of the runs; hollow: the runs themselves.",
                svg(canvas, name),
            )
        )
    return made


def _by_model(panel: Axes, column: Column, models: Sequence[Group]) -> None:
    """One metric under the baseline against concurrency, a line per model."""
    for place, group in enumerate(models):
        cells = {
            c: one for (c, policy), one in group.cells(column.metric).items()
            if policy == "baseline"
        }  # fmt: skip
        colour, marker = _SERIES[place % 4], _MARKERS[place % 4]
        panel.plot(
            list(cells), [one.mean for one in cells.values()], "-",
            color=colour, marker=marker, label=group.model,
        )  # fmt: skip
        for concurrency, one in cells.items():
            panel.plot(
                [concurrency] * one.n, one.values, marker, color=colour, markersize=3,
                markerfacecolor="white",
            )  # fmt: skip
    panel.set_ylim(bottom=0)
    panel.set_xticks(sorted({c for group in models for c, _ in group.cells(column.metric)}))
    panel.set_xlabel("concurrent requests")
    panel.set_ylabel(f"{column.title}, {unit_on(models[0].platform, column.unit)}")
    panel.grid(axis="y", color="#dddddd")


def _split(group: Group) -> tuple[Canvas, str]:
    keys = list(group.cells("discarded_save_count"))
    canvas, [axes] = axes_of(height=0.9 + 0.3 * len(keys))
    left = [0.0] * len(keys)
    undiscarded, spin, discarded = (
        group.cells(f"{name}_save_count") for name in ("undiscarded", "spin", "discarded")
    )

    def mean(cells: Mapping[tuple[int, str], Any], key: tuple[int, str]) -> float:
        return float(cells[key].mean) if key in cells else 0.0

    parts = (
        [mean(undiscarded, key) - mean(spin, key) for key in keys],
        [mean(spin, key) for key in keys],
        [mean(discarded, key) for key in keys],
    )
    for (label, colour, hatch), values in zip(_SPLIT, parts, strict=True):
        axes.barh(
            range(len(keys)), values, 0.75, left=left, color=colour, hatch=hatch,
            edgecolor="white", linewidth=0, label=label,
        )  # fmt: skip
        left = [before + value for before, value in zip(left, values, strict=True)]
    # The runs' totals as points, so that the spread behind a bar is seen.
    for place, (concurrency, policy) in enumerate(keys):
        totals = [
            run.row["undiscarded_save_count"] + run.row["discarded_save_count"]
            for run in group.runs
            if (run.row["concurrency"], label_of(run.row)) == (concurrency, policy)
            and run.row["undiscarded_save_count"] is not None
            and run.row["discarded_save_count"] is not None
        ]
        axes.plot(
            totals, [place] * len(totals), "o", color="black", markersize=3,
            markerfacecolor="white", markeredgewidth=0.8,
        )  # fmt: skip
    axes.set_yticks(range(len(keys)), [f"{policy}, c={c}" for c, policy in keys])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("V-state saves per run")
    _legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return canvas, (
        "Mean saves per run by what the registers held: values in use, nothing that matters (the"
        " thread was spinning), or nothing at all (the kernel had discarded them at a system"
        " call). Points: the runs' totals."
    )


def _threads(run: CollectedRun) -> list[tuple[str, int, int, int]]:
    """(name, run ns, wait ns, switches) of each thread over the measured window, busiest first."""
    platform = run.record.get("platform")
    server = platform["server"] if platform else None
    if not server:
        return []
    before = {one["tid"]: one for one in server["threads_before"]}
    found = []
    for after in server["threads_after"]:
        one = before.get(after["tid"])
        if one is None:
            continue
        switches = sum(
            after[key] - one[key] for key in ("voluntary_switches", "involuntary_switches")
        )
        found.append(
            (
                after["name"] or "?",
                after["run_ns"] - one["run_ns"],
                after["wait_ns"] - one["wait_ns"],
                switches,
            )
        )
    return sorted(found, key=lambda each: (-each[1], each[0]))


def _per_thread(group: Group) -> tuple[Canvas, str]:
    """Of the group's first run at its highest concurrency, one panel per policy."""
    most = max(run.row["concurrency"] for run in group.runs)
    chosen: dict[str, CollectedRun] = {}
    for run in group.runs:
        if run.row["concurrency"] == most and _threads(run):
            chosen.setdefault(label_of(run.row), run)
    if not chosen:
        chosen = {label_of(run.row): run for run in group.runs if _threads(run)}
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    canvas, axes = axes_of(6.4 if columns == 1 else 3.4 * columns, 3.0 * rows, columns, rows)
    for unused in axes[len(chosen) :]:
        unused.set_axis_off()
    for panel, policy in zip(axes, sorted(chosen, key=policy_order), strict=False):
        lines = _threads(chosen[policy])
        ticks = range(len(lines))
        run_ms = [line[1] / 1e6 for line in lines]
        wait_ms = [line[2] / 1e6 for line in lines]
        panel.barh(ticks, run_ms, 0.75, color="#0072b2", label="on a hart")
        panel.barh(ticks, wait_ms, 0.75, left=run_ms, color="#e69f00", hatch="//",
                   edgecolor="white", linewidth=0, label="waiting for a hart")  # fmt: skip
        longest = max(map(sum, zip(run_ms, wait_ms, strict=True)))
        for tick, (line, ran, waited) in enumerate(zip(lines, run_ms, wait_ms, strict=True)):
            panel.text(ran + waited + 0.01 * longest, tick, f"{line[3]}", va="center", fontsize=7)
        panel.set_yticks(ticks, [line[0] for line in lines], fontsize=7)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.12 * longest)
        panel.set_xlabel(unit_on(group.platform, "ms"))
        run = chosen[policy]
        panel.set_title(f"{policy}, c={run.row['concurrency']}, seed {run.row['seed']}", fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    return canvas, (
        "One run. Time of each thread of llama-server between the first and the last measured"
        " request; the number is how often it was switched out. On which hart a thread ran is not"
        " recorded."
    )


def _calibrations(those: Sequence[Group]) -> list[Figure]:
    title = "Calibration of the virtual board"
    found: dict[str, Mapping[str, Any]] = {}
    for group in those:
        for run in group.runs:
            calibration = run.record.get("calibration")
            if calibration is not None:
                machine = calibration["machine"]
                name = "vlen{vlen_bits}-shift{icount_shift}-quantum{quantum_us}".format(**machine)
                found.setdefault(name, calibration)
    if not found:
        return [Figure("calibration", title, "Not drawn: no run carries a calibration.", None)]
    made = []
    for name, calibration in sorted(found.items()):
        canvas = _calibration(calibration)
        whole = f"calibration-{name}"
        caption = (
            f"Largest distance from linear: {100 * calibration['linear_error_ratio']:.1f} %."
            " Left: burn loop, all threads together, relative to one thread; the line is linear."
            " Middle: one crossing of a spinning barrier. Right: llama-server's own times for one"
            " fixed request."
        )
        made.append(Figure(whole, f"{title}: {name}", caption, svg(canvas, whole)))
    return made


def _calibration(calibration: Mapping[str, Any]) -> Canvas:
    canvas, [burn, barrier, server] = axes_of(8.2, 2.8, 3)
    loops = {int(n): values for n, values in calibration["burn"].items()}
    one = sum(loops[min(loops)]) / len(loops[min(loops)]) / min(loops)
    burn.plot([0, max(loops)], [0, max(loops)], color="#999999", linewidth=1)
    for threads, values in sorted(loops.items()):
        burn.plot([threads] * len(values), [v / one for v in values], "o", color="#0072b2")
    burn.set_xlabel("threads")
    burn.set_ylabel("throughput, times one thread")
    burn.set_xlim(left=0)
    burn.set_ylim(bottom=0)
    for text, values in sorted(calibration["barrier"].items(), key=lambda item: int(item[0])):
        barrier.plot([int(text)] * len(values), [v / 1e3 for v in values], "s", color="#d55e00")
    barrier.set_xlabel("threads")
    barrier.set_ylabel("barrier, virtual µs")
    barrier.set_xlim(left=0)
    barrier.set_ylim(bottom=0)
    for shift, key, label, colour, hatch in (
        (-0.2, "prompt_ms", "prompt", "#0072b2", ""),
        (0.2, "predicted_ms", "decode", "#e69f00", "//"),
    ):
        server.bar(
            [place + shift for place in range(len(calibration["server"]))],
            [each[key] for each in calibration["server"]],
            0.38,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=label,
        )
    names = [str(each["threads"]) for each in calibration["server"]]
    server.set_xticks(range(len(names)), names)
    server.set_xlabel("threads")
    server.set_ylabel("virtual ms")
    _legend(server)
    return canvas

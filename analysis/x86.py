"""Section 3.7 anew: the x86 comparison, from runs and measurements, beside what is printed.

Promise: every number is of a run, of a measurement in the results folder, or of artifact/; which of
them is said in the table.  Sizes of components that the processor lacks are marked as computed.
Intervals are there wherever there is a sample.
Limit: what is printed was measured on another processor with another model; only growth and ratios
are to be compared with it.  Times of x86 and instructions of the virtual board stand side by side
and are never divided by one another.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.text import Text
from scipy import stats as distributions

import schemas
from analysis import published
from analysis.collect import CollectedRun, collected, in_order, read_index
from analysis.figures import AXES_STYLE, Figure, axes_of, svg
from analysis.published import Published
from analysis.stats import Refused, Sample, Value, first_valid, log_contrast, sample
from analysis.tables import Entry, MeanSd, Table
from board.virtual.machine import vlens
from schemas.record import read_records, window_switches
from toolchain.errors import InvalidData
from toolchain.paths import REPO

FOLDER = "x86"
COMPONENTS = REPO / "artifact" / "xstate.toml"
FORMS = {
    "X86": "equal waves, different prompts, no cache",
    "X86-report": "the report's form: 8 equal prompts, cache on",
}
"""Experiment -> what it is, for a reader."""
PRINTED = "printed (Core i9-13900HX, WSL2)"
LARGEST_VLEN = 65536
K1_VLEN_BITS = 256
KIB = 1024
LEVEL = 0.95


@dataclass(frozen=True)
class Measured:
    """What was measured beside the runs.

    xstate, bench: board name -> document.  virtual: VLEN -> document of the virtual board.
    """

    xstate: Mapping[str, Any] = field(default_factory=dict)
    bench: Mapping[str, Any] = field(default_factory=dict)
    virtual: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Marginal:
    """What vector state adds to a switch: the median of n turns with its 95 % interval."""

    mode: str
    state_bytes: int
    estimate: float
    low: float
    high: float
    n: int
    switch: float
    """What a switch costs without vector state."""

    def __str__(self) -> str:
        return f"{self.estimate:.1f} [{self.low:.1f}, {self.high:.1f}]"


def read_measured(folders: Iterable[Path]) -> Measured:
    """Read <folder>/x86/ of each results folder; raises InvalidData.

    Files of other names are not looked at.
    """
    xstate: dict[str, Any] = {}
    bench: dict[str, Any] = {}
    virtual: dict[int, Any] = {}
    for folder in folders:
        place = folder / FOLDER
        for path in sorted(place.glob("*/xstate.json")):
            xstate[path.parent.name] = schemas.read(path, "xstate")
        for path in sorted(place.glob("*/switch_bench.json")):
            bench[path.parent.name] = schemas.read(path, "switch_bench")
        for path in sorted(place.glob("virtual/switch_bench-*.json")):
            vlen_bits = _vlen_bits(path)
            virtual[vlen_bits] = schemas.read(path, "switch_bench")
    return Measured(xstate, bench, virtual)


def _vlen_bits(path: Path) -> int:
    try:
        return int(path.stem.removeprefix("switch_bench-"))
    except ValueError as error:
        raise InvalidData(
            f"{path}: not a file of ./inv x86-compare, expected switch_bench-VLEN.json: remove it"
        ) from error


# ------------------------------------------------------------------------------------ the bench


def marginals(document: Mapping[str, Any], counted: str) -> list[Marginal]:
    """Per mode with vector state what it adds to a switch.

    counted: cpu_ns or instructions.  Turn by turn the mode without is taken off, then the median
    cost of filling the registers; the interval is that of a median, by order statistics, without
    any assumption on the distribution.  Empty where it was not counted.
    """
    none, *others = document["modes"]
    if none["repeats"][0][counted] is None:
        return []
    base = _per_switch(none, counted)
    made = []
    for mode in others:
        filling = median(_per_switch(mode, f"fill_{counted}")) - median(
            _per_switch(none, f"fill_{counted}")
        )
        added = sorted(
            one - other for one, other in zip(_per_switch(mode, counted), base, strict=True)
        )
        low, high = _median_interval(added)
        made.append(
            Marginal(
                mode["mode"],
                mode["state_bytes"],
                median(added) - filling,
                low - filling,
                high - filling,
                len(added),
                median(base),
            )
        )
    return made


def _per_switch(mode: Mapping[str, Any], counted: str) -> list[float]:
    return [repeat[counted] / repeat["switches"] for repeat in mode["repeats"]]


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics, the same number from either end, with the level."""
    n = len(ordered)
    below = int(distributions.binom.ppf((1 - LEVEL) / 2, n, 0.5))
    return ordered[max(0, below - 1)], ordered[min(n - 1, n - below)]


# ------------------------------------------------------------------------------------- the runs


def of_x86(runs: Iterable[CollectedRun]) -> list[CollectedRun]:
    """The first valid run of each cell of the x86 boards."""
    return [run for run in first_valid(runs) if run.row["platform"] == "container-x86"]


@dataclass(frozen=True)
class Series:
    """One form of the load on one board with one model: samples by metric and concurrency."""

    experiment: str
    board: str
    model: str
    samples: Mapping[str, Mapping[int, Sample]]

    @property
    def name(self) -> str:
        return f"{self.board}, {self.model}: {FORMS[self.experiment]}"


def series(runs: Iterable[CollectedRun], measured: Measured) -> list[Series]:
    """All forms, in the order of FORMS."""
    groups: dict[tuple[str, str, str], list[CollectedRun]] = {}
    for run in of_x86(runs):
        for experiment in run.experiments:
            if experiment in FORMS:
                key = (experiment, run.row["board"], run.row["model"])
                groups.setdefault(key, []).append(run)
    order = list(FORMS)
    made = []
    for (experiment, board, model), those in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])
    ):
        xstate = measured.xstate.get(board)
        area = xstate["enabled_standard_bytes"] if xstate else None
        made.append(Series(experiment, board, model, _samples(those, area)))
    return made


def _samples(runs: Sequence[CollectedRun], area: int | None) -> dict[str, dict[int, Sample]]:
    found: dict[str, dict[int, list[Value]]] = {}
    for run in runs:
        row = run.row
        for metric, value in _numbers(run, area).items():
            if value is not None:
                one = Value(row["run_id"], row["platform"], row["seed"], value)
                found.setdefault(metric, {}).setdefault(row["concurrency"], []).append(one)
    return {
        metric: {c: sample(f"{metric} c={c}", values) for c, values in sorted(cells.items())}
        for metric, cells in found.items()
    }


def _numbers(run: CollectedRun, area: int | None) -> dict[str, float | None]:
    """A run's numbers under the names of artifact/published/x86.toml, and some of its own."""
    row = run.row
    server = run.record["platform"]["server"]
    counts = list(window_switches(server).values())
    per_request = row["context_switches_per_request"]
    ran_ns, waited_ns = (_grown(server, key) for key in ("run_ns", "wait_ns"))
    counted = (run.record.get("switches") or {}).get("counted") or {}
    resumed, with_avx = counted.get("resumed"), counted.get("resumed_with_avx")
    return {
        "output_tps": row["output_tps"],
        "mean_ttft_ms": row["mean_ttft_ms"],
        "p95_ttft_ms": row["p95_ttft_ms"],
        "context_switches": row["context_switches"],
        "involuntary_switches": float(sum(pair[1] for pair in counts)) if counts else None,
        "switches_per_request": per_request,
        "xstate_per_request_kib": (
            per_request * area / KIB if per_request is not None and area is not None else None
        ),
        "waited_percent": 100 * waited_ns / (ran_ns + waited_ns) if ran_ns + waited_ns else None,
        "avx_percent": 100 * with_avx / resumed if resumed and with_avx is not None else None,
    }


def _grown(server: Mapping[str, Any], key: str) -> int:
    before = {row["tid"]: row[key] for row in server["threads_before"]}
    return sum(int(row[key] - before.get(row["tid"], 0)) for row in server["threads_after"])


# ----------------------------------------------------------------------------------- the tables

_COLUMNS = (
    # metric, title, decimals
    ("output_tps", "TPS", 2),
    ("mean_ttft_ms", "mean TTFT, ms", 2),
    ("p95_ttft_ms", "P95 TTFT, ms", 2),
    ("context_switches", "switches", 1),
    ("involuntary_switches", "involuntary", 1),
    ("switches_per_request", "switches per request", 2),
    ("xstate_per_request_kib", "estimated xstate per request, KiB", 1),
    ("waited_percent", "waited for a CPU, % of run and wait", 1),
    ("avx_percent", "resumed with AVX state, %", 2),
)


def tables(runs: Iterable[CollectedRun], measured: Measured, printed: Published) -> list[Table]:
    """The tables of section 3.7: load, growth, sizes, costs; none where nothing was run."""
    those = series(runs, measured)
    if not those and not measured.xstate:
        return []
    made = [_load_table(those, printed), _growth_table(those, printed)] if those else []
    if measured.xstate:
        made.append(_size_table(measured, printed))
        made += _cost_table(measured)
    return made


def _load_table(those: Sequence[Series], printed: Published) -> Table:
    rows: list[tuple[Entry, ...]] = []
    for concurrency in published.CONCURRENCIES:
        for one in those:
            cells = {
                metric: one.samples.get(metric, {}).get(concurrency) for metric, *_ in _COLUMNS
            }
            n = max((cell.n for cell in cells.values() if cell), default=0)
            row: list[Entry] = [str(concurrency), one.name, str(n)]
            for metric, _, decimals in _COLUMNS:
                cell = cells[metric]
                row.append(None if cell is None else MeanSd(cell.mean, cell.sd, decimals))
            rows.append(tuple(row))
        rows.append(_printed_row(printed, concurrency))
    return Table(
        "x86-load",
        "Context switches and inference on x86-64 (section 3.7)",
        ("c", "load", "n", *(title for _, title, _ in _COLUMNS)),
        tuple(rows),
        "Mean ± sample standard deviation over runs. The estimate is switches x XSAVE area, as"
        " the report makes it: an upper bound, for the kernel saves with XSAVES, which leaves out"
        " what is in its initial state; how often a thread came back with AVX state saved is"
        " the last column, where BPF counted. Printed numbers are of another processor and model:"
        " compare growth, not size. Threads that wait for a CPU share it with other programs.",
    )


def _printed_row(printed: Published, concurrency: int) -> tuple[Entry, ...]:
    table = printed.tables["x86"]
    row: list[Entry] = [str(concurrency), PRINTED, str(table.runs_per_cell)]
    for metric, _, decimals in _COLUMNS:
        if metric in table.columns:
            cell = table.cell(metric, published.BASELINE, concurrency)
            row.append(MeanSd(float(cell.mean), float(cell.sd), decimals))
        else:
            row.append(None)
    return tuple(row)


def _growth_table(those: Sequence[Series], printed: Published) -> Table:
    growth = printed.arithmetic["x86_growth"]
    low, high = growth["from_concurrency"], growth["to_concurrency"]
    rows: list[tuple[Entry, ...]] = []
    for one in those:
        cells = one.samples.get("switches_per_request", {})
        if low in cells and high in cells:
            n = min(cells[low].n, cells[high].n)
            rows.append((one.name, str(n), *_growth(cells[low], cells[high], growth["ratio"])))
    return Table(
        "x86-growth",
        f"Growth of context switches per request from c = {low} to c = {high} (section 3.7)",
        ("load", "n", "times [95 %]", "printed", "over printed"),
        tuple(rows),
        "Ratio of geometric means with Welch's interval on logarithms. The verdicts are in the "
        "claims switches-grow-sixfold, switches-grow-sixfold-waves and switches-grow-alike.",
    )


def _growth(low: Sample, high: Sample, ratio: float) -> tuple[Entry, ...]:
    try:
        found = log_contrast([(1.0, high), (-1.0, low)])
    except Refused as refusal:
        times = high.mean / low.mean
        return f"{times:.2f} ({refusal.name})", f"{ratio:g}", f"{times / ratio:.2f}"
    return (
        f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]",
        f"{ratio:g}",
        f"{found.ratio / ratio:.2f}",
    )


@functools.cache
def _architectural() -> tuple[Mapping[str, Any], ...]:
    return tuple(schemas.read_toml(COMPONENTS, "xstate-components")["components"])


def _save_bytes(printed: Published, vlen_bits: int) -> int:
    """Bytes of one save of all vector registers."""
    registers: int = printed.arithmetic["vector_registers"]
    return registers * vlen_bits // 8


def _printed_ratios(printed: Published) -> dict[tuple[int, str], str]:
    """The printed ratios of state sizes, their digits, by VLEN and by what they are over."""
    return {
        (row["vlen_bits"], row["over"]): f"{row['ratio']:.{row['decimals']}f}"
        for row in printed.arithmetic["state_ratios"]
    }


_OVER = {"xsave_area_bytes": "XSAVE area", "avx_component_bytes": "AVX component"}


def _size_table(measured: Measured, printed: Published) -> Table:
    """Bytes of one save: RVV by VLEN, x86 by component, here, as printed, and computed."""
    x86 = printed.arithmetic["x86_state"]
    area, component = x86["xsave_area_bytes"], x86["avx_component_bytes"]
    sizes: list[tuple[str, int, str]] = []
    for bits in (*vlens(), LARGEST_VLEN):
        note = {
            K1_VLEN_BITS: " (SpacemiT K1)",
            LARGEST_VLEN: " (the architecture's limit)",
        }.get(bits, "")
        sizes.append((f"RVV, VLEN {bits}{note}", _save_bytes(printed, bits), "32 x VLEN / 8"))
    sizes += [
        ("XSAVE area of the report's machine", area, "printed, section 3.7"),
        ("its AVX component", component, "printed, section 3.7"),
    ]
    board, xstate = next(iter(sorted(measured.xstate.items())))
    here = {one["number"]: one["bytes"] for one in xstate["components"]}
    source = f"CPUID, {board}"
    sizes.append((f"XSAVE area here, standard, XCR0 {xstate['xcr0']}",
                  xstate["enabled_standard_bytes"], source))  # fmt: skip
    if xstate["enabled_compacted_bytes"] is not None:
        name = "XSAVE area here, compacted, supervisor components included"
        sizes.append((name, xstate["enabled_compacted_bytes"], source))
    for extension in ("AVX2", "AVX-512", "AMX"):
        parts = [one for one in _architectural() if one["extension"] == extension]
        has = all(one["number"] in here for one in parts)
        total = sum(here[one["number"]] if has else one["bytes"] for one in parts)
        names = ", ".join(one["name"].removeprefix("AMX ").removeprefix("AVX ") for one in parts)
        what = source if has else "computed from the architecture: not in this processor"
        sizes.append((f"{extension} components ({names})", total, what))
    local = xstate["enabled_standard_bytes"]
    ratios = ", ".join(
        f"{digits} (VLEN {bits}, {_OVER[over]})"
        for (bits, over), digits in _printed_ratios(printed).items()
    )
    return Table(
        "x86-sizes",
        "Bytes of one save of vector state (section 3.7)",
        ("state", "bytes", "over the report's XSAVE area", "over its AVX component",
         "over the XSAVE area here", "source"),
        tuple(
            (name, str(size), f"{size / area:.2f}", f"{size / component:.2f}",
             f"{size / local:.2f}", what)
            for name, size, what in sizes
        ),
        f"Of the first two columns of ratios these are printed: {ratios}; ./inv check-published"
        " audits them. The RVV sizes are without the control registers that are saved beside them.",
    )  # fmt: skip


_OPERATIONS = (
    # operation, state, memory, what
    ("xsavec", "modified", "hot", "save in use, compacted (XSAVEC), in the cache"),
    ("xsavec", "modified", "cold", "the same, in no cache"),
    ("xsavec", "init", "hot", "save in its initial state (XSAVEC), in the cache"),
    ("xsaveopt", "modified", "hot", "save in use (XSAVEOPT), in the cache"),
    ("xsaveopt", "clean", "hot", "save unchanged since it was restored (XSAVEOPT), in the cache"),
    ("xsave", "modified", "hot", "save in use (XSAVE), in the cache"),
    ("xrstor-compacted", "modified", "hot", "restore in use, compacted (XRSTOR), in the cache"),
    ("xrstor-compacted", "modified", "cold", "the same, in no cache"),
    ("memcpy", None, "hot", "copy of as many bytes, in the cache"),
    ("memcpy", None, "cold", "the same, into no cache"),
)


def _cost_table(measured: Measured) -> list[Table]:
    rows: list[tuple[Entry, ...]] = []
    for board, xstate in sorted(measured.xstate.items()):
        for operation, state, memory, what in _OPERATIONS:
            found = _measurement(xstate, operation, state, memory)
            if found is None or found["ns"] is None:
                continue
            ns = found["ns"]
            spread = (
                f"{ns['median']:.1f} ({ns['lower_quartile']:.1f} to {ns['upper_quartile']:.1f})"
            )
            name = f"x87, SSE, AVX: {what}" if xstate["xcr0"] == "0x7" else f"all enabled: {what}"
            rows.append((board, name, str(found["payload_bytes"]), spread, None, "quartiles"))
    for board, bench in sorted(measured.bench.items()):
        for one in marginals(bench, "cpu_ns"):
            what = f"what {one.mode} state adds to a context switch of {one.switch:.0f} ns"
            rows.append((board, what, str(one.state_bytes), str(one), None, f"95 %, n = {one.n}"))
    for bits, bench in sorted(measured.virtual.items()):
        for one in marginals(bench, "instructions"):
            what = f"what V state adds to a context switch of {one.switch:.0f} instructions"
            rows.append((
                f"virtual, VLEN {bits}", what, str(one.state_bytes), None, str(one),
                f"95 %, n = {one.n}",
            ))  # fmt: skip
    return [
        Table(
            "x86-costs",
            "What saving vector state costs: nanoseconds on x86, instructions on the virtual board",
            ("where", "what", "bytes", "ns", "instructions", "in brackets"),
            tuple(rows),
            "Nanoseconds and instructions are not to be compared: an instruction of the virtual "
            "board takes one tick, whatever it stores. What is added to a switch is save and "
            "restore, without filling the registers.",
        )
    ]


def _measurement(
    xstate: Mapping[str, Any], operation: str, state: str | None, memory: str
) -> Mapping[str, Any] | None:
    """The measurement of all components that were measured."""
    for one in xstate["measurements"]:
        if (
            one["components"] == xstate["measured_components"]
            and one["operation"] == operation
            and (one["state"], one["memory"]) == (state, memory)
        ):
            found: Mapping[str, Any] = one
            return found
    return None


# ---------------------------------------------------------------------------- figure and text

_LOOKS = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#e69f00", "D"))


def figures(runs: Iterable[CollectedRun], measured: Measured, printed: Published) -> list[Figure]:
    """Switches per request against concurrency; nothing where nothing was run."""
    those = series(runs, measured)
    if not those:
        return []
    with mpl.rc_context(AXES_STYLE):
        canvas, [axes] = axes_of(height=3.6)
        for (colour, marker), one in zip(_LOOKS, those, strict=False):
            cells = one.samples.get("switches_per_request", {})
            axes.plot(list(cells), [cell.mean for cell in cells.values()], "-", color=colour,
                      marker=marker, label=one.name)  # fmt: skip
            for concurrency, cell in cells.items():
                axes.plot([concurrency] * cell.n, cell.values, marker, color=colour, markersize=3,
                          markerfacecolor="white")  # fmt: skip
        table = printed.tables["x86"]
        values = [
            float(table.cell("switches_per_request", published.BASELINE, c).mean)
            for c in published.CONCURRENCIES
        ]
        axes.plot(published.CONCURRENCIES, values, "--", color="#999999", marker="x", label=PRINTED)
        axes.set_xticks(published.CONCURRENCIES)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("concurrent requests")
        axes.set_ylabel("context switches per request")
        axes.grid(axis="y", color="#dddddd")
        axes.legend(frameon=False, fontsize=7, loc="upper left")
        text = svg(canvas, "x86-switches")
    caption = "Filled: mean of the runs; hollow: the runs themselves; dashed: as printed."
    return [Figure("x86-switches", "Context switches per request on x86-64", caption, text)]


def sentences(
    runs: Iterable[CollectedRun], measured: Measured, printed: Published
) -> tuple[str, ...]:
    """Section 3.7's paragraphs, made of what was found here; empty where nothing was run."""
    made = []
    growth = printed.arithmetic["x86_growth"]
    low, high = growth["from_concurrency"], growth["to_concurrency"]
    for one in series(runs, measured):
        cells = one.samples.get("switches_per_request", {})
        if low in cells and high in cells:
            times, _, over = _growth(cells[low], cells[high], growth["ratio"])
            made.append(
                f"On {one.name}: from {low} to {high} concurrent requests the server's context "
                f"switches per request go from {cells[low].mean:.1f} to {cells[high].mean:.1f}, "
                f"{times} times; printed is {growth['ratio']:g} times ({over} of it here)."
            )
        if avx := one.samples.get("avx_percent"):
            shares = [value for cell in avx.values() for value in cell.values]
            made.append(
                f"There, {min(shares):.2f} to {max(shares):.2f} % of the times that a thread came "
                "back to a CPU its saved state held AVX registers: else the code had cleared them "
                "(VZEROUPPER) and the kernel's XSAVES had left them out. So switches x XSAVE area "
                "says how much could be moved, not how much is."
            )
    for board, xstate in sorted(measured.xstate.items()):
        here = xstate["enabled_standard_bytes"]
        k1 = _save_bytes(printed, K1_VLEN_BITS)
        made.append(
            f"{board} ({xstate['cpu']['brand']}): XCR0 is {xstate['xcr0']}, its XSAVE area "
            f"{here} bytes, so one save of the K1's vector registers ({k1} bytes) is "
            f"{k1 / here:.2f} times that; printed is "
            f"{_printed_ratios(printed)[K1_VLEN_BITS, 'xsave_area_bytes']} times "
            f"{printed.arithmetic['x86_state']['xsave_area_bytes']} bytes."
        )
    for board, bench in sorted(measured.bench.items()):
        for found in marginals(bench, "cpu_ns"):
            made.append(
                f"On {board}, {found.mode} state ({found.state_bytes} bytes) adds {found} ns of CPU"
                f" time to a context switch of {found.switch:.0f} ns."
            )
    virtual = {
        bits: found
        for bits, bench in sorted(measured.virtual.items())
        for found in marginals(bench, "instructions")
    }
    if virtual:
        parts = ", ".join(f"{found} instructions at VLEN {bits}" for bits, found in virtual.items())
        made.append(
            f"On the virtual board V state adds {parts} to a context switch: what grows with VLEN"
            " are the bytes, not the instructions."
        )
    return tuple(made)


def show(folders: Sequence[Path], board: str) -> None:
    """Print tables and text for the runs of one board to standard output."""
    runs = in_order(
        collected(record, index)
        for folder in folders
        for index in [read_index(folder)]
        for record in read_records(folder)
        if record["cell"]["board"] == board
    )
    found = read_measured(folders)
    measured = Measured(
        {name: one for name, one in found.xstate.items() if name == board},
        {name: one for name, one in found.bench.items() if name == board},
        found.virtual,
    )
    printed = published.read()
    console = Console(highlight=False)
    for table in tables(runs, measured, printed):
        console.print(Text(table.markdown()), soft_wrap=True)
    for line in sentences(runs, measured, printed):
        console.print(Text(line), soft_wrap=True)

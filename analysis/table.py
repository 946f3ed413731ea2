"""The table at the end of a reproduction.

Promise: one line per experiment, board, model, policy (with variant and scope) and concurrency;
never a mean over different cells or over invalid runs; both values while there are two, mean ±
standard deviation from three.
On the virtual board every time is labelled virtual.  On anything but a terminal the table is plain
text.
Limit: a look, not a test: no claim is judged here.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.collect import CollectedRun, treatment

_P95_ENOUGH = 20
"""Below this many requests the nearest-rank 95th percentile is the largest value itself."""
_PLAIN_WIDTH = 200
_Group = tuple[str, str, str, str, str, int]


@dataclass(frozen=True)
class Expectation:
    """That each of `texts`, the answers of a run, contains `expected`."""

    run_id: str
    what: str
    expected: str
    texts: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Whether there is an answer and every answer contains the text."""
        return bool(self.texts) and all(self.expected in text for text in self.texts)


def print_table(
    runs: Iterable[CollectedRun],
    expectations: Sequence[Expectation],
    console: Console | None = None,
) -> None:
    """Print the runs that belong to an experiment, and the expectations, to standard output.

    Of a cell that was run validly several times the first run is shown: on a deterministic board
    the others say the same, and on a real one repetitions are seeds.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    groups: dict[_Group, list[CollectedRun]] = {}
    for run in runs:
        row = run.row
        for experiment in run.experiments:
            key = (
                experiment, row["board"], row["platform"], row["model"], treatment(row),
                row["concurrency"],
            )  # fmt: skip
            groups.setdefault(key, []).append(run)
    platforms = sorted({key[2] for key in groups})
    for platform in platforms:
        chosen = {key: group for key, group in groups.items() if key[2] == platform}
        console.print(_table(platform, chosen, plain=not console.is_terminal))
    for expectation in expectations:
        console.print(Text(_sentence(expectation)), soft_wrap=True)


def _table(platform: str, groups: dict[_Group, list[CollectedRun]], *, plain: bool) -> Table:
    virtual = "virtual " if platform == "virtual" else ""
    title = f"Times in {virtual.upper()}milliseconds"
    if virtual:
        title += ": the virtual board's own clock, not to be compared with a real board's"
    table = Table(title=title, title_justify="left", box=box.ASCII if plain else box.ROUNDED)
    for name in ("experiment", "board", "model", "policy"):
        table.add_column(name)
    for name in ("c", "n", "invalid"):
        table.add_column(name, justify="right")
    table.add_column(f"tokens per {virtual}s", justify="right")
    for name in ("mean TTFT", "p95 TTFT", "mean latency"):
        table.add_column(f"{name}, {virtual}ms", justify="right")
    for key in sorted(groups):
        experiment, board, _, model, policy, concurrency = key
        group = groups[key]
        # The runs come sorted by attempt, so that of each cell the first is kept.
        first = {run.cell_hash: run for run in reversed(group) if run.row["valid"]}
        valid = [run for run in group if first.get(run.cell_hash) is run]
        n_ok = min((run.n_ok for run in valid), default=0)
        mark = "" if not valid or n_ok >= _P95_ENOUGH else f" (n={n_ok}, near max)"
        table.add_row(
            experiment, board, model, policy, str(concurrency), str(len(valid)),
            str(sum(not run.row["valid"] for run in group)),
            _values(valid, "output_tps", "{:.3f}".format),
            _values(valid, "mean_ttft_ms", "{:.1f}".format),
            _values(valid, "p95_ttft_ms", "{:.1f}".format) + mark,
            _values(valid, "mean_latency_ms", "{:.1f}".format),
        )  # fmt: skip
    return table


def _values(runs: Sequence[CollectedRun], column: str, show: Callable[[float], str]) -> str:
    values = [run.row[column] for run in runs if run.row[column] is not None]
    if not values:
        return "-"
    if len(values) < 3:
        return " / ".join(map(show, values))
    return f"{show(statistics.fmean(values))} ± {show(statistics.stdev(values))}"


def _sentence(expectation: Expectation) -> str:
    head = f"{expectation.what}: expected an answer with {expectation.expected!r}"
    texts = ", ".join(map(repr, expectation.texts)) or "no answer"
    return f"{head}: {'met' if expectation.met else 'DIFFERS'}: got {texts}"

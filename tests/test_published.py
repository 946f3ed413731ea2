"""artifact/published against a second transcription, and what reading it refuses.

Promise: the strings below were typed from the report, not made from the data files; they are
compared digit by digit, trailing zeros included.  Every promised refusal of a broken copy is
provoked through the verb.
"""

import re
import shutil
from pathlib import Path

import pytest

from analysis.published import BASELINE, COOPERATIVE, PUBLISHED, Published, read
from toolchain.errors import InvalidData, UsageError

BOARD = [(2, BASELINE), (2, COOPERATIVE), (4, BASELINE), (4, COOPERATIVE), (8, BASELINE)]
BOARD.append((8, COOPERATIVE))

# Section 4.4: TPS | mean TTFT (ms) | P95 TTFT (ms) | mean latency (ms), mean and sd.
INFERENCE = """
5.520 0.200 | 9,370.05 388.90 | 10,140.80 268.89 | 23,209.24 856.10
6.051 0.068 | 8,744.57 107.49 | 9,489.83 179.89 | 21,152.89 237.85
6.372 0.056 | 17,319.37 290.36 | 20,043.88 213.49 | 40,172.44 356.21
7.075 0.104 | 16,838.28 940.65 | 18,382.83 204.90 | 36,183.45 533.86
6.531 0.166 | 32,998.84 2,573.12 | 39,409.94 1,351.26 | 78,383.69 1,988.03
7.343 0.163 | 28,869.49 5,054.16 | 35,125.13 1,170.70 | 69,691.70 1,486.19
"""
# Section 4.4: saves | save time (ms) | saves/s | switches of llama-server.
VSTATE = """
146,063 12,054 | 400.29 18.42 | 772.13 84.84 | 225,964 6,627
96,374 8,394 | 289.91 4.45 | 556.43 45.22 | 174,194 14,950
131,773 9,417 | 309.25 12.63 | 800.98 63.91 | 209,375 14,302
86,656 7,341 | 213.96 15.43 | 582.92 47.99 | 165,422 14,412
130,339 9,029 | 308.01 12.44 | 811.92 72.58 | 201,559 6,093
85,627 12,406 | 207.19 25.77 | 597.70 93.89 | 158,602 18,974
"""
# Section 3.7: TPS | mean TTFT | P95 TTFT | switches | involuntary | switches/request | KiB/request.
X86 = """
65.36 0.21 | 273.15 28.94 | 1014.34 84.57 | 1110.67 21.13 | 42.67 1.15 | 138.83 2.64 | 112.8 2.1
76.99 0.67 | 929.49 96.57 | 2018.51 83.53 | 2814.33 65.96 | 88.33 85.59 | 351.79 8.24 | 285.8 6.7
62.58 0.69 | 3372.80 330.57 | 4079.18 58.36 | 7067.33 433.30 | 45.33 5.03 | 883.42 54.16 | 717.8 44.0
"""  # noqa: E501
# Section 4.4, changes in %: TPS, mean TTFT, P95 TTFT, mean latency, saves, save time, switches.
CHANGES = """
+9.63 -6.68 -6.42 -8.86 -34.02 -27.57 -22.91
+11.03 -2.78 -8.29 -9.93 -34.24 -30.81 -20.99
+12.44 -12.51 -10.87 -11.09 -34.30 -32.73 -21.31
"""
COLUMNS = {
    "inference": ["output_tps", "mean_ttft_ms", "p95_ttft_ms", "mean_latency_ms"],
    "vstate": ["save_count", "save_total_ms", "saves_per_s", "context_switches"],
    "x86": [
        "output_tps",
        "mean_ttft_ms",
        "p95_ttft_ms",
        "context_switches",
        "involuntary_switches",
        "switches_per_request",
        "xstate_per_request_kib",
    ],
}


@pytest.fixture(scope="module")
def published() -> Published:
    return read()


@pytest.mark.parametrize(
    ("name", "typed", "keys"),
    [
        ("inference", INFERENCE, BOARD),
        ("vstate", VSTATE, BOARD),
        ("x86", X86, [(2, BASELINE), (4, BASELINE), (8, BASELINE)]),
    ],
)
def test_tables_digit_by_digit(
    name: str, typed: str, keys: list[tuple[int, str]], published: Published
) -> None:
    table = published.tables[name]
    lines = typed.strip().splitlines()
    assert len(lines) == len(keys)
    for line, (c, policy) in zip(lines, keys, strict=True):
        pairs = [pair.split() for pair in line.replace(",", "").split("|")]
        assert len(pairs) == len(COLUMNS[name]) == len(table.columns)
        for metric, (mean, sd) in zip(COLUMNS[name], pairs, strict=True):
            cell = table.cell(metric, policy, c)
            assert (cell.mean.text, cell.sd.text, cell.n) == (mean, sd, 3), (metric, policy, c)


def test_changes_digit_by_digit(published: Published) -> None:
    metrics = [*COLUMNS["inference"], "save_count", "save_total_ms", "context_switches"]
    for c, line in zip((2, 4, 8), CHANGES.strip().splitlines(), strict=True):
        (row,) = [r for r in published.improvements["rows"] if r["concurrency"] == c]
        found = [f"{row['change_percent'][metric]:+.2f}" for metric in metrics]
        assert found == line.split()


def test_units_sections_and_signs(published: Published) -> None:
    units = {
        name: [(metric, table.columns[metric].unit) for metric in COLUMNS[name]]
        for name, table in published.tables.items()
    }
    assert dict(units["inference"]) == {
        "output_tps": "token/s",
        "mean_ttft_ms": "ms",
        "p95_ttft_ms": "ms",
        "mean_latency_ms": "ms",
    }
    assert [unit for _, unit in units["vstate"]] == ["saves", "ms", "saves/s", "switches"]
    assert [unit for _, unit in units["x86"][3:]] == [
        "switches",
        "switches",
        "switches/request",
        "KiB/request",
    ]
    sections = {name: table.section for name, table in published.tables.items()}
    assert sections == {"inference": "4.4", "vstate": "4.4", "x86": "3.7"}
    better = {
        m for t in published.tables.values() for m, c in t.columns.items() if c.higher_is_better
    }
    assert better == {"output_tps"}


def test_numbers_that_the_text_repeats(published: Published) -> None:
    """Sections 4.4 and 4.5, and 3.7, in the order of the text."""
    quoted = [
        (item["section"], item["concurrency"], item["metric"], item["change_percent"])
        for item in published.improvements["quoted"]
    ]
    assert quoted == [
        ("4.4", 2, "output_tps", 9.63),
        ("4.4", 8, "output_tps", 12.44),
        ("4.4", 2, "p95_ttft_ms", -6.42),
        ("4.4", 8, "p95_ttft_ms", -10.87),
        ("4.4", 2, "save_total_ms", -27.57),
        ("4.4", 8, "save_total_ms", -32.73),
        ("4.5", 8, "save_count", -34.3),
        ("4.5", 8, "save_total_ms", -32.7),
        ("4.5", 8, "output_tps", 12.4),
        ("4.5", 8, "mean_ttft_ms", -12.5),
        ("4.5", 8, "p95_ttft_ms", -10.9),
    ]
    x86 = [
        (item["metric"], item["concurrency"], item["value"])
        for item in published.arithmetic["x86_quoted"]
    ]
    assert x86 == [
        ("context_switches", 2, 1111),
        ("context_switches", 8, 7067),
        ("switches_per_request", 2, 138.83),
        ("switches_per_request", 8, 883.42),
        ("xstate_per_request_kib", 2, 112.8),
        ("xstate_per_request_kib", 8, 717.8),
    ]
    assert published.arithmetic["x86_growth"]["ratio"] == 6.36


def test_arithmetic_of_a_save(published: Published) -> None:
    numbers = published.arithmetic
    assert [(i["vlen_bits"], i["bytes"]) for i in numbers["save_bytes"]] == [
        (128, 512),
        (256, 1024),
        (512, 2048),
        (1024, 4096),
    ]
    assert numbers["x86_state"]["xsave_area_bytes"] == 832
    assert numbers["x86_state"]["avx_component_bytes"] == 256
    assert [(i["vlen_bits"], i["ratio"]) for i in numbers["state_ratios"]] == [
        (256, 1.23),
        (256, 4),
        (512, 2.46),
        (1024, 4.92),
    ]


CONDITIONS = {
    "threads": {"3.5": "4", "3.7": "4", "4.2": "8", "4.4": "8", "README": "8"},
    "threads-batch": {"3.5": "4", "3.7": "4", "4.2": "8", "README": "8"},
    "context": {"3.5": "1024", "3.7": "1024", "4.2": "4096", "4.4": "4096", "README": "4096"},
    "requests": {"4.2": "16", "4.4": "16", "README": "16"},
    "output-limit": {"3.7": "64", "4.2": "64", "README": "64"},
    "hint-abi": {"3.4": "2", "README": "3"},
    "prompt-unit": {"3.6": "words", "4.2": "words", "4.4": "tokens", "README": "words"},
    "vector-slice": {},
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name: str, published: Published) -> None:
    (item,) = [i for i in published.conditions["parameters"] if i["id"] == name]
    assert {s["section"]: s["value"] for s in item["stated"]} == CONDITIONS[name]


def test_statements_are_english_and_placed(published: Published) -> None:
    statements = published.statements["statements"]
    assert len(statements) >= 25
    for item in statements:
        assert item["text"].isascii()
        assert item["text"].endswith(".")
        assert re.fullmatch(r"[1-5](\.\d)+", item["section"])


REFUSED = [
    ("inference.toml", "mean = 5.520, sd", "mean = nan, sd", "output_tps.mean: found nan"),
    ("inference.toml", "mean = 5.520, sd", "mean = inf, sd", "expected a finite number"),
    ("inference.toml", "mean = 5.520, sd", "mean = -5.520, sd", "found -5.52"),
    ("inference.toml", "sd = 0.200", "sd = 0", "sd: found 0"),
    ("inference.toml", "mean = 5.520", "mean = '5.520'", 'found "5.520", expected number'),
    ("inference.toml", "mean = 5.520", "mean = 5.5204", "found 5.5204, expected at most 3"),
    ("inference.toml", "mean = 5.520, sd", "mean = 5.520, mean = 5.520, sd", "not the TOML"),
    ("inference.toml", "p95_ttft_ms = { mean = 10", "p95_tfft_ms = { mean = 10", "p95_tfft_ms"),
    ("inference.toml", 'mean_latency_ms = { unit = "ms"', 'mean_latency_ms = { unit = "s"', '"ms"'),
    ("inference.toml", 'schema_version = "1"', 'schema_version = "2"', "schema_version"),
    ("inference.toml", 'id = "inference"', 'id = "vstate"', "expected 'inference'"),
    ("inference.toml", "runs_per_cell = 3", "runs_per_cell = 1", "runs_per_cell: found 1"),
    ("inference.toml", "concurrency = 8", "concurrency = 2", "baseline at c = 2 stands twice"),
    ("inference.toml", 'policy = "cooperative"', 'policy = "vhot"', 'found "vhot"'),
    ("inference.toml", "output_tps = { mean = 5.520, sd = 0.200 }\n", "", "missing column output"),
    ("vstate.toml", "save_count = { mean = 146063", "save_count = { mean = 146063.5", "0 decimals"),
    ("improvements.toml", 'unit = "%"', 'unit = "1"', 'expected "%"'),
    ("improvements.toml", "mean_ttft_ms = -6.68, ", "", 'missing "mean_ttft_ms"'),
    ("improvements.toml", "concurrency = 4\nchange", "concurrency = 2\nchange", "stands twice"),
    ("arithmetic.toml", "vlen_bits = 1024\nover", "vlen_bits = 64\nover", "found 64"),
    ("arithmetic.toml", "vlen_bits = 512\nbytes", "vlen_bits = 128\nbytes", "128 stands twice"),
    ("conditions.toml", 'id = "vlen"', 'id = "kernel"', "kernel stands twice"),
    ("conditions.toml", 'unit = "bit"', 'unit = "byte"', 'found "byte"'),
    ("conditions.toml", '"4.2", value = "16"', '"4.2", value = "many"', "expected an integer"),
    ("conditions.toml", '{ section = "4.2", value = "64" },\n', "", "for section 4.2"),
    ("statements.toml", 'lacks = "number"', 'lacks = "numbers"', 'found "numbers"'),
    ("statements.toml", '"save-bytes/128"', '"save-bytes/127"', "no finding save-bytes/127"),
    ("statements.toml", 'id = "tail"', 'id = "grows"', "grows stands twice"),
    ("rules.toml", 'metric = "save_count"', 'metric = "output_tps"', "vstate has no output_tps"),
    ("rules.toml", "alpha = 0.05", "alpha = 5", "found 5"),
    ("rules.toml", "[tolerances]", "[tolerance]", "did you mean"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "says"), REFUSED)
def test_broken_copies_are_refused(
    file: str, old: str, new: str, says: str, tmp_path: Path
) -> None:
    from analysis.audit.run import check

    copy = Path(shutil.copytree(PUBLISHED, tmp_path / "copy"))
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InvalidData) as caught:
        check(tmp_path / "out.json", copy, accept=False)
    assert file in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("file", sorted(path.name for path in PUBLISHED.iterdir()))
def test_missing_and_truncated_files_are_refused(file: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PUBLISHED, tmp_path / "copy"))
    text = (copy / file).read_bytes()
    (copy / file).write_bytes(text[: len(text) * 2 // 3])
    with pytest.raises(InvalidData, match=re.escape(file)):
        read(copy)
    (copy / file).unlink()
    with pytest.raises(InvalidData, match=rf"{re.escape(file)}: cannot be read"):
        read(copy)


def test_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    from analysis.audit.run import check

    with pytest.raises(
        UsageError, match=r"--tables .*none: no such folder, expected one with"
    ) as e:
        check(tmp_path / "out.json", tmp_path / "none", accept=False)
    assert e.value.exit_code == 2
    assert not (tmp_path / "out.json").exists()


def test_only_what_is_read_lies_there() -> None:
    found = " ".join(sorted(path.stem for path in PUBLISHED.iterdir()))
    assert found == "arithmetic conditions improvements inference rules statements vstate x86"

"""Cells: what goes in, what is refused before anything is built, what their identity depends on."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
from fake_board import EXPERIMENTS, FakeBoard, definitions

import schemas
from board import models
from board.cell import SHAPES, Definitions, Overrides, Plan, plan_experiments, plan_run
from board.virtual import machine
from schemas.record import cell_hash, run_id
from toolchain.errors import ArtifactError, InvalidData, UsageError

CELL: dict[str, Any] = {
    "schema_version": "1",
    "board": "virtual",
    "model": "banana-tiny",
    "policy": "baseline",
    "scope": None,
    "variant": None,
    "scheduling": {
        "scheduler": None,
        "base_slice_ns": None,
        "cpuset": None,
        "pinned_threads": 0,
        "harts_first": False,
        "environment": {},
    },
    "bystanders": 0,
    "concurrency": 2,
    "seed": 1,
    "load": {
        "mode": "closed",
        "requests": 8,
        "warmup_requests": 1,
        "prompt_words": 48,
        "prompt": None,
        "max_tokens": 16,
        "seed": 1,
    },
    "server": {"flags": ["--threads", "8"]},
    "machine": {
        "harts": 8,
        "parked_harts": 24,
        "vlen_bits": 256,
        "memory_mib": 1024,
        "icount_shift": 3,
        "quantum_us": 100,
        "cpu": "rv64",
        "append": "nohlt",
    },
    "instruments": [],
    "inputs": dict.fromkeys(
        ("kernel", "initramfs", "llama_server", "model", "agent", "qemu", "quantum"), "0" * 64
    ),
}


def plan(tmp_path: Path, overrides: Overrides, board: FakeBoard | None = None) -> Plan:
    return plan_run(definitions(tmp_path), overrides, board or FakeBoard())


def test_identity_is_pinned() -> None:
    schemas.check(CELL, "cell")
    # sha256sum of the canonical spelling, made with another tool: jq -cS and sha256sum.
    assert cell_hash(CELL) == "d3f172c36d9f"
    assert run_id(CELL, 12) == "d3f172c36d9f-12"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("seed",), 2),
        (("server", "flags"), ["--threads", "7"]),
        (("inputs", "kernel"), "1" * 64),
        (("inputs", "model"), "1" * 64),
        (("machine", "quantum_us"), 200),
        (("load", "max_tokens"), 17),
        (("instruments",), ["truth"]),
    ],
)
def test_identity_depends_on_everything(path: tuple[str, ...], value: object) -> None:
    other = copy.deepcopy(CELL)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    schemas.check(other, "cell")
    assert cell_hash(other) != cell_hash(CELL)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"load": CELL["load"] | {"prompt": "x"}}, "$.load.prompt_words: found 48, expected null"),
        ({"load": CELL["load"] | {"prompt_words": None}}, "$.load.prompt_words: found null"),
        ({"seed": 1.0}, "$.seed: found 1.0, expected integer"),
        ({"seed": 2**32 - 1}, "$.seed"),
        ({"policy": "vhott"}, "$.policy"),
        ({"inputs": dict.fromkeys(("llama_server", "model", "agent"), "0" * 64)}, '"kernel"'),
    ],
)
def test_impossible_cells_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidData) as caught:
        schemas.check(CELL | change, "cell")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "means"),
    [("none", []), ("truth", ["truth"]), ("truth,observer", ["observer", "truth"])],
)
def test_instruments_may_be_chosen(tmp_path: Path, typed: str, means: list[str]) -> None:
    assert plan(tmp_path, Overrides(instruments=typed)).cell["instruments"] == means


@pytest.mark.parametrize("typed", ["", "all", "observer,", "observer truth"])
def test_unknown_instruments_are_refused(tmp_path: Path, typed: str) -> None:
    with pytest.raises(UsageError, match="expected none, or some of observer,profiler,truth"):
        plan(tmp_path, Overrides(instruments=typed))


def test_default_run(tmp_path: Path) -> None:
    got = plan(tmp_path, Overrides())
    flags = got.cell["server"]["flags"]
    words = dict(itertools.pairwise(flags))
    assert words["--threads"] == "4"
    assert words["--threads-batch"] == "8"
    assert words["--parallel"] == "2"
    assert words["--ctx-size"] == "200"  # 100 for each of 2 slots
    assert words["--poll"] == "50"
    assert "--no-kv-unified" in flags
    assert "True" not in flags
    assert not any("{" in word for word in flags)
    assert got.cell["load"] == CELL["load"]
    assert got.experiment is None
    assert got.deadline_s == 60
    assert got.what == "banana-tiny baseline c=2 seed=1"


def test_overrides(tmp_path: Path) -> None:
    overrides = Overrides(concurrency="8", seed="0", model="smollm2", vlen="512")
    cell = plan(tmp_path, overrides).cell
    assert (cell["concurrency"], cell["seed"], cell["load"]["seed"]) == (8, 0, 0)
    assert cell["model"] == "smollm2"
    assert cell["machine"]["vlen_bits"] == 512
    flags = cell["server"]["flags"]
    assert flags[flags.index("--ctx-size") + 1] == "800"


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        (Overrides(model="llama"), UsageError, "--model llama: no such model; known: banana-tiny"),
        (Overrides(model=""), UsageError, "no such model"),
        (Overrides(seed=-1), UsageError, "--seed -1: expected an integer from 0 to 4294967294"),
        (Overrides(seed="1.5"), UsageError, "--seed 1.5: expected an integer"),
        (Overrides(seed="x"), UsageError, "--seed x"),
        (Overrides(seed="1_0"), UsageError, "--seed 1_0"),
        (Overrides(seed="٣"), UsageError, "--seed ٣"),
        (Overrides(seed="9" * 5000), UsageError, "--seed 9999"),
        (Overrides(seed=4294967295), UsageError, "--seed 4294967295"),
        (Overrides(concurrency=0), UsageError, "--concurrency 0: expected an integer from 1 to 16"),
        (Overrides(concurrency="17"), UsageError, "--concurrency 17"),
        (Overrides(vlen="64"), UsageError, "--vlen 64: expected one of 128, 256, 512, 1024 (bits)"),
        (Overrides(vlen="wide"), UsageError, "--vlen wide"),
        (Overrides(policy="fast"), UsageError, "--policy fast: no such policy; known: baseline, "),
        (
            Overrides(scope="all"),
            UsageError,
            "baseline is the kernel's own scheduler, which has no",
        ),
        (
            Overrides(policy="vhot", scope="most"),
            UsageError,
            "--scope most: expected partial or all",
        ),
        (Overrides(variant="faithful"), UsageError, "no such variant; it has none"),
        (
            Overrides(policy="vhot", variant="no-hints"),
            UsageError,
            "--variant no-hints: vhot has no such variant; known: any-dirty, no-defer, ",
        ),
        (Overrides(bystanders=-1), UsageError, "--bystanders -1: expected an integer from 0 to 64"),
    ],
)
def test_bad_values_are_refused_before_anything_is_built(
    tmp_path: Path, overrides: Overrides, error: type[ArtifactError], says: str
) -> None:
    board = FakeBoard()
    with pytest.raises(error) as caught:
        plan(tmp_path, overrides, board)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert board.prepared == []


def test_experiment_is_every_combination(tmp_path: Path) -> None:
    text = EXPERIMENTS.replace("concurrencies = [2]", "concurrencies = [2, 4]")
    board = FakeBoard()
    plans = plan_experiments(definitions(tmp_path, text), ["E0"], board)
    got = [(p.cell["model"], p.cell["concurrency"], p.cell["seed"]) for p in plans]
    assert got == [
        ("banana-tiny", 2, 1),
        ("banana-tiny", 2, 2),
        ("banana-tiny", 4, 1),
        ("banana-tiny", 4, 2),
        ("smollm2", 1, 1),
    ]
    assert board.prepared == ["banana-tiny", "smollm2"]  # once each
    assert plans[-1].cell["load"]["prompt"] == "The capital of France is"
    assert plans[-1].cell["load"]["prompt_words"] is None
    assert plans[-1].expect_text == "Paris"
    assert plans[0].expect_text is None


def test_choosing_experiments(tmp_path: Path) -> None:
    known = definitions(tmp_path)
    assert known.chosen([], full=False) == ["E0"]
    assert known.chosen([], full=True) == ["E0", "E9"]
    assert known.chosen(["E9", "E9"], full=False) == ["E9"]
    with pytest.raises(UsageError, match="--experiment E1: no such experiment; known: E0, E9"):
        known.chosen(["E0", "E1"], full=False)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('load = "france"', 'load = "spain"', "experiments.E0.parts[1].load: no such load 'spain'"),
        (
            'server = "small"\ninstruments = []\ndeadline_s = 60\ncost = { cpu_s = 90',
            'server = "x"\ninstruments = []\ndeadline_s = 60\ncost = { cpu_s = 90',
            "experiments.E0.parts[1].server: no such server 'x'",
        ),
        ('model = "smollm2"', 'model = "smol"', "no such model 'smol'; known: banana-tiny"),
        ('expect_text = "Paris"', 'expect_txt = "Paris"', 'did you mean "expect_text"?'),
        ("poll = 50", "poll = 50\npol = 1", 'unknown key "pol" (did you mean "poll"?)'),
        ("prompt_words = 48", 'prompt_words = 48\nprompt = "x"', "loads.short"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "non-unique"),
        ("seeds = [1, 2]", "seeds = []", "parts[0].seeds"),
        ("seeds = [1, 2]", 'seeds = [1, 2]\nscopes = ["all"]', "no policy of the part has a scope"),
        (
            "seeds = [1, 2]",
            'seeds = [1, 2]\nvariants = ["faithful"]',
            "no policy of the part has a variant 'faithful'",
        ),
        ("seeds = [1, 2]", "seeds = [1, 2]\nmachine = { harts = 4 }", 'unknown key "harts"'),
        ('schema_version = "1"', 'schema_version = "0"', "reads and writes"),
    ],
)  # fmt: skip
def test_bad_experiments_are_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert EXPERIMENTS.count(old) == 1
    with pytest.raises(InvalidData) as caught:
        definitions(tmp_path, EXPERIMENTS.replace(old, new))
    assert "experiments.toml" in str(caught.value)
    assert says in str(caught.value)


def test_unknown_placeholder_is_refused(tmp_path: Path) -> None:
    server = tmp_path / "server.toml"
    server.write_text('[flags]\n"--threads" = "{treads}"\n', encoding="utf-8")
    experiments = tmp_path / "experiments.toml"
    experiments.write_text(EXPERIMENTS, encoding="utf-8")
    bad = Definitions.read(experiments=experiments, server=server)
    with pytest.raises(InvalidData, match=r"--threads: found '\{treads\}'"):
        plan_run(bad, Overrides(), FakeBoard())


def test_a_part_can_ask_for_another_machine(tmp_path: Path) -> None:
    other = EXPERIMENTS.replace(
        "seeds = [1, 2]",
        "seeds = [1, 2]\nmachine = { quantum_us = 250, icount_shift = 2 }\nvlens = [128, 512]",
    )
    plans = plan_experiments(definitions(tmp_path, other), ["E0"], FakeBoard())
    machines = [p.cell["machine"] for p in plans if p.cell["model"] == "banana-tiny"]
    assert {(m["quantum_us"], m["icount_shift"], m["vlen_bits"]) for m in machines} == {
        (250, 2, 128), (250, 2, 512)}  # fmt: skip


def test_own_experiments_can_be_planned() -> None:
    own = Definitions.read()
    plans = plan_experiments(own, own.chosen([], full=True), FakeBoard())
    for name in own.experiments["experiments"]:
        hashes = [p.hash for p in plans if p.experiment == name]
        assert len(set(hashes)) == len(hashes), name
    shapes = {f"qwen-{size}-shape" for size in ("0.5b", "1.5b", "3b")}
    assert {p.cell["model"] for p in plans} == {"banana-tiny", "banana-small", "smollm2", *shapes}
    assert plan_run(own, Overrides(), FakeBoard()).hash == plans[0].hash


# --- the files of the models and of the machine --------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers = 4", "layer = 4", 'unknown key "layer" (did you mean "layers"?)'),
        ("layers = 4\n", "", "at $.shapes['banana-tiny']: missing"),
        ("layers = 4", "layers = 0", "$.shapes['banana-tiny'].layers: found 0"),
        ("[shapes.banana-tiny]", "[shapes.Banana]", "Banana"),
        ("[vocabulary]", "[vocabularies]", 'did you mean "vocabulary"?'),
        ("[vocabulary]", "[vocabulary", "not the TOML of a shapes file"),
    ],
)
def test_a_damaged_file_of_shapes_is_one_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    shapes = tmp_path / "shapes.toml"
    shapes.write_text(SHAPES.read_text().replace(old, new, 1))
    with pytest.raises(InvalidData) as caught:
        Definitions.read(shapes=shapes)
    assert says in str(caught.value)
    assert "shapes.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_the_models_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidData, match=r"shapes.toml: cannot be read: No such file"):
        Definitions.read(shapes=tmp_path / "shapes.toml")
    monkeypatch.setattr(models, "DATA", (tmp_path / "words.txt",))
    with pytest.raises(InvalidData, match=r"words.txt: cannot read: .*; restore it from git"):
        models.inputs("banana-tiny")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_mib =", "memory_mb =", 'unknown key "memory_mb" (did you mean "memory_mib"?)'),
        ("icount_shift = 3", "icount_shift = 11", "found 11: 11 is greater than the maximum of 10"),
        ("harts = 8\n", "", 'at $.machine: missing "harts"'),
        ("[limits]", "[limit]", 'unknown key "limit" (did you mean "limits"?)'),
        ("burn_threads = [1, 2, 4, 8]", "burn_threads = [2, 4]", "1 must be among them"),
        ("[machine]", "[machine", "not the TOML of a machine file"),
    ],
)
def test_a_damaged_file_of_the_machine_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, says: str
) -> None:
    damaged = tmp_path / "machine.toml"
    damaged.write_text(machine.MACHINE.read_text().replace(old, new, 1))
    monkeypatch.setattr(machine, "MACHINE", damaged)
    with pytest.raises(InvalidData) as caught:
        machine.default_machine({"vlen_bits": 128})
    assert says in str(caught.value)
    assert "machine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("icount_shift", 99, "the machine's icount_shift: found 99: 99 is greater than .* 10 "),
        ("icount_shift", -1, "the machine's icount_shift: found -1: -1 is less than .* of 0 "),
        ("quantum_us", -5, "the machine's quantum_us: found -5: -5 is less than .* of 1 "),
        ("quantum_us", 0, "the machine's quantum_us: found 0: 0 is less than .* of 1 "),
        ("quantum_us", 2**32, "the machine's quantum_us: found 4294967296: .* greater"),
        ("parked_harts", -1, "the machine's parked_harts: found -1"),
        ("memory_mib", 0, "the machine's memory_mib: found 0"),
        ("vlen_bits", 64, "vlen_bits=64: expected one of 128, 256, 512, 1024"),
        ("cpu", 1, "machine has no number 'cpu' to override"),
    ],
)
def test_what_the_emulator_would_refuse_is_refused_before(name: str, value: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        machine.default_machine({name: value})


def test_the_limits_of_the_machine_may_be_used() -> None:
    for name, value in (("icount_shift", 0), ("icount_shift", 10), ("quantum_us", 2**32 - 1)):
        assert machine.default_machine({name: value}).as_cell()[name] == value

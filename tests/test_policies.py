"""Policies: what each one sets, that it is proved or the run invalid, that the hints add up."""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_board import FakeBoard, agent, definitions, good, loadgen

import schemas
from board.agent.scheduler import arguments, objections
from board.agent.server_counts import parse
from board.cell import Definitions, Overrides, plan_experiments, plan_run
from board.phase_tokens import phase_tokens
from board.policies import POLICIES, Policies
from board.runner import run_one
from schemas.record import read_record
from toolchain.errors import InvalidData

NAMES = ("baseline", "baseline-long", "affinity", "long-slice", "vhot", "cooperative")


def scheduling(policy: str, scope: str | None = None, variant: str | None = None) -> dict[str, Any]:
    return Policies.read().scheduling(policy, scope, variant)


def cell(tmp_path: Path, **overrides: Any) -> Mapping[str, Any]:
    return plan_run(definitions(tmp_path), Overrides(**overrides), FakeBoard()).cell


# ---- what is set


@pytest.mark.parametrize("policy", NAMES)
def test_each_policy_is_a_cell_with_every_default(tmp_path: Path, policy: str) -> None:
    got = cell(tmp_path, policy=policy)
    settings = got["scheduling"]["scheduler"]
    if policy in ("long-slice", "vhot", "cooperative"):
        assert (got["scope"], settings["policy"], settings["scope"]) == ("all", policy, "all")
        assert got["inputs"]["scheduler"]
        knobs = schemas.schema("scheduler")["properties"]["knobs"]["required"]
        assert sorted(settings["knobs"]) == sorted(knobs)
        assert cell(tmp_path, policy=policy, scope="partial") != got
    else:
        assert got["scope"] is settings is None
        assert "scheduler" not in got["inputs"]


def test_what_makes_the_policies_differ(tmp_path: Path) -> None:
    by_policy = {policy: cell(tmp_path, policy=policy) for policy in NAMES}
    for policy, one in by_policy.items():
        told = one["scheduling"]["environment"].get("LLAMA_VSTATE_PHASE_HINTS")
        assert told == ("1" if policy == "cooperative" else None)
        pinned = "--cpu-range" in one["server"]["flags"]
        assert pinned is (policy == "affinity") is bool(one["scheduling"]["pinned_threads"])
    flags = by_policy["affinity"]["server"]["flags"]
    assert flags.count("--cpu-strict") == 1
    assert flags[flags.index("--cpu-strict") + 1] == "1"
    # The control's turns are as long as those of the policy that it is the control for.
    knobs = by_policy["long-slice"]["scheduling"]["scheduler"]["knobs"]
    assert by_policy["baseline-long"]["scheduling"]["base_slice_ns"] == knobs["vector_ms"] * 10**6


def test_a_variant_changes_what_it_says_and_nothing_else() -> None:
    policies = Policies.read()
    for policy in NAMES:
        for name in policies.variants_of(policy):
            variant = policies.content["variants"][name]
            plain, changed = (scheduling(policy, "all", v)["scheduler"] for v in (None, name))
            different = {k for k in plain["knobs"] if plain["knobs"][k] != changed["knobs"][k]}
            rule = {"rule"} if policy in variant.get("rules", {}) else set()
            assert different <= variant["knobs"].keys() | rule
            assert different, f"{policy} {name} changes nothing"


def _defaults_by_policy(source: str) -> dict[str, dict[tuple[int, str], str]]:
    """Of knobs.c: knob -> (mode, policy) -> its default, for those that follow the policy."""
    policies = ("long-slice", "vhot", "cooperative")
    found: dict[str, dict[tuple[int, str], str]] = {}
    for knob in ("rule", "hints", "sticky"):
        (body,) = re.findall(rf"default_{knob}\[[^=]*= (\{{.*?\}});", source, re.DOTALL)
        words = [
            ("off", "on")[int(word)] if word.isdigit()
            else word.removeprefix(f"VSTATE_{knob.upper()}_").lower().replace("_", "-")
            for word in re.findall(r"\w+", body)
        ]  # fmt: skip
        modes = len(words) // len(policies)
        found[knob] = {
            (mode, policy): words[place * modes + mode % modes]
            for place, policy in enumerate(policies)
            for mode in range(2)
        }
    return found


def test_the_faithful_variant_is_what_the_loader_calls_faithful(repo: Path) -> None:
    """The modes of knobs.c, by its own table, against the whole sets of policies.toml."""
    source = (repo / "sched_ext" / "knobs.c").read_text()
    table = re.findall(
        r'\[KNOB_\w+\] = \{"([a-z-]+)", (\w+), \d+, [\d <]+, \{(\d+), (\d+)\}', source
    )
    assert len(table) == len(schemas.schema("scheduler")["properties"]["knobs"]["required"])
    by_policy = _defaults_by_policy(source)
    choices = {
        name: re.findall(r'"([a-z-]+)"', body)
        for name, body in re.findall(r"(\w+)\[\] = \{([^}]*)NULL\}", source)
    }
    for policy in ("long-slice", "vhot", "cooperative"):
        for place, variant in enumerate(("faithful", None)):
            settings = scheduling(policy, "all", variant)["scheduler"]
            assert settings["mode"] == ("faithful", "revised")[place]
            for row in table:
                name, names, value = row[0], row[1], int(row[2 + place])
                if name == "interval-ms":
                    continue
                expected = choices[names][value] if names in choices else value
                if name in by_policy:
                    expected = by_policy[name][place, policy]
                assert settings["knobs"][name.replace("-", "_")] == expected, (policy, name)


def test_arguments_are_whole_words() -> None:
    words = arguments(scheduling("cooperative", "partial")["scheduler"])
    assert words[:3] == ["--policy=cooperative", "--mode=revised", "--scope=partial"]
    assert "--boost-limit-ms=20" in words
    assert len(words) == 3 + len(schemas.schema("scheduler")["properties"]["knobs"]["required"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('knobs = { hints = "on"', "knobs = { hint = 1", "no such knob 'hint'; known: rule"),
        (
            'knobs = { sticky = "off" }',
            "knobs = { stick = 1 }",
            "variants.no-sticky.knobs: no such",
        ),
        ("[policies.vhot]", "[policies.hot]", "hot"),
        ("decay_ms = 200", "decay_ms = 0", "decay_ms: found 0"),
    ],
)
def test_bad_policies_are_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = POLICIES.read_text()
    assert text.count(old) == 1
    path = tmp_path / "policies.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(InvalidData) as caught:
        Policies.read(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_a_part_is_every_scope_and_variant_where_it_applies() -> None:
    part = """
[[experiments.E9.parts]]
model = "banana-tiny"
policies = ["baseline", "vhot"]
scopes = ["partial", "all"]
concurrencies = [2]
seeds = [1]
load = "short"
server = "small"
instruments = []
bystanders = 1
deadline_s = 60
cost = { cpu_s = 30, disk_mib = 1 }
"""
    own = Definitions.read()
    assert [(p, own.policies.has_scope(p)) for p in ("baseline", "vhot")] == [
        ("baseline", False),
        ("vhot", True),
    ]
    import tomllib

    parts = tomllib.loads(part)["experiments"]["E9"]["parts"]
    for change, expected in (
        ({}, [("baseline", None, None), ("vhot", "partial", None), ("vhot", "all", None)]),
        (
            {"scopes": ["all"], "variants": ["faithful", "no-hints"]},
            [("vhot", "all", "faithful")],
        ),
    ):
        experiments = copy.deepcopy(dict(own.experiments))
        experiments["servers"]["small"] = experiments["servers"]["all-harts"]
        experiments["experiments"]["E9"] = {"parts": [parts[0] | change]}
        known = Definitions(own.path, experiments, own.flags, own.models, own.policies)
        plans = plan_experiments(known, ["E9"], FakeBoard())
        got = [(p.cell["policy"], p.cell["scope"], p.cell["variant"]) for p in plans]
        assert got == expected
        assert {plan.cell["bystanders"] for plan in plans} == {1}
        assert all("bystander" in plan.cell["inputs"] for plan in plans)


# ---- whether it was in force

OFF = {"state": "disabled", "ops": None, "enable_seq": 0, "switch_all": 0, "base_slice_ns": 2}
OFF_AGAIN = OFF | {"enable_seq": 1}
ON = OFF_AGAIN | {"state": "enabled", "ops": "vstate", "switch_all": 1, "cpuset": None}
AT_REST = OFF | {"cpuset": None}
LONG = AT_REST | {"base_slice_ns": 50_000_000}
FAIR = {"policy": 0, "in_sched_ext": False, "harts": "0-7"}
EXT = {"policy": 0, "in_sched_ext": True, "harts": "0-7"}


def states(before: Any, opened: Any, closed: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "opened": opened, "closed": closed, "after": after}


UNDER_SCX = states(OFF, ON, ON, OFF_AGAIN)
UNDER_NONE = states(OFF, AT_REST, AT_REST, OFF)


@pytest.mark.parametrize(
    ("policy", "seen", "threads", "reasons"),
    [
        ("vhot", UNDER_SCX, [EXT], []),
        ("vhot", states(OFF, None, None, OFF_AGAIN), [], []),
        ("vhot", states(OFF, ON, AT_REST | {"enable_seq": 1}, OFF_AGAIN), [EXT],
         ["scheduler-not-active"]),
        ("vhot", states(OFF, ON, ON | {"ops": "simple"}, OFF_AGAIN), [EXT],
         ["scheduler-not-active"]),
        ("vhot", states(OFF, ON, ON | {"switch_all": 0}, OFF_AGAIN), [EXT],
         ["scheduler-not-active"]),
        ("vhot", states(OFF, ON, ON | {"enable_seq": 2}, OFF_AGAIN), [EXT], ["scheduler-changed"]),
        ("vhot", states(OFF, ON, ON, ON), [EXT], ["scheduler-left"]),
        ("vhot", UNDER_SCX, [EXT, FAIR], ["thread-not-in-class"]),
        ("vhot", UNDER_SCX, [EXT | {"in_sched_ext": None}], ["thread-not-in-class"]),
        ("vhot", UNDER_SCX, [EXT | {"in_sched_ext": None, "policy": 7}], []),
        ("baseline", UNDER_NONE, [FAIR], []),
        ("baseline", UNDER_NONE, [EXT], ["thread-in-class"]),
        ("baseline", UNDER_NONE, [FAIR | {"harts": "3"}], ["affinity-not-set"]),
        ("baseline", UNDER_SCX, [FAIR], ["scheduler-active", "scheduler-changed"]),
        ("baseline", states(OFF, AT_REST, AT_REST, OFF_AGAIN), [FAIR], ["scheduler-changed"]),
        ("baseline", states(OFF, AT_REST, AT_REST, OFF | {"base_slice_ns": 3}), [FAIR], []),
        ("baseline-long", states(OFF, LONG, LONG, OFF | {"base_slice_ns": 50_000_000}), [FAIR],
         ["base-slice-left"]),
        ("baseline", states(OFF, AT_REST, AT_REST | {"cpuset": "0-7"}, OFF), [FAIR],
         ["cpuset-not-set"]),
        ("baseline-long", UNDER_NONE, [FAIR], ["base-slice-not-set"]),
        ("affinity", UNDER_NONE, [FAIR], ["cpuset-not-set", "affinity-not-set"]),
    ],
)  # fmt: skip
def test_what_was_not_in_force_is_named(
    policy: str, seen: Any, threads: Any, reasons: list[str]
) -> None:
    scope = "all" if Policies.read().has_scope(policy) else None
    assert objections(scheduling(policy, scope), seen, threads) == reasons


def test_what_was_in_force_is_not() -> None:
    alone = [FAIR | {"harts": "1"}] * 3
    assert objections(scheduling("baseline"), UNDER_NONE, alone, one_hart=True) == []
    assert objections(scheduling("baseline-long"), states(OFF, LONG, LONG, OFF), [FAIR]) == []
    pinned = [FAIR, *(FAIR | {"harts": str(hart)} for hart in range(8))]
    held = AT_REST | {"cpuset": "0-7"}
    assert objections(scheduling("affinity"), states(OFF, held, held, OFF), pinned) == []
    twice = [*pinned[:-1], FAIR | {"harts": "0"}]
    seen = states(OFF, held, held, OFF)
    assert objections(scheduling("affinity"), seen, twice) == ["affinity-not-set"]
    target_only = ON | {"switch_all": 0}
    seen = states(OFF, target_only, target_only, OFF_AGAIN)
    assert objections(scheduling("vhot", "partial"), seen, [EXT | {"policy": 7}]) == []


def test_every_reason_of_the_agent_is_in_its_schema(repo: Path) -> None:
    text = "".join(p.read_text() for p in (repo / "board" / "agent").glob("*.py"))
    known = schemas.schema("agent")["properties"]["invalid_reasons"]["items"]["enum"]
    said = set(re.findall(r'(?:append|_add|_may_fail)\(\s*"([a-z]+(?:-[a-z]+)+)"', text))
    assert len(said) > 15
    assert said <= set(known)


# ---- what the scheduler wrote


def document(which: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    state = {"state": "enabled", "ops": "vstate", "enable_seq": 1, "hotplug_seq": 0,
             "nr_rejected": 0, "switch_all": 1}  # fmt: skip
    return {
        "schema_version": "1",
        "kernel": {"release": "6.12", "version": "#1"},
        **which["scheduling"]["scheduler"],
        "target": {"tgid": 100, "name": "llama-server"},
        "window": {"start_ns": 1, "stop_ns": 2, "stopped_by": "signal"},
        "at_start": state,
        "at_stop": state,
        "ejected": None,
        "restarts": 0,
        "counters": dict.fromkeys(
            schemas.schema("scheduler")["properties"]["counters"]["required"], 0
        ),
        "announced": {"batches": 20, "prefill_tokens": 45, "decode_tokens": 25},
        "invalid_reasons": [],
        "threads": [],
    } | changed


def no_change(_: dict[str, Any]) -> None:
    pass


def eject(found: dict[str, Any]) -> None:
    found["ejected"] = {"kind": 64, "code": 0, "reason": "disabled by sysrq-S", "message": ""}
    found["invalid_reasons"] = ["scheduler-ejected"]


def other_knob(found: dict[str, Any]) -> None:
    found["knobs"] = found["knobs"] | {"decay_ms": 199}


def one_token_less(found: dict[str, Any]) -> None:
    found["announced"]["decode_tokens"] -= 1


def nothing_announced(found: dict[str, Any]) -> None:
    found["announced"] = None


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (no_change, []),
        (eject, ["scheduler-ejected"]),
        (other_knob, ["scheduler-settings"]),
        (one_token_less, ["phase-tokens-disagree"]),
        (nothing_announced, ["phase-tokens-disagree"]),
        (None, ["scheduler-missing"]),
    ],
)
def test_what_the_scheduler_wrote_is_in_the_record_and_held_against_the_cell(
    tmp_path: Path, change: Callable[[dict[str, Any]], None] | None, reasons: list[str]
) -> None:
    def script(which: Mapping[str, Any], directory: Path, cancel: Any) -> dict[str, Any]:
        facts = good(which, directory, cancel)
        if change is not None:
            found = document(which)
            change(found)
            schemas.write(directory / "scheduler.json", found, "scheduler")
        return facts

    def run() -> Path:
        return run_one(
            FakeBoard(script),
            Overrides(policy="cooperative"),
            tmp_path / "results",
            definitions=definitions(tmp_path),
        )

    if reasons:
        with pytest.raises(InvalidData, match=", ".join(reasons)):
            run()
    else:
        run()
    [directory] = (tmp_path / "results" / "runs").iterdir()
    record = read_record(directory)
    assert record["invalid_reasons"] == reasons
    if change is no_change:
        assert record["scheduler"]["document"]["policy"] == "cooperative"
        told = record["phase_tokens"]
        assert told["decode"] == {"announced": 25, "counted": 25}
        assert told["prefill"] == {"announced": 45, "counted": 45}


def test_tokens_that_could_not_be_compared_make_a_run_invalid(tmp_path: Path) -> None:
    def script(which: Mapping[str, Any], directory: Path, cancel: Any) -> dict[str, Any]:
        facts = good(which, directory, cancel)
        schemas.write(directory / "scheduler.json", document(which), "scheduler")
        report = schemas.read(directory / "agent.json", "agent")
        report["scheduler"]["server_counts"] = None
        schemas.write(directory / "agent.json", report, "agent")
        return facts

    with pytest.raises(InvalidData, match="phase-tokens-unknown"):
        run_one(
            FakeBoard(script),
            Overrides(policy="cooperative"),
            tmp_path / "results",
            definitions=definitions(tmp_path),
        )


def test_tokens_are_compared_only_where_hints_are_on(tmp_path: Path) -> None:
    which = cell(tmp_path, policy="vhot")
    found = phase_tokens(which, agent(), loadgen(which), document(which))
    assert found is None


def test_the_server_s_own_counts() -> None:
    text = (
        "# HELP llamacpp:prompt_tokens_total Number\n# TYPE llamacpp:prompt_tokens_total counter\n"
        "llamacpp:prompt_tokens_total 240\nllamacpp:prompt_tokens_cached_total 0\n"
        "llamacpp:tokens_predicted_total 73\nllamacpp:n_decode_total 41\n"
    )
    assert parse(text) == {"prompt_tokens": 240, "output_tokens": 73, "batches": 41}
    assert parse(text.replace("240", "2.4e+06")) is None
    assert parse("HTTP/1.0 501 Not Implemented\r\n\r\n") is None

"""Goals: three words by hand, bounds from the file, a table per group and scope."""

from pathlib import Path

import pytest
import synthetic

from analysis.goals import Goal, goals_table, read_goals
from analysis.tables import groups
from toolchain.errors import InvalidData

LESS = Goal("save_count", "saves", at_most=0.5)
MORE = Goal("output_tps", "throughput", at_least=0.98)


@pytest.mark.parametrize(
    ("goal", "low", "high", "word"),
    [
        (LESS, 0.3, 0.5, "met"),
        (LESS, 0.51, 0.6, "missed"),
        (LESS, 0.4, 0.6, "open"),
        (MORE, 0.98, 1.2, "met"),
        (MORE, 0.9, 0.979, "missed"),
        (MORE, 0.9, 1.0, "open"),
    ],
)
def test_the_word_is_that_of_the_whole_interval(
    goal: Goal, low: float, high: float, word: str
) -> None:
    assert goal.word(low, high) == word


def test_a_row_for_each_policy_against_the_baseline_of_its_concurrency() -> None:
    [group] = groups(synthetic.matrix())
    table = goals_table(group, [LESS, MORE, Goal("no_such", "x", at_most=1.0)][:2])
    assert table is not None
    assert table.header == ("c", "policy", "saves (≤ 0.5)", "throughput (≥ 0.98)")
    assert ("2", "cooperative") in [row[:2] for row in table.rows]
    assert not any(row[1] == "baseline" for row in table.rows)
    for row in table.rows:
        for entry in row[2:]:
            assert str(entry).rsplit(" ", 1)[1] in ("met", "missed", "open")


def test_one_policy_alone_has_no_goals() -> None:
    [group] = groups(synthetic.matrix(policies=["baseline"]))
    assert goals_table(group, read_goals()) is None


def test_one_seed_is_named_not_judged() -> None:
    [group] = groups(synthetic.matrix(seeds=[1]))
    table = goals_table(group, [LESS])
    assert table is not None
    assert all(str(row[2]).startswith("(") for row in table.rows)


def test_fewer_seeds_than_the_baseline_count_on_the_shared_ones() -> None:
    runs = synthetic.matrix(seeds=range(1, 9))
    few = [run for run in runs if run.row["policy"] == "baseline" or run.row["seed"] <= 3]
    [group], [shared] = groups(few), groups([run for run in runs if run.row["seed"] <= 3])
    table, expected = goals_table(group, [LESS, MORE]), goals_table(shared, [LESS, MORE])
    assert table is not None and expected is not None
    assert table.rows == expected.rows


def test_the_shipped_goals_are_columns_of_the_summary() -> None:
    [group] = groups(synthetic.matrix())
    for goal in read_goals():
        assert goal.metric in group.runs[0].row


def test_a_goal_needs_one_bound(tmp_path: Path) -> None:
    path = tmp_path / "goals.toml"
    path.write_text(
        'schema_version = "1"\n[[goals]]\nmetric = "a"\ntitle = "b"\nat_most = 1\nat_least = 1\n'
    )
    with pytest.raises(InvalidData, match=r"goals\.toml"):
        read_goals(path)

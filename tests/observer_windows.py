"""Windows of the observer in a guest: the shell functions that open them, what they must hold.

The workloads are those of kernel/vstate_observer/workload.c; whose split of saves is known
beforehand. Used on the kernel that is built here and on a stock one.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import schemas
from kernel.spin_ranges import spin_loops

ROUNDS = 4
SAVES = ("discarded_saves", "compute_saves", "spin_saves", "kernel_saves")
OUTCOMES = ("off", "initial", "clean", *SAVES, "kernel_mode_clean")

FUNCTIONS = """
begin() { # NAME PROGRAM MODE THREADS ROUNDS MILLISECONDS [OPTION OF THE OBSERVER...]
	name=$1 program=$2 mode=$3 threads=$4 rounds=$5 ms=$6
	shift 6
	echo "window $name"
	./$program $mode /tmp/go $threads $rounds $ms &
	target=$!
	./workload asleep $target $((threads + 1)) || exit 1
	./vstate_observer --pid $target --out /results/$name.json "$@" >/tmp/said 2>/results/$name.err &
	observer=$!
	while read -r line; do
		echo "$line"
		[ "$line" = ready ] && break
	done </tmp/said >/results/$name.said
	./workload switches $target >/results/$name.before
}
go() { busybox head -c $threads /dev/zero >/tmp/go; }
end() {
	wait $observer
	echo $? >/results/$name.code
	busybox kill -KILL $target
	wait $target
}
close() {
	./workload asleep $target $((threads + 1)) || exit 1
	busybox kill -TERM $observer
	./workload switches $target >/results/$name.after
	end
}
observe() { begin "$@"; go; close; }
contend() { # the same, with another process on the hart
	begin "$@"
	./workload hog &
	hog=$!
	go
	./workload asleep $target $((threads + 1)) || exit 1
	busybox kill -KILL $hog
	wait $hog
	close
}
fault() { # NAME COMMAND...
	name=$1
	shift
	echo "fault $name"
	"$@" >/results/$name.out 2>/results/$name.err
	echo $? >/results/$name.code
}
observer() { ./vstate_observer --out /tmp/out.json "$@"; }
"""


def spin_options(program: Path) -> str:
    loops = spin_loops(program, ["spin_until"])
    return " ".join(f"--spin {start:#x}-{end:#x}" for loop in loops for start, end in loop.ranges)


def document(seen: Path, name: str, code: int = 0) -> dict[str, Any]:
    """Return a window's document, checked against its schema and its own sums."""
    assert (seen / f"{name}.err").read_text() == ""
    assert (seen / f"{name}.code").read_text() == f"{code}\n"
    found: dict[str, Any] = json.loads((seen / f"{name}.json").read_text())
    # Twenty thousand rows take minutes to check: all must look like the first, which are checked.
    schemas.check({**found, "threads": found["threads"][:100]}, "observer")
    assert {(*row, *row["runnable"], *row["blocking"]) for row in found["threads"]} == {
        (*found["threads"][0], *OUTCOMES, *OUTCOMES)
    }
    totals = found["totals"]
    rows = [*found["threads"], found["without_row"]]
    for why in ("runnable", "blocking"):
        assert totals[why] == {out: sum(row[why][out] for row in rows) for out in totals[why]}, (
            "the totals are the rows and what has no row"
        )
    assert totals["pending_restores"] == sum(row["pending_restores"] for row in rows)
    assert totals["switches"] == switched(totals, OUTCOMES)
    assert totals["user_saves"] == totals["discarded_saves"] + totals["undiscarded_saves"]
    assert totals["undiscarded_saves"] == totals["compute_saves"] + totals["spin_saves"]
    for name_ in SAVES:
        assert totals[name_] == switched(totals, [name_])
    assert not found["lost_threads"] or code == 4
    return found


def switched(row: Mapping[str, Any], outcomes: Iterable[str], *whys: str) -> int:
    """Return the switch-outs of a row with these outcomes, for these reasons (default: both)."""
    return sum(row[why][out] for why in whys or ("runnable", "blocking") for out in outcomes)


def workers(seen: Path, name: str, nr: int = 2) -> list[dict[str, Any]]:
    """Return the rows of a window's threads after comparing them with the kernel's own counts."""
    found = document(seen, name)
    before = json.loads((seen / f"{name}.before").read_text())
    after = json.loads((seen / f"{name}.after").read_text())
    rows = {row["tid"]: row for row in found["threads"]}
    assert {str(tid) for tid in rows} == set(after)
    for tid, row in rows.items():
        voluntary, forced = (after[str(tid)][i] - before[str(tid)][i] for i in (0, 1))
        assert switched(row, OUTCOMES, "blocking") == voluntary
        assert switched(row, OUTCOMES, "runnable") == forced
        # Whoever was switched out has come back, and needs its registers if it ever had any.
        user = switched(row, OUTCOMES) - switched(row, ["kernel_saves", "kernel_mode_clean"])
        assert row["pending_restores"] in (0, user)
    main = rows.pop(found["target"]["tgid"])
    assert switched(main, OUTCOMES) == 0
    assert len(rows) == nr
    assert found["invalid_reasons"] == []
    return list(rows.values())


def assert_sleeps(row: Mapping[str, Any], times: int) -> None:
    """Assert that the thread blocked that often and each time was saved once for nothing.

    When it is preempted on its way to sleep the save is done there, and then VS is Initial.
    """
    assert switched(row, OUTCOMES, "blocking") == times
    assert switched(row, ["discarded_saves", "initial"], "blocking") == times
    assert switched(row, ["discarded_saves"]) == times

"""Do the instruments agree on what they all counted: the target's context-switch saves?

Promise: observer and truth must give the same number, and the profiler's number and truth's may
differ by no more than the probes say they missed; what does not fit is a line of its own.
Limit: only the target's saves at context switches are compared.  Saves elsewhere (signals, kernel
vector code) are in truth and profiler by their sites, and restores in each its own way.
"""

from collections.abc import Callable, Mapping
from typing import Any

from schemas.record import window_switches

ROLE = "context-switch"
STATES = ("user", "kernel")
UNKNOWN = "unknown"


def agreement(
    observer: Mapping[str, Any] | None,
    profiler: Mapping[str, Any] | None,
    truth: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the record's `agreement`, or None where less than two instruments counted.

    Some kernels save both states by one routine of its own: its sites do not tell whose registers
    moved, so that profiler and truth have no numbers by state there, and the sums are compared.
    """
    if sum(part is not None for part in (observer, profiler, truth)) < 2:
        return None
    missed = sum(map(_missed, _save_sites(profiler))) if profiler else None
    counted = {
        "observer": _observed(observer) if observer else {},
        "profiler": _by_state(profiler, _profiled) if profiler else {},
        "truth": _by_state(truth, _true) if truth else {},
    }
    document: dict[str, Any] = {"profiler_missed": missed}
    differences = []
    for state in (*STATES, "all"):
        row = {name: numbers.get(state) for name, numbers in counted.items()}
        name = "saves" if state == "all" else f"{state}_saves"
        document[name] = row
        # By state where that is told: the sum would say the same again.
        if state != "all" or any(UNKNOWN in numbers for numbers in counted.values()):
            what = name.replace("_", " ")
            differences += [f"{what}: {line}" for line in _differences(row, missed or 0)]
    document["agrees"] = not differences
    document["differences"] = differences
    return document


def switch_differences(
    agent: Mapping[str, Any] | None, switches: Mapping[str, Any] | None
) -> list[str]:
    """Return where /proc and BPF differ, a line each.

    Both look while the target stands still, so they must count the same switches of every thread
    that is there at the end, to the last one; how the kernel files a switch, as voluntary or not, a
    signal can change in between.  Threads that ended meanwhile only BPF has.
    """
    if not agent or not switches or not switches["counted"]:
        return []
    counted = {row["tid"]: row for row in switches["counted"]["threads"]}
    lines = []
    for tid, (voluntary, involuntary) in window_switches(agent["platform"]["server"]).items():
        row = counted.get(tid, {"voluntary": 0, "involuntary": 0})
        proc, bpf = voluntary + involuntary, row["voluntary"] + row["involuntary"]
        if proc != bpf:
            lines.append(f"thread {tid}: /proc {proc}, BPF {bpf}")
    if switches["counted"]["lost"]:
        lines.append(f"BPF had no room for {switches['counted']['lost']} switches")
    return lines


def _differences(counted: Mapping[str, int | None], missed: int) -> list[str]:
    observer, profiler, truth = counted["observer"], counted["profiler"], counted["truth"]
    exact = truth if truth is not None else observer
    lines = []
    if observer is not None and truth is not None and observer != truth:
        lines.append(f"observer {observer}, truth {truth}")
    if profiler is not None and exact is not None and not profiler <= exact <= profiler + missed:
        name = "truth" if truth is not None else "observer"
        lines.append(f"profiler {profiler}, missed {missed}, {name} {exact}")
    return lines


def _observed(observer: Mapping[str, Any]) -> dict[str, int]:
    numbers = {state: int(observer["totals"][f"{state}_saves"]) for state in STATES}
    return numbers | {"all": sum(numbers.values())}


def _by_state(
    document: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int]
) -> dict[str, int]:
    """State -> saves of the target at context switches; only "all" where sites do not tell."""
    sites = _save_sites(document)
    numbers = {"all": sum(map(count, sites))}
    if any(site["state"] == UNKNOWN for site in sites):
        return numbers | {UNKNOWN: numbers["all"]}
    for state in STATES:
        numbers[state] = sum(count(site) for site in sites if site["state"] == state)
    return numbers


def _save_sites(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [site for site in document["sites"] if (site["kind"], site["role"]) == ("save", ROLE)]


def _missed(site: Mapping[str, Any]) -> int:
    return int(site["begin_missed"])


def _profiled(site: Mapping[str, Any]) -> int:
    return int(site["target"]["count"])


def _true(site: Mapping[str, Any]) -> int:
    return sum(hart["target_count"] for hart in site["harts"])

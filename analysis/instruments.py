"""What the three instruments counted, as columns of summary.csv.

Promise: each column has one source, and another only where that one was not asked: saves and
switches from the observer (else from BPF on x86, else from /proc unless a thread ended in the
window), time from the profiler, bytes and instructions from the emulator.  Saves
are those of the target's vector state at context switches, which all three count.
Limit: whether the instruments agree is the record's `agreement`; a run where they do not is invalid
before it comes here.
"""

from collections.abc import Mapping
from typing import Any

from schemas.record import threads_ended, window_switches

_MS_PER_S = 1e3


def vstate_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that an instrument fills; None where none that could was asked."""
    summary = record["loadgen"]["summary"] if record["loadgen"] else {}
    requests_ok, window_ms = summary.get("n_ok"), summary.get("window_ms")
    observer, profiler, truth = (record[name] for name in ("observer", "profiler", "truth"))
    totals = observer["totals"] if observer else {}
    timed = _save_sites(profiler)
    stored = [hart for site in _save_sites(truth) for hart in site["harts"]]
    profiled = sum(site["target"]["count"] for site in timed) if profiler else None
    true = sum(hart["target_count"] for hart in stored) if truth else None
    saves = totals.get("user_saves", true if truth else profiled)
    total_ns = sum(site["target"]["total_ns"] for site in timed) if profiler else None
    switches = totals["switches"] if observer else _switches(record)
    # The profiler has none where a way back to user mode cannot be probed (docs/profiler.md).
    restores = (truth or profiler or {}).get("restores")
    return {
        "save_count": saves,
        "undiscarded_save_count": totals.get("undiscarded_saves"),
        "discarded_save_count": totals.get("discarded_saves"),
        "spin_save_count": totals.get("spin_saves"),
        "restore_count": restores["target"]["count"] if restores else None,
        "save_total_ns": total_ns,
        "vstate_total_ns": total_ns,
        # Outside of the load's own window the target stands still (board/agent/instruments.py).
        "saves_per_s": _over(saves, window_ms / _MS_PER_S if window_ms else None),
        "vstate_ns_per_request": _over(total_ns, requests_ok),
        "vstate_cpu_capacity_ppm": (
            profiler["vstate_cpu_capacity_ppm"]["target"] if profiler else None
        ),
        "context_switches": switches,
        "context_switches_per_request": _over(switches, requests_ok),
        "migrations": totals.get("migrations", _by_bpf(record).get("migrations")),
        "critical_instructions": truth["critical_instructions"] if truth else None,
        "bytes_per_save": _over(sum(h["target_bytes"] for h in stored), true) if truth else None,
    }


def _by_bpf(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the BPF program of x86 counted; empty where there was none."""
    document = record.get("switches")
    return (document["counted"] if document else None) or {}


def _switches(record: Mapping[str, Any]) -> int | None:
    """How often the server's threads were switched out in the window."""
    if counted := _by_bpf(record).get("threads"):
        return sum(int(row["voluntary"] + row["involuntary"]) for row in counted)
    server = platform["server"] if (platform := record.get("platform")) else None
    if not server or not server["threads_after"] or threads_ended(server):
        return None
    return sum(map(sum, window_switches(server).values()))


def _save_sites(document: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The places where a context switch saves the vector state of a user's thread.

    Some kernels save their own vector code's registers there, too, and do not tell them apart.
    """
    return [
        site
        for site in (document["sites"] if document else [])
        if (site["kind"], site["role"]) == ("save", "context-switch")
        and site["state"] in ("user", "unknown")
    ]


def _over(amount: float | None, divisor: float | None) -> float | None:
    return None if amount is None or not divisor else amount / divisor

"""Do the phase hints tell what the server did?

Promise: what the server announced to the scheduler over its life must be what it counted itself:
prompt tokens as prefill, and as decode every output token but the first of each answer, which the
prompt's batch gives.
Limit: totals only; that each hint was true at its time is llama.cpp's unit test's affair.
"""

from collections.abc import Mapping
from typing import Any

HINTS_ON = ("LLAMA_VSTATE_PHASE_HINTS", "1")


def with_hints(cell: Mapping[str, Any]) -> bool:
    """Whether the server of this cell is to announce its phases."""
    return HINTS_ON in cell["scheduling"]["environment"].items()


def phase_tokens(
    cell: Mapping[str, Any],
    agent: Mapping[str, Any] | None,
    loadgen: Mapping[str, Any] | None,
    scheduler: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the record's `phase_tokens`; None without hints, or where a side of it is missing."""
    if not with_hints(cell):
        return None
    counts = agent["scheduler"]["server_counts"] if agent else None
    if counts is None or loadgen is None or scheduler is None:
        return None
    announced = scheduler["announced"] or {"prefill_tokens": 0, "decode_tokens": 0}
    # The probe is a completion, too, and not among the requests.
    answers = sum(request["output_tokens"] is not None for request in loadgen["requests"])
    answers += bool(loadgen["config"]["preflight"])
    told = {
        "prefill": _pair(announced["prefill_tokens"], counts["prompt_tokens"]),
        "decode": _pair(announced["decode_tokens"], counts["output_tokens"] - answers),
    }
    differences = [
        f"{phase}: announced {pair['announced']}, counted {pair['counted']}"
        for phase, pair in told.items()
        if pair["announced"] != pair["counted"]
    ]
    return {**told, "agrees": not differences, "differences": differences}


def _pair(announced: int, counted: int) -> dict[str, int]:
    return {"announced": announced, "counted": counted}

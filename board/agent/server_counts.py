"""llama-server's own counts of tokens, from GET /metrics.

Promise: the numbers are the server's, over its whole life; None when it does not answer with them.
Limit: slots that still work are not counted in full: ask when all requests have ended.
"""

import re
import socket

TIMEOUT_S = 60.0
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "tokens_predicted_total",
    "batches": "n_decode_total",
}
"""Ours -> the metric's name after "llamacpp:" (tools/server/server-task.cpp)."""


def read(port: int) -> dict[str, int] | None:
    """Ask the server on this port of the loopback interface."""
    request = b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            connection.sendall(request)
            with connection.makefile("rb") as answer:
                text = answer.read().decode(errors="replace")
    except OSError:
        return None
    return parse(text)


def parse(text: str) -> dict[str, int] | None:
    """Take the counters out of the answer; None when one is not there."""
    counts = {}
    for ours, theirs in COUNTERS.items():
        found = re.search(rf"^llamacpp:{theirs} (\d+)$", text, re.MULTILINE)
        if found is None:
            return None
        counts[ours] = int(found.group(1))
    return counts

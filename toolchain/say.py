"""The project's one voice: a stamped line on standard error.

Promise: progress goes to standard error, so that standard output holds only a verb's answer.
Limit: plain lines, flushed at once; rich live displays are the runner's own affair.
"""

import sys
import time

_START = time.monotonic()


def say(line: str) -> None:
    """Print one line of progress with the minutes and seconds since the verb began."""
    elapsed_s = int(time.monotonic() - _START)
    print(f"[{elapsed_s // 60:3d}:{elapsed_s % 60:02d}] {line}", file=sys.stderr, flush=True)

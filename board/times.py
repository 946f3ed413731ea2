"""CPU time as a POSIX shell tells it, for whoever runs a script that ends with `times`.

Promise: user and system seconds of all that the shell has waited for.
Limit: the two lines of POSIX's `times`, in the C locale.
"""

import re


def cpu_seconds(times: str) -> float:
    """Return user + system seconds of the children in the output of the shell's `times`."""
    minutes = re.findall(r"(\d+)m([\d.]+)s", times)[2:]
    return sum(60 * int(m) + float(s) for m, s in minutes)

"""What every connection asks first, and what is asked again and again: kept small.

Promise: reads only.
Limit: an emulated hart compiles and imports slowly, so what needs much stands elsewhere (facts.py).
"""

import contextlib
import glob
import os
import platform
import pwd
import time
from pathlib import Path
from typing import Any

from board.agent.system import text
from board.onboard.lock import boot_id


def hello(directory: str) -> dict[str, Any]:
    """Who and where the login is: what every other verb's directory is made of."""
    return {
        "uid": os.getuid(),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "directory": os.path.abspath(Path(Path.home(), directory)),  # noqa: PTH100 (no links)
        "boot_id": boot_id(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "time_s": time.time(),
    }


def hottest_c(pattern: str) -> float | None:
    """The highest of the temperatures (files of thousandths of a degree), in degrees Celsius."""
    values = []
    for path in glob.glob(pattern):  # noqa: PTH207 (the pattern is absolute)
        with contextlib.suppress(TypeError, ValueError):
            values.append(int(text(path) or "") / 1000)
    return max(values, default=None)

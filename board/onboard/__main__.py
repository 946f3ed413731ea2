"""Questions to the board, answered one after the other: a line of JSON in, a line of JSON out.

    {"verb": V, "arguments": {...}}   ->   {"answer": ...} or {"refused": LINE, "code": N}

Promise: the program ends with its standard input, that is with the connection; nothing it runs can
write into its answers; a fault of this program is {"fault": TRACEBACK} and it goes on.
Limit: the standard library, Python 3.11, Linux.  Sent by board/ssh/program.py, never installed.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from board.onboard.refused import Refused, why

MODULES: Mapping[str, str] = {
    **dict.fromkeys(("hello",), "hello"),
    **dict.fromkeys(("facts", "sites", "btf"), "facts"),
    **dict.fromkeys(("have", "install", "forget", "remove"), "store"),
    **dict.fromkeys(("plan", "apply", "undo", "state"), "changes"),
    **dict.fromkeys(("take", "beat", "release", "holder"), "lock"),
    **dict.fromkeys(("start", "status", "stop", "stop_all", "collect", "discard"), "runs"),
}
"""Verb -> the module with the function of that name, imported when it is first asked for."""


def main() -> int:
    """Answer until the connection ends."""
    # Whoever else reads on the board (sftp, another user of it) is no affair of this umask.
    os.umask(0o022)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what something below prints is no answer
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin.buffer:
            print(json.dumps(_answer(json.loads(line))), file=out, flush=True)
    return 0


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    verb = question["verb"]
    try:
        module = importlib.import_module(f"board.onboard.{MODULES[verb]}")
        return {"answer": getattr(module, verb)(**question["arguments"])}
    except Refused as refusal:
        return {"refused": str(refusal), "code": refusal.code}
    except OSError as error:
        return {"refused": f"{error.filename or verb}: {why(error)}", "code": 3}
    except Exception:
        return {"fault": traceback.format_exc()}


if __name__ == "__main__":
    sys.exit(main())

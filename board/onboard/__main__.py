"""Questions to the board, answered one after the other: a line of JSON in, a line of JSON out.

    {"verb": V, "arguments": {...}}   ->   {"answer": ...} or {"refused": LINE, "code": N}

Promise: the program ends with its standard input, that is with the connection; nothing it runs can
write into its answers; a fault of this program is {"fault": TRACEBACK} and it goes on.
Limit: the standard library, Python 3.11, Linux.  Sent by board/ssh/program.py, never installed.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from board.onboard import changes, facts, lock, runs, store
from board.onboard.refused import Refused, why

VERBS: Mapping[str, Callable[..., Any]] = {
    "hello": facts.hello,
    "facts": facts.facts,
    "sites": facts.sites,
    "btf": facts.btf,
    "have": store.have,
    "install": store.install,
    "remove": store.remove,
    "forget": store.forget,
    "plan": changes.plan,
    "apply": changes.apply,
    "undo": changes.undo,
    "state": changes.state,
    "lock": lock.take,
    "beat": lock.beat,
    "unlock": lock.release,
    "holder": lock.holder,
    "start": runs.start,
    "status": runs.status,
    "stop": runs.stop,
    "stop-all": runs.stop_all,
    "collect": runs.collect,
    "discard": runs.discard,
}


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
        return {"answer": VERBS[verb](**question["arguments"])}
    except Refused as refusal:
        return {"refused": str(refusal), "code": refusal.code}
    except OSError as error:
        return {"refused": f"{error.filename or verb}: {why(error)}", "code": 3}
    except Exception:
        return {"fault": traceback.format_exc()}


if __name__ == "__main__":
    sys.exit(main())

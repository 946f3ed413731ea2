"""One question to the board: python3 -m board.onboard VERB JSON; the answer is JSON.

Promise: standard output is one JSON document; what a verb refuses is {"refused": LINE, "code": N}
with the exit code the host is to end with, and the exit code here is 0; an exit code other than 0
is a fault of this program, with its traceback on standard error.
Limit: the standard library, Python 3.11, Linux.  Reached through board/ssh/program.py, never
installed.
"""

import json
import os
import sys
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


def main(verb: str, arguments: str) -> int:
    """Answer one question on standard output."""
    # Whoever else reads on the board (sftp, another user of it) is no affair of this umask.
    os.umask(0o022)
    try:
        answer = VERBS[verb](**json.loads(arguments))
    except Refused as refusal:
        answer = {"refused": str(refusal), "code": refusal.code}
    except OSError as error:
        answer = {"refused": f"{error.filename or verb}: {why(error)}", "code": 3}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))

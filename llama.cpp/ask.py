"""Ask a llama-server fixed questions and print what it says, with probabilities, as JSON.

Promise: each answer is greedy and has exactly the tokens asked for; on standard output stands, per
prompt and position, the token and the most probable tokens' log-probabilities before sampling.
Whatever way this ends, no server is left.  The server's own output goes to standard error.
Limit: standard library only (it runs inside the pinned tree); one request at a time; port 8080 on
loopback, so it wants a network namespace of its own.

    python3 ask.py REQUEST SERVER [ARG...]

REQUEST is a JSON object: prompts (a list of texts), tokens, top, timeout_s (for everything).
Exit code 1: an answer is not of the form asked for, or time is up; 128 + N: the server was killed
by signal N; otherwise the server's own exit code if it ended by itself.
"""

import http.client
import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

ADDRESS = ("127.0.0.1", "8080")


def call(path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
    """Return the JSON answer to a POST of `body`, or to a GET where there is none."""
    request = urllib.request.Request(
        f"http://{':'.join(ADDRESS)}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def leave_if_ended(server: subprocess.Popen[bytes]) -> None:
    """Exit as the server did, if it did."""
    code = server.poll()
    if code is not None:
        sys.stderr.write(f"ask: the server ended by itself, code {code}\n")
        raise SystemExit(128 - code if code < 0 else code or 1)


def wait_until_ready(server: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Return when /health says 200; exits like the server if it ends before that."""
    while True:
        leave_if_ended(server)
        try:
            call("/health", None, 5.0)
            return
        except OSError:  # refused, or 503 while loading: urllib's errors are all OSErrors
            if time.monotonic() > deadline_s:
                raise SystemExit("ask: the server was not ready in time") from None
            time.sleep(0.05)


def answer(prompt: str, tokens: int, top: int, timeout_s: float) -> list[dict[str, Any]]:
    """Return per position {"token": id, "text": its text, "top": [[id, log-probability], ...]}.

    Log-probabilities (nats) are the model's, before the sampler bans tokens or picks one, most
    probable first (llama.cpp: tools/server/server-context.cpp, populate_token_probs).
    """
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "n_probs": top,
        "post_sampling_probs": False,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": False,
    }
    positions = call("/completion", body, timeout_s)["completion_probabilities"]
    if len(positions) != tokens:
        raise SystemExit(f"ask: {len(positions)} tokens, expected {tokens}: prompt {prompt!r}")
    return [
        {
            "token": position["id"],
            "text": position["token"],
            "top": [[entry["id"], float(entry["logprob"])] for entry in position["top_logprobs"]],
        }
        for position in positions
    ]


def main(arguments: list[str]) -> None:
    request = json.loads(arguments[0])
    argv = [*arguments[1:], "--host", ADDRESS[0], "--port", ADDRESS[1]]
    deadline_s = time.monotonic() + request["timeout_s"]
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        wait_until_ready(server, deadline_s)
        answers = []
        for prompt in request["prompts"]:
            left_s = max(1.0, deadline_s - time.monotonic())
            try:
                answers.append(answer(prompt, request["tokens"], request["top"], left_s))
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                time.sleep(0.5)  # a server that has just died is not always reaped yet
                leave_if_ended(server)
                raise SystemExit(f"ask: no proper answer to {prompt!r}: {error!r}") from error
        print(json.dumps(answers, allow_nan=False))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])

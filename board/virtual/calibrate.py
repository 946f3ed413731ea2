"""Is the virtual board a parallel machine? Measured, kept with every run, a condition of validity.

Promise: burn throughput must grow linearly with threads, llama-server's prompt phase must profit
from all harts and its decode phase must not suffer; a machine that fails this makes every run on it
invalid.  The result is a pure function of machine and artifacts, so it is measured once and cached.
Limit: linear means linear in virtual time.  Nothing here says how fast a K1 is.
"""

import concurrent.futures
import json
import tempfile
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import schemas
from board.cell import Definitions, server_flags
from board.virtual import guest
from board.virtual.boot import boot
from board.virtual.machine import MACHINE, Machine
from toolchain import cache
from toolchain.errors import InvalidData
from toolchain.fetch import sha256_file
from toolchain.recipe import build
from toolchain.say import say

FILE = "calibration.json"


def calibration(machine: Machine) -> dict[str, Any]:
    """Return the calibration (calibration.schema.json) of `machine`, measuring it on first use.

    Measuring takes some minutes of wall time.  Raises RunFailed and what builds raise.
    """
    document: dict[str, Any] = schemas.read(calibration_entry(machine) / FILE, "calibration")
    return document


def calibration_entry(machine: Machine) -> Path:
    """Return the cache entry that holds the calibration; raises like `calibration`."""
    settings = tomllib.loads(MACHINE.read_text())["calibration"]
    inputs = {
        **guest.artifacts(settings["model"]),
        "burn": sha256_file(build("board/burn") / "burn"),
        "method": sha256_file(Path(__file__)),
    }
    asked = {"machine": machine.as_cell(), "settings": settings, "inputs": inputs}
    return cache.entry(
        "calibration", asked, lambda out: _measure(machine, settings, inputs, out / FILE)
    )


def _measure(
    machine: Machine, settings: Mapping[str, Any], inputs: Mapping[str, str], out: Path
) -> None:
    say("calibrate: measuring this machine once (about 3 min on 2 cores)")
    with (
        tempfile.TemporaryDirectory(prefix="bananaos-calibrate-") as scratch,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        # The one-thread cell takes longest, so it goes first.
        cells = [
            pool.submit(_server, machine, settings, threads, Path(scratch) / f"server-{threads}")
            for threads in settings["server_threads"]
        ]
        burnt = pool.submit(_burn, machine, settings, Path(scratch) / "burn")
        server = [cell.result() for cell in cells]
        rows = burnt.result()
    document = _judge(machine, settings, inputs, rows, server)
    schemas.write(out, document, "calibration")


def _burn(
    machine: Machine, settings: Mapping[str, Any], directory: Path
) -> list[Mapping[str, Any]]:
    """Run burn.c in one guest; return its JSON lines."""
    runs = [("vector", n) for n in settings["burn_threads"]]
    runs += [("barrier", n) for n in settings["barrier_threads"]]
    lines = [f"/payload/burn {kind} {n} {settings['burn_ms']}" for kind, n in runs]
    script = "#!/bin/sh\nset -e\nharts begin\n{\n" + "\n".join(lines) + "\n} >/results/burn.jsonl\n"
    done = boot(
        machine,
        seed=settings["seed"],
        payload={"burn": build("board/burn") / "burn"},
        script=script,
        directory=directory,
        deadline_s=settings["deadline_s"],
    )
    if done.exit_code != 0:
        raise guest.agent_failed(done.exit_code, directory)
    return [json.loads(line) for line in (directory / "burn.jsonl").read_text().splitlines()]


def _server(
    machine: Machine, settings: Mapping[str, Any], threads: int, directory: Path
) -> dict[str, Any]:
    """Serve the calibration's load with `threads` threads; return the server's own times."""
    shape = {
        "threads": threads,
        "threads_batch": threads,
        "poll": settings["poll"],
        "ctx_per_slot": settings["ctx_per_slot"],
    }
    load = {**settings["load"], "prompt": None, "seed": settings["seed"]}
    definitions = Definitions.read()
    cell = {
        "machine": machine.as_cell(),
        "model": settings["model"],
        "seed": settings["seed"],
        "concurrency": 1,
        "load": load,
        "server": {"flags": server_flags(definitions.flags, shape, 1)},
        "scheduling": definitions.policies.scheduling("baseline", None, None),
        "bystanders": 0,
        "instruments": [],
    }
    guest.run_cell(cell, directory, deadline_s=settings["deadline_s"], cancel=threading.Event())
    result = schemas.read(directory / "loadgen.json", "loadgen")
    # The last request: the first one pays for page faults.
    timings = result["requests"][-1]["timings"]
    return {
        "threads": threads,
        "prompt_ms": timings["prompt_ms"],
        "predicted_ms": timings["predicted_ms"],
    }


def _judge(
    machine: Machine,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    rows: list[Mapping[str, Any]],
    server: list[dict[str, Any]],
) -> dict[str, Any]:
    """Put the numbers together and hold them against the bounds of machine.toml."""
    bounds = settings["bounds"]
    burn = {row["threads"]: row["per_second"] for row in rows if row["kind"] == "vector"}
    barrier = {row["threads"]: row["per_second"] for row in rows if row["kind"] == "barrier"}
    error = max(abs(rate / (threads * burn[1]) - 1) for threads, rate in burn.items())
    one, most = server[0], server[-1]
    reasons = []
    if error > bounds["linear_error_ratio"]:
        reasons.append("calibration-not-linear")
    if one["prompt_ms"] / most["prompt_ms"] < bounds["prompt_speedup"]:
        reasons.append("calibration-prompt-speedup")
    if one["predicted_ms"] / most["predicted_ms"] < bounds["decode_speedup"]:
        reasons.append("calibration-decode-speedup")
    return {
        "schema_version": "1",
        "machine": machine.as_cell(),
        "inputs": dict(inputs),
        "burn": {str(threads): [rate] for threads, rate in burn.items()},
        "linear_error_ratio": round(error, 6),
        "barrier": {str(n): [round(1e9 / rate, 3)] for n, rate in barrier.items()},
        "server": server,
        "valid": not reasons,
        "invalid_reasons": reasons,
    }


def show(document: Mapping[str, Any], json_file: Path | None) -> None:
    """Print a calibration for people and, if asked, write it for programs.

    Raises InvalidData when the machine is not a parallel one.
    """
    machine = document["machine"]
    print(
        f"virtual board: {machine['harts']} harts, VLEN {machine['vlen_bits']}, "
        f"shift {machine['icount_shift']}, quantum {machine['quantum_us']} us (all times virtual)"
    )
    for threads, (rate,) in document["burn"].items():
        ideal = int(threads) * document["burn"]["1"][0]
        print(f"  burn     {threads:>2} threads  {rate:14,.0f} /s   {rate / ideal:6.3f} of linear")
    for threads, (ns,) in document["barrier"].items():
        print(f"  barrier  {threads:>2} threads  {ns / 1000:14,.1f} us each")
    first = document["server"][0]
    for row in document["server"]:
        phases = [
            f"{name} {row[key]:9,.1f} ms ({first[key] / row[key]:.2f}x)"
            for name, key in (("prompt", "prompt_ms"), ("decode", "predicted_ms"))
        ]
        print(f"  server   {row['threads']:>2} threads  {'   '.join(phases)}")
    if json_file is not None:
        schemas.write(json_file, document, "calibration")
    if document["invalid_reasons"]:
        raise InvalidData(
            f"not a parallel machine: {', '.join(document['invalid_reasons'])}; the bounds stand "
            f"in {MACHINE.name}, runs on this machine are invalid"
        )

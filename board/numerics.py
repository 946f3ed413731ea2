"""Is the vector build of llama-server right? Its answers against the x86-64 build's.

Promise: the very program that the board runs is run under QEMU's user mode, with the board's CPU at
the VLEN asked for, and asked the same questions as the x86-64 build.  As long as both have said the
same tokens, their log-probabilities must agree within LIMIT_NATS and LIMIT_RMS_NATS; where they say
different tokens, the x86-64 build must have found the two about equally probable.  Which kernels
ran, and that they ran vector instructions, comes from QEMU's own log of what it translated.
Limit: it shows that both builds compute the same function on the prompts asked, with the tensor
types of the model given, not that this function is the model's.  One thread.  How the limits were
chosen, and what was measured: docs/numerics.md.

    python -m board.numerics [MODEL]

prints the measurements for every VLEN; exit code 1 if one is out of bounds, 2 to 4 as
everywhere, 130 interrupted.
"""

import json
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schemas
from board.agent.prompts import make_prompts, read_words
from board.cell import SERVER, server_flags
from board.models import model
from board.virtual.machine import Machine, default_machine, vlens
from kernel.spin_ranges import functions
from toolchain.errors import ArtifactError, Differs
from toolchain.inside import run_inside
from toolchain.paths import REPO
from toolchain.recipe import build

ASK = REPO / "llama.cpp" / "ask.py"
BOARD, REFERENCE = "llama.cpp/server-riscv64", "llama.cpp/server-x86-64"

LIMIT_NATS = 0.36
LIMIT_RMS_NATS = 0.07
"""For banana-tiny: about twice and one and a half times what was measured (docs/numerics.md)."""

PROMPT_WORDS = (3, 24, 68)
"""A prompt of each length; attention computes 64 positions or more in tiles, by other code."""
TOKENS = 16
TOP = 20
TIMEOUT_S = 600.0
_SERVER = {"threads": 1, "threads_batch": 1, "ctx_per_slot": 256, "poll": 0}

KERNELS = re.compile(
    r"ggml_vec_dot_(q4_K_q8_K|q6_K_q8_K|q4_1_q8_1|f16)(_vl\d+)?|quantize_row_q8_[K1]"
)
"""What a Q4_K_M or Q4_1 model spends its time in, by symbol (ggml-cpu: arch/riscv/quants.c)."""


@dataclass(frozen=True)
class Position:
    """What one build says at one place: its token, and log-probabilities (nats) by token id."""

    token: int
    text: str
    log_probabilities: Mapping[int, float]


Answers = list[list[Position]]
"""Per prompt, per position."""


@dataclass(frozen=True)
class Agreement:
    """How two builds agreed: positions compared, prompts whose tokens parted, differences."""

    positions: int
    parted: int
    largest_nats: float
    rms_nats: float


def default_prompts() -> list[str]:
    """Return the fixed prompts, one for each of PROMPT_WORDS."""
    words = read_words()
    return [make_prompts(words, count, 1, seed=count)[0] for count in PROMPT_WORDS]


def answers_of_reference(
    gguf: Path, prompts: Sequence[str], tokens: int = TOKENS, *, flash_attention: str = "on"
) -> Answers:
    """Ask the x86-64 build.  Raises CommandFailed.

    flash_attention "off" has it add in another order, which is the yardstick for the limits.
    """
    flags = {**_flags(), "--flash-attn": flash_attention}
    return _ask("x86-64", ["/server"], REFERENCE, flags, gguf, prompts, tokens, {})


def answers_of_board(
    machine: Machine, gguf: Path, prompts: Sequence[str], tokens: int = TOKENS
) -> tuple[Answers, dict[str, int]]:
    """Ask the board's build on the machine's CPU; also return kernel -> vector instructions run.

    These are places in the code, not executions: QEMU logs a block of code when it is first
    reached.  Raises CommandFailed.
    """
    ranges = ",".join(f"{start:#x}+{size:#x}" for start, size in kernels().values())
    argv = ["qemu-riscv64", "-cpu", machine.cpu_argument()]
    argv += ["-d", "in_asm", "-dfilter", ranges, "-D", "/build/code", "/server"]
    with tempfile.TemporaryDirectory(prefix="bananaos-numerics-") as name:
        scratch = Path(name)
        what = f"VLEN {machine.vlen_bits}"
        answers = _ask(what, argv, BOARD, _flags(), gguf, prompts, tokens, {"/build": scratch})
        return answers, vector_instructions((scratch / "code").read_text(errors="replace"))


def kernels() -> dict[str, tuple[int, int]]:
    """Return symbol -> (address, size in bytes) of the kernels in the board's build."""
    found = {
        _function(symbol): (start, end - start)
        for symbol, (start, end) in functions(build(BOARD) / "llama-server")
        if KERNELS.fullmatch(_function(symbol))
    }
    if not found:
        raise Differs(f"{BOARD}: no symbol matches {KERNELS.pattern}: cannot see which kernel runs")
    return found


def _function(symbol: str) -> str:
    """Return the name in the source: GCC calls its variants NAME.isra.0 and the like."""
    return symbol.partition(".")[0]


def vector_instructions(log: str) -> dict[str, int]:
    """Return kernel -> number of vector instructions, from QEMU's `-d in_asm` log."""
    count: Counter[str] = Counter()
    seen: set[str] = set()
    symbol = ""
    for line in log.splitlines():
        if line.startswith("IN: "):
            symbol = _function(line[4:].strip())
            continue
        # 0x002b6b0a:  0d3079d7          vsetvli                 s3,zero,e32,m8,ta,ma
        match line.split():
            case [address, _, mnemonic, *_] if address.startswith("0x") and address not in seen:
                seen.add(address)  # several threads, and several blocks, may hold the same code
                if mnemonic.startswith("v"):
                    count[symbol] += 1
    return dict(count)


def compare(what: str, expected: Answers, got: Answers) -> Agreement:
    """Compare two builds' answers to the same prompts, up to where their tokens part.

    Raises Differs at the first thing out of bounds, naming `what`, prompt, position and limit.
    """
    squares: list[float] = []
    largest, positions, parted = 0.0, 0, 0
    for number, (expected_answer, answer) in enumerate(zip(expected, got, strict=True)):
        for index, (wanted, said) in enumerate(zip(expected_answer, answer, strict=True)):
            where = f"{what}: prompt {number}, position {index}"
            differences = _differences(where, wanted.log_probabilities, said.log_probabilities)
            squares += [difference**2 for difference in differences]
            largest = max(largest, *differences)
            positions += 1
            if wanted.token != said.token:
                _check_tie(where, wanted, said.token)
                parted += 1
                break  # from here on the two read different texts
    asked = sum(map(len, expected))
    if 2 * positions < asked:
        raise Differs(
            f"{what}: tokens part so early that only {positions} of {asked} positions can be "
            "compared, expected at least half"
        )
    rms = math.sqrt(sum(squares) / len(squares))
    if rms > LIMIT_RMS_NATS:
        raise Differs(
            f"{what}: log-probabilities differ by {rms:.4f} nats (root mean square over "
            f"{positions} positions), limit {LIMIT_RMS_NATS}"
        )
    return Agreement(positions, parted, largest, rms)


def _differences(
    where: str, expected: Mapping[int, float], got: Mapping[int, float]
) -> list[float]:
    """Return the differences (nats) over the tokens that both list; never empty."""
    # What only one of them lists, the other finds less probable than all that it lists itself.
    for listed, other, by in ((expected, got, "x86-64"), (got, expected, "this build")):
        floor = min(other.values())
        for token in listed.keys() - other.keys():
            if listed[token] - floor > LIMIT_NATS:
                raise Differs(
                    f"{where}: only {by} lists token {token}, at {listed[token]:.4f} nats; the "
                    f"other one has it below {floor:.4f}; limit {LIMIT_NATS}"
                )
    common = sorted(expected.keys() & got.keys())
    if not common:
        raise Differs(f"{where}: no token is among both builds' {len(expected)} most probable")
    for token in common:
        if not abs(got[token] - expected[token]) <= LIMIT_NATS:
            raise Differs(
                f"{where}: token {token} has log-probability {got[token]:.4f} nats, expected "
                f"{expected[token]:.4f} as on x86-64, limit {LIMIT_NATS}"
            )
    return [abs(got[token] - expected[token]) for token in common]


def _check_tie(where: str, expected: Position, token: int) -> None:
    """Raise Differs unless the x86-64 build finds `token` about as probable as its own choice."""
    best = expected.log_probabilities.get(expected.token, math.inf)
    gap = best - expected.log_probabilities.get(token, -math.inf)
    if not gap <= LIMIT_NATS:
        raise Differs(
            f"{where}: token {token}, expected {expected.token}, which x86-64 finds {gap:.4f} nats "
            f"more probable, limit {LIMIT_NATS}"
        )


def _flags() -> dict[str, str | bool]:
    return dict(schemas.read_toml(SERVER, "server")["flags"])


def _ask(
    build_name: str,
    program: Sequence[str],
    artifact: str,
    flags: Mapping[str, str | bool],
    gguf: Path,
    prompts: Sequence[str],
    tokens: int,
    writable: Mapping[str, Path],
) -> Answers:
    words = server_flags(flags, _SERVER, concurrency=1)
    request = {"prompts": prompts, "tokens": tokens, "top": TOP, "timeout_s": TIMEOUT_S}
    done = run_inside(
        ["python3", "/ask.py", json.dumps(request), *program, "--model", "/model.gguf", *words],
        what=f"ask llama-server, {build_name}",
        binds={"/ask.py": ASK, "/model.gguf": gguf, "/server": build(artifact) / "llama-server"},
        writable=writable,
        timeout_s=TIMEOUT_S + 60,
    )
    document: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return [
        [Position(place["token"], place["text"], dict(place["top"])) for place in places]
        for places in document
    ]


def main(arguments: Sequence[str]) -> int:
    """Print a line per VLEN, and what is out of bounds; return the exit code.

    The first line is the yardstick: x86-64 against itself, adding in another order.
    """
    gguf = model(arguments[0] if arguments else "banana-tiny")
    prompts = default_prompts()
    expected = answers_of_reference(gguf, prompts)
    print("build, positions, parted, largest_nats, rms_nats, vector instructions by kernel")
    code = _show("x86-64", expected, answers_of_reference(gguf, prompts, flash_attention="off"), {})
    for vlen_bits in vlens():
        got, executed = answers_of_board(default_machine({"vlen_bits": vlen_bits}), gguf, prompts)
        code = max(code, _show(f"VLEN {vlen_bits}", expected, got, executed))
    return code


def _show(what: str, expected: Answers, got: Answers, executed: Mapping[str, int]) -> int:
    try:
        found = compare(what, expected, got)
    except Differs as error:
        print(error)
        return error.exit_code
    numbers = (found.positions, found.parted, f"{found.largest_nats:.4f}", f"{found.rms_nats:.4f}")
    kernels_run = " ".join(f"{kernel}={count}" for kernel, count in sorted(executed.items()))
    print(what, *numbers, kernels_run, sep=", ")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ArtifactError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)

"""The board's llama-server uses RVV, and computes what the x86-64 build computes.

Promise: at each VLEN the board can have, the real programs are asked and compared; the check is
shown to fail on a model with one wrong block scale, and on the one defect that is known in the
pinned kernels (docs/numerics.md).
Limit: as board/numerics.py says.  That VS leaves Off on the board is asserted by the agent.
"""

import dataclasses
import json
import re
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader

from board import numerics
from board.models import model
from board.numerics import (
    LIMIT_NATS,
    Answers,
    Position,
    answers_of_board,
    answers_of_reference,
    compare,
    default_prompts,
    vector_instructions,
)
from board.virtual.machine import Machine, default_machine, vlens
from toolchain.command import CommandFailed
from toolchain.errors import Differs
from toolchain.inside import run_inside

EXECUTED = {  # which kernel the pinned source has for which VLEN
    128: {"ggml_vec_dot_q4_K_q8_K_vl128", "ggml_vec_dot_q6_K_q8_K_vl128"},
    256: {"ggml_vec_dot_q4_K_q8_K_vl256", "ggml_vec_dot_q6_K_q8_K_vl256"},
    512: {"ggml_vec_dot_q4_K_q8_K_vl256", "ggml_vec_dot_q6_K_q8_K_vl512"},
    1024: {"ggml_vec_dot_q4_K_q8_K_vl256", "ggml_vec_dot_q6_K_q8_K_vl1024"},
}


def at(vlen_bits: int) -> Machine:
    return default_machine({"vlen_bits": vlen_bits})


def said(*tops: dict[int, float]) -> Answers:
    """One answer to one prompt, greedy."""
    return [[Position(max(top, key=lambda token: top[token]), "", top) for top in tops]]


CALM = {7: -0.5, 8: -2.0, 9: -4.0}


def test_equal_answers_agree_exactly() -> None:
    found = compare("VLEN 0", said(CALM, CALM), said(CALM, CALM))
    assert (found.positions, found.parted, found.largest_nats, found.rms_nats) == (2, 0, 0, 0)


def test_a_difference_within_the_limits_is_measured() -> None:
    by = numerics.LIMIT_RMS_NATS / 2
    found = compare("VLEN 0", said(CALM), said({**CALM, 8: -2.0 + by}))
    assert found.largest_nats == pytest.approx(by)
    assert found.rms_nats == pytest.approx(by / 3**0.5)


def test_a_probability_out_of_bounds_is_named() -> None:
    wrong = {**CALM, 9: -4.0 - 1.01 * LIMIT_NATS}
    with pytest.raises(Differs, match="VLEN 256: prompt 0, position 1: token 9 has ") as caught:
        compare("VLEN 256", said(CALM, CALM), said(CALM, wrong))
    assert f"expected -4.0000 as on x86-64, limit {LIMIT_NATS}" in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_probability_that_is_no_number_is_out_of_bounds(value: float) -> None:
    with pytest.raises(Differs, match="position 0: token 9"):
        compare("VLEN 256", said(CALM), [[Position(7, "", {**CALM, 9: value})]])


def test_many_small_differences_are_out_of_bounds_together() -> None:
    by = (numerics.LIMIT_RMS_NATS + LIMIT_NATS) / 2
    with pytest.raises(Differs, match=r"VLEN 256: .* differ by .*root mean square"):
        compare("VLEN 256", said(CALM), said({token: lp + by for token, lp in CALM.items()}))


def test_a_probable_token_that_one_build_does_not_know_is_named() -> None:
    missing = {7: -0.5, 9: -4.0, 10: -2.0 - LIMIT_NATS - 4}
    with pytest.raises(Differs, match="only x86-64 lists token 8"):
        compare("VLEN 256", said(CALM), said(missing))
    with pytest.raises(Differs, match="only this build lists token 8"):
        compare("VLEN 256", said(missing), said(CALM))


def test_nothing_in_common_is_no_agreement() -> None:
    with pytest.raises(Differs, match="no token is among both builds' 3 most probable"):
        compare("VLEN 256", said({1: -5.0, 2: -5.0, 3: -5.0}), said({4: -5.0, 5: -5.0, 6: -5.0}))


def test_tokens_may_part_at_a_near_tie_and_nothing_is_compared_after() -> None:
    tie = {7: -0.70, 8: -0.71}
    other = said(tie)[0][0]
    parted = [[*said(CALM)[0], Position(8, "", other.log_probabilities), *said({99: 0.0})[0]]]
    found = compare("VLEN 0", said(CALM, tie, CALM), parted)
    assert (found.positions, found.parted) == (2, 1)


def test_tokens_may_not_part_where_one_is_clearly_better() -> None:
    clear = {7: -0.1, 8: -0.1 - 1.01 * LIMIT_NATS}
    with pytest.raises(Differs, match="position 0: token 8, expected 7, which x86-64 finds"):
        compare("VLEN 256", said(clear), [[Position(8, "", clear)]])
    with pytest.raises(Differs, match="token 5, expected 7, which x86-64 finds inf nats"):
        compare("VLEN 256", said(clear), [[Position(5, "", clear)]])


def test_parting_too_early_leaves_nothing_to_agree_on() -> None:
    tie = {7: -0.70, 8: -0.71}
    with pytest.raises(Differs, match="only 1 of 3 positions can be compared"):
        compare("VLEN 256", said(tie, CALM, CALM), [[Position(8, "", tie), *said(CALM, CALM)[0]]])


def test_qemu_log_is_counted_once_per_address() -> None:
    log = (
        "----------------\nIN: kernel_a\n"
        "0x0000000000014f5c:  0c05f057          vsetvli                 zero,a1,e8,m1,ta,ma\n"
        "0x0000000000014f60:  00000013          nop                     \n\n"
        "----------------\nIN: kernel_a\n"
        "0x0000000000014f5c:  0c05f057          vsetvli                 zero,a1,e8,m1,ta,ma\n"
        "----------------\nIN: kernel_b\n"
        "0x0000000000015000:  00000013          nop                     \n"
    )
    assert vector_instructions(log) == {"kernel_a": 1}


FAKE_SERVER = """
import http.server, json, os, sys
fault = sys.argv[1]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(503 if fault == "busy" else 200, {})
    def do_POST(self):
        if fault == "killed":
            os.kill(os.getpid(), 11)
        top = [{"id": 5, "logprob": None if fault == "null" else -0.1}]
        place = {"id": 5, "token": " x", "top_logprobs": top}
        places = [place] * (1 if fault == "short" else 2)
        self.answer(500 if fault == "error" else 200, {"completion_probabilities": places})
    def answer(self, code, document):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())
http.server.HTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
"""


@pytest.mark.boot
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("none", 0, ""),
        ("busy", 1, "the server was not ready in time"),
        ("killed", 139, "the server ended by itself, code -11"),
        ("short", 1, "1 tokens, expected 2: prompt 'a'"),
        ("null", 1, "no proper answer to 'a': TypeError"),
        ("error", 1, "no proper answer to 'a': <HTTPError 500"),
    ],
)
def test_a_server_that_does_not_answer_properly_is_named(
    fault: str, code: int, message: str
) -> None:
    timeout_s = 1 if fault == "busy" else 120
    request = json.dumps({"prompts": ["a"], "tokens": 2, "top": 1, "timeout_s": timeout_s})
    ask = ["sh", "-c", 'exec python3 /ask.py "$@" 2>&1', "sh", request]
    done = run_inside(
        [*ask, "python3", "-c", FAKE_SERVER, fault],
        what="ask a fake server",
        binds={"/ask.py": numerics.ASK},
        check=False,
    )
    assert done.returncode == code
    assert message in done.stdout


@pytest.fixture(scope="module")
def reference() -> Answers:
    return answers_of_reference(model("banana-tiny"), default_prompts())


@pytest.mark.boot
def test_the_limits_are_tried_at_every_vlen_of_the_board() -> None:
    assert vlens() == list(EXECUTED)


@pytest.mark.boot
@pytest.mark.parametrize("vlen_bits", EXECUTED)
def test_the_vector_build_is_right(vlen_bits: int, reference: Answers) -> None:
    answers, executed = answers_of_board(at(vlen_bits), model("banana-tiny"), default_prompts())
    compare(f"VLEN {vlen_bits}", reference, answers)
    dots = {name for name in executed if re.search(r"_vl\d+$", name)}
    assert dots == EXECUTED[vlen_bits]
    assert executed.keys() > dots, "activations and attention must be vector code, too"


def doctored(folder: Path, tensor: str, start: int, change: Callable[[bytes], bytes]) -> Path:
    """Return a copy of banana-tiny with one tensor's bytes from `start` on changed."""
    path = folder / "doctored.gguf"
    shutil.copyfile(model("banana-tiny"), path)
    (found,) = (entry for entry in GGUFReader(path).tensors if entry.name == tensor)
    content = path.read_bytes()
    place = int(found.data_offset) + start
    end = int(found.data_offset + found.n_bytes)
    changed = change(content[place:end])
    assert len(changed) == end - place
    path.write_bytes(content[:place] + changed + content[end:])
    return path


@pytest.mark.boot
def test_one_wrong_block_scale_is_seen(tmp_path: Path, reference: Answers) -> None:
    def flip_sign(blocks: bytes) -> bytes:
        return bytes([blocks[0] ^ 0x80]) + blocks[1:]

    # Byte 1 of a Q4_K block holds the sign of its scale: one of some ten thousand blocks is wrong.
    wrong = doctored(tmp_path, "blk.0.ffn_down.weight", 1, flip_sign)
    answers, _ = answers_of_board(at(256), wrong, default_prompts())
    with pytest.raises(Differs, match="VLEN 256: "):
        compare("VLEN 256", reference, answers)


@pytest.mark.boot
def test_the_known_defect_of_the_pinned_kernels_is_seen(tmp_path: Path) -> None:
    def constant(biases: bytes) -> bytes:
        return struct.pack("<f", 200.0) * (len(biases) // 4)

    # Where 32 activations in a row are alike, the Q4_K kernel for VLEN 256 and more overflows its
    # 16-bit sums; a large constant bias of the values makes the attention's output like that.
    alike = doctored(tmp_path, "blk.0.attn_v.bias", 0, constant)
    prompts = default_prompts()[:1]
    expected = answers_of_reference(alike, prompts)
    compare("VLEN 128", expected, answers_of_board(at(128), alike, prompts)[0])
    with pytest.raises(Differs, match="VLEN 256: prompt 0, position 0"):
        compare("VLEN 256", expected, answers_of_board(at(256), alike, prompts)[0])


@pytest.mark.boot
def test_a_real_model_knows_the_capital_of_france() -> None:
    # Q4_1, another tensor type, in the one direction that needs no reference.
    answers, executed = answers_of_board(
        at(256), model("smollm2"), ["The capital of France is"], tokens=1
    )
    assert answers[0][0].text == " Paris"
    assert executed["ggml_vec_dot_q4_1_q8_1"] > 0


@pytest.mark.boot
def test_without_vector_unit_the_program_dies_of_an_illegal_instruction() -> None:
    machine = default_machine()
    scalar = machine.cpu.replace("v=true", "v=false").replace("zvfh=true", "zvfh=false")
    with pytest.raises(CommandFailed, match="SIGILL") as caught:
        answers_of_board(
            dataclasses.replace(machine, cpu=scalar), model("banana-tiny"), default_prompts()[:1]
        )
    assert caught.value.completed.returncode == 128 + signal.SIGILL

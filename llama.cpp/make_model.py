#!/usr/bin/env python3
"""Write a model file that costs what a real one costs and knows nothing.

Promise: a GGUF file of architecture qwen2 with real Q4_K and Q6_K blocks in the mix that
llama.cpp's Q4_K_M has (function llama_tensor_get_type_impl in src/llama-quant.cpp). Every byte is a
function of the shape, its seed and the word list alone: the same file on each run and each machine.
A prompt of W listed words with single spaces between them is W tokens. Every token that the model
can emit is printable ASCII by itself, except the end token, which ignore_eos takes away. Other text
is tokenised byte by byte.
Limit: the weights are pseudo-random; the text means nothing, and no quality can be measured.

    python llama.cpp/make_model.py --shape banana-tiny --out banana-tiny.gguf

Exit code 2: no such shape, or a shape that cannot be; 3: the file cannot be written; 4: bad word
list; 130: interrupted. The output appears whole or not at all.
"""

import argparse
import hashlib
import math
import os
import re
import struct
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType
from gguf import GGUFWriter, LlamaFileType, TokenType

REPO = Path(__file__).resolve().parent.parent
# This folder's name has a dot, so it is no package: the script is run by path, and the repository
# has to be put on the import path by hand.
sys.path.insert(0, str(REPO))

from toolchain.errors import (  # noqa: E402
    ArtifactError,
    EnvironmentUnfit,
    InvalidData,
    UsageError,
)

Bytes = npt.NDArray[np.uint8]

SHAPES = Path(__file__).resolve().parent / "shapes.toml"
BLOCK_WEIGHTS = 256  # QK_K in ggml-common.h
END_TOKEN = "<|endoftext|>"

# Standard deviations. With 1 / sqrt(row length) for every other matrix, each layer adds about 0.7
# to the residual stream, so activations neither grow nor vanish. An embedding of 4 leaves the next
# token dependent on the context, and dilutes the rounding of activations to 8 bits, which comes out
# differently on each instruction set: at 1 it changes about 4 tokens of 100, at 4 about 2.
EMBEDDING_STD = 4.0
LOGIT_STD = 4.0
BIAS_LIMIT = 0.5
NORM_LIMITS = (0.5, 1.5)


@dataclass(frozen=True)
class Shape:
    """One entry of shapes.toml; sizes are numbers of elements, context is in tokens."""

    seed: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    rope_base: float
    rms_epsilon: float

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Vocabulary:
    """Token texts in the byte-level alphabet of GPT-2, and which tokens must never be emitted."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    suppressed: list[int]
    end_id: int


@dataclass(frozen=True)
class Tensor:
    """A tensor as the file holds it: (rows, bytes per row) for blocks, plain elements for F32."""

    name: str
    quant: QuantType
    data: npt.NDArray[Any]


def read_shape(path: Path, name: str) -> tuple[Shape, Path]:
    """Return the named shape and the path of its word list.

    Raises UsageError when the file, the name or a value is not of the documented form.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        words = path.parent / document["vocabulary"]["words"]
        shapes = dict(document["shapes"])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the shapes: {error} ({path})") from None
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{path}: expected [vocabulary] with words = PATH, and a table [shapes.NAME] per shape"
        ) from None
    if name not in shapes:
        raise UsageError(f"no shape named {name!r} in {path}; there are: {', '.join(shapes)}")
    return parse_shape(f"{path}: shapes.{name}", shapes[name]), words


def parse_shape(where: str, table: object) -> Shape:
    """Check one table of shapes.toml. Raises UsageError, starting with `where`."""
    wanted = get_type_hints(Shape)
    if not isinstance(table, dict) or set(table) != set(wanted):
        got = ", ".join(sorted(table)) if isinstance(table, dict) else repr(table)
        raise UsageError(f"{where}: expected exactly {', '.join(sorted(wanted))}; got {got}")
    for key, kind in wanted.items():
        value = table[key]
        if type(value) is not kind or not 0 < value < 2**31:
            raise UsageError(
                f"{where}.{key}: expected a number of type {kind.__name__} above 0 and below 2^31, "
                f"got {value!r}"
            )
    shape = Shape(**table)
    for key, value, divisor, why in (
        ("width", shape.width, BLOCK_WEIGHTS, "a row is made of whole blocks"),
        ("ffn", shape.ffn, BLOCK_WEIGHTS, "a row is made of whole blocks"),
        ("width", shape.width, 2 * shape.heads, "a head holds pairs for the rotary embedding"),
        ("heads", shape.heads, shape.kv_heads, "each KV head serves the same number of heads"),
    ):
        if value % divisor:
            raise UsageError(f"{where}.{key}: expected a multiple of {divisor}: {why}; got {value}")
    return shape


def read_words(path: Path) -> list[str]:
    """Return the words, one per line. Raises InvalidData if one cannot be a token of its own."""
    try:
        words = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidData(f"cannot read the word list: {error} ({path})") from None
    if not words:
        raise InvalidData(f"{path}: expected words, one per line, got an empty file")
    seen: set[str] = set()
    for number, word in enumerate(words, start=1):
        # A word of one letter would be the same token as the letter.
        if not re.fullmatch("[a-z]{2,}", word) or word in seen:
            raise InvalidData(
                f"{path}:{number}: expected a new word of at least two letters a-z, got {word!r}"
            )
        seen.add(word)
    return words


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a GPT-2 vocabulary, by byte value.

    Visible Latin-1 characters stand for themselves, the others for U+0100 and following, in order
    (unicode_byte_to_utf8_map in llama.cpp's src/unicode.cpp).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def make_vocabulary(words: list[str]) -> Vocabulary:
    """Make one token per byte (its value is its id), per word, and per space followed by a word."""
    letters = byte_letters()
    space = letters[0x20]
    # llama.cpp refuses a vocabulary without merges, so there is one: two spaces. The words need
    # none, because pre-tokenizer "llama-bpe" looks a whole word up first.
    ordinary = [*letters, 2 * space, *words, *(space + word for word in words)]
    return Vocabulary(
        tokens=[*ordinary, END_TOKEN],
        types=[TokenType.NORMAL] * len(ordinary) + [TokenType.CONTROL],
        merges=[f"{space} {space}"],
        # All bytes that are not a visible ASCII character, and the two spaces.
        suppressed=[*range(0x21), *range(0x7F, 0x101)],
        end_id=len(ordinary),
    )


def stream(seed: int, name: str, size_bytes: int) -> Bytes:
    """Return the first bytes of SHAKE256("<seed> <tensor name>"): all randomness there is."""
    digest = hashlib.shake_256(f"{seed} {name}".encode()).digest(size_bytes)
    return np.frombuffer(digest, dtype=np.uint8)


def half(value: float) -> Bytes:
    """Return the two bytes of the nearest half-precision number, little-endian."""
    return np.frombuffer(struct.pack("<e", value), dtype=np.uint8)


def root_mean_square(values: range, offset: float = 0.0) -> float:
    """Return the root mean square of value - offset over equally likely values."""
    return math.sqrt(sum((value - offset) ** 2 for value in values) / len(values))


def q4_k(random: Bytes, std: float) -> Bytes:
    """Turn 136 random bytes per block into Q4_K blocks of 144 bytes with mean 0 and this deviation.

    A weight is d * scale * quant - dmin * min, quant 0 to 15 with mean 7.5. min = scale and
    dmin = 7.5 d make the mean zero; scales are drawn from 32 to 63, so no weight group is empty.
    """
    scales = random[:, :8] & 0x1F | 0x20
    d = std / (root_mean_square(range(32, 64)) * root_mean_square(range(16), 7.5))
    blocks = np.empty((len(random), 144), dtype=np.uint8)
    blocks[:, 0:2] = half(d)
    blocks[:, 2:4] = half(7.5 * d)
    # Eight scales and eight mins of six bits in twelve bytes: the last four hold the low halves of
    # the later ones, whose high bits are the top bits of the first eight bytes.
    early, late = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = early | late >> 4 << 6
    blocks[:, 12:16] = late & 0x0F | (late & 0x0F) << 4
    blocks[:, 16:144] = random[:, 8:136]
    return blocks


def q6_k(random: Bytes, std: float) -> Bytes:
    """Turn 208 random bytes per block into Q6_K blocks of 210 bytes with mean 0 and this deviation.

    A weight is d * scale * (quant - 32), quant 0 to 63. The scales are 8 to 15 with a random sign,
    which makes the mean zero.
    """
    drawn = random[:, 192:208]
    magnitude = (drawn & 0x07 | 0x08).astype(np.int8)
    scales = np.where(drawn & 0x80, -magnitude, magnitude)
    d = std / (root_mean_square(range(8, 16)) * root_mean_square(range(64), 32))
    blocks = np.empty((len(random), 210), dtype=np.uint8)
    blocks[:, 0:192] = random[:, 0:192]
    blocks[:, 192:208] = scales.view(np.uint8)
    blocks[:, 208:210] = half(d)
    return blocks


# Per type: the random bytes that a block needs, and how it is made of them.
BLOCKS = {QuantType.Q4_K: (136, q4_k), QuantType.Q6_K: (208, q6_k)}


def make_tensors(shape: Shape, tokens: int) -> Iterator[Tensor]:
    """Yield all tensors, with the types that Q4_K_M gives them."""

    def matrix(name: str, rows: int, columns: int, quant: QuantType, std: float) -> Tensor:
        random_bytes, make = BLOCKS[quant]
        name += ".weight"
        blocks = rows * columns // BLOCK_WEIGHTS
        random = stream(shape.seed, name, blocks * random_bytes).reshape(blocks, random_bytes)
        return Tensor(name, quant, make(random, std).reshape(rows, -1))

    def vector(name: str, size: int, low: float, high: float) -> Tensor:
        # 16-bit steps, so that every value is exact.
        drawn = stream(shape.seed, name, 2 * size).view("<u2").astype(np.float32)
        return Tensor(name, QuantType.F32, drawn / 65536 * np.float32(high - low) + np.float32(low))

    kv_width = shape.kv_heads * shape.head_size
    by_width, by_ffn = 1 / math.sqrt(shape.width), 1 / math.sqrt(shape.ffn)
    low, high = QuantType.Q4_K, QuantType.Q6_K

    yield matrix("token_embd", tokens, shape.width, low, EMBEDDING_STD)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        better = high if more_bits(layer, shape.layers) else low
        yield vector(at + "attn_norm.weight", shape.width, *NORM_LIMITS)
        for part, rows, quant in (
            ("attn_q", shape.width, low),
            ("attn_k", kv_width, low),
            ("attn_v", kv_width, better),
        ):
            yield matrix(at + part, rows, shape.width, quant, by_width)
            yield vector(at + part + ".bias", rows, -BIAS_LIMIT, BIAS_LIMIT)
        yield matrix(at + "attn_output", shape.width, shape.width, low, by_width)
        yield vector(at + "ffn_norm.weight", shape.width, *NORM_LIMITS)
        yield matrix(at + "ffn_gate", shape.ffn, shape.width, low, by_width)
        yield matrix(at + "ffn_up", shape.ffn, shape.width, low, by_width)
        yield matrix(at + "ffn_down", shape.width, shape.ffn, better, by_ffn)
    yield vector("output_norm.weight", shape.width, *NORM_LIMITS)
    yield matrix("output", tokens, shape.width, high, LOGIT_STD * by_width)


def more_bits(layer: int, layers: int) -> bool:
    """Tell whether Q4_K_M gives attn_v and ffn_down of this layer Q6_K instead of Q4_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def write_model(path: Path, name: str, shape: Shape, vocabulary: Vocabulary) -> None:
    """Write the file beside its place and move it there. Raises OSError; leaves nothing half."""
    writer = GGUFWriter(None, "qwen2")
    writer.add_type("model")
    writer.add_name(name)
    writer.add_description(f"pseudo-random weights, seed {shape.seed}: it knows nothing")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(2)

    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    # Qwen2 names the end token as its beginning, too, and never puts it before a prompt.
    writer.add_bos_token_id(vocabulary.end_id)
    writer.add_eos_token_id(vocabulary.end_id)
    writer.add_pad_token_id(vocabulary.end_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    # The library has no function for this key; llama.cpp reads it in src/llama-vocab.cpp and gives
    # these tokens a logit of minus infinity in common/sampling.cpp.
    writer.add_array("tokenizer.ggml.suppress_tokens", vocabulary.suppressed)

    for tensor in make_tensors(shape, len(vocabulary.tokens)):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.quant)

    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", required=True, help="name of a shape, e.g. banana-tiny")
    parser.add_argument("--out", required=True, type=Path, help="the GGUF file to write")
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="default: %(default)s")
    options = parser.parse_args(arguments)
    out: Path = options.out
    try:
        shape, words = read_shape(options.shapes, options.shape)
        vocabulary = make_vocabulary(read_words(words))
        try:
            write_model(out, options.shape, shape, vocabulary)
        except OSError as error:
            # numpy gives no reason when a tensor could only be written in part.
            reason = error.strerror or "only a part could be written; is the disk full?"
            raise EnvironmentUnfit(
                f"cannot write the model: {reason} ({out}); nothing was left behind"
            ) from None
    except ArtifactError as error:
        print(f"make_model: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("make_model: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    with out.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    print(f"{out}: {out.stat().st_size} bytes, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

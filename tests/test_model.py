"""The model maker: same bytes, right blocks, right words, and one clear line when it cannot.

Promise: everything that make_model.py says of its file is checked on the file, read back with the
gguf library; every failure is provoked through the command line.
Limit: that llama.cpp itself loads, tokenises and speaks the file is for the server tests.
"""

import hashlib
import math
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QuantType
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize

ROOM = Path(__file__).resolve().parent.parent / "llama.cpp"
WORDS = ["ant", "banana", "by", "fig"]
TINY: dict[str, object] = {
    "seed": 1,
    "layers": 4,
    "width": 256,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 768,
    "context": 4096,
    "rope_base": 1000000.0,
    "rms_epsilon": 1e-6,
}


def make(
    out: Path, *, shapes: Path | None = None, shape: str = "x", **how: Any
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(ROOM / "make_model.py"), "--shape", shape, "--out", str(out)]
    if shapes:
        argv += ["--shapes", str(shapes)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, **how)


def shapes_file(folder: Path, words: str = "\n".join(WORDS) + "\n", **changes: object) -> Path:
    """Write a shapes file with one shape, x: TINY with changes; a change to None leaves it out."""
    table = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    lines = ['[vocabulary]\nwords = "words.txt"\n[shapes.x]\n']
    lines += [f"{key} = {value}\n" for key, value in table.items()]
    (folder / "words.txt").write_text(words)
    path = folder / "shapes.toml"
    path.write_text("".join(lines))
    return path


def made(folder: Path, **changes: object) -> Path:
    out = folder / "model.gguf"
    result = make(out, shapes=shapes_file(folder, **changes))  # type: ignore[arg-type]
    assert (result.returncode, result.stderr) == (0, "")
    return out


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def quant_types(path: Path) -> dict[str, QuantType]:
    return {tensor.name: tensor.tensor_type for tensor in GGUFReader(path).tensors}


def field(reader: GGUFReader, name: str) -> Any:
    entry = reader.get_field(name)
    assert entry is not None, name
    return entry.contents()


def decoded(token: str) -> bytes:
    """Turn a token text of the byte-level alphabet back into bytes."""
    shifted = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return bytes(shifted[ord(c) - 0x100] if ord(c) >= 0x100 else ord(c) for c in token)


# -- the bytes


def test_same_bytes_on_every_run(tmp_path: Path) -> None:
    shapes = shapes_file(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = make(tmp_path / "first.gguf", shapes=shapes)
    second = make(
        Path("second.gguf"),
        shapes=shapes,
        cwd=elsewhere,
        env={"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu"},
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    digest = sha256(tmp_path / "first.gguf")
    assert digest == sha256(elsewhere / "second.gguf")
    assert digest in first.stdout


def test_another_seed_changes_every_tensor_and_no_size(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    left = GGUFReader(made(one))
    right = GGUFReader(made(two, seed=2))
    for mine, other in zip(left.tensors, right.tensors, strict=True):
        assert (mine.name, mine.tensor_type, *mine.shape) == (
            other.name,
            other.tensor_type,
            *other.shape,
        )
        assert not np.array_equal(mine.data, other.data), mine.name


# -- the blocks


@pytest.mark.parametrize(
    ("layers", "better"),
    [
        (4, {2, 3}),
        (8, {0, 3, 6, 7}),
        (24, {0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23}),
    ],
)
def test_mix_is_that_of_q4_k_m(tmp_path: Path, layers: int, better: set[int]) -> None:
    """The layers were worked out by hand from use_more_bits in llama.cpp's llama-quant.cpp."""
    expected = {"token_embd.weight": QuantType.Q4_K, "output.weight": QuantType.Q6_K}
    expected["output_norm.weight"] = QuantType.F32
    for layer in range(layers):
        raised = QuantType.Q6_K if layer in better else QuantType.Q4_K
        for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
            expected[f"blk.{layer}.{name}.weight"] = QuantType.Q4_K
        for name in ("attn_v", "ffn_down"):
            expected[f"blk.{layer}.{name}.weight"] = raised
        for name in ("attn_norm.weight", "ffn_norm.weight"):
            expected[f"blk.{layer}.{name}"] = QuantType.F32
        for name in ("attn_q.bias", "attn_k.bias", "attn_v.bias"):
            expected[f"blk.{layer}.{name}"] = QuantType.F32
    assert quant_types(made(tmp_path, layers=layers)) == expected


def test_shapes_of_tensors(tmp_path: Path) -> None:
    tokens = 256 + 1 + 2 * len(WORDS) + 1
    reader = GGUFReader(made(tmp_path, width=512, heads=8, kv_heads=2, ffn=1536))
    sizes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
    assert {name: sizes[name] for name in sizes if not name.startswith("blk.")} == {
        "token_embd.weight": (512, tokens),
        "output_norm.weight": (512,),
        "output.weight": (512, tokens),
    }
    assert {name[6:]: size for name, size in sizes.items() if name.startswith("blk.3.")} == {
        "attn_norm.weight": (512,),
        "attn_q.weight": (512, 512),
        "attn_q.bias": (512,),
        "attn_k.weight": (512, 128),
        "attn_k.bias": (128,),
        "attn_v.weight": (512, 128),
        "attn_v.bias": (128,),
        "attn_output.weight": (512, 512),
        "ffn_norm.weight": (512,),
        "ffn_gate.weight": (512, 1536),
        "ffn_up.weight": (512, 1536),
        "ffn_down.weight": (1536, 512),
    }
    assert field(reader, "qwen2.attention.head_count") == 8
    assert field(reader, "qwen2.attention.head_count_kv") == 2
    assert field(reader, "qwen2.embedding_length") == 512
    assert field(reader, "qwen2.feed_forward_length") == 1536


def test_weights_are_finite_and_spread_as_meant(tmp_path: Path) -> None:
    special = {"token_embd.weight": 4.0, "output.weight": 4 / math.sqrt(256)}
    for tensor in GGUFReader(made(tmp_path)).tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        assert np.isfinite(weights).all(), tensor.name
        if tensor.name.endswith("norm.weight"):
            assert 0.5 <= weights.min() < 0.6 and 1.4 < weights.max() < 1.5, tensor.name
        elif tensor.name.endswith(".bias"):
            assert -0.5 <= weights.min() < -0.4 and 0.4 < weights.max() < 0.5, tensor.name
        else:
            std = special.get(tensor.name, 1 / math.sqrt(weights.shape[1]))
            assert weights.std() == pytest.approx(std, rel=0.03), tensor.name
            assert abs(weights.mean()) < 5 * std / math.sqrt(weights.size), tensor.name
            # Each single row is alive, and no two rows are the same.
            assert (weights.std(axis=1) > 0.6 * std).all(), tensor.name
            assert len(np.unique(weights, axis=0)) == len(weights), tensor.name


# -- the words


def test_vocabulary(tmp_path: Path) -> None:
    reader = GGUFReader(made(tmp_path))
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    suppressed = set(field(reader, "tokenizer.ggml.suppress_tokens"))
    end = field(reader, "tokenizer.ggml.eos_token_id")

    assert len(tokens) == len(set(tokens)) == len(types)
    assert (tokens[end], types[end]) == ("<|endoftext|>", TokenType.CONTROL)
    texts = [decoded(token) for token in tokens[:end]]
    assert end == len(tokens) - 1
    assert set(types[:end]) == {TokenType.NORMAL}
    # Any text at all has tokens.
    assert texts[:256] == [bytes([byte]) for byte in range(256)]
    # A listed word is one token, at the start of a prompt and after a space.
    for word in WORDS:
        assert texts.count(word.encode()) == 1
        assert texts.count(b" " + word.encode()) == 1
    assert field(reader, "tokenizer.ggml.model") == "gpt2"
    assert field(reader, "tokenizer.ggml.pre") == "llama-bpe"
    assert field(reader, "tokenizer.ggml.bos_token_id") == end
    assert field(reader, "tokenizer.ggml.add_bos_token") is False
    assert field(reader, "tokenizer.ggml.add_eos_token") is False
    # What can be emitted is printable ASCII with something to see in it, and nothing else is.
    for number, text in enumerate(texts):
        readable = all(0x20 <= byte <= 0x7E for byte in text) and bool(text.strip())
        assert (number not in suppressed) == readable, text
    assert end not in suppressed


def test_shapes_that_are_shipped(tmp_path: Path) -> None:
    """All shapes are made from the real word list, and cost what shapes.toml says."""
    shipped = tomllib.loads((ROOM / "shapes.toml").read_text())["shapes"]
    cost = {}
    for name in shipped:
        out = tmp_path / f"{name}.gguf"
        result = make(out, shape=name)
        assert (result.returncode, result.stderr) == (0, "")
        reader = GGUFReader(out)
        assert field(reader, "general.name") == name
        assert len(field(reader, "tokenizer.ggml.tokens")) == 256 + 1 + 2 * 512 + 1
        cost[name] = sum(
            int(tensor.n_elements)
            for tensor in reader.tensors
            if len(tensor.shape) == 2 and tensor.name != "token_embd.weight"
        )
    assert {name: round(weights / 1e6, 1) for name, weights in cost.items()} == {
        "banana-tiny": 3.5,
        "banana-small": 12.7,
        "qwen-0.5b-shape": 7.4,
        "qwen-1.5b-shape": 39.2,
        "qwen-3b-shape": 46.7,
    }


REAL = {  # layers, width, feed-forward, heads, kv heads: the config.json of Qwen2.5 models
    "qwen-0.5b-shape": (24, 896, 4864, 14, 2),
    "qwen-1.5b-shape": (28, 1536, 8960, 12, 2),
    "qwen-3b-shape": (36, 2048, 11008, 16, 2),
}


@pytest.mark.parametrize("name", REAL)
def test_shapes_keep_the_ratios_of_real_models_as_far_as_blocks_allow(name: str) -> None:
    shape = tomllib.loads((ROOM / "shapes.toml").read_text())["shapes"][name]
    layers, width, ffn, heads, kv_heads = REAL[name]
    assert shape["layers"] * 4 == layers
    assert shape["width"] == 256 * round(width * 2 / 7 / 256)
    assert shape["ffn"] == 256 * round(shape["width"] * ffn / width / 256)
    assert shape["width"] // shape["heads"] == width // heads
    assert shape["kv_heads"] == kv_heads


# -- what goes wrong


def refused(result: subprocess.CompletedProcess[str], code: int, *needles: str, left: Path) -> None:
    """Check code, one line with the needles, and that the folder has nothing half-written."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("make_model: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n"), result.stderr
    for needle in needles:
        assert needle in result.stderr
    assert not [path.name for path in left.rglob("*") if path.suffix in (".part", ".gguf")]


def test_unknown_shape(tmp_path: Path) -> None:
    result = make(tmp_path / "m.gguf", shape="banana-huge")
    refused(result, 2, "'banana-huge'", "banana-tiny, banana-small, qwen-0.5b", left=tmp_path)


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"width": 320}, ("shapes.x.width", "multiple of 256", "320")),
        ({"ffn": 700}, ("shapes.x.ffn", "multiple of 256", "700")),
        ({"heads": 3, "kv_heads": 1}, ("shapes.x.width", "multiple of 6", "256")),
        ({"kv_heads": 3}, ("shapes.x.heads", "multiple of 3", "got 4")),
        ({"layers": 0}, ("shapes.x.layers", "int", "got 0")),
        ({"layers": "true"}, ("shapes.x.layers", "int", "got True")),
        ({"context": 2**40}, ("shapes.x.context", "2^31")),
        ({"rope_base": "nan"}, ("shapes.x.rope_base", "float", "nan")),
        ({"seed": None}, ("shapes.x", "expected exactly", "seed")),
        ({"extra": 1}, ("shapes.x", "expected exactly", "extra")),
    ],
)
def test_impossible_shape(
    tmp_path: Path, changes: dict[str, object], needles: tuple[str, ...]
) -> None:
    result = make(tmp_path / "m.gguf", shapes=shapes_file(tmp_path, **changes))  # type: ignore[arg-type]
    refused(result, 2, *needles, left=tmp_path)


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("[shapes.x", "cannot read the shapes"),
        ("[shapes.x]\nseed = 1\n", "expected [vocabulary]"),
        ("[vocabulary]\nwords = 'w'\n", "expected [vocabulary]"),
        ("shapes = 3\n[vocabulary]\nwords = 'w'\n", "expected [vocabulary]"),
        ("shapes.x = 3\n[vocabulary]\nwords = 'w'\n", "expected exactly"),
        ("[vocabulary]\nwords = 3\n[shapes.x]\n", "expected [vocabulary]"),
    ],
)
def test_broken_shapes_file(tmp_path: Path, text: str, needle: str) -> None:
    shapes = tmp_path / "shapes.toml"
    shapes.write_text(text)
    refused(make(tmp_path / "m.gguf", shapes=shapes), 2, needle, str(shapes), left=tmp_path)


def test_no_shapes_file(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    refused(make(tmp_path / "m.gguf", shapes=missing), 2, str(missing), left=tmp_path)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        ("", "got an empty file"),
        ("ant\nBanana\n", "words.txt:2:"),
        ("ant\n\nfig\n", "words.txt:2:"),
        ("ant\na\n", "words.txt:2:"),
        ("ant\nfig\nant\n", "words.txt:3:"),
        ("ant fig\n", "words.txt:1:"),
        ("caf\u00e9\n", "cannot read the word list"),
    ],
)
def test_bad_words(tmp_path: Path, words: str, needle: str) -> None:
    result = make(tmp_path / "m.gguf", shapes=shapes_file(tmp_path, words=words))
    refused(result, 4, needle, "words.txt", left=tmp_path)


def test_no_words(tmp_path: Path) -> None:
    shapes = shapes_file(tmp_path)
    (tmp_path / "words.txt").unlink()
    refused(make(tmp_path / "m.gguf", shapes=shapes), 4, "words.txt", left=tmp_path)


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "nowhere" / "m.gguf"
    result = make(out, shapes=shapes_file(tmp_path))
    refused(result, 3, "cannot write", "No such file", str(out), left=tmp_path)


def test_output_is_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "folder"
    out.mkdir()
    result = make(out, shapes=shapes_file(tmp_path))
    refused(result, 3, "cannot write", "directory", str(out), left=tmp_path)


def test_write_that_stops_midway_keeps_the_old_file(tmp_path: Path) -> None:
    """A limit on the file's size stops the write in the middle, as a full disk does."""
    shapes = shapes_file(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / "old"
    out.write_text("old")
    limit = 100_000
    result = make(
        out,
        shapes=shapes,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    refused(result, 3, "cannot write", "is the disk full?", str(out), left=folder)
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert out.read_text() == "old"

"""The prompts of a run: seeded, of one length, and different from their first token on.

Promise: the same words, seed and counts give the same prompts everywhere; seed 0 is a seed like any
other.  No two prompts of a run begin with the same word as long as there are at least as many words
as prompts, and no two begin with the same pair after that, so no prompt cache can help any of them.
Each prompt begins with a space: then every word, the first included, is the same kind of token
(" word") and a vocabulary that has it makes a prompt of W words exactly W tokens.
Limit: with a vocabulary that cuts words into pieces the lengths differ; `whole_words` picks those
that it does not cut, from what the server's own tokenizer says.  There is no tokenizer here.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS_FILE = Path(__file__).with_name("words.txt")


def read_words() -> list[str]:
    """Return the words of words.txt, in the order of the file."""
    return WORDS_FILE.read_text(encoding="ascii").split()


def whole_words(words: Sequence[str], pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the words that are one token each.

    `pieces` is what llama-server's /tokenize answers (`tokens`, asked for with `with_pieces`) for
    the words with a space before each; a piece that is not UTF-8 arrives as a list of bytes.
    """
    whole: list[str] = []
    rest = [_piece_bytes(token.get("piece")) for token in pieces]
    rest.reverse()
    for word in words:
        target = b" " + word.encode()
        count, found = 0, b""
        while len(found) < len(target) and rest:
            found += rest.pop()
            count += 1
        if found != target:
            return []  # not the text that was asked for: nothing can be said about its words
        if count == 1:
            whole.append(word)
    return whole


def _piece_bytes(piece: object) -> bytes:
    if isinstance(piece, str):
        return piece.encode("utf-8", "surrogatepass")
    if isinstance(piece, list) and all(isinstance(x, int) and 0 <= x <= 255 for x in piece):
        return bytes(piece)
    return b""


def longest_run(words: Sequence[str], prompt_words: int) -> int:
    """Return how many different prompts of `prompt_words` words `make_prompts` can make."""
    return len(words) if prompt_words == 1 else len(words) ** 2


def make_prompts(words: Sequence[str], prompt_words: int, count: int, seed: int) -> list[str]:
    """Return `count` different prompts of `prompt_words` words; ValueError if there are not enough.

    The stream of random numbers is the prompts' own, so other uses of the seed do not shift it.
    """
    if count > longest_run(words, prompt_words):
        raise ValueError(
            f"{count} different prompts of {prompt_words} word(s) asked for, but "
            f"{len(words)} words make only {longest_run(words, prompt_words)}"
        )
    stream = random.Random(f"prompts:{seed}")
    first = stream.sample(words, len(words))
    second = stream.sample(words, len(words))
    prompts: list[str] = []
    for index in range(count):
        turn, place = divmod(index, len(words))
        chosen = [first[place], second[(place + turn) % len(words)]][:prompt_words]
        chosen += stream.choices(words, k=prompt_words - len(chosen))
        prompts.append("".join(f" {word}" for word in chosen))
    return prompts

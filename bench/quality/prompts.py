"""Prompts for eviction: held-out text with names planted in it, its continuation, and questions for the names.

    | text, with lines that define a name at three depths | its continuation | the lines again, and the names |
      PROMPT tokens in all                                  CONTINUATION       the rest, up to LENGTH

Perplexity is that of the continuation, copying is measured on the names.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.demo.names import TEMPLATES, name_pieces, unseen_name
from bench.quality.heldout import Heldout

__all__ = ["LENGTH", "Prompt", "make_prompts"]

LENGTH, CONTINUATION = 2048, 256
DISTANCES = (300, 500, 900)  # tokens from a definition to its question, about


@dataclass(frozen=True)
class Prompt:
    """Tokens, and which of them are measured.

    Attributes:
        tokens: uint32 `(n,)`, at most `LENGTH`.
        continuation: slice of the tokens whose perplexity counts.
        names: slices of the tokens of each name, where it is asked for.
    """

    tokens: np.ndarray
    continuation: slice
    names: tuple[slice, ...]


def make_prompts(text: Heldout, tokenizer: Any, count: int) -> list[Prompt]:
    """`count` prompts out of different parts of the text."""
    rng = random.Random(5)
    pieces = name_pieces(tokenizer)
    seen = tokenizer.decode(text.tokens.tolist())
    breaks = {token for piece, token in tokenizer.get_vocab().items() if piece.startswith("Ċ")}
    return [
        _prompt(window.tolist(), tokenizer, pieces, seen, breaks, rng)
        for window in text.windows(LENGTH, count * LENGTH)
    ]


def _prompt(
    window: list[int], tokenizer: Any, pieces: list[str], seen: str, breaks: set[int], rng: random.Random
) -> Prompt:
    def encode(string: str) -> list[int]:
        return list(tokenizer.encode(string).ids)

    # A line begins with its line break, since the next one may begin with break and indentation in one token.
    lines, asked = [], []
    for template in rng.sample(TEMPLATES, len(DISTANCES)):
        name = unseen_name(tokenizer, pieces, seen, rng)
        before, after = ("\n" + template.removesuffix("\n")).split("{}")
        glue = " " if before.endswith(" ") else ""
        lines.append(encode(before + name + after))
        asked.append((encode(before.removesuffix(" ")), encode(glue + name), encode(after)))
    tail = sum(len(part) for question in asked for part in question)
    room = LENGTH - tail - sum(map(len, lines))
    tokens = window[: _last_break(window, room, breaks)]
    asking = len(tokens) + sum(map(len, lines))
    # From the back to the front, so that what is in front keeps its place.
    for line, distance in sorted(zip(lines, DISTANCES, strict=True), key=lambda pair: pair[1]):
        at = _last_break(tokens, len(tokens) - max(distance, CONTINUATION + 1), breaks)
        tokens[at:at] = line
    names = []
    for cue, name, rest in asked:
        tokens += cue
        names.append(slice(len(tokens), len(tokens) + len(name)))
        tokens += name + rest
    return Prompt(np.array(tokens, np.uint32), slice(asking - CONTINUATION, asking), tuple(names))


def _last_break(tokens: list[int], at: int, breaks: set[int]) -> int:
    """The last place up to `at` where a line ends."""
    while at > 1 and tokens[at] not in breaks:
        at -= 1
    return at

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

from bench.demo_names import TEMPLATES, name_pieces, unseen_name
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
    line_ends = {token for piece, token in tokenizer.get_vocab().items() if piece.endswith("Ċ")}
    return [
        _prompt(window.tolist(), tokenizer, pieces, seen, line_ends, rng)
        for window in text.windows(LENGTH, count * LENGTH)
    ]


def _prompt(
    window: list[int], tokenizer: Any, pieces: list[str], seen: str, line_ends: set[int], rng: random.Random
) -> Prompt:
    def encode(string: str) -> list[int]:
        return list(tokenizer.encode(string).ids)

    lines, asked = [], []
    for template in rng.sample(TEMPLATES, len(DISTANCES)):
        name = unseen_name(tokenizer, pieces, seen, rng)
        before, after = template.split("{}")
        glue = " " if before.endswith(" ") else ""
        lines.append(encode(template.format(name)))
        asked.append((encode(before.removesuffix(" ") if glue else before), encode(glue + name), encode(after)))
    tail = sum(len(part) for question in asked for part in question)
    tokens = window[: LENGTH - tail - sum(map(len, lines))]
    while tokens[-1] not in line_ends:  # a question begins a line
        tokens.pop()
    asking = len(tokens) + sum(map(len, lines))
    # From the back to the front, so that what is in front keeps its place.
    for line, distance in sorted(zip(lines, DISTANCES, strict=True), key=lambda pair: pair[1]):
        at = min(len(tokens) - distance, len(tokens) - CONTINUATION - 1)
        while at > 1 and tokens[at - 1] not in line_ends:
            at -= 1
        tokens[at:at] = line
    names = []
    for cue, name, rest in asked:
        tokens += cue
        names.append(slice(len(tokens), len(tokens) + len(name)))
        tokens += name + rest
    return Prompt(np.array(tokens, np.uint32), slice(asking - CONTINUATION, asking), tuple(names))

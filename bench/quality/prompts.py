"""Prompts for eviction: held-out text with inserted names, its continuation, and questions for the names.

    | text, with lines that define a name at three depths | its continuation | the lines again, and the names |
      PROMPT tokens in all                                  CONTINUATION       the rest, up to LENGTH

Perplexity is measured on the continuation, copying on the names.
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
DISTANCES = (300, 500, 900)  # approximate tokens from a definition to its question


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and the slices that are measured.

    Attributes:
        tokens: uint32 `(n,)`, at most `LENGTH`.
        continuation: slice of the tokens whose perplexity is measured.
        names: for each name, the slice of its tokens in its question.
    """

    tokens: np.ndarray
    continuation: slice
    names: tuple[slice, ...]


def make_prompts(text: Heldout, tokenizer: Any, count: int) -> list[Prompt]:
    """Make `count` prompts from different parts of the text."""
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

    # A line starts with its line break: one token may hold the break and the indentation of the line after it.
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
    # Insert from the back to the front, so that earlier places stay valid.
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
    """The last place up to `at` at which a line ends."""
    while at > 1 and tokens[at] not in breaks:
        at -= 1
    return at

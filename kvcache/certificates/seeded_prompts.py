"""Prompts that every machine makes alike: numbers of a stream, as token ids of a vocabulary or as words."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Model, layer_attention
from kvcache.sampling.sampling import SamplingParams

__all__ = ["NEW_TOKENS", "Case", "case_of", "numbers", "tokens_of", "words"]

NEW_TOKENS = 20  # of each answer: it enters another block of 16 in any case
_LENGTHS = (44, 107, 330, 203)  # tokens of prompts, in turn: blocks of 16 in part, groups of 64 and of 128 tokens
_MOST_WINDOW = 1024  # of windows that prompts reach past: longer prompts would take all the time
_WORDS = (
    "after", "again", "air", "all", "around", "ask", "back", "before", "begin", "book", "build", "carry", "city",
    "close", "cold", "come", "country", "day", "each", "early", "earth", "eye", "fall", "far", "field", "find",
    "fire", "follow", "food", "friend", "garden", "give", "green", "ground", "hand", "head", "high", "home", "house",
    "kind", "land", "large", "later", "learn", "letter", "light", "line", "little", "live", "long", "make", "many",
    "money", "morning", "mother", "mountain", "move", "music", "name", "near", "never", "night", "number", "open",
    "other", "paper", "part", "people", "place", "plant", "point", "question", "rain", "read", "river", "road",
    "room", "school", "sea", "second", "side", "small", "song", "sound", "stand", "start", "stone", "story", "street",
    "summer", "sun", "table", "talk", "tell", "three", "time", "town", "travel", "tree", "turn", "under", "voice",
    "walk", "wall", "warm", "watch", "water", "way", "week", "white", "wind", "window", "winter", "wood", "word",
    "work", "world", "year",
)


class Case(NamedTuple):
    """A prompt, and how its answer is drawn.

    Attributes:
        number: of the prompt, from 0 on.
        tokens: token ids, uint32.
        params: greedy for even numbers, sampled for odd ones.
    """

    number: int
    tokens: NDArray[np.uint32]
    params: SamplingParams


def numbers(seed: str, count: int) -> NDArray[np.uint64]:
    """The first numbers of the stream of a seed: those of SHAKE-256, eight bytes each, the lowest first."""
    return np.frombuffer(shake_256(seed.encode()).digest(8 * count), "<u8").astype(np.uint64)


def tokens_of(name: str, count: int, vocab_size: int) -> NDArray[np.uint32]:
    """Token ids of any text, by its name."""
    return (numbers(f"kvcache verify: {name}", count) % np.uint64(vocab_size)).astype(np.uint32)


def case_of(model: Model, number: int) -> Case:
    """A prompt of a network's vocabulary. Its end repeats tokens of its beginning: n-grams propose draft tokens.

    The second of four is longer than the longest window of up to 1024 tokens.
    """
    config, windows = model.config, [each.window or 0 for each in layer_attention(model) if each is not None]
    window = max((each for each in windows if each <= _MOST_WINDOW), default=0)
    length = window + 75 if window and number % 4 == 1 else _LENGTHS[number % 4]
    tokens = tokens_of(f"prompt {number}", min(length, config.max_position_embeddings - NEW_TOKENS), config.vocab_size)
    if len(tokens) > 24:
        tokens[-8:] = tokens[4:12]
    sampled: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": number}
    drawn = sampled if number % 2 else {"temperature": 0.0}
    return Case(number, tokens, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5, **drawn))


def words(seed: str, count: int) -> str:
    """So many words of a stream, in sentences of eight."""
    chosen: Sequence[str] = [_WORDS[number] for number in (numbers(seed, count) % np.uint64(len(_WORDS))).tolist()]
    sentences = [" ".join(chosen[i : i + 8]) for i in range(0, count, 8)]
    return " ".join(f"{each[0].upper()}{each[1:]}." for each in sentences)

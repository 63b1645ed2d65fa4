"""Rotary position embeddings: the frequencies of each scaling kind, and tables of their cosines and sines.

RoPE (Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2) turns each pair of channels of a query or key
by `position * frequency`. Checkpoints in the Hugging Face format pair channel `i` with channel
`i + head_dim / 2` ("rotate half"), not with its neighbour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.functions import log, log1p, power, turns
from kvcache.kernels.layers import rotate

__all__ = ["QueryGrowth", "Rope", "RopeTable"]

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_FIRST_POSITIONS = 256  # first size of a table, which then doubles: an unused 128k context costs nothing


class QueryGrowth(NamedTuple):
    """How queries grow: by `1 + rate * ln(1)` in the first `every` positions, by `1 + rate * ln(2)` in the next, ..."""

    rate: float
    every: int

    def factors(self, positions: NDArray[np.int64]) -> Float32 | None:
        """The factors of queries at these positions, `(n,)`; None: 1 each."""
        if positions.max(initial=0) < self.every:
            return None
        return (1 + self.rate * log1p(positions // self.every)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a checkpoint. Fields that a kind does not use keep their defaults.

    Attributes:
        kind: "default", "linear", "llama3", "yarn", "divided" or "longrope".
        theta: base of the wavelengths.
        factor: by how much the context was stretched.
        original_positions: context length before stretching (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: bounds of the blended band (llama3).
        beta_fast, beta_slow: rotations over the original context that bound the blended band (yarn).
        attention_factor: multiplies cosines and sines (yarn, longrope; 1 for the others).
        long_attention_factor: the same for a text of more than `original_positions` tokens (longrope); 0: it is the
            same.
        truncate: whether the yarn band is widened to whole channels.
        divisors: what the frequency of each channel pair is divided by, highest frequency first (divided, longrope);
            infinite: the pair does not turn.
        long_divisors: the same for a text of more than `original_positions` tokens (longrope).
        query_growth: queries are multiplied by `1 + query_growth * ln(1 + floor(position / original_positions))`.
    """

    kind: Literal["default", "linear", "llama3", "yarn", "divided", "longrope"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    query_growth: float = 0.0
    long_attention_factor: float = 0.0

    def frequencies(self, head_dim: int, regime: int = 0) -> Float64:
        """Radians per position of each channel pair, float64 `(head_dim // 2,)`, highest first.

        Args:
            head_dim: channels that are turned.
            regime: as `regime_of` says; 0 or 1.
        """
        base: Float64 = power(self.theta, -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._llama3(base)
        if self.kind == "yarn":
            return self._yarn(base, head_dim)
        if self.kind in ("divided", "longrope"):
            divided: Float64 = base / np.array(self.long_divisors if regime else self.divisors)
            return divided
        return base

    def regime_of(self, num_tokens: int) -> int:
        """1 for a text whose number of tokens asks for the long divisors of longrope, else 0."""
        return int(self.kind == "longrope" and num_tokens > self.original_positions)

    def query_factors(self, positions: NDArray[np.int64]) -> Float32 | None:
        """The factors of queries at these positions, `(n,)`; None: 1 each."""
        growth = QueryGrowth(self.query_growth, self.original_positions)
        return growth.factors(positions) if growth.rate else None

    def _llama3(self, base: Float64) -> Float64:
        """Keep short wavelengths, stretch long ones, blend between: the rule of Llama 3.1's published code.

        `turns` is the number of rotations of a pair over the original context. Frequencies above `high_freq_factor`
        turns are kept, those below `low_freq_factor` divided by `factor`; between, the two are blended linearly.
        """
        turns = self.original_positions * base / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        above = turns - self.low_freq_factor
        kept = np.clip(above / width, 0.0, 1.0) if width else (above >= 0).astype(np.float64)
        blended: Float64 = (1 - kept) * base / self.factor + kept * base
        return blended

    def _yarn(self, base: Float64, head_dim: int) -> Float64:
        """NTK-by-parts (Peng et al., "YaRN", arXiv 2309.00071, section 3.2), with its ramp over channel pairs.

        `pair(r)` is the pair that makes `r` rotations over the original context. Pairs before `pair(beta_fast)` are
        kept, pairs after `pair(beta_slow)` divided by `factor`.
        """

        def pair(rotations: float) -> float:
            wavelength = self.original_positions / (2 * math.pi * rotations)
            return head_dim * log(wavelength) / (2 * log(self.theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first if last != first else 1e-3
        stretched = np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
        blended: Float64 = stretched * base / self.factor + (1 - stretched) * base
        return blended


class RopeTable:
    """A table of cosines and sines for positions 0, 1, ..., which grows to the largest position requested.

    Angles are computed in float64 and rounded last, so that far positions are as exact as near ones. The table ends
    at `max_positions`. Positions beyond it (StreamingLLM) are computed on every call.

    Attributes:
        head_dim: channels of a head that are turned, the first ones; pairs are `(i, i + head_dim // 2)`.
    """

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, regime: int = 0) -> None:
        self.head_dim = head_dim
        self._max_positions = max_positions
        self._frequencies = rope.frequencies(head_dim, regime)
        self._scale = (rope.long_attention_factor if regime else 0) or rope.attention_factor
        self._table = self._rows(np.arange(0))

    def rows(self, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
        """The table rows of non-negative `positions` `(n,)`: `(cos, sin)`, each `(n, head_dim // 2)`."""
        needed = int(np.maximum.reduce(positions, initial=-1)) + 1
        if needed > self._max_positions:
            return self._rows(positions)
        cos, sin = self._table
        if needed > len(cos):
            size = min(max(needed, 2 * len(cos), _FIRST_POSITIONS), self._max_positions)
            more = self._rows(np.arange(len(cos), size))
            cos, sin = np.concatenate([cos, more[0]]), np.concatenate([sin, more[1]])
            # One assignment for both: threads that share a network at worst compute the same rows twice.
            self._table = cos, sin
        return cos[positions], sin[positions]

    def rotate(self, heads: Float32, rows: tuple[Float32, Float32]) -> Float32:
        """Turn `heads` `(n, num_heads, channels)` by the table rows of their positions; a new array."""
        return rotate(heads, *rows)

    def _rows(self, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
        return turns(positions, self._frequencies, self._scale)

"""Streams: a residual that is several vectors of each token, of which a layer runs on one (AltUp).

Source: Baykal et al., "Alternating Updates for Efficient Transformers", NeurIPS 2023. Before a layer each stream is
predicted of all of them; behind it each one is corrected by what the layer changed in its own stream. Sums go
stream by stream, in order, so a row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.kernels.functions import sums_of, tanh
from kvcache.kernels.layers import mix, rms_norm
from kvcache.kernels.matrix import Matrix
from kvcache.networks.entries import Entries
from kvcache.networks.linear import MatrixStack

__all__ = ["StreamEnds", "StreamSizes", "StreamWeights"]

Float32 = NDArray[np.float32]
Weight = Matrix | MatrixStack
Times = Callable[[Float32, Weight], Float32]

_LEAST = 1e-5  # of the mean of squares that a stream is scaled by


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """The streams of a network.

    Attributes:
        count: the number of streams.
        active: the stream that layers run on.
        scaled: whether a layer scales its stream, channel by channel, before the inputs of a token meet it.
        rank: channels between the two matrices that layers have beside attention (Laurel).
    """

    count: int
    active: int
    scaled: bool
    rank: int

    @classmethod
    def of(cls, read: Entries) -> StreamSizes:
        """Read the keys of a `config.json`. CheckpointError: a key of the wrong kind, no such stream."""
        count = read.size("altup_num_inputs", most=1024)
        active = read.size("altup_active_idx", at_least=0)
        if active >= count:
            raise CheckpointError(f"altup_active_idx: expected one of {count} streams, got {active}")
        return cls(count, active, read.flag("altup_correct_scale", True), read.size("laurel_rank"))


@dataclass(frozen=True, slots=True, eq=False)
class StreamWeights:
    """The weights by which a layer reads and writes the streams; matrices are `(out, in)`.

    Attributes:
        router: `(streams, hidden)`, of the active stream, normed.
        norm: `(hidden,)`, the weight of that norm, divided by the hidden size.
        predict: `(streams * streams, streams)`: how much of each stream is added to each.
        correct: `(streams, streams)`: how much of the change is added to each stream.
        scale: `(hidden,)`, of the active stream where the inputs of a token meet it; None: 1.
        left, right: `(rank, hidden)` and `(hidden, rank)`, beside attention.
        low_norm: `(hidden,)`, of what these give.
    """

    router: Weight
    norm: Float32
    predict: Weight
    correct: Weight
    scale: Float32 | None
    left: Weight
    right: Weight
    low_norm: Float32

    def _modes(self, x: Float32, times: Times, eps: float) -> Float32:
        """A number for each stream, `(n, streams)`, of the active one."""
        return tanh(times(rms_norm(x, self.norm, eps), self.router)).astype(np.float32)

    def predicted(self, streams: Float32, active: int, times: Times, eps: float) -> Float32:
        """The streams `(n, streams, hidden)` that a layer begins with."""
        n, count, _ = streams.shape
        modes = self._modes(np.ascontiguousarray(streams[:, active]), times, eps)
        shares = times(modes, self.predict).reshape(n, count, count)
        return mix(streams, shares, streams)

    def correct_by(self, x: Float32, streams: Float32, active: int, times: Times, eps: float) -> Float32:
        """Correct the predicted `streams` in place by what their layer made, `x` `(n, hidden)`.

        Returns:
            The active stream `(n, hidden)` as the inputs of a token meet it.
        """
        change = (x - streams[:, active])[:, None]
        shares = times(self._modes(x, times, eps), self.correct)
        shares += np.float32(1)
        mix(streams, shares[:, :, None], change, in_place=True)
        first = np.ascontiguousarray(streams[:, active])
        return first if self.scale is None else first * self.scale

    def beside(self, normed: Float32, times: Times, eps: float) -> Float32:
        """The rows that are added beside attention: those that it takes, and what two matrices make of them."""
        return normed + rms_norm(times(times(normed, self.left), self.right), self.low_norm, eps)


@dataclass(frozen=True, slots=True, eq=False)
class StreamEnds:
    """The weights that make the streams of the embedding, and one row of the streams.

    Attributes:
        begin, end: matrices `(hidden, hidden)`, of each stream but the first.
    """

    begin: tuple[Weight, ...]
    end: tuple[Weight, ...]

    def spread(self, x: Float32, times: Times) -> Float32:
        """The streams `(n, streams, hidden)` of the embedding `(n, hidden)`: all have its size."""
        size = _size(x)
        return np.stack([x, *(_resized(times(x, each), size) for each in self.begin)], axis=1)

    def merged(self, streams: Float32, times: Times) -> Float32:
        """The mean `(n, hidden)` of what the last matrices make of the streams, each with the size of the first."""
        size = _size(streams[:, 0])
        out = streams[:, 0].copy()
        for i, each in enumerate(self.end, 1):
            out += _resized(times(np.ascontiguousarray(streams[:, i]), each), size)
        out *= np.float32(1 / (1 + len(self.end)))
        return out


def _mean_square(x: Float32) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    found: NDArray[np.float64] = sums_of(wide * wide) / x.shape[1]
    return found


def _size(x: Float32) -> NDArray[np.float64]:
    """The root of the mean of the squares of each row."""
    return np.sqrt(_mean_square(x))


def _resized(x: Float32, size: NDArray[np.float64]) -> Float32:
    """Rows scaled to `size`."""
    factors = size / np.sqrt(np.maximum(_mean_square(x), _LEAST))
    return x * factors.astype(np.float32)[:, None]

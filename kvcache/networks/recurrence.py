"""Layers that keep a state of fixed size per text.

Each has three steps. `rows` takes the projection of a layer's rows apart, `run` is that of `protocols.Recurrence`,
`gated` makes of its result what the output projection takes. The first and the last are row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.layers import convolution_floats, convolve
from kvcache.networks.recurrent_sizes import RecurrentSizes

__all__ = ["Layer", "RecurrentWeights", "ShortConvolution", "layer_of"]

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """The weights of a layer's recurrence, always float32. Those that its kind does not have are None.

    Attributes:
        taps: `(taps, channels)`, of the convolution, the oldest row first.
        bias: `(channels,)`, of the convolution.
        rate: `(heads,)`, `-exp(A_log)`.
        step_bias: `(heads,)`, added to steps before their softplus.
        skip: `(heads,)`, what of a value goes straight to the output.
        norm: `(dim,)` of each head (delta), or `(groups, inner / groups)` (mamba).
    """

    taps: Float32
    bias: Float32 | None = None
    rate: Float32 | None = None
    step_bias: Float32 | None = None
    skip: Float32 | None = None
    norm: Float32 | None = None


class ShortConvolution:
    """LFM2's layer (Liquid AI, 2025): `C * conv(B * x)` of a projection `[B, C, x]`, without an activation."""

    def __init__(self, sizes: RecurrentSizes, weights: RecurrentWeights) -> None:
        self._sizes, self._weights = sizes, weights

    @property
    def size(self) -> int:
        """See `protocols.Recurrence`."""
        return convolution_floats(self._sizes.channels, self._sizes.taps)

    def rows(self, projected: Float32) -> tuple[Float32, ...]:
        """`B * x`."""
        width = self._sizes.channels
        return (projected[:, :width] * projected[:, 2 * width :],)

    def run(self, rows: tuple[Float32, ...], slots: Float32, index: Int64, lens: Int64) -> Float32:
        """See `protocols.Recurrence`."""
        weights, (x,) = self._weights, rows
        return convolve(x, weights.taps, weights.bias, slots, 0, index, lens, False)

    def gated(self, projected: Float32, out: Float32) -> Float32:
        """`C * out`."""
        width = self._sizes.channels
        return projected[:, width : 2 * width] * out


Layer = ShortConvolution


def layer_of(sizes: RecurrentSizes | None, weights: RecurrentWeights | None) -> Layer | None:
    """The layer of these sizes; None without weights."""
    return None if sizes is None or weights is None else ShortConvolution(sizes, weights)

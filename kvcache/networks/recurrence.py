"""Layers that keep a state of fixed size per text.

Each has three steps. `rows` takes the projection of a layer's rows apart, `run` is that of `protocols.Recurrence`,
`gated` makes of its result what the output projection takes. The first and the last are row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.layers import (
    bounded_decays,
    convolution_floats,
    convolve,
    decays,
    gate,
    rms_norm,
    scan,
    scan_floats,
)
from kvcache.kernels.matrix import Matrix
from kvcache.networks.linear import MatrixStack
from kvcache.networks.recurrent_sizes import RecurrentSizes

__all__ = ["DeltaRule", "KimiDelta", "Layer", "Mamba2", "RecurrentWeights", "ShortConvolution", "layer_of"]

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

_UNIT_EPS = 1e-6  # added to the sum of squares of keys and queries of the delta rule


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """The weights of a layer's recurrence, vectors always float32. Those that its kind does not have are None.

    Attributes:
        taps: `(taps, channels)`, of the convolution, the oldest row first.
        bias: `(channels,)`, of the convolution.
        rate: `(heads,)`, `-exp(A_log)`.
        step_bias: `(heads,)`, added to steps before their softplus; `(heads * size,)` (kimi).
        skip: `(heads,)`, what of a value goes straight to the output.
        norm: `(dim,)` of each head (delta, kimi), or `(groups, inner / groups)` (mamba).
        decay, gate: `(heads * size, rank)`, the second of the two matrices that make decays, and gates (kimi).
    """

    taps: Float32
    bias: Float32 | None = None
    rate: Float32 | None = None
    step_bias: Float32 | None = None
    skip: Float32 | None = None
    norm: Float32 | None = None
    decay: Matrix | MatrixStack | None = None
    gate: Matrix | MatrixStack | None = None


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


class DeltaRule:
    """The gated delta net (Yang et al., arXiv 2412.06464) of a projection `[mixed, z, b, a]`, as Qwen3.5 has it.

    `mixed` is convolved into queries, keys and values; queries and keys have unit length, and the former the factor
    `size**-0.5`. A head is normed, then gated by z.
    """

    def __init__(self, sizes: RecurrentSizes, weights: RecurrentWeights, eps: float) -> None:
        self._sizes, self._weights, self._eps = sizes, weights, sizes.norm_eps or eps
        self._units = _unit_factors(sizes)
        self._norms = np.tile(_given(weights.norm), (sizes.heads, 1))

    @property
    def size(self) -> int:
        """See `protocols.Recurrence`."""
        sizes = self._sizes
        return scan_floats(sizes.heads, sizes.size, sizes.dim) + convolution_floats(sizes.channels, sizes.taps)

    def rows(self, projected: Float32) -> tuple[Float32, ...]:
        """`mixed`, `b` and `a`."""
        sizes = self._sizes
        first = sizes.channels + sizes.inner
        return projected[:, : sizes.channels], projected[:, first : first + sizes.heads], projected[:, -sizes.heads :]

    def run(self, rows: tuple[Float32, ...], slots: Float32, index: Int64, lens: Int64) -> Float32:
        """See `protocols.Recurrence`."""
        sizes, weights, (mixed, b, a) = self._sizes, self._weights, rows
        at = scan_floats(sizes.heads, sizes.size, sizes.dim)
        mixed = convolve(mixed, weights.taps, weights.bias, slots, at, index, lens, True)
        queries, keys, values = _unit_rows(mixed, sizes, self._units)
        _, left = decays(a, _given(weights.step_bias), _given(weights.rate), *sizes.step_limits)
        steps = gate(np.ones(b.shape, np.float32), b, False)
        steps *= np.float32(sizes.factor)
        return scan(keys, queries, values, left, steps, None, slots, 0, index, lens, sizes.tiled)

    def gated(self, projected: Float32, out: Float32) -> Float32:
        """Each head normed, times `silu(z)`."""
        sizes = self._sizes
        z = projected[:, sizes.channels : sizes.channels + sizes.inner]
        return gate(rms_norm(out, self._norms, self._eps).reshape(len(out), -1), z, True)


class KimiDelta:
    """Kimi delta attention (Kimi Team, arXiv 2510.26692) of a projection `[q, k, v, z, b, a]`.

    It is the gated delta rule with a decay for each channel of keys. In layers with a `rank` a second matrix makes
    gates of `z`, and another one decays of `a`. Gates of heads are sigmoids.

    Args:
        activations: how rows meet the second matrices, see `Matrix.multiply`.
    """

    def __init__(self, sizes: RecurrentSizes, weights: RecurrentWeights, eps: float, activations: str) -> None:
        self._sizes, self._weights, self._eps, self._activations = sizes, weights, eps, activations
        self._units = _unit_factors(sizes)
        self._norms = np.tile(_given(weights.norm), (sizes.heads, 1))
        rates = np.repeat(_given(weights.rate), sizes.size)
        self._rates = -rates if sizes.bound else rates

    @property
    def size(self) -> int:
        """See `protocols.Recurrence`."""
        sizes = self._sizes
        return scan_floats(sizes.heads, sizes.size, sizes.dim) + convolution_floats(sizes.channels, sizes.taps)

    def rows(self, projected: Float32) -> tuple[Float32, ...]:
        """`[q, k, v]`, steps `(n, heads)` and decays `(n, heads, size)`."""
        sizes, width = self._sizes, self._sizes.rank or self._sizes.inner
        b = projected[:, sizes.channels + width : sizes.channels + width + sizes.heads]
        steps = gate(np.ones(b.shape, np.float32), b, False)
        a, bias = self._second(projected[:, -width:], self._weights.decay), _given(self._weights.step_bias)
        if sizes.bound:
            left = bounded_decays(a, bias, self._rates, sizes.bound)
        else:
            left = decays(a, bias, self._rates, *sizes.step_limits)[1]
        return projected[:, : sizes.channels], steps, left.reshape(len(a), sizes.heads, sizes.size)

    def run(self, rows: tuple[Float32, ...], slots: Float32, index: Int64, lens: Int64) -> Float32:
        """See `protocols.Recurrence`."""
        sizes, weights, (mixed, steps, left) = self._sizes, self._weights, rows
        at = scan_floats(sizes.heads, sizes.size, sizes.dim)
        mixed = convolve(mixed, weights.taps, weights.bias, slots, at, index, lens, True)
        queries, keys, values = _unit_rows(mixed, sizes, self._units)
        return scan(keys, queries, values, left, steps, None, slots, 0, index, lens, False)

    def gated(self, projected: Float32, out: Float32) -> Float32:
        """Each head normed, times `sigmoid(z)`."""
        sizes, width = self._sizes, self._sizes.rank or self._sizes.inner
        z = self._second(projected[:, sizes.channels : sizes.channels + width], self._weights.gate)
        return gate(rms_norm(out, self._norms, self._eps).reshape(len(out), -1), z, False)

    def _second(self, rows: Float32, matrix: Matrix | MatrixStack | None) -> Float32:
        """The products of rows with the second matrix; without one the rows."""
        if matrix is None:
            return rows
        return matrix.multiply(np.ascontiguousarray(rows), activations=self._activations)


class Mamba2:
    """Mamba2 (Dao and Gu, arXiv 2405.21060) of a projection `[z, x B C, steps]`: gated by z, then normed by groups."""

    def __init__(self, sizes: RecurrentSizes, weights: RecurrentWeights, eps: float) -> None:
        self._sizes, self._weights, self._eps = sizes, weights, eps

    @property
    def size(self) -> int:
        """See `protocols.Recurrence`."""
        sizes = self._sizes
        return scan_floats(sizes.heads, sizes.size, sizes.dim) + convolution_floats(sizes.channels, sizes.taps)

    def rows(self, projected: Float32) -> tuple[Float32, ...]:
        """`x B C`, and the steps."""
        inner, stop = self._sizes.inner, self._sizes.inner + self._sizes.channels
        return projected[:, inner:stop], projected[:, stop:]

    def run(self, rows: tuple[Float32, ...], slots: Float32, index: Int64, lens: Int64) -> Float32:
        """See `protocols.Recurrence`."""
        sizes, weights, (mixed, steps) = self._sizes, self._weights, rows
        at = scan_floats(sizes.heads, sizes.size, sizes.dim)
        mixed = convolve(mixed, weights.taps, weights.bias, slots, at, index, lens, True)
        n, stop = len(mixed), sizes.inner + sizes.groups * sizes.size
        values = mixed[:, : sizes.inner].reshape(n, sizes.heads, sizes.dim)
        keys, queries = (
            part.reshape(n, sizes.groups, sizes.size) for part in (mixed[:, sizes.inner : stop], mixed[:, stop:])
        )
        steps, left = decays(steps, _given(weights.step_bias), _given(weights.rate), *sizes.step_limits)
        skip = _given(weights.skip)
        return scan(keys, queries, values, left, steps, skip, slots, 0, index, lens, sizes.tiled)

    def gated(self, projected: Float32, out: Float32) -> Float32:
        """`out * silu(z)`, each group normed before or after, or not."""
        n, rows, z, gating = len(out), out.reshape(len(out), -1), projected[:, : self._sizes.inner], self._sizes.gating
        if gating == "alone":
            return gate(rows, z, True)
        norm = _given(self._weights.norm)
        if gating == "after":
            return gate(rms_norm(rows.reshape(n, *norm.shape), norm, self._eps).reshape(n, -1), z, True)
        rows = gate(rows, z, True)
        return rms_norm(rows.reshape(n, *norm.shape), norm, self._eps).reshape(n, -1)


Layer = ShortConvolution | DeltaRule | KimiDelta | Mamba2


def layer_of(
    sizes: RecurrentSizes | None, weights: RecurrentWeights | None, eps: float, activations: str
) -> Layer | None:
    """The layer of these sizes, whose norms add `eps`; None without weights."""
    if sizes is None or weights is None:
        return None
    if sizes.kind == "conv":
        return ShortConvolution(sizes, weights)
    if sizes.kind == "kimi":
        return KimiDelta(sizes, weights, eps, activations)
    return DeltaRule(sizes, weights, eps) if sizes.kind == "delta" else Mamba2(sizes, weights, eps)


def _unit_factors(sizes: RecurrentSizes) -> Float32:
    """The weights by which `rms_norm` gives queries, then keys unit length, and the former the factor `size**-0.5`."""
    # x / sqrt(sum of squares + e) = x / sqrt(mean + e / size) * size**-0.5.
    factors = np.repeat([1 / sizes.size, 1 / math.sqrt(sizes.size)], sizes.groups)
    return np.repeat(factors.astype(np.float32)[:, None], sizes.size, axis=1)


def _unit_rows(mixed: Float32, sizes: RecurrentSizes, factors: Float32) -> tuple[Float32, Float32, Float32]:
    """Queries, keys and values of the delta rule, of the rows that a convolution gives."""
    n, both = len(mixed), 2 * sizes.groups * sizes.size
    units = rms_norm(mixed[:, :both].reshape(n, -1, sizes.size), factors, _UNIT_EPS / sizes.size)
    values = mixed[:, both:].reshape(n, sizes.heads, sizes.dim)
    return units[:, : sizes.groups], units[:, sizes.groups :], values


def _given(weight: Float32 | None) -> Float32:
    assert weight is not None  # each kind has its own
    return weight

"""Experts: each row of the hidden states goes through a few of many MLPs (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix_experts"]

Float32 = NDArray[np.float32]


def mix_experts(
    x: Float32, chosen: NDArray[np.int64], weights: Float32, expert: Callable[[int, Float32], Float32],
    before: bool = False,
) -> Float32:
    """The weighted sum of each row's experts, in the order of its `chosen`.

    Args:
        x: `(n, hidden)`.
        chosen, weights: `(n, count)`, see `kvcache.kernels.layers.top_experts`.
        expert: `expert(i, rows)` is what expert `i` makes of some rows; called once for each expert that has any.
        before: whether weights multiply the rows that experts take, and not their results.

    Returns:
        `(n, hidden)`. A row has the same bits in any company, if the rows of `expert` have.
    """
    count, flat = chosen.shape[1], weights.reshape(-1, 1)
    order = np.argsort(chosen, axis=None, kind="stable")
    sorted_experts = chosen.ravel()[order]
    starts = np.flatnonzero(np.diff(sorted_experts, prepend=-1))
    results = np.empty((chosen.size, x.shape[1]), np.float32)
    for first, places in zip(starts, np.split(order, starts[1:]), strict=True):
        rows = x[places // count]
        results[places] = expert(int(sorted_experts[first]), rows * flat[places] if before else rows)
    if not before:
        results *= flat
    parts = results.reshape(*chosen.shape, -1)
    out = parts[:, 0].copy()
    for i in range(1, count):
        out += parts[:, i]
    return out

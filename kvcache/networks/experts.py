"""Experts: each row of the hidden states goes through a few of many MLPs (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix_experts", "top_experts"]

Float32 = NDArray[np.float32]


def top_experts(logits: Float32, count: int, normalise: bool) -> tuple[NDArray[np.int64], Float32]:
    """The experts of each row and their weights.

    Args:
        logits: `(n, experts)`.
        count: experts per row.
        normalise: whether the weights of a row add up to 1; if not, they are those of the softmax over all experts.

    Returns:
        `(chosen, weights)`, each `(n, count)`, the largest first; of equal logits the lower index.
    """
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    picked = np.take_along_axis(powers, chosen, axis=1)
    # Summed column by column: the order of additions in a row depends on nothing else.
    parts = picked if normalise else powers
    total = np.zeros(len(logits))
    for i in range(parts.shape[1]):
        total += parts[:, i]
    return chosen, (picked / total[:, None]).astype(np.float32)


def mix_experts(
    x: Float32, chosen: NDArray[np.int64], weights: Float32, expert: Callable[[int, Float32], Float32]
) -> Float32:
    """The weighted sum of each row's experts, in the order of its `chosen`.

    Args:
        x: `(n, hidden)`.
        chosen, weights: `(n, count)`, see `top_experts`.
        expert: `expert(i, rows)` is what expert `i` makes of some rows; called once for each expert that has any.

    Returns:
        `(n, hidden)`. A row has the same bits in any company, if the rows of `expert` have.
    """
    count = chosen.shape[1]
    order = np.argsort(chosen, axis=None, kind="stable")
    sorted_experts = chosen.ravel()[order]
    starts = np.flatnonzero(np.diff(sorted_experts, prepend=-1))
    results = np.empty((chosen.size, x.shape[1]), np.float32)
    for first, places in zip(starts, np.split(order, starts[1:]), strict=True):
        results[places] = expert(int(sorted_experts[first]), x[places // count])
    results *= weights.reshape(-1, 1)
    parts = results.reshape(*chosen.shape, -1)
    out = parts[:, 0].copy()
    for i in range(1, count):
        out += parts[:, i]
    return out

"""Sparse gates: of the gates of an MLP only those far above the mean of their row count (Gemma 3n)."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.functions import sums_of

__all__ = ["cutoff_of", "share_of", "thin"]

Float32 = NDArray[np.float32]

_TOGETHER = 8  # rows that are taken at a time: their doubles stay in the CPU's cache


def cutoff_of(share: float) -> float:
    """How many deviations above the mean a gate begins to count, if `share` of a normal distribution is below."""
    return float(np.float32(NormalDist().inv_cdf(float(np.float32(share)))))


def share_of(cutoff: float) -> float:
    """The share that `cutoff_of` makes `cutoff` of: 0 of minus infinity."""
    return float(np.float32(NormalDist().cdf(cutoff)))


def thin(both: Float32, cutoff: np.float32) -> None:
    """Subtract from each gate what it needs to count, and set those below it to 0, in place.

    Args:
        both: `(n, 2 * dim)`, gates beside what they multiply; a row has the same bits in any company.
        cutoff: see `cutoff_of`.
    """
    count = both.shape[1] // 2
    for start in range(0, len(both), _TOGETHER):
        gates = both[start : start + _TOGETHER, :count]
        wide = gates.astype(np.float64)
        means = sums_of(wide) / count
        wide -= means[:, None]
        wide *= wide
        gates -= (means + np.sqrt(sums_of(wide) / count) * float(cutoff)).astype(np.float32)[:, None]
        gates[gates <= 0] = 0

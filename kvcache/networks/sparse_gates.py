"""Sparse gates: of the gates of an MLP only those far above the mean of their row count (Gemma 3n).

`kernels.layers.thin` computes them; files say which share of the gates does not count, or from which bound on they do.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

__all__ = ["cutoff_of", "share_of"]


def cutoff_of(share: float) -> float:
    """How many deviations above the mean a gate begins to count, if `share` of a normal distribution is below."""
    return float(np.float32(NormalDist().inv_cdf(float(np.float32(share)))))


def share_of(cutoff: float) -> float:
    """The share that `cutoff_of` makes `cutoff` of: 0 of minus infinity."""
    return float(np.float32(NormalDist().cdf(cutoff)))

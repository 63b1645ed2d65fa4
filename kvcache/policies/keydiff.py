"""`KeyDiff`: the tokens whose keys are unlike the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.functions import column_sums, sum_of, sums_of
from kvcache.policies.ranked import Ranked

__all__ = ["KeyDiff"]


class KeyDiff(Ranked):
    """Keeps the tokens whose keys are least like the mean direction of all keys; it needs no attention scores.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction" (arXiv 2504.15364), section 3.

    Args:
        per_head: whether each KV head keeps tokens of its own, as there; if not, the similarities of all heads of a
            layer are summed.
    """

    score_queries = 0
    reads_keys = True

    def worth(
        self, layer: int, scores: Any, positions: Any, budget: int, /, *rows: Any
    ) -> npt.NDArray[np.float64]:
        """See `Ranked.worth`."""
        keys = np.asarray(rows[0], np.float64)
        keys = keys / np.maximum(np.sqrt(sums_of(keys * keys)), 1e-12)[:, None]
        anchor = column_sums(keys) / len(keys)
        anchor /= max(math.sqrt(sum_of(anchor * anchor)), 1e-12)
        return -sums_of(keys * anchor)

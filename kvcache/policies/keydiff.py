"""`KeyDiff`: the tokens whose keys are unlike the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
        keys = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)
        anchor = keys.mean(axis=0)
        anchor /= max(float(np.linalg.norm(anchor)), 1e-12)
        likeness: npt.NDArray[np.float64] = (keys * anchor).sum(axis=1)
        return -likeness

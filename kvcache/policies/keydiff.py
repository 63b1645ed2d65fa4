"""`KeyDiff`: the tokens whose keys are unlike the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.texts.policy import Policy

__all__ = ["KeyDiff"]


class KeyDiff(Policy):
    """Keeps the tokens whose keys are least like the mean direction of all keys; it needs no attention scores.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction" (arXiv 2504.15364), section 3. There
    each head chooses for itself; here the cosine similarities of all KV heads of a layer are summed.
    """

    score_queries = 0
    reads_keys = True

    def keep(
        self, layer: int, scores: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], budget: int, /,
        keys: Any = None,
    ) -> npt.NDArray[np.int64]:
        """See `Policy.keep`; `keys` are those of `Policy.reads_keys`."""
        rows = np.asarray(keys, np.float64)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-12)
        anchor = rows.mean(axis=1, keepdims=True)
        anchor /= np.maximum(np.linalg.norm(anchor, axis=2, keepdims=True), 1e-12)
        likeness = (rows * anchor).sum(axis=(0, 2))
        return np.sort(np.argsort(likeness, kind="stable")[:budget])

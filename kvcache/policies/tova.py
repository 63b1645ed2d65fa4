"""`TOVA`: the tokens that the last query attends to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.texts.policy import Policy

__all__ = ["TOVA"]


class TOVA(Policy):
    """Keeps the tokens that the last query attends to most, on average over the heads of a layer, and the last token.

    Source: Oren et al., "Transformers are Multi-State RNNs" (arXiv 2401.06104), section 4.2. Tokens of equal attention
    leave from the newest on.
    """

    score_queries = 1

    def keep(
        self, layer: int, scores: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], budget: int, /
    ) -> npt.NDArray[np.int64]:
        """See `Policy.keep`."""
        best = np.argsort(-scores[:, :-1].sum(axis=0), kind="stable")[: budget - 1]
        return np.sort(np.concatenate([best, [len(positions) - 1]])).astype(np.int64)

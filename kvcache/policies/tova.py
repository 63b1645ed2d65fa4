"""`TOVA`: the tokens that the last query attends to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.policies.ranked import Ranked

__all__ = ["TOVA"]


class TOVA(Ranked):
    """Keeps the tokens that the last query attends to most, on average over the heads of a layer, and the last token.

    Source: Oren et al., "Transformers are Multi-State RNNs" (arXiv 2401.06104), section 4.2. Tokens of equal attention
    leave from the newest on.

    Args:
        per_head: whether each KV head keeps tokens of its own, by the mean over its query heads alone.
    """

    score_queries = 1

    def worth(
        self, layer: int, scores: Any, positions: Any, budget: int, /, *rows: Any
    ) -> npt.NDArray[np.float64]:
        """See `Ranked.worth`."""
        found = np.array(scores, np.float64)
        found[-1] = np.inf
        return found

"""`SnapKV`: the last tokens, and those that their queries attend to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.support.arguments import as_count
from kvcache.texts.policy import Policy

__all__ = ["SnapKV"]


class SnapKV(Policy):
    """Keeps the last tokens, and before them those that the last queries attend to, pooled over neighbours.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469), section 4.
    There each head chooses for itself; here the pooled scores of all KV heads of a layer are summed.

    Args:
        window: tokens at the end that stay, and whose queries count, 1 to 4,096; at most the budget.
        kernel: neighbours over which the mean of the scores is taken, an odd number; beyond the ends they are 0.

    Raises:
        TypeError, ValueError: not such numbers.
    """

    def __init__(self, window: int = 32, kernel: int = 5) -> None:
        self.score_queries: int | None = as_count(window, "window", 1, 4096)
        self.kernel = as_count(kernel, "kernel", 1, 4095)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd number, got {kernel}")

    def keep(
        self, layer: int, scores: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], budget: int, /
    ) -> npt.NDArray[np.int64]:
        """See `Policy.keep`."""
        window = min(self.score_queries or 0, budget)
        before, reach = len(positions) - window, self.kernel // 2
        padded = np.pad(scores[:, :before], ((0, 0), (reach, reach)))
        pooled = np.lib.stride_tricks.sliding_window_view(padded, self.kernel, axis=1).mean(axis=2).sum(axis=0)
        best = np.argsort(-pooled, kind="stable")[: budget - window]
        return np.sort(np.concatenate([best, np.arange(before, len(positions))]))

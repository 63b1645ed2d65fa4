"""`SnapKV`: the last tokens, and those that their queries attend to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.functions import sums_of
from kvcache.policies.ranked import Ranked
from kvcache.support.arguments import as_count

__all__ = ["SnapKV"]


class SnapKV(Ranked):
    """Keeps the last tokens, and before them those that the last queries attend to, pooled over neighbours.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469), section 4.

    Args:
        window: tokens at the end that stay, and whose queries count, 1 to 4,096; at most the budget.
        kernel: neighbours over which the mean of the scores is taken, an odd number; beyond the ends they are 0.
        per_head: whether each KV head keeps tokens of its own, as there; if not, the pooled scores of all heads of a
            layer are summed.

    Raises:
        TypeError, ValueError: not such numbers.
    """

    def __init__(self, window: int = 32, kernel: int = 5, *, per_head: bool = False) -> None:
        super().__init__(per_head=per_head)
        self.score_queries: int | None = as_count(window, "window", 1, 4096)
        self.kernel = as_count(kernel, "kernel", 1, 4095)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd number, got {kernel}")

    def worth(
        self, layer: int, scores: Any, positions: Any, budget: int, /, *rows: Any
    ) -> npt.NDArray[np.float64]:
        """See `Ranked.worth`."""
        before, reach = max(0, len(scores) - min(self.score_queries or 0, budget)), self.kernel // 2
        found = np.full(len(scores), np.inf)
        if before:
            padded = np.pad(scores[:before], reach)
            found[:before] = sums_of(np.lib.stride_tricks.sliding_window_view(padded, self.kernel)) / self.kernel
        return found

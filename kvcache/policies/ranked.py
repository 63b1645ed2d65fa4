"""`Ranked`: a policy that gives each token a worth, and keeps those of the highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.kernels.functions import column_sums
from kvcache.texts.policy import Policy

__all__ = ["Ranked"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Ranked(Policy):
    """Keeps the tokens of the highest worth, the earliest of equals; a subclass says by `worth` what each is worth.

    With `per_head` each KV head keeps as many tokens as the budget says; without it all heads keep those whose worths
    in all of them have the highest sum.
    """

    def __init__(self, *, per_head: bool = False) -> None:
        self.per_head = bool(per_head)

    def worth(
        self, layer: int, scores: Float64, positions: Int64, budget: int, /, *rows: npt.NDArray[np.float32]
    ) -> Float64:
        """The worth of each token in one KV head, `(n,)`; infinite: it stays.

        Args:
            scores, positions: `(n,)`, as `Policy.keep` has them for a head.
            rows: what the policy reads, of this head.
        """
        raise NotImplementedError

    def worths(self, layer: int, scores: Any, positions: Any, budget: int, *rows: Any) -> list[Float64]:
        """The worths in each KV head, of the arguments of `keep`."""
        shared = isinstance(positions, np.ndarray)  # all heads have the same tokens
        return [
            self.worth(layer, one, positions if shared else positions[head], budget, *[each[head] for each in rows])
            for head, one in enumerate(scores)
        ]

    def keep(self, layer: int, scores: Any, positions: Any, budget: int, /, *rows: Any) -> Int64 | Sequence[Int64]:
        """See `Policy.keep`."""
        worths = self.worths(layer, scores, positions, budget, *rows)
        if self.per_head:
            return [_best(each, budget) for each in worths]
        return _best(column_sums(np.stack(worths)), budget)


def _best(worth: Float64, count: int) -> Int64:
    return np.sort(np.argsort(-worth, kind="stable")[:count])

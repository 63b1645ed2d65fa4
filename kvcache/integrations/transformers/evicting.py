"""`Eviction`: which tokens of each row stay under an `EvictionPolicy`, in one layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.eviction import EvictionPolicy, Rule
from kvcache.support.arguments import as_count, as_instance
from kvcache.texts.budgets import survivors

__all__ = ["Eviction", "rules_of"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def rules_of(policy: Any, kv_budget: int | None, layers: list[int]) -> dict[int, Rule]:
    """The limits of each layer; empty without a policy.

    Raises:
        TypeError, ValueError: another kind; one argument without the other; StreamingLLM, whose distances count within
            the cache: transformers rotates queries once, to their text positions; PyramidKV for other layers.
    """
    if policy is None:
        if kv_budget is not None:
            raise ValueError(f"kv_budget: expected None without an eviction_policy, got {kv_budget}")
        return {}
    as_instance(policy, EvictionPolicy, "eviction_policy")
    if policy.endless:
        raise ValueError(f"eviction_policy: expected SlidingWindow, H2O or PyramidKV, got {policy}")
    if policy.total_layers not in (None, len(layers)):
        raise ValueError(f"eviction_policy: expected PyramidKV({len(layers)}) for these layers, got {policy}")
    kv_budget = policy.most if kv_budget is None else kv_budget
    if kv_budget is None:
        raise ValueError("eviction_policy: expected a kv_budget (tokens per layer) with it, got none")
    budget = as_count(kv_budget, "kv_budget", 1, most=None)
    shares = policy.shares(budget * len(layers), range(len(layers)))
    return {layer: policy.rule(min(shares[i], 1 << 30)) for i, layer in enumerate(layers)}


class Eviction:
    """The scores of the stored tokens of each row of one layer, and the choice of those that stay.

    A token's score is the attention mass on it, summed over queries and heads, divided by the number of queries that
    could see it.

    Args:
        rule: the limits of the layer.
        by_score: whether scores count.
        batch: rows.
    """

    def __init__(self, rule: Rule, by_score: bool, batch: int) -> None:
        self.rule, self.by_score = rule, by_score
        self.evicted = 0
        self._scores: list[Float64] = [np.empty(0)] * batch

    def copy(self) -> Eviction:
        """The same scores."""
        new = Eviction(self.rule, self.by_score, 0)
        new._scores, new.evicted = list(self._scores), self.evicted
        return new

    def add(self, row: int, scores: npt.NDArray[np.float32]) -> None:
        """Add the attention mass of new queries on each stored token of a row."""
        known = self._scores[row]
        self._scores[row] = scores.astype(np.float64) + np.pad(known, (0, len(scores) - len(known)))

    def cut(self, counts: list[int]) -> None:
        """Forget the scores of the tokens after the first `counts[row]`."""
        self._scores = [row[:count] for row, count in zip(self._scores, counts, strict=True)]

    def select(self, rows: Int64) -> None:
        """Let row i be what row `rows[i]` was."""
        self._scores = [self._scores[row] for row in rows]

    def choose(self, positions: list[Int64], length: int) -> Iterator[tuple[int, Int64]]:
        """`(row, indices that stay)` for each row over its limit; scores of the others are gone then."""
        for row, at in enumerate(positions):
            if len(at) > self.rule.limit:
                scores = np.pad(self._scores[row], (0, len(at) - len(self._scores[row])))
                kept = survivors(scores / (length - at), self.rule, self.by_score)
                self._scores[row] = scores[kept]
                self.evicted += len(at) - len(kept)
                yield row, kept

"""`AdaKV`: a budget for each KV head, by what its tokens are worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.networks.protocols import Model
from kvcache.policies.ranked import Ranked
from kvcache.policies.snapkv import SnapKV
from kvcache.support.arguments import as_finite, as_instance
from kvcache.texts.policy import Policy, as_budgets, of_network

__all__ = ["AdaKV"]

Int64 = npt.NDArray[np.int64]


class AdaKV(Policy):
    """Divides the budget of a layer among its KV heads: the tokens that are worth most in any head of it stay there.

    Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference" (arXiv 2407.11550), algorithm 1.

    Args:
        policy: says what tokens are worth, a `Ranked`, by default `SnapKV()`; those of infinite worth stay as far as
            the budget goes.
        least: the share of the budget that each head has in any case, 0 to 1; at least one token.

    Raises:
        TypeError, ValueError: another kind; not such a number.
    """

    per_head = True

    def __init__(self, policy: Ranked | None = None, least: float = 0.2) -> None:
        self.policy = SnapKV() if policy is None else as_instance(policy, Ranked, "policy")
        self.least = as_finite(least, "least", 0.0, 1.0)
        self.score_queries: int | None = self.policy.score_queries
        self.reads_keys, self.reads_values = self.policy.reads_keys, self.policy.reads_values
        self.reads_queries = self.policy.reads_queries

    def of_network(self, model: Model, /) -> AdaKV:
        """See `Policy.of_network`."""
        own = of_network(self.policy, model)
        return self if own is self.policy else AdaKV(as_instance(own, Ranked, "policy"), self.least)

    def budgets(self, kv_budget: int, num_layers: int, /) -> Sequence[int]:
        """See `Policy.budgets`: those of the other policy."""
        return as_budgets(self.policy, kv_budget, num_layers)

    def keep(self, layer: int, scores: Any, positions: Any, budget: int, /, *rows: Any) -> list[Int64]:
        """See `Policy.keep`."""
        worths = self.policy.worths(layer, scores, positions, budget, *rows)
        rest, kept = budget * len(worths), []
        for worth in worths:  # each head's own share comes first
            kept.append(np.argsort(-worth, kind="stable")[: max(1, int(budget * self.least))])
            worth[kept[-1]] = -np.inf
            rest -= len(kept[-1])
        found = np.argsort(-np.concatenate(worths), kind="stable")[:rest]
        starts = np.cumsum([0, *map(len, worths)])
        for head, (start, stop) in enumerate(pairwise(starts)):
            more = found[(start <= found) & (found < stop)] - start
            kept[head] = np.unique(np.concatenate([kept[head], more]))
        return kept

"""`Policy`: the choice of the tokens that a layer keeps, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.support.arguments import as_count, as_indices, short

__all__ = ["Policy", "as_budgets", "as_kept", "as_score_queries", "is_policy"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_MOST_QUERIES = 4096  # each of them keeps a score for each token, layer and KV head


class Policy(Protocol):
    """Which tokens of a layer stay, when it has more than its budget: `InferenceEngine(eviction_policy=)` takes one.

    A class with `keep` alone is one too; the rest then has the values here. What a method raises leaves the sequence
    of the engine as it was before the call. Methods run during a call of the engine, which they must not call.

    Attributes:
        reads_keys: whether `keep` gets a fifth argument, the keys of the tokens, float32 `(num_kv_heads, n, head_dim)`,
            as attention reads them: with their position embedding, and as their format rounds them.
        score_queries: how many of the last queries' attention counts as scores, at most 4,096; 0: scores are zeros and
            cost nothing; None: that of all queries since the token, as under H2O. Each of the last queries takes a
            float32 per token, layer and KV head.
    """

    score_queries: int | None = 32
    reads_keys: bool = False

    def keep(self, layer: int, scores: Float64, positions: Int64, budget: int, /) -> npt.ArrayLike:
        """Choose the tokens of a layer that stay; called after each piece of a prompt and each decode step.

        Only where the layer has more than `budget` tokens. A policy that keeps fewer is called less often.

        Args:
            layer: of the network.
            scores: `(num_kv_heads, n)`: the attention mass on each token per query that could see it, summed over the
                query heads of each KV head; of the queries that `score_queries` says.
            positions: of the tokens in the text, ascending, `(n,)`.
            budget: the most tokens that may stay.

        Returns:
            Indices into `positions`, ascending, 1 to `budget` of them.
        """

    def budgets(self, kv_budget: int, num_layers: int, /) -> Sequence[int]:
        """The budget of each layer, by default `kv_budget`; called once, when the engine is made."""
        return [kv_budget] * num_layers


def is_policy(value: Any) -> bool:
    """Whether it is an object with a method `keep`."""
    return not isinstance(value, type) and callable(getattr(value, "keep", None))


def as_score_queries(policy: Policy) -> int | None:
    """The `score_queries` of a policy.

    Raises:
        TypeError, ValueError: not an int from 0 to 4,096 or None.
    """
    queries = getattr(policy, "score_queries", Policy.score_queries)
    return None if queries is None else as_count(queries, "score_queries", 0, _MOST_QUERIES)


def as_budgets(policy: Policy, kv_budget: int, num_layers: int) -> list[int]:
    """The `budgets` of a policy.

    Raises:
        TypeError, ValueError: not an int of at least 1 for each layer.
    """
    divide = getattr(policy, "budgets", None)
    if divide is None:
        return [kv_budget] * num_layers
    found = divide(kv_budget, num_layers)
    try:
        counts = list(found)
    except TypeError:
        raise TypeError(f"budgets: expected {num_layers} ints, got {type(found).__name__}") from None
    if len(counts) != num_layers:
        raise ValueError(f"budgets: expected one for each of {num_layers} layers, got {len(counts)}")
    return [as_count(each, "budgets", 1, most=None) for each in counts]


def as_kept(found: Any, count: int, budget: int) -> Int64:
    """Check what `keep` returned for `count` tokens, and return it as int64 indices of the caller's own.

    Raises:
        TypeError, ValueError: not 1 to `budget` ascending integers below `count`.
    """
    kept = as_indices(found, "keep").copy()
    if not 0 < len(kept) <= budget:
        raise ValueError(f"keep: expected 1 to {budget} indices, got {len(kept)}")
    if kept[0] < 0 or kept[-1] >= count or (np.diff(kept) <= 0).any():
        raise ValueError(f"keep: expected ascending indices from 0 to {count - 1}, got {short(kept.tolist())}")
    return kept

"""`Policy`: the choice of the tokens that a layer keeps, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from kvcache.networks.protocols import Model
from kvcache.support.arguments import as_count, as_indices, short

__all__ = ["Policy", "as_budgets", "as_kept", "as_kept_by_head", "as_num_queries", "is_policy", "of_network"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

Self = TypeVar("Self", bound="Policy")

_MOST_QUERIES = 4096  # each of them keeps a score for each token, layer and KV head, or its channels


class Policy(Protocol):
    """Which tokens of a layer stay, when it has more than its budget: `InferenceEngine(eviction_policy=)` takes one.

    A class with `keep` alone is one too; the rest then has the values here. What a method raises leaves the sequence
    of the engine as it was before the call. Methods run during a call of the engine, which they must not call.

    Attributes:
        score_queries: how many of the last queries' attention counts as scores, at most 4,096; 0: scores are zeros and
            cost nothing; None: that of all queries since the token, as under H2O. Each of the last queries takes a
            float32 per token, layer and KV head.
        per_head: whether each KV head of a layer keeps tokens of its own. Each is then a sequence of its own in blocks
            of one head, so that a token takes memory in the heads alone that keep it.
        reads_keys, reads_values: whether `keep` gets the keys, and the values, of the tokens as further arguments,
            float32 `(num_kv_heads, n, head_dim)`, as attention reads them: keys with their position embedding, and
            both as their format rounds them.
        reads_queries: of how many of the last queries `keep` gets the rows as the last argument, at most 4,096; 0: it
            gets none. Float32 `(num_kv_heads, m, group, head_dim)`, with their position embedding: `group` query heads
            read a KV head, and the last of the m queries is that of the newest token. Every layer keeps them.
    """

    score_queries: int | None = 32
    per_head: bool = False
    reads_keys: bool = False
    reads_values: bool = False
    reads_queries: int = 0

    def keep(self, layer: int, scores: Any, positions: Any, budget: int, /) -> Any:
        """Choose the tokens of a layer that stay; called after each piece of a prompt and each decode step.

        Only where the layer has more than `budget` tokens; with `per_head`, where its heads have more on average. A
        policy that keeps fewer is called less often.

        Args:
            layer: of the network.
            scores: `(num_kv_heads, n)`, float64: the attention mass on each token per query that could see it, summed
                over the query heads of each KV head; of the queries that `score_queries` says.
            positions: of the tokens in the text, ascending, int64 `(n,)`.
            budget: the most tokens that may stay.

        Returns:
            Indices into `positions`, ascending, 1 to `budget` of them.

        With `per_head` heads have different tokens. Arguments, those that are read too, are then lists with an item for
        each KV head, without the axis of heads, and `keep` returns one too, such as an array `(num_kv_heads, budget)`:
        the indices of each head, ascending, at least one, and `num_kv_heads * budget` together at most.
        """

    def budgets(self, kv_budget: int, num_layers: int, /) -> Sequence[int]:
        """The budget of each layer, by default `kv_budget`; called once, when the engine is made."""
        return [kv_budget] * num_layers

    def of_network(self: Self, model: Model, /) -> Self:
        """The policy for a network, by default itself; called once, when the engine is made."""
        return self


def is_policy(value: Any) -> TypeGuard[Policy]:
    """Whether it is an object with a method `keep`."""
    return not isinstance(value, type) and callable(getattr(value, "keep", None))


def as_num_queries(policy: Policy, name: str) -> int | None:
    """The attribute `score_queries` or `reads_queries` of a policy.

    Raises:
        TypeError, ValueError: not an int from 0 to 4,096; None, but for `score_queries`.
    """
    queries = getattr(policy, name, getattr(Policy, name))
    if queries is None and name == "score_queries":
        return None
    return as_count(queries, name, 0, _MOST_QUERIES)


def of_network(policy: Policy, model: Model) -> Policy:
    """The policy for this network.

    Raises:
        TypeError: its `of_network` returned no policy.
    """
    own = getattr(policy, "of_network", None)
    if own is None:
        return policy
    found: Any = own(model)
    if not is_policy(found):
        raise TypeError(f"of_network: expected an object with `keep`, got {type(found).__name__}")
    return found


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


def as_kept(found: Any, count: int, budget: int, name: str = "keep") -> Int64:
    """Check what `keep` returned for `count` tokens, and return it as int64 indices of the caller's own.

    Raises:
        TypeError, ValueError: not 1 to `budget` ascending integers below `count`.
    """
    kept = as_indices(found, name).copy()
    if not 0 < len(kept) <= budget:
        raise ValueError(f"{name}: expected 1 to {budget} indices, got {len(kept)}")
    if kept[0] < 0 or kept[-1] >= count or (np.diff(kept) <= 0).any():
        raise ValueError(f"{name}: expected ascending indices from 0 to {count - 1}, got {short(kept.tolist())}")
    return kept


def as_kept_by_head(found: Any, counts: Sequence[int], budget: int) -> list[Int64]:
    """Check what `keep` returned for KV heads with `counts` tokens, as `as_kept` does.

    Raises:
        TypeError, ValueError: not one row of indices for each head; more than `budget` of a head on average.
    """
    try:
        rows = list(found)
    except TypeError:
        raise TypeError(f"keep: expected indices of each of {len(counts)} KV heads, got {short(found)}") from None
    if len(rows) != len(counts):
        raise ValueError(f"keep: expected indices of each of {len(counts)} KV heads, got {len(rows)} rows")
    most = budget * len(counts)
    kept = [as_kept(row, count, most, f"keep[{i}]") for i, (row, count) in enumerate(zip(rows, counts, strict=True))]
    if sum(map(len, kept)) > most:
        raise ValueError(f"keep: expected at most {most} indices of {len(counts)} KV heads, got {sum(map(len, kept))}")
    return kept

"""`Eviction`: which tokens of each row stay under a policy, in one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.eviction import EvictionPolicy
from kvcache.integrations.transformers.pool import PagedPool
from kvcache.networks.protocols import LayerAttention
from kvcache.texts.budgets import Budgets
from kvcache.texts.policy import Policy, is_policy
from kvcache.texts.scores import Alive, Drawn

__all__ = ["Eviction", "budgets_of"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class _Layers:
    """The layers with full attention, as the network of an engine has them."""

    def __init__(self, count: int, heads: int) -> None:
        self.num_layers, self.num_kv_heads, self.head_dim = count, heads, 0
        self.max_position_embeddings = 1 << 30
        self.config, self.attention = self, [LayerAttention()] * count


def budgets_of(policy: Any, kv_budget: int | None, pool: PagedPool) -> tuple[Budgets | None, list[int]]:
    """The budgets of the layers with full attention, and these layers; None without a policy.

    Raises:
        TypeError, ValueError: another kind; one argument without the other; StreamingLLM, whose distances count within
            the cache: transformers rotates queries once, to their text positions; PyramidKV for other layers; a policy
            per head, for rows of a batch share blocks of all heads; one that asks for the network, which a cache does
            not see.
    """
    layers = [layer for layer, name in enumerate(pool.types) if name == "full_attention"]
    if policy is None:
        if kv_budget is not None:
            raise ValueError(f"kv_budget: expected None without an eviction_policy, got {kv_budget}")
        return None, []
    heads, built_in = {pool.said[layer].heads for layer in layers if layer in pool.said}, False
    if isinstance(policy, EvictionPolicy):
        built_in = True
        if policy.endless:
            raise ValueError(f"eviction_policy: expected SlidingWindow, H2O or PyramidKV, got {policy}")
        if policy.total_layers not in (None, len(layers)):
            raise ValueError(f"eviction_policy: expected PyramidKV({len(layers)}) for these layers, got {policy}")
    elif is_policy(policy):
        name = type(policy).__name__
        if getattr(policy, "per_head", False):
            raise ValueError(
                f"eviction_policy: expected a policy for all heads of a layer, got {name} with per_head; an "
                "InferenceEngine takes it"
            )
        if getattr(type(policy), "of_network", Policy.of_network) is not Policy.of_network:
            raise ValueError(
                f"eviction_policy: expected a policy without of_network, for a cache does not see the network, got "
                f"{name}; an InferenceEngine takes it"
            )
    if not built_in and len(heads) > 1:
        raise ValueError(f"eviction_policy: expected layers with one number of KV heads, got {sorted(heads)}")
    network: Any = _Layers(len(layers), next(iter(heads), 1))
    return Budgets.of(policy, kv_budget, network), layers


class Eviction:
    """The scores of the stored tokens of each row of one layer, and the choice of those that stay.

    A token's score is the attention mass on it of the queries that count, divided by the number of those that could see
    it.

    Args:
        budgets: of all layers that evict.
        layer: its number among these.
        batch: rows.
    """

    def __init__(self, budgets: Budgets, layer: int, batch: int) -> None:
        self.budgets, self.layer = budgets, layer
        self.evicted = 0
        self._alive: list[Alive] = [budgets.scoring.no_tokens] * batch

    @property
    def scores(self) -> bool:
        """Whether attention has to say more than its result."""
        return self.budgets.scoring.queries != 0 or self.budgets.scoring.rows > 0

    def copy(self) -> Eviction:
        """The same scores."""
        new = Eviction(self.budgets, self.layer, 0)
        new._alive, new.evicted = list(self._alive), self.evicted
        return new

    def add(self, row: int, drawn: Drawn) -> None:
        """Add what the newest queries of a row have drawn, of as many of its first tokens as they have scores of."""
        known, scores = self._alive[row], drawn.scores
        count = max(known.scores.shape[-1], 0 if scores is None else scores.shape[-1])
        padded = _padded(known.scores, count)
        drawn = drawn._replace(scores=None if scores is None else _padded(scores, count))
        self._alive[row] = self.budgets.scoring.joined(Alive(known.positions, padded, known.queries), drawn)

    def cut(self, counts: list[int], queries: int) -> None:
        """Forget the scores of the tokens after the first `counts[row]`, and of the last queries."""
        for row, count in enumerate(counts):
            each = self._alive[row]
            self._alive[row] = self.budgets.scoring.cut(each, count, count + queries)

    def select(self, rows: Int64) -> None:
        """Let row i be what row `rows[i]` was."""
        self._alive = [self._alive[row] for row in rows]

    def choose(
        self, positions: list[Int64], length: int, read: Callable[[int], tuple[Float32, Float32]]
    ) -> Iterator[tuple[int, Int64]]:
        """`(row, indices that stay)` for each row over its limit; scores of the others are gone then.

        Args:
            read: reads K and V of a row.
        """
        for row, at in enumerate(positions):
            if self.budgets.exceeds(self.layer, [len(at)]):
                known = self._alive[row]
                alive = Alive(at, _padded(known.scores, len(at)), known.queries)
                (kept,) = self.budgets.keep(self.layer, [alive], length, [partial(read, row)])
                self._alive[row] = self.budgets.scoring.keep(alive, kept)
                self.evicted += len(at) - len(kept)
                yield row, kept


def _padded(scores: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    missing = count - scores.shape[-1]
    return np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, missing)]) if missing else scores

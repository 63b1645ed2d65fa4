"""`Budgets`: a policy, how many tokens of each layer it keeps, and which these are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.eviction import EvictionPolicy, Rule
from kvcache.lists.kept_tokens import KeptTokens
from kvcache.networks.protocols import Model
from kvcache.support.arguments import as_count
from kvcache.support.exclusions import expect
from kvcache.texts.features import features_of
from kvcache.texts.policy import Policy, as_budgets, as_kept, as_kept_by_head, as_num_queries, is_policy, of_network
from kvcache.texts.scores import Alive, Scoring

__all__ = ["Budgets", "most_blocks", "survivors"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Read = Callable[[], tuple[Float32, Float32]]


@dataclass(frozen=True, slots=True)
class Budgets:
    """A policy and its limit for each layer.

    Attributes:
        policy: chooses the tokens that stay.
        kv_budget: tokens per layer; under PyramidKV on average.
        rules: one `Rule` per layer; a `Policy` protects no tokens.
        scoring: the queries that count.
        lists: of tokens in a layer: 1, or one for each KV head; a rule's limit is then that of a head on average.
    """

    policy: EvictionPolicy | Policy
    kv_budget: int
    rules: tuple[Rule, ...]
    scoring: Scoring
    lists: int = 1

    @classmethod
    def of(cls, policy: EvictionPolicy | Policy | None, kv_budget: int | None, model: Model) -> Budgets | None:
        """Check the `eviction_policy` and `kv_budget` of an engine; None if it has neither.

        Raises:
            TypeError: neither an `EvictionPolicy` nor a `Policy`; a budget that is not a whole number; StreamingLLM for
                a network that is not a `StreamingModel`.
            ValueError: one without the other; a budget below 1; PyramidKV for another number of layers; StreamingLLM
                with a budget that leaves no position for a query; settings of a `Policy` out of range.
        """
        num_layers = model.config.num_layers
        if policy is None and kv_budget is None:
            return None
        expect("eviction_policy", policy, features_of(model))
        if policy is None:
            raise ValueError("kv_budget: expected an eviction_policy with it, got None")
        if not isinstance(policy, EvictionPolicy) and not is_policy(policy):
            got = f"the class {policy.__qualname__}" if isinstance(policy, type) else type(policy).__name__
            raise TypeError(f"eviction_policy: expected an EvictionPolicy or an object with `keep`, got {got}")
        if kv_budget is None and isinstance(policy, EvictionPolicy):
            kv_budget = policy.most
        if kv_budget is None:
            raise ValueError("eviction_policy: expected a kv_budget (tokens per layer) with it, got none")
        kv_budget = as_count(kv_budget, "kv_budget", 1, most=None)
        # No text has more than 2**30 tokens; `KeptTokens` counts in 32 bits.
        if not isinstance(policy, EvictionPolicy):
            return cls._of_python(policy, kv_budget, model)
        if policy.total_layers not in (None, num_layers):
            raise ValueError(f"eviction_policy: expected PyramidKV({num_layers}) for this network, got {policy}")
        shares = policy.shares(kv_budget * num_layers, range(num_layers))
        rules = tuple(policy.rule(min(share, 1 << 30)) for share in shares.values())
        if policy.endless:
            _check_endless(model, rules[0].limit)
        return cls(policy, kv_budget, rules, Scoring(None if policy.by_score else 0))

    @classmethod
    def _of_python(cls, policy: Policy, kv_budget: int, model: Model) -> Budgets:
        policy, heads = of_network(policy, model), model.config.num_kv_heads
        per_head = bool(getattr(policy, "per_head", False))
        counted, rows = as_num_queries(policy, "score_queries"), as_num_queries(policy, "reads_queries") or 0
        limits = as_budgets(policy, kv_budget, model.config.num_layers)
        rules = tuple(Rule(min(limit, 1 << 30), 0, 0) for limit in limits)
        return cls(policy, kv_budget, rules, Scoring(counted, None if per_head else heads, rows), heads**per_head)

    @property
    def per_head(self) -> bool:
        """Whether each KV head has tokens of its own."""
        return not isinstance(self.policy, EvictionPolicy) and bool(getattr(self.policy, "per_head", False))

    @property
    def features(self) -> set[str]:
        """The names of the features that exclude settings, see `kvcache.support.exclusions`."""
        return {"eviction", "endless"} if self.endless else {"eviction"}

    @property
    def endless(self) -> bool:
        """Whether the length of a text is not limited, see `EvictionPolicy`."""
        return isinstance(self.policy, EvictionPolicy) and self.policy.endless

    def exceeds(self, layer: int, counts: Sequence[int]) -> bool:
        """Whether lists of `counts` tokens are above the budget of a layer."""
        return sum(counts) > len(counts) * self.rules[layer].limit

    def keep(self, layer: int, lists: Sequence[Alive], end: int, reads: Sequence[Read]) -> list[Int64]:
        """The indices of the tokens of each list of a layer that stay in a text of `end` tokens, ascending.

        Args:
            reads: for each list a function that reads K and V of its tokens, `(n, heads, head_dim)`.
        """
        scores, rule = [self.scoring.mean(each, end) for each in lists], self.rules[layer]
        if isinstance(self.policy, EvictionPolicy):
            return [survivors(each, rule, self.policy.by_score) for each in scores]
        return self.choose(
            layer, scores, [each.positions.copy() for each in lists], self._shown(self.policy, lists, reads)
        )

    def choose(
        self, layer: int, scores: Sequence[Float64], positions: Sequence[Int64], shown: Sequence[Sequence[Float32]]
    ) -> list[Int64]:
        """Ask a `Policy` for what stays of each list of a layer; indices, ascending.

        Args:
            shown: the rows that it reads: an argument after the other, for each list, with the axis of KV heads first.
        """
        policy, rule = self.policy, self.rules[layer]
        assert not isinstance(policy, EvictionPolicy)
        if self.per_head:
            rows = [[each[0] for each in one] for one in shown]
            found = policy.keep(layer, scores, positions, rule.limit, *rows)
            return as_kept_by_head(found, [len(each) for each in positions], rule.limit)
        found = policy.keep(layer, scores[0], positions[0], rule.limit, *[one[0] for one in shown])
        return [as_kept(found, len(positions[0]), rule.limit)]

    def _shown(self, policy: Policy, lists: Sequence[Alive], reads: Sequence[Read]) -> list[list[Float32]]:
        """Rows that a policy reads: an argument after the other, for each list, with the axis of KV heads first."""
        wanted = [getattr(policy, name, False) for name in ("reads_keys", "reads_values")]
        shown: list[list[Float32]] = []
        if any(wanted):
            rows = [read() for read in reads]
            shown = [[np.moveaxis(each[i], 0, 1) for each in rows] for i in range(2) if wanted[i]]
        if self.scoring.rows:
            heads, kept = self.scoring.heads or 1, [each.queries for each in lists]
            shown.append([np.moveaxis(q.reshape(len(q), heads, -1, q.shape[-1]), 1, 0).copy() for q in kept])
        return shown

    def piece(self, chunk: int, positions: int) -> int:
        """The maximum length of a piece: `chunk`, and under StreamingLLM the positions that survivors leave free."""
        return min(chunk, positions - self.rules[0].limit) if self.endless else chunk

    def peak_blocks(self, block_size: int, chunk: int, positions: int) -> int:
        """The maximum number of blocks of a text that runs in pieces of `chunk` with at most `positions` survivors.

        Per layer: the survivors, one piece, and the survivors again, which a fork keeps until the call has succeeded.
        For one layer at a time, also the new blocks of a compaction. Where KV heads are lists of their own, blocks are
        those of a head.
        """
        rest = [most_blocks(min(rule.limit, positions), block_size, self.lists) for rule in self.rules]
        pieces = self.lists * (-(-min(chunk, positions) // block_size) + 1)
        return 2 * sum(rest) + max(rest) + len(rest) * pieces


def expect_turning(model: Model, keyword: str, setting: str, needed_for: str) -> None:
    """Raise TypeError unless `forward` of a network has a keyword that turns queries to other positions."""
    parameters = inspect.signature(model.forward).parameters
    if keyword not in parameters:
        raise TypeError(
            f"{setting}: expected a network that turns queries to other positions (protocols.StreamingModel: "
            f"forward(..., {keyword}=)) for {needed_for}, got {type(model).__name__} with "
            f"forward({', '.join(parameters)})"
        )


def _check_endless(model: Model, limit: int) -> None:
    expect_turning(model, "sink_positions", "eviction_policy", "StreamingLLM")
    positions = model.config.max_position_embeddings
    if limit >= positions:
        raise ValueError(
            f"kv_budget: expected sinks and window below max_position_embeddings ({positions}) for StreamingLLM, "
            f"got {limit}: no position is left for the next token"
        )


def survivors(scores: Float64, rule: Rule, by_score: bool) -> Int64:
    """The entries of a list that stay: int64 indices, ascending, at most `rule.limit` of `len(scores)`.

    The first `rule.front` and the last `rule.back` stay. From the middle the lowest score is evicted first, among
    equals the earliest entry; without `by_score` always the earliest. `CacheManager` evicts by the same code.
    """
    kept = KeptTokens(by_score)
    kept.append(len(scores), len(scores), rule.front, rule.back)
    if by_score:
        kept.add_scores(scores)
    kept.evict(*rule)
    return kept.positions()


def most_blocks(num_tokens: int, block_size: int, lists: int = 1) -> int:
    """The maximum number of blocks of a list between calls: a quarter more than needed, plus one.

    With several `lists` this is the number of all together. They have `num_tokens` on average, and none is empty.
    """
    needed = (lists * (num_tokens + block_size - 1)) // block_size
    return needed + needed // 4 + lists * (needed > 0)

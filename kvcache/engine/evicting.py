"""A sequence that evicts: every layer keeps at most the tokens that its budget allows.

    layer 0   0  1  .  .  4  .  .  7  .  9 10 11     sequence 0 of the cache: budget 7
    layer 1   0  .  .  3  .  .  .  .  .  9 10 11     sequence 1 of the cache: budget 5

Survivors differ between layers, so each layer is a sequence of its own, in blocks that hold one layer. A key keeps the
position embedding of its text position. A chunk is appended and attends over the survivors and itself. Then every
layer evicts down to its budget: blocks without survivors are freed, and scattered survivors are compacted if they
occupy too many blocks (`most_blocks`).

Under StreamingLLM the distance to the sinks does not count the evicted tokens. Keys are not rewritten: the network
rotates a second set of queries to their index in the cache.

    text      0  1  2  3  .  .  .  .  96 97 98 99    window: query and key at their text positions, 99 - 97 = 2
    cache     0  1  2  3              4  5  6  7     sinks:  the query of 99 is rotated to 7, and 7 - 1 = 6
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_count
from kvcache.core.memory import total
from kvcache.engine.policy import Policy, as_budgets, as_kept, as_score_queries, is_policy
from kvcache.engine.scores import Alive, Scoring
from kvcache.engine.sequence import ModelSequence, Share
from kvcache.engine.windows import Pages
from kvcache.errors import InvalidOperationError
from kvcache.eviction import EvictionPolicy, Rule
from kvcache.lists.kept_tokens import KeptTokens
from kvcache.networks.protocols import Attend, Float32, Logits, Model, layer_attention
from kvcache.paged.cache import PagedKvCache

__all__ = ["Budgets", "EvictingSequence", "most_blocks", "survivors"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Budgets:
    """A policy and its limit for each layer.

    Attributes:
        policy: chooses the tokens that stay.
        kv_budget: tokens per layer; under PyramidKV on average.
        rules: one `Rule` per layer; a `Policy` protects no tokens.
        scoring: the queries that count.
    """

    policy: EvictionPolicy | Policy
    kv_budget: int
    rules: tuple[Rule, ...]
    scoring: Scoring

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
        if windows := [each.window for each in layer_attention(model) if each.window is not None]:
            raise ValueError(
                f"eviction_policy: expected none for a network with layers that have a window (of {windows[0]}), "
                f"got {policy}"
            )
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
            scoring = Scoring(as_score_queries(policy), model.config.num_kv_heads)
            limits = as_budgets(policy, kv_budget, num_layers)
            return cls(policy, kv_budget, tuple(Rule(min(limit, 1 << 30), 0, 0) for limit in limits), scoring)
        if policy.total_layers not in (None, num_layers):
            raise ValueError(f"eviction_policy: expected PyramidKV({num_layers}) for this network, got {policy}")
        shares = policy.shares(kv_budget * num_layers, range(num_layers))
        rules = tuple(policy.rule(min(share, 1 << 30)) for share in shares.values())
        if policy.endless:
            _check_endless(model, rules[0].limit)
        return cls(policy, kv_budget, rules, Scoring(None if policy.by_score else 0))

    @property
    def endless(self) -> bool:
        """As of `EvictionPolicy`."""
        return isinstance(self.policy, EvictionPolicy) and self.policy.endless

    def keep(self, layer: int, alive: Alive, end: int) -> Int64:
        """The indices of the tokens of a layer that stay in a text of `end` tokens, ascending."""
        scores, rule = self.scoring.mean(alive, end), self.rules[layer]
        if isinstance(self.policy, EvictionPolicy):
            return survivors(scores, rule, self.policy.by_score)
        found = self.policy.keep(layer, scores, alive.positions.copy(), rule.limit)
        return as_kept(found, len(alive.positions), rule.limit)

    def piece(self, chunk: int, positions: int) -> int:
        """The maximum length of a piece: `chunk`, and under StreamingLLM the positions that survivors leave free."""
        return min(chunk, positions - self.rules[0].limit) if self.endless else chunk

    def peak_blocks(self, block_size: int, chunk: int, positions: int) -> int:
        """The maximum number of blocks of a text that runs in pieces of `chunk` with at most `positions` survivors.

        Per layer: the survivors, one piece, and the survivors again, which a fork keeps until the call has succeeded.
        For one layer at a time, also the new blocks of a compaction.
        """
        rest = [most_blocks(min(rule.limit, positions), block_size) for rule in self.rules]
        return 2 * sum(rest) + max(rest) + len(rest) * (-(-min(chunk, positions) // block_size) + 1)


class EvictingSequence(ModelSequence):
    """One sequence per layer, each within its budget. A failing call leaves all of them unchanged.

    Under H2O and PyramidKV a token's score is the attention mass on it in its layer, summed over all later queries
    and heads (float64) and divided by the number of queries that could see it. The plain sum favours early tokens and
    keeps worse tokens on held-out text (`python -m bench quality`). Scores depend on the size of the pieces: in pieces
    of 512, a token gets attention from up to 512 queries before the first eviction.

    Args:
        model, chunk: as of `ModelSequence`.
        cache: with `separate_layers`. Layer l of the network is its sequence l. During a call, the ids from
            `num_layers` to `2 * num_layers - 1` are forks of these, which share their blocks and restore them if the
            call fails.
        budgets: one rule for each layer of the network.
    """

    def __init__(self, model: Model, cache: PagedKvCache, chunk: int, budgets: Budgets) -> None:
        super().__init__(model, cache, budgets.piece(chunk, model.config.max_position_embeddings))
        self.budgets = budgets
        if self.several_regimes:
            raise ValueError(
                f"eviction_policy: expected none for a network whose positions depend on the length of the text, "
                f"got {budgets.policy}"
            )
        self._layers = range(len(budgets.rules))
        self._options = [attention.options() for attention in layer_attention(model)]
        self._ids = [np.array([layer], np.uint64) for layer in self._layers]  # made once, not in every call
        self._all = np.arange(len(self._layers), dtype=np.uint64)
        self._forks = self._all + np.uint64(len(self._layers))
        self._no_tokens = budgets.scoring.no_tokens
        self._alive = [self._no_tokens] * len(self._layers)
        self._before: tuple[list[Alive], int] | None = None  # during a call: the state that the forks restore
        for layer in self._layers:
            cache.allocate(layer, 0)

    @property
    def seq_id(self) -> int:
        raise InvalidOperationError("an engine that evicts has one sequence per layer: layer l is sequence l")

    def check(self) -> None:
        for layer, alive, rule in zip(self._layers, self._alive, self.budgets.rules, strict=True):
            held = self.cache.get_sequence(layer)
            assert held is not None, f"sequence {layer} is gone from the cache"
            assert held.num_tokens == len(alive.positions) == alive.scores.shape[-1] <= rule.limit, (
                f"layer {layer}: {held.num_tokens} tokens in the cache, {len(alive.positions)} counted, at most "
                f"{rule.limit} allowed"
            )
            assert (np.diff(alive.positions, prepend=-1, append=self.num_tokens) > 0).all(), (
                f"layer {layer}: positions do not ascend below {self.num_tokens}"
            )
            assert np.isfinite(alive.scores).all(), f"layer {layer}: a score is not finite"
            assert self.cache.get_sequence(self._fork_id(layer)) is None, f"layer {layer}: a fork was not freed"

    def mend(self) -> None:
        # A call sets `_before` before any change and resets it in one line after the last one.
        for layer in self._layers:
            if self._fork_id(layer) in self.cache:
                if self._before is not None:
                    self._restore(layer)
                self.cache.free(self._fork_id(layer))
        if self._before is not None:
            self._alive, self.num_tokens = self._before
            self._before = None
        for layer, alive in zip(self._layers, self._alive, strict=True):
            if not len(alive.positions):  # `clear` resets `_alive` first and empties the sequences afterwards
                self._empty(layer)

    def clear(self) -> None:
        if self._before is not None:  # a call was interrupted and `mend` has not run since
            self.mend()
        self.version += 1
        self._alive, self.num_tokens = [self._no_tokens] * len(self._layers), 0
        for layer in self._layers:
            self._empty(layer)

    def _empty(self, layer: int) -> None:
        self._drop(layer)
        self.cache.allocate(layer, 0)

    def _restore(self, layer: int) -> None:
        """Make the layer what its fork is. Allocates no memory."""
        if layer in self.cache:
            self.cache.swap(layer, self._fork_id(layer))
        else:  # `_empty` was interrupted
            self.cache.fork(self._fork_id(layer), layer)

    def _drop(self, layer: int) -> None:
        if layer in self.cache:
            self.cache.free(layer)

    def memory(self) -> dict[str, int]:
        return total(super().memory(), {"bookkeeping": sum(alive.nbytes for alive in self._alive)})

    def move(self, cache: PagedKvCache, more_blocks: int) -> None:
        for layer in self._layers:
            cache.allocate(layer, 0)
        self.cache, self._alive, self.num_tokens = cache, [self._no_tokens] * len(self._layers), 0
        self.version += 1

    def replace(self, share: Share, pages: Sequence[Pages] = ()) -> None:
        raise InvalidOperationError("an engine that evicts has one sequence per layer, which cannot be replaced by one")

    def positions(self, layer: int) -> Int64:
        return self._alive[layer].positions.copy()

    def extend(self, tokens: npt.NDArray[np.uint32], pos: int, logits: Logits = "last") -> Float32:
        """As `ModelSequence.extend`. Scores keep the attention mass of queries that are cut off.

        Raises:
            InvalidOperationError: a token before `pos` was evicted, and `pos` is not the end.
        """
        self._refuse_going_back(pos)
        with self._restored_on_failure(pos + len(tokens)):
            if pos < self.num_tokens:
                for layer in self._layers:
                    self._cut(layer, pos)
                self._alive = [self.budgets.scoring.cut(alive, pos, self.num_tokens) for alive in self._alive]
            rows = self._run_in_chunks(0, tokens, pos, logits)
        self._compact()
        return rows

    def _run(self, seq_id: int, tokens: npt.NDArray[np.uint32], pos: int, logits: Logits) -> Float32:
        """Run a piece through all layers, then evict down to their budgets; `seq_id` is not used."""
        drawn: list[Float32 | None] = [None] * len(self._layers)
        attend, sinks = self._attend(pos, len(tokens), drawn)
        places = {} if sinks is None else {"sink_positions": sinks}
        rows = self._forward(tokens, pos, attend, logits, **places)
        self._alive = [self._hold(layer, pos, len(tokens), drawn[layer]) for layer in self._layers]
        return rows

    @contextmanager
    def piece(self, count: int) -> Iterator[tuple[Attend, Int64 | None]]:
        """Append `count` tokens that the caller runs through the network, beside those of others; then evict.

        Yields:
            The `attend` of these tokens, and the positions of their queries for the sinks; None: there is no hole.
        """
        pos, drawn = self.num_tokens, list[Float32 | None]([None] * len(self._layers))
        with self._restored_on_failure(pos + count):
            yield self._attend(pos, count, drawn)
            self._alive = [self._hold(layer, pos, count, drawn[layer]) for layer in self._layers]
        self._compact()

    def _attend(self, pos: int, count: int, drawn: list[Float32 | None]) -> tuple[Attend, Int64 | None]:
        """Make room for a piece; its `attend`, which notes scores in `drawn`, and positions for the sinks."""
        cache, scoring, query_lens = self.cache, self.budgets.scoring, np.array([count])
        hole = pos - len(self._alive[0].positions) if self.budgets.endless else 0
        self._compact()
        self._append_to(self._all, np.full(len(self._all), count))

        def attend(
            layer: int, queries: Float32, keys: Float32, values: Float32, sink_queries: Float32 | None = None, /
        ) -> Float32:
            cache.write(layer, layer, keys, values)
            options = self._options[layer] | {"sink_queries": sink_queries}
            mixed, drawn[layer] = scoring.attend(cache, layer, queries, self._ids[layer], query_lens, options)
            return mixed

        return attend, np.arange(pos - hole, pos - hole + count) if hole else None

    def _hold(self, layer: int, pos: int, count: int, drawn: Float32 | None) -> Alive:
        """The layer after `count` more tokens and the evictions of its budget."""
        budgets, rule = self.budgets, self.budgets.rules[layer]
        alive = budgets.scoring.add(self._alive[layer], pos, count, drawn)
        if len(alive.positions) <= rule.limit:
            return alive
        kept = budgets.keep(layer, alive, pos + count)
        if budgets.endless:  # the same survivors; this call also marks the sinks in the cache
            self.cache.apply_streaming_llm(layer, rule.front, rule.back)
        else:
            self.cache.keep_tokens(layer, kept)
        return budgets.scoring.keep(alive, kept)

    def _compact(self) -> None:
        """Compact each layer that has more blocks than `most_blocks` allows.

        Compaction of shared blocks needs new blocks and memory. Without them, a later call compacts.
        """
        with suppress(MemoryError):
            occupied = np.diff(self.cache.block_table(self._all).indptr).tolist()
            for layer, alive, num_blocks in zip(self._layers, self._alive, occupied, strict=True):
                if num_blocks > most_blocks(len(alive.positions), self.cache.block_size):
                    self.cache.compact(layer)

    def _refuse_going_back(self, pos: int) -> None:
        if pos == self.num_tokens:
            return
        for layer, alive in zip(self._layers, self._alive, strict=True):
            if np.searchsorted(alive.positions, pos) < pos:
                raise InvalidOperationError(
                    f"pos: expected {self.num_tokens}, the end of the text, got {pos}: layer {layer} has evicted "
                    f"tokens before it; go back to 0 or reset, and run the text again"
                )

    def _cut(self, layer: int, pos: int) -> None:
        if pos:
            self.cache.truncate(layer, pos)
        else:  # after a truncation to 0 the next position would be that of the first survivor
            self._empty(layer)

    def _fork_id(self, layer: int) -> int:
        return len(self._layers) + layer

    @contextmanager
    def _restored_on_failure(self, end: int) -> Iterator[None]:
        """Fork all layers. Afterwards the text has `end` tokens, or after an exception the state is as before."""
        cache = self.cache
        self._before = self._alive, self.num_tokens
        try:
            cache.fork_batch(self._all, self._forks)
            yield
        except Exception:
            self.mend()
            raise
        self.version += 1
        self.num_tokens = end
        self._before = None  # the call has succeeded
        for layer in self._layers:  # one by one, which takes no memory
            cache.free(self._fork_id(layer))


def _check_endless(model: Model, limit: int) -> None:
    parameters = inspect.signature(model.forward).parameters
    if "sink_positions" not in parameters:
        raise TypeError(
            f"eviction_policy: expected a network that rotates queries for the sinks (protocols.StreamingModel: "
            f"forward(..., sink_positions=)) for StreamingLLM, got {type(model).__name__} with "
            f"forward({', '.join(parameters)})"
        )
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


def most_blocks(num_tokens: int, block_size: int) -> int:
    """The maximum number of blocks of a layer between calls: a quarter more than needed, plus one."""
    needed = -(-num_tokens // block_size)
    return needed + needed // 4 + (needed > 0)

"""`compressed`: a prefix runs through the network, a policy chooses what stays of it, and that is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.current import CurrentText
from kvcache.kernels.functions import UNIT, exp, log_add_exp, log_sums, whole_exps
from kvcache.kernels.layers import softcap
from kvcache.kernels.matrix import Matrix
from kvcache.networks.protocols import Float32, LayerAttention, layer_attention
from kvcache.paged.cache import PagedKvCache
from kvcache.support.exclusions import expect
from kvcache.texts.budgets import Budgets
from kvcache.texts.compressed_prefix import CompressedPrefix, Storing
from kvcache.texts.policy import Policy, is_policy
from kvcache.texts.prefix_policy import Asking, Encode, PrefixPolicy, Probe, as_kept_in_all, as_probes, is_prefix_policy
from kvcache.texts.text import Text, Tokens

__all__ = ["compressed"]

Int64 = NDArray[np.int64]
_QUERIES = 64  # whose weights are in memory at a time


def compressed(
    current: CurrentText, tokens: Tokens, policy: Policy | PrefixPolicy, budget: int, encode: Encode, storing: Storing
) -> CompressedPrefix:
    """Run a prefix, and store what a policy keeps of it; the text of the engine is empty afterwards.

    Args:
        budget: tokens that may stay in a head, on average.
        encode: of the engine's tokenizer.

    Raises:
        TypeError, ValueError: no policy; layers that it cannot choose from; what it raises, or returns wrongly.
        OutOfMemoryError: the prefix, and what is to run behind it, do not fit the pool.
    """
    model, cache, size = current.settings.model, current.cache, current.cache.block_size
    settings = current.settings
    chosen = settings.sparse_tokens if settings.budgets is None else settings.budgets.policy
    expect("engine: that compresses a prefix", chosen, settings.features)
    expect("policy: of a compressed prefix", policy, settings.features)
    storing.make_cache(model, 0)  # raises for formats that are not supported
    choose = _choice(current, tokens, policy, budget, encode)
    current.clear()
    try:
        kept = choose()
        whole = -(-len(tokens) // size) * cache.block_memory_bytes
        prefix = CompressedPrefix(model, tokens, kept, whole, storing)
        for layer in range(model.config.num_layers):
            prefix.write(layer, *cache.read(layer, current.text.seq_id, 0, len(tokens)))
        return prefix
    finally:
        current.forward.watch = None
        current.clear()


def _choice(
    current: CurrentText, tokens: Tokens, policy: Policy | PrefixPolicy, budget: int, encode: Encode
) -> Callable[[], list[list[Int64]]]:
    """Check a policy; return the function that runs the prefix and returns the tokens that stay in each head."""
    model = current.settings.model
    if is_prefix_policy(policy):
        asking = as_probes(policy, tokens, encode, model.config)
        return partial(_kept_by_probes, current, tokens, policy, budget, asking)
    if not is_policy(policy):
        raise TypeError(f"policy: expected an object with `keep` or `probes`, got {type(policy).__name__}")
    budgets = Budgets.of(policy, budget, model)
    assert budgets is not None
    return partial(_kept_by_last, current, tokens, budgets)


def _kept_by_probes(
    current: CurrentText, tokens: Tokens, policy: PrefixPolicy, budget: int, asking: Asking
) -> list[list[Int64]]:
    config, count = current.settings.model.config, len(tokens)
    current.extend(tokens, 0)
    scores = np.zeros((config.num_layers, config.num_kv_heads, count), np.float32)
    attention = [each or LayerAttention() for each in layer_attention(current.settings.model)]
    for probe in asking.probes:
        sinks = min(asking.sinks, probe.start)

        def watch(text: Text, layer: int, queries: Float32, probe: Probe = probe, sinks: int = sinks) -> None:
            seen = (0, sinks), (probe.start, probe.stop), (count, None)
            keys = np.concatenate([current.cache.read(layer, text.seq_id, *each)[0] for each in seen])
            for head, logs in _log_weights(queries, keys, attention[layer]):
                best = scores[layer, head, probe.start : probe.stop]
                own = logs[..., sinks : sinks + len(best)].max(axis=(0, 1))
                np.maximum(best, exp(own).astype(np.float32), out=best)

        current.forward.watch = watch
        current.extend(probe.tokens, count)
    return as_kept_in_all(policy.keep_in_all(scores, budget), scores.shape, budget)


def _kept_by_last(current: CurrentText, tokens: Tokens, budgets: Budgets) -> list[list[Int64]]:
    model, count = current.settings.model, len(tokens)
    last = _LastQueries(budgets, current.cache, [each or LayerAttention() for each in layer_attention(model)], count)
    current.forward.watch = last.see
    current.extend(tokens, 0)
    heads, seq_id = model.config.num_kv_heads, current.text.seq_id
    kept = [last.keep(layer, seq_id) for layer in range(model.config.num_layers)]
    return [layer if len(layer) == heads else layer * heads for layer in kept]


class _LastQueries:
    """The attention of the last queries of a text, and their rows, as a `Policy` has them after its last token.

    Args:
        budgets: the policy.
        cache: K and V of the text.
        attention: how each layer attends.
        count: tokens of the text.
    """

    def __init__(
        self, budgets: Budgets, cache: PagedKvCache, attention: list[LayerAttention], count: int
    ) -> None:
        self._budgets, self._cache, self._attention, self._count = budgets, cache, attention, count
        self._heads = cache.num_heads
        self._masses = np.zeros((len(attention), self._heads, count))
        self._rows = [np.empty((0, 0, cache.head_dim), np.float32)] * len(attention)

    def see(self, text: Text, layer: int, queries: Float32) -> None:
        """See `Forward.watch`."""
        scoring, before = self._budgets.scoring, text.computed
        if scoring.rows:
            both = [self._rows[layer], queries] if len(self._rows[layer]) else [queries]
            self._rows[layer] = np.concatenate(both)[-scoring.rows :]
        first = 0 if scoring.queries is None else max(0, self._count - scoring.queries - before)
        if scoring.queries == 0 or first >= len(queries):
            return
        keys, _ = self._cache.read(layer, text.seq_id)
        for head, logs in _log_weights(queries[first:], keys, self._attention[layer]):
            self._masses[layer, head, : logs.shape[2]] += whole_exps(logs).sum(axis=(0, 1)) / UNIT

    def keep(self, layer: int, seq_id: int) -> list[Int64]:
        """The tokens of each list of a layer that stay."""
        scoring, per_head, positions = self._budgets.scoring, self._budgets.per_head, np.arange(self._count)
        seen_by = self._count - positions
        scores = self._masses[layer] / (seen_by if not scoring.queries else np.minimum(seen_by, scoring.queries))
        keys, values = self._cache.read(layer, seq_id, 0, self._count)
        rows = self._rows[layer]
        grouped = rows.reshape(len(rows), self._heads, -1, rows.shape[-1]) if len(rows) else rows
        shown = [np.moveaxis(each, 1, 0) for each in (keys, values, grouped)]
        names = "reads_keys", "reads_values", "reads_queries"
        read = [rows for rows, name in zip(shown, names, strict=True) if getattr(self._budgets.policy, name, False)]
        if not per_head:
            return self._budgets.choose(layer, [scores], [positions], [[each] for each in read])
        heads = range(self._heads)
        lists = [[each[head, None] for head in heads] for each in read]
        return self._budgets.choose(layer, [*scores], [positions.copy() for _ in heads], lists)


def _log_weights(queries: Float32, keys: Float32, attention: LayerAttention) -> Iterator[tuple[int, Float32]]:
    """The logs of the weights of queries in the softmax over keys, of which the last ones are their own.

    Args:
        queries: `(m, num_heads, head_dim)`.
        keys: `(n, num_kv_heads, head_dim)`.

    Yields:
        A KV head and `(some queries, group, keys that the last of them sees)`, for all heads and queries.
    """
    (count, _, dim), heads = queries.shape, keys.shape[1]
    scale = np.float32(1 / math.sqrt(dim) if attention.scale is None else attention.scale)
    sinks = None if attention.sinks is None else attention.sinks.astype(np.float32).reshape(heads, 1, -1, 1)
    for first in range(0, count, _QUERIES):
        some = queries[first : first + _QUERIES].reshape(-1, heads, queries.shape[1] // heads, dim)
        later = np.triu(np.full((len(some), len(some)), -np.inf, np.float32), 1)
        seen = keys[: len(keys) - count + first + len(some)]
        for head in range(heads):
            own = some[:, head] * scale
            matrix = Matrix(len(seen), dim, "f32")
            matrix.put(0, np.ascontiguousarray(seen[:, head]))
            logs: Any = matrix.multiply(own.reshape(-1, dim)).reshape(*own.shape[:2], -1)
            if attention.softcap is not None:
                logs = softcap(logs, attention.softcap)
            logs[..., -len(some) :] += later[:, None]
            total = log_sums(logs.reshape(-1, logs.shape[2])).reshape(*logs.shape[:2], 1)
            if sinks is not None:
                total = log_add_exp(total, np.broadcast_to(sinks[head], total.shape))
            logs -= total.astype(np.float32)
            yield head, logs

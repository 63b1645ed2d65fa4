"""The first tokens of many texts, unpacked, without a residual: as `kvcache.paged.residual` has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvcache.core.layer_formats import Formats
from kvcache.engine.residual import FIRSTS, AttendPiece, unpacked_cache
from kvcache.networks.protocols import Float32, LayerAttention, NetworkConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import Parts
from kvcache.serving.groups import Groups
from kvcache.serving.work import Work

__all__ = ["FirstTokens"]


class FirstTokens(Groups):
    """The first tokens of every text that runs: each group is these tokens.

    Args:
        config: sizes of the network.
        formats: of K and V, packed.
        firsts: tokens.
        max_running: the most texts that run.
        most: texts whose first tokens stay cached.
        attention: how each layer attends; none of them has a window.
    """

    def __init__(
        self, config: NetworkConfig, formats: tuple[Formats, Formats], firsts: int, max_running: int, most: int,
        attention: Sequence[LayerAttention],
    ) -> None:  # fmt: skip
        rows = unpacked_cache(config, formats, max_running + most, firsts, config.num_layers)
        super().__init__(rows, 1, firsts, most, attention)

    def held(self, computed: int) -> int:
        return min(computed, self.firsts)

    def left(self, work: Work) -> int:
        return 0 if work.num_tokens <= self.firsts else work.num_tokens

    def piece(self, cache: PagedKvCache, pieces: Iterable[tuple[Work, int]]) -> AttendPiece:
        # Of each work: its group, its packed sequence, and how many of its rows are first tokens and how many are not.
        groups, packed, heads, tails = [], [], [], []
        for work, n in pieces:
            if work.group < 0:
                work.next_group = next(self._ids)
                self._groups.allocate(work.next_group, 0)
            else:
                work.next_group = work.group
            head = min(max(0, self.firsts - work.computed), n)
            groups.append(work.next_group)
            packed.append(work.seq_id)
            heads.append(head)
            tails.append(n - head)
        self._groups.append_batch(groups, heads)
        return attend_firsts(self._groups, groups, cache, packed, heads, tails, self._options)


def attend_firsts(
    rows: PagedKvCache, firsts: Sequence[int], cache: PagedKvCache, texts: Sequence[int], heads: Sequence[int],
    tails: Sequence[int], options: Sequence[dict[str, Any]], skip: int = FIRSTS,
) -> AttendPiece:  # fmt: skip
    """The `attend` of pieces of many texts, each of first tokens and then of others.

    Args:
        rows, firsts: the cache of first tokens, which has room for those of the pieces, and its sequences.
        cache, texts: the cache of packed tokens and its sequences.
        heads, tails: how many tokens of each piece are first ones, and how many are not.
        options: of attention, for each layer.
        skip: how many first tokens are there behind which others stand.
    """
    ids, head_lens = np.array(firsts, np.uint64), np.array(heads)
    is_head = np.repeat(np.tile([True, False], len(ids)), np.stack([heads, tails], axis=1).ravel())
    own, lens = ids[head_lens > 0], head_lens[head_lens > 0]
    parts = Parts(ids, texts, tails, None, skip, causal=False)

    def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
        both = rows._attention, cache._attention
        if not len(own):
            return parts.attend(layer, *both, queries, **options[layer])[0]
        rows.write_ragged(layer, own, lens, keys[is_head], values[is_head])
        mixed = np.empty_like(queries)
        mixed[is_head] = rows.attention(layer, queries[is_head], own, query_lens=lens, **options[layer])
        if any(tails):
            mixed[~is_head] = parts.attend(layer, *both, queries[~is_head], **options[layer])[0]
        return mixed

    return attend

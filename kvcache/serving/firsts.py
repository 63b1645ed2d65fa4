"""The first tokens of many texts, unpacked, without a residual: as `kvcache.engine.firsts` has them for one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from kvcache.core.layer_formats import Formats
from kvcache.engine.residual import AttendPiece, unpacked_cache
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
        ids = np.array(groups, np.uint64)
        head_lens, tail_lens = np.array(heads), np.array(tails)
        self._groups.append_batch(ids, head_lens)
        ends = np.cumsum(head_lens + tail_lens)
        is_head = np.zeros(ends[-1], np.bool_)
        for start, head in zip(ends - head_lens - tail_lens, heads, strict=True):
            is_head[start : start + head] = True
        own, lens = ids[head_lens > 0], head_lens[head_lens > 0]
        parts = Parts(ids, packed, tail_lens, None, self.firsts, causal=False)

        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            options, near = self._options[layer], partial(self._groups.attention, layer)
            mixed = np.empty_like(queries)
            if len(own):
                self._groups.write_ragged(layer, own, lens, keys[is_head], values[is_head])
                mixed[is_head] = near(queries[is_head], own, query_lens=lens, **options)
            if tail_lens.any():
                mixed[~is_head] = parts.attend(near, partial(cache.attention, layer), queries[~is_head], options)
            return mixed

        return attend

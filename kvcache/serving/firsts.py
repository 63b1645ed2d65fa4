"""The first tokens of many texts, unpacked, without a residual: as `kvcache.engine.firsts` has them for one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.core.layer_formats import Formats
from kvcache.engine.firsts import attend_firsts
from kvcache.engine.residual import AttendPiece, unpacked_cache
from kvcache.networks.protocols import LayerAttention, NetworkConfig
from kvcache.paged.cache import PagedKvCache
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

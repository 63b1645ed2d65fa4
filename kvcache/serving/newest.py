"""The residual of many texts: the tokens of each text's own group, unpacked, beside the blocks that pack all tokens.

As `kvcache.engine.residual` has it for one text. Here each group is a sequence of one block, and a pass attends to the
groups of all texts in one call, and to their packed tokens in another.

    text A   0 ........ 63 | 64 .. 80           group 64 .. 80: one sequence
    text B   0 .. 5                             group 0 .. 5: one sequence

A text keeps the group in which it ends; it has none where it ends between two groups. The tokens of a group that are
cached in packed form alone run again. With a calibration the first tokens of the text stand before those of each group,
and a text that ends between two groups keeps these alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from kvcache.core.layer_formats import Formats
from kvcache.engine.residual import AttendPiece, unpacked_cache
from kvcache.engine.storage import Storage
from kvcache.networks.protocols import Float32, LayerAttention, NetworkConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import Parts
from kvcache.paged.spans import groups_of
from kvcache.serving.budget import MOST
from kvcache.serving.firsts import FirstTokens
from kvcache.serving.groups import Groups
from kvcache.serving.work import Work

__all__ = ["MOST_PROMPTS", "NewestGroups", "make_groups"]

MOST_PROMPTS = 8  # texts of whose prompts a pass may run a piece: each may touch one group more than it keeps


def make_groups(
    config: NetworkConfig, storage: Storage, max_running: int, attention: Sequence[LayerAttention]
) -> Groups | None:  # fmt: skip
    """What an engine keeps unpacked; None: nothing. First tokens stay cached for four times the texts that may run."""
    formats, length, firsts = storage.dtypes, storage.residual_length, storage.firsts
    most = 4 * max_running if firsts else 0
    if length:
        return NewestGroups(config, formats, length, max_running, attention, firsts, most)
    return FirstTokens(config, formats, firsts, max_running, most, attention) if firsts else None


class NewestGroups(Groups):
    """The newest group of every text that runs, behind its first tokens if those are read unpacked.

    Args:
        config: sizes of the network.
        formats: of K and V, packed.
        length: tokens of a group.
        max_running: the most texts that run.
        attention: how each layer attends; none of them has a window.
        firsts: first tokens that each query reads unpacked, at most `length`.
        most: texts whose first tokens stay cached.
    """

    def __init__(
        self, config: NetworkConfig, formats: tuple[Formats, Formats], length: int, max_running: int,
        attention: Sequence[LayerAttention], firsts: int = 0, most: int = 0,
    ) -> None:  # fmt: skip
        size = gcd(length, firsts)  # the first tokens are whole blocks, which texts share
        blocks = (max_running + -(-MOST // length) + MOST_PROMPTS) * ((length + firsts) // size) + most * firsts // size
        rows = unpacked_cache(config, formats, blocks, size, config.num_layers)
        super().__init__(rows, length, firsts, most, attention)

    def held(self, computed: int) -> int:
        if computed < self.length:
            return computed
        return self.firsts + computed % self.length

    def left(self, work: Work) -> int:
        return self.length - 1 - (work.num_tokens - 1) % self.length

    def piece(self, cache: PagedKvCache, pieces: Iterable[tuple[Work, int]]) -> AttendPiece:
        near, lens, far, contexts = [], [], [], []
        fresh: list[tuple[int, int]] = []  # groups that begin, and how many first tokens stand before theirs
        copies: list[tuple[int, int]] = []  # groups that have first tokens of an earlier pass, and those that get them
        begun: list[_Begun] = []  # texts whose first tokens run in this pass
        row = 0
        for work, n in pieces:
            group, own = work.group, _Begun(work.group, work.computed, row, [])
            for first, pos, stop in groups_of(work.computed, work.computed + n, self.length):
                if pos == first:
                    group = next(self._ids)
                    if first and self.firsts and work.computed >= self.firsts:
                        copies.append((work.group, group))
                    else:
                        fresh.append((group, self.firsts if first else 0))
                        if first and self.firsts:
                            own.groups.append(group)
                near.append(group)
                lens.append(stop - pos)
                far.append(work.seq_id)
                contexts.append(first)
            work.next_group = group
            row += n
            if own.groups:
                begun.append(own)
        near_ids, query_lens = np.array(near, np.uint64), np.array(lens)
        parts = Parts(near_ids, far, query_lens, contexts, self.firsts)
        self._groups.allocate_batch(
            np.array([each for each, _ in fresh], np.uint64), np.array([ahead for _, ahead in fresh], np.int64)
        )
        for source, group in copies:
            self._groups.fork(source, group)
            self._groups.truncate(group, self.firsts)
        self._groups.append_batch(near_ids, query_lens)

        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            self._groups.write_ragged(layer, near_ids, query_lens, keys, values)
            for each in begun:
                more = slice(each.row, each.row + self.firsts - each.computed)
                k, v = keys[more], values[more]
                if each.computed:
                    old = self._groups.read(layer, each.group, 0, each.computed)
                    k, v = np.concatenate([old[0], k]), np.concatenate([old[1], v])
                for group in each.groups:
                    self._groups.write(layer, group, k, v, start=0)
            return parts.attend(layer, self._groups._attention, cache._attention, queries, **self._options[layer])[0]

        return attend


class _Begun(NamedTuple):
    """A text whose first tokens run in a pass, at least in part, and the groups that get them.

    Attributes:
        group, computed: its group before the pass, which has so many of them.
        row: of the pass, its first one.
        groups: those that begin in this pass behind them.
    """

    group: int
    computed: int
    row: int
    groups: list[int]

"""The residual of many texts: the tokens of each text's own group, unpacked, beside the blocks that pack all tokens.

As `kvcache.engine.residual` has it for one text: a text is divided into groups of `length` tokens, and a query reads
its own group unpacked and all earlier groups packed. Here each group is a sequence of one block, and a pass attends to
the groups of all texts in one call, and to their packed tokens in another.

    text A   0 ........ 63 | 64 .. 80           group 64 .. 80: one sequence
    text B   0 .. 5                             group 0 .. 5: one sequence

A text keeps the group in which it ends; it has none where it ends between two groups. The tokens of a group that are
cached in packed form alone run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from kvcache.core.layer_formats import Formats, unpacked
from kvcache.engine.residual import AttendPiece, merged
from kvcache.networks.protocols import Float32, LayerAttention, NetworkConfig
from kvcache.paged.cache import PagedKvCache
from kvcache.serving.budget import MOST
from kvcache.serving.work import Work

__all__ = ["MOST_PROMPTS", "NewestGroups"]

MOST_PROMPTS = 8  # texts of whose prompts a pass may run a piece: each may touch one group more than it keeps


class NewestGroups:
    """The newest group of every text that runs.

    Args:
        config: sizes of the network.
        formats: of K and V, packed.
        length: tokens of a group.
        max_running: the most texts that run.
        attention: how each layer attends; none of them has a window.
    """

    def __init__(
        self, config: NetworkConfig, formats: tuple[Formats, Formats], length: int, max_running: int,
        attention: Sequence[LayerAttention],
    ) -> None:  # fmt: skip
        self.length = length
        key_dtype, value_dtype = map(unpacked, formats)
        self._groups = PagedKvCache(
            max_running + -(-MOST // length) + MOST_PROMPTS, length, config.num_kv_heads, config.head_dim,
            num_layers=config.num_layers, key_dtype=key_dtype, value_dtype=value_dtype,
        )  # fmt: skip
        self._ids = count()
        self._near = [each.options() for each in attention]
        # The sinks join the normaliser once, with the query's own group.
        self._far = [{name: value for name, value in each.items() if name != "sinks"} for each in self._near]

    def piece(self, cache: PagedKvCache, pieces: Iterable[tuple[Work, int]]) -> AttendPiece:
        """The `attend` of pieces of texts, for which `cache` has room; `next_group` of each is then its last group."""
        near, lens, far, contexts, fresh = [], [], [], [], []
        for work, n in pieces:
            pos, end, group = work.computed, work.computed + n, work.group
            while pos < end:
                first = pos - pos % self.length
                if pos == first:
                    group = next(self._ids)
                    fresh.append(group)
                stop = min(first + self.length, end)
                near.append(group)
                lens.append(stop - pos)
                far.append(work.seq_id)
                contexts.append(first)
                pos = stop
            work.next_group = group
        near_ids, far_ids = np.array(near, np.uint64), np.array(far, np.uint64)
        query_lens, context_lens = np.array(lens), np.array(contexts)
        self._groups.allocate_batch(np.array(fresh, np.uint64), np.zeros(len(fresh), np.int64))
        self._groups.append_batch(near_ids, query_lens)

        def attend(layer: int, queries: Float32, keys: Float32, values: Float32) -> Float32:
            self._groups.write_ragged(layer, near_ids, query_lens, keys, values)
            own = self._groups.attention(
                layer, queries, near_ids, query_lens=query_lens, return_lse=True, **self._near[layer]
            )
            earlier = cache.attention(
                layer, queries, far_ids, query_lens=query_lens, context_lens=context_lens, return_lse=True,
                **self._far[layer],
            )  # fmt: skip
            return merged(earlier, own)

        return attend

    def left(self, work: Work) -> int:
        """How many tokens fit behind the newest one of a work, in its group: guesses are not cut off across groups."""
        return self.length - 1 - (work.num_tokens - 1) % self.length

    def group_at(self, work: Work, computed: int) -> int:
        """The group that a work keeps after a pass, where it has `computed` tokens; -1: none."""
        return work.next_group if computed % self.length else -1

    def fork(self, work: Work, computed: int) -> int:
        """A copy of the group that a work keeps after this pass, or -1."""
        group = self.group_at(work, computed)
        if group < 0:
            return -1
        copy = next(self._ids)
        self._groups.fork(group, copy)
        self._groups.truncate(copy, computed % self.length)
        return copy

    def stop(self, group: int) -> None:
        """Free a group that a work had, or -1."""
        if group >= 0:
            self._groups.free(group)

    def settle(self, running: Iterable[Work]) -> list[Work]:
        """Free groups that no work has, and cut the others to what was computed; works whose group is missing."""
        works = list(running)
        for work in works:
            if not work.computed % self.length:
                work.group = -1
        lost = [work for work in works if work.group < 0 and work.computed % self.length]
        owned = {work.group: work for work in works if work.group >= 0}
        for each in self._groups.sequence_ids():
            kept = owned.pop(int(each), None)
            if kept is None:
                self._groups.free(each)
            else:
                self._groups.truncate(each, kept.computed % self.length)
        return lost + list(owned.values())

    def memory(self) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"."""
        return self._groups.memory()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self._groups.total_memory_bytes

    def check(self, running: Iterable[Work]) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        self._groups.check()
        owned = {work.group: work for work in running if work.group >= 0}
        assert sorted(owned) == [int(each) for each in self._groups.sequence_ids()], "groups and works differ"
        for group, work in owned.items():
            held = self._groups.get_sequence(group)
            assert held is not None, f"{work}: its group is gone"
            assert held.num_tokens == work.computed % self.length, f"{work}: its group has {held.num_tokens} tokens"
        assert all(work.group >= 0 for work in running if work.computed % self.length), "a work has no group"

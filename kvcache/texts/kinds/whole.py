"""Layers that keep every token. Their blocks are what cached prefixes are found by (`BlockIndex`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import OutOfMemoryError
from kvcache.networks.protocols import Float32, IndexRows, LayerAttention, LayerIndex
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.queried import QueriedSequences
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.block_index import BlockIndex, CachedStart
from kvcache.texts.cache_arguments import CacheArguments
from kvcache.texts.kinds.base import Ids, LayerCall, LayerKind, Lens, calls_of
from kvcache.texts.kinds.part_layers import PartLayers
from kvcache.texts.kinds.part_sequences import MISSING
from kvcache.texts.newest import NewestGroups
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.text import Text

__all__ = ["WHOLE", "WholeLayers"]


class WholeLayers(PartLayers):
    """The layers that keep every token.

    Their cache is there even if it has no layers. The place of a text has the sequences of the parts that it sees.

    Args:
        layers: of the network, ascending, with K and V of their own.
        attention: how each layer of the network attends.
        cache: K and V of these layers.
        index: the cached prefixes in its blocks; None: nothing is cached.
        most_drafts: draft tokens that a text may have in a pass.
        own_ids: the sequences that texts may have; None: all of the cache.
        sparse_tokens: that each KV head chooses for a query; None: queries attend to all tokens.
    """

    is_counted = True

    def __init__(
        self, layers: Sequence[int], attention: Sequence[LayerAttention | None], cache: PagedKvCache,
        index: BlockIndex | None = None, most_drafts: int = 0, own_ids: Sequence[int] | None = None,
        sparse_tokens: int | None = None,
    ) -> None:
        super().__init__(layers, attention, cache)
        self.index, self.sparse_tokens = index, sparse_tokens
        self.pages = None if index is None else index.pages
        self._attention = attention
        self._calls = calls_of(layers, attention, top_tokens=sparse_tokens)
        self.layers = tuple(self._calls)
        self._most_drafts, self.own_ids = most_drafts, own_ids
        own = [layer for layer in layers if (known := _index_of(attention, layer)) is not None and known.own]
        self._indexes = {layer: cache.num_layers + i for i, layer in enumerate(own)}  # the index layer of each
        self._bytes = cache.total_memory_bytes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    @property
    def total_blocks(self) -> int:
        return self.cache.total_blocks

    def count(self) -> dict[str, int]:
        free, idle = (self.cache.free_block_count, 0) if self.pages is None else self.pages.num_free_and_idle()
        return {"free": free, "claimed": self.cache.total_blocks - free - idle, "cached": idle}

    # -- a text begins --------------------------------------------------------------------------------------

    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        size, texts = self.cache.block_size, len(running)
        tokens = sum([each.num_tokens for each in running])  # each with drafts, a block that it began, and a copy
        behind = [each.prefix for each in (*running, text) if isinstance(each.prefix, SeenParts)]
        parts = sum([self.blocks_for(len(each.tokens)) for prefix in behind for each in prefix.texts]) if behind else 0
        claimed = parts + len(start.blocks) + (tokens + texts * (self._most_drafts + size - 1)) // size + texts
        needed = -(-text.num_tokens // size) - found // size + texts
        if None in start.parts:
            needed += sum(map(self.blocks_for, self.missing_texts(text, start).values()))
        began = [each for each in running if each.seq_id >= 0]  # a pin takes no more
        promised = sum([-(-each.num_tokens // size) - -(-each.computed // size) for each in began])
        return self.has_blocks(self.cache, needed, claimed, promised)

    def begin(self, seq_id: int, found: int, start: CachedStart) -> tuple[int, ...]:
        self.cache.adopt(seq_id, start.blocks[: -(-found // self.cache.block_size)], found)
        if start.rows or start.firsts:
            self.cache.unpack(seq_id, start.rows, start.firsts)
        return self._seen.adopt(start.parts) if start.parts else ()

    def fork(self, text: Text, index: int, seq_id: int) -> tuple[int, ...]:
        self.cache.fork(text.seq_id, seq_id)
        return self._seen.fork(text.places[index])

    def part_ids(self, place: Any) -> tuple[int, ...]:
        return place or ()

    def with_parts(self, place: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids

    # -- a pass ---------------------------------------------------------------------------------------------

    def append(self, texts: Sequence[Text], index: int, ids: Ids, counts: Lens) -> None:
        self.append_to(self.cache, ids, counts)

    def expect_room(self, text: Text, index: int, pos: int, count: int, beside: bool) -> None:
        cache, kept = self.cache, -(-pos // self.cache.block_size)
        if beside:
            return self._expect_free(-(-(pos + count) // cache.block_size) - pos // cache.block_size)
        blocks = cache.block_table([text.seq_id]).block_ids
        holders = cache.reference_counts(blocks)
        copied = int(pos % cache.block_size and holders[kept - 1] > 1)
        own = int((holders[kept:] == 1).sum())  # those that the cut frees
        self._expect_free(-(-(pos + count) // cache.block_size) - kept + copied - own)

    def _expect_free(self, blocks: int) -> None:
        """Free blocks until `blocks` are free; OutOfMemoryError: that is not possible."""
        while (free := self.cache.free_block_count) < blocks:
            error = OutOfMemoryError(blocks, free)
            if not self.make_room(self.cache, error):
                raise error

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        sequences = QueriedSequences(ids, lens).kept()
        if self._indexes:
            return self._attend_chosen(sequences), {}
        return partial(self.cache.write_and_attend, sequences, self._calls), {}

    def _attend_chosen(self, sequences: QueriedSequences) -> LayerCall:
        """Attention to the tokens that indexers choose; a layer without one takes the choice of a layer before it."""
        cache, chosen = self.cache, None

        def attend(
            layer: int, queries: Float32, keys: Any, values: Any, _: Any = None, rows: IndexRows | None = None, /
        ) -> Float32:
            nonlocal chosen
            index = _index_of(self._attention, layer)
            if index is not None and rows is not None:
                chosen = cache.write_and_choose(sequences, self._indexes[layer], *rows, index.most)
            return cache.write_and_attend(
                sequences, self._calls, layer, queries, keys, values, None, None if index is None else chosen
            )

        return attend

    def own_sequences(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> QueriedSequences:
        return QueriedSequences(ids, lens).kept()

    def ran(self, text: Text, index: int, before: int) -> None:
        cache = self.cache
        if (length := cache.residual_length) and before // length < (text.computed - 1) // length:
            cache.pack(text.seq_id, (text.computed - 1) // length * length)  # only the last group stays in f16

    # -- going back -----------------------------------------------------------------------------------------

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """One group of the residual ends, or a chunk of several."""
        pos, length = text.computed, self.cache.residual_length
        return length > 0 < pos and (pos % length == 0 or pos // chunk < (end - 1) // chunk)

    def cut(self, text: Text, index: int, pos: int) -> Any:
        self.cache.truncate(text.seq_id, pos)
        return text.places[index]

    def _reads_f16(self, text: Text) -> bool:
        """Whether a text has its sink tokens in f16, and of its last group those that were computed."""
        if not self.cache.residual_length and not self.cache.first_tokens:
            return True
        (firsts, base, _), length = self.cache.unpacked_tokens(text.seq_id), self.cache.residual_length
        whole = firsts == self.cache.first_tokens or not base
        return whole and (not length or base <= text.computed // length * length)

    # -- reports --------------------------------------------------------------------------------------------

    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        own = text.places_of(0, text.computed)
        return own if text.prefix is None else np.sort(np.concatenate([text.prefix.positions(layer, head), own]))

    def check(self, texts: Sequence[Text], index: int) -> None:
        cache = self.cache
        cache.check()
        held = 0 if self.pages is None else self.pages.pinned_blocks
        assert self.own_ids is not None or not held, "blocks of a prefix are held that no text uses"
        _, claimed = self.check_parts(texts, index)
        for text in texts:
            info = cache.get_sequence(text.seq_id)
            assert info is not None, f"{text}: the sequence is gone"
            assert info.num_tokens == text.computed, f"{text}: the sequence has {info.num_tokens} tokens"
            assert self.own_ids is not None or self._reads_f16(text), f"{text}: tokens that it reads are packed"
            if self.own_ids is None:
                claimed.update(int(block) for block in info.block_ids)
        for text in texts if cache.first_tokens else ():
            for part, seq_id in zip(() if text.prefix is None else text.prefix.parts, text.places[index], strict=True):
                if seq_id != MISSING and part.begins_within(cache.first_tokens):
                    firsts, base, stop = cache.unpacked_tokens(seq_id)
                    due = np.count_nonzero(part.indices < cache.first_tokens)
                    assert (firsts if base else stop) == due, f"{text}: first tokens of the request are packed"
        if self.own_ids is None and self.pages is not None:
            free, idle = self.pages.num_free_and_idle()
            assert cache.total_memory_bytes == self._bytes, "tokens in f16 took more memory than was reserved"
            assert free + idle + len(claimed) == cache.total_blocks, "free, claimed and cached blocks are not all"


def _index_of(attention: Sequence[LayerAttention | None], layer: int) -> LayerIndex | None:
    found = attention[layer]
    return None if found is None else found.index


def _of(made: CacheArguments, left: Sequence[int]) -> list[tuple[int, ...]]:
    """One group of all that is left, perhaps without layers, whose blocks name prefixes then; none if layers evict."""
    return [] if made.budgets is not None else [tuple(layer for layer in left if made.has_kv(layer))]


def _make(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int | None) -> WholeLayers:
    load, cache = made.load, made.make_cache(**made.options(layers, blocks), **made.spilling(blocks, cached))
    if made.most_unpacked:
        cache.reserve_unpacked(made.most_unpacked)
    if made.sparse_tokens is not None:
        cache.reserve_summaries()
    index, newest = None, None
    if made.shares(cached):
        if made.newest(cached or 0)[0]:
            newest = NewestGroups(cache, texts=4 * load.texts) if load.texts else NewestGroups(cache, cached or 0)
        index = BlockIndex(cache, PrefixCache.over(cache, cached), newest)
    own_ids = None if load.texts else (0, 1)
    return WholeLayers(layers, made.attention, cache, index, load.drafts, own_ids, made.sparse_tokens)


WHOLE = LayerKind("whole", _of, CacheArguments.bytes_of_whole, _make)

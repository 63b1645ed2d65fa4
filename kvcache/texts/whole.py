"""Layers that keep every token, and the index of cached prefixes over their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import OutOfMemoryError
from kvcache.networks.protocols import Float32, LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import merge_attention
from kvcache.paged.queried import QueriedSequences
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.compressed_prefix import CompressedPrefix
from kvcache.texts.group import (
    CachedStart,
    Ids,
    LayerCall,
    Lens,
    Reclaim,
    Rows,
    append_within,
    calls_of,
    free_blocks,
    free_within,
    has_blocks,
    settle_within,
)
from kvcache.texts.newest import NewestGroups
from kvcache.texts.text import NO_TOKEN, Text, Tokens

__all__ = ["WholeLayers"]


class WholeLayers:
    """The layers that keep every token.

    Their cache is there even if it has no layers: its blocks are what prefixes are found by. A text has no place here
    beside its sequence: None.

    Args:
        layers: of the network, ascending, with K and V of their own.
        attention: how each layer of the network attends.
        cache: K and V of these layers.
        index: the prefix cache over its blocks; None: nothing is cached.
        newest: tokens of cached texts in f16, for caches with a residual or sink tokens; None: there are none.
        most_drafts: draft tokens that a text may have in a pass.
        own_ids: the sequences that texts may have; None: all of the cache.
        to_the_end: whether the block in which a text ends is cached with what it has, so that others go on right there.
        sparse_tokens: that each KV head chooses for a query; None: queries attend to all tokens.
    """

    reason = "block"

    def __init__(
        self, layers: Sequence[int], attention: Sequence[LayerAttention | None], cache: PagedKvCache,
        index: PrefixCache | None = None, newest: NewestGroups | None = None, most_drafts: int = 0,
        own_ids: Iterable[int] | None = None, to_the_end: bool = False, sparse_tokens: int | None = None,
    ) -> None:
        self.cache, self.index, self.newest, self.sparse_tokens = cache, index, newest, sparse_tokens
        self.reclaim: Reclaim | None = None
        self._calls = calls_of(layers, attention, top_tokens=sparse_tokens)
        self._parts = calls_of(layers, attention, return_lse=True)
        self.layers = tuple(self._calls)
        self._most_drafts, self._own_ids, self._to_the_end = most_drafts, own_ids, to_the_end
        self._bytes = cache.total_memory_bytes

    @property
    def caches(self) -> Sequence[PagedKvCache]:
        return (self.cache,)

    @property
    def prefixes(self) -> Sequence[PrefixCache]:
        return [] if self.index is None else [self.index] if self.newest is None else [self.index, self.newest.cache]

    @property
    def keeps_f16(self) -> bool:
        """Whether tokens of a text that runs are read in f16."""
        return self.cache.residual_length > 0 or self.cache.first_tokens > 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    @property
    def total_blocks(self) -> int:
        return self.cache.total_blocks

    def count(self) -> dict[str, int]:
        free, idle = (self.cache.free_block_count, 0) if self.index is None else self.index.num_free_and_idle()
        return {"free": free, "claimed": self.cache.total_blocks - free - idle, "cached": idle}

    # -- a text begins --------------------------------------------------------------------------------------

    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        size, texts = self.cache.block_size, len(running)
        tokens = sum([each.num_tokens for each in running])  # each with drafts, a block that it began, and a copy
        claimed = len(start.blocks) + (tokens + texts * (self._most_drafts + size - 1)) // size + texts
        needed = -(-text.num_tokens // size) - found // size + texts
        began = [each for each in running if each.seq_id >= 0]  # a pin takes no more
        promised = sum([-(-each.num_tokens // size) - -(-each.computed // size) for each in began])
        return has_blocks(self.cache, [] if self.index is None else [self.index], needed, claimed, promised)

    def begin(self, seq_id: int, found: int, start: CachedStart) -> None:
        self.cache.adopt(seq_id, start.blocks[: -(-found // self.cache.block_size)], found)
        if start.rows or start.firsts:
            self.cache.unpack(seq_id, start.rows, start.firsts)

    def fork(self, text: Text, index: int, seq_id: int) -> None:
        self.cache.fork(text.seq_id, seq_id)

    # -- a pass ---------------------------------------------------------------------------------------------

    def append(self, texts: Sequence[Text], index: int, ids: Ids, counts: Lens) -> None:
        append_within(self.cache, ids, counts, self._make_room)

    def _make_room(self, error: OutOfMemoryError) -> bool:
        return free_blocks(self.cache, self.index, self.reclaim, error)

    def expect_room(self, text: Text, index: int, pos: int, count: int, beside: bool) -> None:
        cache, kept = self.cache, -(-pos // self.cache.block_size)
        if beside:
            return self._expect_free(-(-(pos + count) // cache.block_size) - pos // cache.block_size)
        blocks = cache.block_table([text.seq_id]).block_ids
        holders = cache.reference_counts(blocks)
        copied = int(pos % cache.block_size and holders[kept - 1] > 1)
        own = int((holders[kept:] == 1).sum())  # those that the cut frees
        self._expect_free(-(-(pos + count) // cache.block_size) - kept + copied - own)

    def compact(self, text: Text, index: int) -> None:
        """Do nothing: its blocks are full but for the last one."""

    def _expect_free(self, blocks: int) -> None:
        """Free blocks until there are so many; OutOfMemoryError: that is not possible."""
        while (free := self.cache.free_block_count) < blocks:
            error = OutOfMemoryError(blocks, free)
            if not self._make_room(error):
                raise error

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        sequences = QueriedSequences(ids, lens).kept()
        if parts := _rows_behind(texts, lens):
            return self._attend_behind(sequences, parts), {}
        return partial(self.cache.write_and_attend, sequences, self._calls), {}

    def _attend_behind(
        self, sequences: QueriedSequences, parts: Sequence[tuple[CompressedPrefix, Lens]]
    ) -> LayerCall:
        """Attention where some rows, those of `parts`, stand behind a compressed prefix."""

        def attend(layer: int, queries: Float32, keys: Any, values: Any, _: Any = None, /) -> Float32:
            found: Any = self.cache.write_and_attend(sequences, self._parts, layer, queries, keys, values)
            mixed, masses = found
            for prefix, rows in parts:
                output, mass = prefix.attend(layer, queries[rows])
                mixed[rows], _ = merge_attention(output, mass, mixed[rows], masses[rows])
            return mixed  # type: ignore[no-any-return]

        return attend

    def ran(self, text: Text, index: int, before: int) -> None:
        cache = self.cache
        if (length := cache.residual_length) and before // length < (text.computed - 1) // length:
            cache.pack(text.seq_id, (text.computed - 1) // length * length)  # only the last group stays in f16

    # -- going back -----------------------------------------------------------------------------------------

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """One group of the residual ends, or a chunk of several."""
        pos, length = text.computed, self.cache.residual_length
        return length > 0 < pos and (pos % length == 0 or pos // chunk < (end - 1) // chunk)

    def nearest(self, text: Text, index: int, pos: int) -> int:
        return pos

    def expect(self, text: Text, index: int, pos: int) -> None:
        """Do nothing: every token is there."""

    def cut(self, text: Text, index: int, pos: int) -> None:
        self.cache.truncate(text.seq_id, pos)

    def free(self, seq_id: int, place: Any) -> None:
        free_within(self.cache, seq_id)

    def settle(self, texts: Sequence[Text], index: int) -> list[Text]:
        lost = [text for text in texts if text.seq_id not in self.cache]
        settle_within(self.cache, {text.seq_id for text in texts}, self._own_ids)
        for text in texts:
            if text not in lost:
                self.cache.truncate(text.seq_id, text.computed)
                self.ran(text, index, 0)
                if self._own_ids is None and not self._reads_f16(text):
                    lost.append(text)
        return lost

    def _reads_f16(self, text: Text) -> bool:
        """Whether a text has its sink tokens in f16, and of its last group those that were computed."""
        if not self.keeps_f16:
            return True
        (firsts, base, _), length = self.cache.unpacked_tokens(text.seq_id), self.cache.residual_length
        whole = firsts == self.cache.first_tokens or not base
        return whole and (not length or base <= text.computed // length * length)

    # -- cached prefixes ------------------------------------------------------------------------------------

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        return 0 if self.index is None else min(stop, self.index.peek(tokens, space))

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack, again: bool) -> CachedStart:
        """Look the tokens up, which counts; the last one is to run, since logits are not cached."""
        if self.index is None:
            return CachedStart(0)
        look_up = self.index.open_again if again else self.index.open_session
        session = held.enter_context(look_up(tokens, space))
        blocks = np.array(session.shared_blocks, np.int64)
        found = session.num_tokens
        return self.cached_start(tokens, min(stop, found), space, blocks)._replace(cached=found)

    def cached_start(self, tokens: Tokens, stop: int, space: Any, blocks: NDArray[np.int64]) -> CachedStart:
        """The first `stop` tokens in blocks that are held, as far as a text can go on after them.

        A token must read its own group in f16, and all read the sink tokens so. Copies of these are kept; where some of
        a group are missing it runs again, and where the sink tokens are, everything does.
        """
        length, num_firsts = self.cache.residual_length, self.cache.first_tokens
        rows: Rows = ()
        firsts: Rows = ()
        if num_firsts and stop >= (length or num_firsts):
            firsts = () if self.newest is None else self.newest.recall_firsts(tokens, space)
            stop = stop if firsts else 0
        elif num_firsts and not length:
            stop = 0
        begun, count, parting = stop % (length or 1), 0, 0
        if begun:
            if self.newest is not None:
                count, rows = self.newest.recall(tokens[:stop], space)
            stop += count - begun
            if self.newest is not None and count < begun:
                parting = stop - count + length
        return CachedStart(stop, 0, blocks, rows if count else (), firsts, parting)

    def keep(self, text: Text, index: int, stop: int, ends: bool = False) -> None:
        """Cache the full blocks, by reference, and the tokens that another text reads in f16."""
        if self.index is None or not text.shares:
            return
        size, cached = self.cache.block_size, 0
        full, tokens = stop // size, text.tokens[: stop // size * size]
        with suppress(MemoryError):  # of the system: the blocks are not cached then
            blocks = self.cache.block_table(np.array([text.seq_id], np.uint64)).block_ids.astype(np.int64)
            if ends and self._to_the_end and stop % size and self.cache.reference_counts(blocks[full : full + 1]) == 1:
                full, tokens = full + 1, _filled(text.tokens[:stop], size)
            cached = self.index.adopt(tokens, blocks[:full], text.space)
        if cached == full:
            self._keep_newest(text, stop)

    def _keep_newest(self, text: Text, stop: int) -> None:
        if self.newest is not None and text.shares:
            with suppress(MemoryError):
                self.newest.keep(text.seq_id, text.tokens[:stop], text.space)

    # -- reports --------------------------------------------------------------------------------------------

    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        own = np.arange(text.base, text.base + text.computed)
        return own if text.prefix is None else np.concatenate([text.prefix.positions(layer, head), own])

    def memory(self, texts: Sequence[Text], index: int) -> list[dict[str, int]]:
        newest = [] if self.newest is None else [self.newest.memory()]
        return [self.cache.memory(), *([] if self.index is None else [self.index.memory()]), *newest]

    def check(self, texts: Sequence[Text], index: int) -> None:
        cache = self.cache
        cache.check()
        for each in self.prefixes[:1]:
            each.check()
            assert self._own_ids is not None or each.pinned_blocks == 0, "blocks of a prefix are held that no text uses"
        if self.newest is not None:
            self.newest.check()
        owned = sorted(text.seq_id for text in texts)
        ids = [int(each) for each in cache.sequence_ids()]
        if self._own_ids is not None:
            ids = [each for each in ids if each in self._own_ids]
        assert ids == owned, f"sequences {ids} and those of texts, {owned}, differ"
        claimed: set[int] = set()
        for text in texts:
            info = cache.get_sequence(text.seq_id)
            assert info is not None, f"{text}: the sequence is gone"
            assert info.num_tokens == text.computed, f"{text}: the sequence has {info.num_tokens} tokens"
            assert self._own_ids is not None or self._reads_f16(text), f"{text}: tokens that it reads are packed"
            if self._own_ids is None:
                claimed.update(int(block) for block in info.block_ids)
        if self._own_ids is None and self.index is not None:
            free, idle = self.index.num_free_and_idle()
            assert cache.total_memory_bytes == self._bytes, "tokens in f16 took more memory than was reserved"
            assert free + idle + len(claimed) == cache.total_blocks, "free, claimed and cached blocks are not all"


_prefix = attrgetter("prefix")


def _rows_behind(texts: Sequence[Text], lens: Lens) -> list[tuple[CompressedPrefix, Lens]]:
    """The rows of a pass that stand behind a compressed prefix, by prefixes; each text has `lens` rows."""
    if not any(map(_prefix, texts)):
        return []
    stops, found = np.cumsum(lens), dict[int, tuple[CompressedPrefix, list[Lens]]]()
    for text, stop, count in zip(texts, stops.tolist(), lens.tolist(), strict=True):
        if text.prefix is not None:
            found.setdefault(id(text.prefix), (text.prefix, []))[1].append(np.arange(stop - count, stop))
    return [(prefix, np.concatenate(rows)) for prefix, rows in found.values()]


def _filled(tokens: Tokens, size: int) -> Tokens:
    """Tokens, and behind them what fills their last block."""
    whole = np.full(-(-len(tokens) // size) * size, NO_TOKEN, np.uint32)
    whole[: len(tokens)] = tokens
    return whole

"""`Pool`: K and V of all layers of the texts that run, in groups of layers that keep tokens alike.

    free       no reference
    claimed    a sequence refers to them, and perhaps the prefix index too
    cached     the index alone refers to them: evicted, the least recently used first, where a sequence needs them

Full blocks enter the index as they fill, so that texts share with texts that are still running. A text that loses its
sequence finds its blocks again, as far as they have stayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.memory import total
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.networks.protocols import Attend, Float32, IndexRows
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.texts.block_index import CachedStart, PartStart
from kvcache.texts.kinds.base import Layers, Lens
from kvcache.texts.kinds.part_layers import PartLayers
from kvcache.texts.kinds.part_sequences import MISSING, PartRows
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.shared_prefixes import Arrived, SharedPrefixes
from kvcache.texts.text import Text

__all__ = ["Pool"]

_seq_id, _prefix = attrgetter("seq_id"), attrgetter("prefix")


class Pool:
    """The groups of a network's layers. Verbs that change several texts change all of them, or raise and change none.

    Args:
        groups: each layer is in one of them.
        block_size: tokens per block.
        chunk: prompts run in pieces that end at multiples of this; 0: in any pieces.

    Attributes:
        groups, chunk: see above.
        counted: the group whose blocks bound how many tokens there are.
        block_index: the index of cached prefixes; None: nothing is cached.
        with_pages: the groups that need more behind cached tokens than the blocks of the index: pages of their own.
        shared, prefixes: what is cached, of all groups.
        keeps_states: whether texts go on from kept places alone, as behind states.
    """

    def __init__(self, groups: Sequence[Layers], block_size: int, chunk: int = 0) -> None:
        self.groups, self.block_size, self.chunk = tuple(groups), block_size, chunk
        (self.counted,) = (group for group in groups if group.is_counted)
        self.block_index, self._counted = self.counted.index, self.groups.index(self.counted)
        self._with_pages = [(i, group) for i, group in enumerate(self.groups) if group.reason]
        self.with_pages = tuple(group for _, group in self._with_pages)
        self.shared = SharedPrefixes(self.groups, self.block_index, block_size)
        self.prefixes = self.shared.prefixes
        self._reads_apart = any(group.reads_apart for _, group in self.part_groups)
        self._numbers, self.keeps_states = count(), any(group.exact for group in self.groups)
        self._group_of = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}

    # -- texts begin and end --------------------------------------------------------------------------------

    def start(self, text: Text, running: Sequence[Text], arrived: Arrived | None = None) -> bool:
        """Give a text a sequence of its longest cached prefix, if there is room for all its tokens; whether there is.

        Args:
            running: the texts that have one; for each, a block must be left.
            arrived: called with the text and the number of tokens that the index has of it, before groups are asked.

        Raises:
            MemoryError: of the system; nothing has changed.
        """
        most, end = text.num_tokens if text.shares else 0, text.num_tokens - 1
        if self._start(text, most, running, arrived) or running:
            return text.seq_id >= 0
        # Alone it has room for all its tokens, but not beside what is held and not used: then less is shared.
        whole = min(self.shared.longest(text), end) // self.block_size * self.block_size
        return self._start(text, whole, running, arrived) or self._start(text, 0, running, arrived)

    def _start(self, text: Text, most: int, running: Sequence[Text], arrived: Arrived | None) -> bool:
        """Do what `start` does where the first `most` tokens may be shared."""
        with ExitStack() as held:
            found, starts = self.shared.hold(text, most, held, arrived)
            asked = zip(self.groups, starts, strict=True)
            if not all(group.has_room(text, found, start, running) for group, start in asked):
                return False
            self.begin(text, found, starts, next(self._numbers))
        return True

    def begin(self, text: Text, found: int, starts: Sequence[CachedStart], seq_id: int) -> None:
        """Give a text a sequence of `found` cached tokens."""
        places: list[Any] = []
        try:
            for group, start in zip(self.groups, starts, strict=True):
                places.append(group.begin(seq_id, found, start))
        except Exception:
            self._free(seq_id, places)
            raise
        partings = [start.parting for start in starts if start.parting < text.num_tokens]
        text.keep_at = sorted({each for each in (text.num_prompt, *text.parts_at, *partings) if each > found})
        text.moved(seq_id, found, tuple(places))

    def empty(self, seq_id: int, parts: Sequence[Sequence[PartStart]] = ()) -> tuple[Any, ...]:
        """Start a sequence without tokens, which sees `parts` of each group; returns its places."""
        text = Text(np.empty(0, np.uint32))
        self.begin(text, 0, [CachedStart(0, parts=own) for own in parts or [()] * len(self.groups)], seq_id)
        return text.places

    def fork(self, text: Text, other: Text, computed: int, seq_id: int | None = None) -> None:
        """Give another text a sequence that shares all that a text has; `computed` of its tokens have run."""
        seq_id, places = next(self._numbers) if seq_id is None else seq_id, list[Any]()
        try:
            for i, group in enumerate(self.groups):
                places.append(group.fork(text, i, seq_id))
        except Exception:
            self._free(seq_id, places)
            raise
        other.moved(seq_id, computed, tuple(places))

    def stop(self, text: Text) -> None:
        """Take a text's sequence away; what others need behind it stays cached until its memory is needed."""
        if text.seq_id >= 0:
            if self.keeps_states and self.block_index is not None:
                self.block_index.keep(text, text.computed, ends=True)
            self.keep_pages(text, text.computed, ends=True)
            self.drop(text)

    def drop(self, text: Text) -> None:
        """Take a text's sequence away, and keep nothing of it."""
        seq_id, places = text.seq_id, text.places
        text.moved(-1, 0, ())
        if seq_id >= 0:
            self._free(seq_id, places)

    def _free(self, seq_id: int, places: Sequence[Any]) -> None:
        for i, group in enumerate(self.groups):
            group.free(seq_id, places[i] if i < len(places) else None)

    # -- a pass ---------------------------------------------------------------------------------------------

    def append(self, pieces: Sequence[tuple[Text, int]]) -> None:
        """Make room for the next tokens of many texts, all or nothing; evicts what no sequence refers to.

        Raises:
            OutOfMemoryError: there are too few blocks, even so.
        """
        texts, lens = zip(*pieces, strict=True)
        ids, counts = self._ids(texts), np.array(lens)
        for i, group in enumerate(self.groups):
            try:
                group.append(texts, i, ids, counts)
            except Exception:
                for text in texts if i else ():
                    for before in range(i):
                        self._cut(text, before, text.computed)
                raise

    def attend(self, texts: Sequence[Text], lens: Lens) -> tuple[Attend, dict[str, Any]]:
        """The `attend` of a pass over the next tokens of texts, and more keyword arguments of the network."""
        ids = self._ids(texts)
        if any(map(_prefix, texts)):
            return self._attend_behind(texts, ids, lens)
        if len(self.groups) == 1:
            return self.groups[0].attend(texts, 0, ids, lens)
        found = [group.attend(texts, i, ids, lens) for i, group in enumerate(self.groups)]
        places = {name: value for _, places in found for name, value in places.items()}
        return self._of_layers([call for call, _ in found]), places

    def _attend_behind(
        self, texts: Sequence[Text], ids: NDArray[np.uint64], lens: Lens
    ) -> tuple[Attend, dict[str, Any]]:
        """Do what `attend` does where some texts stand behind something."""
        compressed = any(text.prefix is not None and not isinstance(text.prefix, SeenParts) for text in texts)
        rows = PartRows.of(texts, lens, compressed or self._reads_apart)
        calls = [group.attend_behind(texts, i, ids, lens, rows) for i, group in enumerate(self.groups)]
        return self._of_layers(calls), {} if rows is None else rows.places

    def _of_layers(self, found: Sequence[Attend]) -> Attend:
        """The call of each layer, of those of its group."""
        if len(found) == 1:
            return found[0]
        calls = {layer: found[i] for layer, i in self._group_of.items()}

        def attend(
            layer: int, queries: Float32, keys: Float32 | None, values: Float32 | None, sinks: Float32 | None = None,
            index: IndexRows | None = None, /
        ) -> Float32:
            more = () if index is None else (index,)
            return calls[layer](layer, queries, keys, values, sinks, *more)

        return attend

    def ran(self, text: Text, count: int, wrong: int = 0) -> None:
        """Note that the next `count` tokens of a text have run; keep what others may continue with, drop the rest.

        Args:
            wrong: draft tokens behind them that ran too, and were not drawn.
        """
        before = text.computed
        text.moved(text.seq_id, before + count, text.places)
        if wrong:
            self.cut(text, text.computed)
        while text.keep_at and text.keep_at[0] <= text.computed:
            self.keep(text, text.keep_at[0])
            text.keep_at.pop(0)
        for i, group in enumerate(self.groups):
            group.ran(text, i, before)

    def compact(self, text: Text) -> None:
        """Free blocks that a text does not need, now that a pass and its copies have ended."""
        for i, group in enumerate(self.groups):
            group.compact(text, i)

    def _ids(self, texts: Sequence[Text]) -> NDArray[np.uint64]:
        return np.fromiter(map(_seq_id, texts), np.uint64, len(texts))

    # -- going back -----------------------------------------------------------------------------------------

    def nearest(self, text: Text, pos: int) -> int:
        """The last position, at most `pos`, from which a text can run on: one whose state is there."""
        for i, group in enumerate(self.groups):
            pos = min(pos, group.nearest(text, i, pos))
        return pos

    def in_residual_group(self, text: Text, most: int) -> int:
        """How many of the next tokens, at most `most`, are in one group of a residual, the next one's.

        As many may run one by one, and some of them may be cut again: what the others read in f16 is still there.
        """
        length = self.counted.caches[0].residual_length
        return min(most, length - text.computed % length) if length else most

    def may_cut(self, text: Text, pos: int) -> bool:
        """Whether a text still has what the query at `pos` reads."""
        return self._lacks(text, pos) is None

    def expect(self, text: Text, pos: int) -> None:
        """Raise InvalidOperationError if a token that the query at `pos` reads has left."""
        if (message := self._lacks(text, pos)) is not None:
            raise InvalidOperationError(message)

    def _lacks(self, text: Text, pos: int) -> str | None:
        for i, group in enumerate(self.groups):
            if (message := group.lacks(text, i, pos)) is not None:
                return message
        return None

    def expect_room(self, text: Text, pos: int, count: int, beside: bool) -> None:
        """Raise OutOfMemoryError unless a text that is cut to `pos` has room for `count` more tokens.

        Args:
            beside: a copy of the text keeps its tokens meanwhile.
        """
        for i, group in enumerate(self.groups):
            group.expect_room(text, i, pos, count, beside)

    def has_room(self, text: Text, pos: int, count: int, beside: bool) -> bool:
        """Whether a text that is cut to `pos` has room for `count` more tokens; as `expect_room`, it makes room."""
        try:
            self.expect_room(text, pos, count, beside)
        except OutOfMemoryError:
            return False
        return True

    def loses(self, text: Text, end: int, chunk: int) -> bool:
        """Whether running a text up to `end`, in chunks, drops what a rollback to `text.computed` needs."""
        for i, group in enumerate(self.groups):  # noqa: SIM110  called in each step
            if group.loses(text, i, end, chunk):
                return True
        return False

    def cut(self, text: Text, pos: int) -> None:
        """Cut a text to `pos` tokens, which `may_cut` allows."""
        for i in range(len(self.groups)):
            self._cut(text, i, pos)
        text.computed = pos

    def _cut(self, text: Text, index: int, pos: int) -> None:
        place = self.groups[index].cut(text, index, pos)
        if place is not text.places[index]:
            text.places = (*text.places[:index], place, *text.places[index + 1 :])

    def release_held(self) -> None:
        """Let `settle` end the sequences that a call held, which an exception has ended."""
        for group in self.groups:
            group.held.clear()

    def settle(self, text: Text | None = None) -> bool:
        """Free all sequences but that of a text, which is cut to what was computed; whether no layer has lost it.

        May run at any time, after an exception between any two lines.
        """
        text = None if text is None or text.seq_id < 0 else text
        lost = [i for i, group in enumerate(self.groups) if not group.settle(text, i)]
        if text is not None and lost:
            self.drop(text)
        return not lost

    # -- cached prefixes ------------------------------------------------------------------------------------

    def keep(self, text: Text, stop: int, ends: bool = False) -> None:
        """Cache what another text needs to continue behind the first `stop` tokens, as far as it is there.

        Args:
            ends: see `Layers.keep`.
        """
        if self.block_index is not None:
            self.block_index.keep(text, stop, ends and self.keeps_states)
        self.keep_pages(text, stop, ends and self.keeps_states)

    def lacking(self, text: Text) -> list[int]:
        """The numbers of the parts that a text with a sequence is to see and has not."""
        if text.prefix is None or not text.prefix.parts:
            return []
        return [number for number, seq_id in enumerate(text.places[self._counted]) if seq_id == MISSING]

    @property
    def part_groups(self) -> list[tuple[int, PartLayers]]:
        """The groups whose texts see parts, by which of `Text.places` is theirs: all, but those that exclude it."""
        return [(i, group) for i, group in enumerate(self.groups) if isinstance(group, PartLayers)]

    def give(self, text: Text, number: int, other: Text) -> None:
        """Give a text the part of this number, whose cached text `other` has run."""
        assert text.prefix is not None, "it sees parts"
        part, gap = text.prefix.parts[number], text.prefix.gaps[number]
        # The counted layers last: their place of the text says which parts it lacks.
        for i, group in sorted(self.part_groups, key=lambda each: each[0] == self._counted):
            group.give_part(text, i, number, part, gap, other)

    def keep_whole(self, text: Text) -> None:
        """Cache all that a text has computed, the block in which it ends too, for others that see parts of it."""
        if self.block_index is not None:
            self.block_index.keep(text, text.computed, seen=True)
            self.keep_pages(text, text.computed)
            for i, group in self.part_groups:
                group.keep_end(text, i)

    def expect_parts(self, text: Text) -> None:
        """Raise OutOfMemoryError unless a text and the cached texts that it sees have room beside their blocks."""
        if isinstance(text.prefix, SeenParts):
            for _, group in self.part_groups:
                group.expect_parts(text, text.prefix)

    def keep_pages(self, text: Text, stop: int, ends: bool = False) -> None:
        """Cache what other texts need with the blocks of the index."""
        if stop > text.shares_to:
            stop, ends = text.shares_to, False
        for i, group in self._with_pages:
            group.keep(text, i, stop, ends)

    def index(self, text: Text) -> None:
        """Cache the full blocks of a text, so that others share them while it runs."""
        if self.block_index is not None:
            self.block_index.keep(text, text.computed)

    def clear(self) -> None:
        """Forget every cached prefix; texts that run keep their blocks."""
        for each in self.prefixes:
            each.clear()

    def save(self, path: Any, model: str) -> None:
        """Write the cached prefixes to a file; see `PrefixCache.save`."""
        index, *beside = self.prefixes
        index.save(path, model, beside=beside)

    def load(self, path: Any, model: str, *, exact: bool) -> int:
        """Add the blocks of a saved file; see `PrefixCache.load`."""
        index, *beside = self.prefixes
        if index.is_empty:
            for cache in beside:  # of texts that are no longer cached
                cache.clear()
        return index.load(path, model, beside=beside, exact=exact)

    # -- blocks ---------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks of `num_tokens` tokens, in the layers that keep all of them."""
        return self.counted.blocks_for(num_tokens)

    @property
    def total_blocks(self) -> int:
        """Blocks in all, of these layers."""
        return self.counted.total_blocks

    def count(self) -> dict[str, int]:
        """How many of these blocks are "free", "claimed" and "cached"."""
        return self.counted.count()

    # -- reports --------------------------------------------------------------------------------------------

    def stats(self) -> PrefixCacheStats:
        """The counters of the index, less what was found and ran again."""
        if not self.prefixes:
            return PrefixCacheStats(0.0, 0, 0, 0, 0, 0, 0, 0, 0, {})
        return self.shared.counted(self.prefixes[0].stats())

    def watch_evictions(self) -> deque[Any]:
        """The evictions of the index from now on, see `PrefixCache.watch_evictions`."""
        return self.prefixes[0].watch_evictions() if self.prefixes else deque()

    def namespace_tokens(self) -> dict[Hashable, int]:
        """Cached tokens of each namespace."""
        return self.prefixes[0].namespace_tokens() if self.prefixes else {}

    def positions(self, text: Text, layer: int, head: int | None = None) -> NDArray[np.int64]:
        """The text positions of the tokens whose K and V a KV head of a layer has, ascending; None: any head."""
        index = self._group_of.get(layer)
        return np.empty(0, np.int64) if index is None else self.groups[index].positions(text, index, layer, head)

    def memory(self, texts: Sequence[Text]) -> dict[str, int]:
        """Bytes of K and V, "kv", of "bookkeeping" and of "scratch"; `texts` are those that run."""
        own = [] if self.block_index is None else self.block_index.memory()
        return total(*own, *[report for i, group in enumerate(self.groups) for report in group.memory(texts, i)])

    def check(self, texts: Sequence[Text]) -> None:
        """Verify the invariants; AssertionError says what is wrong."""
        if self.block_index is not None:
            self.block_index.check()
        for i, group in enumerate(self.groups):
            group.check(texts, i)

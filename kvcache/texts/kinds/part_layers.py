"""`PartLayers`: layers of one cache whose texts may see parts of cached texts: those that keep all tokens, and windows.

The place of a text has the sequences of its parts, `part_ids` of it. Of a cached text the layers have all tokens, or
the newest ones, which are all that a query behind its end may see: within the text they are as near to its end as in
the request, and the query stands there or further on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.core.attention_call import AttentionCall
from kvcache.core.kvrows import KvRows
from kvcache.networks.protocols import Float32, LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.merging import merge_attention
from kvcache.paged.queried import QueriedSequences
from kvcache.texts.behind import Behind, Part
from kvcache.texts.block_index import CachedStart, PartStart
from kvcache.texts.kinds.base import Ids, LayerCall, Layers, Lens, calls_of
from kvcache.texts.kinds.part_sequences import MISSING, Own, PartQueries, PartRows, PartSequences
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.text import Text, Tokens

__all__ = ["PartLayers"]


class PartLayers(Layers):
    """Layers whose texts may see parts of cached texts.

    Args:
        layers: of the network, ascending, with K and V of their own.
        attention: how each layer of the network attends.
        cache: K and V of these layers.

    Attributes:
        reads_apart: whether tokens read their own text in a call of its own: a layer of the network has sinks, which
            join the softmax once, or some of the text is read in f16.
    """

    def __init__(
        self, layers: Sequence[int], attention: Sequence[LayerAttention | None], cache: PagedKvCache
    ) -> None:
        self.cache, self.caches = cache, (cache,)
        self._parts = calls_of(layers, attention, return_lse=True)
        self._seen, self._seen_calls = PartSequences(cache), _calls_of_parts(self._parts)
        self._joint_calls = {  # where own texts are attended to in the same call
            layer: (number, call, self._parts[layer][2]) for layer, (number, call, _) in self._seen_calls.items()
        }
        has_sinks = any(each is not None and each.sinks is not None for each in attention)
        self.reads_apart = has_sinks or cache.residual_length > 0 or cache.first_tokens > 0
        self.held = set[int]()

    @abstractmethod
    def part_ids(self, place: Any) -> tuple[int, ...]:
        """The sequences of parts of a text with this place."""

    @abstractmethod
    def with_parts(self, place: Any, ids: tuple[int, ...]) -> Any:
        """The place with these sequences of parts."""

    # -- parts ----------------------------------------------------------------------------------------------

    def first_needed(self, length: int, gap: int) -> int:
        """The first token, at the begin of a block, that is kept of a text of which parts are seen.

        Args:
            length: of the text; the result is this where none of it is near enough.
            gap: how many positions lie between its end and the first token that sees it.
        """
        return 0

    def first_of(self, text: Text, index: int) -> int:
        """The first token that a text has in the cache."""
        return 0

    def hold_end(self, tokens: Tokens, gap: int, space: Any, held: ExitStack) -> CachedStart | None:
        """Hold what is needed of a cached text, until `held` closes; None: it is not there.

        Layers of which the index holds all tokens are never asked.
        """
        raise NotImplementedError("the index has all of it")

    def keep_end(self, text: Text, index: int) -> None:
        """Cache the block in which a text ends, for others that see parts of it."""

    def end_of(self, text: Text, index: int, part: Part, gap: int) -> CachedStart:
        """The tokens that are needed of a text that has run, the cached text of a part."""
        return self._from(self._start_of(text.seq_id, self.first_of(text, index), part), gap)

    def hold_blocks(self, start: CachedStart) -> int:
        """Hold what is cached of a text in a sequence of its own, until it is released; its id."""
        count = start.stop - start.first
        (seq_id,) = self._seen.adopt([PartStart(start.blocks, count, np.arange(count), firsts=start.firsts)])
        if seq_id != MISSING:
            self.held.add(seq_id)
        return seq_id

    def release(self, seq_ids: Collection[int]) -> None:
        """End sequences that are held."""
        self.held.difference_update(seq_ids)
        self._seen.free(seq_ids)

    def held_start(self, seq_id: int, part: Part, gap: int) -> CachedStart:
        """The tokens that `hold_blocks` holds of the cached text of a part, of which `gap` was known."""
        return self._start_of(seq_id, self.first_needed(len(part.tokens), gap), part)

    def _start_of(self, seq_id: int, first: int, part: Part) -> CachedStart:
        """The tokens of a sequence, which begins with token `first` of the cached text of a part."""
        stop, count, firsts = len(part.tokens), min(self.cache.first_tokens, len(part.tokens)), list[KvRows]()
        if first >= stop:
            return CachedStart(stop, stop)
        if part.begins_within(count):
            for layer in range(self.cache.num_layers):
                keys, values = self.cache.read_unpacked(layer, seq_id)
                firsts.append(KvRows(keys[:count], values[:count]))
        blocks = self.cache.block_table(np.array([seq_id], np.uint64)).block_ids.astype(np.int64)
        return CachedStart(stop, first, blocks, firsts=firsts)

    def _from(self, start: CachedStart, gap: int) -> CachedStart:
        """The tokens of a start that are needed."""
        first, size = self.first_needed(start.stop, gap), self.cache.block_size
        assert start.first <= first, f"a text is held from token {start.first} on, and needed from {first} on"
        return start._replace(first=first, blocks=start.blocks[-(-(first - start.first) // size) :])

    def part_start(self, start: CachedStart, part: Part, gap: int) -> PartStart:
        """A part of a cached text in these blocks: the same tokens wherever they come from."""
        end, indices = self._from(start, gap), part.indices
        before = int(np.searchsorted(indices, end.first))
        positions = part.positions[before:] if self.reason else None
        seen = indices[before:] - end.first
        return PartStart(end.blocks, end.stop - end.first, seen, before, positions, start.firsts)

    def give_part(self, text: Text, index: int, number: int, part: Part, gap: int, other: Text) -> None:
        """Give a text the part of this number, whose cached text `other` has run; its sequence is `MISSING` so far."""
        start = self._start_of(other.seq_id, self.first_of(other, index), part)
        (found,), place = self._seen.adopt([self.part_start(start, part, gap)]), text.places[index]
        ids = self.part_ids(place)
        given = self.with_parts(place, (*ids[:number], found, *ids[number + 1 :]))
        text.places = (*text.places[:index], given, *text.places[index + 1 :])

    def expect_parts(self, text: Text, prefix: SeenParts) -> None:
        """Raise OutOfMemoryError unless there is room for a text that sees these parts, and for the one of their texts.

        Blocks of counted layers are not asked for.
        """

    def missing_texts(self, text: Text, start: CachedStart) -> dict[tuple[bytes, bytes], int]:
        """The lengths of the cached texts that run before a text begins, by these texts: their parts are not held."""
        parts = () if text.prefix is None else zip(text.prefix.parts, start.parts, strict=True)
        return {part.key: len(part.tokens) for part, held in parts if held is None}

    def part_blocks(self, prefix: Behind | None) -> dict[tuple[bytes, bytes], int]:
        """The blocks that the cached texts of parts take, by these texts."""
        found = dict[tuple[bytes, bytes], int]()
        for part, gap in () if prefix is None else zip(prefix.parts, prefix.gaps, strict=True):
            length = len(part.tokens)
            taken = -(-(length - self.first_needed(length, gap)) // self.cache.block_size)
            found[part.key] = max(taken, found.get(part.key, 0))
        return found

    # -- a pass ---------------------------------------------------------------------------------------------

    @abstractmethod
    def own_sequences(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> QueriedSequences:
        """The sequences of texts, of which some stand behind something."""

    def own_rows(self, texts: Sequence[Text], index: int, ids: Ids) -> Own:
        """The sequences of texts, for one row of each."""
        return Own(ids)

    @property
    def window_of_parts(self) -> int | None:
        """How far back a query sees; None: all."""
        return None

    def attend_behind(
        self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens, rows: PartRows | None
    ) -> LayerCall:
        behind, sequences = _rows_behind(texts, lens), self.own_sequences(texts, index, ids, lens)
        seen = None
        if rows is not None:
            parts = [self.part_ids(text.places[index]) for text in texts]
            own_rows = self.own_rows(texts, index, ids) if rows.with_own else Own(ids)
            seen = PartQueries(rows, parts, own_rows, self._seen.stored, self.window_of_parts)

        def attend(layer: int, queries: Float32, keys: Any, values: Any, turned: Any = None, /, *_: Any) -> Float32:
            own: Any = self.cache.write_and_attend(sequences, self._parts, layer, queries, keys, values)
            for prefix, some in behind:
                mixed, masses = own
                output, mass = prefix.attend(layer, queries[some])
                mixed[some], _lse = merge_attention(output, mass, mixed[some], masses[some])
            if seen is None or seen.sequences is None:
                return own[0]  # type: ignore[no-any-return]
            parts: Any = self.cache.write_and_attend(
                seen.sequences, self._seen_calls, layer, seen.taken(turned), None, None
            )
            return seen.merged(own, *parts)

        def attend_at_once(
            layer: int, _queries: Float32, keys: Any, values: Any, turned: Any = None, /, *_: Any
        ) -> Float32:
            assert seen is not None, "rows see parts"
            assert seen.sequences is not None, "rows attend to their own texts"
            found: Any = self.cache.write_and_attend(
                seen.sequences, self._joint_calls, layer, seen.taken(turned), keys, values, None, None, sequences
            )
            return seen.merged(None, *found)

        return attend_at_once if rows is not None and rows.with_own else attend

    # -- the end --------------------------------------------------------------------------------------------

    def free(self, seq_id: int, place: Any) -> None:
        super().free(seq_id, place)
        self._seen.free(() if place is None else self.part_ids(place))

    def settle(self, text: Text | None, index: int) -> bool:
        ids = () if text is None else self.part_ids(text.places[index])
        self._seen.free_others({*self.held, *ids})
        return super().settle(text, index) and self._seen.ids.issuperset(each for each in ids if each != MISSING)

    def free_others(self, kept: Collection[int]) -> None:
        super().free_others({*kept, *self._seen.ids})

    def check_parts(self, texts: Sequence[Text], index: int) -> tuple[list[int], set[int]]:
        """Verify the sequences of parts; returns all that the cache may have, ascending, and the blocks of parts."""
        seen = {each for text in texts for each in self.part_ids(text.places[index]) if each != MISSING}
        assert self._seen.ids == seen, f"sequences of parts, {self._seen.ids}, and those of texts, {seen}, differ"
        claimed = set[int]()
        for seq_id in seen:
            info = self.cache.get_sequence(seq_id)
            assert info is not None, f"the sequence {seq_id} of a part is gone"
            claimed.update(int(block) for block in info.block_ids)
        owned = sorted([*seen, *(text.seq_id for text in texts)])
        ids = [int(each) for each in self.cache.sequence_ids()]
        if self.own_ids is not None:
            ids = [each for each in ids if each in self.own_ids or each in seen]
        assert ids == owned, f"sequences {ids} and those of texts, {owned}, differ"
        return owned, claimed


def _rows_behind(texts: Sequence[Text], lens: NDArray[np.int64]) -> list[tuple[Behind, Lens]]:
    """The rows of a pass that stand behind a compressed prefix, by prefixes; each text has `lens` rows."""
    stops, found = np.cumsum(lens), dict[int, tuple[Behind, list[Lens]]]()
    for text, stop, count in zip(texts, stops.tolist(), lens.tolist(), strict=True):
        if text.prefix is not None and not isinstance(text.prefix, SeenParts):
            found.setdefault(id(text.prefix), (text.prefix, []))[1].append(np.arange(stop - count, stop))
    return [(prefix, np.concatenate(rows)) for prefix, rows in found.values()]


def _calls_of_parts(calls: dict[int, Any]) -> dict[int, Any]:
    """The calls of layers for queries that see all of a part; sinks join the softmax once, with the text."""
    return {
        layer: (number, AttentionCall(call.scale, None, call.softcap, None, False, return_lse=True), False)
        for layer, (number, call, _) in calls.items()
    }

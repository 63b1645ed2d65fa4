"""Layers that evict: every one keeps at most the tokens that its budget allows.

    layer 0   0  1  .  .  4  .  .  7  .  9 10 11     sequence 0 of the cache: budget 7
    layer 1   0  .  .  3  .  .  .  .  .  9 10 11     sequence 1 of the cache: budget 5

Survivors differ between layers, so each layer is a sequence of its own, in blocks that hold one layer. A key keeps the
position embedding of its text position. A piece is appended and attends over the survivors and itself. Then every layer
evicts down to its budget: blocks without survivors are freed, and scattered survivors are compacted if they occupy too
many blocks (`most_blocks`).

Where a policy chooses for each KV head, each head of a layer is a sequence, and a block holds tokens of one head. The
budget of a layer is that of its heads together, and a token takes memory in those that keep it alone:

    layer 0, head 0   0  .  .  .  4  .  .  7  .  9 10 11     sequence 0: 6 of the 14 tokens of the layer
    layer 0, head 1   0  1  2  .  4  .  6  7  .  9 10 11     sequence 1: 8 of them, as a budget of 7 allows

Under H2O and PyramidKV a token's score is the attention mass on it in its layer, summed over all later queries and
heads (float64) and divided by the number of queries that could see it. The plain sum favours early tokens and keeps
worse tokens on held-out text (`python -m bench quality`). Scores depend on the size of the pieces: in pieces of 512, a
token gets attention from up to 512 queries before the first eviction. So prompts run in pieces that end at the same
places in every engine, new tokens one by one, and nothing is shared or cached.

Under StreamingLLM the distance to the sinks does not count the evicted tokens. Keys are not rewritten: the network
rotates a second set of queries to their index in the cache.

    text      0  1  2  3  .  .  .  .  96 97 98 99    window: query and key at their text positions, 99 - 97 = 2
    cache     0  1  2  3              4  5  6  7     sinks:  the query of 99 is rotated to 7, and 7 - 1 = 6
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Float32, LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.support.arguments import as_bytes, as_count
from kvcache.texts.block_index import CachedStart
from kvcache.texts.budgets import Budgets, most_blocks
from kvcache.texts.cache_arguments import CacheArguments
from kvcache.texts.kinds.base import Ids, LayerCall, LayerKind, Layers, Lens
from kvcache.texts.scores import Alive, Drawn
from kvcache.texts.text import Text

__all__ = ["EVICTING", "EvictingLayers", "Survivors"]


class Survivors(NamedTuple):
    """The tokens that these layers have of a text.

    Attributes:
        cache: which one, of its own.
        first: the sequence of its first list there: 0, or the number of lists for a fork.
        stop: tokens of the text when the layers were as here.
        alive: the tokens of each list: of a layer, or of a KV head, heads of a layer side by side.
    """

    cache: int
    first: int
    stop: int
    alive: tuple[Alive, ...]


class EvictingLayers(Layers):
    """All layers of a network, each within its budget.

    Args:
        budgets: one rule for each layer.
        attention: how each layer attends.
        make_cache: makes the cache of a text, with `separate_layers` and a layer for each list; it is used again for
            later ones.
        most: the most texts.
    """

    is_counted = True

    def __init__(
        self, budgets: Budgets, attention: Sequence[LayerAttention | None], make_cache: Callable[[], PagedKvCache],
        most: int,
    ) -> None:
        self.budgets, self._make_cache, self._most = budgets, make_cache, most
        self.layers = tuple(range(len(budgets.rules)))
        self._calls = [
            [_of_head(each, head, budgets.lists) for head in range(budgets.lists)]
            for each in attention if each is not None
        ]
        self.caches = self._caches = [make_cache()]
        self._ids = np.arange(len(self.layers) * budgets.lists, dtype=np.uint64)
        self.own_ids = range(2 * len(self._ids))
        self._drawn: dict[int, list[Drawn]] = {}  # by sequence: what attention gave in the pass that runs, of each list
        self._taken: dict[int, int] = {}  # the cache of each sequence

    @property
    def total_blocks(self) -> int:
        """The blocks of all texts that may run."""
        return self._most * self._caches[0].total_blocks

    def count(self) -> dict[str, int]:
        """See `Layers`; the blocks of texts that have no cache yet are free."""
        used = sum(cache.used_block_count for cache in self._caches)
        return {"free": self.total_blocks - used, "claimed": used, "cached": 0}

    def _lists(self, layer: int) -> range:
        """The lists of a layer."""
        return range(layer * self.budgets.lists, (layer + 1) * self.budgets.lists)

    def _place(self, text: Text, index: int) -> Survivors:
        place: Survivors = text.places[index]
        return place

    # -- a text begins --------------------------------------------------------------------------------------

    def has_room(self, text: Text, found: int, start: CachedStart, running: Sequence[Text]) -> bool:
        """A text begins where there is memory for all that it may ever keep."""
        return len(self._taken) < self._most

    def begin(self, seq_id: int, found: int, start: CachedStart) -> Survivors:
        number = next(i for i in range(self._most) if i not in self._taken.values())
        if number == len(self._caches):
            self._caches.append(self._make_cache())
        for each in range(len(self._ids)):
            self._begin_list(self._caches[number], each)
        self._taken[seq_id] = number
        return Survivors(number, 0, 0, (self.budgets.scoring.no_tokens,) * len(self._ids))

    def _begin_list(self, cache: PagedKvCache, list_id: int) -> None:
        if list_id in cache:
            cache.free(list_id)
        cache.allocate(list_id, 0)

    def fork(self, text: Text, index: int, seq_id: int) -> Survivors:
        place, cache = self._place(text, index), self._cache_of(text, index)
        first = 0 if place.first else len(self._ids)
        for each in range(first, first + len(self._ids)):  # of a fork that an exception ended
            if each in cache:
                cache.free(each)
        cache.fork_batch(self._ids + np.uint64(place.first), self._ids + np.uint64(first))
        self._taken[seq_id] = place.cache
        return place._replace(first=first)

    def _cache_of(self, text: Text, index: int) -> PagedKvCache:
        return self._caches[self._place(text, index).cache]

    # -- a pass ---------------------------------------------------------------------------------------------

    def append(self, texts: Sequence[Text], index: int, ids: Ids, counts: Lens) -> None:
        for i, text in enumerate(texts):
            place, cache = self._place(text, index), self._cache_of(text, index)
            self.compact(text, index)
            each = np.full(len(self._ids), counts[i])
            try:
                self.append_to(cache, self._ids + np.uint64(place.first), each)
            except Exception:
                for other in texts[:i]:
                    self.cut(other, index, other.computed)
                raise

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        """One attention call per text and list; positions of the queries for the sinks, where a text has a hole."""
        stops = np.cumsum(lens).tolist()
        parts, sinks, holes = [], [], False
        self._drawn = {}
        for text, stop, count in zip(texts, stops, lens.tolist(), strict=True):
            place = self._place(text, index)
            hole = text.computed - len(place.alive[0].positions) if self.budgets.endless else 0
            holes |= hole > 0
            sinks.append(np.arange(text.computed - hole, text.computed - hole + count))
            drawn = self._drawn[text.seq_id] = [Drawn()] * len(self._ids)
            parts.append((slice(stop - count, stop), self._caches[place.cache], place.first, drawn, hole))

        def attend(
            layer: int, queries: Float32, keys: Any, values: Any, sink_queries: Float32 | None = None, /, *_: Any
        ) -> Float32:
            mixed = []
            for part, cache, first, drawn, hole in parts:
                turned = None if sink_queries is None or not hole else sink_queries[part]
                rows = queries[part], keys[part], values[part], turned
                mixed.append(self._attend_layer(cache, first, layer, drawn, *rows))
            return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

        return attend, {"sink_positions": np.concatenate(sinks)} if holes else {}

    def _attend_layer(
        self, cache: PagedKvCache, first: int, layer: int, drawn: list[Drawn], queries: Float32, keys: Any,
        values: Any, sink_queries: Float32 | None,
    ) -> Float32:
        """Write the new tokens of a text into the lists of a layer, and attend: each list with its query heads."""
        lists, count, mixed = self._lists(layer), np.array([len(queries)]), []
        heads, kv = queries.shape[1] // len(lists), keys.shape[1] // len(lists)
        for i, each in enumerate(lists):
            own, theirs = slice(i * heads, (i + 1) * heads), slice(i * kv, (i + 1) * kv)
            cache.write(each, first + each, keys[:, theirs], values[:, theirs])
            options = self._calls[layer][i]
            options = options | {"sink_queries": None if sink_queries is None else sink_queries[:, own]}
            seq_id = np.array([first + each], np.uint64)
            found, drawn[each] = self.budgets.scoring.attend(cache, each, queries[:, own], seq_id, count, options)
            mixed.append(found)
        return mixed[0] if len(mixed) == 1 else np.concatenate(mixed, axis=1)

    def ran(self, text: Text, index: int, before: int) -> None:
        """Evict down to the budgets. What a policy raises leaves the place as it was."""
        place, drawn = self._place(text, index), self._drawn.pop(text.seq_id)
        cache, budgets, end = self._caches[place.cache], self.budgets, text.computed
        alive = []
        for layer, rule in enumerate(budgets.rules):
            own = self._lists(layer)
            after = [budgets.scoring.add(place.alive[i], before, end - before, drawn[i]) for i in own]
            if budgets.exceeds(layer, [len(each.positions) for each in after]):
                kept = budgets.keep(layer, after, end, [partial(cache.read, i, place.first + i) for i in own])
                for i, each in zip(own, kept, strict=True):
                    if budgets.endless:  # the same survivors; this call also marks the sinks in the cache
                        cache.apply_streaming_llm(place.first + i, rule.front, rule.back)
                    else:
                        cache.keep_tokens(place.first + i, each)
                after = [budgets.scoring.keep(*both) for both in zip(after, kept, strict=True)]
            alive.extend(after)
        self._put(text, index, place._replace(stop=end, alive=tuple(alive)))

    def _put(self, text: Text, index: int, place: Survivors) -> None:
        text.places = (*text.places[:index], place, *text.places[index + 1 :])

    def compact(self, text: Text, index: int) -> None:
        """Compact each list that has more blocks than `most_blocks` allows.

        Compaction of shared blocks needs new blocks and memory. Without them, a later call compacts.
        """
        place, cache = self._place(text, index), self._cache_of(text, index)
        with suppress(MemoryError):
            occupied = np.diff(cache.block_table(self._ids + np.uint64(place.first)).indptr).tolist()
            for i, (alive, num_blocks) in enumerate(zip(place.alive, occupied, strict=True)):
                if num_blocks > most_blocks(len(alive.positions), cache.block_size):
                    cache.compact(place.first + i)

    # -- going back -----------------------------------------------------------------------------------------

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """A layer evicts."""
        more = end - text.computed
        lens = [len(alive.positions) + more for alive in self._place(text, index).alive]
        return any(self.budgets.exceeds(layer, [lens[i] for i in self._lists(layer)]) for layer in self.layers)

    def lacks(self, text: Text, index: int, pos: int) -> str | None:
        if pos == text.computed:
            return None
        for i, alive in enumerate(self._place(text, index).alive):
            if np.searchsorted(alive.positions, pos) < pos:
                return (
                    f"pos: expected {text.computed}, the end of the text, got {pos}: layer {i // self.budgets.lists} "
                    f"has evicted tokens before it; go back to 0 or reset, and run the text again"
                )
        return None

    def cut(self, text: Text, index: int, pos: int) -> Survivors:
        """Cut to tokens of which none was evicted. Scores keep the attention mass of queries that are cut off."""
        place, cache = self._place(text, index), self._cache_of(text, index)
        alive = place.alive
        if pos < place.stop:
            alive = tuple(self.budgets.scoring.cut(each, pos, place.stop) for each in alive)
        for i, each in enumerate(alive):
            if len(each.positions):
                cache.truncate(place.first + i, len(each.positions))
            else:  # after a truncation to 0 the next position would be that of the first survivor
                self._begin_list(cache, place.first + i)
        return place._replace(stop=pos, alive=alive)

    def free(self, seq_id: int, place: Survivors | None) -> None:
        if place is not None:
            cache = self._caches[place.cache]
            for i in range(len(self._ids)):  # one by one, which takes no memory
                if place.first + i in cache:
                    cache.free(place.first + i)
        self._taken.pop(seq_id, None)

    def settle(self, text: Text | None, index: int) -> bool:
        """Tokens that were evicted cannot come back: a text that was evicting is lost, and is to run again."""
        place = None if text is None else self._place(text, index)
        self.free_others(() if place is None else range(place.first, place.first + len(self._ids)))
        self._taken = {} if text is None or place is None else {text.seq_id: place.cache}
        if text is None or place is None or place.stop != text.computed:
            return False
        self._put(text, index, self.cut(text, index, text.computed))
        return True

    # -- reports --------------------------------------------------------------------------------------------

    def positions(self, text: Text, index: int, layer: int, head: int | None) -> NDArray[np.int64]:
        alive, own = self._place(text, index).alive, self._lists(layer)
        if head is None or len(own) == 1:
            return np.unique(np.concatenate([alive[i].positions for i in own]))
        return alive[own[head]].positions.copy()

    def memory(self, texts: Sequence[Text], index: int) -> list[dict[str, int]]:
        places = [places[index] for text in list(texts) if (places := text.places)]  # a step may take them away
        alive = {"bookkeeping": sum(each.nbytes for place in places for each in place.alive)}
        return [*[cache.memory() for cache in self._caches], alive]

    def check(self, texts: Sequence[Text], index: int) -> None:
        assert sorted(text.seq_id for text in texts) == sorted(self._taken), "texts and those with a cache differ"
        assert len({self._place(text, index).cache for text in texts}) == len(texts), "two texts have one cache"
        for number, cache in enumerate(self._caches):
            cache.check()
            assert number in self._taken.values() or not cache.used_block_count, f"cache {number} is used by no text"
        for text in texts:
            self._check_text(text, self._place(text, index))

    def _check_text(self, text: Text, place: Survivors) -> None:
        cache, lists = self._caches[place.cache], self.budgets.lists
        assert place.stop == text.computed, f"{text}: its layers have {place.stop} tokens"
        for i, alive in enumerate(place.alive):
            name = f"layer {i // lists}" + (f", head {i % lists}" if lists > 1 else "")
            held = cache.get_sequence(place.first + i)
            assert held is not None, f"{name}: sequence {place.first + i} is gone from the cache"
            assert held.num_tokens == len(alive.positions) == alive.scores.shape[-1], (
                f"{name}: {held.num_tokens} tokens in the cache, {len(alive.positions)} counted"
            )
            assert (np.diff(alive.positions, prepend=-1, append=text.computed) > 0).all(), (
                f"{name}: positions do not ascend below {text.computed}"
            )
            assert np.isfinite(alive.scores).all(), f"{name}: a score is not finite"
            fork = len(self._ids) - place.first + i
            assert fork not in cache, f"{name}: a fork was not freed"
        for layer, rule in enumerate(self.budgets.rules):
            counts = [len(place.alive[i].positions) for i in self._lists(layer)]
            assert not self.budgets.exceeds(layer, counts), f"layer {layer}: {counts} tokens, at most {rule.limit} each"


def _of_head(attention: LayerAttention, head: int, lists: int) -> dict[str, Any]:
    """The options of attention of one of the lists of a layer, with the sinks of its query heads."""
    options = attention.options()
    if attention.sinks is not None:
        options["sinks"] = np.split(attention.sinks, lists)[head]
    return options


def _of(made: CacheArguments, left: Sequence[int]) -> list[tuple[int, ...]]:
    return [] if made.budgets is None else [tuple(left)]


def _make(made: CacheArguments, layers: Sequence[int], blocks: int, cached: int | None) -> EvictingLayers:
    assert made.budgets is not None
    options = made.options(layers, blocks) | {"separate_layers": True}
    if made.budgets.per_head:
        known = made.storage.calibration
        by_head = None if known is None else known.by_head()
        options |= {"num_layers": len(layers) * made.budgets.lists, "calibration": by_head}

    def make_cache() -> PagedKvCache:
        return made.make_cache(**options)

    return EvictingLayers(made.budgets, made.attention, make_cache, _most_texts(made, layers, blocks))


def _most_texts(made: CacheArguments, layers: Sequence[int], blocks: int) -> int:
    """The most texts, each with `blocks` blocks of its own. ValueError: there is too little for one."""
    most = max(1, made.load.texts)
    if not made.load.texts:
        return most
    if made.num_blocks is not None:
        most = min(most, as_count(made.num_blocks, "num_blocks", blocks, most=None) // blocks)
    if made.max_memory_bytes is not None:
        limit, own = as_bytes(made.max_memory_bytes, "max_memory_bytes"), made.bytes_of_whole(layers, blocks, 0)
        if limit < own:
            raise ValueError(f"max_memory_bytes: expected at least {own}, the bytes of one text, got {limit}")
        most = min(most, limit // own)
    return most


EVICTING = LayerKind("evicting", _of, CacheArguments.bytes_of_whole, _make)

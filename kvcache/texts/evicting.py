"""Layers that evict: every one keeps at most the tokens that its budget allows.

    layer 0   0  1  .  .  4  .  .  7  .  9 10 11     sequence 0 of the cache: budget 7
    layer 1   0  .  .  3  .  .  .  .  .  9 10 11     sequence 1 of the cache: budget 5

Survivors differ between layers, so each layer is a sequence of its own, in blocks that hold one layer. A key keeps the
position embedding of its text position. A piece is appended and attends over the survivors and itself. Then every layer
evicts down to its budget: blocks without survivors are freed, and scattered survivors are compacted if they occupy too
many blocks (`most_blocks`).

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
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidOperationError
from kvcache.networks.protocols import Float32, LayerAttention
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.texts.budgets import Budgets, most_blocks
from kvcache.texts.group import CachedStart, Ids, LayerCall, Lens, Reclaim, append_within, settle_within
from kvcache.texts.scores import Alive
from kvcache.texts.text import Text, Tokens

__all__ = ["EvictingLayers", "Survivors"]


class Survivors(NamedTuple):
    """The tokens that these layers have of a text.

    Attributes:
        cache: which one, of its own.
        first: the sequence of its first layer there: 0, or the number of layers for a fork.
        stop: tokens of the text when the layers were as here.
        alive: the tokens of each layer.
    """

    cache: int
    first: int
    stop: int
    alive: tuple[Alive, ...]


class EvictingLayers:
    """All layers of a network, each within its budget.

    Args:
        budgets: one rule for each layer.
        attention: how each layer attends.
        make_cache: makes the cache of a text, with `separate_layers`; it is used again for later ones.
        most: the most texts.
    """

    reason = "evicted"

    def __init__(
        self, budgets: Budgets, attention: Sequence[LayerAttention | None], make_cache: Callable[[], PagedKvCache],
        most: int,
    ) -> None:
        self.budgets, self._make_cache, self._most = budgets, make_cache, most
        self.layers = tuple(range(len(budgets.rules)))
        self._calls = [each.options() for each in attention if each is not None]
        self._caches = [make_cache()]
        self._ids = np.arange(len(self.layers), dtype=np.uint64)
        self._drawn: dict[int, list[Float32 | None]] = {}  # by sequence: what attention gave in the pass that runs
        self._taken: dict[int, int] = {}  # the cache of each sequence
        self.reclaim: Reclaim | None = None

    @property
    def caches(self) -> Sequence[PagedKvCache]:
        return self._caches

    @property
    def prefixes(self) -> Sequence[PrefixCache]:
        return ()

    def blocks_for(self, num_tokens: int) -> int:
        return 0

    @property
    def total_blocks(self) -> int:
        """The blocks of all texts that may run."""
        return self._most * self._caches[0].total_blocks

    def count(self) -> dict[str, int]:
        """See `Group`; the blocks of texts that have no cache yet are free."""
        used = sum(cache.used_block_count for cache in self._caches)
        return {"free": self.total_blocks - used, "claimed": used, "cached": 0}

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
        for layer in self.layers:
            self._begin_layer(self._caches[number], layer)
        self._taken[seq_id] = number
        return Survivors(number, 0, 0, (self.budgets.scoring.no_tokens,) * len(self.layers))

    def _begin_layer(self, cache: PagedKvCache, layer_id: int) -> None:
        if layer_id in cache:
            cache.free(layer_id)
        cache.allocate(layer_id, 0)

    def fork(self, text: Text, index: int, seq_id: int) -> Survivors:
        place, cache = self._place(text, index), self._cache_of(text, index)
        first = 0 if place.first else len(self.layers)
        for layer in self.layers:  # of a fork that an exception ended
            if first + layer in cache:
                cache.free(first + layer)
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
            each = np.full(len(self.layers), counts[i])
            try:
                append_within(cache, self._ids + np.uint64(place.first), each, self._make_room)
            except Exception:
                for other in texts[:i]:
                    self.cut(other, index, other.computed)
                raise

    def _make_room(self, error: Any) -> bool:
        return self.reclaim is not None and self.reclaim(error)

    def attend(self, texts: Sequence[Text], index: int, ids: Ids, lens: Lens) -> tuple[LayerCall, dict[str, Any]]:
        """One attention call per text and layer; positions of the queries for the sinks, where a text has a hole."""
        layers, calls, scoring = len(self.layers), self._calls, self.budgets.scoring
        stops = np.cumsum(lens).tolist()
        parts, sinks, holes = [], [], False
        self._drawn = {}
        for text, stop, count in zip(texts, stops, lens.tolist(), strict=True):
            place = self._place(text, index)
            hole = text.computed - len(place.alive[0].positions) if self.budgets.endless else 0
            holes |= hole > 0
            sinks.append(np.arange(text.computed - hole, text.computed - hole + count))
            drawn = self._drawn[text.seq_id] = [None] * layers
            own = [np.array([place.first + layer], np.uint64) for layer in self.layers]
            parts.append((slice(stop - count, stop), self._caches[place.cache], own, np.array([count]), drawn, hole))

        def attend(
            layer: int, queries: Float32, keys: Any, values: Any, sink_queries: Float32 | None = None, /
        ) -> Float32:
            mixed = []
            for part, cache, own, count, drawn, hole in parts:
                seq_id = int(own[layer][0])
                cache.write(layer, seq_id, keys[part], values[part])
                turned = None if sink_queries is None or not hole else sink_queries[part]
                options = calls[layer] | {"sink_queries": turned}
                found, drawn[layer] = scoring.attend(cache, layer, queries[part], own[layer], count, options)
                mixed.append(found)
            return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

        return attend, {"sink_positions": np.concatenate(sinks)} if holes else {}

    def ran(self, text: Text, index: int, before: int) -> None:
        """Evict down to the budgets. What a policy raises leaves the place as it was."""
        place, drawn = self._place(text, index), self._drawn.pop(text.seq_id)
        cache, budgets, end = self._caches[place.cache], self.budgets, text.computed
        alive = []
        for layer, rule in enumerate(budgets.rules):
            after = budgets.scoring.add(place.alive[layer], before, end - before, drawn[layer])
            if len(after.positions) > rule.limit:
                kept = budgets.keep(layer, after, end, partial(cache.read, layer, place.first + layer))
                if budgets.endless:  # the same survivors; this call also marks the sinks in the cache
                    cache.apply_streaming_llm(place.first + layer, rule.front, rule.back)
                else:
                    cache.keep_tokens(place.first + layer, kept)
                after = budgets.scoring.keep(after, kept)
            alive.append(after)
        self._put(text, index, place._replace(stop=end, alive=tuple(alive)))

    def _put(self, text: Text, index: int, place: Survivors) -> None:
        text.places = (*text.places[:index], place, *text.places[index + 1 :])

    def compact(self, text: Text, index: int) -> None:
        """Compact each layer that has more blocks than `most_blocks` allows.

        Compaction of shared blocks needs new blocks and memory. Without them, a later call compacts.
        """
        place, cache = self._place(text, index), self._cache_of(text, index)
        with suppress(MemoryError):
            occupied = np.diff(cache.block_table(self._ids + np.uint64(place.first)).indptr).tolist()
            for layer, alive, num_blocks in zip(self.layers, place.alive, occupied, strict=True):
                if num_blocks > most_blocks(len(alive.positions), cache.block_size):
                    cache.compact(place.first + layer)

    def expect_room(self, text: Text, index: int, pos: int, count: int, beside: bool) -> None:
        """Do nothing: a cache has room for the survivors of a text, a copy of them, and a piece."""

    # -- going back -----------------------------------------------------------------------------------------

    def loses(self, text: Text, index: int, end: int, chunk: int) -> bool:
        """A layer evicts."""
        more = end - text.computed
        lens = [len(alive.positions) for alive in self._place(text, index).alive]
        return any(n + more > rule.limit for n, rule in zip(lens, self.budgets.rules, strict=True))

    def nearest(self, text: Text, index: int, pos: int) -> int:
        return pos

    def expect(self, text: Text, index: int, pos: int) -> None:
        if pos == text.computed:
            return
        for layer, alive in enumerate(self._place(text, index).alive):
            if np.searchsorted(alive.positions, pos) < pos:
                raise InvalidOperationError(
                    f"pos: expected {text.computed}, the end of the text, got {pos}: layer {layer} has evicted "
                    f"tokens before it; go back to 0 or reset, and run the text again"
                )

    def cut(self, text: Text, index: int, pos: int) -> Survivors:
        """Cut to tokens of which none was evicted. Scores keep the attention mass of queries that are cut off."""
        place, cache = self._place(text, index), self._cache_of(text, index)
        alive = place.alive
        if pos < place.stop:
            alive = tuple(self.budgets.scoring.cut(each, pos, place.stop) for each in alive)
        for layer, each in enumerate(alive):
            if len(each.positions):
                cache.truncate(place.first + layer, len(each.positions))
            else:  # after a truncation to 0 the next position would be that of the first survivor
                self._begin_layer(cache, place.first + layer)
        return place._replace(stop=pos, alive=alive)

    def free(self, seq_id: int, place: Survivors | None) -> None:
        if place is not None:
            cache = self._caches[place.cache]
            for layer in self.layers:  # one by one, which takes no memory
                if place.first + layer in cache:
                    cache.free(place.first + layer)
        self._taken.pop(seq_id, None)

    def settle(self, texts: Sequence[Text], index: int) -> list[Text]:
        """Tokens that were evicted cannot come back: a text that was evicting is lost, and is to run again."""
        owned: dict[int, set[int]] = {}
        for text in texts:
            place = self._place(text, index)
            owned.setdefault(place.cache, set()).update(range(place.first, place.first + len(self.layers)))
        for number, cache in enumerate(self._caches):
            settle_within(cache, owned.get(number, set()), range(2 * len(self.layers)))
        self._taken = {text.seq_id: self._place(text, index).cache for text in texts}
        lost = []
        for text in texts:
            if self._place(text, index).stop != text.computed:
                lost.append(text)
            else:
                self._put(text, index, self.cut(text, index, text.computed))
        return lost

    # -- cached prefixes: a prefix with holes is not shared ---------------------------------------------------

    def longest(self, tokens: Tokens, stop: int, space: Any) -> int:
        return 0

    def hold(self, tokens: Tokens, stop: int, space: Any, held: ExitStack, again: bool) -> CachedStart | None:
        return CachedStart(0)

    def keep(self, text: Text, index: int, stop: int, ends: bool = False) -> None:
        """Do nothing."""

    # -- reports --------------------------------------------------------------------------------------------

    def positions(self, text: Text, index: int, layer: int) -> NDArray[np.int64]:
        return self._place(text, index).alive[layer].positions.copy()

    def memory(self, texts: Sequence[Text], index: int) -> list[dict[str, int]]:
        places = [text.places[index] for text in list(texts) if text.places]
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
        cache = self._caches[place.cache]
        assert place.stop == text.computed, f"{text}: its layers have {place.stop} tokens"
        for layer, (alive, rule) in enumerate(zip(place.alive, self.budgets.rules, strict=True)):
            held = cache.get_sequence(place.first + layer)
            assert held is not None, f"layer {layer}: sequence {place.first + layer} is gone from the cache"
            assert held.num_tokens == len(alive.positions) == alive.scores.shape[-1] <= rule.limit, (
                f"layer {layer}: {held.num_tokens} tokens in the cache, {len(alive.positions)} counted, at most "
                f"{rule.limit} allowed"
            )
            assert (np.diff(alive.positions, prepend=-1, append=text.computed) > 0).all(), (
                f"layer {layer}: positions do not ascend below {text.computed}"
            )
            assert np.isfinite(alive.scores).all(), f"layer {layer}: a score is not finite"
            fork = len(self.layers) - place.first + layer
            assert fork not in cache, f"layer {layer}: a fork was not freed"

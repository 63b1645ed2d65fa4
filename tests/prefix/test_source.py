"""A `Source` in memory beside the index: pages that are evicted go there and come back, for two groups of layers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import examples

from kvcache import PrefixCache
from kvcache.core.block_pool import BlockPool
from kvcache.prefix.cached_blocks import fetch_offered
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.index.slots import Slots
from kvcache.trie.trie import TokenTrie

SIZE, WINDOW = 4, 2
FULL, WINDOWED = 0, 1  # the groups


class MemorySource:
    """Content of pages by namespace and text; `rows[group][slot]` is what lies in a slot.

    The windowed group is kept for the newest pages of each text alone, as far as they were there.
    """

    def __init__(self, slots, rows):
        self.slots, self.rows = slots, rows
        self.kept = [{} for _ in rows]  # (name, text up to the end of the page) -> content
        self.expected, self.damaged = {}, set()

    def attach(self, cached):
        assert cached.slots is self.slots

    def offers(self, name, tokens, start):
        texts = self.texts(name, tokens)
        count = start
        while count < len(texts) and texts[count] in self.kept[FULL]:
            count += 1
        while count > start and len(self.rows) > 1 and not all(t in self.kept[1] for t in self.newest(texts[:count])):
            count -= 1
        return count - start

    def expect(self, name, tokens, start, pages):
        self.expected.update(zip(pages.tolist(), self.texts(name, tokens)[start:], strict=False))

    def fetch(self, pages):
        good = [page for page in pages.tolist() if self.expected[page] not in self.damaged]
        for group, slots in enumerate(self.slots.of(np.array(good, np.int32))):
            for page, slot in zip(good, slots.tolist(), strict=True):
                if slot >= 0:
                    self.rows[group][slot] = self.kept[group][self.expected[page]]
        return np.array(good, np.int32)

    def spill(self, name, tokens, pages):
        texts = self.texts(name, tokens)[-len(pages) :]
        for group, slots in enumerate(self.slots.of(pages)):
            for text, slot in zip(texts, slots.tolist(), strict=True):
                if slot >= 0:
                    self.kept[group][text] = np.copy(self.rows[group][slot])

    @staticmethod
    def texts(name, tokens):
        text = tuple(np.asarray(tokens).tolist())
        return [(name, text[:end]) for end in range(SIZE, len(text) + 1, SIZE)]

    @staticmethod
    def newest(texts):
        return texts[-WINDOW:]


class TwoGroupCache:
    """A minimal cache of two groups of layers, the second with a window; its rows identify their text."""

    def __init__(self, num_pages):
        self.slots = Slots([BlockPool(num_pages), BlockPool(num_pages)], SIZE, (0, WINDOW))
        self.index = PrefixIndex(TokenTrie(SIZE), self.slots)
        self.rows = [np.zeros((num_pages, SIZE), np.int64) for _ in range(2)]
        self.source = MemorySource(self.slots, self.rows)

    def make_room(self, count):
        while (room := self.slots.room(count)) < count and (evicted := self.index.evict(count - room)) is not None:
            self.source.spill(evicted.name, evicted.tokens, evicted.pages)
            evicted.release()
        return room

    def lookup(self, name, tokens):
        """The number of pages matched, fetched ones included, each verified in every group that needs it."""
        fetch_offered(self.index, self.source, self.slots, tokens, name, self.make_room)
        claim = self.index.claim(tokens, name)
        for group, slots in enumerate(self.slots.of(claim.pages)):
            first = max(0, len(claim) - WINDOW) if group == WINDOWED else 0
            for i in range(first, len(claim)):
                assert slots[i] >= 0
                np.testing.assert_array_equal(self.rows[group][slots[i]], content(name, tokens, i, group))
        return len(claim)

    def store(self, name, tokens):
        found = self.lookup(name, tokens)
        head = self.index.head(tokens[: found * SIZE], name)
        room = self.make_room(len(tokens) // SIZE - found)
        if room:
            claim = self.slots.take(room)
            for group, slots in enumerate(self.slots.of(claim.pages)):
                for i, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        self.rows[group][slot] = content(name, tokens, found + i, group)
            self.index.insert(tokens[: (found + room) * SIZE], claim, name, head)


def content(name, tokens, page, group):
    return np.cumsum(np.asarray(tokens)[: (page + 1) * SIZE] + 1)[-SIZE:] * (group + 1) + hash(name) % 1000


def text(start, num_pages):
    return np.arange(start, start + num_pages * SIZE, dtype=np.uint32)


def test_what_was_evicted_comes_back_for_both_groups():
    cache = TwoGroupCache(8)
    cache.store("a", text(0, 6))
    cache.store("a", text(100, 6))  # takes the pages of the first one
    assert cache.index.find(text(0, 6), "a").length < 6 * SIZE
    assert cache.lookup("a", text(0, 6)) == 6
    assert cache.lookup("b", text(0, 6)) == 0
    slots = cache.slots.of(cache.index.find(text(0, 6), "a").pages)
    assert (slots[FULL] >= 0).all()
    assert (slots[WINDOWED] >= 0).tolist() == [False] * 4 + [True] * 2
    cache.index.check()


def test_a_prefix_is_usable_where_the_window_has_its_newest_pages():
    cache = TwoGroupCache(20)
    cache.store(None, text(0, 6))
    assert [cache.index.find(text(0, n)).length // SIZE for n in range(7)] == [0, 0, 0, 0, 0, 0, 6]
    cache.index.clear()
    cache.store(None, text(0, 2))
    cache.store(None, text(0, 6))
    assert [cache.index.find(text(0, n)).length // SIZE for n in range(7)] == [0, 1, 2, 2, 2, 2, 6]


def test_a_page_takes_the_slots_that_it_lacks():
    cache = TwoGroupCache(20)
    cache.store(None, text(0, 6))  # the windowed group has slots for its last two pages
    pages = cache.index.find(text(0, 6)).pages
    cache.store(None, text(0, 2))
    assert [cache.index.find(text(0, n)).length // SIZE for n in range(7)] == [0, 1, 2, 2, 2, 2, 6]
    assert cache.index.find(text(0, 6)).pages.tolist() == pages.tolist()
    cache.slots.release_dropped()
    assert [pool.num_used for pool in cache.slots.pools] == [6, 4]
    assert cache.lookup(None, text(0, 2)) == 2
    cache.index.check()


def test_a_page_that_does_not_arrive_ends_the_match():
    cache = TwoGroupCache(8)
    cache.store(None, text(0, 3))
    cache.make_room(8)
    cache.source.damaged.add((None, tuple(text(0, 2).tolist())))
    assert cache.lookup(None, text(0, 3)) <= 1
    cache.index.check()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=30)), max_size=12))
def test_any_history_serves_the_right_content(history):
    cache = TwoGroupCache(7)
    for name, tokens in history:
        cache.store(name, np.array(tokens, np.uint32))
        cache.index.check()
    for name, tokens in history:
        cache.lookup(name, np.array(tokens, np.uint32))
        cache.index.check()


class StoreSource(MemorySource):
    """The same over the blocks of a `PrefixCache`."""

    def __init__(self, cache):
        super().__init__(cache._slots, [self])
        self.store = cache._store

    def __getitem__(self, block):
        return [layer[block] for layer in (self.store.raw(i) for i in range(self.store.num_layers))]

    def __setitem__(self, block, layers):
        for place, data in zip(self.store.overwrite(block), layers, strict=True):
            place[...] = data


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_prefix_cache_spills_what_it_evicts_and_fetches_what_it_lacks(dtype):
    cache = PrefixCache(4, SIZE, 2, 1, 8, dtype=dtype)
    cache.source = StoreSource(cache)
    rng = np.random.default_rng(0)
    texts = [text(100 * i, 3) for i in range(5)]
    pairs = [[[rng.standard_normal((2, SIZE * 8)).astype(np.float32) for _ in "kv"] for _ in range(3)] for _ in texts]
    first = []
    for tokens, rows in zip(texts, pairs, strict=True):
        assert cache.store(tokens, 0, rows) == 3
        first.append(read(cache, tokens))
    assert cache.evictions == 11
    for tokens, want in zip(texts, first, strict=True):
        assert read(cache, tokens) == want
        cache.check()
    assert cache.lookup(texts[0], "other") == (0, [])


def read(cache, tokens):
    length, blocks = cache.lookup(tokens)
    assert length == len(tokens)
    data = [layer.tobytes() for block in blocks for layer in (*block.keys, *block.values)]
    for block in blocks:
        cache.release(block.index)
    return data

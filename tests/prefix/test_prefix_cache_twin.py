"""`PrefixCache` with blocks of its own against a naive trie over random histories."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.trie import NaiveTrie, Tokens

from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.prefix_cache import PrefixCache

Pair = tuple[list[Any], list[Any]]
TEXT = st.lists(st.integers(0, 1), max_size=11).map(tuple)
SIZE = 2


def rows_of(root: str, prefix: Tokens) -> Pair:
    number = float(int("1" + "".join(map(str, prefix)), 2) + (0 if root == "a" else 10**6))
    return [np.full(16, number, np.float32)], [np.full(16, -number, np.float32)]


class BlocksMachine(RuleBasedStateMachine):
    @initialize(max_blocks=st.integers(0, 9))
    def start(self, max_blocks: int) -> None:
        self.cache = PrefixCache(max_blocks, SIZE, 1, 1, 8)
        self.naive = NaiveTrie(SIZE)
        self.naive.roots = {0: {}, 1: {}}
        self.sessions: list[tuple[CacheSession, tuple[int, Tokens] | None, set[int]]] = []
        self.hits = self.misses = self.evictions = 0

    def free(self) -> int:
        cached = {value for pages in self.naive.roots.values() for value, _ in pages.values()}
        return self.cache.capacity - len(cached.union(*(held for *_, held in self.sessions)))

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def prepare(self, root: int, tokens: Tokens) -> None:
        session = self.cache.open_session(tokens, namespace="ab"[root])
        blocks = self.naive.values(root, tokens)
        matched = tokens[: len(blocks) * SIZE]
        assert session.block_indices == blocks
        if self.naive.match(root, tokens) > len(matched):
            assert session.tail_block in self.naive.donors(root, tokens)
        else:
            assert session.tail_block == -1
        self.hits += len(blocks)
        self.misses += len(blocks) < len(tokens) // SIZE
        if blocks:
            self.naive.touch(root, matched)
            self.naive.pins.append((root, matched))
        held = {*blocks, session.tail_block} - {-1}
        self.sessions.append((session, (root, matched) if blocks else None, held))

    @precondition(lambda self: self.sessions)
    @rule(i=st.integers(0, 9), drop=st.booleans())
    def release(self, i: int, drop: bool) -> None:
        session, pin, _ = self.sessions.pop(i % len(self.sessions))
        if pin in self.naive.pins:
            self.naive.pins.remove(pin)
        if not drop:
            self.cache.close_session(session)

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def store(self, root: int, tokens: Tokens) -> None:
        tokens = tokens[: len(tokens) // SIZE * SIZE]
        ends = range(SIZE, len(tokens) + 1, SIZE)
        name = "ab"[root]
        cached = self.cache.store(tokens, 0, [rows_of(name, tokens[:end]) for end in ends], namespace=name)
        if not tokens:
            return
        old = tokens[: len(self.naive.values(root, tokens)) * SIZE]
        if old:
            self.naive.touch(root, old)
        self.naive.pins.append((root, old))
        wanted = (len(tokens) - len(old)) // SIZE
        while (room := min(self.cache.capacity - self.num_cached(), self.free())) < wanted:
            if not self.naive.evict(1):
                break
            self.evictions += 1
        self.naive.pins.pop()
        room = min(room, wanted)
        assert cached == len(old) // SIZE + room
        if room:
            blocks = self.cache._index.find(np.array(tokens, np.uint32), name).pages.tolist()
            assert len(blocks) == cached
            self.naive.insert(root, tokens[: cached * SIZE], blocks)

    def num_cached(self) -> int:
        return sum(map(len, self.naive.roots.values()))

    @precondition(lambda self: self.num_cached() > 5)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.naive.roots = {0: {}, 1: {}}
        self.naive.pins.clear()
        self.sessions = [(session, None, held) for session, _, held in self.sessions]

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def lookup(self, root: int, tokens: Tokens) -> None:
        _, blocks = self.cache.lookup(tokens, namespace="ab"[root])
        assert [b.index for b in blocks] == self.naive.values(root, tokens)
        self.hits += len(blocks)
        self.misses += len(blocks) < len(tokens) // SIZE
        for i, block in enumerate(blocks):
            keys, values = rows_of("ab"[root], tokens[: (i + 1) * SIZE])
            np.testing.assert_array_equal(block.keys, keys)
            np.testing.assert_array_equal(block.values, values)
            assert tuple(block.token_ids) == tokens[i * SIZE : (i + 1) * SIZE]
        for block in blocks[::-1] if len(tokens) % 2 else blocks:
            self.cache.release(block.index)
        if blocks:
            self.naive.touch(root, tokens[: len(blocks) * SIZE])

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert len(self.cache) == self.num_cached()
        stats = self.cache.stats()
        assert (stats.total_hits, stats.total_misses) == (self.hits, self.misses)
        assert stats.total_evictions == self.evictions


TestBlocksMachine = BlocksMachine.TestCase
TestBlocksMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_held_block_that_is_cached_again_is_readable() -> None:
    paged = PagedKvCache(8, 4, 1, 8, dtype="f32")
    cache, text = PrefixCache.over(paged), list(range(8))
    paged.allocate(1, 8)
    paged.write(0, 1, *np.arange(128, dtype=np.float32).reshape(2, 8, 1, 8))
    blocks = paged.block_table([1]).indices
    cache.adopt(text, blocks)
    with cache.lookup(text) as found:
        want = [block.keys[0].tolist() for block in found]
        cache.clear()
        cache.adopt(text, blocks)
        assert [block.keys[0].tolist() for block in found] == want
        cache.check()

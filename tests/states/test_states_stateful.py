"""`PrefixKvCache` against its naive twin over random histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.trie import NaivePrefixKv, Tokens
from prefix_states import PAIRS, assert_same, head_bytes, round_trip

from kvcache.errors import OutOfMemoryError
from kvcache.states.cached_state import CachedKvState
from kvcache.states.prefix_config import PrefixCacheConfig
from kvcache.states.prefix_kv_cache import PrefixKvCache

TEXT = st.lists(st.integers(0, 2), max_size=9).map(tuple)
KV_DIM, LAYERS = 32, 2


def kv_of(root: int, tokens: Tokens) -> CachedKvState:
    """KV that depends on the whole text before each token, as it does in a model."""
    numbers = [int("1" + "".join(map(str, tokens[:n])), 4) + root * 10**6 for n in range(1, len(tokens) + 1)]
    keys = np.sin(np.add.outer(numbers, np.arange(KV_DIM))).astype(np.float32).reshape(-1)
    return CachedKvState([keys, keys + 1], [-keys, -keys - 1], len(tokens))


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        entries=st.integers(1, 5), tokens=st.integers(4, 30), shortest=st.integers(0, 3), partial=st.booleans(),
        formats=st.sampled_from(PAIRS), head_dim=st.sampled_from([8, 32]),
    )
    def start(
        self, entries: int, tokens: int, shortest: int, partial: bool, formats: tuple[str, str], head_dim: int
    ) -> None:
        self.formats, self.head_dim = formats, head_dim
        self.slot_bytes = LAYERS * KV_DIM // head_dim * sum(head_bytes(name, head_dim) for name in formats)
        limits = PrefixCacheConfig(
            entries, tokens * self.slot_bytes + 7, shortest, partial,
            key_dtype=formats[0], value_dtype=formats[1], head_dim=head_dim,
        )
        self.cache = PrefixKvCache(limits)
        self.naive = NaivePrefixKv(entries, tokens, shortest, partial)
        self.states: list[tuple[CachedKvState, CachedKvState]] = []  # as held, and as it must be

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def store(self, root: int, tokens: Tokens) -> None:
        if self.naive.store(root, tokens):
            self.cache.store_snapshot(tokens, kv_of(root, tokens), namespace=root)
        else:
            with pytest.raises(OutOfMemoryError):
                self.cache.store_snapshot(tokens, kv_of(root, tokens), namespace=root)

    @rule(root=st.integers(0, 1), tokens=TEXT, hold=st.booleans())
    def lookup(self, root: int, tokens: Tokens, hold: bool) -> None:
        length = self.naive.lookup(root, tokens)
        hit = self.cache.lookup(tokens, namespace=root)
        assert (hit[0] if hit else 0) == length
        if hit and hold:
            expected = round_trip(kv_of(root, tokens[:length]), self.head_dim, *self.formats)
            self.states.append((hit[1], expected))
            self.naive.held.append(set(self.naive.slots(root, tokens[:length])))

    @precondition(lambda self: self.states)
    @rule(i=st.integers(0, 9))
    def let_go(self, i: int) -> None:
        i %= len(self.states)
        del self.states[i], self.naive.held[i]

    @rule(root=st.integers(0, 1), tokens=TEXT)
    def remove(self, root: int, tokens: Tokens) -> None:
        assert self.cache.remove(tokens, namespace=root) == self.naive.remove(root, tokens)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert len(self.cache) == self.naive.num_entries()
        assert self.cache.memory_usage == self.naive.num_used() * self.slot_bytes
        for held, expected in self.states:
            assert_same(held, expected)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

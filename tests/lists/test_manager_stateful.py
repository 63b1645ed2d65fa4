"""CacheManager compared with a naive manager: the entries, their order, scores and rows."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles.manager import NaiveCacheManager, pyramid

from kvcache import CacheManager, EvictionPolicy, KVCacheConfig
from kvcache.eviction import pyramid_budgets

WIDTH = 8
POLICIES = st.one_of(
    st.tuples(st.just("H2O"), st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 1.0])),
    st.tuples(st.just("SlidingWindow"), st.integers(1, 9), st.integers(0, 6)),
    st.tuples(st.just("PyramidKV"), st.just(3), st.sampled_from([0.0, 0.5, 0.9])),
)
LAYERS = st.sampled_from([0, 0, 0, 1, 2])
SCORES = st.sampled_from([0.0, 0.25, 1.0, 3.0, -1.0])


class Pair:
    """The manager and the naive one, with the same rows; every row contains its number."""

    def __init__(self, max_seq_len, policy):
        make = getattr(EvictionPolicy, policy[0])
        self.real = CacheManager(KVCacheConfig(max_seq_len, 1, WIDTH, 8, make(*policy[1:])))
        self.naive = NaiveCacheManager(max_seq_len, policy)
        self.stamp = 0

    def append(self, count, layer):
        # 1 at one end and a whole number at the other: with 8 bits both are exact to f16.
        stamps = np.arange(self.stamp, self.stamp + count) % 2000
        self.stamp += count
        keys = np.repeat(stamps[:, None], WIDTH, 1).astype(np.float32)
        self.real.append(keys, -keys, layer)
        self.naive.append(list(stamps), list(-stamps), layer)

    def agree(self):
        real, naive = self.real, self.naive
        real.check()
        assert len(real) == len(naive.entries()) <= naive.max_seq_len
        assert real.layers == tuple(sorted(naive.layers))
        for layer in range(3):
            entries = naive.entries(layer)
            assert real.positions(layer).tolist() == [e.position for e in entries]
            assert real.attention_scores(layer).tolist() == [e.score for e in entries]
            keys, values = real.get(range(len(entries)), layer)
            want = np.array([e.key for e in entries], np.float32).reshape(-1, 1)
            np.testing.assert_allclose(keys, np.repeat(want, WIDTH, 1), rtol=1e-3)
            np.testing.assert_allclose(values, -np.repeat(want, WIDTH, 1), rtol=1e-3)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(max_seq_len=st.integers(1, 40), policy=POLICIES)
    def start(self, max_seq_len, policy):
        self.pair = Pair(max_seq_len, policy)

    @rule(count=st.one_of(st.integers(0, 3), st.integers(0, 60)), layer=LAYERS)
    def append(self, count, layer):
        self.pair.append(count, layer)

    @rule(budget=st.integers(0, 45), layer=st.one_of(st.none(), LAYERS))
    def evict(self, budget, layer):
        before = len(self.pair.real)
        gone = self.pair.real.evict(budget, layer)
        self.pair.naive.evict(budget, layer)
        assert gone == before - len(self.pair.real)
        assert len(self.pair.real if layer is None else self.pair.real.positions(layer)) <= budget

    @rule(layer=st.one_of(st.none(), LAYERS), data=st.data())
    def score(self, layer, data):
        n = len(self.pair.naive.entries(layer))
        scores = data.draw(st.lists(SCORES, min_size=n, max_size=n))
        self.pair.real.update_attention_scores(scores, layer)
        self.pair.naive.add_scores(scores, layer)

    @rule(data=st.data())
    def get(self, data):
        entries = self.pair.naive.entries()
        if entries:
            wanted = data.draw(st.lists(st.integers(0, len(entries) - 1), max_size=6))
            keys, _ = self.pair.real.get(wanted)
            np.testing.assert_allclose(keys[:, 0], [entries[i].key for i in wanted], rtol=1e-3)

    @invariant()
    def agree(self):
        if hasattr(self, "pair"):
            self.pair.agree()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", [("H2O", 0.5), ("SlidingWindow", 150, 7), ("PyramidKV", 3, 0.25)])
def test_long_histories(policy):
    draw = random.Random(str(policy))
    pair = Pair(200, policy)
    for step in range(1200):
        layer = draw.choice([0, 0, 1, 2])
        kind = draw.random()
        if kind < 0.55:
            pair.append(draw.choice([1, 1, 1, 2, 40]), layer)
        elif kind < 0.95:
            scores = [draw.choice([0.0, 0.5, 1.0, draw.random()]) for _ in pair.naive.entries(layer)]
            pair.real.update_attention_scores(scores, layer)
            pair.naive.add_scores(scores, layer)
        else:
            budget = draw.randint(0, 220)
            layer = draw.choice([None, 0, 1])
            pair.real.evict(budget, layer)
            pair.naive.evict(budget, layer)
        if step % 20 == 0:
            pair.agree()
    pair.agree()


def test_pyramids_agree():
    for layers in range(1, 40):
        for budget in (0, 1, 2, 5, 17, 40, 100, 333, 1024):
            assert list(pyramid_budgets(budget, layers)) == pyramid(budget, layers)

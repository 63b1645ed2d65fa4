"""The sequences that a `PagedKvCache` evicts under each strategy."""

import pytest
from small_paged import cache

from kvcache import EvictionStrategy, PagedKvCache
from kvcache.errors import InvalidOperationError


def test_lru_takes_the_longest_idle():
    c = cache()
    for i in (1, 2, 3):
        c.allocate(i, 16)
    assert c.select_eviction_target() == 1
    c.append(1, 1)
    assert [c.evict(), c.evict(), c.evict()] == [2, 3, 1]
    assert c.select_eviction_target() is None


def test_reading_counts_as_an_access():
    c = PagedKvCache(8, 16, 2, 8)
    c.allocate(1, 4)
    c.allocate(2, 4)
    c.read(0, 1)
    assert c.select_eviction_target() == 2


def test_lfu_takes_the_least_used():
    c = cache().with_eviction_strategy(EvictionStrategy.LFU())
    for i in (1, 2, 3):
        c.allocate(i, 16)
    for _ in range(5):
        c.append(1, 1)
    c.append(3, 1)
    assert c.select_eviction_target() == 2


def test_longest_first():
    c = cache(eviction_strategy=EvictionStrategy.LongestFirst())
    for i, n in ((1, 16), (2, 64), (3, 32)):
        c.allocate(i, n)
    assert c.select_eviction_target() == 2


def test_priority_and_ties():
    c = cache(eviction_strategy=EvictionStrategy.Priority(3))
    for i in (5, 4, 6):
        c.allocate(i, 16)
    assert c.select_eviction_target() == 4
    c.set_priority(4, 2)
    c.set_priority(5, 1)
    assert [c.evict(), c.evict(), c.evict()] == [6, 5, 4]
    c.allocate(1, 16)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="priority"):
            c.set_priority(1, wrong)


def test_pinned_sequences_stay():
    c = cache()
    c.allocate(1, 16)
    c.allocate(2, 16)
    c.pin(1)
    c.pin(1)
    c.unpin(1)
    assert c.evict_to_threshold(0.0) == [2]
    assert c.sequence_ids() == [1]
    with pytest.raises(InvalidOperationError):
        c.evict()
    c.unpin(1)
    assert c.evict() == 1
    c.allocate(3, 1)
    with pytest.raises(InvalidOperationError):
        c.unpin(3)


def test_evict_to_threshold():
    c = cache(10, eviction_threshold=0.8)
    for i in range(9):
        c.allocate(i, 16)
    assert c.needs_eviction
    assert c.evict_to_threshold(0.5) == [0, 1, 2, 3]
    assert c.utilization == 0.5
    assert not c.needs_eviction
    for i in range(100, 103):
        c.allocate(i, 16)
    assert c.evict_to_threshold(0.5) == [4, 5, 6]
    assert c.evict_to_threshold(-1.0) == [7, 8, 100, 101, 102]
    assert c.num_sequences == 0
    half = cache(10, eviction_threshold=0.9)
    half.allocate(0, 80)
    assert not half.needs_eviction
    assert cache(10, eviction_threshold=0.0).needs_eviction
    assert cache(10).with_eviction_threshold(7).eviction_threshold == 1.0
    with pytest.raises(ValueError, match="nan"):
        c.evict_to_threshold(float("nan"))


def test_evict_to_threshold_passes_over_what_frees_nothing():
    c = cache(10)
    c.allocate(0, 80)
    for fork in (1, 2, 3, 4):
        c.fork(0, fork)
    c.allocate(9, 80)
    assert c.evict_to_threshold(0.5) == [9]
    assert c.evict_to_threshold(0.4) == [0, 1, 2, 3, 4]  # nothing else is left


def test_strategies_as_text():
    texts = {
        "LRU": EvictionStrategy.LRU(),
        "LFU": EvictionStrategy.LFU(),
        "LongestFirst": EvictionStrategy.LongestFirst(),
        "Priority(4)": EvictionStrategy.Priority(4),
        "StreamingLLM(sink=4, window=512)": EvictionStrategy.StreamingLLM(4, 512),
    }
    for text, strategy in texts.items():
        assert str(strategy) == text
        assert text in str(cache(eviction_strategy=strategy))
        assert text in repr(cache(eviction_strategy=strategy))
    assert EvictionStrategy.Priority(4) == EvictionStrategy.Priority(4) != EvictionStrategy.Priority(5)

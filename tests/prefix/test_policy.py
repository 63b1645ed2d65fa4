"""The order of eviction of a `PrefixCache` under each policy; `test_index_stateful.py` has a naive model."""

import numpy as np
import pytest

from kvcache import PagedKvCache, PrefixCache
from kvcache.trie.policy import LFU, LRU

SIZE = 4
ROW = [np.zeros(SIZE * 8, np.float32)]


def put(cache, token):
    cache.insert([token] * SIZE, 0, ROW, ROW)


def use(cache, token):
    with cache.open_session([token] * SIZE) as session:
        return not session.is_empty


def served(cache):
    return {token for token in range(10) if cache._index.find([token] * SIZE).length}


@pytest.mark.parametrize("policy", [None, LRU(), LFU(0)])
def test_the_least_recently_used_leaves_by_default(policy):
    cache = PrefixCache(2, SIZE, 1, 1, 8, policy=policy)
    put(cache, 1)
    for _ in range(5):
        use(cache, 1)
    put(cache, 2)
    put(cache, 3)
    assert served(cache) == {2, 3}


def test_what_was_used_often_stays_for_a_while():
    cache = PrefixCache(2, SIZE, 1, 1, 8, policy=LFU(10))
    put(cache, 1)
    for _ in range(3):
        use(cache, 1)
    put(cache, 2)
    put(cache, 3)
    assert served(cache) == {1, 3}
    for _ in range(50):  # uses of other texts: the uses of 1 lose their weight
        use(cache, 3)
    put(cache, 4)
    assert served(cache) == {3, 4}
    cache.check()


def test_a_policy_outlives_clear():
    cache = PrefixCache.over(PagedKvCache(3, SIZE, 1, 8, dtype="f32"), 2, LFU(10))
    cache.clear()
    assert cache._index.trie.table.policy.age == 10


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="policy"):
        PrefixCache(2, SIZE, 1, 1, 8, policy="lfu")
    with pytest.raises(ValueError, match="age: expected an int >= 0, got -1"):
        LFU(-1)

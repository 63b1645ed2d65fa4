"""`PrefixKvCache`: the documented cases, and a state machine against sets of whole keys."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from prefix_states import config, matched, state

from kvcache.errors import OutOfMemoryError
from kvcache.states.kv_cache import KvCache
from kvcache.states.prefix_config import PrefixCacheConfig
from kvcache.states.prefix_kv_cache import PrefixKvCache


def live_cache(num_layers: int, kv_dim: int, num_tokens: int) -> KvCache:
    """The documented fixture: key[d] = layer * 1000 + t + 0.01 d, value[d] the same with 0.02."""
    cache = KvCache(num_layers, 128, kv_dim)
    d = np.arange(kv_dim)
    for t in range(num_tokens):
        for layer in range(num_layers):
            cache.store_kv(layer, layer * 1000.0 + t + 0.01 * d, layer * 1000.0 + t + 0.02 * d)
        cache.advance()
    return cache


def stored(num_tokens: int = 5, **changes: object) -> PrefixKvCache:
    cache = PrefixKvCache(config(**changes))
    cache.store(range(num_tokens), live_cache(2, 4, num_tokens), num_tokens, 4, 2)
    return cache


# ---------------------------------------------------------------------- the documented cases


def test_case_1_and_2_a_stored_prompt_and_a_longer_one() -> None:
    cache = stored()
    assert len(cache) == 1
    assert matched(cache, list(range(5))) == 5
    assert matched(cache, list(range(10))) == 5


def test_case_3_4_and_5_nothing_to_find() -> None:
    assert matched(stored(), [100, 200, 300]) is None
    cache = PrefixKvCache(config())
    assert matched(cache, [1, 2, 3]) is None
    assert matched(cache, []) is None
    assert cache.misses == 2


@pytest.mark.parametrize("partial", [False, True])
def test_case_6_a_fork(partial: bool) -> None:
    cache = PrefixKvCache(config(partial_matches=partial))
    cache.store_snapshot([0, 1, 2, 3, 4], state(5))
    cache.store_snapshot([0, 1, 2, 10, 11], state(5))
    assert len(cache) == 2
    assert matched(cache, [0, 1, 2, 3, 4]) == 5
    assert matched(cache, [0, 1, 2, 10, 11]) == 5
    assert matched(cache, [0, 1, 2]) == (3 if partial else None)


def test_case_7_and_8_limits() -> None:
    cache = PrefixKvCache(config(max_entries=2))
    for i in range(3):
        cache.store_snapshot([i, i], state(2))
    assert len(cache) == 2
    cache = PrefixKvCache(config(max_memory_bytes=64))
    for i in range(5):
        cache.store_snapshot([i, i], state(2))
        assert cache.memory_usage <= 64
    assert len(cache) == 2


def test_case_9_clear_resets() -> None:
    cache = stored()
    cache.lookup(range(5))
    cache.clear()
    assert cache.is_empty
    assert (len(cache), cache.memory_usage, cache.hits, cache.misses, cache.hit_tokens) == (0, 0, 0, 0, 0)


def test_case_10_restore() -> None:
    cache, source, target = stored(), live_cache(2, 4, 5), KvCache(2, 128, 4)
    hit = cache.lookup(range(5))
    assert hit is not None
    PrefixKvCache.restore(hit[1], target)
    assert target.seq_len == 5
    for layer in range(2):
        np.testing.assert_array_equal(target.get_keys(layer), source.get_keys(layer))
        np.testing.assert_array_equal(target.get_values(layer), source.get_values(layer))


def test_case_11_memory_is_the_floats_held() -> None:
    cache = PrefixKvCache(config())
    assert cache.memory_usage == 0
    cache.store_snapshot([1, 2], state(2, kv_dim=4))
    assert cache.memory_usage == 64


def test_case_12_counters() -> None:
    cache = PrefixKvCache(config())
    assert (cache.hits, cache.misses) == (0, 0)
    cache.lookup([1, 2])
    cache.store_snapshot([1, 2], state(2))
    cache.lookup([1, 2])
    assert (cache.hits, cache.misses) == (1, 1)
    cache.lookup([99, 100])
    assert (cache.hits, cache.misses) == (1, 2)


@pytest.mark.parametrize("partial", [False, True])
def test_case_13_and_14_short_prefixes(partial: bool) -> None:
    cache = PrefixKvCache(config(min_prefix_len=5, partial_matches=partial))
    cache.store_snapshot([1, 2, 3], state(3))
    assert cache.is_empty
    cache.store_snapshot(range(10), state(10))
    assert len(cache) == 1
    assert matched(cache, [0, 1, 2]) is None
    assert matched(cache, [0, 1, 2, 3, 4, 99]) == (5 if partial else None)


def test_case_15_and_17_contents() -> None:
    cache = PrefixKvCache(config())
    assert cache.is_empty
    cache.store_snapshot([1, 2, 3, 4], state(4, 1.0))
    assert not cache.is_empty
    cache.store_snapshot([1, 2, 5, 6], state(4, 3.0))
    assert len(cache) == 2
    for tokens, first, last in (([1, 2, 3, 4], 1.0, 1.0), ([1, 2, 5, 6], 1.0, 3.0)):
        hit = cache.lookup(tokens)
        assert hit is not None
        assert hit[0] == 4
        # KV is a function of the tokens: the shared first rows are those stored first.
        assert (hit[1].keys[0][0], hit[1].keys[0][-1]) == (first, last)


@pytest.mark.parametrize(
    ("stored_key", "asked", "common"),
    [
        ([], [], 0),
        ([1, 2, 3], [], 0),
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [4, 5, 6], 0),
        ([1, 2], [1, 2, 3, 4], 2),
    ],
)
def test_case_16_common_prefixes(stored_key: list[int], asked: list[int], common: int) -> None:
    cache = PrefixKvCache(config())
    cache.store_snapshot(stored_key, state(len(stored_key)))
    assert matched(cache, asked) == (common or None)


def test_exact_lru() -> None:
    cache = PrefixKvCache(config(max_entries=2))
    for tokens in ([1, 1], [2, 2]):
        cache.store_snapshot(tokens, state(2))
    cache.lookup([1, 1])
    cache.store_snapshot([3, 3], state(2))
    assert [matched(cache, t) for t in ([1, 1], [2, 2], [3, 3])] == [2, None, 2]


def test_nested_keys() -> None:
    cache = PrefixKvCache(config(partial_matches=False))
    cache.store_snapshot([1, 2, 3], state(3))
    cache.store_snapshot(range(1, 9), state(8))
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == 3
    assert matched(cache, list(range(1, 9))) == 8
    cache.store_snapshot([1, 2, 3], state(3))
    assert len(cache) == 2


def test_defaults() -> None:
    cache = PrefixKvCache()
    cache.store_snapshot([1, 2, 3], state(3))
    assert cache.is_empty
    cache.store_snapshot([1, 2, 3, 4], state(4))
    assert matched(cache, [1, 2, 3, 4]) == 4
    assert cache.config == PrefixCacheConfig(256, 536_870_912, 4, True, "f32")


# ---------------------------------------------------------------------- what it does better


def test_shared_prefixes_are_stored_once() -> None:
    cache = PrefixKvCache(config())
    system = list(range(1000, 1100))
    for user in range(20):
        cache.store_snapshot([*system, user, user], state(102))
    assert cache.memory_usage == (100 + 20 * 2) * 16
    assert matched(cache, [*system, 77]) == 100
    assert cache.stats().hit_tokens == cache.hit_tokens == 100
    assert (cache.lookup_tokens, cache.hit_rate, cache.stats().hit_rate) == (101, 100 / 101, 100 / 101)


def test_what_can_never_fit_is_refused_and_evicts_nothing() -> None:
    cache = PrefixKvCache(config(max_memory_bytes=64))
    cache.store_snapshot([1, 2], state(2))
    cache.store_snapshot([3, 4], state(2))
    with pytest.raises(OutOfMemoryError) as caught:
        cache.store_snapshot(range(10, 15), state(5))
    assert (caught.value.requested, caught.value.available, caught.value.unit) == (80, 64, "bytes")
    assert len(cache) == 2
    with pytest.raises(OutOfMemoryError):
        PrefixKvCache(config(max_entries=0)).store_snapshot([1], state(1))


def test_a_held_state_stays_valid_and_counts_until_it_is_let_go() -> None:
    cache = PrefixKvCache(config(max_memory_bytes=64))
    cache.store_snapshot([1, 2], state(2, 1.0))
    hit = cache.lookup([1, 2])
    assert hit is not None
    _, held = hit
    del hit
    cache.store_snapshot([3, 4], state(2, 2.0))
    cache.store_snapshot([5, 6], state(2, 3.0))  # a state holds the memory of [1, 2]: [3, 4] is evicted too
    cache.check()
    assert (len(cache), cache.memory_usage) == (1, 64)
    with pytest.raises(OutOfMemoryError) as caught:
        cache.store_snapshot([7, 8, 9], state(3))
    assert caught.value.available == 32
    assert len(cache) == 1
    rows = held.keys[0]
    assert rows.tolist() == [1.0] * 4
    del held
    gc.collect()
    assert cache.memory_usage == 64  # the rows are a view, which keeps its slots
    assert rows.tolist() == [1.0] * 4
    del rows
    assert cache.memory_usage == 32
    cache.store_snapshot([7, 8], state(2))
    cache.check()
    assert len(cache) == 2


def test_rows_are_read_only() -> None:
    hit = stored().lookup(range(5))
    assert hit is not None
    with pytest.raises(ValueError, match="read-only"):
        hit[1].keys[0][0] = 7


def test_namespaces_never_share() -> None:
    cache = PrefixKvCache(config())
    cache.store_snapshot([1, 2, 3], state(3, 1.0), namespace=("model", "a"))
    assert cache.lookup([1, 2, 3]) is None
    assert cache.lookup([1, 2, 3], namespace="modela") is None
    cache.store_snapshot([1, 2, 3], state(3, 2.0, kv_dim=4, num_layers=3))
    hit = cache.lookup([1, 2, 3])
    assert hit is not None
    assert (hit[1].kv_dim, hit[1].num_layers, hit[1].values[2][0]) == (4, 3, 2.0)
    again = cache.lookup([1, 2, 3], namespace=("model", "a"))
    assert again is not None
    assert again[1].keys[0][0] == 1.0
    assert cache.remove([1, 2, 3], namespace=("model", "a"))
    assert cache.lookup([1, 2, 3], namespace=("model", "a")) is None
    assert len(cache) == 1
    cache.check()


def test_remove() -> None:
    cache = PrefixKvCache(config())
    cache.store_snapshot([1, 2, 3], state(3))
    cache.store_snapshot([1, 2], state(2))
    assert not cache.remove([1])
    assert not cache.remove([])
    assert cache.remove([1, 2, 3])
    assert cache.memory_usage == 2 * 16
    assert cache.remove([1, 2])
    assert not cache.remove([1, 2])
    assert cache.memory_usage == 0
    cache.check()


def test_half_precision_takes_half_the_memory() -> None:
    cache = PrefixKvCache(config(dtype="f16"))
    cache.store_snapshot([1, 2], state(2, 0.1, kv_dim=4))
    assert cache.memory_usage == 32
    hit = cache.lookup([1, 2])
    assert hit is not None
    assert hit[1].keys[0].dtype == np.float32
    assert hit[1].keys[0][0] == np.float32(np.float16(0.1))
    with pytest.raises(ValueError, match="finite"):
        cache.store_snapshot([3], state(1, 1e6, kv_dim=4))


def test_bad_snapshots_change_nothing() -> None:
    cache = stored()
    for tokens, snapshot in [
        ([7, 8], state(3)),
        ([7, 8], state(2, np.nan)),
        ([7, 8], state(2, np.inf)),
        ([7, 8], state(2, kv_dim=3)),
        ([7, 2**32], state(2)),
    ]:
        with pytest.raises(ValueError, match="expected"):
            cache.store_snapshot(tokens, snapshot)
    with pytest.raises(ValueError, match="expected 24 floats"):
        cache.store(range(6), live_cache(2, 4, 5), 6, 4, 2)
    with pytest.raises(IndexError):
        cache.store(range(5), live_cache(2, 4, 5), 5, 4, 3)
    cache.check()
    assert len(cache) == 1


def test_restore_refuses_what_does_not_fit() -> None:
    hit = stored().lookup(range(5))
    assert hit is not None
    for target in (KvCache(2, 128, 3), KvCache(1, 128, 4), KvCache(2, 4, 4)):
        with pytest.raises(ValueError, match="expected"):
            PrefixKvCache.restore(hit[1], target)
        assert target.seq_len == 0

"""`KvCache`, `KvCacheAccess` and `CachedKvState`."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.handle import Device, KvCacheHandle
from kvcache.states.cached_state import CachedKvState
from kvcache.states.kv_cache import KvCache
from kvcache.states.kv_cache_access import KvCacheAccess


def written(num_tokens: int, num_layers: int = 2, kv_dim: int = 2) -> KvCache:
    cache = KvCache(num_layers, 8, kv_dim)
    for t in range(num_tokens):
        for layer in range(num_layers):
            row = np.array([t + 10 * layer + 0.5 * d for d in range(kv_dim)])
            cache.store_kv(layer, row, -row)
        cache.advance()
    return cache


def test_new() -> None:
    cache = KvCache(8, 512, 128)
    assert (cache.seq_len, cache.num_layers, cache.max_seq_len, cache.kv_dim) == (0, 8, 512, 128)
    assert isinstance(cache, KvCacheHandle)
    assert isinstance(cache, KvCacheAccess)


def test_advance_saturates() -> None:
    cache = KvCache(1, 3, 2)
    cache.advance()
    cache.advance()
    assert cache.seq_len == 2
    for _ in range(6):
        cache.advance()
    assert cache.seq_len == 3
    with pytest.raises(OutOfMemoryError) as caught:
        cache.store_kv(0, np.zeros(2), np.zeros(2))
    assert caught.value.unit == "tokens"


def test_rows_come_back() -> None:
    cache = written(3)
    assert cache.get_keys(0).tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert cache.get_values(1).tolist() == [-10, -10.5, -11, -11.5, -12, -12.5]
    cache.store_kv(0, [7.0, 7.0], [8.0, 8.0])
    assert cache.seq_len == 3
    assert len(cache.get_keys(0)) == 8
    cache.clear()
    assert cache.seq_len == 0
    assert len(cache.get_keys(0)) == 0


def test_layers_out_of_range() -> None:
    cache = written(1)
    for call in (
        lambda: cache.store_kv(99, [0.0] * 2, [0.0] * 2),
        lambda: cache.get_keys(99),
        lambda: cache.get_values(-1),
    ):
        with pytest.raises(IndexError, match="layer: expected"):
            call()


def test_rows_are_visited_in_order() -> None:
    seen: list[tuple[int, list[float]]] = []
    cache = written(4)
    cache.for_each_key(0, lambda position, row: seen.append((position, row.tolist())))
    assert [p for p, _ in seen] == [0, 1, 2, 3]
    assert {len(row) for _, row in seen} == {2}
    assert seen[2][1] == [2, 2.5]
    cache.for_each_value(1, lambda position, row: seen.append((position, row.tolist())))
    assert len(seen) == 8


def test_an_implementation_without_kv_dim() -> None:
    class Bare(KvCacheAccess):
        pass

    visited: list[int] = []
    assert Bare().kv_dim == 0
    with pytest.raises(InvalidOperationError, match="kv_dim"):
        Bare().for_each_key(0, lambda position, row: visited.append(position))
    assert visited == []


def test_layers_are_apart() -> None:
    cache = written(2)
    cache.store_kv(0, [9.0, 9.0], [8.0, 8.0])
    cache.advance()
    assert cache.get_keys(0).tolist() == [0, 0.5, 1, 1.5, 9, 9]
    assert cache.get_keys(1).tolist() == [10, 10.5, 11, 11.5, 0, 0]
    cache.check()


def test_bad_rows_change_nothing() -> None:
    cache = written(2)
    for bad in ([np.nan, 0.0], [0.0, np.inf], [0.0], [1, 2]):
        for pair in ((bad, [0.0, 0.0]), ([0.0, 0.0], bad)):
            with pytest.raises((ValueError, TypeError), match="expected"):
                cache.store_kv(0, *pair)
    with pytest.raises(ValueError, match="finite"):
        cache.restore_from_snapshot([[1.0] * 2, [np.nan] * 2], [[1.0] * 2] * 2, 1)
    assert len(cache.get_keys(0)) == 4
    assert cache.get_keys(0).tolist() == [0, 0.5, 1, 1.5]
    cache.check()


def test_memory_and_utilization() -> None:
    assert KvCache(36, 4096, 8 * 128, num_heads=8).stats().memory_bytes == 36 * 8 * 4096 * 128 * 4 * 2
    cache = KvCache(1, 10, 2)
    for _ in range(3):
        cache.advance()
    assert cache.stats().utilization == pytest.approx(0.3)


def test_restoring_from_its_own_rows() -> None:
    """Rows of the cache itself are read before any of them is written."""
    cache = written(4)
    layers = range(cache.num_layers)
    keys, values = [cache.get_keys(i) for i in layers], [cache.get_values(i) for i in layers]
    expected = [rows.copy() for rows in (*values[::-1], *keys[::-1])]
    cache.restore_from_snapshot(values[::-1], keys[::-1], 4)
    found = [*(cache.get_keys(i) for i in layers), *(cache.get_values(i) for i in layers)]
    for rows, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(rows, want)


def test_check_names_what_is_broken() -> None:
    cache = written(2)
    cache.check()
    cache._writes.lengths = (3, 2)
    with pytest.raises(AssertionError, match="committed"):
        cache.check()


def test_truncate_never_extends() -> None:
    cache = written(4)
    cache.truncate(9)
    assert cache.seq_len == 4
    cache.truncate(2)
    assert len(cache.get_keys(0)) == 4
    with pytest.raises(ValueError, match=">= 0"):
        cache.truncate(-1)


def test_snapshot_and_restore() -> None:
    cache, other = written(3), KvCache(2, 5, 2)
    state = cache.snapshot()
    assert (state.seq_len, state.num_layers, state.kv_dim) == (3, 2, 2)
    other.restore_from_snapshot(state.keys, state.values, state.seq_len)
    assert other.get_values(1).tolist() == cache.get_values(1).tolist()
    with pytest.raises(ValueError, match="expected"):
        other.restore_from_snapshot(state.keys, state.values, 2)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        other.restore_from_snapshot(state.keys, state.values, 6)
    assert other.seq_len == 3


def test_the_handle_members() -> None:
    cache = KvCache(2, 8, 4, num_heads=2)
    cache.store_kv(1, np.arange(4.0), np.ones(4))
    cache.advance()
    again = cache.clone_handle()
    cache.advance()
    assert again.seq_len == again.num_tokens == 2
    assert again.cache_id == cache.cache_id != KvCache(1, 1, 1).cache_id
    assert (again.num_heads, again.head_dim, again.device, again.is_valid) == (2, 2, Device.CPU, True)
    keys, values = again.kv_cache(1)
    assert keys is not None
    assert values is not None
    assert keys.shape == (2, 2, 2)
    assert keys[0].tolist() == [[0, 1], [2, 3]]
    assert not values.flags.writeable
    assert again.block_table.sequence_length == again.block_table_mut().sequence_length == 2
    assert again.as_any() is again
    table = cache.block_table_mut()
    cache.advance()
    assert (table.sequence_length, table.physical_blocks, table.free_tokens) == (3, [0], 5)
    table.extend_sequence(2)
    assert cache.seq_len == 5
    table.sequence_length = 2
    assert again.seq_len == 2
    with pytest.raises(OutOfMemoryError):
        table.sequence_length = 9
    cache.check()
    stats = again.stats()
    assert (stats.memory_bytes, stats.blocks_allocated, stats.tokens_stored, stats.utilization) == (512, 1, 2, 0.25)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, -2)])
def test_sizes_are_checked(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        KvCache(*sizes)
    with pytest.raises(ValueError, match="num_heads"):
        KvCache(1, 1, 4, num_heads=3)


def test_states_are_checked() -> None:
    row = np.zeros(4, np.float32)
    assert CachedKvState([row], [row], 2).kv_dim == 2
    assert CachedKvState([], [], 0).kv_dim == 0
    for keys, values, seq_len in (
        ([row], [], 2),
        ([row], [row[:2]], 2),
        ([row], [row], 3),
        ([row], [row], 0),
        ([], [], -1),
    ):
        with pytest.raises(ValueError, match="expected"):
            CachedKvState(keys, values, seq_len)
    with pytest.raises(TypeError, match="float"):
        CachedKvState([np.zeros(4, int)], [row], 2)

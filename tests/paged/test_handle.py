"""Handles: the data of their sequence, and errors once it has ended."""

import gc

import numpy as np
import pytest

from kvcache import BlockTable, Device, KvCacheHandle, PagedKvCache
from kvcache.errors import InvalidOperationError, OutOfMemoryError


def filled(n=10, **keywords):
    rng = np.random.default_rng(n)
    cache = PagedKvCache(8, 4, 2, 8, num_layers=2, dtype="f32", **keywords)
    cache.allocate(1, n)
    k = rng.standard_normal((n, 2, 8)).astype(np.float32)
    cache.write(1, 1, k, -k)
    return cache, k


# -- BlockTable ---------------------------------------------------------------------------------------------


def test_block_table_counts_partial_blocks():
    table = BlockTable(16)
    assert (table.num_blocks, table.sequence_length, table.free_tokens, table.has_free_space) == (0, 0, 0, False)
    table.add_blocks([42, 7])
    assert (table.physical_blocks, table.logical_to_physical) == ([42, 7], [0, 1])
    for length, free in ((0, 32), (8, 24), (17, 15), (32, 0)):
        table.sequence_length = length
        assert table.free_tokens == free
        assert table.has_free_space == (free > 0)
    table.sequence_length = 40
    assert table.free_tokens == 0
    one = BlockTable(16, [5], [0], 8)
    assert (one.has_free_space, one.free_tokens) == (True, 8)


def test_block_table_extends_all_or_nothing():
    table = BlockTable(16)
    table.extend_sequence(0)
    table.add_blocks([3])
    table.extend_sequence(16)
    with pytest.raises(InvalidOperationError, match="2 blocks"):
        table.extend_sequence(1)
    assert table.sequence_length == 16
    with pytest.raises(ValueError, match="-1"):
        table.extend_sequence(-1)
    assert [BlockTable.blocks_needed_for_length(n, 16) for n in (0, 16, 17)] == [0, 1, 2]
    with pytest.raises(ValueError, match="block_size"):
        BlockTable(0)


def test_thirteen_members_to_implement_and_two_that_follow():
    required = {
        "block_table", "block_table_mut", "as_any", "device", "num_layers", "num_heads", "head_dim", "key_cache",
        "value_cache", "clone_handle", "stats", "is_valid", "cache_id",
    }
    assert KvCacheHandle.__abstractmethods__ == required
    with pytest.raises(TypeError):
        KvCacheHandle()

    members = dict.fromkeys(required, property(lambda self: None))
    members["block_table"] = property(lambda self: BlockTable(4, [1], [0], 3))
    members["key_cache"] = members["value_cache"] = lambda self, layer: None
    own = type("Own", (KvCacheHandle,), members)()
    assert own.num_tokens == 3
    assert own.kv_cache(0) == (None, None)


def test_device():
    assert str(Device.CPU) == "cpu"
    assert not Device.CPU.is_gpu


# -- PagedKvCache.handle ------------------------------------------------------------------------------------


def test_a_handle_shows_the_sequence_as_it_is_now():
    cache, k = filled()
    handle = cache.handle(1)
    assert isinstance(handle, KvCacheHandle)
    assert (handle.num_layers, handle.num_heads, handle.head_dim, handle.device) == (2, 2, 8, Device.CPU)
    assert handle.is_valid
    assert handle.num_tokens == 10
    np.testing.assert_array_equal(handle.key_cache(1), k)
    np.testing.assert_array_equal(handle.value_cache(1), -k)
    np.testing.assert_array_equal(handle.kv_cache(1)[0], k)
    assert handle.block_table.physical_blocks == [0, 1, 2]
    assert handle.block_table_mut().sequence_length == 10
    assert handle.as_any() is handle
    stats = handle.stats()
    assert (stats.memory_bytes, stats.blocks_allocated, stats.tokens_stored) == (3 * cache.block_memory_bytes, 3, 10)
    assert stats.utilization == pytest.approx(10 / 12)
    cache.append(1, 5)
    assert handle.num_tokens == 15
    with pytest.raises(IndexError):
        handle.key_cache(2)


def test_the_live_table_is_the_sequence():
    cache, _ = filled()
    handle = cache.handle(1)
    table = handle.block_table_mut()
    assert isinstance(table, BlockTable)
    assert (table.sequence_length, table.physical_blocks, table.free_tokens) == (10, [0, 1, 2], 2)
    cache.append(1, 5)
    assert (table.sequence_length, table.num_blocks, table.logical_to_physical) == (15, 4, [0, 1, 2, 3])
    table.sequence_length = 20
    assert handle.num_tokens == cache.get_sequence(1).num_tokens == 20
    with pytest.raises(InvalidOperationError, match="6 blocks"):
        table.extend_sequence(1)  # like any table, only within its blocks
    table.sequence_length = 17
    table.extend_sequence(2)
    assert handle.num_tokens == 19
    for call in (lambda: setattr(table, "sequence_length", 99), lambda: table.add_blocks([7])):
        with pytest.raises((OutOfMemoryError, InvalidOperationError)):
            call()
    assert handle.num_tokens == 19
    with pytest.raises(ValueError, match="expected"):
        table.sequence_length = -1
    before = handle.block_table
    cache.free(1)
    assert before.sequence_length == 19  # `before` is a snapshot
    with pytest.raises(InvalidOperationError):
        table.num_blocks  # noqa: B018
    cache.check()


def test_a_clone_is_another_reference():
    cache, k = filled()
    clone = cache.handle(1).clone_handle()
    assert clone.cache_id == cache.handle(1).cache_id
    np.testing.assert_array_equal(clone.key_cache(1), k)
    cache.truncate(1, 3)
    assert clone.num_tokens == 3


@pytest.mark.parametrize("end", ["free", "evict"])
def test_a_handle_ends_with_its_sequence(end):
    cache, _ = filled()
    handle = cache.handle(1)
    cache.free(1) if end == "free" else cache.evict()
    cache.allocate(1, 10)  # another sequence with the same id
    assert not handle.is_valid
    assert "invalid" in repr(handle)
    for access in (
        lambda: handle.num_tokens,
        lambda: handle.block_table,
        lambda: handle.block_table_mut(),
        lambda: handle.key_cache(0),
        lambda: handle.value_cache(0),
        lambda: handle.kv_cache(0),
        lambda: handle.stats(),
        lambda: handle.clone_handle(),
    ):
        with pytest.raises(InvalidOperationError):
            access()
    assert cache.handle(1).cache_id != handle.cache_id


def test_an_evicted_sequence_is_gone_under_pressure_too():
    cache, _ = filled(32)
    handle = cache.handle(1)
    with pytest.raises(OutOfMemoryError):
        cache.allocate(2, 1)
    assert handle.is_valid
    cache.evict_to_threshold(0.0)
    cache.allocate(2, 32)
    assert not handle.is_valid


def test_a_handle_keeps_its_cache_alive():
    cache, k = filled()
    handle = cache.handle(1)
    del cache
    gc.collect()
    np.testing.assert_array_equal(handle.key_cache(1), k)

"""`PagedKvCache`: the documented behaviour, case by case."""

import pytest
from small_paged import cache

from kvcache import PagedKvCache
from kvcache.errors import InvalidOperationError, KvCacheError, OutOfMemoryError, SequenceNotFoundError

# -- accounting ---------------------------------------------------------------------------------------------


def test_a_new_cache_is_empty():
    c = cache(1024)
    assert (c.total_blocks, c.block_size, c.free_block_count, c.used_block_count) == (1024, 16, 1024, 0)
    assert c.utilization == 0.0
    assert c.num_sequences == 0


def test_allocate_takes_whole_blocks():
    c = cache()
    c.allocate(1, 48)
    info = c.get_sequence(1)
    assert (c.used_block_count, c.num_sequences, info.num_tokens, info.num_blocks) == (3, 1, 48, 3)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_round_up(tokens, blocks):
    c = cache()
    c.allocate(1, tokens)
    assert c.used_block_count == blocks


def test_append_fills_the_tail_before_it_takes_a_block():
    c = cache()
    c.allocate(1, 8)
    c.append(1, 4)
    assert c.used_block_count == 1
    c.append(1, 8)
    assert c.used_block_count == 2


def test_free_gives_everything_back():
    c = cache()
    c.allocate(1, 48)
    c.free(1)
    assert (c.used_block_count, c.num_sequences) == (0, 0)


def test_utilization_counts_blocks():
    c = cache()
    c.allocate(1, 160)
    assert c.utilization == pytest.approx(0.1)
    c.allocate(2, 480)
    assert c.utilization == pytest.approx(0.4)
    assert PagedKvCache(0, 16, 32, 128).utilization == 0.0


def test_memory_is_what_is_allocated():
    c = cache()
    assert c.block_memory_bytes == 2 * 16 * 32 * 128 * 2 == 262144
    assert c.total_memory_bytes == 26214400
    c.allocate(1, 160)
    assert c.used_memory_bytes == 2621440
    assert cache(dtype="f32", num_layers=3).block_memory_bytes == 262144 * 2 * 3


def test_counters():
    c = cache()
    c.allocate(1, 32)
    c.allocate(2, 16)
    c.fork(1, 3)
    c.free(2)
    stats = c.stats()
    assert (stats.total_allocations, stats.total_frees, stats.total_forks) == (3, 1, 1)
    assert c.evict() == 1  # its blocks are shared, so none becomes free
    stats = c.stats()
    assert (stats.total_allocations, stats.total_frees, stats.total_forks, stats.total_evictions) == (3, 1, 1, 1)
    assert c.stats().peak_blocks_used == 3


def test_every_block_can_be_taken():
    c = cache(100)
    for i in range(100):
        c.allocate(i, 16)
    with pytest.raises(OutOfMemoryError):
        c.allocate(100, 1)
    assert (c.used_block_count, c.free_block_count, c.num_sequences) == (100, 0, 100)


def test_nothing_is_asked_for_and_nothing_is_taken():
    c = cache(0)
    c.allocate(1, 0)
    c.append(1, 0)
    info = c.get_sequence(1)
    assert (info.num_tokens, info.num_blocks, info.access_count) == (0, 0, 2)
    with pytest.raises(OutOfMemoryError):
        c.append(1, 1)
    for call in (c.allocate, c.append, c.truncate):
        with pytest.raises(ValueError, match="expected"):
            call(2 if call == c.allocate else 1, -1)
    c.check()


def test_blocks_are_reused_first_freed_first():
    c = cache(4)
    c.allocate(1, 32)
    c.free(1)
    c.allocate(2, 48)
    assert c.get_sequence(2).block_ids == (2, 3, 0)


def test_nothing_leaks_over_rounds():
    c = cache()
    for _ in range(10):
        for i in range(10):
            c.allocate(i, 160)
        assert (c.used_block_count, c.free_block_count) == (100, 0)
        for i in range(10):
            c.free(i)
        assert (c.used_block_count, c.free_block_count) == (0, 100)
    for i in range(50):
        c.allocate(i, 32)
    for i in range(0, 50, 2):
        c.free(i)
    before = c.free_block_count
    for i in range(100, 125):
        c.allocate(i, 32)
    assert before - c.free_block_count == 50
    c.check()


def test_a_serving_day():
    c = cache(1024)
    for i in range(20):
        c.allocate(i, 256)
    for i in range(5):
        c.free(i)
    for i in range(20, 30):
        c.allocate(i, 128)
    for fork in range(3):
        c.fork(10, 100 + fork)
    for i in range(10, 15):
        c.append(i, 32)
    stats = c.stats()
    assert c.num_sequences == 28
    assert (stats.total_forks, stats.total_allocations, stats.total_frees, c.used_block_count) == (3, 410, 80, 330)
    assert "PagedKvCache" in str(c)
    assert "LRU" in str(c)


# -- errors leave everything as it was ----------------------------------------------------------------------


def test_out_of_memory_says_what_was_asked_and_what_is_free():
    c = cache(10)
    with pytest.raises(OutOfMemoryError) as caught:
        c.allocate(1, 200)
    assert (caught.value.requested, caught.value.available) == (13, 10)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, KvCacheError)
    assert (c.free_block_count, c.num_sequences) == (10, 0)
    for i in range(10):
        c.allocate(i, 16)
    with pytest.raises(OutOfMemoryError):
        c.allocate(10, 1)
    assert (c.used_block_count, c.free_block_count) == (10, 0)


def test_unknown_and_duplicate_ids():
    c = cache()
    for call in (lambda: c.free(999), lambda: c.append(999, 1), lambda: c.fork(999, 1), lambda: c.handle(999)):
        with pytest.raises(SequenceNotFoundError) as caught:
            call()
        assert isinstance(caught.value, KeyError)
        assert "999" in str(caught.value)
    c.allocate(1, 16)
    with pytest.raises(InvalidOperationError):
        c.allocate(1, 16)
    with pytest.raises(InvalidOperationError):
        c.fork(999, 1)  # the target is checked first
    with pytest.raises(InvalidOperationError):
        cache().evict()
    assert c.get_sequence(2) is None


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 520}, "multiple of 8"),
        ({"head_dim": 0}, "multiple of 8"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"dtype": "f64"}, "f64"),
        ({"rotate": "yes"}, "rotate"),
    ],
)
def test_settings_that_cannot_be_honoured_raise(keywords, message):
    settings = {"num_blocks": 4, "block_size": 16, "num_heads": 2, "head_dim": 8} | keywords
    with pytest.raises(ValueError, match=message):
        PagedKvCache(**settings)


def test_a_size_that_is_no_integer():
    with pytest.raises(TypeError, match="block_size"):
        PagedKvCache(4, 16.0, 2, 8)


def test_memory_that_the_system_refuses():
    with pytest.raises(OutOfMemoryError, match="bytes"):
        PagedKvCache(2**31 - 1, 256, 1024, 256, num_layers=1024)


def test_the_cache_as_text():
    c = cache()
    c.allocate(1, 160)
    assert str(c).splitlines() == [
        "PagedKvCache",
        "  strategy: LRU, block size: 16",
        "  blocks: 10/100 used (10.0%)",
        "  memory: 2.62/26.21 MB",
        "  sequences: 1",
        "  allocs: 10, frees: 0, evictions: 0, forks: 0",
    ]

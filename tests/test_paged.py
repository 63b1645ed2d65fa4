"""PagedKvCache: what its documentation promises, case by case."""

import numpy as np
import pytest

from kvcache import BlockId, EvictionStrategy, PagedKvCache, SeqId
from kvcache.errors import (
    BlockNotFoundError,
    InvalidOperationError,
    KvCacheError,
    OutOfMemoryError,
    SequenceNotFoundError,
)


def cache(num_blocks=100, **keywords):
    return PagedKvCache(num_blocks, 16, 32, 128, **keywords)


def rows(rng, n, heads=2, dim=8):
    return rng.standard_normal((n, heads, dim)).astype(np.float32)


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


def test_fork_shares_every_block():
    c = cache()
    c.allocate(1, 64)
    for beam in range(2, 6):
        c.fork(1, beam)
    assert (c.used_block_count, c.num_sequences, c.stats().total_forks) == (4, 5, 4)
    assert all(c.get_sequence(i).num_tokens == 64 for i in c.sequence_ids())
    for seq_id in (2, 1, 3, 4):
        c.free(seq_id)
        assert c.used_block_count == 4
    c.free(5)
    assert c.used_block_count == 0


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


def test_a_fork_counts_anew_and_is_as_important():
    c = cache(eviction_strategy=EvictionStrategy.Priority(4))
    c.allocate(1, 20)
    c.append(1, 1)
    c.set_priority(1, 3)
    before = c.get_sequence(1)
    c.fork(1, 2)
    info = c.get_sequence(2)
    assert (info.block_ids, info.num_tokens, info.access_count, info.priority) == (before.block_ids, 21, 1, 3)
    assert c.get_sequence(1) == before
    with pytest.raises(InvalidOperationError):
        c.fork(1, 1)
    assert c.stats().total_allocations == 2


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
        c.fork(999, 1)  # the target is looked at first
    with pytest.raises(InvalidOperationError):
        cache().evict()
    assert c.get_sequence(2) is None


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 264}, "multiple of 8"),
        ({"head_dim": 0}, "multiple of 8"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": 0}, "num_layers"),
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


# -- eviction -----------------------------------------------------------------------------------------------


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


# -- StreamingLLM -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "sink", "window", "dropped", "blocks"),
    [
        (160, 4, 16, 140, (0, 9)),
        (150, 4, 16, 130, (0, 8, 9)),
        (160, 4, 28, 128, (0, 8, 9)),
        (160, 0, 16, 144, (9,)),
        (160, 16, 16, 128, (0, 9)),
        (160, 16, 0, 144, (0,)),
        (160, 0, 0, 160, ()),
        (100, 20, 30, 50, (0, 1, 4, 5, 6)),
        (16, 4, 32, 0, (0,)),
    ],
)
def test_streaming_keeps_exactly_sinks_and_window(n, sink, window, dropped, blocks):
    c = PagedKvCache(10, 16, 1, 8, dtype="f32")
    c.allocate(7, n)
    token = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None], (n, 1, 8))
    c.write(0, 7, token, token)
    assert c.apply_streaming_llm(7, sink, window) == dropped
    info = c.get_sequence(7)
    assert (info.num_tokens, info.block_ids, info.next_position) == (n - dropped, blocks, n)
    kept = [*range(sink), *range(n - window, n)] if dropped else list(range(n))
    np.testing.assert_array_equal(c.read(0, 7)[0][:, 0, 0], kept)
    c.check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
def test_streaming_for_every_length_sink_and_window(block_size):
    c = PagedKvCache(64 // block_size + 8, block_size, 1, 8, dtype="f32")
    token = np.broadcast_to(np.arange(24, dtype=np.float32)[:, None, None], (24, 1, 8))
    for n in range(0, 18, 3 if block_size > 2 else 1):
        for sink in range(n + 2):
            for window in range(n + 2 - min(sink, n)):
                c.allocate(0, n)
                c.write(0, 0, token[:n], token[:n])
                c.fork(0, 1)
                c.apply_streaming_llm(0, sink, window)
                kept = [*range(min(sink, n)), *range(max(n - window, min(sink, n)), n)]
                c.append(0, 3)
                c.write(0, 0, token[n : n + 3], token[n : n + 3])
                kept += range(n, n + 3)
                np.testing.assert_array_equal(c.read(0, 0)[0][:, 0, 0], kept)
                np.testing.assert_array_equal(c.read(0, 1)[0][:, 0, 0], range(n))
                query = np.zeros((1, 1, 8), np.float32)  # equal weights: attention is the mean of what is alive
                np.testing.assert_allclose(c.attention(0, query, [0])[0, 0, 0], np.mean(kept), rtol=1e-6)
                c.free(0)
                c.free(1)
    c.check()
    assert c.used_block_count == 0


def test_streaming_unknown_sequence():
    with pytest.raises(SequenceNotFoundError):
        cache().apply_streaming_llm(1, 4, 16)


# -- data ---------------------------------------------------------------------------------------------------


def test_write_and_read_back():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 4, 2, 8, num_layers=2, dtype="f32")
    c.allocate(1, 10)
    k, v = rows(rng, 10), rows(rng, 10)
    c.write(1, 1, k, v)
    np.testing.assert_array_equal(c.read(1, 1)[0], k)
    np.testing.assert_array_equal(c.read(1, 1, 3, 9)[1], v[3:9])
    assert not c.read(0, 1)[0].any()
    c.append(1, 2)
    tail = rows(rng, 2)
    c.write(1, 1, tail, tail)  # the last two by default
    np.testing.assert_array_equal(c.read(1, 1)[0], np.concatenate([k, tail]))


def test_f16_rounds_once():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 4, 2, 8)
    c.allocate(1, 10)
    k, v = rows(rng, 10), rows(rng, 10)
    c.write(0, 1, k, v)
    got = c.read(0, 1)
    np.testing.assert_array_equal(got[0], k.astype(np.float16))
    np.testing.assert_array_equal(got[1], v.astype(np.float16))


def test_a_fork_never_sees_the_others_tokens():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 16, 2, 8, dtype="f32")
    c.allocate(1, 20)
    k = rows(rng, 20)
    c.write(0, 1, k, k)
    c.fork(1, 2)
    assert c.used_block_count == 2
    c.append(1, 4)  # copies the shared tail for the writer
    assert c.used_block_count == 3
    c.append(2, 4)  # alone on its tail now
    assert c.used_block_count == 3
    one, two = rows(rng, 4), rows(rng, 4)
    c.write(0, 1, one, one)
    c.write(0, 2, two, two)
    np.testing.assert_array_equal(c.read(0, 1)[0], np.concatenate([k, one]))
    np.testing.assert_array_equal(c.read(0, 2)[0], np.concatenate([k, two]))
    c.write(0, 2, two, two, start=0)  # and the shared head, when it is written
    np.testing.assert_array_equal(c.read(0, 1, 0, 20)[0], k)
    assert c.used_block_count == 4
    c.check()


def test_the_copy_counts_in_what_is_requested():
    c = PagedKvCache(3, 16, 2, 8)
    c.allocate(1, 20)
    c.fork(1, 2)
    with pytest.raises(OutOfMemoryError) as caught:
        c.append(1, 16)
    assert (caught.value.requested, caught.value.available) == (2, 1)
    assert c.get_sequence(1).num_tokens == 20
    c.check()


def test_bad_data_changes_nothing():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 4, 2, 8, dtype="f16")
    c.allocate(1, 4)
    k = rows(rng, 4)
    c.write(0, 1, k, k)
    c.fork(1, 2)
    for bad in (np.nan, np.inf, -np.inf, 65520.0, -1e9):
        worse = k.copy()
        worse[2, 1, 3] = bad
        for pair in ((worse, k), (k, worse)):
            with pytest.raises(ValueError, match=r"f16 can hold.*row 2"):
                c.write(0, 1, *pair)
    for wrong, error in (
        ((k[:, :1], k), ValueError),
        ((k, k[:3]), ValueError),
        ((k.astype(int), k), TypeError),
        ((k.tolist()[0], k), ValueError),
    ):
        with pytest.raises(error, match="expected"):
            c.write(0, 1, *wrong)
    with pytest.raises(IndexError, match="layer"):
        c.write(1, 1, k, k)
    with pytest.raises(IndexError, match="tokens"):
        c.write(0, 1, k, k, start=1)
    with pytest.raises(IndexError):
        c.read(0, 1, 2, 5)
    np.testing.assert_array_equal(c.read(0, 1)[0], k.astype(np.float16))
    assert c.used_block_count == 1
    c.check()


def test_other_dtypes_are_converted():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    k = rows(rng, 4)
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        c = PagedKvCache(8, 4, 2, 8, dtype="f32")
        c.allocate(1, 4)
        c.write(0, 1, k.astype(dtype), k.astype(dtype)[::1])
        np.testing.assert_array_equal(c.read(0, 1)[0], k.astype(dtype).astype(np.float32))


def test_truncate_after_a_rejected_draft():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 4, 2, 8, dtype="f32")
    c.allocate(1, 9)
    k = rows(rng, 9)
    c.write(0, 1, k, k)
    c.truncate(1, 5)
    info = c.get_sequence(1)
    assert (info.num_tokens, info.next_position, info.num_blocks) == (5, 5, 2)
    c.append(1, 1)
    more = rows(rng, 1)
    c.write(0, 1, more, more)
    np.testing.assert_array_equal(c.read(0, 1)[0], np.concatenate([k[:5], more]))
    with pytest.raises(ValueError, match="num_tokens"):
        c.truncate(1, 7)


def test_keep_tokens_and_compact():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 4, 2, 8, num_layers=2, dtype="f16")
    c.allocate(1, 22)
    k = rows(rng, 22)
    c.write(1, 1, k, -k)
    kept = [0, 5, 6, 13, 20, 21]
    c.keep_tokens(1, kept)
    info = c.get_sequence(1)
    assert (info.num_tokens, info.num_blocks, info.next_position) == (6, 4, 22)
    before = c.read(1, 1)
    np.testing.assert_array_equal(before[0], k.astype(np.float16)[kept])
    c.compact(1)
    assert c.get_sequence(1).num_blocks == 2
    for old, new in zip(before, c.read(1, 1), strict=True):
        np.testing.assert_array_equal(old, new)
    c.append(1, 3)
    assert c.get_sequence(1).next_position == 25
    with pytest.raises(IndexError):
        c.keep_tokens(1, [9])
    with pytest.raises(ValueError, match="ascending"):
        c.keep_tokens(1, [2, 2])
    c.check()


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8", "q4", "q3", "q2"])
def test_what_was_never_written_is_zero_whoever_held_the_block_before(rng, dtype):
    c = PagedKvCache(6, 16, 2, 32, num_layers=2, dtype=dtype)

    def secret(seq_id, n):
        c.allocate(seq_id, n)
        for layer in range(2):
            c.write(layer, seq_id, rows(rng, n, dim=32), rows(rng, n, dim=32))

    def is_zero(seq_id, start):
        read = [c.read(layer, seq_id, start) for layer in range(2)]
        return not np.any(read)

    secret(0, 96)
    c.free(0)
    c.allocate(1, 20)  # blocks of a sequence that is gone
    assert is_zero(1, 0)
    c.append(1, 20)
    c.allocate_batch([2, 3], [5, 7])
    assert is_zero(1, 0)
    assert is_zero(2, 0)
    assert is_zero(3, 0)
    c.append_batch([2, 3])
    assert is_zero(2, 0)
    assert is_zero(3, 0)
    c.free_batch([1, 2, 3])

    secret(4, 32)  # a shared tail, of which only the first tokens are another's
    c.adopt(5, c.get_sequence(4).block_ids, 20)
    c.append(5, 10)
    assert is_zero(5, 20)
    np.testing.assert_array_equal(c.read(1, 5, 0, 20), c.read(1, 4, 0, 20))
    c.truncate(4, 20)  # and its own, once they were cut off
    c.append(4, 2)
    assert is_zero(4, 20)
    c.check()


def test_ids_are_ints_with_a_text_form():
    c = PagedKvCache(4, 16, 1, 8)
    c.allocate(7, 20)
    info = c.get_sequence(SeqId(7))
    assert (str(info.seq_id), repr(info.seq_id), [str(b) for b in info.block_ids]) == ("S7", "SeqId(7)", ["B0", "B1"])
    assert info.seq_id == 7
    assert hash(info.seq_id) == hash(7)
    assert type(info.seq_id) is SeqId
    assert info.block_ids == (0, 1)
    assert type(info.block_ids[0]) is BlockId
    assert [str(s) for s in c.sequence_ids()] == ["S7"]
    assert str(c.select_eviction_target()) == "S7"
    assert [str(s) for s in c.evict_to_threshold(0.0)] == ["S7"]
    c.allocate(8, 1)
    assert str(c.evict()) == "S8"


def test_adopted_blocks_are_shared_until_written():
    rng = np.random.default_rng(0)
    c = PagedKvCache(8, 4, 2, 8, dtype="f32")
    c.allocate(1, 8)
    k = rows(rng, 8)
    c.write(0, 1, k, k)
    c.adopt(2, c.get_sequence(1).block_ids, 6)
    assert c.used_block_count == 2
    np.testing.assert_array_equal(c.read(0, 2)[0], k[:6])
    c.append(2, 1)
    assert c.used_block_count == 3
    np.testing.assert_array_equal(c.read(0, 2, 0, 6)[0], k[:6])
    with pytest.raises(BlockNotFoundError):
        c.adopt(3, [7], 4)
    with pytest.raises(ValueError, match="2 distinct blocks"):
        c.adopt(3, [0], 5)
    c.check()


def test_batch_calls_are_all_or_nothing():
    rng = np.random.default_rng(0)
    c = PagedKvCache(4, 4, 2, 8, dtype="f32")
    for i in (1, 2, 3):
        c.allocate(i, 4)
    with pytest.raises(OutOfMemoryError) as caught:
        c.append_batch([1, 2, 3])
    assert (caught.value.requested, caught.value.available) == (3, 1)
    assert all(c.get_sequence(i).num_tokens == 4 for i in (1, 2, 3))
    with pytest.raises(ValueError, match="twice"):
        c.append_batch([1, 1])
    with pytest.raises(SequenceNotFoundError):
        c.append_batch([1, 9])
    c.free(2)
    c.append_batch(np.array([1, 3]))
    k = rows(rng, 2)
    c.write_batch(0, [3, 1], k, -k)
    np.testing.assert_array_equal(c.read(0, 3, 4)[0], k[:1])
    np.testing.assert_array_equal(c.read(0, 1, 4)[1], -k[1:])
    with pytest.raises(ValueError, match="once"):
        c.write_batch(0, [3, 3], k, k)
    c.check()


def test_block_table_is_csr():
    c = PagedKvCache(16, 4, 2, 8)
    c.allocate(1, 9)
    c.allocate(2, 0)
    c.allocate(3, 8)
    indptr, ids, last = c.block_table([1, 2, 3])
    assert indptr.tolist() == [0, 3, 3, 5]
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert last.tolist() == [1, 0, 4]
    assert indptr.dtype == ids.dtype == last.dtype == np.int32


def test_copy_blocks_copies_data_only():
    rng = np.random.default_rng(0)
    c = PagedKvCache(4, 4, 2, 8, dtype="f32")
    c.allocate(1, 4)
    c.allocate(2, 4)
    k = rows(rng, 4)
    c.write(0, 1, k, k)
    c.copy_blocks([0], [1])
    np.testing.assert_array_equal(c.read(0, 2)[0], k)
    with pytest.raises(BlockNotFoundError):
        c.copy_blocks([0], [2])
    with pytest.raises(BlockNotFoundError):
        c.copy_blocks([0], [4])
    with pytest.raises(ValueError, match="targets"):
        c.copy_blocks([0], [])


def test_the_copy_of_a_shared_block_reads_as_zeros_behind_what_was_kept():
    """The block was full when it became shared; the sequence goes back inside it and on, and the copy brings all."""
    cache = PagedKvCache(4, 4, 1, 8, dtype="f32")
    cache.allocate(1, 4)
    cache.write(0, 1, *np.ones((2, 4, 1, 8), np.float32))
    cache.fork(1, 2)
    for seq, count in ((2, 1), (1, 2)):
        cache.truncate(seq, count)
        cache.append(seq, 2)
        keys, values = cache.read(0, seq)
        assert (keys[:count] == 1).all()
        assert not keys[count:].any()
        assert not values[count:].any()
    cache.check()


def test_sequences_exchange_their_ids():
    cache = PagedKvCache(4, 4, 1, 8, dtype="f32")
    for seq, count in ((1, 3), (2, 5)):
        cache.allocate(seq, count)
        cache.write(0, seq, *np.full((2, count, 1, 8), seq, np.float32))
    handle = cache.handle(1)
    cache.swap(1, 2)
    assert [(cache.get_sequence(seq).num_tokens, cache.read(0, seq)[0].max()) for seq in (1, 2)] == [(5, 2), (3, 1)]
    assert handle.num_tokens == 5
    cache.swap(2, 2)
    with pytest.raises(SequenceNotFoundError):
        cache.swap(1, 3)
    cache.check()
    cache.free(1)
    assert (1 in cache, 2 in cache) == (False, True)

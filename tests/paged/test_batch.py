"""Calls for many sequences at once: all or nothing, any integers as ids, victims in order after many touches."""

from dataclasses import replace

import numpy as np
import pytest

from kvcache import EvictionStrategy, PagedKvCache
from kvcache.core.kvrows import KvRows
from kvcache.errors import InvalidOperationError, OutOfMemoryError, SequenceNotFoundError
from kvcache.paged.seq_ids import as_seq_ids


@pytest.fixture
def cache():
    cache = PagedKvCache(10, 4, 1, 8)
    cache.allocate_batch([1, 2, 3], [4, 0, 9])
    return cache


def rows(n):
    return np.ones((2, n, 1, 8), np.float32)


def state(cache):
    cache.check()
    stats = replace(cache.stats(), bookkeeping_bytes=0)  # arrays may have grown in advance
    return [cache.get_sequence(i) for i in cache.sequence_ids()], stats, cache.free_block_count


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.allocate_batch([7, 1], [1, 1]), InvalidOperationError),
        (lambda c: c.allocate_batch([7, 7], [1, 1]), ValueError),
        (lambda c: c.allocate_batch([7, 8], [1]), ValueError),
        (lambda c: c.allocate_batch([7, 8], [1, -1]), ValueError),
        (lambda c: c.allocate_batch([7, 8], [20, 9]), OutOfMemoryError),
        (lambda c: c.fork_batch([1, 9], [7, 8]), SequenceNotFoundError),
        (lambda c: c.fork_batch([1, 1], [7, 2]), InvalidOperationError),
        (lambda c: c.fork_batch([1, 1], [7, 7]), ValueError),
        (lambda c: c.fork_batch([1, 1], [7]), ValueError),
        (lambda c: c.free_batch([1, 9]), SequenceNotFoundError),
        (lambda c: c.free_batch([1, 3, 1]), ValueError),
        (lambda c: c.append_batch([1, -1]), ValueError),
        (lambda c: c.append_batch([1, 2], [1]), ValueError),
        (lambda c: c.append_batch([1, 2], [1, -1]), ValueError),
        (lambda c: c.append_batch([1, 2], [1, 40]), OutOfMemoryError),
        (lambda c: c.append_batch([1, 2], [1, 2**62]), OutOfMemoryError),
        (lambda c: c.truncate_batch([1, 9], [1, 1]), SequenceNotFoundError),
        (lambda c: c.truncate_batch([1, 1], [1, 1]), ValueError),
        (lambda c: c.truncate_batch([1, 3], [1]), ValueError),
        (lambda c: c.truncate_batch([1, 3], [1, 10]), ValueError),
        (lambda c: c.truncate_batch([1, 3], [1, -1]), ValueError),
        (lambda c: c.reorder([1, 9], [0, 0]), SequenceNotFoundError),
        (lambda c: c.reorder([1, 1], [0, 0]), ValueError),
        (lambda c: c.reorder([1, 3], [0]), ValueError),
        (lambda c: c.reorder([1, 3], [0, 2]), IndexError),
        (lambda c: c.reorder([1, 3], [-1, 0]), IndexError),
        (lambda c: c.write_ragged(0, [1, 9], [1, 1], *rows(2)), SequenceNotFoundError),
        (lambda c: c.write_ragged(0, [1, 1], [1, 1], *rows(2)), ValueError),
        (lambda c: c.write_ragged(0, [1, 3], [1], *rows(1)), ValueError),
        (lambda c: c.write_ragged(0, [1, 3], [1, 10], *rows(11)), IndexError),
        (lambda c: c.write_ragged(0, [1, 3], [1, -1], *rows(0)), IndexError),
        (lambda c: c.write_ragged(0, [1, 3], [1, 2**62], *rows(1)), IndexError),
        (lambda c: c.write_ragged(0, [1, 3], [1, 2], *rows(2)), ValueError),
        (lambda c: c.write_ragged(1, [1, 3], [1, 2], *rows(3)), IndexError),
        (lambda c: c.append_batch([1, 2**64]), ValueError),
        (lambda c: c.append_batch([1, True]), TypeError),
        (lambda c: c.append_batch([1, 2.0]), TypeError),
        (lambda c: c.append_batch([[1], [2]]), ValueError),
    ],
)
def test_a_refused_batch_changes_nothing(cache, call, error):
    before = state(cache)
    with pytest.raises(error):
        call(cache)
    assert state(cache) == before


def test_a_batch_is_its_single_calls(cache):
    single = PagedKvCache(10, 4, 1, 8)
    for seq_id, n in ((1, 4), (2, 0), (3, 9)):
        single.allocate(seq_id, n)
    assert state(cache) == state(single)
    cache.fork_batch([3, 1, 3], [4, 5, 6])
    for source, target in ((3, 4), (1, 5), (3, 6)):
        single.fork(source, target)
    assert state(cache) == state(single)
    cache.append_batch([4, 2, 5])
    for seq_id in (4, 2, 5):
        single.append(seq_id, 1)
    assert state(cache) == state(single)
    cache.free_batch(np.array([3, 4], np.int16))
    single.free(3)
    single.free(4)
    assert state(cache) == state(single)


def test_a_holder_whose_tail_is_full_does_not_spare_another_one_its_copy():
    """A regression: its reference was counted as dropped, and the copy took a block although none was free."""
    cache = PagedKvCache(2, 4, 1, 8)
    cache.allocate(1, 4)
    cache.fork(1, 2)
    cache.truncate(2, 2)
    before = state(cache)
    with pytest.raises(OutOfMemoryError) as caught:
        cache.append_batch([1, 2])  # one needs a new block, the other a copy
    assert (caught.value.requested, caught.value.available) == (2, 1)
    assert state(cache) == before


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_batches_with_counts_are_their_single_calls(rng, dtype):
    """Sequences have shared tails and holes; some counts are 0."""

    def fresh():
        cache = PagedKvCache(60, 4, 1, 8, dtype=dtype)
        cache.allocate_batch([1, 2, 3], [6, 0, 11])
        cache.fork_batch([1, 1, 3], [4, 5, 6])
        cache.keep_tokens(3, [0, 1, 7, 9])
        return cache

    many, single = fresh(), fresh()
    for _ in range(12):
        ids = rng.permutation(np.arange(1, 7, dtype=np.uint64))[: int(rng.integers(1, 7))]
        counts = rng.choice([0, 1, 1, 3, 9], len(ids)).astype(np.int64)
        rows = rng.standard_normal((2, counts.sum(), 1, 8)).astype(np.float32)
        try:
            many._sequences.append_batch(ids, counts)
        except OutOfMemoryError as error:
            free = many.free_block_count
            assert (error.available, error.requested > free) == (free, True)
            assert state(many) == state(single)
            break
        many._sequences.write_batch(0, ids, KvRows(*rows), counts)
        ends = np.cumsum(counts)
        for i, seq_id in enumerate(ids.tolist()):
            single.append(seq_id, int(counts[i]))
        for i, seq_id in enumerate(ids.tolist()):
            part = rows[:, ends[i] - counts[i] : ends[i]]
            single.write(0, seq_id, *part)
        assert state(many) == state(single)
        for seq_id in range(1, 7):
            for info in (many, single):
                assert info._table.run_positions(seq_id).tolist() == many._table.run_positions(seq_id).tolist()
            np.testing.assert_array_equal(many.read(0, seq_id), single.read(0, seq_id))
    for wrong, error in (([1], ValueError), ([1, -1], ValueError), ([2**62, 2**62], OutOfMemoryError)):
        before = state(many)
        with pytest.raises(error):
            many._sequences.append_batch(np.array([1, 2], np.uint64), np.array(wrong))
        assert state(many) == before
    with pytest.raises(ValueError, match="keys: expected 3 rows"):
        many._sequences.write_batch(0, np.array([1, 3], np.uint64), KvRows(*rows[:, :0]), np.array([1, 2]))


def test_empty_batches_do_nothing(cache):
    before = state(cache)
    cache.allocate_batch([], [])
    cache.append_batch([])
    cache.append_batch([], [])
    cache.truncate_batch([], [])
    cache.reorder([], [])
    cache.write_ragged(0, [], [], *rows(0))
    cache.fork_batch([], [])
    cache.free_batch([])
    assert state(cache) == before
    assert [len(part) for part in cache.block_table([])] == [1, 0, 0]


def test_ids_of_every_integer_type():
    assert as_seq_ids([0, 2**64 - 1]).tolist() == [0, 2**64 - 1]
    for dtype in (np.int8, np.uint8, np.int64, np.uint64):
        ids = as_seq_ids(np.array([3, 1, 2], dtype))
        assert ids.dtype == np.uint64
        assert ids.tolist() == [3, 1, 2]
    own = np.arange(3, dtype=np.uint64)
    assert as_seq_ids(own) is own
    assert as_seq_ids(own[::2]).tolist() == [0, 2]
    assert as_seq_ids([np.int64(4), 5]).tolist() == [4, 5]
    assert as_seq_ids((1, 2)).tolist() == as_seq_ids(range(1, 3)).tolist() == [1, 2]


@pytest.mark.parametrize("strategy", [EvictionStrategy.LRU(), EvictionStrategy.LFU(), EvictionStrategy.LongestFirst()])
def test_victims_in_exact_order_after_many_touches(strategy, rng):
    # The order is updated only when a victim is asked for; every touch before that must count.
    cache = PagedKvCache(3_000, 4, 1, 8, eviction_strategy=strategy)
    ids = list(range(200))
    cache.allocate_batch(ids, rng.integers(0, 20, len(ids)))
    for _ in range(40):
        cache.append_batch(rng.choice(ids, int(rng.integers(1, len(ids))), replace=False))
    cache.check()
    key = {
        "LRU": lambda s: (s.last_access, s.seq_id),
        "LFU": lambda s: (s.access_count, s.seq_id),
        "LongestFirst": lambda s: (-s.num_tokens, s.seq_id),
    }[strategy.name]
    expected = [s.seq_id for s in sorted((cache.get_sequence(i) for i in ids), key=key)]
    assert [cache.evict() for _ in ids] == expected


def test_passed_over_sequences_are_looked_at_again_once_they_own_a_block():
    cache = PagedKvCache(20, 4, 1, 8)
    cache.allocate(0, 8)
    cache.fork(0, 1)  # 0 and 1 share all their blocks: evicting one frees nothing
    cache.allocate(2, 8)
    cache.fork(1, 3)
    cache.append(3, 1)  # 3 owns a block: it is evicted before 0 and 1, which still share
    assert cache.evict_to_threshold(0.0) == [2, 3, 0, 1]
    cache.check()


def test_ids_and_memory_after_a_million_operations():
    cache = PagedKvCache(512, 4, 1, 8)
    ids = np.arange(100, dtype=np.uint64)
    sizes = set()
    for turn in range(2_000):
        cache.allocate_batch(ids + turn, np.full(100, 3))
        cache.append_batch(ids + turn)
        cache.append_batch(ids + turn)
        cache.fork_batch(ids + turn, ids + turn + 10_000)
        cache.free_batch(ids + turn)
        cache.free_batch(ids + turn + 10_000)
        if turn > 2:
            sizes.add(cache._table.nbytes + cache._pool.nbytes)
    assert len(sizes) == 1
    assert cache.free_block_count == 512
    assert cache._pool.peak_used <= 200
    cache.check()


def test_the_room_of_ended_sequences_is_used_again_and_bounded():
    cache = PagedKvCache(600, 4, 1, 8)
    small = cache.stats().bookkeeping_bytes
    for length in (2_000, 4, 900, 2_300, 1):  # long and short sequences reuse each other's rows
        cache.allocate_batch([1], [length])
        cache.fork_batch([1, 1, 1], [2, 3, 4])
        cache.check()
        cache.free_batch([1, 2, 3, 4])
        cache.check()
    # Eight bytes per run: at most one idle run per block, and the first rows.
    assert cache.stats().bookkeeping_bytes <= small + 8 * 600 + 4_096


@pytest.mark.parametrize("grow", [1, 40])
def test_forks_of_sequences_with_and_without_a_hole_go_on_where_they_should(grow):
    cache = PagedKvCache(100, 4, 1, 8)
    cache.allocate_batch([1, 2], [22, 22])
    cache.apply_streaming_llm(2, sink_tokens=2, window_tokens=5)
    cache.fork_batch([1, 2], [11, 12])
    for seq_id in (1, 2, 11, 12):
        cache.append(seq_id, grow)
    table = cache._table
    assert table.run_positions(11).tolist() == [4 * i for i in range(-(-(22 + grow) // 4))]
    assert table.run_positions(12).tolist()[:3] == [0, 17, 20]
    for seq_id in (1, 2):
        assert table.run_positions(seq_id).tolist() == table.run_positions(seq_id + 10).tolist()
        assert cache.get_sequence(seq_id).next_position == cache.get_sequence(seq_id + 10).next_position == 22 + grow
    cache.check()


def test_what_a_batch_of_writes_needs_is_there_or_nothing_is_copied():
    """The last of those that share a block keeps it, so two forks of a sequence need one block less than they have."""
    cache = PagedKvCache(4, 4, 1, 8, dtype="f32")
    cache.allocate(1, 8)
    cache.write(0, 1, *rows(8))
    cache.fork_batch([1, 1], [2, 3])
    before = state(cache)
    with pytest.raises(OutOfMemoryError) as caught:
        cache.write_ragged(0, [1, 2, 3], [8, 8, 8], *rows(24))
    assert (caught.value.requested, caught.value.available) == (4, 2)
    assert state(cache) == before
    cache.free(3)
    values = np.arange(16, dtype=np.float32)[:, None, None] * rows(1)[0]
    cache.write_ragged(0, [1, 2], [8, 8], values, -values)
    assert cache.free_block_count == 0
    for seq, part in ((1, slice(0, 8)), (2, slice(8, 16))):
        np.testing.assert_array_equal(cache.read(0, seq), [values[part], -values[part]])


def test_beams_are_reordered_without_free_blocks(rng):
    cache = PagedKvCache(3, 4, 1, 8, dtype="f32")
    cache.allocate_batch([1, 2, 3], [3, 4, 2])
    cache.set_priority(3, 0)
    for seq, n in ((1, 3), (2, 4), (3, 2)):
        cache.write(0, seq, *(seq * rows(n)))
    handles = [cache.handle(seq) for seq in (1, 2, 3)]
    cache.pin(3)
    accesses = [cache.get_sequence(seq).access_count for seq in (1, 2, 3)]
    cache.reorder([1, 2, 3], [2, 0, 2])
    assert all(handle.is_valid for handle in handles)
    assert [cache.get_sequence(seq).num_tokens for seq in (1, 2, 3)] == [2, 3, 2]
    assert [cache.get_sequence(seq).access_count for seq in (1, 2, 3)] == accesses
    assert cache.free_block_count == 1  # the block of four tokens, which no row names
    assert [cache.read(0, seq)[0].max() for seq in (1, 2, 3)] == [3, 1, 3]
    cache.append_batch([1, 2, 3])  # beams 1 and 3 part
    cache.write_batch(0, [1, 2, 3], *(9 * rows(3)))
    assert [cache.read(0, seq)[0][:, 0, 0].tolist() for seq in (1, 2, 3)] == [[3, 3, 9], [1, 1, 1, 9], [3, 3, 9]]
    assert cache.evict() != 3
    cache.check()


def test_a_cycle_of_rows_moves_every_sequence_once(rng):
    """Rows have holes, sinks and lengths: after as many steps as the cycle is long, everything is where it was."""
    cache = PagedKvCache(40, 4, 1, 8, dtype="f32")
    cache.allocate_batch([1, 2, 3, 4], [22, 9, 0, 17])
    cache.apply_streaming_llm(1, 2, 5)
    cache.keep_tokens(4, [0, 5, 6, 16])
    for seq in (1, 2, 4):
        cache.write(0, seq, *rng.standard_normal((2, cache.get_sequence(seq).num_tokens, 1, 8), np.float32))

    def seen():
        table = cache._table
        out = [(table.runs(s).tolist(), table.run_positions(s).tolist(), table.info(s)[:2], table.info(s)[-1])
               for s in (1, 2, 3, 4)]
        return out, cache.free_block_count

    before = seen()
    cache.reorder([1, 2, 3, 4], [1, 2, 3, 0])
    assert seen()[0] == [*before[0][1:], before[0][0]]
    cache.check()
    for _ in range(3):
        cache.reorder([1, 2, 3, 4], [1, 2, 3, 0])
    assert seen() == before
    cache.reorder([4, 2], [0, 1])
    assert seen() == before

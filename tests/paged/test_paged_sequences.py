"""Sequences of a PagedKvCache: shared, adopted, cut, streamed, compacted, many in one call."""

import numpy as np
import pytest
from small_paged import cache, rows, written

from kvcache import BlockId, EvictionStrategy, PagedKvCache, SeqId
from kvcache.errors import BlockNotFoundError, InvalidOperationError, OutOfMemoryError, SequenceNotFoundError


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


def test_truncate_after_a_rejected_draft():
    c, k = written(9, block_size=4, dtype="f32")
    rng = np.random.default_rng(1)
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
    c, k = written(8, block_size=4, dtype="f32")
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


def test_a_block_table_has_the_names_of_flashinfer():
    cache = PagedKvCache(8, 4, 2, 16)
    cache.allocate(1, 5)
    cache.allocate(2, 0)
    cache.fork(1, 3)
    table = cache.block_table([3, 2, 1])
    assert table._fields == ("indptr", "indices", "last_page_len")
    indptr, indices, last_page_len = table
    np.testing.assert_array_equal(indptr, [0, 2, 2, 4])
    np.testing.assert_array_equal(indices, [0, 1, 0, 1])
    np.testing.assert_array_equal(last_page_len, [1, 0, 1])
    assert table.block_ids is table.indices
    assert table.last_block_len is table.last_page_len

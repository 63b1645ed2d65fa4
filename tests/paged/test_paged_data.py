"""K and V in a `PagedKvCache`: a sequence reads what it wrote, and never what another one wrote."""

import numpy as np
import pytest
from small_paged import rows, written

from kvcache import PagedKvCache
from kvcache.errors import BlockNotFoundError, OutOfMemoryError
from kvcache.kernels.kernels import FORMATS


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
    c, k = written(20, block_size=16, dtype="f32")
    rng = np.random.default_rng(1)
    c.fork(1, 2)
    assert c.used_block_count == 2
    c.append(1, 4)  # the shared tail is copied
    assert c.used_block_count == 3
    c.append(2, 4)  # its tail is no longer shared
    assert c.used_block_count == 3
    one, two = rows(rng, 4), rows(rng, 4)
    c.write(0, 1, one, one)
    c.write(0, 2, two, two)
    np.testing.assert_array_equal(c.read(0, 1)[0], np.concatenate([k, one]))
    np.testing.assert_array_equal(c.read(0, 2)[0], np.concatenate([k, two]))
    c.write(0, 2, two, two, start=0)  # the shared first block is copied when it is written
    np.testing.assert_array_equal(c.read(0, 1, 0, 20)[0], k)
    assert c.used_block_count == 4
    c.check()


def test_writing_no_rows_copies_no_shared_block():
    c, k = written(20, block_size=16, dtype="f32")
    c.fork(1, 2)
    for start in (None, 0, 7, 18, 20):
        c.write(0, 2, k[:0], k[:0], start=start)
    assert c.used_block_count == 2
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
    c, k = written(4, block_size=4, dtype="f16")
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


@pytest.mark.parametrize("dtype", FORMATS)
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
    c.allocate(1, 20)  # reuses blocks of a sequence that has ended
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

    secret(4, 32)  # a shared tail whose first tokens only are shared
    c.adopt(5, c.get_sequence(4).block_ids, 20)
    c.append(5, 10)
    assert is_zero(5, 20)
    np.testing.assert_array_equal(c.read(1, 5, 0, 20), c.read(1, 4, 0, 20))
    c.truncate(4, 20)  # its own tokens, after they were cut off
    c.append(4, 2)
    assert is_zero(4, 20)
    c.check()


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
    """The block was full when it became shared. Its sequence is truncated, then grows: all slots are copied."""
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


@pytest.mark.parametrize("batch", [False, True])
def test_tokens_of_a_block_that_a_sequence_adopted_beyond_its_tokens_are_gone_when_it_is_free(batch):
    """A regression: the write was not noted, and the next owner of the block read its rows."""
    cache = PagedKvCache(1, 4, 1, 8, dtype="f32")
    cache.allocate(1, 2)
    cache.adopt(2, [0], 4)
    cache.free(1)
    ones = np.ones((4, 1, 8), np.float32)
    if batch:
        cache.write_batch(0, [2], ones[:1], ones[:1])
    else:
        cache.write(0, 2, ones, ones)
    cache.free(2)
    cache.allocate(3, 4)
    assert not any(side.any() for side in cache.read(0, 3))

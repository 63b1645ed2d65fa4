"""`PagedKvCache(value_head_dim=)`: V rows shorter or longer than K rows.

tests/kernels/test_attend_random.py compares attention with float64 at such dimensions,
tests/kernels/test_row_invariance.py its bits, tests/paged/test_paged_stateful.py histories, and tests/ckernels the
kernels alone.
"""

import numpy as np
import pytest
from oracles import snapshot as oracle_snapshot
from pace import half

from kvcache import PagedKvCache, PrefixCache, PrefixKvCache, SnapshotError, merge_attention
from kvcache.kernels.kernels import FORMATS

HEADS, SIZE = 2, 16
DIMS = [(64, 32), (32, 64), (24, 40), (8, 512), (192, 128)]


def filled(rng, n, dims, formats=("f32", "f32"), size=SIZE, **options):
    """A cache whose sequence 1 has n tokens, and their K and V."""
    cache = PagedKvCache(
        60, size, HEADS, dims[0], key_dtype=formats[0], value_dtype=formats[1], value_head_dim=dims[1], **options
    )
    cache.allocate(1, n)
    rows = [rng.standard_normal((n, HEADS, dim), np.float32) for dim in dims]
    for layer in range(cache.num_layers):
        cache.write(layer, 1, *rows)
    return cache, *rows


@pytest.mark.parametrize("value", [0, 7, 12, -8, 520, 2**31, 2**40])
def test_limits(value):
    with pytest.raises(ValueError, match=rf"^value_head_dim: expected a multiple of 8, at most 512, got {value}$"):
        PagedKvCache(4, 16, 2, 64, value_head_dim=value)


def test_other_mistakes():
    with pytest.raises(TypeError, match=r"^value_head_dim: expected an int, got float$"):
        PagedKvCache(4, 16, 2, 64, value_head_dim=32.0)
    with pytest.raises(ValueError, match=r"^value_head_dim: expected a power of two for rotate=True, got 96$"):
        PagedKvCache(4, 16, 2, 64, value_head_dim=96, dtype="q4", rotate=True)
    with pytest.raises(ValueError, match=r"^head_dim: expected a power of two for rotate=True, got 96$"):
        PagedKvCache(4, 16, 2, 96, value_head_dim=64, dtype="q4", rotate=True)
    cache = PagedKvCache(4, 16, 2, 64, value_head_dim=32, dtype="f32")
    cache.allocate(1, 3)
    k, v = np.ones((3, 2, 64), np.float32), np.ones((3, 2, 32), np.float32)
    for pair, name, shape in (((k, k), "values", r"\(any, 2, 32\)"), ((v, v), "keys", r"\(any, 2, 64\)")):
        with pytest.raises(ValueError, match=rf"^{name}: expected shape {shape}"):
            cache.write(0, 1, *pair)
    v[1, 1, 5] = np.nan
    with pytest.raises(ValueError, match=r"^values: expected values that f32 can hold, up to .*, got nan in row 1$"):
        cache.write(0, 1, k, v)
    queries = np.ones((1, 2, 64), np.float32)
    with pytest.raises(ValueError, match=r"^queries: expected shape \(any, any, 64\), got \(1, 2, 32\)$"):
        cache.attention(0, queries[..., :32], [1])
    with pytest.raises(ValueError, match=r"^out: expected C-contiguous, writeable float32 of shape \(1, 2, 32\)"):
        cache.attention(0, queries, [1], out=np.empty_like(queries))
    with pytest.raises(ValueError, match=r"^out: expected two writeable float32 arrays, V of shape \(3, 2, 32\)"):
        cache.read(0, 1, out=(np.empty_like(k), np.empty_like(k)))
    assert not np.any(cache.read(0, 1)[1])
    cache.check()


def test_sizes_and_text():
    same = PagedKvCache(4, 16, 2, 64, dtype="f16")
    assert (same.head_dim, same.value_head_dim) == (64, 64)
    assert "value_head_dim" not in repr(same)
    cache = PagedKvCache(4, 16, 2, 64, value_head_dim=24, dtype="f16", num_layers=3)
    assert (cache.head_dim, cache.value_head_dim) == (64, 24)
    assert cache.block_memory_bytes == 3 * 16 * 2 * (64 + 24) * 2
    assert cache.total_memory_bytes == cache.memory()["kv"] == 4 * cache.block_memory_bytes
    assert "head_dim=64, value_head_dim=24, num_layers=3" in repr(cache)
    assert PagedKvCache(None, 16, 2, 64, value_head_dim=24, max_memory_bytes=10 * 16 * 2 * 88 * 2).total_blocks == 10
    cache.allocate(1, 5)
    handle = cache.handle(1)
    assert (handle.head_dim, handle.value_head_dim) == (64, 24)
    assert [side.shape for side in handle.kv_cache(2)] == [(5, 2, 64), (5, 2, 24)]


@pytest.mark.parametrize("size", [16, 5])
@pytest.mark.parametrize("dims", half(DIMS), ids=str)
def test_each_side_is_stored_as_in_a_cache_of_its_head_dim(rng, dims, size):
    """Bit for bit, in all pairs of formats: written at once and token by token, copied, moved and cleared."""
    for i, key in enumerate(FORMATS):
        formats = key, list(FORMATS)[(2 * i + 3) % len(FORMATS)] if i % 2 else key
        cache, *rows = filled(rng, 40, dims, formats, size)
        sides = [PagedKvCache(60, size, HEADS, dim, dtype=name) for dim, name in zip(dims, formats, strict=True)]
        for one, side in zip(sides, rows, strict=True):
            one.allocate(1, 40)
            one.write(0, 1, side, side)
        more = [rng.standard_normal((4, HEADS, dim), np.float32) for dim in dims]
        calls = (
            lambda c, k, v: None,
            lambda c, k, v: c.fork(1, 2),
            lambda c, k, v: c.append_batch([1, 2], [1, 3]),
            lambda c, k, v: c.write_ragged(0, [2, 1], [3, 1], k, v),
            lambda c, k, v: c.grow(3),
            lambda c, k, v: c.keep_tokens(1, [0, 3, 4, 5, 17, 18, 33, 39, 40]),
            lambda c, k, v: c.compact(1),
            lambda c, k, v: c.reorder([1, 2], [1, 0]),
            lambda c, k, v: c.truncate(2, 7),
            lambda c, k, v: c.write_batch(0, [2, 1], k[:2].astype(np.float64), v[2:].astype(np.float64)),
            lambda c, k, v: c.append(2, 30),
        )
        for call in calls:
            call(cache, *more)
            for one, side in zip(sides, more, strict=True):
                call(one, side, side)
            for seq in cache.sequence_ids():
                got = cache.read(0, seq)
                for i, one in enumerate(sides):
                    np.testing.assert_array_equal(got[i], one.read(0, seq)[i])
                outs = np.empty_like(got[0]), np.empty((HEADS, *got[1].shape[::2]), np.float32).swapaxes(0, 1)
                for out, side in zip(cache.read(0, seq, out=outs), got, strict=True):
                    np.testing.assert_array_equal(out, side)
        cache.check()


def test_attention_over_parts_merges(rng):
    cache, *_ = filled(rng, 700, (96, 40), ("q4", "q8"))
    queries = rng.standard_normal((3, 6, 96), np.float32)
    out = np.full((3, 6, 40), np.nan, np.float32)
    whole, lse = cache.attention(0, queries, [1], query_lens=[3], causal=False, return_lse=True, out=out)
    assert whole is out
    first = cache.attention(0, queries, [1], query_lens=[3], causal=False, return_lse=True, context_lens=[300])
    cache.keep_tokens(1, range(300, 700))
    second = cache.attention(0, queries, [1], query_lens=[3], causal=False, return_lse=True)
    merged, total = merge_attention(*first, *second)
    np.testing.assert_allclose(merged, whole, atol=0.02 * np.abs(whole).max())
    np.testing.assert_allclose(total, lse, atol=0.01)


TEXT = list(range(50))


def saved(rng, path, dims, formats, **options):
    cache, *_ = filled(rng, 48, dims, formats, num_layers=2, **options)
    prefixes = PrefixCache.over(cache)
    prefixes.adopt(TEXT[:48], cache.block_table([1]).indices)
    prefixes.save(path)
    return cache, prefixes


@pytest.mark.parametrize("formats", [("f32", "f16"), ("q8", "q8"), ("q3", "f32")], ids="-".join)
def test_saved_and_loaded(rng, tmp_path, formats):
    cache, prefixes = saved(rng, tmp_path / "cache", (64, 24), formats)
    (arena,) = oracle_snapshot.parse((tmp_path / "cache").read_bytes())["arenas"]
    assert (arena["shape"], arena["value_dim"], arena["layout"]) == ((2, HEADS, 64), 24, 3)
    other, *_ = filled(rng, 0, (64, 24), formats, num_layers=2)
    loaded = PrefixCache.over(other)
    assert loaded.load(tmp_path / "cache") == 3
    with loaded.open_session(TEXT) as session:
        other.adopt(7, session.shared_blocks, session.num_tokens)
    for layer in range(2):
        for got, want in zip(other.read(layer, 7), cache.read(layer, 1), strict=True):
            np.testing.assert_array_equal(got, want)
    for value_dim in (32, None):
        wrong = PrefixCache.over(
            PagedKvCache(
                9, SIZE, HEADS, 64, num_layers=2, key_dtype=formats[0], value_dtype=formats[1], value_head_dim=value_dim
            )
        )
        with pytest.raises(SnapshotError, match=rf"expected value_head_dim {value_dim or 64}, got 24$"):
            wrong.load(tmp_path / "cache")
        assert len(wrong) == 0
    with pytest.raises(SnapshotError, match=r"expected saved entries, got blocks$"):
        PrefixKvCache().load(tmp_path / "cache")


def test_a_file_of_equal_head_dims_is_as_before_there_were_two(rng, tmp_path):
    """Earlier versions read it, and theirs are read: the fields are the same, and the rest of an arena is zero."""
    saved(rng, tmp_path / "cache", (64, 64), ("q8", "q8"))
    (arena,) = oracle_snapshot.parse((tmp_path / "cache").read_bytes())["arenas"]
    assert (arena["shape"], arena["value_dim"], arena["layout"]) == ((2, HEADS, 64), 0, 2)


def test_blocks_as_flat_vectors(rng):
    """`PrefixCache` over such a cache stores and returns blocks with both sizes."""
    cache, *_ = filled(rng, 0, (24, 40), num_layers=2)
    prefixes = PrefixCache.over(cache)
    k, v = ([rng.standard_normal(HEADS * SIZE * dim).astype(np.float32) for _ in range(2)] for dim in (24, 40))
    block = prefixes.get_block(prefixes.insert(TEXT[:SIZE], 0, k, v))
    np.testing.assert_array_equal(block.keys, k)
    np.testing.assert_array_equal(block.values, v)
    assert block.memory_bytes == 2 * HEADS * SIZE * (24 + 40) * 4
    with pytest.raises(ValueError, match=r"^keys: expected shape \(768\), got \(1280,\)$"):
        prefixes.insert(TEXT[:SIZE], 0, v, v)
    prefixes.check()

"""Latent rows: one row per token, which all query heads read as their key, and the first channels of it as V."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.engine import dense_attention
from oracles.kernels import attend

from kvcache import Calibration, PagedKvCache, PrefixCache, merge_attention
from kvcache.errors import SnapshotError
from kvcache.kernels.kernels import FORMATS

SIZES = [(64, 32), (32, 16), (40, 8)]  # tiled and rotated; tiled of a block of 16 alone; neither
TOKENS = 45


class Halves:
    """A format in Python."""

    bits = 4.0

    def encode(self, rows):
        return np.round(2 * rows)

    def decode(self, codes):
        return codes / 2


def filled(latent, dtype, *, tokens=TOKENS, block_size=16, **options):
    """A cache with one sequence, and its rows as they are read."""
    cache = PagedKvCache(8, block_size, latent=latent, dtype=dtype, **options)
    rows = np.random.default_rng(1).standard_normal((tokens, 1, sum(latent))).astype(np.float32)
    cache.allocate(0, tokens)
    cache.write(0, 0, rows)
    return cache, rows


def known_by(rng, dim, layers=1):
    """A calibration with centres of five times the rows, and moments."""
    turns = rng.standard_normal((layers, 1, dim, dim))
    moments = (turns.swapaxes(2, 3) @ turns / dim).astype(np.float32)
    return Calibration(5 * rng.standard_normal((layers, 1, dim)), (moments + moments.swapaxes(2, 3)) / 2)


def error_of(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("latent", SIZES)
def test_attention_is_that_over_rows_and_their_first_channels(latent, dtype):
    cache, _ = filled(latent, dtype)
    keys, values = cache.read(0, 0)
    assert np.array_equal(values, keys[:, :, : latent[0]])
    for count in (1, 3, 30):  # by row, in tiles, staged
        queries = np.random.default_rng(2).standard_normal((count, 5, sum(latent))).astype(np.float32)
        got = cache.attention(0, queries, [0], query_lens=[count], scale=0.1)
        assert got.shape == (count, 5, latent[0])
        want = dense_attention(queries, keys, values, scale=0.1)
        assert error_of(got, want) < (3e-3 if FORMATS[dtype].quantised else 3e-6)
        last = cache.attention(0, queries[-1:], [0], scale=0.1)
        assert np.array_equal(last[0], got[-1]), "a query has other bits in company"


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_take_half_and_are_read_as_a_cache_of_keys_reads_them(dtype):
    """The rotation in parts: the same codes as of a cache with heads of one part each, but for their common scale."""
    cache, rows = filled((64, 32), dtype)
    apart = PagedKvCache(8, 16, 1, 96, dtype=dtype, value_head_dim=64)
    assert cache.block_memory_bytes * 160 == apart.block_memory_bytes * 96 or FORMATS[dtype].quantised
    assert cache.block_memory_bytes < 0.65 * apart.block_memory_bytes
    keys, _ = cache.read(0, 0)
    bound = {"f32": 0, "f16": 1e-3, "q8": 0.01, "q6": 0.04, "q5": 0.08, "q4": 0.15, "q3": 0.3, "q2": 0.55}
    assert error_of(keys, rows) <= bound[dtype]


def test_each_layer_may_have_another_format():
    """As caches of one layer each, bit for bit, through forks and cuts."""
    mixed = PagedKvCache(8, 16, latent=(64, 32), num_layers=len(FORMATS), dtype=[*FORMATS])
    mixed.allocate(0, TOKENS)
    alone = [filled((64, 32), name) for name in FORMATS]
    for layer, (_, rows) in enumerate(alone):
        mixed.write(layer, 0, rows)
    for cache in (mixed, *(cache for cache, _ in alone)):
        cache.fork(0, 1)
        cache.truncate(1, 20)
    queries = np.random.default_rng(2).standard_normal((5, 5, 96)).astype(np.float32)
    for layer, (cache, _) in enumerate(alone):
        for own, other in zip(mixed.read(layer, 1), cache.read(0, 1), strict=True):
            np.testing.assert_array_equal(own, other)
        own, other = (
            each.attention(i, queries, [0, 1], query_lens=[2, 3], scale=0.1) for each, i in ((mixed, layer), (cache, 0))
        )
        np.testing.assert_array_equal(own, other)
    mixed.check()


def test_an_outlier_is_spread_over_its_part():
    rows = np.random.default_rng(3).standard_normal((32, 1, 96)).astype(np.float32)
    rows[:, :, 5] *= 30
    errors = []
    for rotate in (True, False):
        cache = PagedKvCache(2, 16, latent=(64, 32), dtype="q4", rotate=rotate)
        cache.allocate(0, 32)
        cache.write(0, 0, rows)
        errors.append(error_of(cache.read(0, 0)[0], rows))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_forks_truncations_and_evictions_move_rows_whole(dtype):
    cache, _ = filled((64, 32), dtype)
    cache.fork(0, 1)
    cache.append(1, 1)
    cache.write(0, 1, np.ones((1, 1, 96), np.float32))
    kept = cache.read(0, 0)[0]
    assert np.array_equal(cache.read(0, 1)[0][:TOKENS], kept)
    cache.keep_tokens(1, [0, 3, 17, 44])
    cache.compact(1)
    assert np.array_equal(cache.read(0, 1)[0], kept[[0, 3, 17, 44]])
    cache.truncate(0, 20)
    cache.append(0, 2)
    assert not cache.read(0, 0, 20)[0].any(), "new tokens do not read as zeros"
    cache.check()


def test_rows_in_f16_beside_packed_ones():
    cache, rows = filled((64, 32), "q4", residual_length=16, first_tokens=4)
    queries = np.random.default_rng(4).standard_normal((1, 3, 96)).astype(np.float32)
    firsts, base, stop = cache.unpacked_tokens(0)
    mixed = cache.read(0, 0)[0].copy()
    newest = cache.read_unpacked(0, 0)
    assert np.array_equal(newest[1], newest[0][:, :, :64])
    own = 32  # where the group of the last token begins
    assert base <= own < stop == TOKENS
    mixed[:4], mixed[own:] = rows[:4].astype(np.float16), newest[0][firsts + own - base :]
    want = dense_attention(queries, mixed, mixed[:, :, :64], scale=0.1)
    assert error_of(cache.attention(0, queries, [0], scale=0.1), want) < 3e-3
    cache.fork(0, 1)
    last = [tuple(side[firsts + own - base :] for side in newest)]
    cache.unpack(1, last, [tuple(side.astype(np.float32) for side in (rows[:4], rows[:4, :, :64]))])
    assert np.array_equal(cache.attention(0, queries, [1], scale=0.1), cache.attention(0, queries, [0], scale=0.1))
    cache.check()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("latent", SIZES)
def test_rows_less_a_centre(rng, latent, dtype):
    """Outputs, log-sum-exps, masses and sinks are those of the rows that are read; V lacks the centre too."""
    dim, known = sum(latent), known_by(rng, sum(latent))
    rows = rng.standard_normal((TOKENS, 1, dim)).astype(np.float32) + known.centres[0]
    cache = PagedKvCache(8, 16, latent=latent, dtype=dtype, calibration=known)
    cache.allocate(0, TOKENS + 2)
    cache.write(0, 0, rows, start=0)
    keys, values = cache.read(0, 0)
    assert np.array_equal(values, keys[:, :, : latent[0]])
    assert not keys[TOKENS:].any(), "the centre was added to what was never written"
    bits = FORMATS[dtype].bits
    assert np.abs(keys[:TOKENS] - rows).max() <= {32: 2e-6, 16: 4e-3, 8: 0.05}.get(bits, 4)
    cache.truncate(0, TOKENS)
    sinks = rng.standard_normal(5).astype(np.float32) * 9
    for count, options in ((1, {}), (30, {}), (3, {"sinks": sinks})):
        queries = rng.standard_normal((count, 5, dim)).astype(np.float32)
        got = cache.attention(
            0, queries, [0], query_lens=[count], scale=0.1, return_scores=True, return_lse=True, **options
        )
        want = attend(queries, keys[:TOKENS], values[:TOKENS], 0.1, **options)
        allowed = 3e-3 if FORMATS[dtype].quantised else 3e-5
        for one, other in zip(got, (want[0], want[1].sum(0), want[2]), strict=True):
            assert error_of(one, other) < allowed
        alone = cache.attention(0, queries[-1:], [0], scale=0.1, **options)
        assert np.array_equal(alone[0], got[0][-1]), "a query has other bits in company"
    none = cache.attention(0, queries[:1], [0], context_lens=[0], scale=0.1)
    assert not none.any(), "a query without tokens has the centre"


@pytest.mark.parametrize("dtype", ["q8", "q4", "q3", "q2"])
def test_moments_steer_the_rounding_of_rotated_parts(rng, dtype):
    known = known_by(rng, 96)
    rows = rng.standard_normal((200, 1, 96)).astype(np.float32) + known.centres[0]
    errors = []
    for calibration in (Calibration(known.centres), known):
        cache = PagedKvCache(13, 16, latent=(64, 32), dtype=dtype, calibration=calibration)
        cache.allocate(0, 200)
        cache.write(0, 0, rows)
        error = (cache.read(0, 0)[0] - rows)[:, 0].astype(np.float64)
        errors.append(np.einsum("nd,de,ne->", error, known.moments[0, 0], error))
    assert errors[1] < 0.85 * errors[0]


def test_rows_in_f16_and_centred_ones_share_a_softmax(rng):
    """A residual has whole rows; parts in caches with and without a centre merge."""
    known = known_by(rng, 96)
    rows = rng.standard_normal((60, 1, 96)).astype(np.float32) + known.centres[0]
    queries = rng.standard_normal((1, 3, 96)).astype(np.float32)
    want = dense_attention(queries, rows, rows[:, :, :64], scale=0.1)
    mixed = PagedKvCache(8, 16, latent=(64, 32), dtype="f16", calibration=known, residual_length=16, first_tokens=4)
    mixed.allocate(0, 60)
    mixed.write(0, 0, rows)
    assert error_of(mixed.attention(0, queries, [0], scale=0.1), want) < 2e-3
    parts = []
    for calibration, part in ((known, slice(0, 30)), (None, slice(30, 60))):
        cache = PagedKvCache(8, 16, latent=(64, 32), dtype="f32", calibration=calibration)
        cache.allocate(0, 30)
        cache.write(0, 0, rows[part])
        parts += cache.attention(0, queries, [0], scale=0.1, return_lse=True)
    assert error_of(merge_attention(*parts)[0], want) < 1e-4


def test_pieces_and_saved_prefixes_keep_centred_rows(rng, tmp_path):
    known = known_by(rng, 96, 2)
    rows = rng.standard_normal((2, 40, 1, 96)).astype(np.float32) + known.centres[:, None]
    whole, pieces = (PagedKvCache(8, 16, latent=(64, 32), dtype="q4", num_layers=2, calibration=known) for _ in "ab")
    for cache, steps in ((whole, [40]), (pieces, [1] * 3 + [20, 17])):
        cache.allocate(0, 0)
        for first, count in zip(np.cumsum([0, *steps]), steps, strict=False):
            cache.append(0, count)
            for layer in range(2):
                cache.write(layer, 0, rows[layer, first : first + count])
    for layer in range(2):
        assert np.array_equal(whole.read(layer, 0)[0], pieces.read(layer, 0)[0])
    prefixes = PrefixCache.over(whole)
    prefixes.adopt(list(range(32)), whole.block_table([0]).block_ids[:2])
    prefixes.save(tmp_path / "file", "model")
    other = PrefixCache.over(PagedKvCache(8, 16, latent=(64, 32), dtype="q4", num_layers=2))
    with pytest.raises(SnapshotError, match="expected model"):
        other.load(tmp_path / "file", "model")
    target = PagedKvCache(8, 16, latent=(64, 32), dtype="q4", num_layers=2, calibration=known)
    loaded = PrefixCache.over(target)
    assert loaded.load(tmp_path / "file", "model") == 2
    with loaded.open_session(list(range(32))) as found:
        target.adopt(7, found.shared_blocks, 32)
    assert np.array_equal(target.read(1, 7)[1], whole.read(1, 0)[1][:32])


def test_what_is_refused():
    cache, rows = filled((64, 32), "q4")
    before = cache.read(0, 0)[0]
    with pytest.raises(ValueError, match=r"^values: expected None of a cache of latent rows"):
        cache.write(0, 0, rows, rows[:, :, :64])
    with pytest.raises(ValueError, match=r"^keys: expected"):
        cache.write(0, 0, rows[:, :, :64])
    assert np.array_equal(cache.read(0, 0)[0], before)
    for name in ("num_heads", "head_dim", "value_head_dim"):
        with pytest.raises(ValueError, match=rf"^{name}: expected None beside latent, got 64$"):
            PagedKvCache(4, 16, latent=(64, 32), **{name: 64})
    with pytest.raises(ValueError, match=r"^value_dtype: expected q8, as of keys, with latent, got q4"):
        PagedKvCache(4, 16, latent=(64, 32), key_dtype="q8", value_dtype="q4")
    for formats in ({"key_dtype": "f32", "value_dtype": Halves()}, {"key_dtype": Halves(), "value_dtype": Halves()}):
        with pytest.raises(ValueError, match=r"^value_dtype: expected .* as of keys, with latent, got <.*Halves"):
            PagedKvCache(4, 16, latent=(64, 32), **formats)
    halves = PagedKvCache(4, 16, latent=(64, 32), dtype=Halves())
    halves.allocate(0, TOKENS)
    halves.write(0, 0, rows)
    assert np.array_equal(halves.read(0, 0)[1], np.round(2 * rows)[:, :, :64] / 2)
    with pytest.raises(ValueError, match=r"^head_dim: expected a multiple of 8, at most 576, got 580$"):
        PagedKvCache(4, 16, latent=(512, 68))
    with pytest.raises(ValueError, match=r"^calibration: expected one of \(1, 1, 96\) layers, heads and channels, got"):
        PagedKvCache(4, 16, latent=(64, 32), dtype="q4", calibration=Calibration(np.zeros((1, 1, 64))))
    for wrong in (64, (64,), "ab"):
        with pytest.raises(TypeError, match=r"^latent: expected"):
            PagedKvCache(4, 16, latent=wrong)

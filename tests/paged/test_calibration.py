"""`PagedKvCache(calibration=...)`: what is read and attended is that of the keys themselves."""

import numpy as np
import pytest
from oracles import kernels as oracle

from kvcache import Calibration, PagedKvCache, PrefixCache, merge_attention
from kvcache.errors import SnapshotError
from kvcache.kernels.kernels import FORMATS

pytestmark = pytest.mark.one_build

LAYERS, HEADS, DIM = 2, 2, 32


@pytest.fixture
def known(rng):
    turns = rng.standard_normal((LAYERS, HEADS, DIM, DIM)).astype(np.float32)
    moments = turns.swapaxes(2, 3) @ turns / DIM
    return Calibration(rng.standard_normal((LAYERS, HEADS, DIM)) * 30, (moments + moments.swapaxes(2, 3)) / 2)


def make(dtype, known, **options):
    return PagedKvCache(40, 16, HEADS, DIM, num_layers=LAYERS, dtype=dtype, calibration=known, **options)


def rows_of(rng, known, count, layer):
    keys = rng.standard_normal((count, HEADS, DIM)).astype(np.float32) + known.centres[layer]
    return keys, rng.standard_normal((count, HEADS, DIM)).astype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_read_and_attended_is_that_of_the_keys(rng, known, dtype):
    cache, bits = make(dtype, known), FORMATS[dtype].bits
    cache.allocate(1, 50)
    for layer in range(LAYERS):
        keys, values = rows_of(rng, known, 50, layer)
        cache.write(layer, 1, keys, values)
        back, mixed = cache.read(layer, 1)
        assert np.abs(back - keys).max() <= {32: 2e-5, 16: 5e-3, 8: 0.4}.get(bits, 30)
        queries = rng.standard_normal((3, 2 * HEADS, DIM)).astype(np.float32)
        out, mass, lse = cache.attention(layer, queries, [1], query_lens=[3], return_scores=True, return_lse=True)
        expected = oracle.attend(queries, back, mixed, DIM**-0.5)
        np.testing.assert_allclose(out, expected[0], atol=0.03)
        np.testing.assert_allclose(mass, expected[1].sum(axis=0), atol=0.05)
        np.testing.assert_allclose(lse, expected[2], atol=0.03)


@pytest.mark.parametrize("dtype", FORMATS)
def test_forks_cuts_and_blocks_that_are_adopted_have_the_same_keys(rng, known, dtype):
    cache = make(dtype, known)
    cache.allocate(1, 40)
    keys, values = rows_of(rng, known, 40, 0)
    cache.write(0, 1, keys, values)
    before = cache.read(0, 1)[0]
    cache.fork(1, 2)
    cache.append(2, 5)  # nothing is written to them
    np.testing.assert_array_equal(cache.read(0, 2)[0][:40], before)
    assert not cache.read(0, 2, 40)[0].any()
    cache.truncate(2, 20)
    cache.adopt(3, cache.block_table([1]).block_ids, 40)
    cache.compact(1)
    cache.grow(10)
    np.testing.assert_array_equal(cache.read(0, 2)[0], before[:20])
    np.testing.assert_array_equal(cache.read(0, 3)[0], before)
    token_by_token = make(dtype, known)
    token_by_token.allocate(1, 0)
    for i in range(40):
        token_by_token.append(1, 1)
        token_by_token.write(0, 1, keys[i : i + 1], values[i : i + 1])
    np.testing.assert_array_equal(token_by_token.read(0, 1)[0], before)
    cache.check()


def test_parts_in_different_caches_merge(rng, known):
    """The log-sum-exp is that of the keys themselves, so a part may lie in a cache without a calibration."""
    centred, plain = make("f32", known), make("f32", None)
    keys, values = rows_of(rng, known, 60, 0)
    queries = rng.standard_normal((1, HEADS, DIM)).astype(np.float32)
    whole = oracle.attend(queries, keys, values, DIM**-0.5)[0]
    parts = []
    for cache, part in ((centred, slice(0, 30)), (plain, slice(30, 60))):
        cache.allocate(1, 30)
        cache.write(0, 1, keys[part], values[part])
        parts += cache.attention(0, queries, [1], return_lse=True)
    np.testing.assert_allclose(merge_attention(*parts)[0], whole, atol=1e-4)


def test_sinks_join_the_scores_of_the_keys_themselves(rng, known):
    cache = make("f32", known)
    keys, values = rows_of(rng, known, 60, 0)
    queries = rng.standard_normal((5, 2 * HEADS, DIM)).astype(np.float32)
    cache.allocate(1, 60)
    cache.write(0, 1, keys, values)
    logs = oracle.attend(queries, keys, values, DIM**-0.5)[2]
    for sinks in (logs.mean(0), logs + rng.standard_normal(logs.shape)):
        sinks = sinks.astype(np.float32)
        before = sinks.copy()
        whole, mass, lse = oracle.attend(queries, keys, values, DIM**-0.5, sinks=sinks)
        found = cache.attention(0, queries, [1], query_lens=[5], sinks=sinks, return_scores="head", return_lse=True)
        for part, expected in zip(found, (whole, mass.reshape(HEADS, 2, -1).sum(1), lse), strict=True):
            np.testing.assert_allclose(part, expected, atol=2e-4)
        np.testing.assert_array_equal(sinks, before)
    for shape in ((5, 3), (4, 2 * HEADS), (1, 5, 2 * HEADS), (5, 2 * HEADS)):
        wrong = np.full(shape, np.nan if shape == (5, 2 * HEADS) else 0.0)
        with pytest.raises(ValueError, match=r"^sinks: expected "):
            cache.attention(0, queries, [1], query_lens=[5], sinks=wrong)


def test_what_would_tell_the_constant_is_refused(rng, known):
    cache = make("q4", known)
    cache.allocate(1, 4)
    queries = rng.standard_normal((1, HEADS, DIM)).astype(np.float32)
    for name, value in (("softcap", 5.0), ("sink_queries", queries)):
        with pytest.raises(ValueError, match=rf"^{name}: expected none in a layer whose keys a calibration centres"):
            cache.attention(0, queries, [1], **{name: value})
    make_zero = make("q4", known.without_centres([0, 1]))
    make_zero.allocate(1, 4)
    make_zero.attention(0, queries, [1], softcap=5.0, sinks=np.ones(HEADS))


def test_keys_too_far_from_a_centre_are_refused(known):
    cache = make("f16", known)
    cache.allocate(1, 1)
    rows = np.zeros((1, HEADS, DIM), np.float32)
    rows[0, 1, 3] = 65500
    with pytest.raises(ValueError, match=r"^keys: expected values that f16 can hold, up to .* beside the centres"):
        cache.write(0, 1, rows, rows)
    for shape in ((LAYERS, HEADS, 16), (1, HEADS, DIM)):
        with pytest.raises(ValueError, match=r"^calibration: expected one of \(2, 2, 32\)"):
            make("q4", Calibration(np.zeros(shape)))
    with pytest.raises(TypeError, match=r"^calibration: expected a Calibration"):
        make("q4", "auto")


def test_a_saved_cache_is_of_one_calibration(rng, known, tmp_path):
    others = {"same": known, "none": None, "other": known.without_centres([0])}
    source = make("q4", known)
    prefixes = PrefixCache.over(source)
    source.allocate(1, 32)
    for layer in range(LAYERS):
        source.write(layer, 1, *rows_of(rng, known, 32, layer))
    prefixes.adopt(list(range(32)), source.block_table([1]).block_ids)
    prefixes.save(tmp_path / "file", "model")
    for name, calibration in others.items():
        target = make("q4", calibration)
        loaded = PrefixCache.over(target)
        if name == "same":
            assert loaded.load(tmp_path / "file", "model") == 2
            with loaded.open_session(list(range(32))) as found:
                target.adopt(7, found.shared_blocks, 32)
            np.testing.assert_array_equal(target.read(1, 7)[0], source.read(1, 1)[0])
        else:
            with pytest.raises(SnapshotError, match="expected model"):
                loaded.load(tmp_path / "file", "model")

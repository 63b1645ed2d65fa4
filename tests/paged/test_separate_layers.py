"""`PagedKvCache(separate_layers=True)`: a sequence for each layer, each with its own tokens, in blocks of one layer."""

import numpy as np
import pytest

from kvcache import Calibration, PagedKvCache, PrefixCache
from kvcache.kernels.kernels import FORMATS

pytestmark = pytest.mark.one_build

LAYERS, HEADS, DIM, TOKENS = 3, 2, 32, 50


@pytest.fixture
def known(rng):
    turns = rng.standard_normal((LAYERS, HEADS, DIM, DIM)).astype(np.float32)
    moments = turns.swapaxes(2, 3) @ turns / DIM
    return Calibration(rng.standard_normal((LAYERS, HEADS, DIM)) * 30, (moments + moments.swapaxes(2, 3)) / 2)


def make(dtype, known, num_blocks=30, **options):
    return PagedKvCache(num_blocks, 16, HEADS, DIM, num_layers=LAYERS, dtype=dtype, calibration=known, **options)


def rows_of(rng, known, layer):
    keys = rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32) + known.centres[layer]
    return keys, rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"residual_length": 16, "first_tokens": 16}], ids=["bare", "residual"])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
def test_each_layer_has_the_bits_of_a_cache_whose_blocks_hold_all(rng, known, dtype, calibrated, options):
    calibration = known if calibrated else None
    whole, apart = make(dtype, calibration, **options), make(dtype, calibration, separate_layers=True, **options)
    assert (apart.num_layers, apart.block_memory_bytes * LAYERS) == (LAYERS, whole.block_memory_bytes)
    whole.allocate(9, 0)
    whole.append(9, TOKENS)
    for layer in range(LAYERS):
        rows = rows_of(rng, known, layer)
        apart.allocate(layer, 0)
        apart.append(layer, TOKENS)
        whole.write(layer, 9, *rows)
        apart.write(layer, layer, *rows)
        queries = rng.standard_normal((3, 2 * HEADS, DIM)).astype(np.float32)
        given = {"query_lens": [3], "return_lse": True}
        for one, other in zip(
            (*whole.read(layer, 9), *whole.attention(layer, queries, [9], **given)),
            (*apart.read(layer, layer), *apart.attention(layer, queries, [layer], **given)), strict=True,
        ):
            np.testing.assert_array_equal(one, other)
    apart.check()


@pytest.mark.parametrize("dtype", ["f16", "q4"])
def test_layers_keep_other_tokens_each_with_its_own_centre(rng, known, dtype):
    cache = make(dtype, known, separate_layers=True)
    for layer in range(LAYERS):
        cache.allocate(layer, TOKENS)
        cache.write(layer, layer, *rows_of(rng, known, layer))
    before = [cache.read(layer, layer)[0] for layer in range(LAYERS)]
    for layer in range(LAYERS):
        cache.fork(layer, LAYERS + layer)
        kept = np.flatnonzero(rng.random(TOKENS) < 0.3)
        cache.keep_tokens(layer, kept)
        cache.compact(layer)
        cache.append(layer, 2)
        np.testing.assert_array_equal(cache.read(layer, layer)[0][:-2], before[layer][kept])
        assert not cache.read(layer, layer)[0][-2:].any()  # no centre is added to what was not written
        cache.swap(layer, LAYERS + layer)
        cache.grow(5)
        np.testing.assert_array_equal(cache.read(layer, layer)[0], before[layer])
        assert np.abs(before[layer] - known.centres[layer]).max() < 8
    cache.check()


def test_centres_and_feedback_take_most_of_the_error_off_keys_with_a_constant(rng, known):
    for layer in range(LAYERS):
        keys, values = rows_of(rng, known, layer)
        queries = rng.multivariate_normal(np.zeros(DIM), known.moments[layer, 0], (1, HEADS)).astype(np.float32)
        outs = []
        for dtype, calibration in (("f32", None), ("q4", None), ("q4", known)):
            cache = make(dtype, calibration, separate_layers=True)
            cache.allocate(7, TOKENS)
            cache.write(layer, 7, keys, values)
            outs.append(cache.attention(layer, queries, [7]))
        plain, calibrated = (np.abs(out - outs[0]).mean() for out in outs[1:])
        assert calibrated < 0.4 * plain


def test_what_does_not_fit_is_refused(known):
    cache = make("q4", known, separate_layers=True)
    cache.allocate(0, 1)
    rows = np.zeros((1, HEADS, DIM), np.float32)
    for call in (
        lambda layer: cache.write(layer, 0, rows, rows), lambda layer: cache.read(layer, 0),
        lambda layer: cache.attention(layer, rows, [0]),
    ):
        call(LAYERS - 1)
        for layer in (-1, LAYERS):
            with pytest.raises(IndexError, match=rf"^layer: expected an int in \[0, {LAYERS}\), got {layer}"):
                call(layer)
    with pytest.raises(ValueError, match=r"^calibration: expected one of \(3, 2, 32\) layers"):
        make("q4", known.of_layers([0]), separate_layers=True)
    with pytest.raises(ValueError, match=r"^dtype: expected one format with separate_layers, got \['q4', 'q4', 'q4'\]"):
        make(["q4"] * LAYERS, known, separate_layers=True)
    with pytest.raises(ValueError, match=r"^paged: expected one whose blocks hold all layers"):
        PrefixCache.over(cache)


def test_memory_counts_blocks_of_one_layer(known):
    cache = make("q4", known, None, max_memory_bytes=100_000, separate_layers=True)
    block = make("q4", known, 1).total_memory_bytes // LAYERS
    assert cache.total_blocks == 100_000 // block
    assert cache.memory()["kv"] == cache.total_memory_bytes == cache.total_blocks * block
    assert "num_layers=3, separate_layers=True" in repr(cache)
    assert PagedKvCache(3, 4, 1, 8, num_layers=0, separate_layers=True).total_memory_bytes == 0

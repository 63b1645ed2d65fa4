"""Index layers: keys of indexers beside latent rows, the tokens that they choose, and attention to these."""

from __future__ import annotations

import numpy as np
import pytest
from dense_runs import chosen_tokens
from oracles.engine import dense_attention

from kvcache import Calibration, PagedKvCache
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.protocols import IndexRows
from kvcache.paged.queried import QueriedSequences

LATENT, DIM = (32, 8), 24


def new_cache(dtype="f32", index_dtype="f32", **options):
    options = {"num_layers": 2, "index_layers": 2, "index_dim": DIM} | options
    return PagedKvCache(40, 16, latent=LATENT, dtype=dtype, index_dtype=index_dtype, **options)


def filled(cache, rng, tokens, seq_id=0):
    """The rows of a new sequence: for each layer keys, then for each index layer."""
    cache.allocate(seq_id, tokens)
    found = []
    for layer in range(4):
        rows = rng.standard_normal((tokens, 1, sum(LATENT) if layer < 2 else DIM), np.float32)
        cache.write(layer, seq_id, rows)
        found.append(rows)
    return found


def drawn(rng, count, heads=9):
    return (
        rng.standard_normal((count, heads, DIM), np.float32), rng.standard_normal((count, heads), np.float32),
        rng.standard_normal((count, 130, sum(LATENT)), np.float32),
    )


def test_choice_and_attention_are_those_over_the_stored_rows(rng):
    """Every format; queries that see fewer tokens than they may choose, and more; 130 heads, which take two items."""
    for dtype in FORMATS:
        cache = new_cache(dtype, "q8" if FORMATS[dtype].quantised else dtype)
        filled(cache, rng, 90)
        (keys, values), index = cache.read(1, 0), cache.read(3, 0)[0]
        queries, weights, own = drawn(rng, 60)
        chosen = cache.choose_tokens(3, queries, weights, [0], 40, query_lens=[60])
        wanted = chosen_tokens(IndexRows(queries, weights, None), index, 40)
        lists = [row[row >= 0] for row in chosen[:, 0]]
        if not FORMATS[dtype].quantised:  # products with codes are rounded
            for found, expected in zip(lists, wanted, strict=True):
                np.testing.assert_array_equal(found, expected)
        out = cache.attention(1, own, [0], query_lens=[60], tokens=chosen)
        for i in range(0, 60, 7):
            expected = dense_attention(own[i : i + 1], keys[lists[i]], values[lists[i]])
            np.testing.assert_allclose(out[i : i + 1], expected, atol=1e-5)


def test_of_equal_scores_the_first_are_chosen(rng):
    """Weights below 0 and relu leave many zeros, which lie between the others."""
    cache = new_cache()
    filled(cache, rng, 70)
    numbers = rng.integers(-1, 2, (70, 1, DIM)).astype(np.float32)
    cache.write(2, 0, numbers)
    queries = rng.integers(-1, 2, (70, 2, DIM)).astype(np.float32)
    weights = rng.integers(-1, 2, (70, 2)).astype(np.float32)
    for asked in (1, 3, 30, 69, 70, 100, 2**63 - 1):
        chosen, most = cache.choose_tokens(2, queries, weights, [0], asked, query_lens=[70]), min(asked, 640)
        assert chosen.shape == (70, 1, most)
        for found, expected in zip(chosen[:, 0], chosen_tokens(IndexRows(queries, weights, None), numbers, most),
                                   strict=True):
            np.testing.assert_array_equal(found, np.pad(expected, (0, most - len(expected)), constant_values=-1))
    weights[:, 1] = np.nan  # no score is a number
    chosen = cache.choose_tokens(2, queries[-1:], weights[-1:], [0], 5)
    np.testing.assert_array_equal(chosen[0, 0], np.arange(5))


def test_a_choice_does_not_depend_on_others_in_the_call(rng):
    cache = new_cache("f16", "f16")
    for seq_id, tokens in ((0, 200), (1, 30), (2, 120)):
        filled(cache, rng, tokens, seq_id)
    queries, weights, _ = drawn(rng, 11)
    lens = [6, 2, 3]
    whole = cache.choose_tokens(2, queries, weights, [0, 1, 2], 50, query_lens=lens)
    for seq_id, (first, stop) in enumerate(((0, 6), (6, 8), (8, 11))):
        for row in range(first, stop):
            cache.fork(seq_id, 9)
            cache.truncate(9, len(cache.read(2, seq_id)[0]) - (stop - row - 1))
            alone = cache.choose_tokens(2, queries[row : row + 1], weights[row : row + 1], [9], 50)
            np.testing.assert_array_equal(alone[0], whole[row])
            cache.free(9)


def test_a_call_has_its_own_copy_of_the_tokens():
    """Without a lock of Python's, a kernel reads what was checked, whatever another thread writes to the array."""
    tokens = np.zeros((1, 1, 4), np.int32)
    assert not np.shares_memory(QueriedSequences([0], tokens=tokens).tokens, tokens)


def test_keys_lie_in_the_blocks_of_their_tokens(rng):
    """Forks share them until one writes; they count as K and V do."""
    cache, plain = new_cache(index_dtype="f16"), PagedKvCache(40, 16, latent=LATENT, num_layers=2, dtype="f32")
    assert (cache.num_layers, cache.index) == (2, (2, DIM, "f16"))
    assert cache.block_memory_bytes - plain.block_memory_bytes == 2 * 16 * DIM * 2
    rows = filled(cache, rng, 20)
    cache.fork(0, 1)
    cache.append(1, 1)
    new = rng.standard_normal((1, 1, DIM), np.float32)
    cache.write_batch(3, [1], new)
    np.testing.assert_array_equal(cache.read(3, 1)[0], np.concatenate([rows[3], new]).astype(np.float16))
    np.testing.assert_array_equal(cache.read(3, 0)[0], rows[3].astype(np.float16))
    cache.keep_tokens(0, np.arange(3, 20, 2))
    np.testing.assert_array_equal(cache.read(2, 0)[0], rows[2][3::2].astype(np.float16))
    cache.compact(0)
    np.testing.assert_array_equal(cache.read(2, 0)[0], rows[2][3::2].astype(np.float16))
    cache.check()


def test_what_is_refused(rng):
    cache = new_cache()
    filled(cache, rng, 20)
    queries, weights, own = drawn(rng, 1)
    for layer in (1, 4):
        with pytest.raises(IndexError, match=r"layer: expected an index layer, in \[2, 4\), got"):
            cache.choose_tokens(layer, queries, weights, [0], 5)
    with pytest.raises(IndexError, match=r"layer: expected one with K and V, got the index layer 3"):
        cache.attention(3, own, [0])
    with pytest.raises(ValueError, match=r"values: expected None of an index layer, got rows"):
        cache.write(2, 0, np.zeros((20, 1, DIM), np.float32), np.zeros((20, 1, DIM), np.float32))
    with pytest.raises(ValueError, match=r"keys: expected shape \(any, 1, 24\), got \(20, 1, 40\)"):
        cache.write(2, 0, np.zeros((20, 1, 40), np.float32))
    with pytest.raises(ValueError, match=r"weights: expected shape \(1, 9\), got \(1, 8\)"):
        cache.choose_tokens(2, queries, weights[:, :8], [0], 5)
    with pytest.raises(ValueError, match=r"top_tokens: expected None with latent, got 16"):
        cache.attention(0, own, [0], top_tokens=16)
    with pytest.raises(ValueError, match=r"index_layers: expected residual_length and first_tokens 0 beside it"):
        new_cache("q4", residual_length=16)
    with pytest.raises(ValueError, match=r"calibration: expected None with index_layers, got one"):
        new_cache("q4", calibration=Calibration(np.zeros((2, 1, 40))))
    with pytest.raises(ValueError, match=r"index_layers: expected 0 without layers of latent rows, got 1"):
        PagedKvCache(4, 16, 1, 8, index_layers=1)
    for name, value, message in (
        ("index_dim", 20, "index_dim: expected a multiple of 8"), ("index_dtype", "q7", "index_dtype: expected one of"),
        ("index_layers", -1, "index_layers: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            new_cache(**{name: value})

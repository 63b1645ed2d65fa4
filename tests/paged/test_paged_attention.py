"""PagedKvCache.attention against float64, through every kind of block table."""

import numpy as np
import pytest
from oracles.kernels import attention
from small_paged import rows

from kvcache import PagedKvCache
from kvcache.errors import SequenceNotFoundError


def fill(cache, rng, seq_id, n):
    shape = (n, cache.num_heads, cache.head_dim)
    k, v = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    cache.allocate(seq_id, n)
    for layer in range(cache.num_layers):
        cache.write(layer, seq_id, k * (layer + 1), v - layer)
    return k, v


def close(got, want, tolerance=5e-6):
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 64), (1, 1, 8), (3, 2, 40)])
def test_mixed_batch(dtype, block_size, heads, group, dim):
    rng = np.random.default_rng(block_size)
    lengths, query_lens = [1, 37, 130, 64, 9], [1, 1, 40, 64, 0]
    cache = PagedKvCache(600 // block_size + 6, block_size, heads, dim, num_layers=2, dtype=dtype)
    for i, n in enumerate(lengths):
        fill(cache, rng, i, n)
    q = rng.standard_normal((sum(query_lens), heads * group, dim)).astype(np.float32)
    out, mass = cache.attention(1, q, range(5), query_lens=query_lens, return_scores=True)
    at = token = 0
    for i, (n, lens) in enumerate(zip(lengths, query_lens, strict=True)):
        k, v = cache.read(1, i)
        if lens:
            want, want_mass = attention(q[at : at + lens], k, v, dim**-0.5)
            close(out[at : at + lens], want)
            close(mass[token : token + n], want_mass)
        else:
            assert not mass[token : token + n].any()
        at += lens
        token += n


def test_holes_forks_and_sinks():
    rng = np.random.default_rng(1)
    cache = PagedKvCache(64, 8, 2, 32, dtype="f32")
    k, v = fill(cache, rng, 0, 100)
    cache.fork(0, 1)
    cache.apply_streaming_llm(0, 5, 30)
    kept = [*range(5), *range(70, 100)]
    q, sink_q = rng.standard_normal((2, 1, 4, 32)).astype(np.float32)
    close(cache.attention(0, q, [0]), attention(q, k[kept], v[kept], 32**-0.5)[0])
    # With sink queries, the sinks are scored by these.
    far = attention(q, k[kept], v[kept], 32**-0.5, sink_queries=sink_q, sink_tokens=5)[0]
    close(cache.attention(0, q, [0], sink_queries=sink_q), far)
    close(cache.attention(0, q, [1], sink_queries=sink_q), attention(q, k, v, 32**-0.5)[0])
    cache.keep_tokens(1, range(0, 100, 3))
    close(cache.attention(0, q, [1]), attention(q, k[::3], v[::3], 32**-0.5)[0])


def test_out_is_written_and_returned():
    rng = np.random.default_rng(2)
    cache = PagedKvCache(8, 8, 1, 8, dtype="f32")
    fill(cache, rng, 0, 5)
    q = rng.standard_normal((1, 2, 8)).astype(np.float32)
    out = np.full_like(q, np.nan)
    assert cache.attention(0, q, [0], out=out) is out
    np.testing.assert_array_equal(out, cache.attention(0, q, [0]))


def test_bad_calls():
    rng = np.random.default_rng(3)
    cache = PagedKvCache(8, 8, 2, 8, dtype="f32")
    fill(cache, rng, 0, 5)
    q = np.zeros((1, 2, 8), np.float32)
    for wrong, message in (
        ({"queries": np.zeros((1, 3, 8), np.float32)}, "multiple of 2"),
        ({"queries": np.zeros((1, 2, 16), np.float32)}, "queries: expected shape"),
        ({"seq_ids": [0, 0]}, "queries: expected 2 rows"),
        ({"query_lens": [2]}, "queries: expected 2 rows"),
        ({"query_lens": [6], "queries": np.zeros((6, 2, 8), np.float32)}, "0 to 5 queries"),
        ({"query_lens": [1, 1]}, "query_lens: expected 1 "),
        ({"sink_queries": np.zeros((2, 2, 8), np.float32)}, "sink_queries"),
        ({"out": np.zeros((1, 2, 8))}, "out"),
        ({"out": q}, "same memory"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.attention(0, **({"queries": q, "seq_ids": [0]} | wrong))
    with pytest.raises(SequenceNotFoundError):
        cache.attention(0, q, [1])
    with pytest.raises(IndexError, match="layer"):
        cache.attention(1, q, [0])


@pytest.mark.parametrize("queries", [49, 97, 100])
def test_scores_belong_to_the_output(queries):
    """The weights of a query add up to 1 for every number of rows and every magnitude of scores."""
    rng = np.random.default_rng(queries)
    cache = PagedKvCache(16, 16, 1, 64, dtype="q4")
    fill(cache, rng, 0, 120)
    q = 300 * rng.standard_normal((queries, 2, 64)).astype(np.float32)
    _, mass = cache.attention(0, q, [0], query_lens=[queries], return_scores=True)
    np.testing.assert_allclose(mass.sum(), 2 * queries, rtol=1e-5)


@pytest.mark.parametrize("name", ["queries", "sink_queries", "seq_ids", "query_lens", "context_lens"])
def test_out_is_apart_from_every_other_argument(rng, name):
    cache = PagedKvCache(8, 16, 1, 8, dtype="f32")
    for seq in range(4):
        cache.allocate(seq, 10)
        cache.write(0, seq, *rows(rng, 20, 1).reshape(2, 10, 1, 8))
    out = np.empty((4, 1, 8), np.float32)
    arguments = {
        "queries": rows(rng, 4, 1), "sink_queries": rows(rng, 4, 1), "seq_ids": np.arange(4, dtype=np.uint64),
        "query_lens": np.ones(4, np.int64), "context_lens": np.full(4, 10),
    }
    want = cache.attention(0, **arguments)
    np.testing.assert_array_equal(cache.attention(0, **arguments, out=out), want)
    given = arguments[name]
    # The last 8 bytes of `out` are its first.
    memory = np.zeros(400, np.uint8)
    out = memory[:128].view(np.float32).reshape(4, 1, 8)
    inside = memory[120 : 120 + given.nbytes].view(given.dtype).reshape(given.shape)
    inside[...] = given
    before = memory.copy()
    with pytest.raises(ValueError, match=f"apart from {name}"):
        cache.attention(0, **arguments | {name: inside}, out=out)
    np.testing.assert_array_equal(memory, before)

"""Sequences that begin with the same blocks are read together; each query has the bits that it has alone."""

import numpy as np
import pytest
from pace import FAST

from kvcache import PagedKvCache, get_num_threads, set_num_threads

DIM, COUNT = 32, 11
FORMATS = ["f32", "f16", "q8", "q4", ("q8", "q3"), ("f16", "q4")]
OF_EACH = ("starts", "mask", "sink_queries", "firsts")  # arrays with an element of each sequence or query
LENGTHS = [(300, (1, 2)), (1100, (300, 40, 1, 5)), (2500, (700, 1, 90))]  # shared tokens, and own ones in turn
SHAPES = [(16, 3, 1), (48, 1, 2), (10, 2, 1), (256, 2, 2), (16, 1, 3)]  # of blocks, heads and groups


@pytest.fixture
def threads_kept():
    """Restore the number of threads afterwards."""
    before = get_num_threads()
    yield
    set_num_threads(before)


def family(rng, dtype, block_size, heads, shared, own):
    """A cache with COUNT sequences that share their first tokens; every fourth one shares its own with the next two."""
    key, value = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    blocks = (shared + COUNT * max(own)) // block_size + 4 * COUNT
    cache = PagedKvCache(blocks, block_size, heads, DIM, key_dtype=key, value_dtype=value)

    def write(seq_id, count):
        keys, values = rng.standard_normal((2, count, heads, DIM)).astype(np.float32)
        cache.write(0, seq_id, keys, values)

    cache.allocate(0, shared)
    write(0, shared)
    for seq_id in range(1, COUNT):
        cache.fork(seq_id - 1 if seq_id % 4 in (1, 2) else 0, seq_id)
        cache.append(seq_id, own[seq_id % len(own)])
        write(seq_id, own[seq_id % len(own)])
    return cache


def length(cache, seq_id):
    return cache.handle(seq_id).num_tokens


def expect_same_alone(rng, cache, group, lens, hidden=None, **options):
    """One call over all sequences, and one over each: the same bits."""
    ids, stops = np.arange(COUNT), np.cumsum(lens)
    queries = rng.standard_normal((stops[-1], cache.num_heads * group, DIM)).astype(np.float32)
    shown = None if hidden is None else [length(cache, i) - hidden[i] for i in range(COUNT)]
    set_num_threads(int(rng.integers(1, 6)))
    together = cache.attention(
        0, queries, ids, query_lens=lens, context_lens=shown, return_lse=True, return_scores=True, **options
    )
    set_num_threads(int(rng.integers(1, 4)))
    at = 0
    for i, stop in enumerate(stops.tolist()):
        mine = slice(stop - int(lens[i]), stop)
        own = {name: x[i : i + 1] if name == "starts" else x[mine] for name, x in options.items() if name in OF_EACH}
        alone = cache.attention(
            0, queries[mine], [i], query_lens=lens[i : i + 1], context_lens=None if shown is None else shown[i : i + 1],
            return_lse=True, return_scores=True, **{**options, **own},
        )
        seen = len(alone[1])
        for got, want in zip((together[0][mine], together[1][at : at + seen], together[2][mine]), alone, strict=True):
            assert got.tobytes() == want.tobytes(), (i, options)
        at += seen


@pytest.mark.parametrize("dtype", FORMATS[-3:] if FAST else FORMATS, ids=str)
@pytest.mark.parametrize("which", range(2 if FAST else 3))
def test_queries_have_the_bits_that_they_have_alone(threads_kept, rng, dtype, which):
    """Every length and every shape, not each with each."""
    for block_size, heads, group in SHAPES[which::3]:
        cache = family(rng, dtype, block_size, heads, *LENGTHS[which])
        ones, few = np.ones(COUNT, np.int64), rng.integers(0, 7, COUNT)
        expect_same_alone(rng, cache, group, ones)
        expect_same_alone(rng, cache, group, ones * 8)
        expect_same_alone(rng, cache, group, np.where(np.arange(COUNT) == 5, 60, few))
        expect_same_alone(rng, cache, group, few, hidden=rng.integers(0, 250, COUNT))
        expect_same_alone(rng, cache, group, few, causal=False)
        cache.check()


def test_options_with_which_they_see_other_tokens(threads_kept, rng):
    """Windows, other text positions, skipped tokens, and trees."""
    cache = family(rng, "q8", 16, 2, 1100, (300, 40, 1, 5))
    lens = rng.integers(1, 5, COUNT)
    parents = np.concatenate([[rng.integers(-1, i) for i in range(n)] for n in lens])
    for options in (
        {"window": 1000}, {"window": 1 << 40}, {"skip_tokens": 3}, {"starts": rng.integers(0, 3, COUNT) * 100},
        {"mask": parents}, {"firsts": np.full(lens.sum(), 3)}, {"softcap": 5.0}, {"sinks": np.zeros(2, np.float32)},
    ):
        expect_same_alone(rng, cache, 1, lens, **options)


def test_blocks_with_holes_and_sinks(threads_kept, rng):
    """Eviction leaves no whole blocks of a shared text; sinks have queries of their own."""
    cache = family(rng, "q4", 16, 2, 1100, (300, 40, 1, 5))
    cache.keep_tokens(3, np.setdiff1d(np.arange(length(cache, 3)), [400, 700]))
    cache.keep_tokens(4, np.arange(length(cache, 4)))
    for seq_id in (6, 7):
        cache.apply_streaming_llm(seq_id, 700, 300)
    lens = np.ones(COUNT, np.int64)
    expect_same_alone(rng, cache, 1, lens)
    expect_same_alone(rng, cache, 2, lens, sink_queries=rng.standard_normal((COUNT, 4, DIM)).astype(np.float32))

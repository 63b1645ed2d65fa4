"""A query's output and lse have the same bits with any other queries and any number of threads in the call."""

import numpy as np
import pytest
from blocks import Scattered
from format_pairs import ALIKE
from pace import FAST, half

from kvcache import PagedKvCache, get_num_threads, set_num_threads
from kvcache.kernels import kernelcalls, kernels

FORMATS = [
    *ALIKE, ("f32", "q4"), ("q8", "f16"), ("q4", "q8"), ("q8", "q2"), ("q3", "f32"),
]


def first_tokens(runs, n):
    """The runs of the first n tokens."""
    kept = []
    for block, first, stop in runs:
        if n <= 0:
            break
        kept.append((block, first, min(stop, first + n)))
        n -= stop - first
    return kept


class Rows:
    """Queries at the last positions of sequence 0 of `s`, and calls that compute some of them."""

    def __init__(self, s, num_queries, query_heads, rng, sinks=0, spread=1.0):
        self.s, self.n, self.sinks = s, num_queries, sinks
        shape = (num_queries, query_heads, s.layout.head_dim)
        self.queries = (spread * rng.standard_normal(shape)).astype(np.float32)
        self.sink_queries = rng.standard_normal(shape).astype(np.float32) if sinks else None
        self.tokens = sum(stop - first for _, first, stop in s.runs[0])

    def call(self, parts, threads=1, hidden=0, queries=None, runs=None, scores=None):
        """One call over several sequences: a part is a range of the queries, or other (runs, queries)."""
        seqs, q, sink_q = [], [], []
        for part in parts:
            if isinstance(part, tuple):
                seqs.append((part[0], len(part[1]), 0))
                q.append(part[1])
                sink_q.append(part[1])
                continue
            seen = self.tokens - self.n + part.stop
            seqs.append((first_tokens(self.s.runs[0], seen + hidden), len(part), self.sinks))
            q.append(self.queries[part.start : part.stop])
            if self.sinks:
                sink_q.append(self.sink_queries[part.start : part.stop])
        q = np.concatenate(q)
        out = np.full((*q.shape[:2], self.s.layout.value_head_dim), np.nan, np.float32)
        lse = np.full(q.shape[:2], np.nan, np.float32)
        kernelcalls.attend(
            self.s.layout, self.s.arena, seqs, q, self.s.layout.head_dim**-0.5, out=out, lse=lse, threads=threads,
            sink_queries=np.concatenate(sink_q) if self.sinks else None, hidden_tokens=hidden, scores=scores,
        )
        return bits(out), bits(lse)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


def same(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def splits(rng, n):
    """Ranges that together cover n queries: single ones, a few, and one long range."""
    stops = np.unique(np.r_[rng.integers(1, n + 1, 2), np.arange(1, min(n, 3)), n])
    return [range(a, b) for a, b in zip(np.r_[0, stops[:-1]].tolist(), stops.tolist(), strict=True)]


def few(*cases):
    """All cases; with KVCACHE_TESTS=fast the last one: builds with checks are not those whose bits are promised."""
    return cases[-1:] if FAST else cases


def check(rng, tokens, num_queries, *, dim, group=2, heads=2, sinks=0, spread=1.0, **keywords):
    """Compare a chunk of queries with single queries, splits, batches with others, and other numbers of threads."""
    num_queries = max(1, num_queries // 2) if FAST else num_queries
    s = Scattered(rng, [tokens, 70, 600], dim=dim, heads=heads, **keywords)
    rows = Rows(s, num_queries, heads * group, rng, sinks, spread)
    whole = rows.call([range(num_queries)])
    assert not np.isnan(whole[0].view(np.float32)).any()
    for threads in few(2, 8):
        same(rows.call([range(num_queries)], threads), whole)
    others = [(s.runs[i], rng.standard_normal((n, heads * group, dim)).astype(np.float32)) for i, n in ((1, 1), (2, 9))]
    parts = splits(rng, num_queries)
    for part in few(*parts):
        expected = [x[part.start : part.stop] for x in whole]
        same(rows.call([part], int(rng.integers(1, 4))), expected)
        batch = rows.call([others[0], part, others[1]], int(rng.integers(1, 9)))
        same([x[1 : 1 + len(part)] for x in batch], expected)
    same(rows.call(parts, 2), whole)  # all parts as sequences of one call
    for j in few(*rng.integers(num_queries, size=2).tolist()):
        expected = [x[j : j + 1] for x in whole]
        for threads in few(1, 5):
            same(rows.call([range(j, j + 1)], threads), expected)
        behind = num_queries - 1 - j  # tokens behind those that the query sees
        if behind:
            same(rows.call([range(j, j + 1)], 2, hidden=behind), expected)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_formats(rng, formats):
    check(rng, 1300, 110, dim=64, key_format=formats[0], value_format=formats[1])


@pytest.mark.parametrize("dim", half([8, 16, 24, 40, 80, 128, 256, 512]))
@pytest.mark.parametrize("name", ["f32", "f16", "q8", "q3"])
def test_head_dims(rng, dim, name):
    rotate = dim & (dim - 1) == 0 and kernels.FORMATS[name].quantised
    check(rng, 560, 45, dim=dim, heads=1, key_format=name, rotate=rotate)


@pytest.mark.parametrize("dims", half([(192, 128), (64, 256), (8, 40), (24, 16)]), ids=str)
@pytest.mark.parametrize("formats", [("f32", "f32"), ("q8", "q8"), ("q4", "f16"), ("f32", "q3")], ids="-".join)
def test_values_of_another_head_dim(rng, dims, formats):
    rotate = tuple(d & (d - 1) == 0 and kernels.FORMATS[name].quantised for d, name in zip(dims, formats, strict=True))
    check(
        rng, 1100, 45, dim=dims[0], value_dim=dims[1], heads=1, key_format=formats[0], value_format=formats[1],
        rotate=rotate,
    )


@pytest.mark.parametrize("group", half(range(1, 9)))
@pytest.mark.parametrize("name", ["f32", "q8", "q4"])
def test_groups(rng, group, name):
    check(rng, 600, 20, dim=32, heads=1, group=group, key_format=name)


@pytest.mark.parametrize("block_size", half([1, 5, 16, 64, 256]))
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ["f32", "q4"])
def test_blocks_and_holes(rng, block_size, holes, name):
    check(rng, 1100, 30, dim=32, block_size=block_size, holes=holes, key_format=name, sinks=3 * holes)


@pytest.mark.parametrize("sinks", [1, 4, 64, 600, 5000])
@pytest.mark.parametrize("name", ["f16", "q8"])
def test_sinks(rng, sinks, name):
    check(rng, 1200, 25, dim=32, sinks=sinks, key_format=name)


@pytest.mark.parametrize("name", ["f32", "f16", "q8", "q4"])
def test_long_contexts(rng, name):
    check(rng, 4500, 18, dim=64, heads=1, group=3, key_format=name)
    check(rng, 4500, 1300, dim=32, heads=1, group=1, key_format=name)


@pytest.mark.parametrize("name", ["f32", "q8"])
def test_the_first_tokens_of_a_sequence(rng, name):
    check(rng, 130, 130, dim=32, key_format=name)
    check(rng, 1, 1, dim=32, key_format=name)


@pytest.mark.parametrize("spread", [0.0, 40.0])
@pytest.mark.parametrize("name", ["f32", "q4"])
def test_equal_and_far_apart_scores(rng, spread, name):
    check(rng, 1100, 40, dim=32, spread=spread, key_format=name)


@pytest.mark.parametrize("name", ["f32", "q8"])
def test_scores_do_not_depend_on_the_threads(rng, name):
    s = Scattered(rng, [1300], key_format=name)
    rows = Rows(s, 25, 4, rng, sinks=4)
    results = []
    for threads in (1, 2, 3, 8):
        scores = np.full(1300, np.nan, np.float32)
        rows.call([range(25)], threads, scores=scores)
        results.append(bits(scores))
    for scores in results[1:]:
        np.testing.assert_array_equal(scores, results[0])


@pytest.fixture
def threads_kept():
    """Restore the number of threads afterwards."""
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.mark.parametrize("dtype", few("f16", "q8", "q4", "f32"))
@pytest.mark.parametrize("block_size", [5, 16])
def test_a_prompt_in_chunks_through_the_paged_cache(threads_kept, rng, dtype, block_size):
    """Two prompts as a whole, and the same prompts in chunks of other sizes while the other one decodes."""
    lengths, heads, group, dim = [1200, 90], 2, 2, 32
    k, v = (rng.standard_normal((2, max(lengths), heads, dim)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((2, max(lengths), heads * group, dim)).astype(np.float32)

    def run(steps, threads):
        """Steps are (queries of sequence 0, of sequence 1)."""
        cache = PagedKvCache(2 * max(lengths) // block_size + 9, block_size, heads, dim, dtype=dtype)
        cache.allocate(0, 0), cache.allocate(1, 0)
        done, outs, lses = [0, 0], [[], []], [[], []]
        for step in steps:
            ids = [i for i in (0, 1) if step[i]]
            for i in ids:
                cache.append(i, step[i])
                part = slice(done[i], done[i] + step[i])
                cache.write(0, i, k[i, part], v[i, part], start=done[i])
            queries = np.concatenate([q[i, done[i] : done[i] + step[i]] for i in ids])
            set_num_threads(threads)
            out, lse = cache.attention(0, queries, ids, query_lens=[step[i] for i in ids], return_lse=True)
            at = 0
            for i in ids:
                outs[i].append(out[at : at + step[i]]), lses[i].append(lse[at : at + step[i]])
                at += step[i]
                done[i] += step[i]
        assert done == lengths
        return [bits(np.concatenate(x)) for x in (*outs, *lses)]

    whole = run([lengths], 1)
    for steps, threads in few(
        ([lengths], 3),
        ([(0, 89), (16, 1), (512, 0), (660, 0), *[(1, 0)] * 12], 5),
        ([(1010, 64), *[(1, 1)] * 20, (163, 5), (7, 1)], 2),
    ):
        same(run(steps, threads), whole)

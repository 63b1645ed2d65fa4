"""Windows over sequences whose old tokens have left: the same bits as over the whole text."""

import numpy as np
import pytest
from format_pairs import ALIKE
from oracles.kernels import attend
from pace import half

from kvcache import PagedKvCache, get_num_threads, set_num_threads
from kvcache.kernels import kernels

FORMATS = [*ALIKE, ("f32", "q4"), ("q8", "f16"), ("q4", "q8")]
WINDOWS = [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 3000]
HEADS, GROUP = 2, 2


@pytest.fixture(autouse=True)
def threads_kept():
    """Restore the number of threads afterwards."""
    before = get_num_threads()
    yield
    set_num_threads(before)


class Text:
    """A text of n tokens in sequence 0 of a cache, a query at each of its positions, and calls over parts of it."""

    def __init__(self, rng, n, block_size, formats, dim=32, sinks=True):
        self.rng, self.n, self.block_size = rng, n, block_size
        self.cache = PagedKvCache(
            4 * (n // block_size + 2), block_size, HEADS, dim, key_dtype=formats[0], value_dtype=formats[1]
        )
        self.cache.allocate(0, n)
        self.cache.write(0, 0, *rng.standard_normal((2, n, HEADS, dim)).astype(np.float32))
        self.queries = rng.standard_normal((n, HEADS * GROUP, dim)).astype(np.float32)
        self.options = {"softcap": 5.0, "sinks": rng.standard_normal(HEADS * GROUP)} if sinks else {}

    def attend(self, first, stop, seqs, window, threads=1, other=None):
        """Output and lse of queries first..stop-1, the last tokens of a sequence, as bits.

        seqs: (sequence, its first position); other: whether a sequence with other queries comes before it.
        """
        set_num_threads(threads)
        (seq, start), count = seqs, stop - first
        ids, lens, starts, queries = [seq], [count], [start], self.queries[first:stop]
        if other:
            ids, lens, starts = [seq, *ids], [1, *lens], [start, *starts]
            queries = np.concatenate([self.queries[stop - 1 : stop], queries])
        starts = None if not any(starts) else starts
        out, lse = self.cache.attention(
            0, queries, ids, query_lens=lens, starts=starts, window=window, return_lse=True, **self.options
        )
        return [x[-count:].view(np.uint32) for x in (out, lse)]

    def oracle(self, first, stop, window):
        queries = self.queries[first:stop]
        keys, values = (x[:stop] for x in self.cache.read(0, 0))
        return attend(queries, keys, values, queries.shape[-1] ** -0.5, window=window, **self.options)

    def without(self, stop, dropped, by_blocks):
        """A sequence of positions dropped.. to stop - 1, made in one of the ways in which tokens leave."""
        self.cache.fork(0, 9)
        self.cache.truncate(9, stop)
        if not by_blocks:
            assert self.cache.apply_streaming_llm(9, 0, stop - dropped) == dropped
            return 9, dropped
        blocks = self.cache.get_sequence(9).block_ids[dropped // self.block_size :]
        start = dropped // self.block_size * self.block_size
        self.cache.adopt(8, blocks, stop - start)
        self.cache.free(9)
        return 8, start


def same(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def check(text, window, tries):
    rng, n = text.rng, text.n
    count = int(rng.integers(1, min(n, 150)))
    whole = text.attend(n - count, n, (0, 0), window)
    out, _, lse = text.oracle(n - count, n, window)
    quantised = any(kernels.FORMATS[name].quantised for name in (text.cache.key_dtype, text.cache.value_dtype))
    np.testing.assert_allclose(whole[0].view(np.float32), out, atol=0.05 if quantised else 2e-5)
    np.testing.assert_allclose(whole[1].view(np.float32), lse, atol=0.02 if quantised else 1e-5)
    for threads in (2, 3):
        same(text.attend(n - count, n, (0, 0), window, threads), whole)
    for _ in range(tries):
        first = int(rng.integers(n - count, n))
        stop = int(rng.choice([first + 1, rng.integers(first + 1, n + 1)]))
        expected = [x[first - n + count : stop - n + count] for x in whole]
        needed = max(0, first - window + 1)
        dropped = int(rng.choice([needed, rng.integers(needed + 1)]))
        where = text.without(stop, dropped, rng.random() < 0.5)
        same(text.attend(first, stop, where, window, int(rng.integers(1, 4)), rng.random() < 0.3), expected)
        text.cache.free(where[0])


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("block_size", half([5, 1, 16, 24, 33, 64, 256]))
def test_what_has_left_changes_no_bit(rng, formats, block_size):
    text = Text(rng, int(rng.integers(1100, 1400)), block_size, formats)
    check(text, int(rng.choice(WINDOWS)), 4)


@pytest.mark.parametrize("window", half(WINDOWS))
@pytest.mark.parametrize("name", ["f32", "q4"])
def test_every_window(rng, name, window):
    check(Text(rng, 1300 + int(rng.integers(20)), 16, (name, name)), window, 4)


@pytest.mark.parametrize("name", ["f16", "q8"])
def test_long_texts(rng, name):
    text = Text(rng, 3100, 64, (name, name), sinks=False)
    for window in (700, 1024, 2500):
        check(text, window, 3)


@pytest.mark.parametrize("formats", [("f32", "f32"), ("q4", "q4"), ("q8", "f16")], ids="-".join)
@pytest.mark.parametrize("block_size", [5, 16])
def test_a_window_beyond_the_text_is_none(rng, formats, block_size):
    text = Text(rng, 1200, block_size, formats)
    for count in (1, 60):
        want = text.attend(1200 - count, 1200, (0, 0), None)
        for window in (1200, 10**15, 2**63 - 1):
            same(text.attend(1200 - count, 1200, (0, 0), window, 2), want)


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_window_group_that_drops_blocks_while_a_text_runs(rng, dtype):
    """Prefill in pieces, then decode; blocks before the window are dropped after each step."""
    window, n, size = 100, 1500, 16
    text = Text(rng, n, size, (dtype, dtype))
    whole = text.attend(0, n, (0, 0), window, 2)
    keys, values = text.cache.read(0, 0)
    cache, start, done = PagedKvCache(40, size, HEADS, 32, dtype=dtype), 0, 0
    cache.allocate(0, 0)
    most = 0
    while done < n:
        step = 1 if done > 1000 else min(int(rng.integers(1, 300)), n - done)
        cache.append(0, step)
        cache.write(0, 0, keys[done : done + step], values[done : done + step])
        done += step
        out, lse = cache.attention(
            0, text.queries[done - step : done], [0], query_lens=[step], window=window, starts=[start],
            return_lse=True, **text.options,
        )
        if dtype == "f32":  # rows that were read are written as they are
            same([out.view(np.uint32), lse.view(np.uint32)], [x[done - step : done] for x in whole])
        leaving = max(0, done + 1 - window - start) // size * size
        start += cache.apply_streaming_llm(0, 0, done - start - leaving)
        cache.check()
        most = max(most, cache.used_block_count)
    assert start == (n + 1 - window) // size * size
    assert cache.used_block_count <= window // size + 2


def test_bad_arguments(rng):
    text = Text(rng, 40, 16, ("f32", "f32"), sinks=False)
    q = text.queries[-1:]
    for wrong, error, message in (
        ({"window": 0}, ValueError, "window: expected an int >= 1"),
        ({"window": 1.0}, TypeError, "window: expected an int"),
        ({"window": True}, TypeError, "window: expected an int"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number above 0"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": np.inf}, ValueError, "softcap"),
        ({"softcap": "1"}, TypeError, "softcap"),
        ({"sinks": np.zeros(2, np.float32)}, ValueError, "sinks: expected shape"),
        ({"sinks": np.full(4, np.nan, np.float32)}, ValueError, "sinks: expected finite"),
        ({"sinks": [1, 2, 3, 4]}, TypeError, "sinks: expected a float dtype"),
        ({"starts": [1, 2]}, ValueError, "starts: expected 1 numbers"),
        ({"starts": [-1]}, ValueError, "starts: expected 0 to"),
        ({"starts": [2**62 + 1]}, ValueError, "starts: expected 0 to"),
        ({"starts": [0.5]}, TypeError, "starts: expected integers"),
        ({"causal": False, "window": 3, "query_lens": [41]}, ValueError, "query_lens: expected 0 to 40"),
        ({"causal": False, "mask": [-1]}, ValueError, "causal: expected True beside mask"),
        ({"mask": [-1, 0]}, ValueError, "mask: expected 1 numbers"),
        ({"mask": [0]}, ValueError, "mask: expected -1 to -1 as parent of query 0 of sequence 0, got 0"),
        ({"mask": [-2]}, ValueError, "mask: expected -1 to -1"),
        ({"mask": [0.5]}, TypeError, "mask: expected integers"),
        ({"firsts": [0], "mask": [-1]}, ValueError, "firsts: expected None beside mask"),
        ({"firsts": [0, 0]}, ValueError, "firsts: expected 1 numbers, one per query, got 2"),
        ({"firsts": [-1]}, ValueError, "firsts: expected at least 0 of query 0 of sequence 0"),
        ({"firsts": [0.5]}, TypeError, "firsts: expected integers"),
        ({"return_scores": "heads"}, ValueError, "return_scores: expected False, True or"),
    ):
        with pytest.raises(error, match=message):
            text.cache.attention(0, q, [0], **wrong)
    text.cache.attention(0, q, [0], window=2**63 - 1, softcap=1e300, sinks=np.zeros(4), starts=[2**62])


@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_trees_and_scores_of_heads_through_the_cache(rng, dtype):
    text = Text(rng, 120, 16, (dtype, dtype))
    text.cache.fork(0, 1)
    text.cache.truncate(1, 50)
    keys, values = text.cache.read(0, 0)
    parents = [[-1, 0, 0, 1, -1, 2], [-1, -1, 1]]
    queries = text.queries[:9]
    out, mass, lse = text.cache.attention(
        0, queries, [0, 1], query_lens=[6, 3], mask=np.concatenate(parents), return_scores="head", return_lse=True,
        window=20, starts=[3, 0], **text.options,
    )
    assert mass.shape == (HEADS, 170)
    at = token = 0
    for n, tree in zip((120, 50), parents, strict=True):
        part = slice(at, at + len(tree))
        want, weights, logs = attend(
            queries[part], keys[:n], values[:n], 32**-0.5, parents=tree, window=20, **text.options
        )
        tolerance = 1e-5 if dtype == "f32" else 0.02
        np.testing.assert_allclose(out[part], want, atol=tolerance)
        np.testing.assert_allclose(lse[part], logs, atol=tolerance)
        np.testing.assert_allclose(mass[:, token : token + n], weights.reshape(HEADS, GROUP, n).sum(1), atol=tolerance)
        at, token = at + len(tree), token + n


def test_every_query_sees_the_whole_of_an_encoder(rng):
    text = Text(rng, 30, 16, ("f32", "f32"))
    queries = rng.standard_normal((70, 4, 32)).astype(np.float32)
    out = text.cache.attention(0, queries, [0], query_lens=[70], causal=False, context_lens=[25], **text.options)
    want = attend(queries, *text.cache.read(0, 0), 32**-0.5, causal=False, shown=25, **text.options)[0]
    np.testing.assert_allclose(out, want, atol=1e-5)
    # The bits are those of the last token's query in a causal call.
    text.cache.truncate(0, 25)
    for i in (0, 40, 69):
        np.testing.assert_array_equal(text.cache.attention(0, queries[i : i + 1], [0], **text.options)[0], out[i])


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_windows_on_both_sides_of_a_query(rng, dtype):
    text = Text(rng, 130, 16, (dtype, dtype))
    keys, values = text.cache.read(0, 0)
    tolerance = 1e-5 if dtype == "f32" else 0.02
    for window in (1, 2, 16, 33, 129, 130, 2**62, 2**63 - 1):
        for threads in (1, 3):
            set_num_threads(threads)
            out, mass, lse = text.cache.attention(
                0, text.queries, [0], query_lens=[130], window=window, causal=False, return_scores="head",
                return_lse=True, **text.options,
            )
        want, weights, logs = attend(
            text.queries, keys, values, 32**-0.5, window=min(window, 131), causal=False, **text.options
        )
        np.testing.assert_allclose(out, want, atol=tolerance)
        np.testing.assert_allclose(lse, logs, atol=tolerance)
        np.testing.assert_allclose(mass, weights.reshape(HEADS, GROUP, 130).sum(1), atol=4 * tolerance)
        for i in (0, 1, 40, 128, 129):  # the bits of one query that sees the same tokens
            alone = text.cache.attention(
                0, text.queries[i : i + 1], [0], causal=False, context_lens=[min(130, i + window)],
                skip_tokens=max(0, i - window + 1), **text.options,
            )
            np.testing.assert_array_equal(alone[0], out[i])
        few, _ = text.cache.attention(  # the last queries alone
            0, text.queries[-7:], [0], query_lens=[7], window=window, causal=False, return_lse=True, **text.options
        )
        np.testing.assert_array_equal(few, out[-7:])

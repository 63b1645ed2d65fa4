"""`PagedKvCache.attention(top_tokens=)`: its twin in NumPy; the same bits in any company; summaries that stay true."""

import numpy as np
import pytest
from oracles import sparse as twin
from pace import FAST

from kvcache import Calibration, PagedKvCache, set_num_threads

FORMATS = [("f32", "f32"), ("f16", "f16"), ("q8", "q8"), ("q4", "q4"), ("q4", "f16"), ("q3", "q5")]


def make(tokens, heads=2, dim=64, block_size=32, **options):
    return PagedKvCache(-(-tokens // block_size) + 8, block_size, heads, dim, **options)


def filled(rng, tokens, heads=2, dim=64, **options):
    cache = make(tokens, heads, dim, **options)
    cache.allocate(1, tokens)
    keys, values = rng.standard_normal((2, tokens, heads, dim)).astype(np.float32)
    keys[:, :, : dim // 8] *= 4  # channels that tell pages apart
    cache.write(0, 1, keys, values)
    return cache, keys, values


@pytest.mark.parametrize(("heads", "group", "dim", "block_size"), [(2, 3, 64, 16), (1, 1, 72, 256), (3, 4, 8, 48)])
def test_whole_numbers_are_chosen_as_the_twin_does(rng, heads, group, dim, block_size):
    """Scores are exact, many are equal, and equal ones are taken in text order; rows without a wish have no say."""
    cache = make(700, heads, dim, block_size, dtype="f32")
    keys, values = rng.integers(-3, 4, (2, 700, heads, dim)).astype(np.float32)
    queries, scale = rng.integers(-2, 3, (5, heads * group, dim)).astype(np.float32), np.log(2)
    queries[1, 0], queries[2, -1, 0] = 0, np.nan
    cache.allocate(1, 700)
    cache.write(0, 1, keys, values)
    for top in (1, 16, 33, 100, 149):
        found = cache.attention(0, queries, [1], query_lens=[5], top_tokens=top, scale=scale)
        expected = twin.attend(queries, keys, values, top, scale)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.nanmax(np.abs(expected)))


@pytest.mark.parametrize("formats", FORMATS)
def test_each_format_attends_to_what_the_twin_chooses(rng, formats):
    cache, *_ = filled(rng, 600, key_dtype=formats[0], value_dtype=formats[1])
    queries = rng.standard_normal((3, 4, 64)).astype(np.float32)
    keys, values = cache.read(0, 1)
    found = cache.attention(0, queries, [1], query_lens=[3], top_tokens=96)
    expected = twin.attend(queries, keys, values, 96, 1 / 8)
    dense = cache.attention(0, queries, [1], query_lens=[3])
    # Two keys whose scores differ by a rounding may be taken one for the other.
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    assert np.linalg.norm(found - dense) > 0.05 * np.linalg.norm(dense)


@pytest.mark.parametrize("formats", [("q4", "q4"), ("f16", "f16")])
def test_bits_do_not_depend_on_pieces_threads_or_company(rng, two_threads, formats):
    cache, *_ = filled(rng, 400, key_dtype=formats[0], value_dtype=formats[1])
    cache.allocate(3, 90)
    queries = rng.standard_normal((400, 4, 64)).astype(np.float32)
    sinks = rng.standard_normal(4)
    whole = cache.attention(0, queries, [1], query_lens=[400], top_tokens=64, return_lse=True, sinks=sinks)
    for threads, first, stop in [(1, 0, 144), (2, 140, 150), (1, 150, 400), (2, 399, 400)]:
        set_num_threads(threads)
        cache.fork(1, 2)
        cache.truncate(2, stop)
        own = np.concatenate([queries[:2], queries[first:stop], queries[:1], queries[-1:]])
        lens = [2, stop - first, 1, 1]
        for alone in (False, True):
            rows = [own[2:-2], [2], lens[1:2]] if alone else [own, [3, 2, 3, 1], lens]
            parts = cache.attention(0, *rows[:2], query_lens=rows[2], top_tokens=64, return_lse=True, sinks=sinks)
            for part, all_rows in zip(parts, whole, strict=True):
                part = part if alone else part[2:-2]
                np.testing.assert_array_equal(part.view(np.uint32), all_rows[first:stop].view(np.uint32))
        cache.free(2)


def test_queries_with_few_tokens_have_the_bits_of_dense_ones(rng):
    """16 tokens, 128 that are ranked, and 64 to 79 newest ones: up to 207 there is no choice of 32 among 128."""
    cache, *_ = filled(rng, 240, dtype="q4")
    queries = rng.standard_normal((240, 4, 64)).astype(np.float32)
    dense, sparse = (cache.attention(0, queries, [1], query_lens=[240], top_tokens=top) for top in (None, 32))
    same = (dense.view(np.uint32) == sparse.view(np.uint32)).all(axis=(1, 2))
    assert same[:207].all()
    assert not same[207:].any()


@pytest.mark.parametrize(("length", "firsts"), [(32, 16), (0, 16), (64, 0)])
def test_tokens_in_f16_are_attended_beside_the_chosen_ones(rng, length, firsts):
    """Over keys that both formats hold, a cache with f16 rows attends as the twin does, piece by piece alike."""
    found = []
    keys, values = rng.integers(-3, 4, (2, 400, 2, 64)).astype(np.float32)
    queries = rng.integers(-2, 3, (400, 4, 64)).astype(np.float32)
    for piece in (1, 57, 400):
        cache = PagedKvCache(20, 32, 2, 64, dtype="f32", residual_length=length, first_tokens=firsts)
        cache.allocate(1, 0)
        rows = []
        for pos in range(0, 400, piece):
            part = slice(pos, min(pos + piece, 400))
            cache.append(1, part.stop - pos)
            cache.write(0, 1, keys[part], values[part])
            lens = [part.stop - pos]
            rows.append(cache.attention(0, queries[part], [1], query_lens=lens, top_tokens=64, scale=np.log(2)))
        cache.check()
        found.append(np.concatenate(rows))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    for pos in (250, 399):
        begin = pos - pos % length if length else pos + 1
        for head in range(2):
            own = queries[pos, 2 * head : 2 * head + 2]
            picked = twin.choose(own, keys[:, head], begin, 64, np.log(2), first=firsts)
            picked = np.r_[0:firsts, picked, begin : pos + 1]
            weights = np.exp(own @ keys[picked, head].T * np.log(2) - 300)
            expected = weights / weights.sum(1, keepdims=True) @ values[picked, head]
            np.testing.assert_allclose(found[0][pos, 2 * head : 2 * head + 2], expected, atol=2e-3)


def test_a_calibration_changes_what_is_stored_alone(rng):
    """A constant in all keys changes neither the choice nor, with its centre known, the output."""
    keys, values = rng.standard_normal((2, 400, 2, 64)).astype(np.float32)
    centre = np.float32(rng.integers(-8, 9, (1, 2, 64)) * 4)
    queries = rng.standard_normal((2, 4, 64)).astype(np.float32)
    found = []
    for known, rows in ((None, keys), (Calibration(centre), keys + centre[0])):
        cache = make(400, dtype="q8", calibration=known)
        cache.allocate(1, 400)
        cache.write(0, 1, rows, values)
        found.append(cache.attention(0, queries, [1], query_lens=[2], top_tokens=64))
    assert np.linalg.norm(found[1] - found[0]) < 0.02 * np.linalg.norm(found[0])


@pytest.mark.parametrize("formats", [("f32", "f32"), ("q4", "q4"), ("q8", "f16")])
def test_listed_tokens_are_attended_and_no_others(rng, formats):
    """Lists of any lengths, of none and of all; the bits of a query are those that it has alone."""
    cache, *_ = filled(rng, 300, key_dtype=formats[0], value_dtype=formats[1])
    keys, values = cache.read(0, 1)
    queries, tokens = rng.standard_normal((5, 4, 64)).astype(np.float32), np.full((5, 2, 300), -1)
    picked = {}
    for j in range(5):
        for head, count in enumerate([(0, 1), (296, 40), (150, 2), (7, 299), (33, 300)][j]):
            picked[j, head] = np.sort(rng.choice(296 + j, min(count, 296 + j), replace=False))
            tokens[j, head, : len(picked[j, head])] = picked[j, head]
    found, lse = cache.attention(0, queries, [1], query_lens=[5], tokens=tokens, return_lse=True)
    for (j, head), own in picked.items():
        scores = np.float64(queries[j, 2 * head : 2 * head + 2]) @ np.float64(keys[own, head]).T / 8
        if not len(own):
            assert not found[j, :2].any()
            assert (lse[j, :2] == -np.inf).all()
            continue
        sums = np.exp(scores).sum(1, keepdims=True)
        expected = np.exp(scores) / sums @ values[own, head]
        assert np.linalg.norm(found[j, 2 * head : 2 * head + 2] - expected) < 0.01 * np.linalg.norm(expected)
        np.testing.assert_allclose(lse[j, 2 * head : 2 * head + 2], np.log(sums[:, 0]), rtol=0.01)
    alone = cache.attention(0, queries[2:3], [1], tokens=tokens[2:3, :, :160], context_lens=[298])
    np.testing.assert_array_equal(alone[0].view(np.uint32), found[2].view(np.uint32))


def test_lists_that_no_query_could_have_are_refused(rng):
    cache, *_ = filled(rng, 200)
    queries, tokens = rng.standard_normal((2, 4, 64)).astype(np.float32), np.tile(np.int32([0, 7, 198]), (2, 2, 1))
    assert np.isfinite(cache.attention(0, queries, [1], query_lens=[2], tokens=tokens)).all()
    for place, wrong in (((0, 1, 2), 199), ((1, 0, 1), 0), ((1, 1, 2), 7), ((1, 0, 0), -1)):
        false = tokens.copy()
        false[place] = wrong
        with pytest.raises(ValueError, match="tokens: expected ascending ones below"):
            cache.attention(0, queries, [1], query_lens=[2], tokens=false)
    for false in (tokens[:1], tokens[:, :1], tokens[0], np.int64(tokens) + 2**40):
        with pytest.raises(ValueError, match="tokens: expected"):
            cache.attention(0, queries, [1], query_lens=[2], tokens=false)
    with pytest.raises(TypeError, match="tokens: expected integers"):
        cache.attention(0, queries, [1], query_lens=[2], tokens=tokens * 1.0)
    with pytest.raises(ValueError, match="top_tokens: expected None beside tokens"):
        cache.attention(0, queries, [1], query_lens=[2], tokens=tokens, top_tokens=16)
    other = PagedKvCache(8, 32, 2, 64, residual_length=32)
    other.allocate(1, 40)
    with pytest.raises(ValueError, match="tokens: expected None with residual_length 32"):
        other.attention(0, queries[:1], [1], tokens=tokens[:1])


@pytest.mark.parametrize("dtype", ["q4", "f32"])
def test_summaries_are_those_of_the_stored_keys_whatever_happens(rng, dtype):
    """After forks, cuts, copies and growth a cache chooses what a fresh one chooses."""
    cache = make(2500, heads=1, dim=8, block_size=32, dtype=dtype, num_layers=2)
    texts = {0: (np.zeros((2, 0, 1, 8), np.float32),) * 2}
    cache.allocate(0, 0)
    number = 1
    for step in range(30 if FAST else 150):
        seq = int(rng.choice(list(texts)))
        rows = [x.copy() for x in texts[seq]]
        kind, n = rng.integers(7), rows[0].shape[1]
        if kind == 0 and len(texts) < 4:
            cache.fork(seq, number)
            texts[number] = texts[seq]
            number += 1
        if kind == 1 and n:
            n = int(rng.integers(n + 1))
            cache.truncate(seq, n)
            rows = [x[:, :n] for x in rows]
        if kind == 2 and n:
            first = int(rng.integers(n))
            for layer, x in enumerate(rows):
                x[:, first : first + 20] = rng.standard_normal((2, min(20, n - first), 1, 8))
                cache.write(layer, seq, *x[:, first : first + 20], start=first)
        if kind >= 3 and n < 280:
            count = int(rng.integers(1, 120))
            new = rng.standard_normal((2, 2, count, 1, 8)).astype(np.float32)
            cache.append(seq, count)
            for layer in range(2):
                cache.write(layer, seq, *new[layer])
            rows = [np.concatenate([old, more], 1) for old, more in zip(rows, new, strict=True)]
        if kind == 6 and len(texts) > 1:
            cache.free(seq)
            del texts[seq]
            continue
        if step % 40 == 39:
            cache.grow(2)
        texts[seq] = tuple(rows)
        queries = rng.standard_normal((1, 2, 8)).astype(np.float32)
        if rows[0].shape[1]:
            fresh = make(400, heads=1, dim=8, block_size=32, dtype=dtype, num_layers=2)
            fresh.allocate(0, rows[0].shape[1])
            for layer in range(2):
                fresh.write(layer, 0, *rows[layer])
                expected = fresh.attention(layer, queries, [0], top_tokens=16)
                np.testing.assert_array_equal(cache.attention(layer, queries, [seq], top_tokens=16), expected)
        cache.check()


def test_copied_and_moved_blocks_have_their_own_summaries(rng):
    cache, *_ = filled(rng, 256, dtype="q4", block_size=32)
    cache.allocate(2, 256)
    queries = rng.standard_normal((1, 2, 64)).astype(np.float32)
    before = [cache.attention(0, queries, [seq], top_tokens=32) for seq in (1, 2)]
    assert not np.array_equal(*before)
    cache.copy_blocks(*(cache.block_table([seq]).block_ids for seq in (1, 2)))
    np.testing.assert_array_equal(cache.attention(0, queries, [2], top_tokens=32), before[0])
    cache.keep_tokens(1, np.r_[0:32, 64:256])  # whole blocks: those behind move up
    rows = cache.read(0, 1)
    cache.attention(0, queries, [1], top_tokens=32)
    cache.keep_tokens(1, np.arange(0, 224, 3))
    cache.compact(1)
    cache.check()
    cache.truncate(2, 0)
    cache.append(2, 224)
    cache.write(0, 2, *rows)
    cache.attention(0, queries, [2], top_tokens=32)
    cache.check()


@pytest.mark.parametrize("dim", [64, 128])
def test_summaries_take_six_hundredths_of_packed_rows_at_most(dim):
    cache = make(512, dim=dim, dtype="q4", block_size=16)
    before = cache.total_memory_bytes
    cache.allocate(1, 512)
    cache.attention(0, np.ones((1, 2, dim), np.float32), [1], top_tokens=16)
    assert before < cache.total_memory_bytes <= 1.06 * before


def test_what_is_excluded_is_named(rng):
    cache, *_ = filled(rng, 200)
    queries = rng.standard_normal((1, 2, 64)).astype(np.float32)
    lists = np.zeros((1, 2, 1), np.int32)
    for options in (
        {"window": 10}, {"causal": False}, {"skip_tokens": 1}, {"return_scores": True}, {"sink_queries": queries},
        {"starts": [1]}, {"mask": [-1]}, {"firsts": [0]}, {"top_tokens": 0},
    ):
        for own in ({"top_tokens": 64}, {"tokens": lists}):
            with pytest.raises(ValueError, match=next(iter(options))):
                cache.attention(0, queries, [1], **{**own, **options})
    cache.keep_tokens(1, np.arange(0, 200, 2))
    with pytest.raises(ValueError, match="top_tokens: expected None for sequences that lost tokens"):
        cache.attention(0, queries, [1], top_tokens=64)
    for odd in (make(64, block_size=8), PagedKvCache(8, 16, latent=(64, 16), num_heads=None, head_dim=None)):
        odd.allocate(1, 4)
        with pytest.raises(ValueError, match="top_tokens"):
            odd.attention(0, np.zeros((1, 2, odd.head_dim), np.float32), [1], top_tokens=64)

"""`PagedKvCache(residual_length=, first_tokens=)` beside two caches; refusals, memory, interrupts."""

import numpy as np
import pytest
from oracles import kernels as oracle
from residual_caches import DIM, HEADS, LAYERS, make, run
from subjects.interrupts import Lines

from kvcache import Calibration, PagedKvCache, PrefixCache, merge_attention
from kvcache.errors import SequenceNotFoundError


@pytest.mark.parametrize("dtype", ["q4", "q2", ("q4", "f16")])
@pytest.mark.parametrize(("length", "firsts"), [(32, 0), (32, 16), (0, 16)])
def test_pieces_of_any_length_have_the_bits_of_single_tokens(rng, dtype, length, firsts):
    keys, values = rng.standard_normal((2, LAYERS, 150, HEADS, DIM)).astype(np.float32)
    queries = rng.standard_normal((150, 2 * HEADS, DIM)).astype(np.float32)
    found = []
    for most in (1, 9, 150):
        cache = make(length, firsts, dtype=dtype, block_size=16, num_blocks=20)
        cache.allocate(7, 0)
        cache.allocate(8, 5)
        pos, parts = 0, []
        while pos < 150:
            count = min(int(rng.integers(1, most + 1)) if most < 150 else 150, 150 - pos)
            run(cache, 7, keys, values, pos, pos + count)
            own = np.concatenate([queries[pos : pos + count], queries[:1]])
            parts.append([cache.attention(layer, own, [7, 8], query_lens=[count, 1])[:-1] for layer in range(LAYERS)])
            pos += count
        found.append(np.concatenate(parts, axis=1))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(("length", "firsts"), [(32, 0), (32, 16), (0, 16)])
def test_queries_read_what_two_caches_have(rng, length, firsts):
    """One has what a query reads in f16, the other packs all tokens; merging both errs by a rounding."""
    shape = {"num_blocks": 20, "block_size": 16, "num_heads": HEADS, "head_dim": 32}
    keys, values = rng.standard_normal((2, 200, HEADS, 32)).astype(np.float32)
    queries = rng.standard_normal((200, 2 * HEADS, 32)).astype(np.float32)
    known = Calibration(rng.standard_normal((1, HEADS, 32)))
    own = PagedKvCache(**shape, dtype="q4", calibration=known, residual_length=length, first_tokens=firsts)
    bare, plain = PagedKvCache(**shape, dtype="q4", calibration=known), PagedKvCache(**shape, dtype="f16")
    own.allocate(1, 0)
    pos, got = 0, []
    for count in (7, 60, 1, 1, 100, 31):
        part = slice(pos, pos + count)
        run(own, 1, keys[None], values[None], pos, pos + count)
        got.append(own.attention(0, queries[part], [1], query_lens=[count]))
        pos += count
    bare.allocate(1, 200)
    bare.write(0, 1, keys, values)
    for pos, found in enumerate(np.concatenate(got)):
        group = pos - pos % length if length else max(0, pos + 1 - firsts) and pos + 1
        near = np.r_[0 : min(firsts, group), group : pos + 1]
        plain.allocate(0, len(near))
        plain.write(0, 0, keys[near], values[near])
        query = queries[pos : pos + 1]
        parts = [plain.attention(0, query, [0], return_lse=True)]
        if group:
            shown = {"context_lens": [group], "skip_tokens": firsts, "return_lse": True}
            parts.insert(0, bare.attention(0, query, [1], causal=False, **shown))
        whole = parts[0] if len(parts) == 1 else merge_attention(*parts[0], *parts[1])
        np.testing.assert_allclose(found, whole[0][0], rtol=0, atol=1e-6)
        plain.free(0)


@pytest.mark.parametrize(("length", "firsts"), [(32, 0), (32, 16), (0, 16)])
def test_queries_behind_a_text_and_skipped_tokens(rng, length, firsts):
    """Queries behind a text read its first tokens in f16 and all others packed; nobody sees tokens that are skipped."""
    shape = {"num_blocks": 40, "block_size": 16, "num_heads": HEADS, "head_dim": 32}
    keys, values = rng.standard_normal((2, 100, HEADS, 32)).astype(np.float32)
    queries = rng.standard_normal((130, 2 * HEADS, 32)).astype(np.float32)
    for num_tokens, thinned in ((7, False), (40, False), (100, False), (40, True), (100, True)):
        own = PagedKvCache(**shape, dtype="q4", residual_length=length, first_tokens=firsts)
        bare, plain = PagedKvCache(**shape, dtype="q4"), PagedKvCache(**shape, dtype="f16")
        own.allocate(1, 0)
        for start in range(0, num_tokens, 30):
            run(own, 1, keys[None], values[None], start, min(start + 30, num_tokens))
        bare.allocate(1, num_tokens)
        bare.write(0, 1, keys[:num_tokens], values[:num_tokens])
        kept = np.arange(num_tokens)
        if thinned:
            own.pack(1, num_tokens)  # as a text that others see parts of
            kept = np.r_[5:12, 14:30, 33:num_tokens]
            own.keep_tokens(1, kept)
            bare.keep_tokens(1, kept)
        near = int((kept < firsts).sum())
        plain.allocate(1, near)
        plain.write(0, 1, keys[kept[:near]], values[kept[:near]])
        for skip in (0, 3, 9, 20, 500):
            for shown in ([len(kept)], [min(11, len(kept))]):
                options = {"query_lens": [130], "context_lens": shown, "causal": False, "return_lse": True}
                got = own.attention(0, queries, [1], skip_tokens=skip, return_scores=True, **options)
                packed = bare.attention(0, queries, [1], skip_tokens=max(skip, near), return_scores=True, **options)
                options["context_lens"] = [min(near, shown[0])]
                first = plain.attention(0, queries, [1], skip_tokens=skip, return_scores=True, **options)
                want, lse = merge_attention(packed[0], packed[2], first[0], first[2])
                np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-6)
                np.testing.assert_allclose(got[2], lse, rtol=0, atol=2e-6)
                seen = np.arange(shown[0]) >= skip
                assert not got[1][~seen].any()
                assert got[1].sum() == pytest.approx(130 * 2 * HEADS * bool(seen.any()), rel=1e-5)
                alone = [own.attention(0, queries[i : i + 1], [1], skip_tokens=skip, **options | {
                    "query_lens": [1], "context_lens": shown}) for i in (0, 77)]
                np.testing.assert_array_equal(np.concatenate([each[0] for each in alone]), got[0][[0, 77]])
            if not thinned:  # the last queries of the text itself
                count = min(num_tokens, 10 if not length else num_tokens - own.unpacked_tokens(1)[1])
                options = {"query_lens": [count], "return_scores": True, "return_lse": True}
                got = own.attention(0, queries[:count], [1], skip_tokens=skip, **options)
                if skip == 0:
                    whole = got
                skipped = min(skip, num_tokens)
                assert not got[1][:skipped].any()
                assert np.isneginf(got[2][: max(0, skipped - (num_tokens - count))]).all()
                assert (got[2] <= whole[2] + 1e-5).all()
        own.check()


def test_the_newest_tokens_are_f16_and_memory_is_counted(rng):
    keys, values = rng.standard_normal((2, LAYERS, 100, HEADS, DIM)).astype(np.float32)
    cache, bare = make(32, 16, block_size=16), make(0, 0, block_size=16)
    assert (cache.residual_length, cache.first_tokens, bare.residual_length) == (32, 16, 0)
    assert cache.total_memory_bytes == bare.total_memory_bytes
    for each in (cache, bare):
        each.allocate(1, 0)
        for pos in range(100):
            run(each, 1, keys, values, pos, pos + 1)
    row = LAYERS * 2 * 2 * HEADS * DIM
    assert cache.used_memory_bytes - bare.used_memory_bytes == 32 * row  # 16 first tokens; 4 of a group, a block
    assert cache.total_memory_bytes == cache.memory()["kv"] > bare.total_memory_bytes
    assert cache.memory()["bookkeeping"] > bare.memory()["bookkeeping"]
    query, out = rng.standard_normal((1, HEADS, DIM)).astype(np.float32), np.empty((1, HEADS, DIM), np.float32)
    exact = oracle.attend(query, keys[0], values[0], DIM**-0.5)[0]
    near = np.abs(cache.attention(0, query, [1], out=out) - exact).max()
    assert near < np.abs(bare.attention(0, query, [1]) - exact).max()
    np.testing.assert_array_equal(out, cache.attention(0, query.astype(np.float64), [1]))
    cache.free(1)
    cache.allocate(2, 0)
    assert cache.used_memory_bytes == 0


def test_first_tokens_alone_take_no_more_memory_as_texts_grow(rng):
    keys, values = rng.standard_normal((2, LAYERS, 600, HEADS, DIM)).astype(np.float32)
    cache, bare = make(0, 16, num_blocks=200), make(0, 0, num_blocks=200)
    for each in (cache, bare):
        each.allocate(1, 0)
        run(each, 1, keys, values, 0, 600)
        run(each, 1, keys, values, 0, 1)
    row = LAYERS * 2 * 2 * HEADS * DIM
    assert cache.used_memory_bytes - bare.used_memory_bytes == 16 * row
    assert cache.total_memory_bytes - bare.total_memory_bytes <= 6 * 16 * row


def test_sinks_and_caps_join_once(rng):
    keys, values = rng.standard_normal((2, LAYERS, 90, HEADS, DIM)).astype(np.float16).astype(np.float32)
    cache, plain = make(32, 16, dtype="f16"), make(0, 0, dtype="f16")
    queries, sinks = rng.standard_normal((90, HEADS, DIM)).astype(np.float32), rng.standard_normal(HEADS)
    found = []
    for each in (cache, plain):
        each.allocate(1, 0)
        run(each, 1, keys, values, 0, 90)
        options = {"query_lens": [90], "sinks": sinks, "softcap": 3.0, "return_lse": True}
        found.append(each.attention(0, queries, [1], **options))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-4)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=2e-4)


def test_sinks_of_each_query_beside_masses(rng):
    cache = make(32, 16, dtype="f16")
    cache.allocate(1, 0)
    run(cache, 1, *rng.standard_normal((2, LAYERS, 90, HEADS, DIM)).astype(np.float32), 0, 90)
    queries = rng.standard_normal((3, HEADS, DIM)).astype(np.float32)
    for sinks in rng.standard_normal((3, HEADS)), rng.standard_normal(HEADS):
        options = {"query_lens": [3], "sinks": sinks, "return_lse": True}
        out, masses, lse = cache.attention(0, queries, [1], return_scores=True, **options)
        want, want_lse = cache.attention(0, queries, [1], **options)
        np.testing.assert_allclose(out, want, atol=1e-5)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)
        assert 0 < masses.sum() < 3 * HEADS
    for bad in (np.nan, -np.inf):
        with pytest.raises(ValueError, match=r"^sinks: expected finite numbers"):
            cache.attention(0, queries, [1], query_lens=[3], sinks=np.array([0, bad]), return_scores=True)


@pytest.mark.parametrize(("length", "firsts"), [(32, 0), (32, 16), (0, 16)])
def test_attention_is_one_use(rng, length, firsts):
    """However many groups its queries are in, and also where no token is packed."""
    cache = make(length, firsts)
    for seq_id, count in ((1, 5), (2, 90)):
        cache.allocate(seq_id, 0)
        run(cache, seq_id, *rng.standard_normal((2, LAYERS, count, HEADS, DIM)).astype(np.float32), 0, count)
    lens, queries = [5, 90], rng.standard_normal((95, HEADS, DIM)).astype(np.float32)
    for options in ({}, {"return_scores": True}):
        before = [cache.get_sequence(seq_id) for seq_id in (1, 2)]
        cache.attention(0, queries, [1, 2], query_lens=lens, **options)
        for seq_id, old in zip((1, 2), before, strict=True):
            now = cache.get_sequence(seq_id)
            assert now.access_count == old.access_count + 1
            assert now.last_access > old.last_access


def test_masses_of_a_sequence_without_queries(rng):
    cache = make(4, 0)
    for seq_id in (1, 2):
        cache.allocate(seq_id, 9)
    query = rng.standard_normal((1, HEADS, DIM)).astype(np.float32)
    for shown in range(10):
        options = {"context_lens": [shown, 9], "return_scores": True}
        masses = cache.attention(0, query, [1, 2], query_lens=[0, 1], **options)[1]
        assert masses.shape == (shown + 9,)
        assert not masses[:shown].any()
        assert masses.sum() == pytest.approx(HEADS, rel=1e-5)


def test_what_a_residual_refuses(rng):
    cache = make(32, 16, block_size=16)
    cache.allocate(1, 70)
    cache.append(1, 1)
    query = np.zeros((1, HEADS, DIM), np.float32)
    for name, value in {
        "window": 5, "mask": [-1], "starts": [3], "sink_queries": query, "firsts": [0],
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected .* with residual_length 32"):
            cache.attention(0, query, [1], **{name: value})
    with pytest.raises(ValueError, match=r"^query_lens: expected 0 to 7 queries for sequence 1"):
        cache.attention(0, np.zeros((8, HEADS, DIM), np.float32), [1], query_lens=[8])
    with pytest.raises(ValueError, match=r"^seq_ids: expected each sequence once"):
        cache.attention(0, np.zeros((2, HEADS, DIM), np.float32), [1, 1])
    with pytest.raises(SequenceNotFoundError):
        cache.attention(0, query, [2])
    for shown in ([5], [72], [-1], [1, 2]):
        with pytest.raises(ValueError, match=r"^(query_lens|context_lens): expected "):
            cache.attention(0, query, [1], context_lens=shown)
    before = cache.unpacked_tokens(1)
    for indices in ([71], [3, 2], [-1], [1, 1]):
        with pytest.raises((ValueError, IndexError), match=r"^(indices|token)"):
            cache.keep_tokens(1, indices)
    for sinks, window in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=r"^(sink|window)_tokens: "):
            cache.apply_streaming_llm(1, sinks, window)
    assert cache.unpacked_tokens(1) == before
    with pytest.raises(ValueError, match=r"^copy_blocks: "):
        cache.copy_blocks([0], [1])
    for options in (
        {"max_memory_bytes": 10**6}, {"max_memory_bytes": 10**6, "residual_length": 0, "first_tokens": 1},
        {"first_tokens": 40}, {"residual_length": 257}, {"first_tokens": -1},
        {"residual_length": 0, "first_tokens": 257},
    ):
        with pytest.raises(ValueError, match=r"(residual_length|first_tokens|max_memory_bytes): expected"):
            make(**{"length": options.pop("residual_length", 32), "firsts": options.pop("first_tokens", 0)}, **options)
    keys = np.zeros((1, HEADS, DIM), np.float32)
    keys[0, 1, 2] = 1e5
    with pytest.raises(ValueError, match=r"^keys"):
        cache.write(0, 1, keys, keys)
    cache.check()


def test_a_prefix_that_is_adopted_is_read_packed(rng):
    """Its blocks are shared; tokens that follow are read in f16."""
    keys, values = rng.standard_normal((2, LAYERS, 80, HEADS, DIM)).astype(np.float32)
    cache = make(32, 0, block_size=16)
    prefix = PrefixCache.over(cache)
    text = np.arange(80)
    cache.allocate(1, 0)
    run(cache, 1, keys, values, 0, 80)
    prefix.adopt(text, cache.block_table([1]).indices)
    with prefix.open_session(text[:64]) as session:
        cache.adopt(2, session.shared_blocks, session.num_tokens)
    run(cache, 2, keys, values, 64, 80)
    queries = rng.standard_normal((16, HEADS, DIM)).astype(np.float32)
    whole, shared = (cache.attention(1, queries, [seq], query_lens=[16]) for seq in (1, 2))
    np.testing.assert_array_equal(whole, shared)  # their group begins at 64
    cache.check()


@pytest.mark.parametrize(("length", "firsts"), [(32, 0), (32, 16), (0, 16)])
@pytest.mark.parametrize("shared", [64, 70, 96])
def test_an_adopted_prefix_is_unpacked_with_the_rows_of_another_text(rng, length, firsts, shared):
    keys, values = rng.standard_normal((2, LAYERS, 120, HEADS, DIM)).astype(np.float32)
    cache = make(length, firsts, block_size=16)
    cache.allocate(1, 0)
    run(cache, 1, keys, values, 0, shared)
    if length:
        cache.pack(1, (shared - 1) // length * length)
    held, base, stop = cache.unpacked_tokens(1)
    assert (held, base, stop) == (firsts, (shared - 1) // length * length if length else shared, shared)
    pairs = [cache.read_unpacked(layer, 1) for layer in range(LAYERS)]
    tokens = np.r_[0:held, base:stop]
    for layer, pair in enumerate(pairs):
        for got, rows in zip(pair, (keys, values), strict=True):
            np.testing.assert_array_equal(got, rows[layer, tokens].astype(np.float16))
    newest, heads = ([(k[part], v[part]) for k, v in pairs] for part in (slice(held, None), slice(held)))
    cache.adopt(2, cache.block_table([1]).indices, shared)
    cache.unpack(2, newest if stop > base else (), heads if held else ())
    assert cache.unpacked_tokens(2) == (held, base, stop)
    cache.check()
    queries = rng.standard_normal((20, HEADS, DIM)).astype(np.float32)
    for seq in (1, 2):
        run(cache, seq, keys, values, shared, shared + 20)
    for layer in range(LAYERS):
        one, other = (cache.attention(layer, queries, [seq], query_lens=[20]) for seq in (1, 2))
        np.testing.assert_array_equal(one, other)
    cache.unpack(2)
    assert cache.unpacked_tokens(2) == (0, shared + 20, shared + 20)


CHANGES = {
    "append": lambda cache: cache.append(2, 1),
    "truncate": lambda cache: cache.truncate(2, 5),
    "swap": lambda cache: cache.swap(1, 2),
    "reorder": lambda cache: cache.reorder([1, 2], [1, 1]),
    "pack": lambda cache: cache.pack(2, 11),
    "unpack": lambda cache: cache.unpack(2),
    "another sequence": lambda cache: (cache.free(2), cache.allocate(2, 6)),
    "resize": lambda cache: setattr(cache.handle(2).block_table_mut(), "sequence_length", 14),
}


@pytest.mark.parametrize(("length", "firsts"), [(4, 2), (0, 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_like_the_one_before_sees_what_changed_between(rng, length, firsts, change):
    """All layers of a step share what the first one finds."""
    keys, values = rng.standard_normal((2, LAYERS, 11, HEADS, DIM)).astype(np.float32)
    rows, queries = rng.standard_normal((2, 2, HEADS, DIM)).astype(np.float32)
    found = []
    for warm in (False, True):
        cache = make(length, firsts)
        for seq, count in ((1, 6), (2, 11)):
            cache.allocate(seq, 0)
            run(cache, seq, keys, values, 0, count)
        last = keys[0, [5, 10]], values[0, [5, 10]]
        if warm:
            cache.write_ragged(0, [1, 2], [1, 1], *last)
            cache.attention(0, queries, [1, 2], query_lens=[1, 1])
        CHANGES[change](cache)
        try:
            cache.write_ragged(0, [1, 2], [1, 1], rows, rows)
            found.append(cache.attention(0, queries, [1, 2], query_lens=[1, 1]))
        except ValueError as error:  # after `pack` and `unpack`: a query of no group
            found.append(np.array(str(error)))
        cache.check()
    np.testing.assert_array_equal(*found)
    cache.free(2)
    for call in (
        lambda: cache.write_ragged(0, [1, 2], [1, 1], rows, rows),
        lambda: cache.attention(0, queries, [1, 2], query_lens=[1, 1]),
    ):
        with pytest.raises(SequenceNotFoundError):
            call()


def test_what_unpacking_refuses():
    cache, rows = make(32, 16, block_size=16), np.zeros((8, HEADS, DIM), np.float32)
    cache.allocate(1, 70)
    for wrong, expected in (
        ({"newest": [(rows, rows)]}, r"newest: expected rows of 2 layers, got 1"),
        ({"newest": [(rows, rows), (rows[:3], rows[:3])]}, r"newest: expected as many tokens in each layer"),
        ({"newest": [(rows, rows)] * 2}, r"newest: expected tokens of one group of 32, got 8 before 70"),
        ({"firsts": [(rows, rows)] * 2}, r"firsts: expected 16 tokens or none, before the newest, got 8"),
        ({"newest": [(rows + 1e6, rows)] * 2}, r"keys"),
    ):
        with pytest.raises(ValueError, match=expected):
            cache.unpack(1, **wrong)
        assert cache.unpacked_tokens(1) == (0, 0, 70)
    cache.check()
    with pytest.raises(SequenceNotFoundError):
        cache.unpack(2)
    bare = make(0, 0)
    for call in (lambda: bare.unpacked_tokens(1), lambda: bare.pack(1, 0), lambda: bare.reserve_unpacked(5)):
        with pytest.raises(ValueError, match=r"residual_length: expected a cache with it"):
            call()


def test_reserved_rows_do_not_grow(rng):
    keys, values = rng.standard_normal((2, LAYERS, 300, HEADS, DIM)).astype(np.float32)
    cache = make(32, 16, block_size=16)
    size = cache.total_memory_bytes
    cache.reserve_unpacked(160)
    reserved = cache.total_memory_bytes
    assert reserved - size == 160 * LAYERS * 2 * 2 * HEADS * DIM
    cache.allocate(1, 0)
    for pos in range(0, 300, 50):
        run(cache, 1, keys, values, pos, pos + 50)
        cache.pack(1, (pos + 49) // 32 * 32)
    assert cache.total_memory_bytes == reserved


ACTS = {
    "unpack": lambda cache: cache.unpack(
        2, [np.ones((2, 3, HEADS, DIM))] * LAYERS * (cache.residual_length > 0), [np.ones((2, 16, HEADS, DIM))] * LAYERS
    ),
    "pack": lambda cache: cache.pack(2, 33),
    "allocate": lambda cache: cache.allocate(9, 40),
    "append": lambda cache: cache.append_batch([1, 2], [30, 1]),
    "truncate": lambda cache: cache.truncate_batch([1, 2], [20, 5]),
    "fork": lambda cache: cache.fork(1, 9),
    "swap": lambda cache: cache.swap(1, 2),
    "reorder": lambda cache: cache.reorder([1, 2, 3], [1, 2, 0]),
    "adopt": lambda cache: cache.adopt(9, cache.block_table([1]).indices[:2], 30),
    "write": lambda cache: cache.write(0, 1, *np.zeros((2, 30, HEADS, DIM), np.float32)),
    "attention": lambda cache: cache.attention(0, np.ones((40, HEADS, DIM)), [1, 2], query_lens=[6, 34]),
    "keep": lambda cache: cache.keep_tokens(2, [0, 3, *range(20, 35)]),
    "stream": lambda cache: cache.apply_streaming_llm(1, 4, 20),
    "masses": lambda cache: cache.attention(0, np.ones((9, HEADS, DIM)), [1, 2], query_lens=[6, 3], return_scores=True),
    "resize": lambda cache: setattr(cache.handle(2).block_table_mut(), "sequence_length", 50),
}


@pytest.mark.parametrize("length", [32, 0])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_call_that_is_stopped_anywhere_leaves_a_sound_cache(rng, act, length):
    """By Ctrl-C before each line: the tokens and their rows in f16 are those before or after."""

    def build():
        cache = make(length, 16, block_size=16, num_blocks=40)
        for seq_id, count in ((1, 70), (2, 35), (3, 3)):
            cache.allocate(seq_id, 0)
            run(cache, seq_id, *np.ones((2, LAYERS, count, HEADS, DIM), np.float32), 0, count)
        cache.append(1, 0)
        cache.append(1, 1)
        return cache

    def sizes(cache):
        return [cache.unpacked_tokens(each) for each in cache.sequence_ids()]

    cache = build()
    before = sizes(cache)
    act(cache)
    after, stop = sizes(cache), 0
    while True:
        stop += 1
        cache = build()
        try:
            with Lines(stop):
                act(cache)
        except KeyboardInterrupt:
            pass
        else:
            break
        cache.check()
        assert sizes(cache) in (before, after)
        for seq_id in cache.sequence_ids():
            run(cache, seq_id, *np.ones((2, LAYERS, 9, HEADS, DIM), np.float32), 0, 9)
            out = cache.attention(0, np.ones((9, HEADS, DIM), np.float32), [seq_id], query_lens=[9])
            assert np.isfinite(out).all()
        cache.check()
    assert stop > 1

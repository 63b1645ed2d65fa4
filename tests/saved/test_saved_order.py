"""The order of eviction of a saved cache, and what a smaller cache loads of it."""

import numpy as np
import pytest
from contents import LAYERS, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import examples
from saved_caches import DIM, HEADS, NAMES, SIZE, assert_same, assert_true, blocks, entries, get, prompts, put

from kvcache import PagedKvCache, PrefixCache

SHORT = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "get"]), st.sampled_from(NAMES[:2]), SHORT), max_size=25)


def act(cache, step):
    kind, name, tokens = step
    if kind == "put":
        put(cache, name, tokens)
        return None
    return get(cache, name, tokens)


@pytest.mark.parametrize(
    "make",
    [
        lambda: entries(max_entries=5, max_memory_bytes=40 * 8 * LAYERS * HEADS * DIM),
        lambda: entries(max_entries=9, max_memory_bytes=40 * 8 * LAYERS * HEADS * DIM, partial_matches=False),
        lambda: blocks(6),
    ],
    ids=["entries", "whole", "blocks"],
)
@settings(max_examples=examples(60), deadline=None)
@given(before=STEPS, after=STEPS)
def test_a_loaded_cache_goes_on_like_the_one_that_was_saved(tmp_path_factory, make, before, after):
    """Every lookup and eviction is the same after loading, since the order of use was saved."""
    path = tmp_path_factory.mktemp("saved") / "cache"
    saved, loaded = make(), make()
    for step in before:
        act(saved, step)
    saved.save(path)
    assert loaded.load(path) == len(saved)
    for step in after:
        one, other = act(saved, step), act(loaded, step)
        assert len(saved) == len(loaded)
        if one is not None:
            assert_same(one, other)
            assert_true(one, *step[1:])
    saved.check()
    loaded.check()


@pytest.mark.parametrize("limit", [0, 1, 3, 100])
def test_the_newest_entries_come_first_into_a_smaller_cache(tmp_path, limit):
    saved = entries()
    texts_ = [(None, [i] * 50 + [i, 1]) for i in range(8)]
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    token = 8 * LAYERS * HEADS * DIM
    for options in ({"max_entries": limit}, {"max_memory_bytes": (52 * limit + 10) * token}):
        loaded = entries(**options)
        assert loaded.load(tmp_path / "cache") == min(limit, 8)
        loaded.check()
        for age, (name, tokens) in enumerate(reversed(texts_)):
            assert get(loaded, name, tokens)[0] == (52 if age < limit else 0)
        loaded.check()


@pytest.mark.parametrize("limit", [0, 1, 5, 7, 100])
def test_the_newest_blocks_come_first_into_a_smaller_cache(tmp_path, limit):
    saved = blocks()
    texts_ = [(None, [i] * 2 * SIZE) for i in range(4)]
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    loaded = blocks(limit)
    assert loaded.load(tmp_path / "cache") == min(limit, 8)
    left = limit
    for name, tokens in reversed(texts_):
        assert get(loaded, name, tokens)[0] == SIZE * min(left, 2)
        left = max(0, left - 2)
        loaded.check()


def test_blocks_over_a_paged_cache_take_what_the_pool_has(tmp_path):
    saved = blocks()
    put(saved, "n", [1] * 10 * SIZE)
    saved.save(tmp_path / "cache")
    paged = PagedKvCache(8, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="f32")
    paged.allocate(0, 3 * SIZE)
    cache = PrefixCache.over(paged)
    assert cache.load(tmp_path / "cache") == 5
    with cache.open_session([1] * 10 * SIZE, "n") as session:
        paged.adopt(1, session.shared_blocks, session.num_tokens)
        keys, values = rows("n", [1] * 5 * SIZE, HEADS * DIM)
        for layer in range(LAYERS):
            for got, want in zip(paged.read(layer, 1), (keys, values), strict=True):
                np.testing.assert_array_equal(got.reshape(5 * SIZE, -1), want[layer])
        cache.check()
        paged.check()
    assert cache.evict(8) == 0  # sequence 1 has its blocks
    paged.free(1)
    cache.check()
    paged.check()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_loaded_block_that_was_freed_shows_nobody_what_was_in_it(tmp_path, damaged):
    """The same for a damaged block, whose bytes were read before the check failed."""
    path = tmp_path / "cache"
    saved = blocks()
    put(saved, "n", [1] * 8 * SIZE)
    saved.save(path)
    if damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    paged = PagedKvCache(8, SIZE, HEADS, DIM, num_layers=LAYERS, dtype="f32")
    cache = PrefixCache.over(paged)
    cache.load(path)
    assert get(cache, "n", [1] * 8 * SIZE)[0] == (7 if damaged else 8) * SIZE
    cache.clear()
    paged.allocate(0, 8 * SIZE)
    for layer in range(LAYERS):
        for rows_ in paged.read(layer, 0):
            assert not rows_.any()


def test_blocks_that_wait_may_leave_unread(tmp_path):
    saved = blocks()
    for name, tokens in prompts(5, 3, 60):
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    loaded = blocks(len(saved))
    loaded.load(tmp_path / "cache")
    for i in range(100):
        put(loaded, "other", [100 + i] * 3 * SIZE)
        loaded.check()
        assert_true(get(loaded, "other", [100 + i] * 3 * SIZE), "other", [100 + i] * 3 * SIZE)
        name, tokens = prompts(5, 3, 60)[i % 3]
        assert_true(get(loaded, name, tokens), name, tokens)
    loaded.clear()
    loaded.check()
    assert loaded.load(tmp_path / "cache") == len(saved)

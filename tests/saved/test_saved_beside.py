"""Several prefix caches in one file, each with blocks, formats and namespaces of its own."""

import pytest
from contents import LAYERS, pairs
from oracles.snapshot import parse
from saved_caches import DIM, HEADS, SIZE, assert_same, blocks, get, prompts, put

from kvcache import InvalidOperationError, PrefixCache, SnapshotError


def other(capacity=512, size=2 * SIZE, **options):
    """A cache with blocks twice as large."""
    return PrefixCache(capacity, size, LAYERS, HEADS, DIM, **({"dtype": "f16"} | options))


def put_other(cache, name, tokens):
    cache.store(tokens, 0, pairs(name, tokens, cache.block_size, HEADS, DIM), namespace=name)


@pytest.fixture
def saved(tmp_path):
    """Three caches; the names of the first are also those of the second."""
    caches = [blocks(dtype="q4"), other(), blocks()]
    for name, tokens in prompts(1):
        put(caches[0], name, tokens)
        put_other(caches[1], name, tokens)
    put(caches[2], "third", [7] * 20)
    caches[0].save(tmp_path / "cache", "m", beside=caches[1:])
    return tmp_path / "cache", caches


def assert_equal(one, two, texts):
    assert len(one) == len(two)
    for name, tokens in texts:
        assert_same(get(one, name, tokens), get(two, name, tokens))
    two.check()


TEXTS = [*prompts(1), ("third", [7] * 20), ("nobody", [7] * 20)]


def test_each_comes_back(saved):
    path, caches = saved
    loaded = [blocks(dtype="q4"), other(), blocks()]
    assert loaded[0].load(path, "m", beside=loaded[1:]) == len(caches[0])
    for one, two in zip(caches, loaded, strict=True):
        two.check()
        assert_equal(one, two, TEXTS)
    found = parse(path.read_bytes())
    assert [arena["page_tokens"] for arena in found["arenas"]] == [SIZE, 2 * SIZE, SIZE]
    names = [{repr(s["name"]) for s in found["segments"] if s["arena"] == i} for i in range(3)]
    assert names[0] == names[1]
    assert names[2] == {"'third'"}


def test_saved_again_before_anything_is_read(saved):
    path, caches = saved
    loaded = [blocks(dtype="q4"), other(), blocks()]
    loaded[0].load(path, "m", beside=loaded[1:])
    loaded[0].save(path.with_name("again"), "m", beside=loaded[1:])
    again = [blocks(dtype="q4"), other(), blocks()]
    again[0].load(path.with_name("again"), "m", beside=again[1:])
    for one, two in zip(caches, again, strict=True):
        assert_equal(one, two, TEXTS)


def test_what_finds_no_taker_is_passed_over(saved):
    path, caches = saved
    alone = blocks(dtype="q4")
    assert alone.load(path, "m") == len(caches[0])
    assert_equal(caches[0], alone, TEXTS)
    # In the place of the second: caches of other blocks or formats, which stay empty. The third loads its own blocks.
    for wrong in (other(size=SIZE), other(dtype="q8")):
        loaded = [blocks(dtype="q4"), wrong, blocks()]
        assert loaded[0].load(path, "m", beside=loaded[1:]) == len(caches[0])
        assert len(wrong) == 0
        put_other(wrong, None, [1] * 20)
        wrong.check()
        assert_equal(caches[0], loaded[0], TEXTS)
        assert_equal(caches[2], loaded[2], TEXTS)


def test_a_file_of_one(tmp_path):
    saved = blocks()
    put(saved, "a", [1] * 20)
    saved.save(tmp_path / "cache")
    loaded, empty = blocks(), other()
    assert loaded.load(tmp_path / "cache", beside=[empty]) == 5
    assert len(empty) == 0
    empty.check()
    assert_equal(saved, loaded, [("a", [1] * 20)])


def test_each_takes_in_what_it_has_room_for(saved):
    path, caches = saved
    loaded = [blocks(3, dtype="q4"), other(5), blocks(0)]
    assert loaded[0].load(path, "m", beside=loaded[1:]) == 3
    assert [len(cache) for cache in loaded] == [3, 5, 0]
    for cache in loaded:
        cache.check()


def test_what_is_refused_leaves_all_empty(saved):
    path, _ = saved
    first, second = blocks(dtype="q8"), other()
    with pytest.raises(SnapshotError, match="expected key_dtype q8, got q4"):
        first.load(path, "m", beside=[second])
    with pytest.raises(SnapshotError, match="expected model 'other', got 'm'"):
        blocks(dtype="q4").load(path, "other", beside=[second])
    assert (len(first), len(second)) == (0, 0)
    put_other(second, None, [1] * 8)
    first = blocks(dtype="q4")
    with pytest.raises(InvalidOperationError, match="expected an empty cache to load into, got 1 blocks"):
        first.load(path, "m", beside=[second])
    assert (len(first), len(second)) == (0, 1)

"""Saved caches: what comes back, in which order it leaves, and that no damage turns into wrong tokens."""

import gc
import itertools
import os

import numpy as np
import pytest
from conftest import FAST
from contents import LAYERS, pairs, rows, state
from fuzz_snapshot import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_snapshot import parse, texts

from kvcache import (
    InvalidOperationError,
    PagedKvCache,
    PrefixCache,
    PrefixCacheConfig,
    PrefixKvCache,
    SnapshotError,
    _kernels,
)
from kvcache.segments import walk_back

FORMATS = ("f32", "f16", "q8", "q4", "q3", "q2")
NAMES = (None, "a", ("b", 1))
HEADS, DIM, SIZE = 2, 8, 4


def entries(config=None, **options):
    return PrefixKvCache(config or PrefixCacheConfig(min_prefix_len=1, **options))


def blocks(capacity=512, **options):
    return PrefixCache(capacity, SIZE, LAYERS, HEADS, DIM, **options)


def prompts(seed, count=9, longest=150):
    """Texts that begin alike and part somewhere, each with a namespace."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 3, longest)
    cuts = rng.integers(0, longest, count)
    return [
        (NAMES[i * i % 3], [*common[:cut].tolist(), *rng.integers(0, 3, rng.integers(4, 40)).tolist()])
        for i, cut in enumerate(cuts.tolist())
    ]


def put(cache, name, tokens):
    if isinstance(cache, PrefixKvCache):
        cache.store_snapshot(tokens, state(name, tokens, HEADS * DIM), namespace=name)
    else:
        cache.store(tokens, 0, pairs(name, tokens, SIZE, HEADS, DIM), namespace=name)


def get(cache, name, tokens):
    """`(length, keys, values)` of what is found, per layer float32 `(length, HEADS * DIM)`."""
    if isinstance(cache, PrefixKvCache):
        hit = cache.lookup(tokens, namespace=name)
        if hit is None:
            return 0, [], []
        return hit[0], *([side.reshape(hit[0], -1) for side in sides] for sides in (hit[1].keys, hit[1].values))
    length, found = cache.lookup(tokens, namespace=name)
    sides = [
        [
            np.concatenate(
                [np.empty((0, HEADS * DIM), np.float32)]
                + [getattr(b, s)[layer].reshape(HEADS, -1, DIM).swapaxes(0, 1).reshape(-1, HEADS * DIM) for b in found]
            )
            for layer in range(LAYERS)
        ]
        for s in ("keys", "values")
    ]
    for block in found:
        cache.release(block.index)
    return length, *sides


def assert_same(one, other):
    assert one[0] == other[0]
    for x, y in zip(one[1] + one[2], other[1] + other[2], strict=True):
        np.testing.assert_array_equal(x, y)


def assert_true(found, name, tokens):
    """What was found is K and V of exactly these tokens in exactly this namespace."""
    length = found[0]
    if length:
        assert_same(found, (length, *rows(name, tokens[:length], HEADS * DIM)))


# -- round trips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [entries, blocks])
@pytest.mark.parametrize("pair", list(itertools.product(FORMATS, FORMATS)), ids="-".join)
def test_every_pair_of_formats_comes_back_bit_for_bit(tmp_path, kind, pair):
    options = {"key_dtype": pair[0], "value_dtype": pair[1]}
    if kind is entries:
        options["head_dim"] = DIM
    saved, texts_ = kind(**options), prompts(1, 5)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache", model="m")
    loaded = kind(**options)
    assert loaded.load(tmp_path / "cache", model="m") == len(saved) == len(loaded)
    for name, tokens in texts_:
        loaded.check()
        assert_same(get(loaded, name, tokens), get(saved, name, tokens))
    loaded.check()
    saved.check()


@pytest.mark.parametrize(
    ("rotate", "head_dim"), [(True, 8), (False, 8), ("auto", 8), (False, 24), ("auto", 24)]
)
def test_rotations_come_back_and_are_told_apart(tmp_path, rotate, head_dim):
    options = {"dtype": "q8", "head_dim": head_dim, "min_prefix_len": 1}
    saved = entries(PrefixCacheConfig(rotate=rotate, **options))
    tokens = list(range(70))
    saved.store_snapshot(tokens, state(None, tokens, 48))
    saved.save(tmp_path / "cache")
    for other in (True, False, "auto"):
        if other is True and head_dim == 24:
            continue
        loaded = entries(PrefixCacheConfig(rotate=other, **options))
        if bool(other) == bool(rotate) or head_dim == 24:
            loaded.load(tmp_path / "cache")
            one, two = saved.lookup(tokens), loaded.lookup(tokens)
            for x, y in zip(one[1].keys + one[1].values, two[1].keys + two[1].values, strict=True):
                np.testing.assert_array_equal(x, y)
        else:
            with pytest.raises(SnapshotError, match=f"expected rotate_keys {bool(other)}, got {bool(rotate)}"):
                loaded.load(tmp_path / "cache")
            assert len(loaded) == 0


@pytest.mark.parametrize("kind", [entries, blocks])
def test_an_empty_cache(tmp_path, kind):
    kind().save(tmp_path / "cache")
    loaded = kind()
    assert loaded.load(tmp_path / "cache") == 0
    loaded.check()
    put(loaded, None, [1, 2, 3, 4])
    assert_true(get(loaded, None, [1, 2, 3, 4]), None, [1, 2, 3, 4])


@pytest.mark.parametrize("kind", [entries, blocks])
def test_saved_loaded_and_saved_again_is_the_same_file(tmp_path, kind):
    """Also while nothing has been looked up, and what was damaged meanwhile is left out."""
    saved = kind()
    for name, tokens in prompts(2):
        put(saved, name, tokens)
    saved.save(tmp_path / "one")
    loaded = kind()
    loaded.load(tmp_path / "one")
    loaded.save(tmp_path / "two")
    one, two = (parse((tmp_path / name).read_bytes()) for name in ("one", "two"))
    key = lambda text: (repr(text[0]), text[1], text[4])  # noqa: E731
    assert sorted(map(key, texts(one))) == sorted(map(key, texts(two)))
    for name, tokens in prompts(2):
        assert_true(get(loaded, name, tokens), name, tokens)


def test_namespaces_of_different_shapes(tmp_path):
    saved = entries()
    for name, layers, dim in (("a", 1, 5), ("b", 3, 64), ("c", 1, 5), (7, 2, 1)):
        saved.store_snapshot([1, 2, 3], state(name, [1, 2, 3], dim, layers), namespace=name)
    saved.save(tmp_path / "cache")
    loaded = entries()
    assert loaded.load(tmp_path / "cache") == 4
    for name, layers, dim in (("a", 1, 5), ("b", 3, 64), ("c", 1, 5), (7, 2, 1)):
        length, found = loaded.lookup([1, 2, 3], namespace=name)
        keys, values = rows(name, [1, 2, 3], dim, layers)
        for got, want in zip(found.keys + found.values, keys + values, strict=True):
            np.testing.assert_array_equal(got.reshape(length, dim), want)
    loaded.check()


def test_a_file_that_is_being_looked_at_can_be_replaced(tmp_path):
    """Each loaded cache reads the file that it has opened, whatever takes its name."""
    path = tmp_path / "cache"
    for turn in (1, 2):
        cache = entries()
        put(cache, "x", [turn] * 200)
        cache.save(path)
        if turn == 1:
            first = entries()
            first.load(path)
    path.unlink()
    assert_true(get(first, "x", [1] * 200), "x", [1] * 200)
    assert get(first, "x", [1] * 200)[0] == 200


# -- the format, read by somebody else ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_the_file_says_what_the_cache_has(tmp_path, dtype):
    cache, order = entries(dtype=dtype), []
    for name, tokens in prompts(3):
        put(cache, name, tokens)
        order = [text for text in order if text != (name, tokens)] + [(name, tokens)]
    for name, tokens in (order[2], order[5]):
        cache.lookup(tokens, namespace=name)
        order = [text for text in order if text != (name, tokens)] + [(name, tokens)]
    cache.save(tmp_path / "cache", model="llama")
    parsed = parse((tmp_path / "cache").read_bytes())
    assert (parsed["kind"], parsed["model"]) == ("entries", "llama")
    found = [(name, tokens) for name, tokens, _, _, marked in texts(parsed) if marked]
    assert found == order[::-1]
    (arena,) = parsed["arenas"]
    assert (arena["shape"], arena["formats"], arena["layout"]) == ((LAYERS, 1, HEADS * DIM), (dtype, dtype), 1)
    kind = {"f32": "<f4", "f16": "<f2"}[dtype]
    pages = [np.frombuffer(page, kind).reshape(2, LAYERS, 64, HEADS * DIM) for page in arena["pages"]]
    for name, tokens, slots, _, _ in texts(parsed):
        want = rows(name, tokens, HEADS * DIM)
        for i, slot in enumerate(slots):
            for side, layer in itertools.product(range(2), range(LAYERS)):
                np.testing.assert_array_equal(pages[slot // 64][side, layer, slot % 64], want[side][layer][i])
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_file_has_the_blocks_of_the_cache(tmp_path, dtype):
    """The bytes of a page, read with the kernels where no cache stands between, are the rows that were stored."""
    cache = blocks(dtype=dtype)
    for name, tokens in prompts(4):
        put(cache, name, tokens)
    cache.save(tmp_path / "cache")
    parsed = parse((tmp_path / "cache").read_bytes())
    (arena,) = parsed["arenas"]
    turned = int(dtype[0] == "q")
    assert (parsed["kind"], arena["layout"], arena["page_tokens"]) == ("blocks", 2, SIZE)
    assert (arena["shape"], arena["formats"], arena["rotated"]) == ((LAYERS, HEADS, DIM), (dtype,) * 2, (turned,) * 2)
    layout = _kernels.Layout(SIZE, HEADS, DIM, dtype, dtype, bool(turned), bool(turned))
    assert arena["page_bytes"] == LAYERS * layout.block_bytes
    count = 0
    for name, tokens, slots, _, _ in texts(parsed):
        length, *want = get(cache, name, tokens)
        assert length == len(tokens)
        for start in range(0, length, SIZE):
            page = np.frombuffer(arena["pages"][slots[start] // SIZE], np.uint8).reshape(LAYERS, -1)
            for layer in range(LAYERS):
                got = np.empty((2, SIZE, HEADS, DIM), np.float32)
                _kernels._read(layout, page[layer].copy(), [(0, 0, SIZE)], *got)
                for side in range(2):
                    np.testing.assert_array_equal(got[side].reshape(SIZE, -1), want[side][layer][start : start + SIZE])
        count += 1
    assert count == len(parsed["segments"]) > 4


# -- order and limits ---------------------------------------------------------------------------------------

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
@settings(max_examples=150, deadline=None)
@given(before=STEPS, after=STEPS)
def test_a_loaded_cache_goes_on_like_the_one_that_was_saved(tmp_path_factory, make, before, after):
    """Every lookup, every eviction: which entries are newest, what may leave first, all of it was saved."""
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
    """Nor do the bytes of a damaged one, which were read before they were found wrong."""
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


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.fixture
def saved_entries(tmp_path):
    cache = entries()
    for name, tokens in prompts(6):
        put(cache, name, tokens)
    cache.save(tmp_path / "cache", model="this one")
    return tmp_path / "cache"


@pytest.fixture
def saved_blocks(tmp_path):
    cache = blocks()
    for name, tokens in prompts(6, 4, 60):
        put(cache, name, tokens)
    cache.save(tmp_path / "cache", model="this one")
    return tmp_path / "cache"


def refuse(cache, path, match, model="this one"):
    with pytest.raises(SnapshotError, match=match) as caught:
        cache.load(path, model=model)
    assert str(path) in str(caught.value)
    assert len(cache) == 0
    cache.check()
    put(cache, None, [1] * 8)
    assert get(cache, None, [1] * 8)[0] == 8


def test_another_model_is_refused_by_name(saved_entries):
    refuse(entries(), saved_entries, "expected model 'that one', got 'this one'", model="that one")
    refuse(entries(), saved_entries, "expected model '', got 'this one'", model="")


def test_another_kind_is_refused(tmp_path, saved_entries):
    refuse(blocks(), saved_entries, "expected saved blocks, got entries")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "f16"}, "expected key_dtype f16, got f32"),
        ({"value_dtype": "q4"}, "expected num_heads .* got|expected value_dtype q4, got f32|expected layout"),
        ({"dtype": "q8", "head_dim": 8}, "expected num_heads 2, got 1"),
    ],
)
def test_other_formats_are_refused(saved_entries, options, message):
    refuse(entries(**{"head_dim": 16, **options}), saved_entries, message)


def test_other_dimensions_are_refused(saved_blocks):
    for shape, message in (
        ((SIZE, LAYERS + 1, HEADS, DIM), "num_layers 3, got 2"),
        ((SIZE, LAYERS, HEADS + 1, DIM), "num_heads 3, got 2"),
        ((SIZE, LAYERS, HEADS, DIM - 1), "head_dim 7, got 8"),
        ((SIZE + 1, LAYERS, HEADS, DIM), "page_tokens 5, got 4"),
    ):
        cache = PrefixCache(64, *shape)
        with pytest.raises(SnapshotError, match=f"expected {message}"):
            cache.load(saved_blocks, model="this one")
        assert len(cache) == 0


def test_files_that_are_no_saved_caches(tmp_path):
    cache, path = entries(), tmp_path / "file"
    for content, message in (
        (b"", "expected at least 128 bytes, got 0"),
        (b"kvcache\x1a", "expected at least 128 bytes, got 8"),
        (b"PK\3\4" + bytes(1000), "expected a saved cache, got another file"),
        (b"kvcache\x1a" + bytes(1000), "expected version 1, got 0"),
        (b"kvcache\x1a\1\0\0\0" + bytes(1000), "header with its checksum"),
    ):
        path.write_bytes(content)
        refuse(cache, path, message, model="")
        cache.clear()
    os.mkfifo(tmp_path / "pipe")
    refuse(entries(), tmp_path / "pipe", "expected a regular file")
    refuse(entries(), tmp_path, "expected a regular file")
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "nothing")


def test_a_cache_that_is_not_empty(tmp_path, saved_entries):
    cache = entries()
    put(cache, "x", [1, 2, 3])
    with pytest.raises(InvalidOperationError, match="expected an empty cache to load into, got 1 entries"):
        cache.load(saved_entries, model="this one")
    other = blocks()
    put(other, "x", [1, 2, 3, 4])
    with pytest.raises(InvalidOperationError, match="expected an empty cache to load into, got 1 blocks"):
        other.load(saved_entries, model="this one")


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_namespace_that_cannot_be_saved(tmp_path, kind):
    cache, path = kind(), tmp_path / "cache"
    put(cache, "x", [1, 2, 3, 4])
    cache.save(path)
    before = path.read_bytes()
    for bad in (1.5, frozenset({1}), ("a", object()), np.int64(3)):
        put(cache, bad, [1, 2, 3, 4])
        with pytest.raises(TypeError, match="expected namespaces of None, bool, int, str, bytes or tuples of them"):
            cache.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["cache"]
        cache.clear()


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_file_is_open_as_long_as_something_waits_for_it(tmp_path, kind):
    saved, texts_ = kind(), prompts(8)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    gc.collect()  # what other tests have left open
    before = open_files()
    for model in ("another", "and another"):
        with pytest.raises(SnapshotError):
            kind().load(tmp_path / "cache", model=model)
        assert open_files() == before
    loaded = kind()
    loaded.load(tmp_path / "cache")
    assert open_files() == before + 1
    for name, tokens in texts_:
        get(loaded, name, tokens)
    assert open_files() == before  # all is read
    loaded.clear()
    loaded.load(tmp_path / "cache")
    assert open_files() == before + 1
    loaded.clear()
    assert open_files() == before
    loaded.load(tmp_path / "cache")
    del loaded
    assert open_files() == before


@pytest.mark.parametrize(("kind", "module"), [(entries, "entry_index"), (blocks, "block_index")])
def test_a_load_that_runs_out_of_memory_half_way(tmp_path, kind, module, monkeypatch):
    """Nothing has changed: no slot is taken, no block, and the next load finds an empty cache."""
    saved, texts_ = kind(), prompts(9)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    loaded = kind()
    for after in (0, 1, 4):

        def few(*arguments, after=after):
            for i, step in enumerate(walk_back(*arguments)):
                if i == after:
                    raise MemoryError
                yield step

        with monkeypatch.context() as patch:
            patch.setattr(f"kvcache.{module}.walk_back", few)
            with pytest.raises(MemoryError):
                loaded.load(tmp_path / "cache")
        assert len(loaded) == 0
        loaded.check()
    assert loaded.load(tmp_path / "cache") == len(saved)
    for name, tokens in texts_:
        assert_same(get(loaded, name, tokens), get(saved, name, tokens))


# -- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_damaged_page_costs_what_needs_it_and_nothing_else(tmp_path, kind, caplog):
    path = tmp_path / "cache"
    saved, texts_ = kind(), prompts(7)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(path)
    good = path.read_bytes()
    parsed = parse(good)
    lost_somewhere = 0
    page_bytes = parsed["arenas"][0]["page_bytes"]
    first = len(good) - page_bytes * len(parsed["arenas"][0]["pages"])
    count = len(parsed["arenas"][0]["pages"])
    for page in range(0, count, max(1, count // 10)):
        bad = bytearray(good)
        bad[first + page * page_bytes + page % page_bytes] ^= 1 << page % 8
        path.write_bytes(bad)
        # The longest prefix of each text whose slots all lie in other pages, from the file, by hand.
        size = parsed["arenas"][0]["page_tokens"]
        want = {}
        for name, tokens, slots, _, _ in texts(parsed):
            length = next((i for i, slot in enumerate(slots) if slot // size == page), len(slots))
            for end in range(1, length + 1):
                want.setdefault((name, tuple(tokens[:end])))
        loaded = kind()
        assert loaded.load(path) == len(saved)
        caplog.clear()
        for name, tokens in texts_:
            found = get(loaded, name, tokens)
            assert_true(found, name, tokens)
            whole = tokens if kind is entries else tokens[: len(tokens) // SIZE * SIZE]
            longest = max((n for n in range(len(whole) + 1) if n and (name, tuple(whole[:n])) in want), default=0)
            assert found[0] == (longest if kind is entries else longest // SIZE * SIZE)
            lost_somewhere += found[0] < len(whole)
            loaded.check()
        assert caplog.text.count("is damaged") == 1
        assert f"page {page} is damaged" in caplog.text
        loaded.save(tmp_path / "again")
        assert all(None not in arena["pages"] for arena in parse((tmp_path / "again").read_bytes())["arenas"])
        for name, tokens in texts_:  # what was lost is computed and stored again
            put(loaded, name, tokens)
            assert get(loaded, name, tokens)[0] == get(saved, name, tokens)[0]
        loaded.check()
    assert lost_somewhere


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_file_that_shrinks_after_it_was_loaded(tmp_path, kind):
    """A mapping would be a bus error here."""
    path = tmp_path / "cache"
    saved = kind()
    put(saved, "x", [5] * 400)
    saved.save(path)
    size = path.stat().st_size
    for cut in (size - 1, size // 2, 5000, 0):
        saved.save(path)
        loaded = kind()
        loaded.load(path)
        os.truncate(path, cut)
        found = get(loaded, "x", [5] * 400)
        assert found[0] < 400
        assert_true(found, "x", [5] * 400)
        loaded.check()


def test_whole_matches_stay_whole_matches(tmp_path):
    """Where only whole entries match, a damaged one is gone rather than shortened."""
    path = tmp_path / "cache"
    saved = entries(partial_matches=False)
    put(saved, "x", [5] * 100)
    put(saved, "x", [5] * 50)
    saved.save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # slots 64.. of [5] * 100
    path.write_bytes(data)
    loaded = entries(partial_matches=False)
    assert loaded.load(path) == 2
    assert get(loaded, "x", [5] * 200)[0] == 50
    assert len(loaded) == 1
    loaded.check()


def test_load_reads_no_page(tmp_path):
    """A file whose pages are nothing but zeros loads like any other, and has nothing when it is asked."""
    path = tmp_path / "cache"
    saved = blocks()
    put(saved, "x", [5] * 40)
    saved.save(path)
    with open(path, "r+b") as file:
        parsed = parse(path.read_bytes())
        first = path.stat().st_size - 10 * parsed["arenas"][0]["page_bytes"]
        file.seek(first)
        file.write(bytes(path.stat().st_size - first))
    loaded = blocks()
    assert loaded.load(path) == 10
    assert get(loaded, "x", [5] * 40)[0] == 0
    assert len(loaded) == 0
    loaded.check()


# -- whatever bytes are in a block --------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [(a, a) for a in FORMATS] + [("q4", "f16"), ("f32", "q3")], ids="-".join)
def test_any_bytes_can_be_read_and_attended(simd, pair, rng):
    """Checksums stop no one who writes a file on purpose: NaN scales, infinities, anything, and no memory error."""
    cache = PagedKvCache(6, 16, 2, 64, key_dtype=pair[0], value_dtype=pair[1])
    cache.allocate(0, 90)
    queries = rng.standard_normal((3, 6, 64)).astype(np.float32)
    for fill in (0x00, 0xFF, 0x7F, 0x7C, 0x80, None):
        for block in range(6):
            (raw,) = cache._store.overwrite(block)
            raw[:] = rng.integers(0, 256, raw.shape) if fill is None else fill
        keys, values = cache.read(0, 0)
        assert keys.shape == values.shape == (90, 2, 64)
        out, scores = cache.attention(0, queries, [0], query_lens=[3], return_scores=True)
        assert (out.shape, scores.shape) == ((3, 6, 64), (90,))
    cache.check()


def test_some_thousand_mutations(tmp_path):
    """`python tests/fuzz_snapshot.py` runs as many as one likes."""
    outcomes = fuzz(300 if FAST else 2000, 1, tmp_path)
    seen = {(kind, outcome) for kind, _, outcome in outcomes}
    accidents = {("accident", outcome) for outcome in ("refused", "a part is lost", "all is found")}
    assert seen == accidents | {("malice", "refused"), ("malice", "taken in")}

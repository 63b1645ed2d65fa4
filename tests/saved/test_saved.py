"""Saved caches: they load bit for bit, in every format, and save to the same file again."""

import os
from contextlib import nullcontext

import numpy as np
import pytest
from contents import rows, state
from oracles.snapshot import parse, texts
from saved_caches import DIM, assert_same, assert_true, blocks, entries, get, prompts, put

from kvcache import PrefixCacheConfig, SnapshotError
from kvcache.kernels.kernels import FORMATS

NAMES = list(FORMATS)
PAIRS = [(key, NAMES[(i + step) % len(NAMES)]) for i, key in enumerate(NAMES) for step in (0, 1, 3)]


@pytest.mark.parametrize("kind", [entries, blocks])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_formats_of_keys_and_values_come_back_bit_for_bit(tmp_path, kind, pair):
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


@pytest.mark.parametrize(("rotate", "head_dim"), [(True, 8), (False, 8), ("auto", 8), (False, 24), ("auto", 24)])
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
    """Also before any lookup; damaged pages are omitted."""
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
    """A loaded cache reads the file that it has opened, also after another file has taken its name.

    On Windows no other file takes it, and the writer is told.
    """
    refused = nullcontext() if os.name == "posix" else pytest.raises(PermissionError)
    path = tmp_path / "cache"
    for turn in (1, 2):
        cache = entries()
        put(cache, "x", [turn] * 200)
        with nullcontext() if turn == 1 else refused:
            cache.save(path)
        if turn == 1:
            first = entries()
            first.load(path)
    if os.name == "posix":
        path.unlink()
    assert_true(get(first, "x", [1] * 200), "x", [1] * 200)
    assert get(first, "x", [1] * 200)[0] == 200

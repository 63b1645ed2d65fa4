"""Files that cannot be loaded and caches that cannot be saved: the error says why, and nothing changes."""

import gc
import os

import numpy as np
import pytest
from contents import LAYERS
from oracles.snapshot import parse
from posix_modules import needs_posix
from saved_caches import DIM, HEADS, SIZE, assert_same, blocks, entries, get, prompts, put, refuse, set_bits

from kvcache import InvalidOperationError, PrefixCache, SnapshotError
from kvcache.kernels.kernels import BITS_VERSION
from kvcache.saved.segments import walk_back


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


def test_another_model_is_refused_by_name(saved_entries):
    refuse(entries(), saved_entries, "expected model 'that one', got 'this one'", model="that one")
    refuse(entries(), saved_entries, "expected model '', got 'this one'", model="")


@pytest.mark.parametrize("kind", [entries, blocks])
def test_other_bits_are_refused_and_taken_when_asked(tmp_path, kind):
    """Files of before have names with a SIMD level, and no version or the first one; what has their K and V says so."""
    path, saved, texts_ = tmp_path / "cache", kind(), prompts(7)
    for name, tokens in texts_:
        put(saved, name, tokens)
    for model in ("this one", "this one, avx512", "this one, neon, bits 1"):
        saved.save(path, model=model)
        assert parse(path.read_bytes())["bits"] == BITS_VERSION
        if model != "this one":  # files of these bits have no levels in their names
            with pytest.raises(SnapshotError, match=f"expected model 'this one', got '{model}'"):
                kind().load(path, "this one", exact=False)
        for version, found in ((0, "no version"), (1, "version 1"), (BITS_VERSION + 1, f"version {BITS_VERSION + 1}")):
            set_bits(path, version)
            refuse(kind(), path, f"expected bits of version {BITS_VERSION}, got {found}; `exact=False` takes the file")
            with pytest.raises(SnapshotError, match="expected model 'that one', got 'this one"):
                kind().load(path, "that one", exact=False)
            loaded = kind()
            assert loaded.load(path, "this one", exact=False) == len(saved)
            assert not loaded.stats().exact
            for name, tokens in texts_:
                assert_same(get(loaded, name, tokens), get(saved, name, tokens))
            loaded.save(tmp_path / "again", "this one")
            assert parse((tmp_path / "again").read_bytes())["bits"] == 0
            loaded.clear()
            assert not loaded.stats().exact
            refuse(kind(), tmp_path / "again", "expected bits of version")
    saved.save(path, "this one")
    loaded = kind()
    assert loaded.load(path, "this one", exact=False) == len(saved)
    assert loaded.stats().exact
    loaded.clear()  # Windows replaces no file that is open
    kind().save(path, "this one")
    set_bits(path, 0)
    nothing = kind()
    assert nothing.load(path, "this one", exact=False) == 0
    assert nothing.stats().exact


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


@needs_posix
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
        with pytest.raises(TypeError, match="namespace: expected None, bool, int, str, bytes or a tuple of them"):
            cache.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["cache"]
        cache.clear()


def open_files():
    return len(os.listdir("/proc/self/fd"))


@needs_posix
@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_file_is_open_as_long_as_something_waits_for_it(tmp_path, kind):
    saved, texts_ = kind(), prompts(8)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    gc.collect()  # closes files of other tests
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


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_load_that_runs_out_of_memory_half_way(tmp_path, kind, monkeypatch):
    """Nothing changes: no slot or block is taken, and the next load finds an empty cache."""
    saved, texts_ = kind(), prompts(9)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(tmp_path / "cache")
    set_bits(tmp_path / "cache", 0)
    loaded = kind()
    for after in (0, 1, 4):

        def few(*arguments, after=after):
            for i, step in enumerate(walk_back(*arguments)):
                if i == after:
                    raise MemoryError
                yield step

        with monkeypatch.context() as patch:
            patch.setattr("kvcache.prefix.index_file.walk_back", few)
            with pytest.raises(MemoryError):
                loaded.load(tmp_path / "cache", exact=False)
        assert len(loaded) == 0
        assert loaded.stats().exact
        loaded.check()
    assert loaded.load(tmp_path / "cache", exact=False) == len(saved)
    for name, tokens in texts_:
        assert_same(get(loaded, name, tokens), get(saved, name, tokens))

"""The file of a saved cache, read by an independent reader; and blocks of arbitrary bytes."""

import itertools
import os

import numpy as np
import pytest
from contents import LAYERS, rows
from oracles.snapshot import parse, texts
from saved_caches import DIM, HEADS, SIZE, blocks, entries, get, prompts, put

from kvcache import PagedKvCache
from kvcache.kernels import kernelcalls, kernels

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
    assert os.name != "posix" or (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_the_file_has_the_blocks_of_the_cache(tmp_path, dtype):
    """The bytes of a page, read by the kernels without a cache, are the rows that were stored."""
    cache = blocks(dtype=dtype)
    for name, tokens in prompts(4):
        put(cache, name, tokens)
    cache.save(tmp_path / "cache")
    parsed = parse((tmp_path / "cache").read_bytes())
    (arena,) = parsed["arenas"]
    turned = int(kernels.FORMATS[dtype].quantised)
    assert (parsed["kind"], arena["layout"], arena["page_tokens"]) == ("blocks", 2, SIZE)
    assert (arena["shape"], arena["formats"], arena["rotated"]) == ((LAYERS, HEADS, DIM), (dtype,) * 2, (turned,) * 2)
    layout = kernels.Layout(SIZE, HEADS, DIM, dtype, dtype, bool(turned), bool(turned))
    assert arena["page_bytes"] == LAYERS * layout.block_bytes
    count = 0
    for name, tokens, slots, _, _ in texts(parsed):
        length, *want = get(cache, name, tokens)
        assert length == len(tokens)
        for start in range(0, length, SIZE):
            page = np.frombuffer(arena["pages"][slots[start] // SIZE], np.uint8).reshape(LAYERS, -1)
            for layer in range(LAYERS):
                got = np.empty((2, SIZE, HEADS, DIM), np.float32)
                kernelcalls.read(layout, page[layer].copy(), [(0, 0, SIZE)], *got)
                for side in range(2):
                    np.testing.assert_array_equal(got[side].reshape(SIZE, -1), want[side][layer][start : start + SIZE])
        count += 1
    assert count == len(parsed["segments"]) > 4


# -- whatever bytes are in a block --------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [(a, a) for a in kernels.FORMATS] + [("q4", "f16"), ("f32", "q3")], ids="-".join)
def test_any_bytes_can_be_read_and_attended(pair, rng):
    """A file with valid checksums may have NaN scales, infinities or any other bytes; no memory error follows."""
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

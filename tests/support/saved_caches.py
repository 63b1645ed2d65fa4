"""Caches of both kinds for saving and loading, with K and V that identify their text."""

import struct
import zlib

import numpy as np
import pytest
from contents import LAYERS, pairs, rows, state

from kvcache import PrefixCache, PrefixCacheConfig, PrefixKvCache, SnapshotError

NAMES = (None, "a", ("b", 1))
HEADS, DIM, SIZE = 2, 8, 4


def entries(config=None, **options):
    return PrefixKvCache(config or PrefixCacheConfig(min_prefix_len=1, **options))


def blocks(capacity=512, **options):
    return PrefixCache(capacity, SIZE, LAYERS, HEADS, DIM, **options)


def prompts(seed, count=9, longest=150):
    """Texts with a common prefix of random length, each with a namespace."""
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
    """`(length, keys, values)` of the match, per layer float32 `(length, HEADS * DIM)`."""
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
    """Check that the match has K and V of exactly these tokens in exactly this namespace."""
    length = found[0]
    if length:
        assert_same(found, (length, *rows(name, tokens[:length], HEADS * DIM)))


def set_bits(path, version):
    """Write another version of bits into the header of a file."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 72, version)
    struct.pack_into("<I", data, 124, zlib.crc32(data[:124]))
    path.write_bytes(data)


def refuse(cache, path, match, model="this one"):
    """Check that `load` of this file fails with a message that names it and the reason, and leaves the cache empty."""
    with pytest.raises(SnapshotError, match=match) as caught:
        cache.load(path, model=model)
    assert str(path) in str(caught.value)
    assert len(cache) == 0
    cache.check()
    put(cache, None, [1] * 8)
    assert get(cache, None, [1] * 8)[0] == 8

"""Bodies of values: the bytes of blocks, and sums of NH."""

import numpy as np
import pytest
from format_pairs import RING
from tier_stores import twin_digest

from kvcache.core.store import BlockStore
from kvcache.tiers.bodies import KEY_WORDS, copy_in, copy_out, digest
from kvcache.tiers.spaces import Space


def test_digests_are_those_of_the_twin(rng):
    """Any number of bytes at any address, also where words and products are the largest ones."""
    largest = np.full(KEY_WORDS, 2**32 - 1, np.uint32)
    for size in (*range(130), *range(1020, 1030), 2048, 5000):
        data = rng.bytes(size + 3)
        words = rng.integers(0, 2**32, KEY_WORDS).astype(np.uint32)
        at = int(rng.integers(4))
        assert digest(words, memoryview(data)[at : at + size]) == twin_digest(words, data[at : at + size])
        assert digest(largest, bytes(size)) == twin_digest(largest, bytes(size))


def test_blocks_come_back(rng):
    """Copied out and in, a block has the bytes that it had, and other blocks keep theirs."""
    for formats in RING:
        store, other = (BlockStore(3, 8, 16, 2, 8, *formats) for _ in range(2))
        for block in range(8):
            for place in store.overwrite(block):
                place[...] = rng.integers(0, 256, len(place), np.uint8)
        blocks = np.array([5, 0, 3], np.int32)
        out = bytearray(3 * store.block_bytes)
        copy_out(store, blocks, out)
        expected = np.array([[store.raw(layer)[block] for layer in range(3)] for block in blocks])
        assert bytes(out) == expected.tobytes()
        copy_in(other, blocks[::-1].copy(), bytes(out))
        for layer in range(3):
            assert np.array_equal(other.raw(layer)[blocks[::-1]], store.raw(layer)[blocks])
            assert not other.raw(layer)[[1, 2, 4, 6, 7]].any()


def test_memory_is_used_again_when_nobody_has_it(rng):
    """Any history of values that are kept and let go: none of them changes, and memory stays bounded."""
    space, held, pieces = Space(), [], set()
    for turn in range(2000):
        size = int(rng.integers(1, 3 << 20)) if turn % 50 else 9 << 20
        value = space(size)
        assert len(value) == size
        value[0] = value[-1] = turn % 256
        held.append((value, turn % 256))
        pieces.add(np.frombuffer(value, np.uint8).ctypes.data >> 23)
        del value
        while len(held) > int(rng.integers(1, 12)):
            held.pop(int(rng.integers(len(held))))
        assert all(each[0] == each[-1] == number for each, number in held)
    held.clear()
    assert len(pieces) < 200  # of 8 MB, where 3,000 MB were asked for
    assert len(space._kept) <= 8


def test_mistakes():
    store, one = BlockStore(2, 4, 16, 1, 8, "f32", "f32"), np.array([1], np.int32)
    room = bytearray(store.block_bytes)
    for blocks in ([4], [-1]):
        with pytest.raises(IndexError, match=r"blocks: expected ints in \[0, 4\)"):
            copy_out(store, np.array(blocks, np.int32), room)
    for call, name in ((copy_out, "out"), (copy_in, "data")):
        with pytest.raises(ValueError, match=f"{name}: expected {len(room)} bytes, got {len(room) - 1}"):
            call(store, one, room[:-1])
    with pytest.raises(ValueError, match="key: expected 262 words, got 261"):
        digest(np.zeros(261, np.uint32), b"")

"""Layers with formats of their own: each does what a cache of its layer alone does, bit for bit."""

import numpy as np
import pytest
from format_pairs import RING

from kvcache import Calibration, PagedKvCache, PrefixCache, SnapshotError

HEADS, DIM, SIZE = 2, 32, 8
KEYS, VALUES = zip(*RING, strict=True)
LAYERS = range(len(KEYS))


class Apart:
    """The layers in caches of their own, which do the same."""

    def __init__(self, calibration=None):
        parts = [calibration.of_layers([layer]) if calibration else None for layer in LAYERS]
        sizes = 40, SIZE, HEADS, DIM
        self.mixed = PagedKvCache(
            *sizes, num_layers=len(KEYS), key_dtype=KEYS, value_dtype=list(VALUES), calibration=calibration
        )
        self.alone = [
            PagedKvCache(*sizes, key_dtype=key, value_dtype=value, calibration=part)
            for key, value, part in zip(KEYS, VALUES, parts, strict=True)
        ]

    def __getattr__(self, name):
        def call(*arguments):
            for cache in (self.mixed, *self.alone):
                getattr(cache, name)(*arguments)

        return call

    def write(self, seq, rng, count, start=None):
        for layer, alone in zip(LAYERS, self.alone, strict=True):
            keys, values = rng.standard_normal((2, count, HEADS, DIM), np.float32)
            self.mixed.write(layer, seq, keys, values, start)
            alone.write(0, seq, keys, values, start)

    def compare(self, rng):
        self.check()
        ids = self.mixed.sequence_ids()
        queries = rng.standard_normal((len(ids), 2 * HEADS, DIM), np.float32)
        for layer, alone in zip(LAYERS, self.alone, strict=True):
            np.testing.assert_array_equal(self.mixed._store.raw(layer), alone._store.raw(0))
            for mine, other in zip(
                self.mixed.attention(layer, queries, ids, return_scores=True, return_lse=True),
                alone.attention(0, queries, ids, return_scores=True, return_lse=True),
                strict=True,
            ):
                np.testing.assert_array_equal(mine, other)
            for seq in ids:
                for mine, other in zip(self.mixed.read(layer, seq), alone.read(0, seq), strict=True):
                    np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("calibrated", [False, True])
def test_each_layer_does_what_it_does_alone(rng, calibrated):
    factors = rng.standard_normal((len(KEYS), HEADS, DIM, DIM), np.float32)
    moments = factors @ factors.swapaxes(2, 3)
    centres = rng.standard_normal((len(KEYS), HEADS, DIM), np.float32)
    moments = (moments + moments.swapaxes(2, 3)) / 2
    both = Apart(Calibration(centres, moments) if calibrated else None)
    both.allocate(1, 37)
    both.write(1, rng, 37)
    both.fork(1, 2)
    both.append(2, 5)
    both.write(2, rng, 5)
    both.truncate(1, 30)
    both.append(1, 4)  # reads as zeros until it is written
    both.compare(rng)
    both.keep_tokens(2, np.arange(0, 42, 3))
    both.compact(2)
    both.grow(24)
    both.write(1, rng, 9, 7)
    both.copy_blocks([int(both.mixed.block_table([1]).block_ids[0])], [int(both.mixed.block_table([2]).block_ids[0])])
    both.compare(rng)
    assert both.mixed.block_memory_bytes == sum(cache.block_memory_bytes for cache in both.alone)
    assert (both.mixed.key_dtype, both.mixed.value_dtype) == (KEYS, VALUES)


def test_what_one_layer_cannot_hold_another_can():
    both, rows = Apart(), np.full((1, HEADS, DIM), 1e6, np.float32)
    both.allocate(1, 1)
    fine = np.ones_like(rows)
    for layer, (key, value) in enumerate(zip(KEYS, VALUES, strict=True)):
        for dtype, sides in ((key, (rows, fine)), (value, (fine, rows))):
            if dtype == "f32":
                both.mixed.write(layer, 1, *sides)
            else:
                with pytest.raises(ValueError, match=f"expected values that {dtype} can hold, up to 65504"):
                    both.mixed.write(layer, 1, *sides)


def test_arguments():
    sizes = {"block_size": SIZE, "num_heads": HEADS, "head_dim": DIM, "num_layers": 3}
    for wrong in (["q8", "q4"], (), ["q4"] * 4):
        with pytest.raises(ValueError, match=r"^key_dtype: expected one format, or one for each of 3 layers, got"):
            PagedKvCache(4, **sizes, key_dtype=wrong)
    with pytest.raises(ValueError, match=r"^value_dtype: expected one of f32, .*, got 'q7'"):
        PagedKvCache(4, **sizes, value_dtype=["q4", "q7", "q4"])
    same = PagedKvCache(4, **sizes, key_dtype=["q4"] * 3, dtype="q8")
    assert (same.key_dtype, same.value_dtype) == ("q4", "q8")
    assert "key_dtype=('q8', 'q4', 'q4')" in repr(PagedKvCache(4, **sizes, dtype=["q8", "q4", "q4"]))


def test_a_saved_cache_names_the_formats_of_its_layers(rng, tmp_path):
    def make(keys):
        paged = PagedKvCache(8, SIZE, HEADS, DIM, num_layers=3, key_dtype=keys, value_dtype="q4")
        return paged, PrefixCache.over(paged)

    tokens = np.arange(2 * SIZE, dtype=np.uint32)
    paged, cache = make(["q8", "q4", "q2"])
    paged.allocate(1, len(tokens))
    for layer in range(3):
        paged.write(layer, 1, *rng.standard_normal((2, len(tokens), HEADS, DIM), np.float32))
    cache.adopt(tokens, paged.block_table([1]).block_ids)
    cache.save(tmp_path / "file", "model")
    other, loaded = make(("q8", "q4", "q2"))
    assert loaded.load(tmp_path / "file", "model") == 2
    with loaded.open_session(tokens) as session:
        other.adopt(5, session.shared_blocks, len(tokens))
    for layer in range(3):
        np.testing.assert_array_equal(other.read(layer, 5), paged.read(layer, 1))
    for wrong in (["q2", "q4", "q8"], "q4"):
        with pytest.raises(SnapshotError):
            make(wrong)[1].load(tmp_path / "file", "model")

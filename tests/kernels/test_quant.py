"""Quantised formats: packed sizes, error bounds, attention over them."""

import itertools
from functools import cache

import numpy as np
import pytest
from blocks import Scattered, attend, guarded_attention
from oracles import kernels as oracle
from pace import half
from quantised_rows import BITS, hard_rows

from kvcache.kernels import kernelcalls, kernels

formats = pytest.mark.parametrize("name", BITS)
# Tiles, tiles that a run covers in part, and rows.
block_sizes = pytest.mark.parametrize("block_size", [16, 48, 256, 1, 5, 17])


def write_read(rows, name, *, rotate=False, block_size=16):
    layout = kernels.Layout(block_size, 1, rows.shape[1], name, name, rotate, rotate)
    num_blocks = -(-len(rows) // block_size)
    arena = np.zeros(num_blocks * layout.block_bytes, np.uint8)
    runs = [(b, 0, min(block_size, len(rows) - b * block_size)) for b in range(num_blocks)]
    rows = np.ascontiguousarray(rows[:, None, :], np.float32)
    keys, values = np.empty_like(rows), np.empty_like(rows)
    kernelcalls.write(layout, arena, runs, rows, rows)
    kernelcalls.read(layout, arena, runs, keys, values)
    np.testing.assert_array_equal(keys, values)
    return keys[:, 0], arena


@formats
@pytest.mark.parametrize("dim", [8, 24, 64, 128, 256, 384, 512])
def test_rows_take_exactly_their_bits_and_two_halves(name, dim):
    for block_size in (16, 32, 1, 5):
        layout = kernels.Layout(block_size, 3, dim, name, name)
        exact = block_size * (dim * BITS[name] // 8 + 4)
        assert layout.key_head_bytes == layout.value_head_bytes
        assert layout.key_head_bytes - exact in (range(1) if block_size % 16 == 0 else range(4))


@cache
def oracle_stored(row, bits, rotated):
    """The oracle's result for a row in bytes; levels and block sizes share it: the oracle takes most of the time."""
    return oracle.stored(np.frombuffer(row, np.float32), bits, rotated)


@cache
def oracle_quantise(row, bits):
    return oracle.quantise(np.frombuffer(row, np.float32), bits)


@formats
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("block_size", [16, 5])
def test_rows_are_read_within_the_error_bound(rng, name, rotate, block_size):
    for dim in (8, 32, 64, 128, 256, 512):
        rows = hard_rows(rng, dim)
        rows = np.concatenate([rows[:160:5], rows[160:]])
        got, _ = write_read(rows, name, rotate=rotate, block_size=block_size)
        assert np.isfinite(got).all()
        for row, back in zip(rows, got, strict=True):
            expected, bound = oracle_stored(row.tobytes(), BITS[name], rotate)
            assert np.sqrt(np.mean((back.astype(float) - row) ** 2)) <= bound, (row[:4], back[:4])
            if not kernels.FORMATS[name].fitted and not rotate:
                assert np.abs(back - row).max() <= bound
            if not rotate:  # the kernel sums a rotated row in another order than the oracle, which may change a code
                np.testing.assert_allclose(back, expected, rtol=1e-6, atol=2.0**-22 * np.abs(row).max())


@pytest.mark.parametrize("name", ["q5", "q4", "q3", "q2"])
@pytest.mark.parametrize("dim", [8, 24, 128, 512])
def test_the_codes_are_those_of_the_oracle(rng, name, dim):
    """Rows are read, bit for bit, as minimum + scale * code of the oracle."""
    heavy = rng.standard_t(3, (20, dim)) * np.exp(rng.standard_normal((20, 1)))
    rows = np.concatenate([hard_rows(rng, dim)[::3], np.clip(heavy, -60000, 60000)]).astype(np.float32)
    got, _ = write_read(rows, name)
    parts = [oracle_quantise(row.tobytes(), BITS[name]) for row in rows]
    want = [minimum + scale * codes.astype(np.float32) for codes, scale, minimum in parts]
    np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.parametrize(("name", "share"), [("q5", 0.87), ("q4", 0.85), ("q3", 0.78), ("q2", 0.56)])
@pytest.mark.parametrize("rotate", [False, True])
def test_the_fit_reduces_the_error_of_normal_rows(rng, name, share, rotate):
    """The reduction stated in kvc_fit.h, and no row has a larger error."""
    rows = rng.standard_normal((300, 64)).astype(np.float32)
    got, _ = write_read(rows, name, rotate=rotate)
    h = oracle.hadamard(64) if rotate else np.eye(64) * 8
    turned = (rows @ h / 64).astype(np.float32)
    errors, plain = ((got - rows).astype(float) ** 2).sum(axis=1), []
    for row in turned:
        codes, scale, minimum = oracle.quantise_range(row, BITS[name])
        plain.append(64 * ((minimum + scale * codes - row) ** 2).sum())
    assert errors.sum() <= share * np.sum(plain)
    assert (errors <= 1.1 * np.array(plain)).all()


@pytest.mark.parametrize("name", ["q5", "q4", "q3", "q2"])
@pytest.mark.parametrize("rotate", [False, True])
def test_rows_on_a_grid_are_exact(rng, name, rotate):
    """If the range has no error, the fit is not used."""
    top = 2 ** BITS[name] - 1
    rows = rng.integers(0, top + 1, (50, 64)).astype(np.float32)
    rows[:, :2] = 0, top
    turned = rows @ oracle.hadamard(64) if rotate else rows * 0.25 - 1
    got, _ = write_read(turned, name, rotate=rotate)
    np.testing.assert_array_equal(got, turned.astype(np.float32))


@formats
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 3.14159, -271.8, 65504.0, -65504.0, 1e-3, -1e-3, 6e-8, 65519.0])
def test_constant_rows_are_exact_in_f16(name, rotate, value):
    for block_size in (16, 3):
        got, _ = write_read(np.full((3, 64), value, np.float32), name, rotate=rotate, block_size=block_size)
        np.testing.assert_array_equal(got, np.float32(np.float16(value)))


@formats
def test_halves_between_two_codes_go_to_the_even_one(name):
    top = 2 ** BITS[name] - 1
    codes = np.resize([0, top, 0.5, 1.5, 2.5, top - 0.5, top - 1.5, 1.4999999], 64)  # minimum 0, scale 1
    got, _ = write_read(codes[None], name)
    fitted = kernels.FORMATS[name].fitted
    expected = oracle.stored(codes, BITS[name], False)[0] if fitted else np.rint(codes.astype(np.float32))
    np.testing.assert_array_equal(got[0], expected)  # with fewer bits the row is fitted, then rounded in the same way


@formats
@block_sizes
def test_writing_token_by_token_is_the_same_as_at_once(rng, name, block_size):
    layout = kernels.Layout(block_size, 2, 32, name, name)
    rows = rng.standard_normal((block_size, 2, 32)).astype(np.float32)
    arenas = [rng.integers(0, 256, layout.block_bytes, dtype=np.uint8) for _ in range(2)]
    kernelcalls.write(layout, arenas[0], [(0, 0, block_size)], rows, -rows)
    for t in rng.permutation(block_size):
        kernelcalls.write(layout, arenas[1], [(0, t, t + 1)], rows[t : t + 1], -rows[t : t + 1])
    used = 2 * (layout.key_head_bytes + layout.value_head_bytes)
    got = [np.empty_like(rows) for _ in range(4)]
    kernelcalls.read(layout, arenas[0], [(0, 0, block_size)], *got[:2])
    kernelcalls.read(layout, arenas[1], [(0, 0, block_size)], *got[2:])
    np.testing.assert_array_equal(got[0], got[2])
    np.testing.assert_array_equal(got[1], got[3])
    if block_size % 4 == 0:  # the size of a head is not rounded up
        np.testing.assert_array_equal(arenas[0][:used], arenas[1][:used])


@formats
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("block_size", [16, 48, 5])
def test_the_bytes_of_a_row_do_not_depend_on_other_rows(rng, name, rotate, block_size):
    """Up to 16 rows are coded at a time: of one tile, or of many heads, sequences and both sides. The bytes are those
    of each row alone, whatever the runs of a call."""
    dim, heads, num_blocks = 64, 3, 6
    layout = kernels.Layout(block_size, heads, dim, name, name, rotate, rotate)
    rows = hard_rows(rng, dim)
    keys, values = rows[rng.integers(0, len(rows), (2, num_blocks * block_size, heads))]
    for _ in range(5):
        starts = [0, *sorted(rng.choice(np.arange(1, block_size), min(3, block_size - 1), replace=False)), block_size]
        runs = [(b, int(a), int(z)) for b in range(num_blocks) for a, z in itertools.pairwise(starts)]
        runs = [runs[i] for i in rng.permutation(len(runs))[: rng.integers(1, len(runs) + 1)]]
        together = rng.integers(0, 256, num_blocks * layout.block_bytes, dtype=np.uint8)
        alone, count = together.copy(), sum(stop - first for _, first, stop in runs)
        kernelcalls.write(layout, together, runs, keys[:count], values[:count])
        tokens = [(b, t, t + 1) for b, first, stop in runs for t in range(first, stop)]
        for i, token in enumerate(tokens):
            kernelcalls.write(layout, alone, [token], keys[i : i + 1], values[i : i + 1])
        np.testing.assert_array_equal(together, alone)


@formats
@pytest.mark.parametrize("block_size", [16, 32, 7])
def test_copied_slots_are_the_same_codes_and_touch_no_others(rng, name, block_size):
    layout = kernels.Layout(block_size, 2, 64, name, name)
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    rows = rng.standard_normal((2 * block_size, 2, 64)).astype(np.float32)
    runs = [(0, 0, block_size), (1, 0, block_size)]
    kernelcalls.write(layout, arena, runs, rows, -rows)

    def read():
        keys, values = np.empty_like(rows), np.empty_like(rows)
        kernelcalls.read(layout, arena, runs, keys, values)
        return np.stack([keys, values])

    for _ in range(60):
        count = int(rng.integers(1, block_size + 1))
        src, dst = ((int(rng.integers(2)), int(rng.integers(block_size - count + 1))) for _ in range(2))
        expected = read()
        at, to = src[0] * block_size + src[1], dst[0] * block_size + dst[1]
        expected[:, to : to + count] = expected[:, at : at + count].copy()
        kernelcalls.copy(layout, arena, *src, *dst, count)
        np.testing.assert_array_equal(read(), expected)


@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (32, 32), (48, 96), (5, 40)])
@pytest.mark.parametrize("formats", [("f32", "f16"), ("q8", "q4"), ("q3", "q6"), ("q5", "q2"), ("q4", "f32")])
def test_cleared_slots_are_zeros_and_others_are_unchanged(block_size, dim, formats):
    rng = np.random.default_rng(block_size)
    layout = kernels.Layout(block_size, 2, dim, *formats, False, False)
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    runs = [(0, 0, block_size), (1, 0, block_size)]
    rows = rng.normal(size=(2 * block_size, 2, dim)).astype(np.float32)
    kernelcalls.write(layout, arena, runs, rows, -rows)
    keys, values = np.empty_like(rows), np.empty_like(rows)
    for _ in range(30):
        count = int(rng.integers(0, block_size + 1))
        block, slot = int(rng.integers(2)), int(rng.integers(block_size - count + 1))
        kernelcalls.read(layout, arena, runs, keys, values)
        expected = np.stack([keys, values])
        expected[:, block * block_size + slot :][:, :count] = 0
        kernelcalls.clear(layout, arena, block, slot, count)
        kernelcalls.read(layout, arena, runs, keys, values)
        np.testing.assert_array_equal(np.stack([keys, values]), expected)
        kernelcalls.write(layout, arena, runs, rows, -rows)


@pytest.mark.parametrize(
    "args",
    [
        (16, 1, 24, "q4", "q4", True, True),
        (16, 1, 64, "f16", "q4", True, False),
        (16, 1, 64, "q4", "f32", False, True),
        (16, 1, 96, "q4", "q4", False, True),
    ],
)
def test_rotation_needs_a_quantised_format_and_a_power_of_two(args):
    with pytest.raises(ValueError, match="rotat"):
        kernels.Layout(*args)


# ---- Attention.


def relative_errors(got):
    """The L2 error of each output row relative to its L2 norm."""
    out, _, expected, _ = got
    return (np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).ravel()


@formats
@pytest.mark.parametrize("rotate", [False, True])
@block_sizes
def test_attention_agrees_with_the_rows_of_read(rng, name, rotate, block_size):
    s = Scattered(rng, [1, 15, 100, 37], block_size=block_size, dim=64, key_format=name, rotate=rotate, holes=True)
    for num_queries in ([1, 1, 1, 1], [1, 15, 40, 2]):
        got = attend(s, num_queries, 3, rng=rng, sinks=[0, 3, 20, 16])
        assert relative_errors(got).max() <= 0.01
        np.testing.assert_allclose(got[1], got[3], rtol=0.02, atol=0.005 * got[3].max())


@formats
@pytest.mark.parametrize("dim", half([8, 32, 24, 96, 40, 128, 80, 256, 320, 512]))
def test_attention_at_any_head_dim(rng, name, dim):
    s = Scattered(rng, [77], dim=dim, key_format=name)
    for group in (1, 2, 5, 8):
        assert relative_errors(attend(s, [1], group, rng=rng)).max() <= 0.01


@pytest.mark.parametrize("names", [("f16", "q4"), ("q8", "f32"), ("q5", "q4"), ("q3", "q6"), ("q2", "q8")])
def test_keys_and_values_of_different_formats(rng, names):
    s = Scattered(rng, [77], dim=64, key_format=names[0], value_format=names[1])
    assert relative_errors(attend(s, [1], 4, rng=rng)).max() <= 0.01
    assert relative_errors(attend(s, [20], 4, rng=rng)).max() <= 0.01


@formats
@pytest.mark.parametrize(("tokens", "spread"), half([(256, 3.0), (256, 1.0), (256, 8.0), (4096, 3.0)]))
def test_the_bound_holds_for_any_score_spread(rng, name, spread, tokens):
    errors = []
    for rotate in (False, True):
        s = Scattered(rng, [tokens], heads=2, dim=128, key_format=name, rotate=rotate)
        errors.append(relative_errors(attend(s, [1], 8, rng=rng, spread=spread, threads=2)))
    assert np.concatenate(errors).max() <= 0.01
    assert np.median(errors) <= 0.005


@formats
@pytest.mark.parametrize("dim", [32, 64, 96, 256, 512])
def test_the_largest_sums_do_not_overflow(rng, name, dim):
    """All codes but one of a row at one end, all digits of queries and of weights at theirs, with either sign."""
    s = Scattered(rng, [320], heads=1, dim=dim, key_format=name)
    row = np.ones(dim, np.float32)
    row[0] = -1
    for side in (s.keys[0], s.values[0]):
        side[:160], side[160:] = row, -row
    kernelcalls.write(s.layout, s.arena, s.runs[0], s.keys[0], s.values[0])
    kernelcalls.read(s.layout, s.arena, s.runs[0], s.read_keys[0], s.read_values[0])
    queries = np.ones((1, 3, dim), np.float32) * np.float32([[1], [-1], [0]]) * np.float32(dim**-0.5)
    out, _, expected, _ = attend(s, [1], 3, rng=rng, queries=queries)
    np.testing.assert_allclose(out, expected, atol=0.01)
    assert np.abs(expected[0, :2]).min() > 0.5


@formats
@pytest.mark.parametrize("rotate", [False, True])
def test_outlier_channels_and_offsets(rng, name, rotate):
    s = Scattered(rng, [500], heads=1, dim=128, key_format=name, rotate=rotate)
    keys, values = s.keys[0], s.values[0]
    keys[..., [3, 50, 90, 127]] *= 8
    values += 5 * rng.standard_normal(128).astype(np.float32)
    values[::7] = 1.5
    values[::11] *= 1e-4
    kernelcalls.write(s.layout, s.arena, s.runs[0], keys, values)
    kernelcalls.read(s.layout, s.arena, s.runs[0], s.read_keys[0], s.read_values[0])
    assert relative_errors(attend(s, [1], 8, rng=rng)).max() <= 0.01


@formats
def test_attention_ignores_unused_slots(rng, name):
    def garbage(size, dtype):
        return np.full(size, 0xFF, dtype)  # scales and minima are NaN

    s = Scattered(rng, [20, 3, 40], block_size=32, dim=64, key_format=name, holes=True, empty=garbage)
    got = attend(s, [1, 1, 1], 4, rng=rng)
    assert np.isfinite(got[0]).all()
    assert relative_errors(got).max() <= 0.01


@pytest.mark.parametrize("at_end", [False, True])
@formats
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_nothing_outside_the_arrays_is_touched(rng, at_end, name, dim):
    for _, _, out, _ in guarded_attention(rng, name, dim, at_end, (2,)):
        assert np.isfinite(out).all()

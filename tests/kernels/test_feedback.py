"""Error feedback in the key encoder, centres, and the `Calibration` that both come from."""

import itertools
from functools import cache

import numpy as np
import pytest
from oracles import kernels as oracle
from quantised_rows import BITS, hard_rows

from kvcache.core.calibration import Calibration
from kvcache.errors import CheckpointError
from kvcache.kernels import kernelcalls, kernels

formats = pytest.mark.parametrize("name", BITS)


def moments(rng, *shape):
    """E[q q'] of queries with channels of different size that are correlated."""
    dim = shape[-1]
    turns = rng.standard_normal((*shape, dim)) * np.exp(rng.standard_normal((*shape[:-1], 1, dim)))
    found = (turns.swapaxes(-1, -2) @ turns / dim).astype(np.float32)
    return (found + found.swapaxes(-1, -2)) / 2


def calibration(rng, layers, heads, dim):
    return Calibration(3 * rng.standard_normal((layers, heads, dim)), moments(rng, layers, heads, dim))


def stored(rows, name, *, rotate=False, block_size=16, centres=None, factors=None, runs=None):
    """The arena, and the keys as they are read; values are the same rows without centre and factor."""
    layout = kernels.Layout(block_size, rows.shape[1], rows.shape[2], name, name, rotate, rotate)
    arena = np.zeros(-(-len(rows) // block_size) * layout.block_bytes, np.uint8)
    whole = [(i, 0, min(block_size, len(rows) - i * block_size)) for i in range(-(-len(rows) // block_size))]
    for run in runs or whole:
        first = run[0] * block_size
        some = np.ascontiguousarray(rows[first + run[1] : first + run[2]])
        kernelcalls.write(layout, arena, [run], some, some, centres, factors)
    keys = np.empty_like(rows)
    kernelcalls.read(layout, arena, whole, keys, None, centres)
    return arena, keys


@cache
def oracle_steered(row, bits, factor):
    """The oracle's keys of a row in bytes; levels share them."""
    found, square = np.frombuffer(row, np.float32), np.frombuffer(factor, np.float32)
    codes, scale, minimum = oracle.quantise_steered(found, bits, square.reshape(len(found), -1))
    return minimum + scale * codes.astype(np.float32)


@formats
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_codes_with_feedback_are_those_of_the_oracle(rng, name, dim):
    rows = np.concatenate([hard_rows(rng, dim)[::4], rng.standard_normal((30, dim)).astype(np.float32)])[:, None]
    factors = calibration(rng, 1, 1, dim).factors(0)[0]
    want = [oracle_steered(row.tobytes(), BITS[name], factors[0].tobytes()) for row in rows[:, 0]]
    np.testing.assert_array_equal(stored(rows, name, factors=factors)[1][:, 0], np.stack(want))


@formats
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("block_size", [16, 48, 5])
def test_every_division_into_calls_stores_the_same_bytes(rng, name, rotate, block_size):
    dim, heads = int(rng.choice([8, 32, 128])), 3
    rows = hard_rows(rng, dim)
    rows = rows[rng.integers(0, len(rows), (2 * block_size, heads))] / 2
    known = calibration(rng, 1, heads, dim)
    options = {"centres": known.centres[0], "factors": known.factors(dim * rotate)[0], "rotate": rotate}
    starts = [0, *sorted(rng.choice(np.arange(1, block_size), 3, replace=False).tolist()), block_size]
    runs = [(b, a, z) for b in range(2) for a, z in itertools.pairwise(starts)]
    tokens = [(b, i, i + 1) for b in range(2) for i in range(block_size)]
    found = [stored(rows, name, block_size=block_size, runs=parts, **options)[0] for parts in (None, runs, tokens)]
    for arena in found[1:]:
        np.testing.assert_array_equal(arena, found[0])


@formats
@pytest.mark.parametrize("rotate", [False, True])
def test_feedback_reduces_the_error_of_scores(rng, name, rotate):
    rows = rng.standard_normal((100, 2, 64)).astype(np.float32)
    known = calibration(rng, 1, 2, 64)
    errors = []
    for factors in (None, known.factors(64 * rotate)[0]):
        error = stored(rows, name, rotate=rotate, factors=factors)[1].astype(np.float64) - rows
        errors.append(np.einsum("thd,hde,the->", error, known.moments[0].astype(np.float64), error))
    assert errors[1] < 0.75 * errors[0]


@pytest.mark.parametrize("name", kernels.FORMATS)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("block_size", [16, 5])
def test_read_adds_the_centre_to_what_was_written_alone(rng, name, rotate, block_size):
    rotate = rotate and kernels.FORMATS[name].quantised
    rows = rng.standard_normal((block_size, 2, 32)).astype(np.float32)
    centres = rng.standard_normal((2, 32)).astype(np.float32) * 20
    rows[0] = centres  # less its centre it is zeros, as a slot is that was never written
    rows[1] = centres + np.float32(2.0**-26)
    kept = [0, 1, 3]
    arena, keys = stored(
        rows, name, rotate=rotate, block_size=block_size, centres=centres, runs=[(0, i, i + 1) for i in kept]
    )
    assert arena.any()
    np.testing.assert_allclose(keys[:2], rows[:2], atol=2.0**-22)
    assert np.abs(keys[3] - rows[3]).max() <= 100  # the centre is there, whatever the rounding
    missing = np.setdiff1d(np.arange(block_size), kept)
    assert not keys[missing].any()


def test_factors_are_those_of_the_definition(rng):
    known = calibration(rng, 2, 3, 32)
    for rotated in (0, 8, 32):  # channels of a part
        h = np.kron(np.eye(32 // rotated), oracle.hadamard(rotated)) if rotated else np.eye(32)
        factors = known.factors(rotated)
        for layer, head in np.ndindex(2, 3):
            one = known.moments[layer, head]
            expected = oracle.factor(h @ one @ h)
            np.testing.assert_allclose(np.triu(factors[layer, head]), expected, rtol=1e-4, atol=1e-5)
    assert Calibration(known.centres).factors(32) is None
    none = Calibration(np.zeros((1, 1, 8)), np.zeros((1, 1, 8, 8))).factors(0)
    np.testing.assert_array_equal(none[0, 0], np.eye(8))


def test_a_calibration_is_checked(rng):
    good = moments(rng, 1, 2, 8)
    for centres, some, name in (
        (np.full((1, 2, 8), 4e4), None, "centres"),
        (np.full((1, 2, 8), np.nan), None, "centres"),
        (np.zeros((2, 8)), None, "centres"),
        (np.zeros((1, 2, 8)), good[:, :1], "moments"),
        (np.zeros((1, 2, 8)), -good, "moments"),
        (np.zeros((1, 2, 8)), np.triu(good), "moments"),
        (np.zeros((1, 2, 8)), good * np.float32(np.inf), "moments"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"), np.errstate(invalid="ignore"):
            Calibration(centres, some)


def test_a_calibration_is_saved_and_loaded(rng, tmp_path):
    path = tmp_path / "calibration"
    for known in (calibration(rng, 2, 3, 16), Calibration(rng.standard_normal((1, 2, 8)))):
        known.save(path)
        again = Calibration.load(path)
        assert again.fingerprint == known.fingerprint
        np.testing.assert_array_equal(again.centres, known.centres)
        assert (again.moments is None) == (known.moments is None)
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:30], b"", whole + b"x", whole[:-2] + b"zz", b"K" + whole[1:]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"calibration .*: .*expected"):
                Calibration.load(path)
    assert calibration(rng, 1, 1, 8).fingerprint != calibration(rng, 1, 1, 8).fingerprint

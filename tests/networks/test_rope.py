"""Rotary embeddings: the frequencies of each kind compared with its definition, and invariants of the rotation."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcache.networks.rope import Rope, RopeTable

DIM = 32
BASE = np.array([10000.0 ** (-2 * i / DIM) for i in range(DIM // 2)])
KINDS = [
    Rope(),
    Rope(kind="linear", factor=4.0),
    Rope(kind="llama3", theta=500000.0, factor=8.0, original_positions=64),
    Rope(kind="yarn", factor=8.0, original_positions=64, attention_factor=1.2),
]


def test_default_and_linear():
    np.testing.assert_allclose(Rope().frequencies(DIM), BASE, rtol=1e-15)
    np.testing.assert_allclose(Rope(kind="linear", factor=4.0).frequencies(DIM), BASE / 4, rtol=1e-15)


def test_llama3_pair_by_pair():
    rope = Rope(kind="llama3", theta=500000.0, factor=8.0, original_positions=8192)
    expected = []
    for frequency in Rope(theta=500000.0).frequencies(128):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    np.testing.assert_allclose(rope.frequencies(128), expected, rtol=1e-14)
    assert len({round(f / g, 6) for f, g in zip(expected, Rope(theta=500000.0).frequencies(128), strict=True)}) > 3


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_pair_by_pair(truncate):
    rope = Rope(kind="yarn", factor=4.0, original_positions=4096, truncate=truncate)
    base = Rope().frequencies(128)
    # The (fractional) pair that turns r times over the original context, by bisection on the frequency.
    low, high = (np.interp(-math.log(r * 2 * math.pi / 4096), -np.log(base), np.arange(64)) for r in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    for i, (found, frequency) in enumerate(zip(rope.frequencies(128), base, strict=True)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        assert found == pytest.approx(frequency * (1 - ramp) + frequency / 4 * ramp, rel=1e-9)


def test_yarn_band_of_no_width():
    frequencies = Rope(kind="yarn", factor=4.0, original_positions=2, beta_fast=8.0, beta_slow=8.0).frequencies(16)
    assert np.isfinite(frequencies).all()


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope.kind)
def test_rotation_pair_by_pair(rope):
    rng = np.random.default_rng(0)
    heads = rng.standard_normal((5, 3, DIM)).astype(np.float32)
    positions = np.array([0, 1, 7, 300, 4000])
    table = RopeTable(rope, DIM, 8192)
    turned = table.rotate(heads, table.rows(positions))
    assert turned.dtype == np.float32
    for n, position in enumerate(positions):
        for pair, frequency in enumerate(rope.frequencies(DIM)):
            angle = position * frequency
            x, y = heads[n, :, pair].astype(float), heads[n, :, pair + DIM // 2].astype(float)
            cos, sin = math.cos(angle) * rope.attention_factor, math.sin(angle) * rope.attention_factor
            np.testing.assert_allclose(turned[n, :, pair], x * cos - y * sin, atol=1e-6)
            np.testing.assert_allclose(turned[n, :, pair + DIM // 2], y * cos + x * sin, atol=1e-6)


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope.kind)
def test_scores_depend_on_distance_alone(rope):
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 1, 1, DIM)).astype(np.float32)
    table = RopeTable(rope, DIM, 100_000)

    def score(at_query, at_key):
        turned = (table.rotate(x, table.rows(np.array([at]))) for x, at in ((query, at_query), (key, at_key)))
        return float(np.vdot(*turned))

    assert score(20, 3) == pytest.approx(score(90_020, 90_003), abs=1e-4)
    assert score(20, 3) != pytest.approx(score(21, 3), abs=1e-3)


def test_the_table_grows_on_request_and_keeps_its_rows():
    table, whole = RopeTable(Rope(), 8, 1000), RopeTable(Rope(), 8, 1000)
    everything = whole.rows(np.arange(1000))
    for stop in (0, 1, 255, 256, 257, 600, 1000):
        cos, sin = table.rows(np.arange(stop))
        np.testing.assert_array_equal(cos, everything[0][:stop])
        np.testing.assert_array_equal(sin, everything[1][:stop])
    assert len(table._table[0]) == 1000


def test_threads_share_a_table():
    """Growth from two threads at once must keep every row at its position."""
    expected = RopeTable(Rope(), 8, 4096).rows(np.arange(4096))[0]
    for _ in range(20):
        table = RopeTable(Rope(), 8, 4096)
        sizes = [range(1, 4097, step) for step in (97, 131, 173, 211)]

        def grow(stops, table=table):
            for stop in stops:
                np.testing.assert_array_equal(table.rows(np.arange(stop))[0], expected[:stop])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(grow, sizes))


def test_strided_heads():
    """The engine rotates queries and keys in place, in rows that also contain values."""
    table = RopeTable(Rope(), 8, 100)
    wide = np.random.default_rng(2).standard_normal((4, 5, 8)).astype(np.float32)
    rows = table.rows(np.arange(4))
    np.testing.assert_array_equal(table.rotate(wide[:, :3], rows), table.rotate(wide[:, :3].copy(), rows))

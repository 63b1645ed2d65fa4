"""Layers with a state, compared with float64; bits depend on neither pieces nor company nor threads."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.bits import fma
from oracles.recurrence import convolution, sigmoid, softplus
from oracles.recurrence import scan as plain_scan

from kvcache import get_num_threads, set_num_threads
from kvcache.kernels.layers import (
    bounded_decays,
    convolution_floats,
    convolve,
    decays,
    gate,
    scan,
    scan_floats,
    softplus_gate,
)

SCANS = [  # heads, groups, size, dim
    (1, 1, 1, 1), (2, 1, 3, 8), (4, 2, 16, 16), (6, 3, 24, 17), (2, 2, 8, 31), (3, 1, 20, 32), (4, 2, 33, 48),
    (2, 1, 64, 80), (2, 1, 128, 128), (2, 1, 150, 16),
]


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def pieces_of(rng, n):
    """Lengths of some pieces, zeros among them, whose sum is n."""
    cuts = np.sort(rng.integers(0, n + 1, rng.integers(0, 5)))
    return np.diff(np.concatenate([[0], cuts, [n]])).tolist()


class Subject:
    """One layer: rows of `n` tokens, its run over slots, and its float64 twin, which gives results and the state."""

    def __init__(self, floats, arrays, run, twin):
        self.floats, self.arrays, self.run, self.twin = floats, arrays, run, twin


def convolution_subject(rng, n, channels, taps, biased, silu):
    weight, bias = normal(rng, taps, channels), normal(rng, channels) if biased else None

    def run(rows, slots, at, index, lens):
        return convolve(*rows, weight, bias, slots, at, index, lens, silu)

    def twin(rows):
        return convolution(*rows, weight, bias, silu=silu)

    return Subject(convolution_floats(channels, taps), [normal(rng, n, channels)], run, twin)


def scan_subject(rng, n, shape, delta, tiled=False, by_channel=False):
    heads, groups, size, dim = shape
    keys, queries = normal(rng, 2, n, groups, size)
    keys /= np.sqrt((keys**2).sum(axis=-1, keepdims=True))
    left, steps = rng.random((2, n, heads), np.float32)
    if by_channel:
        left = rng.random((n, heads, size), np.float32)
    skip = None if delta else normal(rng, heads)

    def run(rows, slots, at, index, lens):
        return scan(*rows, skip, slots, at, index, lens, tiled)

    def twin(rows):
        return plain_scan(*rows, skip, tiled=tiled)

    return Subject(scan_floats(heads, size, dim), [keys, queries, normal(rng, n, heads, dim), left, steps], run, twin)


def whole(subject):
    """All rows in one call, and the slot after them."""
    slots = np.zeros((1, subject.floats), np.float32)
    n = len(subject.arrays[0])
    return subject.run(subject.arrays, slots, 0, np.array([0]), np.array([n])), slots[0]


@pytest.mark.parametrize(("biased", "silu"), [(False, False), (True, True)])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("channels", [1, 7, 16, 33, 300])
def test_convolve(rng, channels, taps, biased, silu):
    for n in (1, 2, 9):
        subject = convolution_subject(rng, n, channels, taps, biased, silu)
        out, slot = whole(subject)
        want, state = subject.twin(subject.arrays)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)
        np.testing.assert_array_equal(slot[: state.size].reshape(state.shape), state.astype(np.float32))
        assert not slot[state.size :].any()


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rule", ["mamba", "delta", "kimi"])
@pytest.mark.parametrize("shape", SCANS)
def test_scan(rng, shape, rule, tiled):
    heads, _, size, dim = shape
    for n in (1, 2, 9):
        subject = scan_subject(rng, n, shape, rule != "mamba", tiled, rule == "kimi")
        out, slot = whole(subject)
        want, state = subject.twin(subject.arrays)
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-6 * max(1, np.abs(want).max()))
        blocks = slot.reshape(heads, -1, size, 16).transpose(0, 2, 1, 3).reshape(heads, size, -1)
        np.testing.assert_allclose(blocks[:, :, :dim], state, rtol=0, atol=2e-6 * max(1, np.abs(state).max()))
        assert not blocks[:, :, dim:].any()


def subjects(rng, n):
    yield convolution_subject(rng, n, 70, 4, True, True)
    yield convolution_subject(rng, n, 33, 1, False, False)
    yield scan_subject(rng, n, (6, 3, 24, 40), True, tiled=True)
    yield scan_subject(rng, n, (4, 2, 16, 17), True)
    yield scan_subject(rng, n, (2, 2, 131, 40), True, by_channel=True)
    yield scan_subject(rng, n, (4, 2, 16, 64), False)


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_of_pieces_and_company(rng, threads):
    """Texts in any pieces, any of them in a call, in any slots: results and states of each alone, bit for bit."""
    before = get_num_threads()
    try:
        set_num_threads(threads)
        for texts in zip(*(subjects(rng, n) for n in (5, 23, 12)), strict=True):
            run, floats, at = texts[0].run, texts[0].floats, 16
            expected = []
            for text in texts:  # all have the weights of the first one
                slots = np.zeros((1, floats), np.float32)
                lens = np.array([len(text.arrays[0])])
                expected.append((run(text.arrays, slots, 0, np.array([0]), lens), slots[0]))
            slots = np.full((7, floats + 32), 9, np.float32)
            index = rng.permutation(7)[:3]
            slots[index, at : at + floats] = 0
            found, done = [[] for _ in texts], [0] * 3
            while any(d < len(text.arrays[0]) for d, text in zip(done, texts, strict=True)):
                most = [min(7, len(text.arrays[0]) - d) for d, text in zip(done, texts, strict=True)]
                lens = [int(rng.integers(0, most + 1)) for most in most]
                rows = [
                    np.concatenate([text.arrays[part][d : d + n] for d, n, text in zip(done, lens, texts, strict=True)])
                    for part in range(len(texts[0].arrays))
                ]
                out = run(rows, slots, at, index, np.array(lens))
                for i, part in enumerate(np.split(out, np.cumsum(lens)[:-1])):
                    found[i].append(part)
                    done[i] += lens[i]
            for i, (out, state) in enumerate(expected):
                np.testing.assert_array_equal(np.concatenate(found[i]), out)
                np.testing.assert_array_equal(slots[index[i], at : at + floats], state)
            slots[index, at : at + floats] = 9
            assert (slots == 9).all()
    finally:
        set_num_threads(before)


def test_many_threads_share_a_large_scan(rng):
    before = get_num_threads()
    try:
        for subject in (scan_subject(rng, 40, (4, 2, 64, 64), True), convolution_subject(rng, 200, 300, 4, True, True)):
            set_num_threads(1)
            want, state = whole(subject)
            set_num_threads(5)
            out, slot = whole(subject)
            np.testing.assert_array_equal(out, want)
            np.testing.assert_array_equal(slot, state)
    finally:
        set_num_threads(before)


def test_rows_of_other_strides(rng):
    """Slices of wider rows are read where they lie; other strides are copied."""
    keys, queries, values, left, steps = scan_subject(rng, 6, (4, 2, 8, 16), True).arrays
    wide = np.concatenate([keys.reshape(6, -1), queries.reshape(6, -1), values.reshape(6, -1)], axis=1)
    want = whole(Subject(scan_floats(4, 8, 16), [keys, queries, values, left, steps], scan_of, None))
    parts = np.split(wide, [16, 32], axis=1)
    apart = [part.reshape(6, heads, -1) for part, heads in zip(parts, (2, 2, 4), strict=True)] + [left, steps]
    unlike = [np.asfortranarray(each) for each in (keys, queries, values, left, steps)]
    for arrays in (apart, unlike, [apart[0], queries, values, left, steps]):
        found = whole(Subject(scan_floats(4, 8, 16), arrays, scan_of, None))
        np.testing.assert_array_equal(found[0], want[0])
        np.testing.assert_array_equal(found[1], want[1])


def test_a_decay_for_each_row_of_a_state(rng):
    """The bits of BITS.md, in NumPy; equal decays give what one for all gives but for roundings."""
    heads, size, dim, n = 3, 130, 20, 7
    keys, queries, values, left, steps = scan_subject(rng, n, (heads, heads, size, dim), True, by_channel=True).arrays
    out, _ = whole(Subject(scan_floats(heads, size, dim), [keys, queries, values, left, steps], scan_of, None))
    for h in range(heads):
        state, want = np.zeros((size, dim), np.float32), np.empty((n, dim), np.float32)
        for t in range(n):
            seen, want[t] = np.zeros(dim, np.float32), 0
            for i in range(size):
                seen = fma(state[i], keys[t, h, i] * left[t, h, i], seen)
            added = (values[t, h] - seen) * steps[t, h]
            for i in range(size):
                state[i] = fma(added, keys[t, h, i], state[i] * left[t, h, i])
                want[t] = fma(state[i], queries[t, h, i], want[t])
        np.testing.assert_array_equal(out[:, h], want)
    same = np.repeat(left[:, :, :1], size, axis=2)
    by_head, by_row = (
        whole(Subject(scan_floats(heads, size, dim), [keys, queries, values, each, steps], scan_of, None))[0]
        for each in (same[:, :, 0], same)
    )
    np.testing.assert_allclose(by_row, by_head, rtol=0, atol=1e-5)


def scan_of(rows, slots, at, index, lens):
    return scan(*rows, None, slots, at, index, lens, False)


@pytest.mark.parametrize("heads", [1, 7, 16, 33])
def test_decays(rng, heads):
    x, bias, rate = normal(rng, 40, heads) * 12, normal(rng, heads), -rng.random(heads, np.float32) * 3
    steps, left = decays(x, bias, rate, 0.0, float("inf"))
    exact = softplus(x + bias)
    np.testing.assert_allclose(steps, exact, rtol=6e-6, atol=1e-37)
    np.testing.assert_allclose(left, np.exp(steps.astype(np.float64) * rate), rtol=2e-5, atol=1e-37)
    held, _ = decays(x, bias, rate, 0.25, 2.0)
    np.testing.assert_array_equal(held, np.clip(steps, np.float32(0.25), np.float32(2)))
    for i in (0, 39):
        alone = decays(x[i : i + 1], bias, rate, 0.0, float("inf"))
        np.testing.assert_array_equal(alone[0][0], steps[i])
        np.testing.assert_array_equal(alone[1][0], left[i])


def test_decays_far_out():
    """Steps near zero keep their digits: a long memory is made of them. Large ones are themselves."""
    x = np.array([[-1000, -80, -40, -16.7, -9, 0, 19.9, 20.1, 80, 3e38]], np.float32)
    steps, left = decays(x, np.zeros(10, np.float32), np.full(10, -1, np.float32), 0.0, float("inf"))
    np.testing.assert_allclose(steps, softplus(x), rtol=1.2e-5, atol=1e-37)
    assert (left <= 1).all()
    assert (left[0, -2:] < 1e-30).all()
    assert left[0, 0] == 1


def test_bounded_decays(rng):
    for channels, bound in ((1, -5.0), (7, -0.5), (16, -80.0), (33, -5.0)):
        wide = normal(rng, 40, channels + 3) * 12
        x, bias, rate = wide[:, 2 : 2 + channels], normal(rng, channels), rng.random(channels, np.float32) * 3
        left = bounded_decays(x, bias, rate, bound)
        want = np.exp(bound * sigmoid(rate * (x + bias).astype(np.float64)))
        np.testing.assert_allclose(left, want, rtol=2e-5, atol=1e-37)
        assert (left <= 1).all()
        for i in (0, 39):
            np.testing.assert_array_equal(bounded_decays(x[i : i + 1].copy(), bias, rate, bound)[0], left[i])
    far = np.array([[-3e38, -1e4, 1e4, 3e38]], np.float32)
    np.testing.assert_allclose(
        bounded_decays(far, np.zeros(4, np.float32), np.ones(4, np.float32), -5.0), [[1, 1, np.exp(-5), np.exp(-5)]],
        rtol=1e-6,
    )
    with pytest.raises(ValueError, match=r"rate: expected \(4,\), got \(3,\)"):
        bounded_decays(far, far[0], far[0, :3], -5.0)
    with pytest.raises(ValueError, match=r"x: expected \(n, heads\), got \(1, 1, 4\)"):
        bounded_decays(far[None], far[0], far[0], -5.0)


@pytest.mark.parametrize("dim", [1, 7, 16, 100])
@pytest.mark.parametrize(("run", "curve"), [
    (lambda x, gates: gate(x, gates, False), sigmoid),
    (lambda x, gates: gate(x, gates, True), lambda gates: sigmoid(gates) * gates), (softplus_gate, softplus),
])
def test_gate(rng, dim, run, curve):
    wide = normal(rng, 5, 2 * dim) * 4
    x, gates = wide[:, :dim], wide[:, dim:]
    out = run(x, gates)
    np.testing.assert_allclose(out, x * curve(gates), rtol=6e-6, atol=1e-30)
    np.testing.assert_array_equal(run(x[2:3].copy(), gates[2:3].copy()), out[2:3])
    assert run(x[:0], gates[:0]).shape == (0, dim)
    with pytest.raises(ValueError, match="gates: expected"):
        run(x, gates[:1])


def test_mistakes(rng):
    x, weight, slots = normal(rng, 4, 6), normal(rng, 3, 6), np.zeros((2, 16), np.float32)
    one, four = np.array([0]), np.array([4])

    def call(x=x, weight=weight, bias=None, slots=slots, at=0, index=one, lens=four):
        return convolve(x, weight, bias, slots, at, index, lens, False)

    assert call().shape == (4, 6)
    frozen = slots.copy()
    frozen.flags.writeable = False
    for message, wrong in {
        r"weight: expected \(taps, channels\) of x \(4, 6\)": {"weight": weight[:, :5]},
        r"bias: expected \(6,\), got \(5,\)": {"bias": x[0, :5]},
        "slots: expected 16 floats from 1 on in each, got 16": {"at": 1},
        "slots: expected 16 floats from -1 on": {"at": -1},
        "slots: expected a float32 array": {"slots": slots.astype(np.float64)},
        "slots: expected a writable C-contiguous array": {"slots": frozen},
        "index: expected different slots": {"index": np.array([1, 1]), "lens": np.array([2, 2])},
        "lens: expected 4 rows in all": {"lens": np.array([3])},
        r"lens: expected 4 rows in all, got \[5, -1\]": {"lens": np.array([5, -1]), "index": np.array([0, 1])},
        "lens: expected one for each of 1 texts, got 2": {"lens": np.array([2, 2])},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**wrong)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="index: expected slots from 0 to 1"):
            call(index=np.array([index]))
    assert call(x=x[:0], lens=np.array([0])).shape == (0, 6)
    assert call(x=x[:0], lens=np.array([], np.int64), index=np.array([], np.int64)).shape == (0, 6)


def test_mistakes_of_scans(rng):
    keys, queries, values, left, steps = scan_subject(rng, 3, (4, 2, 8, 16), True).arrays
    slots = np.zeros((1, scan_floats(4, 8, 16)), np.float32)

    def call(keys=keys, queries=queries, values=values, left=left, steps=steps, skip=None, slots=slots):
        return scan(keys, queries, values, left, steps, skip, slots, 0, np.array([0]), np.array([3]), False)

    for message, wrong in {
        r"values: expected \(n, heads, dim\), got \(3, 64\)": {"values": values.reshape(3, -1)},
        r"keys: expected \(3, a divisor of 4 heads, size\)": {"keys": np.concatenate([keys, keys[:, :1]], axis=1)},
        r"queries: expected \(3, 2, 8\)": {"queries": queries[:, :1]},
        r"decays: expected \(3, 4\)": {"left": left[:, :3]},
        r"steps: expected \(3, 4\)": {"steps": steps[:2]},
        r"decays: expected \(3, 4, 8\), got \(3, 4, 7\)": {"left": np.zeros((3, 4, 7), np.float32)},
        r"decays: expected \(3, 4\), got \(3, 4, 8\)": {
            "left": np.zeros((3, 4, 8), np.float32), "skip": np.zeros(4, np.float32),
        },
        r"skip: expected \(4,\)": {"skip": left[0, :3]},
        "slots: expected 512 floats from 0 on in each, got 511": {"slots": np.zeros((1, 511), np.float32)},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**wrong)
    x = normal(rng, 2, 3)
    with pytest.raises(ValueError, match=r"rate: expected \(3,\), got \(2,\)"):
        decays(x, x[0], x[0, :2], 0.0, 1.0)
    with pytest.raises(ValueError, match=r"gates: expected \(n, dim\) as of x, got \(2, 2\) for \(2, 3\)"):
        gate(x, x[:, :2], True)

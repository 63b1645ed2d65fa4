"""Norms, rotary embeddings and gated activations, compared with float64; rows do not share bits."""

import numpy as np
import pytest

from kvcache import get_num_threads, set_num_threads
from kvcache.kernels.layers import (
    clamped_swiglu,
    geglu,
    gelu,
    layer_norm,
    mix,
    near_experts,
    rms_norm,
    rotate,
    softcap,
    swiglu,
    thin,
    top_experts,
    xielu,
)

SIZES = [1, 3, 8, 15, 16, 17, 64, 100, 576, 2048]


@pytest.mark.parametrize("dim", SIZES)
def test_rms_norm(rng, dim):
    for shape in ((1, dim), (7, dim), (4, 3, dim)):
        x = rng.standard_normal(shape).astype(np.float32) * 3
        weight = rng.standard_normal(shape[1:]).astype(np.float32)
        out = rms_norm(x, weight, 1e-5)
        wide = x.astype(np.float64)
        want = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
        np.testing.assert_allclose(out, want, rtol=(dim + 8) * 2.0**-24, atol=1e-30)
        rows = [rms_norm(x[i : i + 1], weight, 1e-5) for i in range(len(x))]
        np.testing.assert_array_equal(np.concatenate(rows), out)


def test_rms_norm_of_some_heads(rng):
    """A slice of heads is read where it lies; other strides are copied."""
    x = rng.standard_normal((5, 6, 24)).astype(np.float32)
    weight = rng.standard_normal((4, 24)).astype(np.float32)
    want = rms_norm(x[:, :4].copy(), weight, 1e-6)
    np.testing.assert_array_equal(rms_norm(x[:, :4], weight, 1e-6), want)
    other = np.ascontiguousarray(x[:, :4].transpose(1, 0, 2)).transpose(1, 0, 2)
    np.testing.assert_array_equal(rms_norm(other, weight, 1e-6), want)
    assert rms_norm(x[:0, :4], weight, 1e-6).shape == (0, 4, 24)


@pytest.mark.parametrize("dim", SIZES)
def test_layer_norm(rng, dim):
    """The error beside the largest number of a row; rows far from zero lose what their mean rounds."""
    weight, bias = rng.standard_normal((2, dim), dtype=np.float32)
    for shift in (0, 100):
        x = rng.standard_normal((7, dim), dtype=np.float32) * 3 + shift
        wide = x.astype(np.float64)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        out = layer_norm(x, weight, bias, 1e-5)
        error = (dim + 8) * 2.0**-24 * np.abs(wide).max(axis=-1, keepdims=True) * (scale + scale**3)
        largest = np.abs(weight) + np.abs(centred * scale * weight) + np.abs(bias)
        assert (np.abs(out - (centred * scale * weight + bias)) <= error * largest + 2e-7 * largest).all()
        rows = [layer_norm(x[i : i + 1], weight, bias, 1e-5) for i in range(len(x))]
        np.testing.assert_array_equal(np.concatenate(rows), out)
    sliced = np.concatenate([x, x], axis=1)[:, :dim]  # rows apart
    np.testing.assert_array_equal(layer_norm(sliced, weight, bias, 1e-5), out)
    assert layer_norm(x[:0], weight, bias, 1e-5).shape == (0, dim)


def test_arrays_that_are_not_plain(rng):
    """Other strides, other byte orders and odd addresses give the bits of a plain array."""
    x, weight = rng.standard_normal((5, 24), dtype=np.float32), rng.standard_normal(24, dtype=np.float32)
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    odd[...] = x
    swapped = x.astype(x.dtype.newbyteorder())
    for other in (np.asfortranarray(x), odd, swapped, np.repeat(x, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(rms_norm(other, weight, 1e-6), rms_norm(x, weight, 1e-6))
        np.testing.assert_array_equal(swiglu(other), swiglu(x))
        np.testing.assert_array_equal(softcap(other, 3.0), softcap(x, 3.0))
        heads = other[:, None, :]
        np.testing.assert_array_equal(
            rotate(heads, other[:, :12], other[:, 12:]), rotate(x[:, None], x[:, :12], x[:, 12:])
        )


@pytest.mark.parametrize("dim", [2, 16, 24, 64, 128])
def test_rotate(rng, dim):
    """Each pair of channels is a complex number, turned by its angle; a slice of heads is read where it lies."""
    angles = rng.standard_normal((5, dim // 2)) * 10
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    whole = rng.standard_normal((5, 7, dim)).astype(np.float32)
    for x in (whole, whole[:, :3], whole[:, ::2], whole[:0]):
        turned = rotate(x, cos[: len(x)], sin[: len(x)])
        pairs = x[..., : dim // 2].astype(np.float64) + 1j * x[..., dim // 2 :]
        want = pairs * np.exp(1j * angles[: len(x)])[:, None]
        np.testing.assert_allclose(turned, np.concatenate([want.real, want.imag], axis=-1), rtol=0, atol=2e-6)
    rows = [rotate(whole[i : i + 1], cos[i : i + 1], sin[i : i + 1]) for i in range(5)]
    np.testing.assert_array_equal(np.concatenate(rows), rotate(whole, cos, sin))


@pytest.mark.parametrize(("dim", "turned"), [(24, 18), (16, 2), (8, 8), (7, 6), (8, 0)])
def test_rotate_some_channels(rng, dim, turned):
    """The first channels as a head of that size; the others stay, bit for bit."""
    angles = rng.standard_normal((5, turned // 2)) * 10
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    whole = rng.standard_normal((5, 7, dim)).astype(np.float32)
    for x in (whole, whole[:, :3], whole[:, ::2]):
        out = rotate(x, cos, sin)
        np.testing.assert_array_equal(out[..., turned:], x[..., turned:])
        np.testing.assert_array_equal(out[..., :turned], rotate(np.ascontiguousarray(x[..., :turned]), cos, sin))


@pytest.mark.parametrize("dim", SIZES)
def test_swiglu(rng, dim):
    x = rng.standard_normal((5, 2 * dim)).astype(np.float32) * 4
    gate, up = x[:, :dim].astype(np.float64), x[:, dim:].astype(np.float64)
    want = gate / (1 + np.exp(-gate)) * up
    out = swiglu(x)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-30)
    np.testing.assert_array_equal(np.concatenate([swiglu(x[i : i + 1]) for i in range(5)]), out)


def test_swiglu_far_out():
    """Large gates pass or vanish without a NaN."""
    gates = np.array([-3e38, -1000, -104, -88, -80, 0, 80, 88, 1000, 3e38], np.float32)
    out = swiglu(np.concatenate([gates, np.ones_like(gates)])[None])[0]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[5:], gates[5:], rtol=1e-6)
    assert (np.abs(out[:5]) < 1e-30).all()


def gelu_tanh(gate):
    gate = gate.astype(np.float64)
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("dim", SIZES)
def test_geglu(rng, dim):
    x = rng.standard_normal((5, 2 * dim)).astype(np.float32) * 3
    out = geglu(x)
    np.testing.assert_allclose(out, gelu_tanh(x[:, :dim]) * x[:, dim:], rtol=3e-6, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate([geglu(x[i : i + 1]) for i in range(5)]), out)


def test_geglu_far_out():
    gates = np.array([-3e38, -1e13, -1000, -8, -5, -1, 0, 1, 80, 1e13, 3e38], np.float32)
    out = geglu(np.concatenate([gates, np.ones_like(gates)])[None])[0]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[3:6], gelu_tanh(gates[3:6]), rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(out[6:], gelu_tanh(gates[6:]), rtol=1e-6)
    assert (out[:3] == 0).all()


@pytest.mark.parametrize("dim", SIZES)
def test_gelu(rng, dim):
    """The bits of `geglu` beside ones."""
    x = rng.standard_normal((5, dim), dtype=np.float32) * 3
    x[0, 0] = -3e38
    out = gelu(x)
    np.testing.assert_array_equal(out, geglu(np.concatenate([x, np.ones_like(x)], axis=1)))
    np.testing.assert_array_equal(np.concatenate([gelu(x[i : i + 1]) for i in range(5)]), out)
    assert np.isnan(gelu(np.full((1, dim), np.nan, np.float32))).all()


@pytest.mark.parametrize("dim", SIZES)
def test_xielu(rng, dim):
    """From tiny numbers to large ones; at zero the lower part holds."""
    def twin(x, positive, negative, beta, eps):
        below = (np.expm1(np.minimum(x, eps)) - x) * negative + beta * x
        return np.where(x > 0, positive * x * x + beta * x, below)

    x = (rng.standard_normal((5, dim)) * 10.0 ** rng.integers(-9, 3, (5, dim))).astype(np.float32)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 0, -1, -120, 3e18
    for parts in ((0.8, 1.3, 0.5, -1e-6), (0.25, 0.75, 0.5, -0.5), (2.0, 0.5, 0.125, -1.5)):
        out = xielu(x, *parts)
        want = twin(x.astype(np.float64), *np.array(parts, np.float32).astype(np.float64))
        allowed = 2e-6 * (np.abs(want) + np.abs(x) * 0.01) + 1e-7 * np.abs(x) + 4e-7 * -parts[3] + 1e-30
        assert (np.abs(out - want) <= allowed).all()
        np.testing.assert_array_equal(np.concatenate([xielu(x[i : i + 1], *parts) for i in range(5)]), out)
    assert np.isnan(xielu(np.full((1, dim), np.nan, np.float32), 1, 1, 0.5, -1e-6)).all()


@pytest.mark.parametrize("dim", SIZES)
def test_thin(rng, dim):
    """Gates above the mean and some deviations of their row stay, less that; the other half of a row is not touched."""
    before = (rng.standard_normal((5, 2 * dim)) * 3 + 5).astype(np.float32)
    wide = before[:, :dim].astype(np.float64)
    for factor in (1.6448536, 0.0, -1.25):
        x = before.copy()
        thin(x, factor)
        bound = wide.mean(axis=1, keepdims=True) + wide.std(axis=1, keepdims=True) * factor
        np.testing.assert_allclose(x[:, :dim], np.maximum(wide - bound, 0), rtol=0, atol=1e-5)
        assert x[:, dim:].tobytes() == before[:, dim:].tobytes()
        for i in range(5):
            alone = before[i : i + 1].copy()
            thin(alone, factor)
            assert alone.tobytes() == x[i : i + 1].tobytes()
    x[:, 0] = np.nan
    thin(x, 1.0)
    assert np.isnan(x[:, :dim]).all()
    empty = before[:0]
    thin(empty, 1.0)


@pytest.mark.parametrize("dim", SIZES)
def test_mix(rng, dim):
    """A row of `base` alone has the same bits, in place too; `x` may be the base of a new array."""
    for outs, ins in ((4, 4), (3, 1), (1, 5), (2, 0)):
        base, shares, x = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((5, outs, dim), (5, outs, ins), (5, ins, dim))
        )
        found = mix(base, shares, x)
        want = base + shares.astype(np.float64) @ x
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
        for i in range(5):
            alone = base[i : i + 1].copy()
            assert mix(alone, shares[i : i + 1], x[i : i + 1], in_place=True) is alone
            assert alone.tobytes() == found[i : i + 1].tobytes()
    shares = rng.standard_normal((5, 3, 3)).astype(np.float32)
    x = rng.standard_normal((5, 3, dim)).astype(np.float32)
    np.testing.assert_array_equal(mix(x, shares, x), mix(x.copy(), shares, x))
    assert mix(x[:0], shares[:0], x[:0]).shape == (0, 3, dim)


@pytest.mark.parametrize("dim", SIZES)
def test_clamped_swiglu(rng, dim):
    x = rng.standard_normal((5, 2 * dim)).astype(np.float32) * 4
    x[0, :2] = -3e38, 3e38
    gate, up = np.minimum(x[:, :dim].astype(np.float64), 2.5), np.clip(x[:, dim:].astype(np.float64), -2.5, 2.5)
    with np.errstate(over="ignore"):
        want = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    out = clamped_swiglu(x, 1.702, 2.5)
    np.testing.assert_allclose(out, want, rtol=3e-6, atol=2e-7)
    rows = [clamped_swiglu(x[i : i + 1], 1.702, 2.5) for i in range(5)]
    np.testing.assert_array_equal(np.concatenate(rows), out)


@pytest.mark.parametrize("gate", [swiglu, geglu, lambda x: clamped_swiglu(x, 1.702, 7.0)])
def test_gates_keep_nan(gate):
    x = np.ones((2, 34), np.float32)
    x[0, 3], x[1, 17 + 5] = np.nan, np.nan
    assert np.argwhere(np.isnan(gate(x))).tolist() == [[0, 3], [1, 5]]


@pytest.mark.parametrize("dim", SIZES)
def test_softcap(rng, dim):
    x = rng.standard_normal((5, dim)).astype(np.float32) * 30
    x[0, 0] = 3e38
    out = softcap(x, 30.0)
    np.testing.assert_allclose(out, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([softcap(x[i : i + 1], 30.0) for i in range(5)]), out)
    assert softcap(x[:0], 30.0).shape == (0, dim)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(1, 1), (4, 2), (5, 5), (128, 8)])
def test_top_experts(rng, experts, count, normalise):
    logits = rng.integers(-3, 4, (50, experts)).astype(np.float32)  # many are equal
    chosen, weights = top_experts(logits, count, normalise)
    powers = np.exp(logits.astype(np.float64))
    for row, ids, found, power in zip(logits, chosen, weights, powers, strict=True):
        assert ids.tolist() == sorted(range(experts), key=lambda i: (-row[i], i))[:count]
        np.testing.assert_allclose(found, power[ids] / (power[ids] if normalise else power).sum(), rtol=1e-6)


@pytest.mark.parametrize(("experts", "count"), [(1, 1), (4, 2), (16, 2), (5, 5)])
def test_near_experts(rng, experts, count):
    """Each expert by its share among those that are left and near it; equal logits are near at any jitter."""
    logits = rng.integers(-6, 7, (200, experts)).astype(np.float32) / 2
    for jitter in (0.0, 0.1, 0.3, 2.0):
        chosen, weights = near_experts(logits, count, jitter)
        for row, ids, found in zip(logits.astype(np.float64), chosen, weights, strict=True):
            left = list(range(experts))
            for i, weight in zip(ids.tolist(), found, strict=True):
                assert i == max(left, key=lambda k: (row[k], -k))
                with np.errstate(invalid="ignore"):
                    far = (row[i] - row[left]) / np.maximum(np.abs(row[left]), row[i]) > 2 * jitter + 1e-12
                np.testing.assert_allclose(weight, 1 / np.exp(row[left] - row[i])[~far].sum(), rtol=1e-6)
                left.remove(i)
    with pytest.raises(ValueError, match=f"count: expected 1 to {experts} experts, got 0"):
        near_experts(logits, 0, 0.1)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_the_rows(rng, threads):
    """Rows in enough items for several threads, the last item smaller: the bits of one thread."""
    x = rng.standard_normal((301, 12, 64)).astype(np.float32)
    weight = rng.standard_normal((9, 64)).astype(np.float32)
    cos, sin = rng.standard_normal((2, 301, 24)).astype(np.float32)
    calls = [
        lambda: rms_norm(x[:, :9], weight, 1e-5),
        lambda: rotate(x[:, 3:], cos, sin),
        lambda: swiglu(x.reshape(301, -1)),
        lambda: geglu(x.reshape(301, -1)),
        lambda: clamped_swiglu(x.reshape(301, -1), 1.7, 7.0),
        lambda: gelu(x.reshape(301, -1)),
        lambda: xielu(x.reshape(301, -1), 0.8, 1.3, 0.5, -1e-6),
        lambda: mix(x, x[:, :, :9], x[:, :9]),
        lambda: thinned(x.reshape(301, -1)),
        lambda: layer_norm(x[:, :9].reshape(301, -1), weight.ravel(), weight.ravel()[::-1], 1e-5),
    ]
    before = get_num_threads()
    try:
        set_num_threads(1)
        want = [call() for call in calls]
        set_num_threads(threads)
        for call, expected in zip(calls, want, strict=True):
            np.testing.assert_array_equal(call(), expected)
    finally:
        set_num_threads(before)


def thinned(x):
    x = x.copy()
    thin(x, 0.5)
    return x


def test_mistakes_of_mixes():
    base, shares, x = (np.ones(shape, np.float32) for shape in ((2, 3, 6), (2, 3, 4), (2, 4, 6)))
    for wrong in (x[:1], x[:, :, :5], x[0]):
        with pytest.raises(ValueError, match=r"x: expected \(n, ins, dim\) for base \(n, outs, dim\), got"):
            mix(base, shares, wrong)
    for wrong in (shares[:1], shares[:, :2], shares[:, :, :3], shares[0]):
        with pytest.raises(ValueError, match=r"shares: expected \(2, 3, 4\), got"):
            mix(base, wrong, x)
    for wrong in (base[:, :, ::2], read_only(base)):
        with pytest.raises(ValueError, match="base: expected a writable contiguous array, got another one"):
            mix(wrong, shares, np.ascontiguousarray(x[:, :, : wrong.shape[2]]), in_place=True)
    with pytest.raises(ValueError, match="x: expected another array than the base that is written, got the same"):
        mix(base, np.ones((2, 3, 3), np.float32), base, in_place=True)
    assert (base == 1).all()
    for wrong in (base, base[0, :, :5], base[0, :, ::2], read_only(base[0])):
        with pytest.raises(ValueError, match=r"x: expected a writable contiguous array \(n, 2 \* dim\), got"):
            thin(wrong, 1.0)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def test_mistakes():
    x = np.ones((2, 6), np.float32)
    with pytest.raises(ValueError, match=r"weight: expected \(6,\), got \(5,\)"):
        rms_norm(x, np.ones(5, np.float32), 1e-5)
    for weight, bias, wrong in ((5, 6, "weight"), (6, 7, "bias")):
        with pytest.raises(ValueError, match=rf"{wrong}: expected \(6,\), got"):
            layer_norm(x, np.ones(weight, np.float32), np.ones(bias, np.float32), 1e-5)
    with pytest.raises(ValueError, match=r"x: expected \(n, dim\), got \(2, 1, 6\)"):
        layer_norm(x[:, None], x[0], x[0], 1e-5)
    for step in (gelu, lambda x: xielu(x, 1, 1, 1, -1)):
        with pytest.raises(ValueError, match=r"x: expected \(n, dim\), got \(6,\)"):
            step(x[0])
    for eps in (0.0, np.nan):
        with pytest.raises(ValueError, match="eps: expected a number below 0, got"):
            xielu(x, 1, 1, 1, eps)
    with pytest.raises(ValueError, match="x: expected an even number of columns, got 5"):
        swiglu(np.ones((2, 5), np.float32))
    for weight in (np.ones((1, 6), np.float32), np.ones((6, 1), np.float32)):
        with pytest.raises(ValueError, match=r"weight: expected \(6,\), got"):
            rms_norm(x, weight, 1e-5)
    with pytest.raises(ValueError, match=r"x: expected a float32 array, got float64 \(2, 6\)"):
        rms_norm(x.astype(np.float64), x[0], 1e-5)
    with pytest.raises(ValueError, match=r"x: expected \(n, 2 \* dim\), got \(6,\)"):
        swiglu(x[0])
    with pytest.raises(ValueError, match=r"x: expected \(n, heads, dim\), got \(2, 6\)"):
        rotate(x, x, x)
    heads, angles = np.ones((2, 3, 8), np.float32), np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"sin: expected \(2, 4\), got \(2, 3\)"):
        rotate(heads, angles, np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="cos: expected at most 3 pairs of 7 channels, got 4"):
        rotate(heads[:, :, :7], angles, angles)
    for gate in (geglu, lambda x: clamped_swiglu(x, 1.0, 1.0)):
        with pytest.raises(ValueError, match="x: expected an even number of columns, got 5"):
            gate(np.ones((2, 5), np.float32))
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count: expected 1 to 3 experts, got {count}"):
            top_experts(np.ones((2, 3), np.float32), count, True)


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-20, 0.5])
@pytest.mark.parametrize(("experts", "count", "groups", "kept", "best"), [
    (1, 1, 1, 1, 2), (6, 3, 1, 1, 2), (12, 4, 4, 2, 2), (12, 4, 4, 2, 1), (12, 3, 3, 1, 1), (5, 2, 5, 3, 2),
])
def test_choice_of_experts(rng, experts, count, groups, kept, best, eps, sigmoid):
    logits, bias = rng.standard_normal((40, experts), np.float32) * 2, rng.standard_normal(experts, np.float32)
    chosen, weights = top_experts(
        logits, count, eps is not None, sigmoid=sigmoid, bias=bias, eps=eps or 0, factor=2.5, groups=groups, kept=kept,
        best=best,
    )
    for row, ids, found in zip(logits.astype(np.float64), chosen, weights, strict=True):
        shares = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row) / np.exp(row).sum()
        choice = (shares + bias).reshape(groups, -1)
        rank = np.sort(choice, axis=1)[:, -best:].sum(axis=1)
        choice[np.argsort(-rank, kind="stable")[kept:]] = -np.inf
        assert ids.tolist() == np.argsort(-choice.ravel(), kind="stable")[:count].tolist()
        total = 1 if eps is None else shares[ids].sum() + (eps if sigmoid else 0)
        np.testing.assert_allclose(found, shares[ids] * 2.5 / total, rtol=1e-6)


def test_the_least_sum_of_chosen_shares(rng):
    logits = rng.standard_normal((200, 7), np.float32) * 2
    chosen, weights = top_experts(logits, 2, True, least=0.7)
    powers = np.exp(logits.astype(np.float64))
    shares = np.take_along_axis(powers / powers.sum(axis=1, keepdims=True), chosen, 1)
    sums = shares.sum(axis=1, keepdims=True)
    assert 20 < (sums < 0.7).sum() < 180
    np.testing.assert_allclose(weights, shares / np.maximum(sums, 0.7), rtol=1e-6)
    for options in ({"sigmoid": True}, {}):
        plain = top_experts(logits, 2, False, **options)[1]
        np.testing.assert_array_equal(top_experts(logits, 2, False, least=0.7, **options)[1], plain)


def test_mistakes_of_the_choice_of_experts():
    logits, bias = np.ones((2, 6), np.float32), np.ones(6, np.float32)
    with pytest.raises(ValueError, match=r"bias: expected \(6,\), got \(5,\)"):
        top_experts(logits, 2, False, bias=bias[:5])
    with pytest.raises(ValueError, match="count: expected 1 to 2 experts, got 3"):
        top_experts(logits, 3, False, bias=bias, groups=3)
    with pytest.raises(ValueError, match="best: expected 1 or 2, got 3"):
        top_experts(logits, 3, False, best=3)
    for groups, kept in ((4, 1), (2, 3), (2, 0), (0, 0)):
        with pytest.raises(ValueError, match=f"groups: expected a divisor of 6 experts, at least {kept}, got {groups}"):
            top_experts(logits, 1, False, bias=bias, groups=groups, kept=kept)

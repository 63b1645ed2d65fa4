"""Functions of doubles against decimal numbers of 60 digits, their edges, and sums and weights in whole numbers."""

from __future__ import annotations

import hashlib
import math
import random
from decimal import Decimal, localcontext

import numpy as np
import pytest

from kvcache.kernels import functions

pytestmark = pytest.mark.one_build
INF, NAN, TINY = math.inf, math.nan, 5e-324
DRAWS = 1500  # for each range


def exp(x):
    return Decimal(x).exp()


def turned(x, quarters):
    """The sine of x, plus `quarters` of a turn."""
    with localcontext() as context:
        context.prec = 420  # the largest doubles have 309 digits before the point
        whole = (Decimal(x) / HALF_PI).to_integral_value()
        rest = Decimal(x) - whole * HALF_PI
    rest, quarters = +rest, int(whole) + quarters
    term, n, total = (Decimal(1), 0, Decimal(0)) if quarters % 2 else (rest, 1, Decimal(0))
    while term and abs(term) > abs(total) * Decimal("1e-45"):
        total += term
        term *= -rest * rest / ((n + 1) * (n + 2))
        n += 2
    return -total if quarters // 2 % 2 else total


def half_pi():
    """By Machin's formula."""

    def arctangent_of_inverse(n):
        term = total = Decimal(1) / n
        k = 1
        while abs(term) > Decimal(10) ** -415:
            term, k = -term / (n * n), k + 2
            total += term / k
        return total

    with localcontext() as context:
        context.prec = 430
        return 2 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))


HALF_PI = half_pi()
# A function, its value in decimals, and the ranges that its arguments are drawn from.
FUNCTIONS = [
    (functions.exp, exp, [(-745, 709), (-1, 1), (-1e-9, 1e-9)]),
    (functions.exp2, lambda x: (Decimal(x) * Decimal(2).ln()).exp(), [(-1074, 1023.9), (-1, 1), (-0.01, 0.01)]),
    (functions.log, lambda x: Decimal(x).ln(), [(0.5, 2), (0.98, 1.02), (1e-300, 1e-290), (1, 1e300), (TINY, 1e-308)]),
    (functions.log1p, lambda x: (1 + Decimal(x)).ln(), [(-0.999, 2), (-1e-3, 1e-3), (-1e-12, 1e-12), (0, 1e20)]),
    (functions.tanh, lambda x: 1 - 2 / (exp(2 * Decimal(x)) + 1), [(-19, 19), (-1, 1), (-0.1, 0.1)]),
    (functions.sin, lambda x: turned(x, 0), [(-8, 8), (-(2**30), 2**30), (2**30, 2**53), (1e100, 1e308), (0, 1e-7)]),
    (functions.cos, lambda x: turned(x, 1), [(-8, 8), (-(2**30), 2**30), (2**30, 2**53), (1e100, 1e308), (0, 1e-7)]),
]
# Doubles next to a multiple of pi / 2, one of them the nearest of all.
NEAR = [float(k * HALF_PI) for k in (*range(1, 200), 2**29 - 1, 3**18, 2**31 + 1, 5**19)]
NEAR += [6381956970095103.0 * 2.0**797]


def error(found, wanted):
    """The error in units of the last place of the double nearest to the right value."""
    return float(abs(Decimal(found) - wanted) / Decimal(math.ulp(float(wanted))))


def test_errors_are_below_one_unit_in_the_last_place():
    draw = random.Random(7)
    with localcontext() as context:
        context.prec = 60
        for function, wanted, ranges in FUNCTIONS:
            values = [draw.uniform(*each) for each in ranges for _ in range(DRAWS)]
            values += NEAR if function in (functions.sin, functions.cos) else []
            found = function(np.array(values))
            worst = max(zip(values, found.tolist(), strict=True), key=lambda pair: error(pair[1], wanted(pair[0])))
            assert error(worst[1], wanted(worst[0])) < 0.85, (function.__name__, worst)
            assert [function(x) for x in values[::50]] == found[::50].tolist()


def test_powers():
    draw = random.Random(8)
    pairs = [(draw.uniform(2, 1e7), -draw.random()) for _ in range(DRAWS)]
    pairs += [(draw.uniform(0.9, 1.1), draw.uniform(-6500, 6500)) for _ in range(DRAWS)]
    pairs += [(2.0 ** draw.uniform(-100, 100), draw.uniform(-7, 7)) for _ in range(DRAWS)]
    with localcontext() as context:
        context.prec = 60
        for x, y in pairs:
            assert error(functions.power(x, y), (Decimal(y) * Decimal(x).ln()).exp()) < 0.6, (x, y)
    edges = {
        (2, 10): 1024, (2, 1024): INF, (2, -1074): TINY, (2, -1080): 0, (0, 2): 0, (0, -2): INF, (INF, 2): INF,
        (INF, -1): 0, (2, INF): INF, (2, -INF): 0, (0.5, INF): 0,
        (0.5, -INF): INF, (1, INF): 1, (NAN, 0): 1, (TINY, 1): TINY,
        (2, 1e-300): 1, (1 + 2**-52, 1e300): INF,
    }
    assert {pair: functions.power(*map(float, pair)) for pair in edges} == edges
    assert math.isnan(functions.power(-1.0, 2.0))
    assert math.isnan(functions.power(NAN, 1.0))


EDGES = {
    "exp": {0.0: 1, TINY: 1, INF: INF, -INF: 0, 709.79: INF, -745.2: 0, -745.13: TINY, 1e308: INF},
    "exp2": {0.0: 1, 1.0: 2, -1074.0: TINY, -1075.0: 0, 1024.0: INF, -INF: 0, INF: INF},
    "log": {0.0: -INF, 1.0: 0, INF: INF, -1.0: NAN, -INF: NAN},
    "log1p": {0.0: 0.0, TINY: TINY, -1.0: -INF, INF: INF, -2.0: NAN},
    "sin": {0.0: 0.0, TINY: TINY, -TINY: -TINY, INF: NAN, -INF: NAN},
    "cos": {0.0: 1, TINY: 1, INF: NAN, -INF: NAN},
    "tanh": {0.0: 0.0, TINY: TINY, INF: 1, -INF: -1, 1e308: 1},
}


def test_edges():
    for name, edges in EDGES.items():
        function = getattr(functions, name)
        assert math.isnan(function(NAN)), name
        for x in (-0.0, *edges):
            wanted, found = edges[x], function(x)
            assert found == wanted or (math.isnan(found) and math.isnan(wanted)), (name, x, found)
            if wanted == 0:
                sign = math.copysign(1, x) if name in ("sin", "tanh", "log1p") else 1
                assert math.copysign(1, found) == sign, (name, x)


BITS = {
    "exp": "e5b5220337c7acad",
    "exp2": "2b07d588f83dc44f",
    "log": "56b864b642103c1a",
    "log1p": "f0757ccc3b6a6b30",
    "sin": "80f94618fab13628",
    "cos": "b41745ef7b84e034",
    "tanh": "8b1d47f4e9ac2073",
}


def test_bits():
    """The same on every machine: digests of the results, where NaN is NaN."""
    draw = random.Random(9)
    # Without a power of Python's: it is the system's, and musl rounds it in another way than glibc.
    drawn = [draw.choice((1, -1)) * math.ldexp(draw.uniform(1, 2), draw.randint(-30, 29)) for _ in range(2000)]
    x = np.array([*drawn, 709.0, -740.0, 1e300])
    digests = {}
    for name in EDGES:
        found = getattr(functions, name)(x)
        found[np.isnan(found)] = np.nan
        digests[name] = hashlib.sha256(found.astype("<f8").tobytes()).hexdigest()[:16]
    assert digests == BITS


def test_sums_have_sixteen_parts_in_a_tree():
    rng = np.random.default_rng(5)
    for size in (0, 1, 15, 16, 17, 100, 1000):
        x = rng.standard_normal((2, size)) * 10.0 ** rng.integers(-9, 9, (2, size))
        wanted = []
        for row in x:
            parts = [0.0] * 16
            for i, each in enumerate(row.tolist()):
                parts[i % 16] += each
            while len(parts) > 1:
                half = len(parts) // 2
                parts = [parts[i] + parts[i + half] for i in range(half)]
            wanted += parts
        assert functions.sums_of(x).tolist() == wanted == [functions.sum_of(row) for row in x]
        total = [0.0] * size
        for row in x.tolist():
            total = [a + b for a, b in zip(total, row, strict=True)]
        assert functions.column_sums(x).tolist() == total
    a, b = rng.standard_normal((3, 70)), rng.standard_normal((70, 600))
    wanted = np.zeros((3, 600))
    for k in range(70):
        wanted += a[:, k, None] * b[k]
    assert (functions.product(a, b) == wanted).all()
    with pytest.raises(ValueError, match=r"b: expected \(k, m\)"):
        functions.product(a, a)


def test_weights_in_whole_numbers():
    """Near the exact ones, their sum exact, and those of equal logits equal wherever they stand."""
    rng = np.random.default_rng(6)
    for size in (1, 7, 16, 33, 5000):
        logits = (rng.standard_normal(size) * 4).astype(np.float32)
        logits[rng.random(size) < 0.1] = -np.inf
        logits[0] = 30
        for temperature in (1e-6, 0.7, 1.0, 1e300):
            weights, total = functions.shares(logits, temperature)
            assert total == sum(weights.tolist())
            assert weights[0] == functions.UNIT
            exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature) * functions.UNIT
            assert (np.abs(weights - exact) <= 1 + 1e-5 * exact).all()
            assert (weights[np.isneginf(logits)] == 0).all()
            assert (functions.shares(logits[::-1].copy(), temperature)[0] == weights[::-1]).all()
        (found,) = functions.log_sums(logits[None])
        finite = logits[np.isfinite(logits)].astype(np.float64)
        assert found == pytest.approx(math.log(math.fsum(np.exp(finite - 30))) + 30, rel=1e-6)
        below = np.minimum(logits - np.float32(30), np.float32(0))
        assert (functions.whole_exps(below) == functions.shares(logits)[0]).all()
    odd = np.array([[NAN, 1, 2], [INF, 0, 0], [-INF, -INF, -INF]], np.float32)
    assert [str(each) for each in functions.log_sums(odd)] == ["nan", "inf", "-inf"]
    for bad in ([1.0], np.zeros(3), np.zeros((0,), np.float32), np.zeros((2, 2), np.float32)):
        with pytest.raises(ValueError, match=r"logits: expected a float32 array of 1 axes"):
            functions.shares(bad)


def test_log_add_exp():
    pairs = [(0.0, 0.0), (3.5, -2.0), (-700.0, 700.0), (-INF, -INF), (INF, INF), (-INF, 2.0), (INF, -INF), (INF, 1.0)]
    for a, b in pairs:
        wanted = float(np.logaddexp(a, b))
        for found in (functions.log_add_exp(a, b), functions.log_add_exp(np.array([b]), np.array([a]))[0]):
            assert float(found) == pytest.approx(wanted, rel=1e-15)
    assert math.isnan(functions.log_add_exp(NAN, 1.0))
    assert math.isnan(functions.log_add_exp(1.0, NAN))


def test_tables_of_turns():
    frequencies = functions.power(10000.0, -np.arange(0, 64, 2) / 64)
    positions = np.array([0, 1, 2, 4096, 10**7, 2**40, 2**62])
    cosines, sines = functions.turns(positions, frequencies, 1.25)
    angles = positions.astype(np.float64)[:, None] * frequencies
    assert cosines.dtype == sines.dtype == np.float32
    assert cosines.shape == (7, 32)
    assert (cosines == (functions.cos(angles) * 1.25).astype(np.float32)).all()
    assert (sines == (functions.sin(angles) * 1.25).astype(np.float32)).all()

"""Functions of numbers with the same bits on every CPU: exponentials, logarithms, rotary tables, the weights of tokens.

NumPy and libm choose their code by the CPU and by their version. What is computed here is C without libm
(ckernels/kvc_functions.h), or whole numbers, whose sums are exact in any order.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint64_t

from kvcache.kernels cimport kernels
from kvcache.support.arguments cimport is_plain

from kvcache.support.arguments import described

__all__ = [
    "UNIT",
    "column_sums",
    "cos",
    "exp",
    "exp2",
    "log",
    "log1p",
    "log_add_exp",
    "log_sums",
    "merge_parts",
    "power",
    "product",
    "shares",
    "sin",
    "sum_of",
    "sums_of",
    "tanh",
    "turns",
    "whole_exps",
]

cnp.import_array()

UNIT = 1 << 40    # the weight of a token with the largest logit
cdef object MOST = 2**24    # tokens: the sum of their weights has 64 bits
cdef double LOG2E = 1.4426950408889634
cdef double LEAST_FACTOR = 2.0 ** -126    # normal floats: times it, minus infinity stays what it is


def exp(x):
    """e^x, float64, of a number or an array."""
    return _each(kernels.EXP, x)


def exp2(x):
    """2^x, float64, of a number or an array."""
    return _each(kernels.EXP2, x)


def log(x):
    """The natural logarithm, float64, of a number or an array: -inf of 0, NaN below."""
    return _each(kernels.LOG, x)


def log1p(x):
    """The natural logarithm of 1 + x, float64, of a number or an array."""
    return _each(kernels.LOG1P, x)


def sin(x):
    """The sine, float64, of a number or an array."""
    return _each(kernels.SIN, x)


def cos(x):
    """The cosine, float64, of a number or an array."""
    return _each(kernels.COS, x)


def tanh(x):
    """The hyperbolic tangent, float64, of a number or an array."""
    return _each(kernels.TANH, x)


def power(double x, y):
    """x^y, float64, of a number x that is not negative and a number or an array y."""
    cdef cnp.ndarray given = _doubles(y), out = np.empty(np.shape(given))
    cdef const double *source = <const double *>cnp.PyArray_DATA(given)
    cdef double *target = <double *>cnp.PyArray_DATA(out)
    cdef int64_t i
    for i in range(cnp.PyArray_SIZE(given)):
        target[i] = kernels.power(x, source[i])
    return out if given.ndim else float(target[0])


def log_add_exp(a, b):
    """`log(e^a + e^b)`, float64, of numbers or arrays of one shape: the larger one plus `log1p(e^-|a - b|)`.

    -inf of two of them; inf where one is inf; NaN where one is NaN.
    """
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where(left == right, 0.0, np.abs(left - right))    # infinities of one sign are not apart
        return np.where(left > right, left, right) + log1p(exp(-apart))


def turns(cnp.int64_t[::1] positions, double[::1] frequencies, double scale):
    """The cosines and sines, each float32 `(n, pairs)`, of positions times frequencies, times `scale`."""
    cdef int64_t n = positions.shape[0], pairs = frequencies.shape[0]
    cdef cnp.ndarray cosines = np.empty((n, pairs), np.float32), sines = np.empty((n, pairs), np.float32)
    if n and pairs:
        with nogil:
            kernels.turns(
                n, pairs, <int64_t *>&positions[0], &frequencies[0], scale, <float *>cnp.PyArray_DATA(cosines),
                <float *>cnp.PyArray_DATA(sines),
            )
    return cosines, sines


def shares(logits, double temperature=1.0):
    """The weights of tokens as whole numbers: `2^40 e^((logit - largest) / temperature)`, rounded.

    The exponent is rounded to float32 three times, and its power to 24 bits: the weights of tokens that matter err by
    less than 1e-5. Sums of up to 2^24 of them are exact.

    Args:
        logits: float32 `(n,)`, not empty, with a finite maximum and without NaN.
        temperature: above 0.

    Returns:
        `(weights, total)`, uint64 `(n,)` and their sum.
    """
    cdef cnp.ndarray rows = _logits(logits, 1), out = np.empty(rows.shape[0], np.uint64)
    cdef double factor = max(LEAST_FACTOR, LOG2E / temperature)
    cdef const float *x = <const float *>cnp.PyArray_DATA(rows)
    cdef uint64_t total
    with nogil:
        total = kernels.shares(rows.shape[0], x, _largest(x, rows.shape[0]), <float>factor,
                               <uint64_t *>cnp.PyArray_DATA(out))
    return out, total


def whole_exps(x):
    """The rounded `2^40 e^x`, uint64, of float32 numbers that are hardly above 0: sums of up to 2^23 are exact."""
    cdef cnp.ndarray rows = x if cnp.PyArray_ISCARRAY_RO(x) else np.array(x, order="C")
    cdef cnp.ndarray out = np.empty(np.shape(rows), np.uint64)
    if cnp.PyArray_TYPE(rows) != cnp.NPY_FLOAT32:
        raise ValueError(f"x: expected a float32 array, got {described(x)}")
    with nogil:
        kernels.shares(cnp.PyArray_SIZE(rows), <const float *>cnp.PyArray_DATA(rows), 0, <float>LOG2E,
                       <uint64_t *>cnp.PyArray_DATA(out))
    return out


def log_sums(logits):
    """`log(sum of e^logit)`, float64 `(n,)`, of each row of logits `(n, vocabulary)`, by `shares` at temperature 1.

    The relative error of the sum is below 1e-6. NaN where a logit is NaN; infinite where the largest one is.
    """
    cdef cnp.ndarray rows = _logits(logits, 2), out = np.empty(rows.shape[0])
    cdef const float *x = <const float *>cnp.PyArray_DATA(rows)
    cdef double *sums = <double *>cnp.PyArray_DATA(out)
    cdef int64_t i, n = rows.shape[0], size = rows.shape[1]
    cdef float most
    with nogil:
        for i in range(n):
            most = _largest(x + i * size, size)
            sums[i] = most
            if most - most == 0:
                sums[i] += kernels.function_of(kernels.LOG)(
                    <double>kernels.shares(size, x + i * size, most, <float>LOG2E, NULL) * 2.0 ** -40)
    return out


def merge_parts(starts, chosen, parts, logs, mixed, masses):
    """Merge rows of attention over parts of a context with rows over the rest of it, in place.

    Row r of `mixed` becomes rows `chosen[starts[r]:starts[r + 1]]` of `parts`, merged in this order, and itself, last.

    Args:
        starts: int64 `(n + 1,)`, ascending from 0 to the length of `chosen`.
        chosen: int64; no row twice. The first one of each row of `mixed` is written to.
        parts, logs: float32 `(m, heads, dim)`, and the log-sum-exps `(m, heads)`.
        mixed, masses: float32 `(n, heads, dim)` and `(n, heads)`, written.

    Raises:
        ValueError: another kind, shapes that do not agree, numbers out of range.
    """
    for name, given, kind, axes in (
        ("starts", starts, cnp.NPY_INT64, 1), ("chosen", chosen, cnp.NPY_INT64, 1),
        ("parts", parts, cnp.NPY_FLOAT32, 3), ("logs", logs, cnp.NPY_FLOAT32, 2),
        ("mixed", mixed, cnp.NPY_FLOAT32, 3), ("masses", masses, cnp.NPY_FLOAT32, 2),
    ):
        if not is_plain(given, kind, axes) or (kind == cnp.NPY_FLOAT32 and not cnp.PyArray_ISWRITEABLE(given)):
            what = "int64" if kind == cnp.NPY_INT64 else "writeable float32"
            raise ValueError(f"{name}: expected C-contiguous {what}, axes: {axes}, got {described(given)}")
    cdef cnp.ndarray ends = starts, rows = chosen, a = parts, la = logs, b = mixed, lb = masses
    cdef int64_t i, n, m, last = 0
    n, m = b.shape[0], a.shape[0]
    if (ends.shape[0] != n + 1 or a.shape[1] != b.shape[1] or a.shape[2] != b.shape[2] or la.shape[0] != m
            or la.shape[1] != a.shape[1] or lb.shape[0] != n or lb.shape[1] != a.shape[1]):
        raise ValueError(f"parts: expected shapes that agree, got {np.shape(parts)} and {np.shape(mixed)}")
    cdef const int64_t *stops = <const int64_t *>cnp.PyArray_DATA(ends)
    cdef const int64_t *which = <const int64_t *>cnp.PyArray_DATA(rows)
    for i in range(n + 1):
        if stops[i] < last or (i == 0 and stops[i] != 0) or (i == n and stops[i] != rows.shape[0]):
            raise ValueError(f"starts: expected ascending numbers from 0 to {rows.shape[0]}, got {stops[i]}")
        last = stops[i]
    for i in range(rows.shape[0]):
        if not 0 <= which[i] < m:
            raise ValueError(f"chosen: expected 0 to {m - 1}, got {which[i]}")
    with nogil:
        kernels.merge(n, a.shape[1], a.shape[2], stops, which, <float *>cnp.PyArray_DATA(a),
                      <float *>cnp.PyArray_DATA(la), <float *>cnp.PyArray_DATA(b), <float *>cnp.PyArray_DATA(lb))


def sum_of(x):
    """The sum of a float32 or float64 array in float64, in its order in memory: 16 partial sums, then their halves."""
    cdef cnp.ndarray given = _doubles(x)
    return _sum_of(<const double *>cnp.PyArray_DATA(given), cnp.PyArray_SIZE(given))


def sums_of(x):
    """`sum_of` each row along the last axis: float64 of the shape without it."""
    cdef cnp.ndarray given = _doubles(x), out = np.empty(np.shape(given)[:given.ndim - 1])
    cdef const double *source = <const double *>cnp.PyArray_DATA(given)
    cdef double *target = <double *>cnp.PyArray_DATA(out)
    cdef int64_t i, size = given.shape[given.ndim - 1]
    with nogil:
        for i in range(cnp.PyArray_SIZE(out)):
            target[i] = _sum_of(source + i * size, size)
    return out


def column_sums(x):
    """The sums over the first axis, float64, which add one row after the other."""
    cdef cnp.ndarray given = _doubles(x), out = np.zeros(np.shape(given)[1:])
    cdef const double *source = <const double *>cnp.PyArray_DATA(given)
    cdef double *target = <double *>cnp.PyArray_DATA(out)
    cdef int64_t i, k, size = cnp.PyArray_SIZE(out)
    with nogil:
        for i in range(given.shape[0]):
            for k in range(size):
                target[k] += source[i * size + k]
    return out


def product(a, b):
    """The matrix product of float64 `(n, k)` and `(k, m)`: each result adds its products in order, without fma."""
    cdef cnp.ndarray left = _doubles(a), right = _doubles(b)
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise ValueError(f"b: expected (k, m) for a of (n, k), got {np.shape(left)} and {np.shape(right)}")
    cdef cnp.ndarray out = np.zeros((left.shape[0], right.shape[1]))
    with nogil:
        kernels.product(left.shape[0], left.shape[1], right.shape[1], <const double *>cnp.PyArray_DATA(left),
                        <const double *>cnp.PyArray_DATA(right), <double *>cnp.PyArray_DATA(out))
    return out


cdef double _sum_of(const double *x, int64_t n) noexcept nogil:
    cdef double sums[16]
    cdef int64_t i, k, lanes = 8
    for k in range(16):
        sums[k] = 0
    for i in range(0, n, 16):
        for k in range(min(16, n - i)):
            sums[k] += x[i + k]
    while lanes:
        for k in range(lanes):
            sums[k] += sums[k + lanes]
        lanes //= 2
    return sums[0]


cdef float _largest(const float *x, int64_t n) noexcept nogil:
    """The largest number; NaN if there is one; -inf of none."""
    cdef float most[16]
    cdef float found = -INFINITY
    cdef int64_t i, k
    cdef bint good = True
    for k in range(16):
        most[k] = -INFINITY
    for i in range(0, n - 15, 16):
        for k in range(16):
            most[k] = x[i + k] if x[i + k] > most[k] else most[k]
            good &= x[i + k] == x[i + k]
    for i in range(n - n % 16, n):
        found = x[i] if x[i] > found else found
        good &= x[i] == x[i]
    for k in range(16):
        found = most[k] if most[k] > found else found
    return found if good else <float>(INFINITY - INFINITY)


cdef object _each(kernels.function which, object x):
    cdef kernels.double_function *of = kernels.function_of(which)
    if type(x) is float or type(x) is int:
        return of(x)
    cdef cnp.ndarray given = _doubles(x), out = np.empty(np.shape(given))
    cdef const double *source = <const double *>cnp.PyArray_DATA(given)
    cdef double *target = <double *>cnp.PyArray_DATA(out)
    cdef int64_t i
    with nogil:
        for i in range(cnp.PyArray_SIZE(given)):
            target[i] = of(source[i])
    return out if given.ndim else float(target[0])


cdef cnp.ndarray _doubles(object x):
    return np.require(x, np.float64, "CA")


cdef cnp.ndarray _logits(object x, int axes):
    if not cnp.PyArray_Check(x) or cnp.PyArray_TYPE(x) != cnp.NPY_FLOAT32 or x.ndim != axes or not x.shape[axes - 1]:
        raise ValueError(f"logits: expected a float32 array of {axes} axes, not empty, got {described(x)}")
    if x.shape[axes - 1] >= MOST:
        raise ValueError(f"logits: expected fewer than {MOST} of them, got {x.shape[axes - 1]}")
    return x if cnp.PyArray_ISCARRAY_RO(x) else np.array(x, np.float32, order="C")

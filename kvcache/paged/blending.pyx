"""The merged outputs of attention over two parts of a context; a step of decoding merges once per layer."""

cimport numpy as cnp
from libc.math cimport exp

from kvcache.core.arguments cimport is_plain

import numpy as np

__all__ = ["blend"]

cnp.import_array()


def blend(out_a, out_b, log_odds):
    """`out_a` and `out_b` by their shares of the softmax, 1 / (1 + exp(-log_odds)) and the rest.

    Args:
        out_a, out_b: float32 `(num_queries, num_heads, dim)`.
        log_odds: float32 `(num_queries, num_heads)`, of the log-sum-exps of a less those of b, not NaN.

    Returns:
        float32, shaped like `out_a`. The share is computed in float64 and rounded; every machine has the same bits but
        for the last one of `exp`.
    """
    cdef cnp.ndarray a = _plain(out_a, 3), b = _plain(out_b, 3), odds = _plain(log_odds, 2)
    cdef Py_ssize_t n = a.shape[0], heads = a.shape[1], dim = a.shape[2], row, i
    if b.shape[0] != n or b.shape[1] != heads or b.shape[2] != dim:
        raise ValueError(f"out_b: expected {out_a.shape}, got {out_b.shape}")
    if odds.shape[0] != n or odds.shape[1] != heads:
        raise ValueError(f"log_odds: expected {out_a.shape[:2]}, got {log_odds.shape}")
    cdef cnp.ndarray merged = cnp.PyArray_EMPTY(3, a.shape, cnp.NPY_FLOAT32, 0)
    cdef const float *one = <const float *>cnp.PyArray_DATA(a)
    cdef const float *other = <const float *>cnp.PyArray_DATA(b)
    cdef const float *of = <const float *>cnp.PyArray_DATA(odds)
    cdef float *to = <float *>cnp.PyArray_DATA(merged)
    cdef float share
    with nogil:
        for row in range(n * heads):
            share = <float>(1.0 / (1.0 + exp(-<double>of[row])))
            for i in range(row * dim, (row + 1) * dim):
                to[i] = other[i] + share * (one[i] - other[i])
    return merged


cdef cnp.ndarray _plain(object x, int num_dims):
    return x if is_plain(x, cnp.NPY_FLOAT32, num_dims) else np.ascontiguousarray(x, np.float32)

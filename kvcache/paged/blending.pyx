"""The merged outputs of attention over two parts of a context; a step of decoding merges once per layer."""

cimport numpy as cnp

from kvcache.core cimport kernels
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
        float32, shaped like `out_a`. A row does not depend on the others.

    Raises:
        ValueError: other shapes.
    """
    cdef cnp.ndarray a = _plain(out_a, 3, "out_a"), b = _plain(out_b, 3, "out_b")
    cdef cnp.ndarray odds = _plain(log_odds, 2, "log_odds")
    cdef Py_ssize_t n = a.shape[0], heads = a.shape[1], dim = a.shape[2]
    if b.shape[0] != n or b.shape[1] != heads or b.shape[2] != dim:
        raise ValueError(f"out_b: expected {out_a.shape}, got {out_b.shape}")
    if odds.shape[0] != n or odds.shape[1] != heads:
        raise ValueError(f"log_odds: expected {out_a.shape[:2]}, got {log_odds.shape}")
    cdef cnp.ndarray merged = cnp.PyArray_EMPTY(3, a.shape, cnp.NPY_FLOAT32, 0)
    with nogil:
        kernels.blend(n * heads, dim, <const float *>cnp.PyArray_DATA(a), <const float *>cnp.PyArray_DATA(b),
                      <const float *>cnp.PyArray_DATA(odds), <float *>cnp.PyArray_DATA(merged))
    return merged


cdef cnp.ndarray _plain(object x, int num_dims, str name):
    cdef cnp.ndarray array = x if is_plain(x, cnp.NPY_FLOAT32, num_dims) else np.ascontiguousarray(x, np.float32)
    if array.ndim != num_dims:
        raise ValueError(f"{name}: expected {num_dims} dimensions, got {array.ndim}")
    return array

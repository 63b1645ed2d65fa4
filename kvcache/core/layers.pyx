"""What a network computes between two products: norms, rotary embeddings and gated activations, row by row.

The bits of a row depend on that row alone (ckernels/kvc_network.c), as those of `Matrix.multiply` do.
"""

import numpy as np

from libc.stdint cimport int64_t

from kvcache.core cimport kernels

__all__ = ["rms_norm", "rotate", "swiglu"]


def rms_norm(x, weight, double eps):
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, over the last axis.

    Args:
        x: float32 `(n, dim)` or `(n, heads, dim)`, the last two axes contiguous.
        weight: float32 `(dim,)` or `(heads, dim)`.
        eps: added to the mean of squares.

    Returns:
        A new array of x's shape.
    """
    shape = x.shape
    cdef const float[:, :, :] c_x = _rows(x if x.ndim == 3 else x[:, None])
    cdef const float[:, ::1] c_weight = weight if weight.ndim == 2 else weight[None]
    cdef int64_t n = c_x.shape[0], heads = c_x.shape[1], dim = c_x.shape[2]
    if c_weight.shape[0] != heads or c_weight.shape[1] != dim:
        raise ValueError(f"weight: expected {tuple(shape[1:])}, got {weight.shape}")
    out = np.empty(shape, np.float32)
    cdef float[:, :, ::1] c_out = out.reshape((n, heads, dim))
    if out.size:
        with nogil:
            kernels.rms_norm(n, heads, dim, &c_x[0, 0, 0], c_x.strides[0] // <int64_t>sizeof(float), &c_weight[0, 0],
                             <float>eps, &c_out[0, 0, 0])
    return out


def rotate(x, cos, sin):
    """Rotary position embeddings (Su et al., "RoFormer", arXiv 2104.09864), with channels paired by halves of a head.

    Args:
        x: float32 `(n, heads, dim)` with an even `dim`, the last two axes contiguous.
        cos, sin: float32 `(n, dim / 2)`, of the angles of each row.

    Returns:
        A new array of x's shape.
    """
    cdef const float[:, :, :] c_x = _rows(x)
    cdef const float[:, ::1] c_cos = cos, c_sin = sin
    cdef int64_t n = c_x.shape[0], heads = c_x.shape[1], dim = c_x.shape[2]
    if dim % 2:
        raise ValueError(f"x: expected heads of an even size, got {dim}")
    for name, angles in (("cos", c_cos), ("sin", c_sin)):
        if angles.shape[0] != n or angles.shape[1] != dim // 2:
            raise ValueError(f"{name}: expected {(n, dim // 2)}, got {(angles.shape[0], angles.shape[1])}")
    out = np.empty((n, heads, dim), np.float32)
    cdef float[:, :, ::1] c_out = out
    if out.size:
        with nogil:
            kernels.rotate(n, heads, dim, &c_x[0, 0, 0], c_x.strides[0] // <int64_t>sizeof(float), &c_cos[0, 0],
                           &c_sin[0, 0], &c_out[0, 0, 0])
    return out


def swiglu(x):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202): silu of the left half times the right.

    Args:
        x: float32 `(n, 2 * dim)`, contiguous.

    Returns:
        A new float32 array `(n, dim)`.
    """
    cdef const float[:, ::1] c_x = x
    cdef int64_t n = c_x.shape[0], dim = c_x.shape[1] // 2
    if c_x.shape[1] % 2:
        raise ValueError(f"x: expected an even number of columns, got {c_x.shape[1]}")
    out = np.empty((n, dim), np.float32)
    cdef float[:, ::1] c_out = out
    if n and dim:
        with nogil:
            kernels.swiglu(n, dim, &c_x[0, 0], &c_out[0, 0])
    return out


cdef object _rows(object x):
    """x `(n, heads, dim)`, or a copy, with its last two axes contiguous and whole floats between rows."""
    if x.size:
        strides, itemsize = x.strides, x.itemsize
        if strides[2] != itemsize or strides[1] != itemsize * x.shape[2] or strides[0] % itemsize:
            return np.ascontiguousarray(x)
    return x

"""What a network computes between two products: norms, rotary embeddings, gates, the choice of experts, row by row.

The bits of a row depend on that row alone (ckernels/kvc_network.c), as those of `Matrix.multiply` do.
"""

import numpy as np

from libc.math cimport exp
from libc.stdint cimport int64_t

from kvcache.core cimport kernels
from kvcache.core.recycled cimport new_floats

__all__ = ["clamped_swiglu", "geglu", "rms_norm", "rotate", "softcap", "swiglu", "top_experts"]


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
    out = new_floats(shape)
    cdef float[:, :, ::1] c_out = out.reshape((n, heads, dim))
    if out.size:
        with nogil:
            kernels.rms_norm(n, heads, dim, &c_x[0, 0, 0], c_x.strides[0] // <int64_t>sizeof(float), &c_weight[0, 0],
                             <float>eps, &c_out[0, 0, 0])
    return out


def rotate(x, cos, sin):
    """Rotary position embeddings (Su et al., "RoFormer", arXiv 2104.09864), with channels paired by halves of a head.

    Args:
        x: float32 `(n, heads, dim)`, the last two axes contiguous.
        cos, sin: float32 `(n, turned / 2)`, of the angles of each row; `turned` is at most `dim`. Channels from
            `turned` on stay as they are.

    Returns:
        A new array of x's shape.
    """
    cdef const float[:, :, :] c_x = _rows(x)
    cdef const float[:, ::1] c_cos = cos, c_sin = sin
    cdef int64_t n = c_x.shape[0], heads = c_x.shape[1], dim = c_x.shape[2], half = c_cos.shape[1]
    if half > dim // 2:
        raise ValueError(f"cos: expected at most {dim // 2} pairs of {dim} channels, got {half}")
    for name, angles in (("cos", c_cos), ("sin", c_sin)):
        if angles.shape[0] != n or angles.shape[1] != half:
            raise ValueError(f"{name}: expected {(n, half)}, got {(angles.shape[0], angles.shape[1])}")
    out = new_floats((n, heads, dim))
    cdef float[:, :, ::1] c_out = out
    if out.size and not half:
        out[...] = x
    elif out.size:
        with nogil:
            kernels.rotate(n, heads, dim, 2 * half, &c_x[0, 0, 0], c_x.strides[0] // <int64_t>sizeof(float),
                           &c_cos[0, 0], &c_sin[0, 0], &c_out[0, 0, 0])
    return out


def swiglu(x):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202): silu of the left half times the right.

    Args:
        x: float32 `(n, 2 * dim)`, contiguous.

    Returns:
        A new float32 array `(n, dim)`.
    """
    cdef const float[:, ::1] c_x = x
    cdef float[:, ::1] c_out = _halves(c_x)
    if c_out.size:
        with nogil:
            kernels.swiglu(c_out.shape[0], c_out.shape[1], &c_x[0, 0], &c_out[0, 0])
    return c_out.base


def geglu(x):
    """As `swiglu`, with GELU (Hendrycks and Gimpel, arXiv 1606.08415) in its approximation with tanh."""
    cdef const float[:, ::1] c_x = x
    cdef float[:, ::1] c_out = _halves(c_x)
    if c_out.size:
        with nogil:
            kernels.geglu(c_out.shape[0], c_out.shape[1], &c_x[0, 0], &c_out[0, 0])
    return c_out.base


def clamped_swiglu(x, float alpha, float limit):
    """`gate * sigmoid(alpha * gate) * (up + 1)`, with gate at most `limit` and up from `-limit` to it (gpt-oss).

    Args and result as for `swiglu`.
    """
    cdef const float[:, ::1] c_x = x
    cdef float[:, ::1] c_out = _halves(c_x)
    if c_out.size:
        with nogil:
            kernels.clamped_swiglu(c_out.shape[0], c_out.shape[1], &c_x[0, 0], alpha, limit, &c_out[0, 0])
    return c_out.base


def softcap(x, float cap):
    """`cap * tanh(x / cap)` of a contiguous float32 array, as a new one. `cap` is positive."""
    cdef const float[::1] c_x = x.reshape(-1)
    out = new_floats(x.shape)
    cdef float[::1] c_out = out.reshape(-1)
    if out.size:
        with nogil:
            kernels.softcap(c_x.shape[0], &c_x[0], cap, &c_out[0])
    return out


def top_experts(logits, int64_t count, bint normalise):
    """The experts of each row and their weights: the softmax of the logits (Shazeer et al., arXiv 1701.06538).

    Args:
        logits: float32 `(n, experts)`, contiguous.
        count: experts per row, from 1 to all.
        normalise: whether the weights of a row's experts add up to 1; if not, those of all experts do.

    Returns:
        `(chosen, weights)`, int64 and float32 `(n, count)`, the largest first; of equal logits the lower index.
    """
    cdef const float[:, ::1] c_logits = logits
    cdef int64_t n = c_logits.shape[0], experts = c_logits.shape[1], i, j, k, best
    cdef double total, most
    if not 1 <= count <= experts:
        raise ValueError(f"count: expected 1 to {experts} experts, got {count}")
    chosen, weights = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
    cdef int64_t[:, ::1] c_chosen = chosen
    cdef float[:, ::1] c_weights = weights
    cdef char[::1] taken = np.zeros(experts, np.int8)
    with nogil:
        for i in range(n):
            taken[:] = 0
            for j in range(count):
                best = -1
                for k in range(experts):
                    if not taken[k] and (best < 0 or c_logits[i, k] > c_logits[i, best]):
                        best = k
                taken[best] = 1
                c_chosen[i, j] = best
            most, total = c_logits[i, c_chosen[i, 0]], 0
            for k in range(count if normalise else experts):
                total += exp(c_logits[i, c_chosen[i, k] if normalise else k] - most)
            for j in range(count):
                c_weights[i, j] = <float>(exp(c_logits[i, c_chosen[i, j]] - most) / total)
    return chosen, weights


cdef float[:, ::1] _halves(const float[:, ::1] x):
    """A new array `(n, dim)` for x `(n, 2 * dim)`."""
    if x.shape[1] % 2:
        raise ValueError(f"x: expected an even number of columns, got {x.shape[1]}")
    return new_floats((x.shape[0], x.shape[1] // 2))


cdef object _rows(object x):
    """x `(n, heads, dim)`, or a copy, with its last two axes contiguous and whole floats between rows."""
    if x.size:
        strides, itemsize = x.strides, x.itemsize
        if strides[2] != itemsize or strides[1] != itemsize * x.shape[2] or strides[0] % itemsize:
            return np.ascontiguousarray(x)
    return x

"""The steps of a network between two products: norms, rotary embeddings, gates, the choice of experts, row by row.

The bits of a row depend on that row alone (ckernels/kvc_network.c), as those of `Matrix.multiply` do.
An array of another dtype or shape raises ValueError.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport exp
from libc.stdint cimport int64_t

from kvcache.kernels cimport kernels
from kvcache.support.recycled cimport new_floats

from kvcache.support.arguments import described

__all__ = ["clamped_swiglu", "geglu", "rms_norm", "rotate", "softcap", "swiglu", "top_experts"]

cnp.import_array()


def rms_norm(x, weight, double eps):
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, over the last axis.

    Args:
        x: float32 `(n, dim)` or `(n, heads, dim)`, the last two axes contiguous.
        weight: float32 `(dim,)` or `(heads, dim)`.
        eps: added to the mean of squares.

    Returns:
        A new array of x's shape.
    """
    cdef cnp.ndarray rows = _rows(x), scale = _plain(weight, "weight")
    cdef int last = rows.ndim - 1
    if scale.ndim != last or scale.shape[last - 1] != rows.shape[last] or scale.shape[0] != rows.shape[1]:
        raise ValueError(f"weight: expected {np.shape(rows)[1:]}, got {np.shape(scale)}")
    cdef int64_t n = rows.shape[0], heads = rows.shape[1] if last == 2 else 1, dim = rows.shape[last]
    cdef cnp.ndarray out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.rms_norm(n, heads, dim, _floats(rows), _row_floats(rows), _floats(scale), <float>eps, _floats(out))
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
    cdef cnp.ndarray rows = _rows(x), c = _plain(cos, "cos"), s = _plain(sin, "sin")
    if rows.ndim != 3:
        raise ValueError(f"x: expected (n, heads, dim), got {np.shape(rows)}")
    cdef int64_t n = rows.shape[0], heads = rows.shape[1], dim = rows.shape[2]
    cdef int64_t half = c.shape[1] if c.ndim == 2 else -1
    if half > dim // 2:
        raise ValueError(f"cos: expected at most {dim // 2} pairs of {dim} channels, got {half}")
    if half < 0 or c.shape[0] != n:
        raise ValueError(f"cos: expected ({n}, turned / 2), got {np.shape(c)}")
    if s.ndim != 2 or s.shape[0] != n or s.shape[1] != half:
        raise ValueError(f"sin: expected {(n, half)}, got {np.shape(s)}")
    cdef cnp.ndarray out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out) and not half:
        out[...] = rows
    elif cnp.PyArray_SIZE(out):
        with nogil:
            kernels.rotate(n, heads, dim, 2 * half, _floats(rows), _row_floats(rows), _floats(c), _floats(s),
                           _floats(out))
    return out


def swiglu(x):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202): silu of the left half times the right.

    Args:
        x: float32 `(n, 2 * dim)`, contiguous.

    Returns:
        A new float32 array `(n, dim)`.
    """
    cdef cnp.ndarray both = _plain(x, "x"), out = _halves(both)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.swiglu(out.shape[0], out.shape[1], _floats(both), _floats(out))
    return out


def geglu(x):
    """Gate as `swiglu` does, with GELU (Hendrycks and Gimpel, arXiv 1606.08415) in its approximation with tanh."""
    cdef cnp.ndarray both = _plain(x, "x"), out = _halves(both)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.geglu(out.shape[0], out.shape[1], _floats(both), _floats(out))
    return out


def clamped_swiglu(x, float alpha, float limit):
    """`gate * sigmoid(alpha * gate) * (up + 1)`, with gate at most `limit` and up from `-limit` to it (gpt-oss).

    Args and result as for `swiglu`.
    """
    cdef cnp.ndarray both = _plain(x, "x"), out = _halves(both)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.clamped_swiglu(out.shape[0], out.shape[1], _floats(both), alpha, limit, _floats(out))
    return out


def softcap(x, float cap):
    """`cap * tanh(x / cap)` of a contiguous float32 array, as a new one. `cap` is positive."""
    cdef cnp.ndarray rows = _plain(x, "x"), out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.softcap(cnp.PyArray_SIZE(out), _floats(rows), cap, _floats(out))
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


cdef cnp.ndarray _halves(cnp.ndarray x):
    """A new array `(n, dim)` for x `(n, 2 * dim)`."""
    if x.ndim != 2:
        raise ValueError(f"x: expected (n, 2 * dim), got {np.shape(x)}")
    if x.shape[1] % 2:
        raise ValueError(f"x: expected an even number of columns, got {x.shape[1]}")
    return new_floats((x.shape[0], x.shape[1] // 2))


cdef cnp.ndarray _float32(object x, str name):
    if not cnp.PyArray_Check(x) or cnp.PyArray_TYPE(x) != cnp.NPY_FLOAT32:
        raise ValueError(f"{name}: expected a float32 array, got {described(x)}")
    return x


cdef cnp.ndarray _plain(object x, str name):
    """A float32 array, or a copy of it that is contiguous."""
    cdef cnp.ndarray array = _float32(x, name)
    return array if cnp.PyArray_ISCARRAY_RO(array) else np.array(array, np.float32, order="C")


cdef cnp.ndarray _rows(object x):
    """float32 `(n, dim)` or `(n, heads, dim)`, or a copy, with each row contiguous and whole floats between rows."""
    cdef cnp.ndarray rows = _float32(x, "x")
    cdef cnp.npy_intp size = sizeof(float)
    cdef int axis = rows.ndim - 1
    if axis != 1 and axis != 2:
        raise ValueError(f"x: expected (n, dim) or (n, heads, dim), got {np.shape(rows)}")
    while axis > 0 and cnp.PyArray_STRIDE(rows, axis) == size:
        size *= rows.shape[axis]
        axis -= 1
    if axis or cnp.PyArray_STRIDE(rows, 0) % <cnp.npy_intp>sizeof(float) or not cnp.PyArray_ISBEHAVED_RO(rows):
        return np.array(rows, np.float32, order="C")
    return rows


cdef inline float *_floats(cnp.ndarray x) noexcept nogil:
    return <float *>cnp.PyArray_DATA(x)


cdef inline int64_t _row_floats(cnp.ndarray x) noexcept nogil:
    """Floats from one row to the next."""
    return cnp.PyArray_STRIDE(x, 0) // <cnp.npy_intp>sizeof(float)

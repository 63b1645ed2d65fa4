"""The steps of a network between two products: norms, rotary embeddings, gates, the choice of experts, row by row.

The bits of a row depend on that row alone (ckernels/kvc_network.c), as those of `Matrix.multiply` do.
An array of another dtype or shape raises ValueError.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t

from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport (
    KVC_GATE_SIGMOID,
    KVC_GATE_SILU,
    KVC_GATE_SOFTPLUS,
    KVC_STATE_COLUMNS,
    kvc_convolution,
    kvc_scan,
    kvc_texts,
)
from kvcache.support.recycled cimport new_floats

from kvcache.support.arguments import as_indices, described, short

__all__ = [
    "bounded_decays",
    "clamped_swiglu",
    "convolution_floats",
    "convolve",
    "decays",
    "gate",
    "geglu",
    "gelu",
    "layer_norm",
    "mix",
    "near_experts",
    "rms_norm",
    "rotate",
    "scan",
    "scan_floats",
    "softcap",
    "softplus_gate",
    "swiglu",
    "thin",
    "top_experts",
    "xielu",
]

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


def layer_norm(x, weight, bias, double eps):
    """Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450, over the last axis.

    Args:
        x: float32 `(n, dim)`, rows contiguous.
        weight, bias: float32 `(dim,)`.
        eps: added to the variance.

    Returns:
        A new array of x's shape.
    """
    cdef cnp.ndarray rows = _rows(x), scale = _plain(weight, "weight"), shift = _plain(bias, "bias")
    if rows.ndim != 2:
        raise ValueError(f"x: expected (n, dim), got {np.shape(rows)}")
    if scale.ndim != 1 or scale.shape[0] != rows.shape[1]:
        raise ValueError(f"weight: expected {np.shape(rows)[1:]}, got {np.shape(scale)}")
    if shift.ndim != 1 or shift.shape[0] != rows.shape[1]:
        raise ValueError(f"bias: expected {np.shape(rows)[1:]}, got {np.shape(shift)}")
    cdef cnp.ndarray out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.layer_norm(rows.shape[0], rows.shape[1], _floats(rows), _row_floats(rows), _floats(scale),
                               _floats(shift), <float>eps, _floats(out))
    return out


def thin(x, float factor):
    """Keep of each gate what is above the mean of its row plus `factor` deviations; 0 for those below, in place.

    Args:
        x: float32 `(n, 2 * dim)`, contiguous and writable: gates beside what they multiply.
    """
    cdef cnp.ndarray rows = _float32(x, "x")
    if rows.ndim != 2 or rows.shape[1] % 2 or not cnp.PyArray_ISCARRAY(rows):
        raise ValueError(f"x: expected a writable contiguous array (n, 2 * dim), got {np.shape(rows)}")
    if cnp.PyArray_SIZE(rows):
        with nogil:
            kernels.thin(rows.shape[0], rows.shape[1] // 2, _floats(rows), rows.shape[1], factor)


def mix(base, shares, x, *, bint in_place=False):
    """Add to each row of `base` a weighted sum of the rows of `x`: `base[i] + shares[i] @ x[i]`.

    Args:
        base: float32 `(n, outs, dim)`, contiguous; where `in_place`, writable, and the result.
        shares: float32 `(n, outs, ins)`.
        x: float32 `(n, ins, dim)`; may be `base` unless that is written.

    Returns:
        float32 `(n, outs, dim)`, a new array or `base`.
    """
    cdef cnp.ndarray sums = _plain(base, "base"), by = _plain(shares, "shares"), rows = _plain(x, "x"), out
    if sums.ndim != 3 or rows.ndim != 3 or rows.shape[0] != sums.shape[0] or rows.shape[2] != sums.shape[2]:
        found = f"{np.shape(rows)} for {np.shape(sums)}"
        raise ValueError(f"x: expected (n, ins, dim) for base (n, outs, dim), got {found}")
    if by.ndim != 3 or by.shape[0] != sums.shape[0] or by.shape[1] != sums.shape[1] or by.shape[2] != rows.shape[1]:
        raise ValueError(f"shares: expected {(*np.shape(sums)[:2], rows.shape[1])}, got {np.shape(by)}")
    if in_place and (sums is not base or not cnp.PyArray_ISCARRAY(sums)):
        raise ValueError("base: expected a writable contiguous array, got another one")
    if in_place and np.may_share_memory(sums, rows):
        raise ValueError("x: expected another array than the base that is written, got the same memory")
    out = sums if in_place else new_floats((<object>sums).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.mix(sums.shape[0], sums.shape[1], rows.shape[1], sums.shape[2], _floats(by), _floats(rows),
                        _floats(sums), _floats(out))
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


def gelu(x):
    """GELU of a contiguous float32 array `(n, dim)`, in its approximation with tanh, as a new one."""
    cdef cnp.ndarray rows = _matrix(x), out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.gelu(out.shape[0], out.shape[1], _floats(rows), _floats(out))
    return out


def xielu(x, float positive, float negative, float beta, float eps):
    """xIELU (Huang, arXiv 2411.13010): an activation that grows by squares above 0 and bends below.

    Args:
        x: float32 `(n, dim)`, contiguous.
        positive, negative, beta: `positive * x**2 + beta * x` above 0, else
            `negative * (expm1(min(x, eps)) - x) + beta * x`.
        eps: below 0.

    Returns:
        A new float32 array `(n, dim)`.
    """
    cdef cnp.ndarray rows = _matrix(x), out = new_floats((<object>rows).shape)
    if not eps < 0:
        raise ValueError(f"eps: expected a number below 0, got {eps}")
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.xielu(out.shape[0], out.shape[1], _floats(rows), positive, negative, beta, eps, _floats(out))
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


def gate(x, gates, bint silu):
    """Multiply each value of x by the sigmoid of its gate, or by `silu(gate) = gate * sigmoid(gate)`.

    Args:
        x, gates: float32 `(n, dim)`, rows contiguous.

    Returns:
        A new float32 array `(n, dim)`.
    """
    return _gated(x, gates, KVC_GATE_SILU if silu else KVC_GATE_SIGMOID)


def softplus_gate(x, gates):
    """Multiply each value of x by `ln(1 + e^gate)`, a number above 0. Args and result as for `gate`."""
    return _gated(x, gates, KVC_GATE_SOFTPLUS)


cdef _gated(x, gates, int kind):
    cdef cnp.ndarray rows = _rows(x), by = _rows(gates)
    if rows.ndim != 2 or by.ndim != 2 or rows.shape[0] != by.shape[0] or rows.shape[1] != by.shape[1]:
        raise ValueError(f"gates: expected (n, dim) as of x, got {np.shape(by)} for {np.shape(rows)}")
    cdef cnp.ndarray out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.gate(rows.shape[0], rows.shape[1], _floats(rows), _row_floats(rows), _floats(by), _row_floats(by),
                         kind, _floats(out))
    return out


def softcap(x, float cap):
    """`cap * tanh(x / cap)` of a contiguous float32 array, as a new one. `cap` is positive."""
    cdef cnp.ndarray rows = _plain(x, "x"), out = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(out):
        with nogil:
            kernels.softcap(cnp.PyArray_SIZE(out), _floats(rows), cap, _floats(out))
    return out


def top_experts(logits, int64_t count, bint normalise, *, bint sigmoid=False, bias=None, double eps=0, double factor=1,
                int64_t groups=1, int64_t kept=1, int64_t best=2, double least=0):
    """The experts of each row and their weights, by the softmax of their logits (Shazeer et al., arXiv 1701.06538).

    Args:
        logits: float32 `(n, experts)`, contiguous.
        count: experts per row, from 1 to all that may be chosen.
        normalise: whether scores are divided by the sum of a row's chosen ones.
        sigmoid: whether scores are the sigmoids of the logits (DeepSeek-V3, arXiv 2412.19437).
        bias: float32 `(experts,)`, added to the scores for the choice alone; or None.
        eps: added to the sum of chosen sigmoids.
        factor: multiplies all weights.
        groups, kept: the experts of `kept` of the `groups` may be chosen (DeepSeek-V2, arXiv 2405.04434), those with
            the largest sum of their `best` (1 or 2) largest scores.
        least: chosen shares of a softmax are divided by at least this (ERNIE 4.5).

    Returns:
        `(chosen, weights)`, int64 and float32 `(n, count)`, the largest first; of equal scores the lower index.
    """
    cdef const float[:, ::1] c_logits = logits
    cdef cnp.ndarray added = None if bias is None else _plain(bias, "bias")
    cdef int64_t n = c_logits.shape[0], experts = c_logits.shape[1], i, j, k, size
    cdef double total
    if added is not None and (added.ndim != 1 or added.shape[0] != experts):
        raise ValueError(f"bias: expected ({experts},), got {np.shape(added)}")
    if not 1 <= kept <= groups or experts % groups:
        raise ValueError(f"groups: expected a divisor of {experts} experts, at least {kept}, got {groups}")
    size = experts // groups
    if best not in (1, 2):
        raise ValueError(f"best: expected 1 or 2, got {best}")
    _check_count(count, kept * size)
    chosen, weights = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
    cdef int64_t[:, ::1] c_chosen = chosen
    cdef float[:, ::1] c_weights = weights
    cdef const float *c_bias = NULL if added is None else _floats(added)
    cdef double[::1] shares = np.empty(experts), scores = np.empty(experts), open_scores = np.empty(experts)
    cdef double[::1] sums = np.empty(groups)
    with nogil:
        for i in range(n):
            _score(&c_logits[i, 0], sigmoid, shares)
            total = _sum(shares) if c_bias != NULL and not sigmoid else 1
            for k in range(experts):
                # Softmax keeps the order of the logits; its shares may be equal where these are not.
                scores[k] = c_logits[i, k] if c_bias == NULL and groups == kept else shares[k]
                if c_bias != NULL:
                    scores[k] = shares[k] / total + c_bias[k]
                open_scores[k] = scores[k] if groups == kept else -INFINITY
            for j in range(groups if groups > kept else 0):
                sums[j] = _sum_of_best(&scores[j * size], size, best)
            for _ in range(kept if groups > kept else 0):
                k = _take_best(sums) * size
                open_scores[k:k + size] = scores[k:k + size]
            total = eps if sigmoid and normalise else 0
            for j in range(count):
                k = _take_best(open_scores)
                c_chosen[i, j] = k
                total += shares[k] if normalise else 0
            if least > 0 and normalise and not sigmoid:
                total = max(total, least * _sum(shares))
            if not normalise:
                total = 1
                if not sigmoid:
                    total = _sum(shares)
            for j in range(count):
                c_weights[i, j] = <float>(factor * shares[c_chosen[i, j]] / total)
    return chosen, weights


def near_experts(logits, int64_t count, double jitter):
    """The experts of each row, one after another, weighted by those near them (SparseMixer-v2, arXiv 2409.12136).

    The weight of an expert is its share of a softmax among the experts that are left whose logits are near its own: at
    most `2 * jitter` below it, in units of the larger one of its logit and their size.

    Args:
        logits: float32 `(n, experts)`, contiguous.
        count: experts per row, from 1 to all.
        jitter: see above; at least 0.

    Returns:
        As `top_experts`.
    """
    cdef const float[:, ::1] c_logits = logits
    cdef int64_t n = c_logits.shape[0], experts = c_logits.shape[1], i, j, k, best
    cdef double most, total
    _check_count(count, experts)
    chosen, weights = np.empty((n, count), np.int64), np.empty((n, count), np.float32)
    cdef int64_t[:, ::1] c_chosen = chosen
    cdef float[:, ::1] c_weights = weights
    cdef double[::1] left = np.empty(experts)
    cdef kernels.double_function *exp = kernels.function_of(kernels.EXP)
    with nogil:
        for i in range(n):
            for k in range(experts):
                left[k] = c_logits[i, k]
            for j in range(count):
                best = _take_best(left)
                most, total = c_logits[i, best], 1
                for k in range(experts):
                    if left[k] == left[k] and not most - left[k] > 2 * jitter * max(abs(left[k]), most):
                        total += exp(left[k] - most)
                c_chosen[i, j] = best
                c_weights[i, j] = <float>(1 / total)
    return chosen, weights


def convolution_floats(channels, taps):
    """The floats of a text's state of `convolve`; a multiple of 16."""
    return -(-channels * (taps - 1) // KVC_STATE_COLUMNS) * KVC_STATE_COLUMNS


def scan_floats(heads, size, dim):
    """The floats of a text's state of `scan`; a multiple of 16."""
    return heads * size * -(-dim // KVC_STATE_COLUMNS) * KVC_STATE_COLUMNS


def convolve(x, weight, bias, slots, Py_ssize_t at, index, lens, bint silu):
    """Convolve the channels of texts, each with weights of its own, over each token and the ones before it.

    `out[i, c] = bias[c] + sum over j of weight[j, c] * x[i - (taps - 1) + j, c]`, with the rows of the state before
    those of the text. Bits depend neither on how a text is cut into calls nor on other texts.

    Args:
        x: float32 `(n, channels)`, rows contiguous: the texts' rows, one text after another.
        weight: float32 `(taps, channels)`.
        bias: float32 `(channels,)`, or None.
        slots: float32 `(num_slots, floats)`, C-contiguous: the states, which change in place.
        at: where `convolution_floats` floats of each slot begin; zeros are the state of an empty text.
        index: int64 `(texts,)`, the slot of each text, all different.
        lens: int64 `(texts,)`, the rows of each text; their sum is n.
        silu: whether results pass through `silu`.

    Returns:
        A new float32 array `(n, channels)`.

    Raises:
        ValueError, IndexError: arguments that are not as above.
    """
    cdef kvc_convolution args
    cdef cnp.ndarray rows = _rows(x), taps = _plain(weight, "weight")
    cdef cnp.ndarray added = None if bias is None else _plain(bias, "bias")
    if rows.ndim != 2 or taps.ndim != 2 or taps.shape[1] != rows.shape[1] or not taps.shape[0] or not taps.shape[1]:
        raise ValueError(f"weight: expected (taps, channels) of x {np.shape(rows)}, got {np.shape(taps)}")
    if added is not None and (added.ndim != 1 or added.shape[0] != rows.shape[1]):
        raise ValueError(f"bias: expected ({rows.shape[1]},), got {np.shape(added)}")
    cdef Py_ssize_t floats = convolution_floats(taps.shape[1], taps.shape[0])
    _kept = _set_texts(&args.texts, rows.shape[0], slots, at, floats, index, lens)    # in use until the call ends
    cdef cnp.ndarray out = new_floats((<object>rows).shape)
    args.channels, args.taps, args.x_stride = rows.shape[1], taps.shape[0], _row_floats(rows)
    args.x, args.weight, args.bias = _floats(rows), _floats(taps), NULL if added is None else _floats(added)
    args.silu, args.out = silu, _floats(out)
    if rows.shape[0]:
        with nogil:
            kernels.convolve(&args)
    return out


def decays(x, bias, rate, double least, double most):
    """The steps of a recurrence, `softplus(x + bias)` from `least` to `most`, and what they leave: `exp(step * rate)`.

    Args:
        x: float32 `(n, heads)`, rows contiguous.
        bias: float32 `(heads,)`.
        rate: float32 `(heads,)`, not positive.

    Returns:
        `(steps, decays)`, new float32 arrays `(n, heads)`.
    """
    cdef cnp.ndarray rows = _rows(x), added = _plain(bias, "bias"), factor = _plain(rate, "rate")
    _check_decaying(rows, added, factor)
    cdef cnp.ndarray steps = new_floats((<object>rows).shape), left = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(left):
        with nogil:
            kernels.decays(rows.shape[0], rows.shape[1], _floats(rows), _row_floats(rows), _floats(added),
                           _floats(factor), <float>least, <float>most, _floats(steps), _floats(left))
    return steps, left


def bounded_decays(x, bias, rate, double bound):
    """The decays of a recurrence that bounds their logarithm: `exp(bound * sigmoid(rate * (x + bias)))`.

    Args:
        x: float32 `(n, channels)`, rows contiguous.
        bias, rate: float32 `(channels,)`.
        bound: not positive: the least logarithm of a result.

    Returns:
        A new float32 array `(n, channels)`.
    """
    cdef cnp.ndarray rows = _rows(x), added = _plain(bias, "bias"), factor = _plain(rate, "rate")
    _check_decaying(rows, added, factor)
    cdef cnp.ndarray left = new_floats((<object>rows).shape)
    if cnp.PyArray_SIZE(left):
        with nogil:
            kernels.bounded_decays(rows.shape[0], rows.shape[1], _floats(rows), _row_floats(rows), _floats(added),
                                   _floats(factor), <float>bound, _floats(left))
    return left


cdef int _check_decaying(cnp.ndarray rows, cnp.ndarray bias, cnp.ndarray rate) except -1:
    if rows.ndim != 2:
        raise ValueError(f"x: expected (n, heads), got {np.shape(rows)}")
    for name, vector in (("bias", bias), ("rate", rate)):
        if np.shape(vector) != (rows.shape[1],):
            raise ValueError(f"{name}: expected ({rows.shape[1]},), got {np.shape(vector)}")
    return 0


def scan(keys, queries, values, decays, steps, skip, slots, Py_ssize_t at, index, lens, bint tiled):
    """Run rows of texts through one matrix per head, which decays and grows with each row.

    Each row of a head makes `S = decay * S + outer(key, added)`, then `out = query @ S`. With a `skip`, Mamba2 (Dao and
    Gu, arXiv 2405.21060): `added = step * value`, and `out += skip * value`. Without, the gated delta rule (Yang et
    al., arXiv 2412.06464): `added = step * (value - decay * (key @ S))`; with a decay for each row of S, Kimi delta
    attention (Kimi Team, arXiv 2510.26692). Bits depend neither on how a text is cut into calls nor on other texts.

    Args:
        keys, queries: float32 `(n, groups, size)`, equally strided, the last two axes contiguous.
        values: float32 `(n, heads, dim)`, the last two axes contiguous; `heads` is a multiple of `groups`.
        decays, steps: float32 `(n, heads)`; without a `skip` decays may be `(n, heads, size)`.
        skip: float32 `(heads,)`, or None.
        slots, at, index, lens: as of `convolve`, `scan_floats` of each slot.
        tiled: whether head h has group `h % groups`; if not, `h // (heads // groups)`.

    Returns:
        A new float32 array `(n, heads, dim)`.

    Raises:
        ValueError, IndexError: arguments that are not as above.
    """
    cdef kvc_scan args
    cdef cnp.ndarray k = _rows(keys), q = _rows(queries), v = _rows(values)
    cdef cnp.ndarray left = _plain(decays, "decays"), each = _plain(steps, "steps")
    cdef cnp.ndarray direct = None if skip is None else _plain(skip, "skip")
    if v.ndim != 3 or not v.shape[1] or not v.shape[2]:
        raise ValueError(f"values: expected (n, heads, dim), got {np.shape(v)}")
    cdef int64_t n = v.shape[0], heads = v.shape[1]
    if k.ndim != 3 or k.shape[0] != n or not k.shape[2] or not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"keys: expected ({n}, a divisor of {heads} heads, size), got {np.shape(k)}")
    if np.shape(q) != np.shape(k):
        raise ValueError(f"queries: expected {np.shape(k)}, got {np.shape(q)}")
    if _row_floats(q) != _row_floats(k):
        k, q = np.array(k, np.float32, order="C"), np.array(q, np.float32, order="C")
    by_channel = left.ndim == 3 and direct is None
    for name, array, shape in (("decays", left, (n, heads, k.shape[2])[:2 + by_channel]), ("steps", each, (n, heads))):
        if np.shape(array) != shape:
            raise ValueError(f"{name}: expected {shape}, got {np.shape(array)}")
    if direct is not None and np.shape(direct) != (heads,):
        raise ValueError(f"skip: expected ({heads},), got {np.shape(direct)}")
    cdef Py_ssize_t floats = scan_floats(heads, k.shape[2], v.shape[2])
    _kept = _set_texts(&args.texts, n, slots, at, floats, index, lens)    # in use until the call ends
    cdef cnp.ndarray out = new_floats((<object>v).shape)
    args.heads, args.groups, args.size, args.dim = heads, k.shape[1], k.shape[2], v.shape[2]
    args.keys, args.queries, args.values = _floats(k), _floats(q), _floats(v)
    args.key_stride, args.value_stride = _row_floats(k), _row_floats(v)
    args.decays, args.steps, args.skip = _floats(left), _floats(each), NULL if direct is None else _floats(direct)
    args.tiled, args.by_channel, args.out = tiled, by_channel, _floats(out)
    if n:
        with nogil:
            kernels.scan(&args)
    return out


cdef int _check_count(int64_t count, int64_t experts) except -1:
    if not 1 <= count <= experts:
        raise ValueError(f"count: expected 1 to {experts} experts, got {count}")
    return 0


cdef int64_t _take_best(double[::1] scores) noexcept nogil:
    """The index of the largest score, of equal ones the lowest, which is then NaN: no later call finds it."""
    cdef int64_t best = -1, k
    for k in range(scores.shape[0]):
        if scores[k] == scores[k] and (best < 0 or scores[k] > scores[best]):
            best = k
    if best < 0:    # nothing but NaN is left
        return 0
    scores[best] = NAN
    return best


cdef double _sum_of_best(const double *scores, int64_t size, int64_t best) noexcept nogil:
    """The sum of the `best` (1 or 2) largest scores."""
    cdef double first = -INFINITY, second = -INFINITY
    cdef int64_t k
    for k in range(size):
        if scores[k] > first:
            first, second = scores[k], first
        elif scores[k] > second:
            second = scores[k]
    return first + second if best == 2 and size > 1 else first


cdef void _score(const float *logits, bint sigmoid, double[::1] shares) noexcept nogil:
    """Sigmoids of the logits, or their softmax before it is divided by its sum."""
    cdef kernels.double_function *exp = kernels.function_of(kernels.EXP)
    cdef double most = -INFINITY
    cdef int64_t k
    for k in range(0 if sigmoid else shares.shape[0]):
        most = max(most, <double>logits[k])
    for k in range(shares.shape[0]):
        shares[k] = 1 / (1 + exp(-<double>logits[k])) if sigmoid else exp(logits[k] - most)


cdef double _sum(double[::1] values) noexcept nogil:
    cdef double total = 0
    cdef int64_t k
    for k in range(values.shape[0]):
        total += values[k]
    return total


cdef tuple _set_texts(kvc_texts *texts, int64_t n, object slots, Py_ssize_t at, Py_ssize_t floats, object index,
                      object lens):
    """Check the states of texts and describe them to a kernel; the result keeps the memory that it points to."""
    cdef cnp.ndarray states = _float32(slots, "slots")
    if states.ndim != 2 or not cnp.PyArray_ISCARRAY(states):
        raise ValueError(f"slots: expected a writable C-contiguous array (num_slots, floats), got {np.shape(states)}")
    if at < 0 or states.shape[1] - at < floats:
        raise ValueError(f"slots: expected {floats} floats from {at} on in each, got {states.shape[1]}")
    cdef cnp.ndarray slot = as_indices(index, "index").copy(), count = as_indices(lens, "lens").copy()
    if slot.shape[0] != count.shape[0]:
        raise ValueError(f"lens: expected one for each of {slot.shape[0]} texts, got {count.shape[0]}")
    cdef cnp.ndarray starts = np.zeros(count.shape[0] + 1, np.int64)
    cdef const int64_t *slots_of = <const int64_t *>cnp.PyArray_DATA(slot)
    cdef const int64_t *lens_of = <const int64_t *>cnp.PyArray_DATA(count)
    cdef int64_t *start = <int64_t *>cnp.PyArray_DATA(starts)
    cdef int64_t i
    for i in range(slot.shape[0]):
        if not 0 <= slots_of[i] < states.shape[0]:
            raise IndexError(f"index: expected slots from 0 to {states.shape[0] - 1}, got {slots_of[i]}")
        if not 0 <= lens_of[i] <= n - start[i]:
            raise ValueError(f"lens: expected {n} rows in all, got {short(count.tolist())}")
        start[i + 1] = start[i] + lens_of[i]
    if start[slot.shape[0]] != n:
        raise ValueError(f"lens: expected {n} rows in all, got {short(count.tolist())}")
    if slot.shape[0] > 1 and len(set(slot.tolist())) != slot.shape[0]:
        raise ValueError(f"index: expected different slots, got {short(slot.tolist())}")
    texts.count, texts.slot_floats, texts.states = slot.shape[0], states.shape[1], _floats(states) + at
    texts.starts, texts.index = start, slots_of
    return states, slot, starts


cdef cnp.ndarray _matrix(object x):
    """float32 `(n, dim)`, or a copy of it that is contiguous."""
    cdef cnp.ndarray rows = _plain(x, "x")
    if rows.ndim != 2:
        raise ValueError(f"x: expected (n, dim), got {np.shape(rows)}")
    return rows


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

"""The kernels over NumPy arrays, without pool or store: for tests and benches. Sizes are checked, so none can crash."""

import numpy as np

from libc.stdint cimport int64_t, uint16_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport (
    KVC_ELEMENT_F32, Layout, kvc_attend_args, kvc_float_rows, kvc_format, kvc_head_keys, kvc_run, kvc_seq, kvc_tensor,
)


cdef struct _Runs:
    int *times       # (count,)
    int *threads     # (count,) the last thread of each
    int64_t work     # steps of each item


cdef void _note_run(void *context, int64_t index, int thread) noexcept nogil:
    cdef _Runs *runs = <_Runs *>context
    cdef double x = 1.0
    cdef int64_t _
    for _ in range(runs.work):
        x = x * 0.5 + <double>thread
    runs.times[index] += 1 if x < 1e300 else 0
    runs.threads[index] = thread


def run_items(int64_t count, int num_threads, int64_t work):
    """How often each of `count` items has run, and on which thread: int32 `(count,)` each."""
    cdef int[::1] times = np.zeros(max(1, count), np.int32), threads = np.full(max(1, count), -1, np.int32)
    cdef _Runs runs = _Runs(&times[0], &threads[0], work)
    with nogil:
        kernels.run_items(count, num_threads, _note_run, &runs)
    return np.asarray(times)[:count], np.asarray(threads)[:count]


cdef kvc_run *_runs_of(Layout layout, object arena, object table, int64_t *num_tokens) except NULL:
    """int (n, 3) of (block, first, stop) -> C runs, to be freed."""
    cdef const int[:, ::1] rows = np.ascontiguousarray(table, dtype=np.int32).reshape(-1, 3)
    cdef int64_t num_blocks = len(arena) // layout.c.block_bytes
    cdef Py_ssize_t i
    for i in range(rows.shape[0]):
        if not (0 <= rows[i, 0] < num_blocks and 0 <= rows[i, 1] <= rows[i, 2] <= layout.c.block_size):
            raise IndexError(f"runs: expected slots of {num_blocks} blocks of {layout.c.block_size} slots, "
                             f"got {tuple(rows[i])}")
    cdef kvc_run *runs = <kvc_run *>malloc((rows.shape[0] + 1) * sizeof(kvc_run))
    if runs == NULL:
        raise MemoryError
    num_tokens[0] = 0
    for i in range(rows.shape[0]):
        runs[i].block = rows[i, 0]
        runs[i].first = <uint16_t>rows[i, 1]
        runs[i].stop = <uint16_t>rows[i, 2]
        num_tokens[0] += rows[i, 2] - rows[i, 1]
    return runs


cdef const float *_floats(object array, object shape) except? NULL:
    """The data of a float32 C-contiguous array of this shape; NULL for None."""
    if array is None:
        return NULL
    if array.dtype != np.float32 or not array.flags.c_contiguous or array.shape != shape:
        raise ValueError(f"array: expected C-contiguous float32 {shape}, got {array.dtype} {array.shape}")
    return <const float *><size_t>array.ctypes.data


cdef kvc_tensor _rows(object array, object shape) except *:
    """`_floats` as a tensor."""
    cdef kvc_tensor tensor
    tensor.data, tensor.element = <const unsigned char *>_floats(array, shape), KVC_ELEMENT_F32
    tensor.token_stride, tensor.head_stride = 4 * shape[1] * shape[2], 4 * shape[2]
    return tensor


cdef unsigned char *_bytes(object arena) except NULL:
    if arena.dtype != np.uint8 or not arena.flags.c_contiguous or arena.ndim != 1 or len(arena) == 0:
        raise ValueError(f"arena: expected a one-dimensional uint8 array, got {arena.dtype} {arena.shape}")
    return <unsigned char *><size_t>arena.ctypes.data


cdef kvc_head_keys *_known(Layout layout, object centres, object factors) except? NULL:
    """One per head, to be freed; NULL if both are None."""
    cdef int heads = layout.c.num_heads, dim = layout.c.head_dim, h
    cdef const float *centre = _floats(centres, (heads, dim))
    cdef const float *factor = _floats(factors, (heads, dim, dim))
    if centre == NULL and factor == NULL:
        return NULL
    cdef kvc_head_keys *known = <kvc_head_keys *>malloc(heads * sizeof(kvc_head_keys))
    if known == NULL:
        raise MemoryError
    for h in range(heads):
        known[h].centre = centre
        known[h].factor = factor
        if centre != NULL:
            centre += dim
        if factor != NULL:
            factor += dim * dim
    return known


def write(Layout layout, arena, runs, keys, values, centres=None, factors=None, int threads=1):
    """keys and values, either of which may be None; of each head a centre and a factor of the encoder."""
    cdef kvc_float_rows k, v
    cdef int64_t tokens = 0
    cdef unsigned char *to = _bytes(arena)
    cdef kvc_head_keys *known = NULL
    cdef kvc_run *c_runs = _runs_of(layout, arena, runs, &tokens)
    try:
        known = _known(layout, centres, factors)
        k.data = _floats(keys, (tokens, layout.c.num_heads, layout.c.head_dim))
        v.data = _floats(values, (tokens, layout.c.num_heads, layout.c.value_head_dim))
        k.stride, v.stride = layout.c.num_heads * layout.c.head_dim, layout.c.num_heads * layout.c.value_head_dim
        kernels.write_runs(&layout.c, to, c_runs, len(runs), k, v, known, threads)
    finally:
        free(known)
        free(c_runs)


def read(Layout layout, arena, runs, keys, values, centres=None):
    """Into keys and values, either of which may be None; of each head the centre that its keys were written with."""
    cdef float *k
    cdef float *v
    cdef int64_t tokens = 0
    cdef unsigned char *base = _bytes(arena)
    cdef kvc_head_keys *known = NULL
    cdef kvc_run *c_runs = _runs_of(layout, arena, runs, &tokens)
    try:
        known = _known(layout, centres, None)
        k = <float *>_floats(keys, (tokens, layout.c.num_heads, layout.c.head_dim))
        v = <float *>_floats(values, (tokens, layout.c.num_heads, layout.c.value_head_dim))
        kernels.read_runs(&layout.c, base, c_runs, len(runs), k, NULL,
                          <size_t>(layout.c.num_heads * layout.c.head_dim), <size_t>layout.c.head_dim, known)
        kernels.read_runs(&layout.c, base, c_runs, len(runs), NULL, v,
                          <size_t>(layout.c.num_heads * layout.c.value_head_dim), <size_t>layout.c.value_head_dim,
                          NULL)
    finally:
        free(known)
        free(c_runs)


def check(x, format):
    return kernels.check_representable(_floats(x, x.shape), x.size, <kvc_format>kernels.format_code(format, "format"))


def copy(Layout layout, arena, int src_block, int src_slot, int dst_block, int dst_slot, int count):
    cdef int64_t num_blocks = len(arena) // <Py_ssize_t>layout.c.block_bytes
    for block, slot in ((src_block, src_slot), (dst_block, dst_slot)):
        if not (0 <= block < num_blocks and 0 <= slot <= slot + count <= layout.c.block_size):
            raise IndexError(f"slot: expected slots of {num_blocks} blocks, got {count} from {slot} of {block}")
    cdef unsigned char *base = _bytes(arena)
    kernels.copy_slots(&layout.c, base, src_block, src_slot, base, dst_block, dst_slot, count)


def clear(Layout layout, arena, int block, int slot, int count):
    cdef int64_t num_blocks = len(arena) // <Py_ssize_t>layout.c.block_bytes
    if not (0 <= block < num_blocks and 0 <= slot <= slot + count <= layout.c.block_size):
        raise IndexError(f"slot: expected slots of {num_blocks} blocks, got {count} from {slot} of {block}")
    kernels.clear_slots(&layout.c, _bytes(arena), block, slot, count)


def attend(Layout layout, arena, sequences, queries, scale, *, sink_queries=None, out=None, scores=None, lse=None,
           hidden_tokens=0, starts=None, window=0, chunked=False, softcap=0.0, sinks=None, whole=False, ahead=0,
           tree=None, int threads=1, scratch=None, centres=None, residuals=None, Layout residual_layout=None,
           residual_arena=None, firsts=None):
    """sequences: (runs, num_queries, sink_tokens) each. Fills and returns out (and scores, where given), and lse.

    starts: the text position of each sequence's first token, 0 by default. window, softcap: 0 for none. chunked:
    queries see the positions from the last multiple of window on. ahead: the tokens after its own that a query sees.
    scores: of two dimensions for those of each KV head. sinks: of two for those of each query. tree: int64
    (2, queries), parents and depths, not checked beyond its shape. firsts: int64 (queries,), not checked. scratch: a
    function of a number of bytes that gives a uint8 array, by default np.empty. centres: of keys, as of `write`.
    residuals: the runs of each sequence's residual, over `residual_arena`; its scores follow those of the sequence.
    """
    cdef kvc_attend_args args
    cdef Py_ssize_t count = len(sequences), i
    cdef int64_t total_queries = 0, total_tokens = 0
    cdef kvc_head_keys *known = NULL
    if queries.ndim != 3 or queries.shape[1] == 0 or queries.shape[1] % layout.c.num_heads or threads < 1:
        raise ValueError(f"queries: expected (n, a multiple of {layout.c.num_heads}, {layout.c.head_dim}) and "
                         f"threads >= 1, got {queries.shape} and {threads}")
    if out is None:
        out = np.empty((*queries.shape[:2], layout.c.value_head_dim), np.float32)
    cdef int heads = queries.shape[1]
    cdef unsigned char *base = _bytes(arena)
    cdef kvc_seq *seqs = <kvc_seq *>malloc((2 * count + 1) * sizeof(kvc_seq))    # and the residuals
    cdef kvc_seq *near = seqs + count
    if seqs == NULL:
        raise MemoryError
    memset(seqs, 0, (2 * count + 1) * sizeof(kvc_seq))
    memset(&args, 0, sizeof(kvc_attend_args))
    try:
        for i, (runs, num_queries, sink_tokens) in enumerate(sequences):
            seqs[i].runs = _runs_of(layout, arena, runs, &seqs[i].num_tokens)
            seqs[i].num_runs = len(runs)
            seqs[i].num_queries = num_queries
            seqs[i].sink_tokens = sink_tokens
            seqs[i].hidden_tokens = min(hidden_tokens, seqs[i].num_tokens)
            seqs[i].start = 0 if starts is None else starts[i]
            seqs[i].window, seqs[i].chunked, seqs[i].whole, seqs[i].ahead = window, chunked, whole, ahead
            if tree is not None:
                seqs[i].parents = <const int64_t *><size_t>tree[0, total_queries:].ctypes.data
                seqs[i].depths = <const int64_t *><size_t>tree[1, total_queries:].ctypes.data
            if firsts is not None:
                seqs[i].firsts = <const int64_t *><size_t>firsts[total_queries:].ctypes.data
            total_queries += num_queries
            total_tokens += seqs[i].num_tokens - seqs[i].hidden_tokens
            if residuals is not None:
                near[i].runs = _runs_of(residual_layout, residual_arena, residuals[i], &near[i].num_tokens)
                near[i].num_runs, near[i].num_queries = len(residuals[i]), num_queries
                total_tokens += near[i].num_tokens
        known = _known(layout, centres, None)
        args.known = known
        if residuals is not None:
            args.residuals, args.residual_layout, args.residual_arena = near, &residual_layout.c, _bytes(residual_arena)
        shape = (total_queries, heads, layout.c.head_dim)
        need = <Py_ssize_t>kernels.attend_scratch_bytes(&layout.c, seqs, args.residuals, count, heads, threads)
        space = (scratch or (lambda size: np.empty(size, np.uint8)))(need)
        if len(space) < need:
            raise ValueError(f"scratch: expected {need} bytes, got {len(space)}")
        args.layout, args.arena, args.seqs, args.num_seqs = &layout.c, base, seqs, count
        args.num_query_heads, args.scale, args.softcap = heads, scale, softcap
        args.queries, args.sink_queries = _rows(queries, shape), _rows(sink_queries, shape)
        if scores is not None and scores.ndim == 2:
            args.score_stride = total_tokens
            args.scores = <float *>_floats(scores, (layout.c.num_heads, total_tokens))
        else:
            args.scores = <float *>_floats(scores, (total_tokens,))
        args.out = <float *>_floats(out, (*shape[:2], layout.c.value_head_dim))
        args.lse = <float *>_floats(lse, shape[:2])
        args.sink_stride = heads if sinks is not None and sinks.ndim == 2 else 0
        args.sinks = _floats(sinks, shape[:2] if args.sink_stride else (heads,))
        kernels.attend(&args, _bytes(space), threads)
    finally:
        for i in range(2 * count):
            free(<void *>seqs[i].runs)
        free(seqs)
        free(known)
    return out if scores is None else (out, scores)

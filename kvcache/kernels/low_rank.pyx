"""Products with pairs of matrices of low rank, added to columns of a product: those of all adapters of a pass at once.

    rows 0 to 3   adapter A   out[:, first columns of each pair] += scale * (x @ a.T) @ b.T
    row  4        none
    rows 5 to 6   adapter B

A row has the same bits whatever other rows and adapters it is computed with, and on any number of threads: its two
products are those of `Matrix.multiply`, and each number of `out` meets one pair.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvcache.kernels.kernels cimport (
    KVC_BF16_FLOATS, kvc_bf16_rows, kvc_matmul_args, kvc_matrix, level_in_use, matmul, matmul_scratch_bytes,
    num_threads, run_items,
)
from kvcache.kernels.matrix cimport Matrix
from kvcache.support.arguments cimport is_plain, overlap
from kvcache.support.recycled cimport Piece

from kvcache.kernels.matrix import MATRIX_FORMATS
from kvcache.support.arguments import as_count, as_instance, described

__all__ = ["LowRankPair", "add_low_rank"]

cnp.import_array()

cdef int64_t _ROWS = 48             # that meet a pair together: whole tiles of a product, whose results stay in the cache
cdef int64_t _UNITS = 1 << 15       # products of a weight and a row; fewer are done before another thread begins


cdef struct _Product:
    const kvc_matrix *a
    const kvc_matrix *b
    const float *x
    float *out
    int64_t n
    float scale


cdef struct _Call:
    const void *level
    const _Product *products
    int64_t stride              # floats between rows of out
    unsigned char *scratch
    int64_t each                # bytes of it, of a thread


cdef class LowRankPair:
    """Two matrices of floats: `scale * (x @ a.T) @ b.T` is added to the columns of a product from `column` on.

    Args:
        a: `(rank, in)`.
        b: `(out, rank)`.
        scale: rounded to float32.
        column: the first of `out` columns.

    Raises:
        TypeError: no matrices.
        ValueError: packed ones; other shapes.
    """

    cdef readonly Matrix a, b
    cdef readonly float scale
    cdef readonly int64_t column

    def __init__(self, a, b, scale, column=0):
        self.a, self.b = as_instance(a, Matrix, "a"), as_instance(b, Matrix, "b")
        self.scale, self.column = scale, as_count(column, "column")
        for name, each in (("a", self.a), ("b", self.b)):
            if MATRIX_FORMATS[each.format].packed:
                raise ValueError(f"{name}: expected a matrix of floats, got {each.format}")
        if self.b.c.columns != self.a.c.rows:
            raise ValueError(f"b: expected {self.a.c.rows} columns, the rows of a, got {self.b.c.columns}")

    @property
    def nbytes(self):
        """Bytes of both matrices."""
        return self.a.nbytes + self.b.nbytes


cdef int64_t _whole(int64_t size) noexcept nogil:
    return (size + 63) // 64 * 64


cdef void _set(kvc_matmul_args *args, const kvc_matrix *matrix, int64_t n, const float *x, float *out) noexcept nogil:
    args.matrix, args.n, args.x, args.out = matrix, n, x, out
    args.bias, args.add, args.digits, args.bf16_rows = NULL, 0, 1, KVC_BF16_FLOATS


cdef int64_t _scratch_bytes(const _Product *p) noexcept nogil:
    """The bytes of a product: the rows between the two matrices, those behind them, and what the products take."""
    cdef kvc_matmul_args args
    _set(&args, p.a, p.n, NULL, NULL)
    cdef size_t size = matmul_scratch_bytes(&args, 1)
    _set(&args, p.b, p.n, NULL, NULL)
    size = max(size, matmul_scratch_bytes(&args, 1))
    return _whole(p.n * p.a.rows * sizeof(float)) + _whole(p.n * p.b.rows * sizeof(float)) + _whole(size)


cdef void _add_product(void *context, int64_t index, int thread) noexcept nogil:
    cdef _Call *call = <_Call *>context
    cdef const _Product *p = call.products + index
    cdef int64_t outputs = p.b.rows, row, i
    cdef unsigned char *scratch = call.scratch + thread * call.each
    cdef float *low = <float *>scratch
    cdef float *high = <float *>(scratch + _whole(p.n * p.a.rows * sizeof(float)))
    cdef const float *added
    cdef float *to
    cdef kvc_matmul_args args
    args.prepared = <unsigned char *>high + _whole(p.n * outputs * sizeof(float))
    _set(&args, p.a, p.n, p.x, low)
    matmul(call.level, &args, 1)    # on one thread it is done here, without the pool
    for i in range(p.n * p.a.rows):
        low[i] *= p.scale
    _set(&args, p.b, p.n, low, high)
    matmul(call.level, &args, 1)
    for row in range(p.n):
        added, to = high + row * outputs, p.out + row * call.stride
        for i in range(outputs):
            to[i] += added[i]


def add_low_rank(x, out, spans):
    """Add to some rows of `out` what the pairs of these rows give of `x`, all of them in one call.

    Args:
        x: float32 `(n, columns)`.
        out: float32 `(n, outputs)`, C-contiguous, apart from x.
        spans: `(first row, last row + 1, pairs)`, ascending and apart; the pairs of each ascend by their columns and
            are apart too.

    Raises:
        TypeError: no pairs.
        ValueError: another shape or kind; rows or columns that are not there, or come twice.
    """
    if not is_plain(x, cnp.NPY_FLOAT32, 2):
        raise ValueError(f"x: expected C-contiguous float32 of two axes, got {described(x)}")
    cdef cnp.ndarray rows = x, results
    cdef int64_t n = rows.shape[0], columns = rows.shape[1]
    if not is_plain(out, cnp.NPY_FLOAT32, 2) or not cnp.PyArray_ISWRITEABLE(out) or out.shape[0] != n:
        raise ValueError(f"out: expected C-contiguous, writeable float32 of {n} rows, got {described(out)}")
    results = out
    if overlap(results, rows):
        raise ValueError("out: expected memory apart from x, got the same memory")
    cdef list checked = list(spans)
    cdef int64_t width = results.shape[1], begin = 0, end, at, column, count = 0, units = 0, each = 0
    cdef LowRankPair pair
    for first, stop, pairs in checked:
        at, end = first, stop
        if not begin <= at < end <= n:
            raise ValueError(f"spans: expected ascending ones of {n} rows, got {at} to {end} behind {begin}")
        column = 0
        for given in pairs:
            pair = as_instance(given, LowRankPair, "spans")
            if pair.a.c.columns != columns or not column <= pair.column <= width - pair.b.c.rows:
                raise ValueError(
                    f"spans: expected pairs from {columns} to ascending columns of {width}, got one from "
                    f"{pair.a.c.columns} to {pair.column} to {pair.column + pair.b.c.rows} behind {column}"
                )
            column = pair.column + pair.b.c.rows
            count += (end - at + _ROWS - 1) // _ROWS
            units += (end - at) * (pair.a.c.rows * columns + pair.b.c.rows * pair.b.c.columns)
        begin = end
    if count == 0:
        return
    memory = Piece(count * sizeof(_Product))
    cdef _Product *products = <_Product *>memory.bytes
    cdef _Product *p = products
    cdef const float *from_x = <const float *>cnp.PyArray_DATA(rows)
    cdef float *to = <float *>cnp.PyArray_DATA(results)
    for first, stop, pairs in checked:
        end = stop
        for given in pairs:
            pair, at = given, first
            while at < end:
                p.a, p.b, p.scale, p.n = &pair.a.c, &pair.b.c, pair.scale, min(_ROWS, end - at)
                p.x, p.out = from_x + at * columns, to + at * width + pair.column
                each = max(each, _scratch_bytes(p))
                at += _ROWS
                p += 1
    cdef _Call call
    cdef kvc_bf16_rows unused
    cdef int threads = <int>max(1, min(<int64_t>num_threads(), min(count, units // _UNITS)))
    scratch = Piece(threads * each)
    call.level, call.products, call.stride = level_in_use(False, &unused), products, width
    call.scratch, call.each = scratch.bytes, each
    with nogil:
        run_items(count, threads, _add_product, &call)

"""Products with matrices of low rank, added to a product of the same rows: those of all adapters of a pass in one call.

    rows 0 to 3   adapter A   out[:, columns of each part] += scale of the part * (x @ a.T)[:, its rank] @ b.T
    row  4        none
    rows 5 to 6   adapter B

A row has the same bits whatever other rows and adapters it is computed with, and on any number of threads: its two
products are those of `Matrix.multiply` in float32, and each number of `out` meets one part.
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

__all__ = ["LowRankProduct", "add_low_rank"]

cnp.import_array()

cdef int64_t _ROWS = 48             # that meet a matrix together: whole tiles, whose results stay in the cache
cdef int64_t _UNITS = 1 << 15       # products of a weight and a row; fewer are done before another thread begins
cdef enum:
    _MOST_PARTS = 8


cdef struct _Part:
    const kvc_matrix *b
    int64_t column, rank, first     # of its columns in out; of its rows in `a`
    float scale


cdef struct _Item:
    const kvc_matrix *a
    const _Part *parts
    int64_t num_parts, n
    const float *x
    float *out


cdef struct _Call:
    const void *level
    const _Item *items
    int64_t stride                  # floats between rows of out
    unsigned char *scratch
    int64_t each                    # bytes of it, of a thread


cdef class LowRankProduct:
    """Matrices of low rank that meet the same rows: what each part gives is added to columns of its own.

    Args:
        a: of floats, `(sum of the ranks, in)`, that of each part below the one before.
        parts: `(b, scale, column)` of each: b `(columns of the part, rank)` of floats; the first of its columns. They
            ascend by these and are apart.

    Raises:
        TypeError: no matrices.
        ValueError: packed ones; other shapes; more than 8 parts, or none.
    """

    cdef readonly Matrix a
    cdef readonly tuple parts
    cdef _Part c_parts[_MOST_PARTS]
    cdef int64_t num_parts, width       # columns of out up to the end of the last part

    def __init__(self, a, parts):
        self.a, self.parts = _floats(a, "a"), tuple(parts)
        cdef Matrix b
        cdef int64_t rank = 0, i = 0
        if not 0 < len(self.parts) <= _MOST_PARTS:
            raise ValueError(f"parts: expected 1 to {_MOST_PARTS}, got {len(self.parts)}")
        for given, scale, column in self.parts:
            b = _floats(given, "parts")
            if as_count(column, "parts") < self.width:
                raise ValueError(f"parts: expected ascending columns, got {column} behind {self.width}")
            self.c_parts[i] = _Part(&b.c, column, b.c.columns, rank, scale)
            rank += b.c.columns
            self.width = column + b.c.rows
            i += 1
        self.num_parts = i
        if rank != self.a.c.rows:
            raise ValueError(f"a: expected {rank} rows, the ranks of all parts, got {self.a.c.rows}")

    @property
    def nbytes(self):
        """Bytes of all matrices."""
        return self.a.nbytes + sum(b.nbytes for b, _, _ in self.parts)


cdef Matrix _floats(object given, str name):
    matrix = as_instance(given, Matrix, name)
    if MATRIX_FORMATS[matrix.format].packed:
        raise ValueError(f"{name}: expected matrices of floats, got {matrix.format}")
    return matrix


cdef int64_t _floats_bytes(int64_t count) noexcept nogil:
    return (count * <int64_t>sizeof(float) + 63) // 64 * 64


cdef void _set(kvc_matmul_args *args, const kvc_matrix *matrix, int64_t n, const float *x, float *out) noexcept nogil:
    args.matrix, args.n, args.x, args.out = matrix, n, x, out
    args.bias, args.add, args.digits, args.bf16_rows = NULL, 0, 1, KVC_BF16_FLOATS


cdef int64_t _scratch_bytes(const _Item *item) noexcept nogil:
    """The bytes that an item needs: its rows behind `a`, those of a part, what the part gives, and for the products."""
    cdef kvc_matmul_args args
    cdef int64_t i, most = 0, rows = 0
    _set(&args, item.a, item.n, NULL, NULL)
    cdef size_t own = matmul_scratch_bytes(&args, 1)
    for i in range(item.num_parts):
        most, rows = max(most, item.parts[i].rank), max(rows, item.parts[i].b.rows)
        _set(&args, item.parts[i].b, item.n, NULL, NULL)
        own = max(own, matmul_scratch_bytes(&args, 1))
    rows = _floats_bytes(item.n * item.a.rows) + _floats_bytes(item.n * most) + _floats_bytes(item.n * rows)
    return rows + _floats_bytes(<int64_t>own // 4 + 1)


cdef void _add_item(void *context, int64_t index, int thread) noexcept nogil:
    cdef _Call *call = <_Call *>context
    cdef const _Item *item = call.items + index
    cdef const _Part *part
    cdef int64_t n = item.n, rank = item.a.rows, most = 0, outputs = 0, row, i, j
    cdef float *low = <float *>(call.scratch + thread * call.each)
    cdef float *own
    cdef float *high
    cdef float *to
    cdef kvc_matmul_args args
    for j in range(item.num_parts):
        most, outputs = max(most, item.parts[j].rank), max(outputs, item.parts[j].b.rows)
    own = <float *>(<unsigned char *>low + _floats_bytes(n * rank))
    high = <float *>(<unsigned char *>own + _floats_bytes(n * most))
    args.prepared = <unsigned char *>high + _floats_bytes(n * outputs)
    _set(&args, item.a, n, item.x, low)
    matmul(call.level, &args, 1)    # on one thread it is done here, without the pool
    for j in range(item.num_parts):
        part = item.parts + j
        for row in range(n):
            for i in range(part.rank):
                own[row * part.rank + i] = low[row * rank + part.first + i] * part.scale
        _set(&args, part.b, n, own, high)
        matmul(call.level, &args, 1)
        outputs = part.b.rows
        for row in range(n):
            to = item.out + row * call.stride + part.column
            for i in range(outputs):
                to[i] += high[row * outputs + i]


def add_low_rank(x, out, spans):
    """Add to some rows of `out` what their adapters give of `x`, all of them in one call.

    Args:
        x: float32 `(n, in)`, C-contiguous.
        out: float32 `(n, outputs)`, likewise, apart from x.
        spans: a list of `(first row, last row + 1, LowRankProduct)`, ascending and apart.

    Raises:
        TypeError: no products.
        ValueError: another shape or kind; rows or columns that are not there, or rows that come twice.
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
    cdef list checked = list(spans)    # nobody changes it
    cdef int64_t width = results.shape[1], begin = 0, at, end, count = 0, units = 0, each = 0
    cdef LowRankProduct product
    for first, stop, given in checked:
        if not isinstance(given, LowRankProduct):
            raise TypeError(f"spans: expected a LowRankProduct, got {type(given).__name__}")
        at, end, product = first, stop, given
        if not begin <= at < end <= n:
            raise ValueError(f"spans: expected ascending ones of {n} rows, got {at} to {end} behind {begin}")
        if product.a.c.columns != columns or product.width > width:
            raise ValueError(f"spans: expected products of {columns} columns that give {width} at most, got "
                             f"{product.a.c.columns} and {product.width}")
        count += (end - at + _ROWS - 1) // _ROWS
        units += (end - at) * product.a.c.rows * (columns + product.width)
        begin = end
    if count == 0:
        return
    memory = Piece(count * sizeof(_Item))
    cdef _Item *items = <_Item *>memory.bytes
    cdef _Item *item = items
    for first, stop, given in checked:
        at, end, product = first, stop, given
        while at < end:
            item.a, item.parts, item.num_parts = &product.a.c, product.c_parts, product.num_parts
            item.n, item.x = min(_ROWS, end - at), <const float *>cnp.PyArray_DATA(rows) + at * columns
            item.out = <float *>cnp.PyArray_DATA(results) + at * width
            each = max(each, _scratch_bytes(item))
            at += _ROWS
            item += 1
    cdef _Call call
    cdef kvc_bf16_rows unused
    cdef int threads = <int>max(1, min(<int64_t>num_threads(), min(count, units // _UNITS)))
    scratch = Piece(threads * each)
    call.level, call.items, call.stride = level_in_use(False, &unused), items, width
    call.scratch, call.each = scratch.bytes, each
    with nogil:
        run_items(count, threads, _add_item, &call)

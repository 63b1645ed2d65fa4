"""Weight matrices in the formats that products read fastest, and their products with rows of activations.

A `Matrix` of `rows` outputs and `columns` inputs multiplies like `x @ w.T`. Floats are kept as they were stored. Packed
formats are those of the field: groups of channels share a scale, or a scale and a minimum.

A row of a product has the same bits whatever other rows it is computed with, and on any number of threads: sums of
integers are exact, and floats are added in one order (ckernels/kvc_matrix.h, which also states the error).
"""

from collections import namedtuple

import numpy as np

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint16_t, uintptr_t
from libc.string cimport memcpy

from kvcache.errors import OutOfMemoryError
from kvcache.kernels.kernels cimport (
    KVC_BYTES, KVC_E4M3, KVC_E8M0, KVC_HALVES, KVC_NIBBLES, KVC_NO_TABLE, KVC_NUM_MATRIX_FORMATS,
    KVC_PANEL, bf16_of_floats, floats_of_bf16, kvc_groups_per_record, kvc_has_units, kvc_matmul_args, kvc_matrix,
    kvc_matrix_format, kvc_matrix_format_of, kvc_parts, kvc_quantises, kvc_table_of, level_in_use, matmul,
    matmul_scratch_bytes, matrix_get_parts, matrix_get_row, matrix_init, matrix_put_parts, matrix_put_words,
    num_threads, quantise_weights,
)
from kvcache.support.arguments cimport is_plain, overlap
from kvcache.support.arguments import as_count, as_indices, as_instance, as_integer, described, is_integer, short
from kvcache.support.dlpack cimport rows_of, rows_overlap, rows_t
from kvcache.support.recycled cimport Piece, new_floats

__all__ = ["ACTIVATIONS", "MATRIX_FORMATS", "Matrix", "MatrixFormat", "checked_activations"]

cnp.import_array()

MatrixFormat = namedtuple("MatrixFormat", (
    "name", "bits", "packed", "has_minima", "zero", "channels", "scales", "record", "has_units", "numbers", "quantises",
))
cdef dict _SCALES = {
    KVC_HALVES: "halves", KVC_BYTES: "bytes", KVC_NIBBLES: "nibbles", KVC_E8M0: "e8m0", KVC_E4M3: "e4m3",
}


cdef object _line(int number):
    line = kvc_matrix_format_of(<kvc_matrix_format>number)
    table = kvc_table_of(line.table)
    numbers = None if line.table == KVC_NO_TABLE else tuple(table[i] - line.zero for i in range(16))
    packed, has_units = line.packed != 0, line.packed != 0 and kvc_has_units(line)
    return MatrixFormat(
        line.name.decode(), line.bits, packed, line.has_minima != 0, line.zero, line.channels, _SCALES[line.scales],
        32 * kvc_groups_per_record(line) if packed else 1, has_units, numbers,
        not packed or kvc_quantises(line) != 0,
    )


# The table of formats, by name; kvc_matrix.h explains the columns.
MATRIX_FORMATS = {line.name: line for line in map(_line, range(KVC_NUM_MATRIX_FORMATS))}
ACTIVATIONS = ("int8", "exact", "bf16")     # how rows meet weights: see `Matrix.multiply`
cdef list _NAMES = list(MATRIX_FORMATS)
cdef int _LINE = 64         # bytes of a cache line; every matrix starts at one
cdef int _PIECE = 16        # rows that are quantised at a time


cdef class Matrix:
    """Weights `(rows, columns)` of one format, zeros at first.

    Args:
        rows, columns: at least 1; products map `columns` inputs to `rows` outputs.
        format: "f32", "f16", "bf16", or packed: one of `MATRIX_FORMATS`, such as "q8_0" (8.5 bits per weight),
            "q4_1" (5), "q6_k" (6.625) or "mxfp4" (4.25).
        memory: uint8 array of zeros to use from its first cache line on; `num_bytes(rows, columns, format)` are enough.
            Own memory by default.

    Raises:
        TypeError, ValueError: as `num_bytes`; another kind of memory, or too little of it.
        OutOfMemoryError: sizes that this machine has no memory for.

    Attributes:
        format: the name of the format.
        scratch_bytes: the most bytes of prepared rows and partial sums that a product has taken so far, and freed when
            it ended.
    """

    def __cinit__(self, rows, columns, format, memory=None):
        rows, columns = as_count(rows, "rows", 1), as_count(columns, "columns", 1)
        size = self.num_bytes(rows, columns, format)
        try:
            memory = np.zeros(size, np.uint8) if memory is None else as_instance(memory, np.ndarray, "memory")
        except MemoryError:
            raise OutOfMemoryError(size, 0, "bytes") from None
        if memory.dtype != np.uint8 or memory.ndim != 1 or len(memory) < size - _LINE:
            raise ValueError(f"memory: expected {size} bytes of uint8, got {memory.dtype} {memory.shape}")
        cdef unsigned char[::1] data = memory
        cdef size_t skipped = (-<size_t>&data[0]) % <size_t>_LINE
        if data.shape[0] < <Py_ssize_t>(size - _LINE + skipped):
            raise ValueError(f"memory: expected {size} bytes of uint8, got {memory.dtype} {memory.shape}")
        matrix_init(&self.c, <kvc_matrix_format><int>_NAMES.index(format), rows, columns)
        self.c.data = &data[0] + skipped
        self.format = format
        self.memory = memory

    @staticmethod
    def num_bytes(rows, columns, format):
        """The bytes that a matrix takes, with room to align it.

        Raises:
            ValueError: an unknown format, or sizes that no memory holds.
        """
        cdef kvc_matrix_format number = _number(format)
        rows, columns = as_count(rows, "rows", 1), as_count(columns, "columns", 1)
        padded = -(-rows // 16) * 16 * (-(-columns // 256) * 256)
        if padded > 2 ** 58:
            raise ValueError(f"rows, columns: expected less than 2**58 weights, got {rows} x {columns}")
        cdef kvc_matrix some
        matrix_init(&some, number, rows, columns)
        return some.panels * <object>some.panel_bytes + _LINE

    @property
    def shape(self):
        """`(rows, columns)`."""
        return self.c.rows, self.c.columns

    @property
    def nbytes(self):
        """Bytes of the panels, with the rows and channels that fill them up."""
        return self.c.panels * <object>self.c.panel_bytes

    def spans(self):
        """The address of the panels, and their bytes: a list of one pair."""
        return [(<size_t>self.c.data, self.nbytes)]

    def __len__(self):
        return self.c.rows

    def __reduce_ex__(self, protocol):
        raise TypeError("Matrix: expected no copy and no pickle of it, got a call for one; "
                        "load it again, or `put` its rows into another one")

    def __repr__(self):
        return f"Matrix({self.c.rows}, {self.c.columns}, {self.format!r})"

    def put(self, row, values):
        """Set rows `row`, `row + 1`, ... from `values`, float32 `(n, columns)`: rounded, or quantised.

        Raises:
            ValueError: a value is not finite, or larger than f16 holds, where the format cannot keep it; a format whose
                codes come from files alone.
        """
        cdef int64_t first, at, count
        cdef kvc_parts parts
        cdef const float[:, ::1] x = np.ascontiguousarray(values, dtype=np.float32)
        first = self._rows(row, x.shape[0], x.shape[1])
        line = MATRIX_FORMATS[self.format]
        if self.format == "f32":
            return self.put_words(row, x)
        if not line.packed:
            return self.put_words(row, _to_bf16(np.asarray(x)) if self.format == "bf16" else _to_f16(np.asarray(x)))
        if not line.quantises:
            raise ValueError(f"values: expected codes for {self.format}, see `put_codes`, got floats")
        _check_halves(np.asarray(x))
        groups = (self.c.columns + 31) // 32
        cdef unsigned char[:, ::1] codes = np.empty((_PIECE, self.c.columns), np.uint8)
        cdef uint16_t[:, ::1] scales = np.empty((_PIECE, groups), np.uint16)
        cdef uint16_t[:, ::1] minima = np.empty((_PIECE, groups), np.uint16)
        parts.codes, parts.scales, parts.minima, parts.units = &codes[0, 0], &scales[0, 0], &minima[0, 0], NULL
        with nogil:
            at = 0
            while at < x.shape[0]:
                count = min(<int64_t>_PIECE, x.shape[0] - at)
                quantise_weights(self.c.format, count, self.c.columns, &x[at, 0], &codes[0, 0], &scales[0, 0],
                                 &minima[0, 0])
                matrix_put_parts(&self.c, first + at, count, &parts)
                at += count

    def put_words(self, row, words):
        """Set rows from numbers of the matrix's own float format: `(n, columns)` float32, or uint16 of f16, bf16."""
        line = MATRIX_FORMATS[self.format]
        if line.packed:
            raise ValueError(f"words: expected a matrix of floats, got {self.format}")
        array = np.ascontiguousarray(words)
        if array.dtype == np.float16:
            array = array.view(np.uint16)
        want = np.float32 if line.bits == 32 else np.uint16
        if array.dtype != want or array.ndim != 2:
            raise ValueError(f"words: expected {np.dtype(want)} (n, {self.c.columns}), got {array.dtype} {array.shape}")
        cdef int64_t first = self._rows(row, array.shape[0], array.shape[1]), count = array.shape[0]
        cdef const unsigned char[::1] data = array.reshape(-1).view(np.uint8)
        if count:
            with nogil:
                matrix_put_words(&self.c, first, count, &data[0])

    def put_codes(self, row, codes, scales, minima=None, units=None):
        """Set rows of a packed format from what another program quantised, bit for bit.

        Args:
            row: the first row.
            codes: `(n, columns)`: int8 for q8_0, else uint8 below `2**bits`.
            scales: `(n, ceil(columns / channels))`: float16, or for formats with bytes int8, with minima uint8. Of
                mxfp4 and nvfp4 uint8: the bits of an 8-bit float.
            minima: like the scales; of formats that have minima alone.
            units: float32 `(n, ceil(columns / 256))`, or with minima `(n, ceil(columns / 256), 2)` that float16 holds:
                what scales, and minima, are multiplied with; of formats that have units alone.

        `MATRIX_FORMATS` has bits, channels and whether there are minima and units; the values are those of the table in
        ckernels/kvc_matrix.h, such as `scale * code` (q8_0) or `units[1] * minimum + units[0] * scale * code` (q4_k).

        Raises:
            ValueError: shapes, dtypes, codes or scales that the format does not have.
        """
        cdef kvc_parts parts
        line = self._packed()
        want = np.int8 if line.bits == 8 else np.uint8
        array = np.ascontiguousarray(codes)
        if array.dtype != want or array.ndim != 2:
            raise ValueError(f"codes: expected {np.dtype(want)} (n, {self.c.columns}), got {array.dtype} {array.shape}")
        cdef int64_t first = self._rows(row, array.shape[0], array.shape[1]), count = array.shape[0]
        array = (array.view(np.uint8) ^ 128) if line.bits == 8 else array
        _check_most(array, (1 << line.bits) - 1, "codes")
        shapes = self._shapes(count)
        scales = _scales(scales, shapes[0], line, "scales")
        for name, given, has in (("minima", minima, line.has_minima), ("units", units, line.has_units)):
            if given is not None and not has:
                raise ValueError(f"{name}: expected none for {self.format}, got {short(given)}")
        minima = _scales(minima, shapes[0], line, "minima") if line.has_minima else None
        units = _units(units, shapes[1], line.has_minima) if line.has_units else None
        parts.codes, parts.scales = <unsigned char *>_address(array), <void *>_address(scales)
        parts.minima, parts.units = <void *>_address(minima), <float *>_address(units)
        if count:
            with nogil:
                matrix_put_parts(&self.c, first, count, &parts)

    def codes(self, row):
        """Row `row` of a packed format: codes, scales, minima and units, as `put_codes` takes them, of one row each.

        None for what the format has none of.
        """
        cdef kvc_parts parts
        line = self._packed()
        cdef int64_t at = self._rows(row, 1, self.c.columns)
        shapes = self._shapes(1)
        found = np.empty(self.c.columns, np.uint8)
        scales, minima = (np.empty(shapes[0][1:], _scale_type(line)) for _ in range(2))
        units = np.empty(shapes[1][1:], np.float32) if line.has_units else None
        parts.codes, parts.scales = <unsigned char *>_address(found), <void *>_address(scales)
        parts.minima, parts.units = <void *>_address(minima), <float *>_address(units)
        matrix_get_parts(&self.c, at, &parts)
        codes = (found ^ 128).view(np.int8) if line.bits == 8 else found
        return codes, scales, minima if line.has_minima else None, units

    cdef object _packed(self):
        """The line of the format; ValueError for floats."""
        line = MATRIX_FORMATS[self.format]
        if not line.packed:
            raise ValueError(f"codes: expected a matrix of a packed format, got {self.format}")
        return line

    cdef object _shapes(self, int64_t count):
        """The shapes of the scales and the units of `count` rows."""
        line = MATRIX_FORMATS[self.format]
        units = (count, -(-self.c.columns // line.record))
        return (count, -(-self.c.columns // line.channels)), (*units, 2) if line.has_minima else units

    def __getitem__(self, rows):
        """The rows of an int, or of an integer array `(n,)`, as float32 `(n, columns)`: how embeddings are looked up.

        Raises:
            TypeError, ValueError: no integers, or no integers of 64 bits.
            IndexError: no such row.
        """
        found = as_indices([as_integer(rows, "rows")] if is_integer(rows) else rows, "rows")
        cdef const int64_t[::1] at = found.copy()    # which nobody changes
        out = new_floats((at.shape[0], self.c.columns))
        cdef float[:, ::1] c_out = out
        cdef int64_t i
        for i in range(at.shape[0]):
            if not 0 <= at[i] < self.c.rows:
                raise IndexError(f"rows: expected 0 to {self.c.rows - 1}, got {at[i]}")
        with nogil:
            for i in range(at.shape[0]):
                matrix_get_row(&self.c, at[i], &c_out[i, 0])
        return out

    def to_float32(self):
        """All weights as a float32 array `(rows, columns)`."""
        return self[np.arange(self.c.rows)]

    def multiply(self, x, bias=None, *, activations="int8", out=None, bint add=False):
        """`x` `(n, columns)` times the weights transposed, plus `bias` `(rows,)`: float32 `(n, rows)`.

        Args:
            x: float32.
            bias: float32, or None.
            out: float32 `(n, rows)`, C-contiguous, for the result, which shares no memory with x, bias or the weights;
                a new array by default.
            activations: how x meets the weights. "int8": packed ones in 8 bits per group of 32 channels, floats in
                float32. "exact": packed ones in two digits of 8 bits, at twice the arithmetic. "bf16": both rounded to
                bf16, whatever the format: for many rows on CPUs that multiply bf16 (AMD's with AVX-512, AMX, ARM's with
                i8mm); few rows of other weights than bf16 are slow. Each kind of CPU has an order of sums of its own,
                so that bits differ between levels that share them otherwise: `kernels.bf16_order()` names it.
            add: add the product, then the bias, to what `out` has; by default they take its place.

        Raises:
            ValueError: another shape; other activations; an `out` of another kind, or that overlaps what is read; `add`
                without it.
        """
        checked_activations(activations)
        cdef cnp.ndarray rows = _as_float32(x, 2), biases = self._bias(bias)
        if rows.ndim != 2 or rows.shape[1] != self.c.columns:
            raise ValueError(f"x: expected (n, {self.c.columns}), got {np.shape(rows)}")
        shape = (rows.shape[0], self.c.rows)
        if out is None:
            if add:
                raise ValueError("out: expected an array to add to, got None")
            out = new_floats(shape)
        elif not is_plain(out, cnp.NPY_FLOAT32, 2) or out.shape != shape or not cnp.PyArray_ISWRITEABLE(out):
            raise ValueError(f"out: expected C-contiguous, writeable float32 of shape {shape}, got {described(out)}")
        else:
            for name, other in (("x", rows), ("bias", biases), ("the weights", self.memory)):
                if other is not None and overlap(out, other):
                    raise ValueError(f"out: expected memory apart from {name}, got the same memory")
        if rows.shape[0]:
            self._multiply(<const float *>cnp.PyArray_DATA(rows), rows.shape[0], biases,
                           <float *>cnp.PyArray_DATA(out), add, activations)
        return out

    def multiply_tensors(self, x, outs, bias=None, *, activations="int8"):
        """`multiply` for few rows, in contiguous tensors of DLPack: all of float32, or all of bfloat16.

        A product of rows in bfloat16 is rounded half to even.

        Args:
            x: the capsule of a tensor `(..., columns)`.
            outs: capsules of tensors `(..., rows of this one)`, which the columns of the product fill one after the
                other. They share no memory with x.
            bias, activations: as of `multiply`.

        Raises:
            ValueError: other tensors than these; other activations.
        """
        checked_activations(activations)
        cdef cnp.ndarray biases = self._bias(bias)
        cdef tuple capsules = tuple(outs)
        cdef rows_t rows = rows_of(x, "x"), part
        cdef int64_t columns = 0, i
        if rows.columns != self.c.columns:
            raise ValueError(f"x: expected (..., {self.c.columns}), got (..., {rows.columns})")
        for capsule in capsules:
            part = rows_of(capsule, "outs")
            if part.n != rows.n or part.words != rows.words:
                raise ValueError(f"outs: expected {rows.n} rows of the type of x, got {part.n} rows, or another type")
            if rows_overlap(rows, part):
                raise ValueError("outs: expected memory apart from x, got the same memory")
            columns += part.columns
        if columns != self.c.rows:
            raise ValueError(f"outs: expected {self.c.rows} columns, got {columns}")
        if rows.n == 0:
            return
        floats = Piece(rows.n * (rows.columns + columns) * sizeof(float))
        cdef float *product = <float *>floats.bytes
        cdef float *values = <float *>rows.data
        if rows.words:
            values = product + rows.n * columns
            floats_of_bf16(rows.n * rows.columns, <const uint16_t *>rows.data, values)
        self._multiply(values, rows.n, biases, product, False, activations)
        for capsule in capsules:
            part = rows_of(capsule, "outs")
            for i in range(rows.n):
                if rows.words:
                    bf16_of_floats(part.columns, product + i * columns, <uint16_t *>part.data + i * part.columns)
                else:
                    memcpy(<float *>part.data + i * part.columns, product + i * columns, part.columns * sizeof(float))
            product += part.columns

    cdef cnp.ndarray _bias(self, object bias):
        """A bias as float32 `(rows,)`, or None; ValueError for another shape."""
        cdef cnp.ndarray biases = None if bias is None else _as_float32(bias, 1)
        if biases is not None and (biases.ndim != 1 or biases.shape[0] != self.c.rows):
            raise ValueError(f"bias: expected ({self.c.rows},), got {np.shape(biases)}")
        return biases

    cdef int _multiply(self, const float *x, int64_t n, cnp.ndarray bias, float *out, bint add,
                       object activations) except -1:
        cdef kvc_matmul_args args
        args.n, args.matrix, args.x, args.out, args.add = n, &self.c, x, out, add
        args.bias = NULL
        if bias is not None:
            args.bias = <const float *>cnp.PyArray_DATA(bias)
        args.digits = 2 if activations == "exact" else 1
        cdef const void *level = level_in_use(activations == "bf16", &args.bf16_rows)
        cdef int threads = num_threads()
        cdef size_t size = matmul_scratch_bytes(&args, threads)
        scratch = Piece(size)
        args.prepared = scratch.bytes
        if size > self.scratch_bytes:
            with cython.critical_section(self):
                self.scratch_bytes = max(self.scratch_bytes, size)
        with nogil:
            matmul(level, &args, threads)
        return 0

    def part(self, row, count):
        """Rows `row` to `row + count` as a matrix over the same memory.

        Raises:
            ValueError: `row` is not a multiple of 16, or the part ends between two and there are more rows.
        """
        cdef int64_t first = as_count(row, "row"), rows = as_count(count, "count", 1)
        if first % KVC_PANEL or rows > self.c.rows - first or (rows % KVC_PANEL and first + rows < self.c.rows):
            raise ValueError(f"row, count: expected multiples of {KVC_PANEL} in {len(self)} rows, got {first}, {rows}")
        cdef size_t start = self.c.data - <unsigned char *>cnp.PyArray_DATA(self.memory)
        start += first // KVC_PANEL * self.c.panel_bytes
        return Matrix(rows, self.c.columns, self.format, self.memory[start:])

    cdef int64_t _rows(self, object row, int64_t count, int64_t columns) except -1:
        """The first of `count` rows from `row` on, which exist and have `columns` columns."""
        first = as_count(row, "row")
        if columns != self.c.columns or first + count > self.c.rows:
            raise ValueError(f"row: expected rows of ({self.c.rows}, {self.c.columns}), "
                             f"got {count} of {columns} columns from {first}")
        return first


def checked_activations(activations):
    """`activations`; ValueError: they are none of `ACTIVATIONS`."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: expected one of {', '.join(ACTIVATIONS)}, got {short(activations)}")
    return activations


cdef kvc_matrix_format _number(object name) except *:
    if not isinstance(name, str) or name not in MATRIX_FORMATS:
        raise ValueError(f"format: expected one of {', '.join(MATRIX_FORMATS)}, got {short(name)}")
    return <kvc_matrix_format><int>_NAMES.index(name)


cdef cnp.ndarray _as_float32(object x, int ndim):
    """x as contiguous float32: itself, if it has `ndim` dimensions."""
    return x if is_plain(x, cnp.NPY_FLOAT32, ndim) else np.array(x, np.float32, order="C")


cdef object _scale_type(object line):
    if line.scales == "halves":
        return np.float16
    return np.int8 if line.scales == "bytes" and not line.has_minima else np.uint8


cdef object _scales(object values, object shape, object line, str name):
    """Contiguous scales or minima of this shape; ValueError for others, and for bytes that are none."""
    array, want = np.ascontiguousarray(as_instance(values, np.ndarray, name)), np.dtype(_scale_type(line))
    if array.dtype != want or array.shape != shape:
        raise ValueError(f"{name}: expected {want} {shape}, got {array.dtype} {array.shape}")
    _check_most(array, {"nibbles": 15, "e8m0": 254, "e4m3": 126}.get(line.scales), name)
    return array


cdef object _units(object values, object shape, bint halves):
    """Contiguous units of this shape, finite and, if asked for, such as float16 holds; ValueError for others."""
    array = np.ascontiguousarray(as_instance(values, np.ndarray, "units"))
    if array.dtype != np.float32 or array.shape != shape:
        raise ValueError(f"units: expected float32 {shape}, got {array.dtype} {array.shape}")
    with np.errstate(over="ignore"):
        kept = array.astype(np.float16).astype(np.float32) if halves else array
    wrong = ~np.isfinite(kept) | (kept != array)
    if wrong.any():
        raise ValueError(f"units: expected finite numbers{' of float16' if halves else ''}, got {array[wrong][0]}")
    return array


cdef int _check_most(object array, object most, str name) except -1:
    if most is not None and array.size and array.max() > most:
        raise ValueError(f"{name}: expected 0 to {most}, got {array.max()}")
    return 0


cdef uintptr_t _address(object array):
    """Where a contiguous array's data begin; 0 for None."""
    return 0 if array is None else <uintptr_t>cnp.PyArray_DATA(<cnp.ndarray>array)


cdef int _check_halves(object x) except -1:
    """ValueError unless the magnitudes of all values are at most the largest half."""
    if x.size and not np.abs(x).max() <= 65504:  # NaN fails too
        raise ValueError(f"values: expected finite numbers up to 65504, got {np.abs(x).max()}")
    return 0


cdef object _to_f16(object x):
    _check_halves(x)
    return x.astype(np.float16).view(np.uint16)


cdef object _to_bf16(object x):
    """Words of bf16, rounded half to even."""
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)

"""Products of groups of rows, each with a matrix of its own: the experts of a mixture."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint16_t
from libc.string cimport memcpy

from kvcache.kernels.kernels cimport bf16_of_floats, floats_of_bf16
from kvcache.kernels.matrix cimport Matrix
from kvcache.support.dlpack cimport rows_of, rows_overlap, rows_t
from kvcache.support.recycled cimport Piece

from kvcache.kernels.matrix import checked_activations
from kvcache.support.arguments import as_indices, as_instance

__all__ = ["multiply_groups"]

cnp.import_array()


def multiply_groups(matrices, counts, x, out, biases=None, *, activations="int8"):
    """The first `counts[0]` rows times the first matrix transposed, the next `counts[1]` rows times the second one, ...

    Args:
        matrices: of one shape.
        counts: rows of each, 0 allowed.
        x: the capsule ("dltensor") of a tensor `(n, columns)`, as of `Matrix.multiply_tensors`.
        out: of a tensor `(n, rows of a matrix)` of the same type, which shares no memory with x.
        biases: of each matrix a bias, as of `Matrix.multiply`; None: there are none.
        activations: as of `Matrix.multiply`.

    Raises:
        TypeError: not all are matrices.
        ValueError: other shapes, numbers or tensors than these; other activations.
    """
    checked_activations(activations)
    cdef list each = list(matrices), bias = [None] * len(each) if biases is None else list(biases)
    cdef cnp.ndarray lens = as_indices(counts, "counts").copy()    # nobody changes it
    cdef const int64_t *count = <const int64_t *>cnp.PyArray_DATA(lens)
    cdef Py_ssize_t i, groups = len(each)
    cdef Matrix matrix, first
    if groups == 0 or lens.shape[0] != groups or len(bias) != groups:
        raise ValueError(f"counts: expected one, and a bias, per matrix, got {lens.shape[0]} for {groups} matrices")
    first = as_instance(each[0], Matrix, "matrices")
    for i in range(groups):
        matrix = as_instance(each[i], Matrix, "matrices")
        if matrix.c.rows != first.c.rows or matrix.c.columns != first.c.columns:
            raise ValueError(f"matrices: expected one shape, got {first.shape} and {matrix.shape}")
        bias[i] = matrix._bias(bias[i])
    cdef rows_t rows = rows_of(x, "x"), to = rows_of(out, "out")
    cdef int64_t inputs = first.c.columns, outputs = first.c.rows, total = 0
    for i in range(groups):
        if not 0 <= count[i] <= rows.n - total:
            raise ValueError(f"counts: expected {rows.n} rows in all, got {count[i]} after {total}")
        total += count[i]
    if total != rows.n or rows.columns != inputs:
        raise ValueError(f"x: expected ({total}, {inputs}), got ({rows.n}, {rows.columns})")
    if to.n != rows.n or to.columns != outputs or to.words != rows.words:
        raise ValueError(f"out: expected ({rows.n}, {outputs}) of the type of x, got ({to.n}, {to.columns})")
    if rows_overlap(rows, to):
        raise ValueError("out: expected memory apart from x, got the same memory")
    floats = Piece(rows.n * (inputs + outputs) * sizeof(float))
    cdef float *products = <float *>floats.bytes
    cdef float *values = <float *>rows.data
    if rows.words:
        values = products + rows.n * outputs
        floats_of_bf16(rows.n * inputs, <const uint16_t *>rows.data, values)
    total = 0
    for i in range(groups):
        if count[i]:
            (<Matrix>each[i])._multiply(values + total * inputs, count[i], bias[i], products + total * outputs, False,
                                        activations)
            total += count[i]
    if rows.words:
        bf16_of_floats(rows.n * outputs, products, <uint16_t *>to.data)
    elif rows.n:
        memcpy(to.data, products, rows.n * outputs * sizeof(float))

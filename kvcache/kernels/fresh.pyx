"""New memory for weights, first written by the threads that will read it."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvcache.kernels.kernels cimport num_threads, run_items
from kvcache.support.mapped cimport MappedMemory

__all__ = ["zeros"]

cnp.import_array()

cdef int64_t _PIECE = 1 << 21   # a huge page: bytes that one thread writes at a time
cdef int64_t _PAGE = 4096       # the smallest page


cdef struct _Span:
    unsigned char *bytes
    int64_t size


cdef void _write_piece(void *context, int64_t index, int thread) noexcept nogil:
    cdef _Span *span = <_Span *>context
    cdef int64_t at = index * _PIECE, stop = min(span.size, at + _PIECE)
    while at < stop:
        (<volatile unsigned char *>span.bytes)[at] = 0
        at += _PAGE


def zeros(int64_t size):
    """uint8 array `(size,)` of zeros that begins at a huge page, and lies on huge pages where the system has them.

    Below two of them it is NumPy's. A page belongs to the node of the thread that writes it first, and the system
    clears it then: all threads of the pool do so, piece by piece, as they will read the weights.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """
    if size < 2 * _PIECE:
        return np.zeros(size, np.uint8)
    memory = MappedMemory(size)
    cdef _Span span = _Span((<MappedMemory>memory).bytes, size)
    cdef cnp.npy_intp length = size
    with nogil:
        run_items((size + _PIECE - 1) // _PIECE, num_threads(), _write_piece, &span)
    array = cnp.PyArray_SimpleNewFromData(1, &length, cnp.NPY_UINT8, span.bytes)
    cnp.set_array_base(array, memory)
    return array

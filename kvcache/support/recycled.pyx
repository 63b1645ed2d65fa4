"""Pieces of memory that are taken again; explained in support/recycled.pxd."""

cimport cython
cimport numpy as cnp

from kvcache.support.mapped cimport MappedMemory

from kvcache.errors import OutOfMemoryError

cdef extern from "kvc_system.h" nogil:
    void *kvc_allocate_aligned(size_t alignment, size_t n)
    void kvc_free_aligned(void *bytes)

__all__ = ["Piece", "check", "free_pieces"]

cnp.import_array()

cdef Py_ssize_t _LINE = 64              # bytes of a line of the cache, where each piece begins
cdef Py_ssize_t _LEAST = 1 << 17        # bytes of a piece that is kept
cdef Py_ssize_t _MOST = 128 << 20       # bytes of all free pieces
cdef Py_ssize_t _MOST_PIECES = 16
cdef list _free = []                    # MappedMemory, in the order in which it was freed
cdef object _turn = object()            # of threads: one at a time takes, keeps or counts pieces


@cython.no_gc       # so that the memory is still there when the object goes
cdef class Piece:
    """`size` bytes of memory that may have been in use before, from a line of the cache on.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __cinit__(self, Py_ssize_t size):
        if size >= _LEAST:
            self.memory = _taken(size)
            self.bytes = self.memory.bytes
        else:
            self.bytes = <unsigned char *>kvc_allocate_aligned(_LINE, (max(size, 1) + _LINE - 1) // _LINE * _LINE)
        if self.bytes == NULL:
            raise OutOfMemoryError(size, 0, "bytes")

    def __dealloc__(self):
        if self.memory is not None:
            _keep(self.memory)
        else:
            kvc_free_aligned(self.bytes)


cdef MappedMemory _taken(Py_ssize_t size):
    """The smallest free memory of `size` to 2 * `size` bytes, or new memory."""
    cdef MappedMemory each, best = None
    with cython.critical_section(_turn):
        for each in _free:
            if size <= <Py_ssize_t>each.nbytes <= 2 * size and (best is None or each.nbytes < best.nbytes):
                best = each
        if best is not None:
            _free.remove(best)
    return MappedMemory(size) if best is None else best


cdef int _keep(MappedMemory memory) except -1:
    with cython.critical_section(_turn):
        _free.append(memory)
        while len(_free) > _MOST_PIECES or _num_free_bytes() > _MOST:
            _free.pop(0)
    return 0


cdef Py_ssize_t _num_free_bytes() noexcept:
    cdef Py_ssize_t total = 0
    cdef MappedMemory each
    for each in _free:
        total += <Py_ssize_t>each.nbytes
    return total


cdef object new_floats(tuple shape):
    cdef cnp.npy_intp lengths[3]
    cdef Py_ssize_t size = sizeof(float)
    cdef int i, ndim = len(shape)
    assert ndim <= 3, shape
    for i in range(ndim):
        lengths[i] = shape[i]
        size *= lengths[i]
    if size < _LEAST:
        return cnp.PyArray_EMPTY(ndim, lengths, cnp.NPY_FLOAT32, 0)
    piece = Piece(size)
    array = cnp.PyArray_SimpleNewFromData(ndim, lengths, cnp.NPY_FLOAT32, piece.bytes)
    cnp.set_array_base(array, piece)
    return array


def check():
    """Verify the limits of what is kept; AssertionError names the broken one."""
    sizes = free_pieces()
    assert len(sizes) <= _MOST_PIECES, f"recycled: {len(sizes)} free pieces"
    assert sum(sizes) <= _MOST, f"recycled: {sum(sizes)} free bytes"
    assert min(sizes, default=_LEAST) >= _LEAST, "recycled: a small piece is kept"


def free_pieces():
    """The bytes of each free piece, in the order in which they were freed."""
    with cython.critical_section(_turn):
        return [(<MappedMemory>each).nbytes for each in _free]

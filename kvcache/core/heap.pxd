"""An indexed heap: a priority queue in which any item can be found, moved and removed.

Items are small non-negative ids, each in the heap at most once. The order is total, so that every result
is repeatable: the smallest key comes first, among equal keys the lowest tie, by default the id.
"""

from libc.stdint cimport int32_t, uint64_t


cdef struct heap_item:
    double key     # the smallest comes first; counters are exact up to 2**53
    uint64_t tie   # among equal keys the lowest comes first
    int32_t id


cdef class IndexedHeap:
    cdef heap_item* items      # (size,) an implicit tree: items[i] comes before items[4i+1] to items[4i+4]
    cdef int32_t* place        # (num_ids,) index of an id in items, -1: not in the heap
    cdef Py_ssize_t size       # items in the heap
    cdef Py_ssize_t num_ids    # ids that there is room for, in both arrays

    # Room for the ids below num_ids: putting these cannot fail.
    cdef int reserve(self, Py_ssize_t num_ids) except -1 nogil
    # Push the id, or move it to its new key.
    cdef void put(self, int32_t id, double key) noexcept nogil
    # The same with a tie of the caller's, by which equal keys are ordered; no two ties may be equal.
    cdef void put_tied(self, int32_t id, double key, uint64_t tie) noexcept nogil
    # Remove the id if it is in.
    cdef void drop(self, int32_t id) noexcept nogil
    # The first id, -1 when empty.
    cdef int32_t top(self) noexcept nogil
    cdef bint has(self, int32_t id) noexcept nogil
    cdef void empty(self) noexcept nogil

    cdef void _rise(self, Py_ssize_t i, heap_item item) noexcept nogil
    cdef void _sink(self, Py_ssize_t i, heap_item item) noexcept nogil
    cdef int32_t _id(self, object id) except -1
    cdef int32_t _member(self, object id) except -1

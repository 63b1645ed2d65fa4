"""A map from 64-bit ids to rows: a dict {seq_id: row} without Python objects."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.support.shared_numbers cimport shared_int64


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    # The finaliser of splitmix64: ids are often 0, 1, 2, ... or multiples of a power of two.
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef class IdMap:
    cdef uint64_t *keys       # (capacity,) id in each slot
    cdef int32_t *values      # (capacity,) its row, -1 where the slot is empty
    cdef int64_t capacity     # a power of two, at least twice `used`
    cdef readonly shared_int64 used

    cdef int64_t slot_of(self, uint64_t key) noexcept nogil   # where the key is, or the empty slot where it would go
    cdef int32_t get(self, uint64_t key) noexcept nogil       # its row, or -1
    cdef int reserve(self, int64_t count) except -1           # room for `count` keys; afterwards put() cannot fail
    cdef void put(self, uint64_t key, int32_t value) noexcept nogil
    cdef void drop(self, uint64_t key) noexcept nogil         # absent keys are no error

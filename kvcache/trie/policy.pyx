"""Which leaf leaves first. A policy is one class with one function; see policy.pxd."""

from libc.stdint cimport int32_t, int64_t

from kvcache.core.arguments import as_count

__all__ = ["LFU", "LRU", "Policy"]


cdef class Policy:
    """The base of all policies, and the first of them: the least recently used leaf leaves first."""

    cdef double rank(self, int64_t stamp, int32_t uses) noexcept nogil:
        return <double>stamp


cdef class LRU(Policy):
    """The least recently used leaf leaves first."""


cdef class LFU(Policy):
    """The least frequently used leaf leaves first; each use is forgotten `age` uses of anything later.

    Args:
        age: uses of the whole cache that make up for one use less of a leaf. 0 is LRU; the larger it is, the longer
            something that was used often stays when it is used no more.
    """

    cdef readonly int64_t age

    def __init__(self, age=1000):
        self.age, self.counts = as_count(age, "age", 0, 2**20), True

    cdef double rank(self, int64_t stamp, int32_t uses) noexcept nogil:
        return <double>(stamp + self.age * uses)    # both grow by use alone, so a rank never has to be computed again

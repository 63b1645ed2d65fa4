"""Eviction policies of a trie: one class with one function each; see policy.pxd."""

from libc.stdint cimport int32_t, int64_t

from kvcache.support.arguments import as_count

__all__ = ["LFU", "LRU", "Policy"]


cdef class Policy:
    """The base of all policies. Itself it evicts the least recently used leaf first."""

    cdef double rank(self, int64_t stamp, int32_t uses) noexcept nogil:
        return <double>stamp


cdef class LRU(Policy):
    """The least recently used leaf is evicted first."""

    def __repr__(self):
        return "LRU()"


cdef class LFU(Policy):
    """The least frequently used leaf is evicted first. A use counts for the next `age` uses of the cache.

    Args:
        age: `age` uses of the whole cache weigh as much as one use of a leaf. 0 is LRU. With a larger age, a leaf that
            was used often stays longer after its last use.
    """

    cdef readonly int64_t age

    def __init__(self, age=1000):
        self.age, self.counts = as_count(age, "age", 0, 2**20), True

    def __repr__(self):
        return f"LFU(age={self.age})"

    cdef double rank(self, int64_t stamp, int32_t uses) noexcept nogil:
        return <double>(stamp + self.age * uses)    # both change only when the leaf is used, so ranks stay valid

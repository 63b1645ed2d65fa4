"""Eviction of whole sequences, in the order of a table's victims."""

from libc.stdint cimport int64_t

from kvcache.core.locks cimport CallLock
from kvcache.paged.tables cimport BlockTables


cdef class Evictor:
    cdef CallLock lock                 # taken by each call
    cdef BlockTables table
    cdef readonly int64_t evictions    # sequences evicted, ever

    cdef object _evict_to(self, double utilization)

"""Eviction of whole sequences, in the order of a table's victims."""

from libc.stdint cimport int64_t

from kvcache.core.locks cimport CallLock
from kvcache.paged.tables cimport BlockTables
from kvcache.support.shared_numbers cimport shared_int64


cdef class Evictor:
    cdef CallLock lock                 # taken by each call
    cdef BlockTables table
    cdef readonly shared_int64 evictions    # sequences evicted, ever

    cdef object _evict_to(self, double utilization)

"""Attention over sequences of a table: which tokens each query sees, with table and store locked."""

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvcache.core.attention cimport Attention
from kvcache.core.locks cimport CallLock
from kvcache.paged.tables cimport BlockTables


cdef class SequenceAttention:
    cdef CallLock lock           # of table and store
    cdef BlockTables table
    cdef Attention attention     # over the store

    # With the lock held and everything converted. `lens`, `shown`, `starts`: int64, or None: one query each, all
    # tokens, from position 0 on. `window`: 0 for none.
    cdef object _attend(self, unsigned char *base, cnp.ndarray q, cnp.ndarray sink_queries, cnp.ndarray ids,
                        cnp.ndarray lens, cnp.ndarray shown, cnp.ndarray starts, float scale, int64_t window,
                        float softcap, cnp.ndarray sinks, cnp.ndarray result, bint return_scores, bint return_lse)
    # Describes the sequences to `attention` and checks that the queries add up; leaves their rows in `table.picked`.
    cdef int _describe(self, cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown, cnp.ndarray starts, int64_t window,
                       int64_t num_queries) except -1

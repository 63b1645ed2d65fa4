"""Attention over sequences of a table: which tokens each query sees, with table and store locked."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from kvcache.core.attention cimport Attention
from kvcache.core.locks cimport CallLock
from kvcache.paged.tables cimport BlockTables


# What queries see, and how scores become weights.
cdef struct Sight:
    int64_t window               # 0: none
    float scale
    float softcap                # 0: none
    bint whole                   # not causal
    int64_t skipped              # the first tokens of each sequence that no query sees

cdef enum:
    BY_HEAD = 2                  # of return_scores: 0 no, 1 their sum


cdef class SequenceAttention:
    cdef CallLock lock           # of table and store
    cdef BlockTables table
    cdef Attention attention     # over the store

    # With the lock held and everything converted. `lens`, `shown`, `starts`: int64, or None: one query each, all
    # tokens, from position 0 on. `tree`: int64 (2, total_queries), the parents, and room for the depths; or None.
    # `given` is returned for `result`: the object over whose memory `result` is.
    cdef object _attend(self, int64_t layer, cnp.ndarray q, cnp.ndarray sink_queries, cnp.ndarray ids,
                        cnp.ndarray lens, cnp.ndarray shown, cnp.ndarray starts, cnp.ndarray tree, const Sight *sight,
                        cnp.ndarray sinks, cnp.ndarray result, object given, int return_scores, bint return_lse,
                        bint touches)
    cdef void _touch(self, int64_t n) noexcept                   # the n picked sequences
    cdef int _mass(self, object return_scores) except -1         # 0, 1 or BY_HEAD
    # Describes the sequences to `attention` and checks that the queries add up; leaves their rows in `table.picked`.
    cdef int _describe(self, cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown, cnp.ndarray starts, cnp.ndarray tree,
                       const Sight *sight, int64_t num_queries) except -1
    # The number of ancestors of each query of a tree; ValueError where a parent is not an earlier query, or -1.
    cdef int _measure(self, uint64_t seq_id, int64_t count, const int64_t *parents, int64_t *depths) except -1

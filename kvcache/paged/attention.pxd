"""One attention call after another over the blocks of a store: queries checked, sequences described, room kept.

A decoding step comes here once per layer, so what it needs beside the caller's arrays stays from call to call.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcache.core.kernels cimport kvc_seq
from kvcache.core.store cimport BlockStore
from kvcache.paged.table cimport SequenceTable


cdef class Attention:
    cdef BlockStore store
    cdef void *scratch                 # of the kernels, grown to the largest call so far
    cdef size_t scratch_bytes
    cdef kvc_seq *seqs                 # (seqs_capacity,) the sequences of the call
    cdef int32_t *rows                 # (seqs_capacity,) their rows in the table
    cdef int64_t seqs_capacity

    cdef int reserve_seqs(self, int64_t count) except -1
    cdef object attend_sequences_(self, SequenceTable table, unsigned char *base, cnp.ndarray q, cnp.ndarray sinks,
                                  cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown, float scale, cnp.ndarray result,
                                  bint return_scores, bint return_lse)
    cdef cnp.ndarray queries_(self, object queries, str name)             # or TypeError, ValueError
    cdef cnp.ndarray result_(self, object out, cnp.ndarray q)
    # Fills `seqs` and `rows`, with the table's lock held. `lens`, `shown`: int64, or None: one query each, all tokens.
    cdef int describe_(self, SequenceTable table, cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown,
                       int64_t num_queries) except -1
    cdef int attend_(self, unsigned char *base, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray sink_queries,
                     float scale, cnp.ndarray out, cnp.ndarray scores, cnp.ndarray lse) except -1

"""One attention call after another over the blocks of a store: queries checked, sequences described, room kept.

A decoding step comes here once per layer, so what it needs beside the caller's arrays stays from call to call.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from kvcache._kernels cimport kvc_seq
from kvcache._store cimport BlockStore
from kvcache._table cimport SequenceTable


cdef class Attention:
    cdef BlockStore store
    cdef void *scratch                 # of the kernels, grown to the largest call so far
    cdef size_t scratch_bytes
    cdef kvc_seq *seqs                 # (seqs_capacity,) the sequences of the call
    cdef int64_t seqs_capacity

    cdef int reserve_seqs(self, int64_t count) except -1
    cdef cnp.ndarray queries_(self, object queries, str name)             # or TypeError, ValueError
    cdef cnp.ndarray result_(self, object out, cnp.ndarray q)
    cdef int describe_(self, SequenceTable table, const uint64_t *ids, int64_t n, object query_lens,
                       object context_lens, int64_t num_queries) except -1
    cdef int attend_(self, unsigned char *base, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray sink_queries,
                     float scale, cnp.ndarray out, cnp.ndarray scores, cnp.ndarray lse) except -1

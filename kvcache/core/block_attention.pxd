"""Attention over the blocks of a store: checked arguments, and scratch that is kept from call to call.

A decoding step calls this once per layer, so memory beside the caller's arrays is reserved once.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvcache.core.attention_call cimport AttentionCall
from kvcache.core.store cimport BlockStore
from kvcache.kernels.kernels cimport kvc_attend_args, kvc_seq


cdef class Attention:
    cdef BlockStore store
    cdef void *scratch                 # of the kernels, grown to the largest call so far
    cdef size_t scratch_bytes
    cdef BlockStore residual           # of the tokens in another layout (kvc_attend_args in kvc.h); or None
    # (seqs_capacity,) the sequences of the call, filled by the caller of `attend_`, and with `residual` their residuals
    cdef kvc_seq *seqs
    cdef kvc_seq *residuals
    cdef int64_t seqs_capacity

    # Conversions of arguments, which may run any code
    # (n, heads, head_dim) of any float type, as `together` of core/kvrows.pxd leaves it; or TypeError, ValueError
    cdef cnp.ndarray queries_(self, object queries, str name)
    cdef cnp.ndarray result_(self, object out, cnp.ndarray queries)       # `out` or a new array; ValueError

    # The call
    cdef int reserve_seqs(self, int64_t count) except -1
    cdef int reserve_scratch(self, size_t size) except -1
    cdef kvc_seq *seq_(self, int64_t index) noexcept                      # sequence `index`, and its residual, all 0
    cdef int attend_(self, int64_t layer, int64_t num_seqs, AttentionCall call, cnp.ndarray queries,
                     cnp.ndarray sink_queries, cnp.ndarray sinks, cnp.ndarray out, cnp.ndarray scores,
                     cnp.ndarray lse, cnp.ndarray tokens=*, bint indexed=*) except -1
    # The same of a layer of the bytes, where queries choose tokens, or attend to those that are listed, int32
    # (total_queries, num_heads, n), ascending, then -1. `indexed`: lists of an indexer; a query that sees at most n
    # tokens attends to all.
    cdef int attend_chosen_(self, int64_t layer, kvc_attend_args *args, int64_t top_tokens, cnp.ndarray tokens,
                            bint indexed, int threads) except -1
    # The lists of tokens, (n, 1, most), that an indexer chooses by the keys of an index layer: float32 queries
    # (n, heads, channels) and weights (n, heads) of the sequences that are described.
    cdef cnp.ndarray choose_(self, int64_t layer, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray weights,
                             int64_t most)

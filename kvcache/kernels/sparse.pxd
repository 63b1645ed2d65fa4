"""The types of sparse attention; kernels/kernels.pxd has its functions.

ckernels/kvc_sparse.h and kvc_indexer.h explain both.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t


cdef extern from "kvc_sparse.h" nogil:
    enum:
        KVC_PAGE                        # tokens of a page
        KVC_ITEM_ROWS                   # most query heads of a KV head that choose their tokens

    ctypedef struct kvc_summaries:      # of the keys of the pages of one layer
        unsigned char *made
        unsigned char *codes
        uint16_t *scales

    ctypedef struct kvc_sparse_args:
        kvc_summaries summaries
        int64_t top_tokens
        const int32_t *listed           # tokens that each KV head attends to; NULL: it chooses them
        int64_t num_listed
        int64_t all_up_to               # a query that sees at most this many tokens attends to all

cdef extern from "kvc_indexer.h" nogil:
    ctypedef struct kvc_index_args:     # beside kvc_attend_args of the indexer's keys
        const float *weights
        int64_t most
        int32_t *chosen

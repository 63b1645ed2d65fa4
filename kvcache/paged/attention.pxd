"""Attention over sequences of a table: which tokens each query sees, with table and store locked."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from kvcache.core.attention_call cimport AttentionCall
from kvcache.core.block_attention cimport Attention
from kvcache.core.locks cimport CallLock
from kvcache.paged.queried cimport QueriedSequences
from kvcache.paged.records cimport Sequence
from kvcache.paged.residual cimport Residual
from kvcache.paged.tables cimport BlockTables


# Queries of one sequence that read the same rows in f16: those of one group of the text, or its first tokens.
cdef struct QueryGroup:
    int64_t text                 # which sequence of the call it is
    int64_t first, ahead         # the tokens with these rows, [first, ahead) and [begin, end)
    int64_t begin, end
    int64_t first_run            # of the rows, in the runs that the residual's list has cut


cdef class SequenceAttention:
    cdef CallLock lock           # of table and store
    cdef BlockTables table
    cdef Residual residual       # of the table; None: there is none
    cdef Attention attention     # over the store, and that of the residual
    cdef QueryGroup *groups      # (groups_capacity,) of a call with a residual, each a sequence of `attention`
    cdef int64_t groups_capacity, num_groups

    # With the lock held and everything converted. `tree`: int64 (2, total_queries), the parents, and room for the
    # depths; or None. `given` is returned for `result`: the object over whose memory `result` is.
    cdef object _attend(self, int64_t layer, QueriedSequences sequences, AttentionCall call, cnp.ndarray q,
                        cnp.ndarray sink_queries, cnp.ndarray tree, cnp.ndarray sinks, cnp.ndarray result,
                        object given, cnp.ndarray chosen)
    # ValueError for what excludes top_tokens, or tokens that are listed, and for lists of other tokens than each query
    # sees, ascending; the sequences are described.
    cdef int _refuse_sparse(self, QueriedSequences sequences, AttentionCall call, cnp.ndarray q, object sink_queries,
                            int64_t num_seqs) except -1
    # ValueError where sequences have holes, for the argument of that name.
    cdef int _refuse_holes(self, str own, object got, int64_t num_seqs) except -1
    cdef int _check_listed(self, cnp.ndarray tokens, cnp.ndarray q, int64_t num_seqs) except -1
    cdef void _touch(self, int64_t n) noexcept                   # the n picked sequences
    # Describes the sequences to `attention` and checks that the queries add up; leaves their rows in `table.picked`.
    cdef int _describe(self, QueriedSequences sequences, AttentionCall call, cnp.ndarray tree,
                       int64_t num_queries) except -1
    # The same with a residual: each sequence becomes as many as its queries are in groups. Then the sums of masses of
    # these, as the kernels give them, for each sequence.
    cdef int _describe_groups(self, QueriedSequences sequences, AttentionCall call, int64_t num_queries) except -1
    cdef int _reserve_groups(self, int64_t count) except -1
    cdef int _add_groups(self, int64_t text, const Sequence *seq, int64_t count, int64_t stop,
                         AttentionCall call) except -1
    # Queries that see the first `context` tokens packed, but for `ahead`: all of them, or those up to each query; and
    # the tokens with rows in f16, `near_whole`: all of them.
    cdef int _add_group(self, const Sequence *seq, int64_t queries, int64_t context, QueryGroup group,
                        bint whole, bint near_whole) except -1
    cdef int64_t _num_shown(self, const int64_t *show, int64_t text) noexcept    # tokens of a sequence; show NULL: all
    cdef object _collect_masses(self, cnp.ndarray parts, cnp.ndarray shown, int64_t n)
    # ValueError for arguments that a residual excludes.
    cdef int _refuse(self, QueriedSequences sequences, AttentionCall call, object sink_queries) except -1
    # ValueError where a query does not see fewer first tokens than the one before.
    cdef int _check_firsts(self, uint64_t seq_id, int64_t count, const int64_t *firsts) except -1
    # The number of ancestors of each query of a tree; ValueError where a parent is not an earlier query, or -1.
    cdef int _measure(self, uint64_t seq_id, int64_t count, const int64_t *parents, int64_t *depths) except -1

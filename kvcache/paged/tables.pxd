"""The block tables of all sequences: every verb takes many sequences, a single one is the same with n = 1.

A table has records of the sequences, their runs, and an order of victims; it reports to the order what changes. With
a `Residual` every verb changes the second list of runs of a sequence too (paged/residual.pxd). The residual grows where
it has too few blocks; that is all that a verb does before it is known to succeed.
Integers only: the bytes are those of paged/sequences.pyx.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.paged.records cimport Sequence, SequenceRecords
from kvcache.paged.residual cimport Residual
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.victims cimport VictimOrder
from kvcache.support.shared_numbers cimport shared_int64


# The numbers of an array of n counts, NULL of None; or ValueError.
cdef const int64_t *counts_of(const int64_t[::1] counts, int64_t n, str name) except? NULL


# Of the tokens that a call is about: how many of the i-th sequence, NULL: one; and the first, NULL: of its last ones.
cdef inline int64_t count_at(const int64_t *counts, int64_t i) noexcept nogil:
    return 1 if counts == NULL else counts[i]


cdef inline int64_t start_at(const Sequence *seq, const int64_t *starts, int64_t i, int64_t count) noexcept nogil:
    return seq.tokens.num_tokens - count if starts == NULL else starts[i]


cdef class BlockTables:
    cdef readonly BlockPool pool
    cdef readonly int32_t block_size
    cdef SequenceRecords records
    cdef RunLists run_lists
    cdef readonly Residual residual    # None: there is none
    cdef readonly VictimOrder victims
    cdef readonly shared_int64 forks        # made, ever
    cdef int64_t calls                 # counts calls of `pick_`, for `Sequence.mark`
    cdef int32_t *picked               # (room,) rows of a call's ids, in their order
    cdef int64_t *more_rows            # (room,) rows in f16 that the last `append_` or `allocate_` has added to each
    cdef int64_t room

    # Fill `picked`, which keeps it until the next call. `pick_` refuses an id that is named twice.
    cdef int find_(self, const uint64_t *ids, int64_t n) except -1
    cdef int pick_(self, const uint64_t *ids, int64_t n) except -1

    # The verbs, all or nothing; each leaves the rows of `ids` in `picked`. counts NULL: one token each.
    cdef int allocate_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1
    cdef int append_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1
    cdef int fork_(self, const uint64_t *sources, const uint64_t *targets, int64_t n) except -1
    cdef int truncate_(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1
    cdef int free_(self, const uint64_t *ids, int64_t n) except -1
    cdef bint end_(self, int32_t row) noexcept                # True: a block has one reference left
    cdef object compact_(self, uint64_t seq_id)               # see RunLists.compact_
    cdef int keep_(self, int32_t row, const int64_t *bounds, int64_t ranges) except -1    # see `select_` of RunLists
    cdef int pack_(self, uint64_t seq_id, int64_t num_tokens) except -1     # the first tokens are read packed
    cdef void share_(self, const Sequence *source, Sequence *target) noexcept nogil    # all runs, into reserved room

    cdef object _count_references(self, BlockPool pool, bint residual)    # of all sequences, int32 (num_blocks,)
    cdef int64_t _blocks_for(self, int64_t num_tokens, str name=*) except -1     # or ValueError
    cdef int _make_room(self, int64_t n) except -1
    # New rows in `picked`: for counts[i] tokens each, or, NULL, for the runs of picked[n + i].
    cdef int _start(self, const uint64_t *ids, const int64_t *counts, int64_t n) except -1
    # Rows in f16 for new tokens of the picked sequences: `more_rows`, blocks and room for runs.
    cdef int _reserve_rows(self, const int64_t *counts, int64_t n) except -1
    cdef void _append_rows(self, Sequence *seq, int64_t count, int64_t rows) noexcept nogil    # before its tokens

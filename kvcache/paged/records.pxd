"""One record per sequence, in a row of a table that outlives it.

A row without a sequence keeps its room for runs, and the next sequence takes it over: memory that is fresh from the
system costs more than everything else in an `allocate` or `fork`. What spare rows keep is at most a run per block.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.core.kernels cimport kvc_run
from kvcache.core.pool cimport BlockPool


cdef enum:
    RUN_STRIDE = 2    # int32s from one run's block to the next one's


cdef struct Sequence:
    uint64_t seq_id
    int64_t uid               # never used again, unlike seq_id: what a handle remembers
    kvc_run *runs             # (num_runs,) the tokens in the order of the text
    int64_t *positions        # (num_runs,) text position of each run's first token; NULL: no hole, i * block_size
    int64_t num_runs
    int64_t capacity          # runs there is room for
    int64_t num_tokens        # alive
    int64_t next_position     # of the next token in the text
    int64_t sink_tokens       # tokens before the StreamingLLM hole; 0 while there is none
    int64_t last_access       # value of the recency counter
    int64_t access_count
    int64_t priority
    int64_t pins              # while > 0, never an eviction target
    int64_t mark              # scratch of one batch call: finds an id that was named twice
    bint dense                # every run but the last is a whole block: token i lies in run i / block_size


cdef inline int64_t run_length(kvc_run run) noexcept nogil:
    return <int64_t>run.stop - run.first


# The text position of a run's first token.
cdef inline int64_t position_of(const Sequence *seq, int64_t run, int64_t block_size) noexcept nogil:
    return run * block_size if seq.positions == NULL else seq.positions[run]


cdef class SequenceRecords:
    cdef readonly BlockPool pool
    cdef readonly int32_t block_size
    cdef IdMap rows           # seq_id -> row of `seqs`
    cdef Sequence *seqs       # (capacity,) rows; one without a sequence has uid -1 and may keep its room for runs
    cdef int32_t capacity
    cdef int32_t[::1] spare   # (capacity,) rows free to use, a stack
    cdef int32_t num_spare
    cdef int64_t next_uid
    cdef int64_t run_room     # runs that all rows have room for, and positions: 8 bytes each
    cdef int64_t idle_room    # the part of it in spare rows; at most a run per block

    # Reading
    cdef int32_t row_of(self, uint64_t seq_id) except -1      # or SequenceNotFoundError
    cdef int64_t blocks_for(self, int64_t num_tokens) except -1               # or ValueError
    cdef int refuse_taken(self, uint64_t seq_id) except -1                    # or InvalidOperationError

    # Room: what can fail, before the first change
    cdef int grow_rows(self) except -1
    cdef int reserve_(self, int32_t row, int64_t num_runs) except -1
    cdef int reuse_(self, int32_t row, int64_t num_runs, bint holes) except -1    # of a spare row

    # Change
    # A new, empty sequence; `holes`: with positions of its own.
    cdef int32_t open_(self, uint64_t seq_id, int64_t num_runs, bint holes) except -1
    cdef bint close_(self, int32_t row) noexcept nogil   # drops its references and row; True if a block has one left
    cdef void drop_room_(self, Sequence *seq, bint keep_runs) noexcept nogil      # of a spare row

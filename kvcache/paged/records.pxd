"""One record per sequence, found by id, in a row of a table.

A row without a sequence keeps its room for runs, and the next sequence reuses it: memory that is fresh from the
system costs more than everything else in an `allocate` or `fork`. Spare rows keep room for `most_idle` runs at most.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.core.kernels cimport kvc_run


cdef enum:
    RUN_STRIDE = 2    # int32s from one run's block to the next one's


cdef struct Sequence:
    uint64_t seq_id
    int64_t uid               # never used again, unlike seq_id; -1 in a spare row
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


# Whether a run is the first one of its block.
cdef inline bint begins_block(const Sequence *seq, int64_t run) noexcept nogil:
    return run == 0 or seq.runs[run].block != seq.runs[run - 1].block


# Write the blocks, each once, to `out`, (>= num_runs,); returns how many.
cdef inline int64_t blocks_in_order(const Sequence *seq, int32_t *out) noexcept nogil:
    cdef int64_t run, count = 0
    for run in range(seq.num_runs):
        if begins_block(seq, run):
            out[count] = seq.runs[run].block
            count += 1
    return count


# Slots left in the last block.
cdef inline int64_t room_in_tail(const Sequence *seq, int64_t block_size) noexcept nogil:
    return block_size - seq.runs[seq.num_runs - 1].stop if seq.num_runs else 0


cdef class SequenceRecords:
    cdef IdMap row_by_id
    cdef Sequence *seqs       # (capacity,) rows
    cdef int32_t capacity
    cdef int32_t[::1] spare   # (capacity,) the rows without a sequence, a stack
    cdef int32_t num_spare
    cdef int64_t next_uid
    cdef int64_t run_room     # runs that all rows have room for, and positions: 8 bytes each
    cdef int64_t idle_room    # the part of it in spare rows
    cdef int64_t most_idle    # the bound of `idle_room`

    cdef int32_t find(self, uint64_t seq_id) except -1            # its row, or SequenceNotFoundError
    cdef int refuse_taken(self, uint64_t seq_id) except -1        # or InvalidOperationError

    # A row for a new, empty sequence with room for `num_runs` runs; `holes`: with positions of its own.
    cdef int32_t open_(self, uint64_t seq_id, int64_t num_runs, bint holes) except -1
    cdef void close_(self, int32_t row) noexcept nogil
    cdef void swap_ids_(self, int32_t first, int32_t second) noexcept nogil

    # Room for `num_runs` runs in all.
    cdef int reserve_(self, Sequence *seq, int64_t num_runs) except -1
    # Other arrays in place of the ones there were, each of `capacity` runs; `positions` may be NULL.
    cdef void replace_room_(self, Sequence *seq, kvc_run *runs, int64_t *positions, int64_t capacity) noexcept nogil

    cdef int _grow(self) except -1
    cdef int _reuse_room(self, Sequence *seq, int64_t num_runs, bint holes) except -1    # of a spare row
    cdef void _drop_room(self, Sequence *seq, bint keep_runs) noexcept nogil             # of a spare row

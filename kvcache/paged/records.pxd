"""One record per sequence, found by id, in a row of a table.

    sequence 7   tokens     its K and V, in the cache's formats      0 1 2 3 4 ........................... 140
                 residual   exact rows of some of them, in f16       0 .. 15                    128 ...... 140

Both are lists of runs, each over a store and a pool of its own. Without a residual the second one is empty. The `Span`
says which tokens have exact rows (paged/residual.pxd).

A row without a sequence keeps its room for runs, and the next sequence reuses it: memory that is fresh from the
system costs more than everything else in an `allocate` or `fork`. Spare rows keep room for `most_idle` runs at most.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core.idmap cimport IdMap
from kvcache.kernels.kernels cimport kvc_run


cdef enum:
    RUN_STRIDE = 2    # int32s from one run's block to the next one's


# Where tokens lie.
cdef struct RunList:
    kvc_run *runs             # (num_runs,) the tokens in the order of the text
    int64_t *positions        # (num_runs,) text position of each run's first token; NULL: no hole, i * block_size
    int64_t num_runs
    int64_t capacity          # runs there is room for
    int64_t num_tokens        # alive
    int64_t next_position     # of the next token in the text
    int64_t sink_tokens       # tokens before the StreamingLLM hole; 0 while there is none
    bint dense                # every run but the last is a whole block: token i lies in run i / block_size


# Which tokens of a sequence have exact rows: [0, firsts) and [base, num_tokens); all of them where `base` is 0.
cdef struct Span:
    int64_t firsts            # 0 where `base` is 0
    int64_t base


cdef struct Sequence:
    uint64_t seq_id
    int64_t uid               # never used again, unlike seq_id; -1 in a spare row
    RunList tokens
    RunList residual          # positions count its own tokens, without holes
    Span span
    int64_t last_access       # value of the recency counter
    int64_t access_count
    int64_t priority
    int64_t pins              # while > 0, never an eviction target
    int64_t mark              # scratch of one batch call: finds an id that was named twice


cdef inline int64_t run_length(kvc_run run) noexcept nogil:
    return <int64_t>run.stop - run.first


# The text position of a run's first token.
cdef inline int64_t position_of(const RunList *held, int64_t run, int64_t block_size) noexcept nogil:
    return run * block_size if held.positions == NULL else held.positions[run]


# Whether a run is the first one of its block.
cdef inline bint begins_block(const RunList *held, int64_t run) noexcept nogil:
    return run == 0 or held.runs[run].block != held.runs[run - 1].block


# Write the blocks, each once, to `out`, (>= num_runs,); returns how many.
cdef inline int64_t blocks_in_order(const RunList *held, int32_t *out) noexcept nogil:
    cdef int64_t run, count = 0
    for run in range(held.num_runs):
        if begins_block(held, run):
            out[count] = held.runs[run].block
            count += 1
    return count


# Slots left in the last block.
cdef inline int64_t room_in_tail(const RunList *held, int64_t block_size) noexcept nogil:
    return block_size - held.runs[held.num_runs - 1].stop if held.num_runs else 0


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
    cdef int64_t uid_(self, uint64_t seq_id) noexcept             # see `BlockTables.uid`
    cdef int refuse_taken(self, uint64_t seq_id) except -1        # or InvalidOperationError

    # A row for a new, empty sequence: room for the given numbers of runs of its tokens and residual, -1: it has none.
    # `holes`: the tokens have positions of their own.
    cdef int32_t open_(self, uint64_t seq_id, int64_t num_runs, bint holes, int64_t residual_runs) except -1
    cdef void close_(self, int32_t row) noexcept
    cdef void swap_ids_(self, int32_t first, int32_t second) noexcept

    # Room for `num_runs` runs in all.
    cdef int reserve_(self, RunList *held, int64_t num_runs) except -1
    # Other arrays in place of the ones there were, each of `capacity` runs; `positions` may be NULL.
    cdef void replace_room_(self, RunList *held, kvc_run *runs, int64_t *positions, int64_t capacity) noexcept nogil

    cdef int _grow(self) except -1
    cdef int _reuse_room(self, RunList *held, int64_t num_runs, bint holes) except -1    # of a spare row
    cdef void _leave_room(self, RunList *held) noexcept nogil                            # in a row that is spare now
    cdef void _drop_room(self, RunList *held, bint keep_runs) noexcept nogil             # of a spare row

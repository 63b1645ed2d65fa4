"""Where tokens lie: a list of runs, and every change of one.

    sequence 7     runs   (B4, 0, 16) (B9, 0, 16) (B2, 0, 5)          37 tokens, positions 0..36
    after a hole          (B4, 0, 4)              (B2, 1, 5)           4 sinks, then 33..36

A run is consecutive slots of one block that hold consecutive positions of the text. That one idea gives
partial tails, StreamingLLM's holes, scattered survivors of token eviction, and sharing: two sequences whose
runs name the same block share it. Runs of one block stand next to each other and count one reference.
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.kernels.kernels cimport kvc_run
from kvcache.paged.records cimport RunList, SequenceRecords


cdef class RunLists:
    cdef BlockPool pool
    cdef SequenceRecords records
    cdef int32_t block_size
    # Blocks that copy-on-write has replaced, until the owner of the bytes has copied them.
    cdef int32_t[::1] copy_src        # (>= num_copies,) block to copy from
    cdef int32_t[::1] copy_dst        # (>= num_copies,) block to copy to
    cdef int32_t num_copies
    # The runs that `slice_` has collected since its caller set `num_cut` to 0.
    cdef kvc_run *cut                 # (cut_capacity,)
    cdef int64_t cut_capacity
    cdef int64_t num_cut

    # Reading
    cdef bint shares_all(self, const RunList *held) noexcept nogil            # dropping it would free nothing
    cdef bint cut_is_shared(self) noexcept nogil                              # a block of `cut` is another holder's too
    # Blocks of these tokens that are shared; then `change` is added to the references on each of their blocks.
    cdef int64_t drop_(self, const RunList *held, int64_t start, int64_t stop, int32_t change) noexcept nogil
    cdef int slice_(self, const RunList *held, int64_t start, int64_t stop) except -1    # these tokens, onto `cut`
    cdef object copy_runs(self, const RunList *held)                          # RUN (num_runs,)
    cdef object copy_positions(self, const RunList *held)                     # int64 (num_runs,)
    cdef object distinct_blocks(self, const RunList *held)                    # int32, each once
    cdef int check_(self, const RunList *held, str where) except -1           # every invariant, or AssertionError

    # Changes; those that can fail do so before the first change
    # Blocks that `counts[i]` new tokens of each list take, NULL: one each, the copies of shared tails counted. The
    # lists are those of the sequences in these rows: their residuals, or their tokens.
    cdef int64_t blocks_to_append(self, const int32_t *rows, bint residual, const int64_t *counts,
                                  int64_t n) noexcept nogil
    cdef int reserve_copies_(self, int64_t count) except -1
    cdef bint step_(self, RunList *held) noexcept nogil                       # one token more in an own tail; or False
    cdef void extend_(self, RunList *held, int64_t count) noexcept nogil      # into reserved room and free blocks
    cdef void adopt_(self, RunList *held, const int32_t *blocks, int64_t num_tokens) noexcept nogil
    cdef void share_(self, const RunList *source, RunList *target) noexcept nogil      # into reserved room
    cdef void truncate_(self, RunList *held, int64_t num_tokens) noexcept nogil
    # Copy-on-write of these tokens, into free blocks and reserved copies.
    cdef void own_(self, RunList *held, int64_t start, int64_t stop) noexcept nogil
    # The tokens [first, stop) leave, into room for one run more, and positions count the others from then on.
    cdef void drop_between_(self, RunList *held, int64_t first, int64_t stop) noexcept nogil
    # The tokens bounds[2 * i] to bounds[2 * i + 1] alone, for each of the ranges, ascending and disjoint: `ranges_`
    # finds those of n tokens, `select_` lists them in memory of their own, which is there after an error too, and
    # `become_` takes that over.
    cdef int64_t ranges_(self, const RunList *held, const int64_t *indices, int64_t n, int64_t *bounds) except -1
    cdef int select_(self, const RunList *held, const int64_t *bounds, int64_t ranges, RunList *kept) except -1
    cdef void become_(self, RunList *held, const RunList *kept) noexcept nogil
    cdef void count_positions_(self, RunList *held) noexcept nogil            # positions without holes
    cdef object compact_(self, RunList *held)                                 # the moves, and blocks to release then

    cdef void _fill_tail(self, RunList *held, int64_t count) noexcept nogil
    cdef void _add_blocks(self, RunList *held, int64_t count) noexcept nogil
    cdef void _copy_on_write(self, RunList *held, int64_t run) noexcept nogil
    cdef int64_t _run_at(self, const RunList *held, int64_t token, int64_t *before) noexcept nogil
    cdef int grow_cut(self) except -1

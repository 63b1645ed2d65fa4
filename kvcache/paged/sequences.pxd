"""Where each sequence's tokens lie: a list of runs.

    sequence 7     runs   (B4, 0, 16) (B9, 0, 16) (B2, 0, 5)          37 tokens, positions 0..36
    after a hole          (B4, 0, 4)              (B2, 1, 5)           4 sinks, then 33..36

A run is consecutive slots of one block that hold consecutive positions of the text. That one idea gives
partial tails, StreamingLLM's holes, scattered survivors of token eviction, and sharing: two sequences whose
runs name the same block share it. Runs of one block stand next to each other and count one reference.
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.core.kernels cimport kvc_run, kvc_seq
from kvcache.paged.records cimport Sequence, SequenceRecords


cdef class SequenceRows(SequenceRecords):
    # What the last call wants copied before anything is written (copy-on-write), for the owner of the bytes.
    cdef int32_t[::1] copy_src        # (>= num_copies,) block to copy from
    cdef int32_t[::1] copy_dst        # (>= num_copies,) block to copy to
    cdef readonly int32_t num_copies
    # The runs of the last slice_().
    cdef kvc_run *cut
    cdef int64_t cut_capacity

    # Reading
    cdef int64_t slice_(self, int32_t row, int64_t start, int64_t stop) except -1   # fills `cut`, returns its length
    cdef void describe(self, int32_t row, int64_t num_queries, kvc_seq *out) noexcept nogil
    cdef int64_t need_(self, int32_t row, int64_t count) noexcept nogil       # blocks that `count` more tokens take

    # Room: what can fail, before the first change
    cdef int grow_cut(self) except -1
    cdef int reserve_copies_(self, int64_t count) except -1

    # Change
    cdef void extend_(self, int32_t row, int64_t count) noexcept nogil        # `count` more tokens
    cdef int64_t fill_tail_(self, int32_t row, int64_t count) noexcept nogil  # into the last block; how many went in
    cdef void add_blocks_(self, Sequence *seq, int64_t count) noexcept nogil      # into fresh blocks, count > 0
    cdef int own_(self, int32_t row, int64_t start, int64_t stop) except -1   # copy-on-write for tokens start..stop
    cdef void copy_on_write_(self, int32_t row, int64_t run) noexcept nogil
    cdef int keep_(self, int32_t row, const int64_t *bounds, int64_t num_ranges) except -1

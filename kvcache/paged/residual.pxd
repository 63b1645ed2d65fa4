"""Exact rows of some tokens beside packed ones: the newest tokens of each sequence, and its first ones.

Attention decreases with distance, so most of the rounding error comes from the last few tokens (KIVI, arXiv 2402.02750,
section 3.3). A text is divided into groups of `residual_length` tokens. A query reads its own group in f16 and all
earlier groups packed, but for the first tokens of the text, which every query reads in f16:

    text 0 .. 140   0 .. 15 in f16 | 16 .. 127 packed | 128 .. 140 in f16

All tokens are packed. Those of the span of a sequence have a row in f16 too, in its second run list. `base` is the
start of the group in which the last `append` began, so the queries of all new tokens find their groups.

    span (16, 128) of 141 tokens    0 .. 15 | 128 .. 140     29 rows
    span (0, 0) of 141 tokens       0 .. 140                 nothing was dropped yet

Without groups a query behind the first tokens reads these in f16 and all others packed: span (16, 141) of 141 tokens.
Tokens without a row in f16, such as those of blocks that `adopt` shares, are read packed. Evicted tokens count where
groups begin: a group begins where a multiple of its length is in the text.

The verbs of `BlockTables` change both lists of a sequence at once: check and reserve first, change afterwards.
"""

from libc.stdint cimport int64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.store cimport BlockStore
from kvcache.paged.records cimport Sequence, SequenceRecords, Span
from kvcache.paged.run_lists cimport RunLists


# Consecutive tokens of a sequence, and where the rows of these begin in its residual.
cdef struct Rows:
    int64_t first, stop, row


# The row of a token that has one.
cdef inline int64_t row_of(const Sequence *seq, int64_t token) noexcept nogil:
    return token if token < seq.span.firsts else seq.span.firsts + token - seq.span.base


cdef class Residual:
    cdef readonly BlockStore store
    cdef readonly BlockPool pool
    cdef RunLists run_lists            # of the second lists
    cdef readonly int64_t length       # tokens of a group; 0: there are no groups
    cdef readonly int64_t firsts       # first tokens that every query reads in f16

    cdef int make_room_(self, int64_t num_blocks) except -1  # at least `num_blocks` free ones; or an error of memory
    cdef int grow_to_(self, num_blocks) except -1

    # Spans of a sequence after a change, which is not made yet
    cdef int64_t group_of(self, const Sequence *seq, int64_t token) noexcept nogil    # where that begins, maybe < 0
    cdef Span appended(self, const Sequence *seq, int64_t count) noexcept nogil
    cdef Span packed(self, const Sequence *seq, int64_t token) noexcept nogil    # tokens before this one are packed
    # With rows of the first and the last tokens alone; ValueError: not these.
    cdef Span unpacked(self, const Sequence *seq, int64_t firsts, int64_t count) except *
    # The tokens bounds[2 * i] to bounds[2 * i + 1] alone; and which rows these have, at most twice as many ranges. The
    # group that the next token continues stays in f16, the groups before it leave.
    cdef Span thinned(self, const Sequence *seq, const int64_t *bounds, int64_t ranges, int64_t *row_bounds,
                      int64_t *row_ranges) noexcept nogil
    cdef int64_t rows_to_append(self, const Sequence *seq, int64_t count) noexcept nogil

    # Changes, into reserved room
    cdef void pack_(self, Sequence *seq, Span span) noexcept nogil     # drop the rows before the base of this span
    cdef void truncate_(self, Sequence *seq, int64_t num_tokens) noexcept nogil    # before its tokens are
    # The tokens of these that have rows, as at most two stretches; returns how many.
    cdef int find_rows(self, const Sequence *seq, int64_t first, int64_t stop, Rows *rows) noexcept nogil
    cdef int check_(self, const Sequence *seq) except -1               # every invariant, or AssertionError

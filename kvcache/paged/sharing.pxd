"""Changes of what many sequences of a table share, at once: runs handed on, and blocks copied before a write."""

from libc.stdint cimport int64_t, uint64_t

from kvcache.paged.records cimport RunList
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.tables cimport BlockTables


# Consecutive tokens of a list, and which of the rows of a call is that of the first one.
cdef struct Stretch:
    RunList *held
    int64_t first, stop
    int64_t row


# The sequence `ids[i]` gets the runs that `ids[rows[i]]` has, all or nothing.
cdef int reorder_runs(BlockTables table, const uint64_t *ids, const int64_t *rows, int64_t n) except -1
# Blocks that copy-on-write of these tokens takes, and that copy, into free blocks and reserved copies.
cdef int64_t blocks_to_own(RunLists run_lists, const Stretch *stretches, int64_t n) noexcept nogil
cdef void own_all(RunLists run_lists, const Stretch *stretches, int64_t n) noexcept nogil

"""What many sequences of a table share, changed at once: runs handed on, and blocks copied before a write."""

from libc.stdint cimport int64_t, uint64_t

from kvcache.paged.tables cimport BlockTables

# Both are all or nothing.
# The sequence `ids[i]` gets the runs that `ids[rows[i]]` has.
cdef int reorder_runs(BlockTables table, const uint64_t *ids, const int64_t *rows, int64_t n) except -1
# Copy-on-write of `counts[i]` tokens from `starts[i]` on of each picked sequence; NULL as for `count_at`, `start_at`.
cdef int own_runs(BlockTables table, const int64_t *starts, const int64_t *counts, int64_t n) except -1

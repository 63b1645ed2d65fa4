"""The sequences of a paged cache: block tables that say where tokens lie, a store that has their bytes, one lock.

A change of the tables and what it means for the bytes are one compiled call: no signal handler runs in between. With a
residual (paged/residual.pxd) this call changes both lists of a sequence, and what is written to a token that has a row
in f16 is stored twice.
"""

from libc.stdint cimport int64_t, uint64_t

from kvcache.core.locks cimport CallLock
from kvcache.core.kvrows cimport KvRows
from kvcache.core.store cimport BlockStore
from kvcache.paged.residual cimport Residual
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.sharing cimport Stretch
from kvcache.paged.tables cimport BlockTables


cdef class PagedSequences:
    cdef CallLock lock        # of table and store; taken by each call
    cdef BlockStore store
    cdef BlockTables table
    cdef Residual residual    # of the table; None: there is none
    cdef Stretch *stretches   # (capacity,) what a write is about: tokens of each sequence, then rows in f16
    cdef int64_t capacity

    # For the bytes, with the lock held. None of these takes memory.
    cdef void _clear_new(self, const int64_t *counts, int64_t n) noexcept     # the last tokens of the picked sequences
    cdef void _copy_blocks(self) noexcept                                     # what copy-on-write has ordered

    cdef int _expect(self, uint64_t seq_id, int64_t uid) except -1            # or InvalidOperationError
    # Raises unless rows of `count` tokens can be written to both.
    cdef int _check_outputs(self, int64_t layer, object keys, object values, int64_t count) except -1
    # `counts[i]` rows at tokens `starts[i]`.. of each sequence. starts NULL: its last ones; counts NULL: one each.
    # `name`: of the argument that says which tokens.
    cdef int _write(self, int64_t layer, const uint64_t *ids, const int64_t *starts, const int64_t *counts, int64_t n,
                    KvRows rows, str name) except -1
    cdef int _reserve_stretches(self, int64_t n) except -1
    cdef int64_t _find_rows(self, int64_t n) noexcept          # of n stretches, the rows in f16 behind them; how many
    # The runs of these stretches onto `cut`; whether no row of the call lies between those that they are.
    cdef bint _cut(self, RunLists lists, const Stretch *stretches, int64_t n) except -1
    # Rows at these tokens, into blocks of their own; `cut` has room for their runs.
    cdef void _store(self, BlockStore store, RunLists lists, int64_t layer, const Stretch *stretches, int64_t n,
                     KvRows rows) noexcept
    cdef int _unpack(self, uint64_t seq_id, list newest, list firsts) except -1

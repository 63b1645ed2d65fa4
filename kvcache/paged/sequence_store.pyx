"""The K and V of sequences: what a table's changes mean for the bytes of a store; see paged/sequence_store.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache.core cimport kernels
from kvcache.paged.batch cimport BatchTable
from kvcache.paged.records cimport Sequence
from kvcache.core.store cimport BlockStore

__all__ = ["SequenceStore"]


cdef class SequenceStore:
    """K and V of the sequences of one table, in the blocks of one store.

    Args:
        store: the `BlockStore` that the table's blocks lie in.
        table: the `BatchTable` that says which tokens lie where.
    """

    def __cinit__(self, BlockStore store not None, BatchTable table not None):
        self.store, self.table = store, table

    # A change of the table and what it means for the bytes, in one call: an interrupt cannot come in between.
    # New tokens read as zeros until they are written.

    def allocate(self, uint64_t seq_id, int64_t count):
        """`table.allocate`, of tokens that read as zeros."""
        self.table.allocate(seq_id, count)
        self.hand_out_(seq_id, count)

    def append(self, uint64_t seq_id, int64_t count):
        """`table.append`, of tokens that read as zeros."""
        self.table.append(seq_id, count)
        self.hand_out_(seq_id, count)

    def allocate_batch(self, seq_ids, const int64_t[::1] counts):
        """`table.allocate_batch`, of tokens that read as zeros."""
        self.table.allocate_batch(seq_ids, counts)
        self.hand_out_each_(counts.shape[0], counts)

    def append_batch(self, seq_ids):
        """`table.append_batch`, of tokens that read as zeros."""
        self.hand_out_each_(self.table.append_batch(seq_ids), None)

    def compact(self, uint64_t seq_id):
        """`table.compact`, and the moves that it orders."""
        self.store.move_slots(self.table.compact(seq_id))

    def write(self, layer, uint64_t seq_id, start, keys, values):
        """Store rows at tokens `start`.. of a sequence, copying shared blocks first; an access.

        Args:
            keys, values: float32 `(n, num_heads, head_dim)`; `start + n` at most the sequence's length.

        Raises:
            as `BlockStore.write`, and OutOfMemoryError: too few blocks are free for the copies.
        """
        cdef BatchTable table = self.table
        cdef const float[:, :, ::1] k = keys
        cdef const float[:, :, ::1] v = values
        cdef int64_t first = start, count = k.shape[0], num_runs
        cdef unsigned char *base = self.store.layer_base(layer)
        cdef int32_t row = table.row_of(seq_id)
        self.store.represent_(k, v)
        table.own_(row, first, first + count)
        self.copy_on_write_()
        num_runs = table.slice_(row, first, first + count)
        if num_runs:
            # A sequence may have adopted more tokens of a block than were handed out there.
            self.store.say_written_(table.cut, num_runs)
            with nogil:
                kernels.write_runs(&self.store.layout, base, table.cut, num_runs, &k[0, 0, 0], &v[0, 0, 0])
        table.touch_(row)

    def write_batch(self, layer, const uint64_t[::1] seq_ids, keys, values):
        """Store one row each at the last tokens of many sequences, an access to each, in this order.

        Args:
            keys, values: float32 `(len(seq_ids), num_heads, head_dim)`.

        Raises:
            as `write`; ValueError also for a sequence without tokens or named twice. All or nothing,
            but for copies of shared blocks, which change no sequence's content.
        """
        cdef BatchTable table = self.table
        cdef const float[:, :, ::1] k = keys
        cdef const float[:, :, ::1] v = values
        cdef unsigned char *base = self.store.layer_base(layer)
        cdef int64_t i, n = seq_ids.shape[0], last
        cdef int32_t row
        self.store.represent_(k, v)
        if n == 0:
            return
        table.pick_(&seq_ids[0], n)
        for i in range(n):
            if table.seqs[table.picked[i]].num_tokens == 0:
                raise ValueError(f"expected sequences with tokens, got an empty one: {seq_ids[i]}")
        for i in range(n):
            row = table.picked[i]
            last = table.seqs[row].num_tokens
            table.own_(row, last - 1, last)
            self.copy_on_write_()
        for i in range(n):
            row = table.picked[i]
            last = table.seqs[row].num_tokens
            table.slice_(row, last - 1, last)
            self.store.say_written_(table.cut, 1)
            kernels.write_runs(&self.store.layout, base, table.cut, 1, &k[i, 0, 0], &v[i, 0, 0])
            table.touch_(row)

    def read(self, layer, uint64_t seq_id, start, stop):
        """Tokens `start`..`stop` of a sequence as `(keys, values)`, float32 `(n, num_heads, head_dim)` each."""
        cdef BatchTable table = self.table
        keys, values = self.store.new_rows(stop - start), self.store.new_rows(stop - start)
        cdef float[:, :, ::1] k = keys
        cdef float[:, :, ::1] v = values
        cdef unsigned char *base = self.store.layer_base(layer)
        cdef int64_t num_runs = table.slice_(table.row_of(seq_id), start, stop)
        if num_runs:
            with nogil:
                kernels.read_runs(&self.store.layout, base, table.cut, num_runs, &k[0, 0, 0], &v[0, 0, 0])
        return keys, values

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int hand_out_(self, uint64_t seq_id, int64_t count) except -1:
        cdef Sequence *seq = &self.table.seqs[self.table.row_of(seq_id)]
        self.copy_on_write_()
        self.store.hand_out_(seq.runs, seq.num_runs, count)
        return 0

    cdef void hand_out_each_(self, int64_t n, const int64_t[::1] counts) noexcept:
        cdef BatchTable table = self.table
        cdef BlockStore store = self.store
        cdef Sequence *seq
        cdef int64_t i
        self.copy_on_write_()
        for i in range(n):
            seq = &table.seqs[table.picked[i]]
            store.hand_out_(seq.runs, seq.num_runs, 1 if counts is None else counts[i])

    cdef void copy_on_write_(self) noexcept:
        cdef BatchTable table = self.table
        if table.num_copies:
            self.store.copy_(&table.copy_src[0], &table.copy_dst[0], table.num_copies)
            table.num_copies = 0

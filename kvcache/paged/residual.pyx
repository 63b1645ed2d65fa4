"""Which tokens of a sequence have exact rows, and the store of these; see paged/residual.pxd."""

from libc.stdint cimport int64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.store cimport BlockStore
from kvcache.paged.records cimport Sequence, Span
from kvcache.support.mapped cimport MappedMemory

from math import gcd

from kvcache.core.layer_formats import unpacked as unpacked_dtype
from kvcache.support.arguments import as_count

__all__ = ["Residual", "as_lengths", "refuse", "row_block"]


def as_lengths(residual_length, first_tokens, max_memory_bytes):
    """The arguments of `PagedKvCache`, as ints.

    Raises:
        TypeError, ValueError: no integers; above 256; more first tokens than a group has; a limit in bytes beside
            rows in f16, whose memory grows with the sequences.
    """
    length = as_count(residual_length, "residual_length", 0, 256)
    firsts = as_count(first_tokens, "first_tokens", 0, length or 256)
    if max_memory_bytes is not None:
        refuse("max_memory_bytes", length, firsts)
    return length, firsts


def row_block(length, firsts):
    """Tokens of a block of rows in f16: blocks end where groups and the first tokens do."""
    return gcd(length, firsts, 16)


def refuse(what, length, firsts):
    """Raise ValueError for an argument that rows in f16 exclude, if there are such rows."""
    if length or firsts:
        raise ValueError(f"{what}: expected residual_length and first_tokens 0 beside it, got {length} and {firsts}")


cdef class Residual:
    """The rows in f16 of all sequences of a table, in blocks of their own. Their memory grows with the sequences.

    Args:
        store: the `BlockStore` of the packed tokens; layers that store f32 have rows in f32.
        length, firsts: see residual.pxd.
    """

    def __cinit__(self, BlockStore store not None, int64_t length, int64_t firsts):
        self.length, self.firsts = length, firsts
        self.store = BlockStore(
            store.num_named, 0, row_block(length, firsts), store.num_heads, store.head_dim,
            unpacked_dtype(store.key_dtype), unpacked_dtype(store.value_dtype), "auto", store.value_head_dim,
            store.separate, store.layout.latent)
        self.pool = BlockPool(0)

    @property
    def nbytes(self):
        """Bytes of bookkeeping."""
        return self.pool.nbytes + self.store.bookkeeping + self.run_lists.nbytes

    @property
    def used_bytes(self):
        """Bytes of K and V of the blocks in use."""
        return self.store.block_bytes * self.pool.num_used

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int make_room_(self, int64_t num_blocks) except -1:
        if num_blocks > self.pool.num_free:
            self.grow_to_(<object>self.pool.num_blocks + max(num_blocks, self.pool.num_blocks))    # no sum wraps around
        return 0

    cdef int grow_to_(self, num_blocks) except -1:
        cdef MappedMemory memory
        if num_blocks > self.pool.num_blocks:
            memory = self.store.memory_for(num_blocks)
            self.pool.grow(num_blocks)
            self.store.move_to(memory, num_blocks)
        return 0

    cdef int64_t group_of(self, const Sequence *seq, int64_t token) noexcept nogil:
        return token - (token + seq.tokens.next_position - seq.tokens.num_tokens) % self.length

    cdef Span appended(self, const Sequence *seq, int64_t count) noexcept nogil:
        cdef int64_t stop = seq.tokens.num_tokens
        if count == 0:
            return seq.span
        if self.length:
            return self.packed(seq, self.group_of(seq, stop))
        return self.packed(seq, stop + count if seq.span.base or stop + count > self.firsts else 0)

    cdef Span packed(self, const Sequence *seq, int64_t token) noexcept nogil:
        cdef Span span = seq.span
        if token > span.base and (span.base or token >= self.firsts):
            span.firsts = span.firsts if span.base else self.firsts
            span.base = token
        return span

    cdef Span unpacked(self, const Sequence *seq, int64_t firsts, int64_t count) except *:
        cdef int64_t stop = seq.tokens.num_tokens, base = stop - count
        if firsts not in (0, self.firsts) or base < firsts:
            raise ValueError(f"firsts: expected {self.firsts} tokens or none, before the newest, got {firsts}")
        if count and (base < self.group_of(seq, stop - 1) if self.length else base or stop > self.firsts):
            group = self.length or self.firsts    # without groups the first tokens are one
            raise ValueError(f"newest: expected tokens of one group of {group}, got {count} before {stop}")
        return Span(firsts, base)

    cdef Span thinned(self, const Sequence *seq, const int64_t *bounds, int64_t ranges, int64_t *row_bounds,
                      int64_t *row_ranges) noexcept nogil:
        cdef Span left = self.packed(seq, self.group_of(seq, seq.tokens.num_tokens)) if self.length else seq.span
        cdef Span span = Span(0, 0)
        cdef int64_t i, first, stop, n = 0
        for i in range(ranges):
            first, stop = bounds[2 * i], min(bounds[2 * i + 1], left.firsts)
            if first < stop:
                row_bounds[2 * n], row_bounds[2 * n + 1] = first, stop
                n += 1
            span.firsts += max(0, stop - first)
            span.base += max(0, min(bounds[2 * i + 1], left.base) - first)
            first, stop = max(first, left.base), bounds[2 * i + 1]
            if first < stop:
                row_bounds[2 * n], row_bounds[2 * n + 1] = row_of(seq, first), row_of(seq, stop - 1) + 1
                n += 1
        row_ranges[0] = n
        return Span(0, 0) if span.firsts == span.base else span

    cdef int64_t rows_to_append(self, const Sequence *seq, int64_t count) noexcept nogil:
        if self.length:
            return count
        return 0 if seq.span.base else min(count, self.firsts - seq.tokens.num_tokens)

    cdef void pack_(self, Sequence *seq, Span span) noexcept nogil:
        cdef int64_t stop = row_of(seq, min(span.base, seq.tokens.num_tokens))
        if span.base > seq.span.base:
            self.run_lists.drop_between_(&seq.residual, span.firsts, min(stop, seq.residual.num_tokens))
        seq.span = span

    cdef void truncate_(self, Sequence *seq, int64_t num_tokens) noexcept nogil:
        if seq.span.base and num_tokens <= seq.span.firsts:
            seq.span.firsts = seq.span.base = 0
        seq.span.base = min(seq.span.base, num_tokens)
        self.run_lists.truncate_(&seq.residual, seq.span.firsts + num_tokens - seq.span.base)

    cdef int find_rows(self, const Sequence *seq, int64_t first, int64_t stop, Rows *rows) noexcept nogil:
        cdef int64_t head = min(stop, seq.span.firsts), tail = max(first, seq.span.base)
        cdef int n = 0
        if first < head:
            rows[n] = Rows(first, head, first)
            n += 1
        if tail < stop:
            rows[n] = Rows(tail, stop, seq.span.firsts + tail - seq.span.base)
            n += 1
        return n

    cdef int check_(self, const Sequence *seq) except -1:
        cdef int64_t rows = seq.span.firsts + seq.tokens.num_tokens - seq.span.base
        where = f"sequence {seq.seq_id}"
        assert 0 <= seq.span.firsts <= seq.span.base <= seq.tokens.num_tokens, f"{where}: a span out of range"
        assert seq.residual.num_tokens == rows, f"{where}: {seq.residual.num_tokens} rows in f16, expected {rows}"
        assert seq.residual.positions != NULL, f"{where}: its rows in f16 have no positions"
        self.run_lists.check_(&seq.residual, f"{where}, in f16")
        return 0

"""Attention over sequences of a table; see paged/attention.pxd."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from kvcache.core.arguments cimport overlap
from kvcache.core.attention cimport Attention
from kvcache.core.counts cimport saturating_sum
from kvcache.core.kernels cimport kvc_seq
from kvcache.core.locks cimport CallLock
from kvcache.core.store cimport BlockStore
from kvcache.paged.records cimport Sequence
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.paged.tables cimport BlockTables

import numpy as np

from kvcache.core.arguments import as_count, as_indices, as_integer, as_output

__all__ = ["SequenceAttention"]

cnp.import_array()

# Text positions: so many that no sum with a number of tokens overflows.
cdef int64_t MOST_START = 2 ** 62


cdef inline bint is_indices(object values):
    """Whether these are int64 `(n,)` as they are."""
    return type(values) is np.ndarray and cnp.PyArray_TYPE(values) == cnp.NPY_INT64 and cnp.PyArray_NDIM(values) == 1 \
        and cnp.PyArray_IS_C_CONTIGUOUS(values) and cnp.PyArray_ISALIGNED(values)


cdef class SequenceAttention:
    """softmax(q K^T scale) V over sequences of one table, in the blocks of one store.

    Args:
        lock: of the table and the store.
        store: the `BlockStore` that the table's blocks lie in.
        table: the `BlockTables` that say which tokens lie where.
    """

    def __cinit__(self, CallLock lock not None, BlockStore store not None, BlockTables table not None):
        self.lock, self.table, self.attention = lock, table, Attention(store)

    @property
    def nbytes(self):
        """Bytes of scratch that are kept from call to call."""
        return self.attention.nbytes

    def over(self, layer, queries, seq_ids, query_lens, scale, sink_queries, out, return_scores, context_lens,
             bint return_lse, window, softcap, sinks, starts, bint causal, mask, skip_tokens, bint touches=True):
        """Causal attention of several sequences in one call; counts as an access, if it `touches`.

        All else is as of `PagedKvCache.attention`. A call that raises has changed nothing.
        """
        cdef Attention attention = self.attention
        cdef int64_t number
        if type(layer) is int and -1 < layer < 2 ** 30:  # called once per layer of a step
            number = layer
        else:
            number = as_integer(layer, "layer")
        cdef float factor = attention.scale_(scale), cap = attention.softcap_(softcap)
        cdef int mass = self._mass(return_scores)
        cdef int64_t width = 0 if window is None else as_count(window, "window", 1)
        cdef int64_t skipped = 0
        if type(skip_tokens) is not int or skip_tokens:    # called once per layer of a step
            skipped = as_count(skip_tokens, "skip_tokens", 0, MOST_START)
        cdef cnp.ndarray q = attention.queries_(queries, "queries"), sink_q = None, lens = None, shown = None
        cdef cnp.ndarray ids = uint64_ids(seq_ids), logits = attention.sinks_(sinks, q)
        cdef cnp.ndarray first = None, parents = None, tree = None
        if sink_queries is not None:
            sink_q = attention.queries_(sink_queries, "sink_queries")
        if query_lens is not None:  # called once per layer of a step
            lens = query_lens if is_indices(query_lens) else as_indices(query_lens, "query_lens")
        if context_lens is not None:
            shown = as_indices(context_lens, "context_lens")
        if starts is not None:
            first = as_indices(starts, "starts")
        if mask is not None:
            tree = np.empty((2, q.shape[0]), np.int64)
            parents = as_indices(mask, "mask")
            if parents.shape[0] != q.shape[0]:
                raise ValueError(f"mask: expected {q.shape[0]} numbers, one per query, got {parents.shape[0]}")
            tree[0] = parents
        if not causal and (width or tree is not None):
            raise ValueError(f"causal: expected True beside {'window' if width else 'mask'}, got False")
        to = None if out is None else as_output(out)
        # All is converted: from here on only the library's own code runs.
        if sink_q is not None and not cnp.PyArray_SAMESHAPE(sink_q, q):
            raise ValueError(f"sink_queries: expected shape {np.shape(q)}, as of queries, got {np.shape(sink_q)}")
        cdef cnp.ndarray result = attention.result_(to, q)
        if out is not None:
            for name, other in (("queries", q), ("sink_queries", sink_q), ("seq_ids", ids), ("query_lens", lens),
                                ("context_lens", shown), ("sinks", logits), ("starts", first), ("mask", parents)):
                if other is not None and overlap(result, other):
                    raise ValueError(f"out: expected memory apart from {name}, got the same memory")
        cdef Sight sight = Sight(width, factor, cap, not causal, skipped)
        self.lock.enter()
        try:
            return self._attend(attention.store.named_layer(number), q, sink_q, ids, lens, shown, first, tree, &sight,
                                logits, result, result if out is None else out, mass, return_lse, touches)
        finally:
            self.lock.leave()

    def touch(self, seq_ids):
        """Count an access of sequences, integers `(n,)`; SequenceNotFoundError: one does not exist, and none counts."""
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        self.lock.enter()
        try:
            self.table.find_(<const uint64_t *>cnp.PyArray_DATA(ids), ids.shape[0])
            self._touch(ids.shape[0])
        finally:
            self.lock.leave()

    # -- below the shell ------------------------------------------------------------------------------------

    cdef object _attend(self, int64_t layer, cnp.ndarray q, cnp.ndarray sink_queries, cnp.ndarray ids,
                        cnp.ndarray lens, cnp.ndarray shown, cnp.ndarray starts, cnp.ndarray tree, const Sight *sight,
                        cnp.ndarray sinks, cnp.ndarray result, object given, int return_scores, bint return_lse,
                        bint touches):
        cdef int64_t i, n = ids.shape[0], tokens = 0
        cdef cnp.ndarray scores = None, lse = None
        self._describe(ids, lens, shown, starts, tree, sight, q.shape[0])
        if return_scores:
            for i in range(n):
                tokens += self.attention.seqs[i].num_tokens - self.attention.seqs[i].hidden_tokens
            scores = np.zeros(tokens if return_scores == 1 else (self.attention.store.num_heads, tokens), np.float32)
        if return_lse:
            lse = cnp.PyArray_EMPTY(2, q.shape, cnp.NPY_FLOAT32, 0)
        self.attention.attend_(layer, n, q, sink_queries, sight.scale, sight.softcap, sinks, result, scores,
                               lse)
        if touches:
            self._touch(n)
        if return_lse:
            return (given, scores, lse) if return_scores else (given, lse)
        return (given, scores) if return_scores else given

    cdef void _touch(self, int64_t n) noexcept:
        cdef int64_t i
        for i in range(n):
            self.table.victims.touched(self.table.picked[i])

    cdef int _mass(self, object return_scores) except -1:
        if isinstance(return_scores, str):
            if return_scores != "head":
                raise ValueError(f'return_scores: expected False, True or "head", got {return_scores!r:.100}')
            return BY_HEAD
        return bool(return_scores)

    cdef int _describe(self, cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown, cnp.ndarray starts, cnp.ndarray tree,
                       const Sight *sight, int64_t num_queries) except -1:
        cdef const uint64_t *id = <const uint64_t *>cnp.PyArray_DATA(ids)
        cdef const int64_t *show = NULL
        cdef const int64_t *length = NULL
        cdef const int64_t *first = NULL
        cdef int64_t *parents = NULL
        cdef int64_t i, n = ids.shape[0], total = 0
        cdef Sequence *seq
        cdef kvc_seq *out
        if lens is not None:
            if lens.shape[0] != n:
                raise ValueError(f"query_lens: expected {n} numbers, one per sequence, got {lens.shape[0]}")
            length = <const int64_t *>cnp.PyArray_DATA(lens)
        if shown is not None:
            if shown.shape[0] != n:
                raise ValueError(f"context_lens: expected {n} numbers, one per sequence, got {shown.shape[0]}")
            show = <const int64_t *>cnp.PyArray_DATA(shown)
        if starts is not None:
            if starts.shape[0] != n:
                raise ValueError(f"starts: expected {n} numbers, one per sequence, got {starts.shape[0]}")
            first = <const int64_t *>cnp.PyArray_DATA(starts)
        self.attention.reserve_seqs(n)
        self.table.find_(id, n)
        for i in range(n):
            seq = &self.table.records.seqs[self.table.picked[i]]
            out = self.attention.seq_(i)
            out.runs, out.num_runs, out.num_tokens = seq.runs, seq.num_runs, seq.num_tokens
            out.sink_tokens, out.window, out.whole = seq.sink_tokens, sight.window, sight.whole
            out.skipped_tokens = sight.skipped
            if first != NULL:
                if not 0 <= first[i] <= MOST_START:
                    raise ValueError(f"starts: expected 0 to 2**62 for sequence {id[i]}, got {first[i]}")
                out.start = first[i]
            out.num_queries = 1 if length == NULL else length[i]
            if show != NULL:
                if not 0 <= show[i] <= seq.num_tokens:
                    raise ValueError(f"context_lens: expected 0 to {seq.num_tokens} tokens of sequence {id[i]}, "
                                     f"got {show[i]}")
                out.hidden_tokens = seq.num_tokens - show[i]
            if out.num_queries < 0 or (out.num_queries > seq.num_tokens and not sight.whole):
                raise ValueError(f"query_lens: expected 0 to {seq.num_tokens} queries for sequence {id[i]}, "
                                 f"got {out.num_queries}")
            total = saturating_sum(total, out.num_queries)
        if total != num_queries:
            raise ValueError(f"queries: expected {total} rows, got {num_queries}")
        if tree is not None:
            parents = <int64_t *>cnp.PyArray_DATA(tree)
            for i in range(n):
                out = &self.attention.seqs[i]
                out.parents, out.depths = parents, parents + num_queries
                self._measure(id[i], out.num_queries, parents, parents + num_queries)
                parents += out.num_queries
        return 0

    cdef int _measure(self, uint64_t seq_id, int64_t count, const int64_t *parents, int64_t *depths) except -1:
        cdef int64_t i
        for i in range(count):
            if not -1 <= parents[i] < i:
                raise ValueError(f"mask: expected -1 to {i - 1} as parent of query {i} of sequence {seq_id}, "
                                 f"got {parents[i]}")
            depths[i] = 0 if parents[i] < 0 else depths[parents[i]] + 1
        return 0

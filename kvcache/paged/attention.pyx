"""Attention over the blocks of a store; see paged/attention.pxd. The kernels are in ckernels/kvc_attend.c."""

cimport numpy as cnp
from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc

from kvcache.core cimport kernels
from kvcache.core.arguments cimport is_plain
from kvcache.core.counts cimport saturating_sum
from kvcache.core.locks cimport CallLock
from kvcache.core.kernels cimport kvc_run, kvc_seq
from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.core.store cimport BlockStore
from kvcache.paged.table cimport SequenceTable

import numpy as np

from kvcache.core.arguments import as_floats, as_indices
from kvcache.errors import OutOfMemoryError

__all__ = ["Attention"]

cnp.import_array()


cdef bint overlap(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether two C-contiguous arrays share a byte."""
    cdef char *first = <char *>cnp.PyArray_DATA(a)
    cdef char *other = <char *>cnp.PyArray_DATA(b)
    return first < other + cnp.PyArray_NBYTES(b) and other < first + cnp.PyArray_NBYTES(a)


cdef class Attention:
    """softmax(q K^T scale) V over the blocks of one `BlockStore`.

    Args:
        store: where K and V lie.
    """

    def __cinit__(self, BlockStore store not None):
        self.store = store

    def __dealloc__(self):
        free(self.scratch)
        free(self.seqs)
        free(self.rows)

    def over_runs(self, layer, runs, queries, scale=None, out=None, bint return_scores=False):
        """`over_sequences` for the tokens at one list of runs (dtype `RUN`), whatever sequence they are of."""
        cdef const kvc_run[::1] view = self.store.runs_(runs, -1)
        cdef cnp.ndarray q = self.queries_(queries, "queries")
        cdef unsigned char *base = self.store.layer_base(layer)
        if q.shape[1] == 0 or q.shape[1] % self.store.layout.num_heads:
            raise ValueError(f"expected a multiple of {self.store.layout.num_heads} query heads, got {q.shape[1]}")
        cdef cnp.ndarray result = self.result_(out, q)
        cdef int64_t tokens = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        if q.shape[0] > tokens:
            raise ValueError(f"expected at most {tokens} queries, one per token, got {q.shape[0]}")
        self.reserve_seqs(1)
        self.seqs[0].runs = &view[0] if view.shape[0] else NULL
        self.seqs[0].num_runs, self.seqs[0].num_tokens = view.shape[0], tokens
        self.seqs[0].sink_tokens, self.seqs[0].num_queries, self.seqs[0].hidden_tokens = 0, q.shape[0], 0
        cdef cnp.ndarray scores = np.zeros(tokens, np.float32) if return_scores else None
        cdef double factor = 1.0 / sqrt(<double>self.store.layout.head_dim) if scale is None else scale
        self.attend_(base, 1, q, None, <float>factor, result, scores, None)
        return (result, scores) if return_scores else result

    def over_sequences(self, CallLock lock not None, SequenceTable table not None, int64_t layer, queries, seq_ids,
                       query_lens, scale, sink_queries, out, bint return_scores, context_lens=None,
                       bint return_lse=False):
        """softmax(q K^T scale) V over the blocks of several sequences, causal, in one call; counts as an access.

        Args:
            lock: of the table and the store; taken when everything below is converted, which may run any code.
            queries: `(total_queries, num_query_heads, head_dim)`, num_query_heads a multiple of num_heads.
            seq_ids, query_lens: integers `(n,)`; None is one query each. A sequence's queries stand on its last
                tokens.
            scale: a float, or None for `head_dim ** -0.5`.
            sink_queries: like `queries`, for the tokens before a StreamingLLM hole; or None.
            out: float32, C-contiguous, like `queries`, apart from all other arguments, written; None: a new array.
            return_scores: also return each token's attention mass, float32 `(total tokens seen,)`.
            context_lens: integers `(n,)`, how many of its first tokens each sequence shows; None is all.
            return_lse: also return the logarithm of each row's sum of exp(score), float32
                `(total_queries, num_query_heads)`.

        Raises:
            SequenceNotFoundError, IndexError, TypeError, ValueError: before anything has changed.
        """
        cdef double factor = 1.0 / sqrt(<double>self.store.layout.head_dim) if scale is None else scale
        cdef cnp.ndarray q = self.queries_(queries, "queries"), sinks = None, lens = None, shown = None
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        if sink_queries is not None:
            sinks = self.queries_(sink_queries, "sink_queries")
        if query_lens is not None:
            lens = as_indices(query_lens, "query_lens")
        if context_lens is not None:
            shown = as_indices(context_lens, "context_lens")
        # All is converted: from here on only the library's own code runs.
        if q.shape[1] == 0 or q.shape[1] % self.store.layout.num_heads:
            raise ValueError(f"expected a multiple of {self.store.layout.num_heads} query heads, got {q.shape[1]}")
        if sinks is not None and not cnp.PyArray_SAMESHAPE(sinks, q):
            raise ValueError(f"expected sink_queries of shape {np.shape(q)}, got {np.shape(sinks)}")
        cdef cnp.ndarray result = self.result_(out, q)
        if out is not None:
            for name, other in (("queries", q), ("sink_queries", sinks), ("seq_ids", ids), ("query_lens", lens),
                                ("context_lens", shown)):
                if other is not None and overlap(result, other):
                    raise ValueError(f"expected out apart from {name}, got the same memory")
        cdef unsigned char *base = self.store.layer_base(layer)
        lock.enter()
        try:
            return self.attend_sequences_(table, base, q, sinks, ids, lens, shown, <float>factor, result, return_scores,
                                          return_lse)
        finally:
            lock.leave()

    # -- below the shell ------------------------------------------------------------------------------------

    cdef object attend_sequences_(self, SequenceTable table, unsigned char *base, cnp.ndarray q, cnp.ndarray sinks,
                                  cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown, float scale, cnp.ndarray result,
                                  bint return_scores, bint return_lse):
        """`over_sequences` with the lock held and everything converted."""
        cdef int64_t i, n = ids.shape[0], tokens = 0
        cdef cnp.ndarray scores = None, lse = None
        self.reserve_seqs(n)
        self.describe_(table, ids, lens, shown, q.shape[0])
        if return_scores:
            for i in range(n):
                tokens += self.seqs[i].num_tokens - self.seqs[i].hidden_tokens
            scores = np.zeros(tokens, np.float32)
        if return_lse:
            lse = cnp.PyArray_EMPTY(2, q.shape, cnp.NPY_FLOAT32, 0)
        self.attend_(base, n, q, sinks, scale, result, scores, lse)
        for i in range(n):
            table.touch_(self.rows[i])
        if return_lse:
            return (result, scores, lse) if return_scores else (result, lse)
        return (result, scores) if return_scores else result

    cdef int reserve_seqs(self, int64_t count) except -1:
        if count <= self.seqs_capacity:
            return 0
        cdef kvc_seq *seqs = <kvc_seq *>realloc(self.seqs, count * sizeof(kvc_seq))
        if seqs == NULL:
            raise MemoryError(f"no memory for {count} sequences")
        self.seqs = seqs
        cdef int32_t *rows = <int32_t *>realloc(self.rows, count * sizeof(int32_t))
        if rows == NULL:
            raise MemoryError(f"no memory for {count} sequences")
        self.rows, self.seqs_capacity = rows, count
        return 0

    cdef cnp.ndarray queries_(self, object queries, str name):
        """`(n, heads, head_dim)` float32, as it is where it is that already."""
        if not is_plain(queries, cnp.NPY_FLOAT32, 3) or (<cnp.ndarray>queries).shape[2] != self.store.layout.head_dim:
            queries = as_floats(queries, (None, None, self.store.layout.head_dim), name)
        return queries

    cdef cnp.ndarray result_(self, object out, cnp.ndarray q):
        if out is None:
            return cnp.PyArray_EMPTY(3, q.shape, cnp.NPY_FLOAT32, 0)
        if not is_plain(out, cnp.NPY_FLOAT32, 3) or not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out) \
                or not cnp.PyArray_SAMESHAPE(<cnp.ndarray>out, q):
            raise ValueError(f"expected out to be C-contiguous, writeable float32 of shape {np.shape(q)}")
        return out

    cdef int describe_(self, SequenceTable table, cnp.ndarray ids, cnp.ndarray lens, cnp.ndarray shown,
                       int64_t num_queries) except -1:
        """Fill `seqs` and `rows`, and check that the queries add up."""
        cdef const uint64_t *id = <const uint64_t *>cnp.PyArray_DATA(ids)
        cdef const int64_t *numbers
        cdef int64_t i, n = ids.shape[0], total = n, tokens
        for i in range(n):
            self.rows[i] = table.row_of(id[i])
            table.describe(self.rows[i], 1, &self.seqs[i])
            self.seqs[i].hidden_tokens = 0
        if shown is not None:
            if shown.shape[0] != n:
                raise ValueError(f"expected {n} context_lens, got {shown.shape[0]}")
            numbers = <const int64_t *>cnp.PyArray_DATA(shown)
            for i in range(n):
                tokens = self.seqs[i].num_tokens
                if not 0 <= numbers[i] <= tokens:
                    raise ValueError(f"expected context_lens up to {tokens} for sequence {id[i]}, got {numbers[i]}")
                self.seqs[i].hidden_tokens = tokens - numbers[i]
        if lens is not None:
            if lens.shape[0] != n:
                raise ValueError(f"expected {n} query_lens, got {lens.shape[0]}")
            numbers = <const int64_t *>cnp.PyArray_DATA(lens)
            total = 0
            for i in range(n):
                self.seqs[i].num_queries = numbers[i]
                total = saturating_sum(total, max(numbers[i], 0))
        for i in range(n):
            if not 0 <= self.seqs[i].num_queries <= self.seqs[i].num_tokens:
                raise ValueError(f"expected 0 to {self.seqs[i].num_tokens} queries for sequence {id[i]}, "
                                 f"got {self.seqs[i].num_queries}")
        if total != num_queries:
            raise ValueError(f"expected {total} queries, got {num_queries}")
        return 0

    cdef int attend_(self, unsigned char *base, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray sink_queries,
                     float scale, cnp.ndarray out, cnp.ndarray scores, cnp.ndarray lse) except -1:
        cdef int heads = <int>queries.shape[1], threads = kernels.num_threads()
        if queries.shape[0] == 0 or num_seqs == 0:
            return 0
        cdef size_t size = kernels.attend_scratch_bytes(&self.store.layout, self.seqs, num_seqs, heads, threads)
        if size > self.scratch_bytes:
            free(self.scratch)
            self.scratch_bytes = 0
            self.scratch = malloc(size)
            if self.scratch == NULL:
                raise OutOfMemoryError(size, 0, "bytes")
            self.scratch_bytes = size
        cdef const float *q = <const float *>cnp.PyArray_DATA(queries)
        cdef const float *sinks = NULL
        cdef float *mass = NULL
        cdef float *logs = NULL
        if sink_queries is not None:
            sinks = <const float *>cnp.PyArray_DATA(sink_queries)
        if scores is not None:
            mass = <float *>cnp.PyArray_DATA(scores)
        if lse is not None:
            logs = <float *>cnp.PyArray_DATA(lse)
        cdef float *to = <float *>cnp.PyArray_DATA(out)
        with nogil:
            kernels.attend(&self.store.layout, base, self.seqs, num_seqs, heads, scale, q, sinks, to, mass, logs,
                           self.scratch, threads)
        return 0

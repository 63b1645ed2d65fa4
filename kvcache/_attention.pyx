"""Attention over the blocks of a store; see _attention.pxd. The kernels are in ckernels/kvc_attend.c."""

cimport numpy as cnp
from libc.math cimport sqrt
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc

from kvcache cimport _kernels
from kvcache._arrays cimport is_plain
from kvcache._kernels cimport kvc_run, kvc_seq
from kvcache._seq_ids cimport uint64_ids
from kvcache._store cimport BlockStore
from kvcache._table cimport SequenceTable

import numpy as np

from kvcache._arrays import as_floats, as_indices
from kvcache.errors import OutOfMemoryError

__all__ = ["Attention"]

cnp.import_array()


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

    def over_runs(self, layer, runs, queries, scale=None, out=None, bint return_scores=False):
        """`over_sequences` for the tokens at one list of runs (dtype `RUN`), whatever sequence they are of."""
        cdef unsigned char *base = self.store.layer_base(layer)
        cdef const kvc_run[::1] view = self.store.runs_(runs, -1)
        cdef cnp.ndarray q = self.queries_(queries, "queries")
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

    def over_sequences(self, SequenceTable table not None, int64_t layer, queries, seq_ids, query_lens, scale,
                       sink_queries, out, bint return_scores, context_lens=None, bint return_lse=False):
        """softmax(q K^T scale) V over the blocks of several sequences, causal, in one call; counts as an access.

        Args:
            queries: `(total_queries, num_query_heads, head_dim)`, num_query_heads a multiple of num_heads.
            seq_ids, query_lens: integers `(n,)`; None is one query each. A sequence's queries stand on its last
                tokens.
            scale: a number, or None for `head_dim ** -0.5`.
            sink_queries: like `queries`, for the tokens before a StreamingLLM hole; or None.
            out: float32, C-contiguous, like `queries`, written; or None for a new array.
            return_scores: also return each token's attention mass, float32 `(total tokens seen,)`.
            context_lens: integers `(n,)`, how many of its first tokens each sequence shows; None is all.
            return_lse: also return the logarithm of each row's sum of exp(score), float32
                `(total_queries, num_query_heads)`.

        Raises:
            SequenceNotFoundError, IndexError, TypeError, ValueError: before anything has changed.
        """
        cdef unsigned char *base = self.store.layer_base(layer)
        cdef cnp.ndarray q = self.queries_(queries, "queries")
        cdef cnp.ndarray sinks = None
        if q.shape[1] == 0 or q.shape[1] % self.store.layout.num_heads:
            raise ValueError(f"expected a multiple of {self.store.layout.num_heads} query heads, got {q.shape[1]}")
        if sink_queries is not None:
            sinks = self.queries_(sink_queries, "sink_queries")
            if sinks.shape[0] != q.shape[0] or sinks.shape[1] != q.shape[1]:
                raise ValueError(f"expected sink_queries of shape {np.shape(queries)}, got {np.shape(sink_queries)}")
        cdef cnp.ndarray result = self.result_(out, q)
        cdef cnp.ndarray ids = uint64_ids(seq_ids)
        cdef const uint64_t *id = <const uint64_t *>cnp.PyArray_DATA(ids)
        cdef int64_t i, n = ids.shape[0], tokens = 0
        self.reserve_seqs(n)
        self.describe_(table, id, n, query_lens, context_lens, q.shape[0])
        cdef cnp.ndarray scores = None, lse = None
        if return_scores:
            for i in range(n):
                tokens += self.seqs[i].num_tokens - self.seqs[i].hidden_tokens
            scores = np.zeros(tokens, np.float32)
        if return_lse:
            lse = cnp.PyArray_EMPTY(2, q.shape, cnp.NPY_FLOAT32, 0)
        cdef double factor = 1.0 / sqrt(<double>self.store.layout.head_dim) if scale is None else scale
        self.attend_(base, n, q, sinks, <float>factor, result, scores, lse)
        for i in range(n):
            table.touch_(table.row_of(id[i]))
        if return_lse:
            return (result, scores, lse) if return_scores else (result, lse)
        return (result, scores) if return_scores else result

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int reserve_seqs(self, int64_t count) except -1:
        if count <= self.seqs_capacity:
            return 0
        cdef kvc_seq *seqs = <kvc_seq *>realloc(self.seqs, count * sizeof(kvc_seq))
        if seqs == NULL:
            raise MemoryError(f"no memory for {count} sequences")
        self.seqs, self.seqs_capacity = seqs, count
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
        cdef char *first = <char *>cnp.PyArray_DATA(<cnp.ndarray>out)
        cdef char *other = <char *>cnp.PyArray_DATA(q)
        if first < other + cnp.PyArray_NBYTES(q) and other < first + cnp.PyArray_NBYTES(<cnp.ndarray>out):
            raise ValueError("expected out apart from queries, got the same memory")
        return out

    cdef int describe_(self, SequenceTable table, const uint64_t *ids, int64_t n, object query_lens,
                       object context_lens, int64_t num_queries) except -1:
        """Fill `seqs` and check that the queries add up."""
        cdef const int64_t[::1] lens
        cdef int64_t i, total = n
        for i in range(n):
            table.describe(table.row_of(ids[i]), 1, &self.seqs[i])
            self.seqs[i].hidden_tokens = 0
        if context_lens is not None:
            lens = as_indices(context_lens, "context_lens")
            if lens.shape[0] != n:
                raise ValueError(f"expected {n} context_lens, got {lens.shape[0]}")
            for i in range(n):
                if not 0 <= lens[i] <= self.seqs[i].num_tokens:
                    raise ValueError(f"expected context_lens up to {self.seqs[i].num_tokens} for sequence {ids[i]}, "
                                     f"got {lens[i]}")
                self.seqs[i].hidden_tokens = self.seqs[i].num_tokens - lens[i]
        if query_lens is not None:
            lens = as_indices(query_lens, "query_lens")
            if lens.shape[0] != n:
                raise ValueError(f"expected {n} query_lens, got {lens.shape[0]}")
            total = 0
            for i in range(n):
                self.seqs[i].num_queries = lens[i]
                total += lens[i]
        for i in range(n):
            if not 0 <= self.seqs[i].num_queries <= self.seqs[i].num_tokens:
                raise ValueError(f"expected 0 to {self.seqs[i].num_tokens} queries for sequence {ids[i]}, "
                                 f"got {self.seqs[i].num_queries}")
        if total != num_queries:
            raise ValueError(f"expected {total} queries, got {num_queries}")
        return 0

    cdef int attend_(self, unsigned char *base, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray sink_queries,
                     float scale, cnp.ndarray out, cnp.ndarray scores, cnp.ndarray lse) except -1:
        cdef int heads = <int>queries.shape[1], threads = _kernels.num_threads()
        if queries.shape[0] == 0 or num_seqs == 0:
            return 0
        cdef size_t size = _kernels.attend_scratch_bytes(&self.store.layout, self.seqs, num_seqs, heads, threads)
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
            _kernels.attend(&self.store.layout, base, self.seqs, num_seqs, heads, scale, q, sinks, to, mass, logs,
                            self.scratch, threads)
        return 0

"""Attention over the blocks of a store; see core/block_attention.pxd. The kernels are in ckernels/kvc_attend.c."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memset

from kvcache.core.attention_call cimport AttentionCall
from kvcache.core.knownkeys cimport is_centred
from kvcache.core.kvrows cimport tensor_of, together
from kvcache.core.store cimport BlockStore
from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport kvc_attend_args, kvc_layout, kvc_run, kvc_seq
from kvcache.kernels.sparse cimport kvc_index_args, kvc_sparse_args
from kvcache.support.arguments cimport is_plain
from kvcache.support.recycled cimport new_floats

import numpy as np

from kvcache.errors import OutOfMemoryError
from kvcache.support.arguments import as_stored, described

__all__ = ["Attention"]

# The scale whose scores, which kernels have in powers of two, are plain products: times log2(e) it is 1.
cdef float LN2 = 0.6931471805599453

cnp.import_array()


cdef class Attention:
    """softmax(q K^T scale) V over the blocks of one `BlockStore`.

    Args:
        store: where K and V lie.
        residual: where those of residuals lie; None: there are none.
    """

    def __cinit__(self, BlockStore store not None, BlockStore residual=None):
        self.store, self.residual = store, residual

    def __dealloc__(self):
        free(self.scratch)
        free(self.seqs)
        free(self.residuals)

    @property
    def nbytes(self):
        """Bytes of scratch that are kept from call to call."""
        return self.scratch_bytes + <size_t>self.seqs_capacity * sizeof(kvc_seq) * (1 + (self.residual is not None))

    def over_runs(self, layer, runs, queries, AttentionCall call not None, out=None):
        """Causal attention over the tokens at one list of runs, the last query on the last token.

        Args:
            runs: dtype `RUN` `(r,)`.
            queries: `(n, num_query_heads, head_dim)`, as of `PagedKvCache.attention`; n at most the tokens.
            call: its scale, softcap and sinks; and whether to return each token's attention mass, float32 `(tokens,)`.
            out: float32 `(n, num_query_heads, value_head_dim)`, C-contiguous, written; None: a new array.

        Raises:
            IndexError, TypeError, ValueError: no such layer; other shapes or dtypes; `top_tokens` of the call.
        """
        if call.top_tokens:
            raise ValueError(f"top_tokens: expected None of runs, got {call.top_tokens}")
        cdef const kvc_run[::1] view = self.store.runs_(runs, -1)
        cdef cnp.ndarray q = self.queries_(queries, "queries")
        cdef cnp.ndarray logits = call.sinks_(q)
        cdef int64_t number = self.store.attended_layer(layer)
        cdef cnp.ndarray result = self.result_(out, q)
        cdef int64_t tokens = int(runs["stop"].astype(np.int64).sum() - runs["first"].astype(np.int64).sum())
        if q.shape[0] > tokens:
            raise ValueError(f"queries: expected at most {tokens} rows, one per token, got {q.shape[0]}")
        self.reserve_seqs(1)
        cdef kvc_seq *seq = self.seq_(0)
        seq.runs = &view[0] if view.shape[0] else NULL
        seq.num_runs, seq.num_tokens, seq.num_queries = view.shape[0], tokens, q.shape[0]
        cdef cnp.ndarray scores = np.zeros(tokens, np.float32) if call.return_scores else None
        self.attend_(number, 1, call, q, None, logits, result, scores, None)
        return (result, scores) if call.return_scores else result

    # -- below the shell ------------------------------------------------------------------------------------

    cdef cnp.ndarray queries_(self, object queries, str name):
        if not is_plain(queries, cnp.NPY_FLOAT32, 3) or (<cnp.ndarray>queries).shape[2] != self.store.layout.head_dim:
            queries = together(as_stored(queries, (None, None, self.store.layout.head_dim), name))
        cdef int64_t heads = (<cnp.ndarray>queries).shape[1]
        if heads == 0 or heads % self.store.layout.num_heads:
            raise ValueError(f"{name}: expected a multiple of {self.store.layout.num_heads} heads, got {heads}")
        return queries

    cdef cnp.ndarray result_(self, object out, cnp.ndarray queries):
        cdef cnp.npy_intp shape[3]
        shape[0], shape[1], shape[2] = queries.shape[0], queries.shape[1], self.store.layout.value_head_dim
        if out is None:
            return new_floats((shape[0], shape[1], shape[2]))
        if is_plain(out, cnp.NPY_FLOAT32, 3) and cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out) \
                and memcmp(cnp.PyArray_DIMS(<cnp.ndarray>out), shape, sizeof(shape)) == 0:
            return out
        raise ValueError(f"out: expected C-contiguous, writeable float32 of shape {(shape[0], shape[1], shape[2])}, "
                         f"got {described(out)}")

    cdef int reserve_seqs(self, int64_t count) except -1:
        cdef kvc_seq *grown
        if count > self.seqs_capacity:
            grown = <kvc_seq *>realloc(self.seqs, count * sizeof(kvc_seq))
            if grown == NULL:
                raise MemoryError(f"no memory for {count} sequences")
            self.seqs = grown
            if self.residual is not None:
                grown = <kvc_seq *>realloc(self.residuals, count * sizeof(kvc_seq))
                if grown == NULL:
                    raise MemoryError(f"no memory for {count} residuals")
                self.residuals = grown
            self.seqs_capacity = count
        return 0

    cdef kvc_seq *seq_(self, int64_t index) noexcept:
        memset(&self.seqs[index], 0, sizeof(kvc_seq))
        if self.residual is not None:
            memset(&self.residuals[index], 0, sizeof(kvc_seq))
        return &self.seqs[index]

    cdef int attend_(self, int64_t layer, int64_t num_seqs, AttentionCall call, cnp.ndarray queries,
                     cnp.ndarray sink_queries, cnp.ndarray sinks, cnp.ndarray out, cnp.ndarray scores,
                     cnp.ndarray lse, cnp.ndarray tokens=None, bint indexed=False) except -1:
        cdef kvc_attend_args args
        cdef int heads = <int>queries.shape[1], threads = kernels.num_threads()
        if queries.shape[0] == 0 or num_seqs == 0:
            return 0
        cdef const kvc_layout *layout = self.store.layouts.of_(layer)
        cdef bint centred = is_centred(self.store.known_(layer), self.store.layout.num_heads)
        if centred and (call.cap != 0 or sink_queries is not None):
            name = "softcap" if call.cap != 0 else "sink_queries"
            raise ValueError(f"{name}: expected none in a layer whose keys a calibration centres, got one")
        memset(&args, 0, sizeof(kvc_attend_args))
        args.layout, args.arena, args.seqs, args.num_seqs = layout, self.store.base_(layer), self.seqs, num_seqs
        args.num_query_heads, args.scale, args.softcap = heads, call.factor_(self.store.layout.head_dim), call.cap
        args.known = self.store.known_(layer)
        args.spill, args.spill_layer = self.store.spilled, 0 if self.store.separate else <int32_t>layer
        if self.residual is not None:
            args.residuals, args.residual_layout = self.residuals, self.residual.layouts.of_(layer)
            args.residual_arena = self.residual.base_(layer)
        args.queries, args.out = tensor_of(queries), <float *>cnp.PyArray_DATA(out)
        if sink_queries is not None:
            args.sink_queries = tensor_of(sink_queries)
        if sinks is not None:
            args.sinks = <const float *>cnp.PyArray_DATA(sinks)
            args.sink_stride = heads if cnp.PyArray_NDIM(sinks) == 2 else 0
        if scores is not None:
            args.scores = <float *>cnp.PyArray_DATA(scores)
            args.score_stride = scores.shape[1] if cnp.PyArray_NDIM(scores) == 2 else 0
        if lse is not None:
            args.lse = <float *>cnp.PyArray_DATA(lse)
        if call.top_tokens or tokens is not None:
            return self.attend_chosen_(0 if self.store.separate else layer, &args, call.top_tokens, tokens, indexed,
                                       threads)
        self.reserve_scratch(kernels.attend_scratch_bytes(layout, self.seqs, self.residuals, num_seqs, heads, threads))
        with nogil:
            kernels.attend(&args, self.scratch, threads)
        return self.store.expect_good_()

    cdef int attend_chosen_(self, int64_t layer, kvc_attend_args *args, int64_t top_tokens, cnp.ndarray tokens,
                            bint indexed, int threads) except -1:
        cdef kvc_sparse_args sparse
        memset(&sparse, 0, sizeof(kvc_sparse_args))
        if tokens is not None:
            sparse.listed, sparse.num_listed = <const int32_t *>cnp.PyArray_DATA(tokens), tokens.shape[2]
            sparse.all_up_to = tokens.shape[2] if indexed else -1
        else:
            self.store.reserve_summaries()
            sparse.summaries, sparse.top_tokens = self.store.page_summaries.of_(layer), top_tokens
        self.reserve_scratch(kernels.sparse_scratch_bytes(args, &sparse, threads))
        with nogil:
            kernels.attend_sparse(args, &sparse, self.scratch, threads)
        return self.store.expect_good_()

    cdef cnp.ndarray choose_(self, int64_t layer, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray weights,
                             int64_t most):
        cdef kvc_attend_args args
        cdef kvc_index_args index
        cdef int threads = kernels.num_threads()
        cdef cnp.ndarray chosen = np.empty((queries.shape[0], 1, most), np.int32)
        memset(&args, 0, sizeof(kvc_attend_args))
        args.layout, args.arena, args.seqs, args.num_seqs = (
            self.store.layouts.of_(layer), self.store.base_(layer), self.seqs, num_seqs)
        args.spill, args.spill_layer = self.store.spilled, <int32_t>layer
        args.num_query_heads, args.scale, args.queries = <int>queries.shape[1], LN2, tensor_of(queries)
        index.weights, index.most = <const float *>cnp.PyArray_DATA(weights), most
        index.chosen = <int32_t *>cnp.PyArray_DATA(chosen)
        self.reserve_scratch(kernels.index_scratch_bytes(&args, &index, threads))
        with nogil:
            kernels.index_tokens(&args, &index, self.scratch, threads)
        self.store.expect_good_()
        return chosen

    cdef int reserve_scratch(self, size_t size) except -1:
        if size > self.scratch_bytes:
            free(self.scratch)
            self.scratch_bytes = 0
            self.scratch = malloc(size)
            if self.scratch == NULL:
                raise OutOfMemoryError(size, 0, "bytes")
            self.scratch_bytes = size
        return 0

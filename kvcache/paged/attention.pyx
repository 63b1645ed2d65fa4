"""Attention over sequences of a table; see paged/attention.pxd."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc

from kvcache.core.attention_call cimport BY_HEAD, AttentionCall
from kvcache.core.block_attention cimport Attention
from kvcache.core.counts cimport saturating_sum
from kvcache.core.locks cimport CallLock
from kvcache.core.store cimport BlockStore
from kvcache.kernels.kernels cimport kvc_seq
from kvcache.kernels.sparse cimport KVC_ITEM_ROWS, KVC_PAGE
from kvcache.paged.queried cimport QueriedSequences
from kvcache.paged.records cimport RunList, Sequence
from kvcache.paged.residual cimport row_of
from kvcache.paged.run_lists cimport RunLists
from kvcache.paged.tables cimport BlockTables, count_at
from kvcache.support.arguments cimport overlap

import numpy as np

from kvcache.support.arguments import as_floats, as_integer, as_output, short

__all__ = ["SequenceAttention"]

cnp.import_array()

# The last text position: no sum of it with a number of tokens overflows.
cdef int64_t MOST_START = 2 ** 62

# The numbers of each sequence, NULL of None; or ValueError.
cdef const int64_t *numbers(cnp.ndarray array, int64_t n, str name) except? NULL:
    if array is None:
        return NULL
    if array.shape[0] != n:
        raise ValueError(f"{name}: expected {n} numbers, one per sequence, got {array.shape[0]}")
    return <const int64_t *>cnp.PyArray_DATA(array)


cdef void place(kvc_seq *out, const RunList *held) noexcept nogil:
    out.runs, out.num_runs = held.runs, held.num_runs
    out.num_tokens, out.sink_tokens = held.num_tokens, held.sink_tokens


cdef class SequenceAttention:
    """softmax(q K^T scale) V over sequences of one table, in the blocks of one store.

    Args:
        lock: of the table and the store.
        store: the `BlockStore` that the table's blocks lie in.
        table: the `BlockTables` that say which tokens lie where.
    """

    def __cinit__(self, CallLock lock not None, BlockStore store not None, BlockTables table not None):
        self.lock, self.table, self.residual = lock, table, table.residual
        self.attention = Attention(store, None if table.residual is None else table.residual.store)

    def __dealloc__(self):
        free(self.groups)

    @property
    def nbytes(self):
        """Bytes of scratch that are kept from call to call."""
        return self.attention.nbytes + self.groups_capacity * sizeof(QueryGroup)

    def over(self, layer, queries, QueriedSequences sequences not None, AttentionCall call not None, out=None,
             sink_queries=None, cnp.ndarray chosen=None):
        """Causal attention of several sequences in one call; counts as an access.

        All else is as of `PagedKvCache.attention`. A call that raises has changed nothing.

        Args:
            chosen: the lists of `choose`, of these queries: what they attend to; None: they attend to all.
        """
        cdef Attention attention = self.attention
        cdef int64_t number
        if self.residual is not None:
            self._refuse(sequences, call, sink_queries)
        if type(layer) is int and -1 < layer < 2 ** 30:  # called once per layer of a step
            number = layer
        else:
            number = as_integer(layer, "layer")
        cdef cnp.ndarray q = attention.queries_(queries, "queries"), sink_q = None, tree = None
        cdef cnp.ndarray logits = call.sinks_(q), parents = sequences.parents
        if sink_queries is not None:
            sink_q = attention.queries_(sink_queries, "sink_queries")
        if parents is not None:
            if parents.shape[0] != q.shape[0]:
                raise ValueError(f"mask: expected {q.shape[0]} numbers, one per query, got {parents.shape[0]}")
            if not call.causal:
                raise ValueError("causal: expected True beside mask, got False")
            if sequences.firsts is not None:
                raise ValueError("firsts: expected None beside mask, got an array")
            tree = np.empty((2, q.shape[0]), np.int64)
            tree[0] = parents
        to = None if out is None else as_output(out)
        # All is converted: from here on only the library's own code runs.
        if sink_q is not None and not cnp.PyArray_SAMESHAPE(sink_q, q):
            raise ValueError(f"sink_queries: expected shape {np.shape(q)}, as of queries, got {np.shape(sink_q)}")
        cdef cnp.ndarray result = attention.result_(to, q)
        if out is not None:
            for name, other in (("queries", q), ("sink_queries", sink_q), ("seq_ids", sequences.ids),
                                ("query_lens", sequences.lens), ("context_lens", sequences.shown), ("sinks", logits),
                                ("starts", sequences.starts), ("mask", parents), ("tokens", sequences.tokens)):
                if other is not None and overlap(result, other):
                    raise ValueError(f"out: expected memory apart from {name}, got the same memory")
        self.lock.enter()
        try:
            return self._attend(attention.store.attended_layer(number), sequences, call, q, sink_q, tree, logits,
                                result, result if out is None else out, chosen)
        finally:
            self.lock.leave()

    def choose(self, int64_t layer, queries, weights, QueriedSequences sequences not None, int64_t most, bint always):
        """The tokens that an indexer chooses for each query, int32 `(total_queries, 1, most)`; see `choose_tokens`.

        Args:
            always: whether it lists all tokens where no query sees more than `most`; if not, it is None then.
        """
        cdef Attention attention = self.attention
        cdef int64_t i, longest = 0, n = sequences.ids.shape[0]
        cdef int dim = attention.store.dim_(attention.store.named_layer(layer), 0)
        cdef cnp.ndarray q = as_floats(queries, (None, None, dim), "queries")
        cdef cnp.ndarray w = as_floats(weights, (q.shape[0], q.shape[1]), "weights")
        if not q.shape[1]:
            raise ValueError("queries: expected a head, got 0")
        self.lock.enter()
        try:
            self._describe(sequences, AttentionCall(), None, q.shape[0])
            for i in range(n):
                longest = max(longest, attention.seqs[i].num_tokens)
            if longest >= 2 ** 31:
                raise ValueError(f"seq_ids: expected sequences of fewer than 2**31 tokens, got {longest}")
            if longest <= most and not always:
                return None
            return attention.choose_(layer, n, q, w, most)
        finally:
            self.lock.leave()

    # -- below the shell ------------------------------------------------------------------------------------

    cdef object _attend(self, int64_t layer, QueriedSequences sequences, AttentionCall call, cnp.ndarray q,
                        cnp.ndarray sink_queries, cnp.ndarray tree, cnp.ndarray sinks, cnp.ndarray result,
                        object given, cnp.ndarray chosen):
        cdef Attention attention = self.attention
        cdef int64_t i, n = sequences.ids.shape[0], num_seqs = n, tokens = 0
        cdef cnp.ndarray scores = None, lse = None
        if self.residual is None:
            self._describe(sequences, call, tree, q.shape[0])
        else:
            self._describe_groups(sequences, call, q.shape[0])
            num_seqs = self.num_groups
        if call.top_tokens or sequences.tokens is not None:
            self._refuse_sparse(sequences, call, q, sink_queries, num_seqs)
        elif chosen is not None and (chosen.shape[0] != q.shape[0] or self.residual is not None):
            raise ValueError(f"chosen: expected lists of {q.shape[0]} queries in a cache without residual_length, "
                             f"got {chosen.shape[0]}")
        elif chosen is not None:
            self._refuse_holes("chosen", "an array", num_seqs)
        if call.return_scores:
            for i in range(num_seqs):
                tokens += attention.seqs[i].num_tokens - attention.seqs[i].hidden_tokens
                if self.residual is not None:
                    tokens += attention.residuals[i].num_tokens
            shape = (attention.store.num_heads, tokens) if call.return_scores == BY_HEAD else (tokens,)
            scores = np.zeros(shape, np.float32)
        if call.return_lse:
            lse = cnp.PyArray_EMPTY(2, q.shape, cnp.NPY_FLOAT32, 0)
        attention.attend_(layer, num_seqs, call, q, sink_queries, sinks, result, scores, lse,
                          sequences.tokens if chosen is None else chosen, chosen is not None)
        if call.return_scores and self.residual is not None:
            scores = self._collect_masses(scores, sequences.shown, n)
        self._touch(n)
        if call.return_lse:
            return (given, scores, lse) if call.return_scores else (given, lse)
        return (given, scores) if call.return_scores else given

    cdef int _refuse_sparse(self, QueriedSequences sequences, AttentionCall call, cnp.ndarray q, object sink_queries,
                            int64_t num_seqs) except -1:
        cdef int64_t size = self.attention.store.layout.block_size, heads = self.attention.store.num_heads
        cdef str own = "top_tokens" if sequences.tokens is None else "tokens"
        got = call.top_tokens if sequences.tokens is None else "an array"
        if call.top_tokens and sequences.tokens is not None:
            raise ValueError(f"top_tokens: expected None beside tokens, got {call.top_tokens}")
        call.check_plain_(own)
        for name, value in (("sink_queries", sink_queries), ("starts", sequences.starts), ("mask", sequences.parents),
                            ("firsts", sequences.firsts)):
            if value is not None:
                raise ValueError(f"{name}: expected None beside {own}, got {short(value.tolist())}")
        if call.top_tokens and self.attention.store.layout.latent:
            raise ValueError(f"{own}: expected None with latent, got {got}")
        if size % KVC_PAGE and not self.attention.store.layout.latent:    # whose lists are read row by row
            raise ValueError(f"block_size: expected a multiple of {KVC_PAGE} with {own}, got {size}")
        if call.top_tokens and q.shape[1] > KVC_ITEM_ROWS * heads:
            raise ValueError(f"{own}: expected None with more than {KVC_ITEM_ROWS} query heads of a KV head, got {got}")
        self._refuse_holes(own, got, num_seqs)
        if sequences.tokens is not None:
            self._check_listed(sequences.tokens, q, num_seqs)
        return 0

    cdef int _refuse_holes(self, str own, object got, int64_t num_seqs) except -1:
        cdef int64_t i, size = self.attention.store.layout.block_size
        cdef const kvc_seq *seq
        for i in range(num_seqs):
            seq = &self.attention.seqs[i]
            # All blocks but the last are full, and there was no StreamingLLM hole: tokens are text positions.
            if seq.num_tokens and (seq.runs[0].first or seq.sink_tokens or seq.num_tokens >= 2**31 or
                                   seq.num_runs * size != seq.num_tokens + size - seq.runs[seq.num_runs - 1].stop):
                raise ValueError(f"{own}: expected None for sequences that lost tokens to eviction, got {got}")
        return 0

    cdef int _check_listed(self, cnp.ndarray tokens, cnp.ndarray q, int64_t num_seqs) except -1:
        cdef int64_t i, j, _h, k, seen, shown, heads = self.attention.store.num_heads, n = tokens.shape[2]
        cdef const int32_t *row = <const int32_t *>cnp.PyArray_DATA(tokens)
        cdef const kvc_seq *seq
        cdef int64_t last
        if tokens.shape[0] != q.shape[0] or tokens.shape[1] != heads:
            raise ValueError(f"tokens: expected shape {(q.shape[0], heads, n)}, got {np.shape(tokens)}")
        for i in range(num_seqs):
            seq = &self.attention.seqs[i]
            shown = seq.num_tokens - seq.hidden_tokens
            for j in range(seq.num_queries):
                seen = min(shown, seq.num_tokens - seq.num_queries + j + 1)
                for _h in range(heads):
                    last = -1
                    for k in range(n):
                        if row[k] < 0 and (k == n - 1 or row[k + 1] < 0):
                            continue
                        if not last < row[k] < seen:
                            raise ValueError(f"tokens: expected ascending ones below {seen} for query {j} of sequence "
                                             f"{i} of the call, then -1, got {row[k]} behind {last}")
                        last = row[k]
                    row += n
        return 0

    cdef void _touch(self, int64_t n) noexcept:
        cdef int64_t i
        for i in range(n):
            self.table.victims.touched(self.table.picked[i])

    cdef int _describe(self, QueriedSequences sequences, AttentionCall call, cnp.ndarray tree,
                       int64_t num_queries) except -1:
        cdef const uint64_t *id = <const uint64_t *>cnp.PyArray_DATA(sequences.ids)
        cdef int64_t i, n = sequences.ids.shape[0], total = 0
        cdef const int64_t *length = numbers(sequences.lens, n, "query_lens")
        cdef const int64_t *show = numbers(sequences.shown, n, "context_lens")
        cdef const int64_t *first = numbers(sequences.starts, n, "starts")
        cdef const int64_t *firsts = NULL
        cdef int64_t *parents = NULL
        cdef Sequence *seq
        cdef kvc_seq *out
        self.attention.reserve_seqs(n)
        self.table.find_(id, n)
        for i in range(n):
            seq = &self.table.records.seqs[self.table.picked[i]]
            out = self.attention.seq_(i)
            place(out, &seq.tokens)
            out.window, out.chunked, out.skipped_tokens = call.width, call.chunked, call.skip_tokens
            out.whole = not call.causal and call.width == 0
            out.ahead = 0 if call.causal or call.width == 0 else min(call.width - 1, MOST_START)
            if first != NULL:
                if not 0 <= first[i] <= MOST_START:
                    raise ValueError(f"starts: expected 0 to 2**62 for sequence {id[i]}, got {first[i]}")
                out.start = first[i]
            out.num_queries = 1 if length == NULL else length[i]
            if show != NULL:
                if not 0 <= show[i] <= out.num_tokens:
                    raise ValueError(f"context_lens: expected 0 to {out.num_tokens} tokens of sequence {id[i]}, "
                                     f"got {show[i]}")
                out.hidden_tokens = out.num_tokens - show[i]
            if out.num_queries < 0 or (out.num_queries > out.num_tokens and not out.whole):
                raise ValueError(f"query_lens: expected 0 to {out.num_tokens} queries for sequence {id[i]}, "
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
        if sequences.firsts is not None:
            if sequences.firsts.shape[0] != num_queries:
                raise ValueError(f"firsts: expected {num_queries} numbers, one per query, "
                                 f"got {sequences.firsts.shape[0]}")
            firsts = <const int64_t *>cnp.PyArray_DATA(sequences.firsts)
            for i in range(n):
                out = &self.attention.seqs[i]
                out.firsts = firsts
                self._check_firsts(id[i], out.num_queries, firsts)
                firsts += out.num_queries
        return 0

    cdef int _check_firsts(self, uint64_t seq_id, int64_t count, const int64_t *firsts) except -1:
        cdef int64_t i, before = 0
        for i in range(count):
            if firsts[i] < before:
                raise ValueError(f"firsts: expected at least {before} of query {i} of sequence {seq_id}, none below "
                                 f"that of the query before, got {firsts[i]}")
            before = firsts[i]
        return 0

    cdef int _measure(self, uint64_t seq_id, int64_t count, const int64_t *parents, int64_t *depths) except -1:
        cdef int64_t i
        for i in range(count):
            if not -1 <= parents[i] < i:
                raise ValueError(f"mask: expected -1 to {i - 1} as parent of query {i} of sequence {seq_id}, "
                                 f"got {parents[i]}")
            depths[i] = 0 if parents[i] < 0 else depths[parents[i]] + 1
        return 0

    # -- with a residual ------------------------------------------------------------------------------------

    cdef int _refuse(self, QueriedSequences sequences, AttentionCall call, object sink_queries) except -1:
        for name, value in (("sink_queries", sink_queries), ("window", call.window), ("starts", sequences.starts),
                            ("mask", sequences.parents), ("tokens", sequences.tokens), ("firsts", sequences.firsts)):
            if value is not None:
                lengths = f"residual_length {self.residual.length} and first_tokens {self.residual.firsts}"
                got = short(value.tolist() if isinstance(value, np.ndarray) else value)
                raise ValueError(f"{name}: expected None with {lengths}, got {got}")
        return 0

    cdef int _describe_groups(self, QueriedSequences sequences, AttentionCall call, int64_t num_queries) except -1:
        cdef const uint64_t *id = <const uint64_t *>cnp.PyArray_DATA(sequences.ids)
        cdef int64_t i, n = sequences.ids.shape[0], count, stop, most, total = 0, length = self.residual.length
        cdef const int64_t *counts = numbers(sequences.lens, n, "query_lens")
        cdef const int64_t *show = numbers(sequences.shown, n, "context_lens")
        cdef RunLists rows = self.residual.run_lists
        cdef Sequence *seq
        if show == NULL and call.causal:
            self.table.pick_(id, n)
        else:
            self.table.find_(id, n)    # a sequence may be named several times
        for i in range(n):
            seq = &self.table.records.seqs[self.table.picked[i]]
            count, stop = count_at(counts, i), self._num_shown(show, i)
            if not 0 <= stop <= seq.tokens.num_tokens:
                raise ValueError(f"context_lens: expected 0 to {seq.tokens.num_tokens} tokens of sequence {id[i]}, "
                                 f"got {stop}")
            most = max(0, stop - (seq.span.base if length else 0))
            most = most if show == NULL else min(most, 1)
            if call.causal and not 0 <= count <= most:
                group = ", from the group of its last append on" if length else ""
                raise ValueError(f"query_lens: expected 0 to {most} queries for sequence {id[i]}{group}, got {count}")
            if count < 0:
                raise ValueError(f"query_lens: expected 0 or more queries for sequence {id[i]}, got {count}")
            total = saturating_sum(total, count)
        if total != num_queries:
            raise ValueError(f"queries: expected {total} rows, got {num_queries}")
        self._reserve_groups(2 * n + (total // length if length and call.causal else 0))
        self.num_groups = rows.num_cut = 0
        for i in range(n):
            seq = &self.table.records.seqs[self.table.picked[i]]
            self._add_groups(i, seq, count_at(counts, i), self._num_shown(show, i), call)
        for i in range(self.num_groups):    # `cut` stays where it is from here on
            self.attention.residuals[i].runs = rows.cut + self.groups[i].first_run
        return 0

    cdef int _reserve_groups(self, int64_t count) except -1:
        cdef QueryGroup *grown
        self.attention.reserve_seqs(count)
        if count > self.groups_capacity:
            grown = <QueryGroup *>realloc(self.groups, count * sizeof(QueryGroup))
            if grown == NULL:
                raise MemoryError(f"no memory for {count} groups of queries")
            self.groups, self.groups_capacity = grown, count
        return 0

    cdef int _add_groups(self, int64_t text, const Sequence *seq, int64_t count, int64_t stop,
                         AttentionCall call) except -1:
        cdef int64_t firsts = seq.span.firsts if seq.span.base else self.residual.firsts, skip = call.skip_tokens
        cdef int64_t pos = stop - count, group, end, begin
        if not call.causal:    # queries behind the text, in none of its groups
            firsts = min(firsts, stop)
            return self._add_group(seq, count, stop, QueryGroup(text, skip, firsts, stop, stop, 0), True, True)
        if self.residual.length == 0:
            end = min(firsts, stop)
            if pos < end:    # first tokens, which see no packed one
                self._add_group(seq, end - pos, 0, QueryGroup(text, skip, 0, 0, end, 0), True, False)
                pos = end
            if pos < stop:
                self._add_group(seq, stop - pos, stop, QueryGroup(text, skip, firsts, stop, stop, 0), False, True)
            return 0
        while pos < stop:
            group = self.residual.group_of(seq, pos)
            end, begin = min(group + self.residual.length, stop), max(group, seq.span.base)
            if seq.span.base == 0 and begin < firsts:
                begin = 0
            self._add_group(seq, end - pos, begin, QueryGroup(text, skip, firsts if begin else 0, begin, end, 0), True,
                            False)
            pos = end
        return 0

    cdef int _add_group(self, const Sequence *seq, int64_t queries, int64_t context, QueryGroup group,
                        bint whole, bint near_whole) except -1:
        cdef RunLists rows = self.residual.run_lists
        cdef kvc_seq *packed = self.attention.seq_(self.num_groups)
        cdef kvc_seq *near = &self.attention.residuals[self.num_groups]
        place(packed, &seq.tokens)
        packed.num_queries = near.num_queries = queries
        packed.hidden_tokens, packed.whole, near.whole = packed.num_tokens - context, whole, near_whole
        packed.skipped_tokens = max(group.ahead, group.first)
        group.first = min(group.first, group.ahead)
        group.begin = min(max(group.begin, packed.skipped_tokens), group.end)
        group.first_run = rows.num_cut
        if group.first < group.ahead:
            rows.slice_(&seq.residual, group.first, group.ahead)
        if group.begin < group.end:
            rows.slice_(&seq.residual, row_of(seq, group.begin), row_of(seq, group.end - 1) + 1)
        near.num_runs = rows.num_cut - group.first_run
        near.num_tokens = group.ahead - group.first + group.end - group.begin
        self.groups[self.num_groups] = group
        self.num_groups += 1
        return 0

    cdef int64_t _num_shown(self, const int64_t *show, int64_t text) noexcept:
        return self.table.records.seqs[self.table.picked[text]].tokens.num_tokens if show == NULL else show[text]

    cdef object _collect_masses(self, cnp.ndarray parts, cnp.ndarray shown, int64_t n):
        cdef const int64_t *show = numbers(shown, n, "context_lens")
        cdef int64_t i, text = 0, tokens = 0, at = 0, first = 0, context
        cdef QueryGroup group
        for i in range(n):
            tokens += self._num_shown(show, i)
        shape = [tokens]
        if cnp.PyArray_NDIM(parts) == 2:
            shape.insert(0, parts.shape[0])
        masses = np.zeros(shape, np.float32)
        for i in range(self.num_groups):
            group = self.groups[i]
            while text < group.text:
                first += self._num_shown(show, text)
                text += 1
            context = self.attention.seqs[i].num_tokens - self.attention.seqs[i].hidden_tokens
            for begin, end in ((0, context), (group.first, group.ahead), (group.begin, group.end)):
                masses[..., first + begin : first + end] += parts[..., at : at + end - begin]
                at += end - begin
        return masses

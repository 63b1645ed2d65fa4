"""`PagedKvCache`: K and V of many sequences in blocks, written, read and attended over in place.

Its blocks are in paged_blocks.py, its sequences in paged_sequences.py, who of them leaves in paged_eviction.py.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_floats, as_integer, as_number, check_integers
from kvcache.core.store import BlockStore
from kvcache.errors import SequenceNotFoundError
from kvcache.eviction import EvictionStrategy
from kvcache.paged.attention import Attention
from kvcache.paged.eviction import EvictableSequences
from kvcache.paged.handle import PagedKvCacheHandle
from kvcache.paged.reports import CacheStats
from kvcache.paged.seq_ids import as_seq_id, as_seq_ids

__all__ = ["PagedKvCache"]

Float32 = npt.NDArray[np.float32]


class PagedKvCache(EvictableSequences):
    """K and V of many sequences in blocks of fixed size, shared between forks, attended in place.

    Args:
        num_blocks: blocks in all; their memory is mapped now and touched when first written.
        block_size: tokens per block, 1 to 256.
        num_heads: KV heads; queries may have any multiple of it.
        head_dim: channels per head, a multiple of 8, at most 256.
        num_layers: layers; every block holds its tokens' K and V of all of them.
        dtype: storage format, "f32", "f16", "q8", "q4", "q3" or "q2"; `key_dtype` and `value_dtype` name them apart.
            The quantised ones keep a scale and a minimum in f16 per token and head, and codes of exactly that
            many bits.
        rotate: whether quantised rows are stored under a Hadamard rotation, which spreads outlier channels
            (QuaRot, arXiv 2404.00456, section 4): "auto" where head_dim is a power of two, True, or False.
        eviction_strategy: who leaves first, by default `EvictionStrategy.LRU()`.
        eviction_threshold: share of blocks in use from which `needs_eviction` is true, clamped to [0, 1].

    Raises:
        TypeError, ValueError: a setting that is not supported.
        OutOfMemoryError: the system refuses the memory.

    Calls on one cache are serialised; the kernels run without the GIL. A call inside of another one on the same thread
    (from a signal handler or a finaliser) raises InvalidOperationError; `free` and `free_batch` are done when it ends.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        dtype: str = "f16",
        key_dtype: str | None = None,
        value_dtype: str | None = None,
        rotate: bool | str = "auto",
        eviction_strategy: EvictionStrategy | None = None,
        eviction_threshold: float = 0.9,
    ) -> None:
        check_integers(
            num_blocks=num_blocks, block_size=block_size, num_heads=num_heads, head_dim=head_dim, num_layers=num_layers
        )
        store = BlockStore(
            num_layers, num_blocks, block_size, num_heads, head_dim, key_dtype or dtype, value_dtype or dtype, rotate
        )
        super().__init__(store, eviction_strategy or EvictionStrategy.LRU(), eviction_threshold)
        self._attention = Attention(store)

    # -- K and V --------------------------------------------------------------------------------------------

    def write(
        self, layer: int, seq_id: int, keys: npt.ArrayLike, values: npt.ArrayLike, start: int | None = None
    ) -> None:
        """Store K and V of consecutive tokens in one layer; shared blocks are copied for this sequence first.

        Args:
            keys, values: `(num_tokens, num_heads, head_dim)`, float32 read without a copy.
            start: index of the first token; by default they are the sequence's last tokens.

        Raises:
            SequenceNotFoundError, IndexError: no such sequence, no such layer, tokens outside the sequence.
            TypeError, ValueError: another shape or dtype; values that the format cannot hold.
            OutOfMemoryError: too few blocks are free for the copies.
        """
        k, v = self._rows(keys, "keys"), self._rows(values, "values")
        if len(k) != len(v):
            raise ValueError(f"expected as many values as keys, {len(k)}, got {len(v)}")
        layer, seq_id = as_integer(layer, "layer"), as_seq_id(seq_id)
        first = None if start is None else as_integer(start, "start")
        with self._lock:
            n = self._table.num_tokens(seq_id)
            first = n - len(k) if first is None else first
            if first < 0 or first + len(k) > n:
                raise IndexError(f"expected tokens within [0, {n}), got [{first}, {first + len(k)})")
            self._sequences.write(layer, seq_id, first, k, v)

    def write_batch(self, layer: int, seq_ids: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Store K and V of the last token of each of many sequences, all or nothing.

        Args:
            keys, values: `(len(seq_ids), num_heads, head_dim)`.

        Raises:
            as `write`; ValueError also for a sequence named twice or without tokens.
        """
        ids = as_seq_ids(seq_ids)
        k, v = self._rows(keys, "keys"), self._rows(values, "values")
        if len(k) != len(ids) or len(v) != len(ids):
            raise ValueError(f"expected {len(ids)} rows of keys and values, got {len(k)} and {len(v)}")
        layer = as_integer(layer, "layer")
        with self._lock:
            self._sequences.write_batch(layer, ids, k, v)

    def read(self, layer: int, seq_id: int, start: int = 0, stop: int | None = None) -> tuple[Float32, Float32]:
        """`(keys, values)` of tokens `start`..`stop`, float32 `(n, num_heads, head_dim)` each.

        Raises:
            SequenceNotFoundError, IndexError: no such sequence, no such layer, tokens outside the sequence.
        """
        layer, seq_id, start = as_integer(layer, "layer"), as_seq_id(seq_id), as_integer(start, "start")
        stop = None if stop is None else as_integer(stop, "stop")
        with self._lock:
            return self._read(layer, seq_id, start, stop)

    def _read(self, layer: int, seq_id: int, start: int, stop: int | None) -> tuple[Float32, Float32]:
        n = self._table.num_tokens(seq_id)
        stop = n if stop is None else stop
        if not 0 <= start <= stop <= n:
            raise IndexError(f"expected 0 <= start <= stop <= {n}, got [{start}, {stop})")
        rows = self._sequences.read(layer, seq_id, start, stop)
        self._table.touch(seq_id)
        return rows

    def attention(
        self,
        layer: int,
        queries: npt.ArrayLike,
        seq_ids: npt.ArrayLike,
        *,
        query_lens: npt.ArrayLike | None = None,
        scale: float | None = None,
        sink_queries: npt.ArrayLike | None = None,
        out: Float32 | None = None,
        return_scores: bool = False,
        context_lens: npt.ArrayLike | None = None,
        return_lse: bool = False,
    ) -> Any:
        """softmax(q K^T scale) V straight over the blocks: decode, prefill chunks or both mixed in one call.

        Causal: the last query of a sequence stands on its last token, the one before on the token before.

        A query has the same output and log-sum-exp, bit for bit, whatever else is in the call and however many threads
        run it: alone, in a chunk of a prompt or beside other sequences. They depend on the query, the tokens it sees
        and the SIMD level; in quantised formats also on the slots of these tokens within their blocks.

        Args:
            queries: `(total_queries, num_query_heads, head_dim)`, num_query_heads a multiple of num_heads;
                query head h reads KV head h // (num_query_heads / num_heads).
            seq_ids: whose tokens, in the order of the queries.
            query_lens: queries of each sequence, by default one each.
            scale: by default head_dim ** -0.5.
            sink_queries: shaped like `queries`, used for the tokens before a StreamingLLM hole: the same
                queries under the RoPE of the shorter distance.
            out: float32, C-contiguous, shaped like `queries`: written and returned.
            return_scores: also return each token's attention mass, summed over queries and heads.
            context_lens: how many of its first tokens each sequence shows, by default all. Where a part of the
                context is attended elsewhere, `merge_attention` puts the parts together. A sequence may then be
                named several times, with different queries. Without a token to see, the output is 0.
            return_lse: also return the log-sum-exp of each query's scores, which merging needs; -inf of none.

        Returns:
            float32 `(total_queries, num_query_heads, head_dim)`; a tuple with what else was asked for, in this order:
            `return_scores`: float32 `(total tokens seen,)`, the sequences one after another;
            `return_lse`: float32 `(total_queries, num_query_heads)`, of natural logarithms.

        Raises:
            SequenceNotFoundError, IndexError: no such sequence, no such layer.
            TypeError, ValueError: other shapes or dtypes.
        """
        if scale is not None and not isfinite(scale := as_number(scale, "scale")):
            raise ValueError(f"expected a finite scale, got {scale}")
        if type(layer) is not int or not 0 <= layer < self._store.num_layers:  # a step comes here once per layer
            layer = as_integer(layer, "layer")
        return self._attention.over_sequences(
            self._lock, self._table, layer, queries, seq_ids, query_lens, scale, sink_queries, out,
            bool(return_scores), context_lens, bool(return_lse),
        )  # fmt: skip

    def _rows(self, x: npt.ArrayLike, name: str) -> Float32:
        return as_floats(x, (None, self._store.num_heads, self._store.head_dim), name)

    # -- views ----------------------------------------------------------------------------------------------

    def handle(self, seq_id: int) -> PagedKvCacheHandle:
        """A handle on one sequence.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        seq_id = as_seq_id(seq_id)
        with self._lock:
            uid = self._table.uid(seq_id)
            if uid < 0:
                raise SequenceNotFoundError(seq_id)
            return PagedKvCacheHandle(self, seq_id, uid)

    def stats(self) -> CacheStats:
        """The counters now."""
        with self._lock:
            pool = self._pool
            return CacheStats(
                pool.total_allocations,
                pool.total_frees,
                self._table.evictions,
                self._table.forks,
                pool.peak_used,
                pool.nbytes + self._table.nbytes + self._store.bookkeeping,
            )

    def __str__(self) -> str:
        used, total = self.used_block_count, self.total_blocks
        stats = self.stats()
        return (
            f"PagedKvCache\n"
            f"  strategy: {self.eviction_strategy}, block size: {self.block_size}\n"
            f"  blocks: {used}/{total} used ({100 * self.utilization:.1f}%)\n"
            f"  memory: {self.used_memory_bytes / 1e6:.2f}/{self.total_memory_bytes / 1e6:.2f} MB\n"
            f"  sequences: {self.num_sequences}\n"
            f"  allocs: {stats.total_allocations}, frees: {stats.total_frees}, "
            f"evictions: {stats.total_evictions}, forks: {stats.total_forks}"
        )

    def __repr__(self) -> str:
        return (
            f"PagedKvCache(num_blocks={self.total_blocks}, block_size={self.block_size}, num_heads={self.num_heads}, "
            f"head_dim={self.head_dim}, num_layers={self.num_layers}, key_dtype={self.key_dtype!r}, "
            f"value_dtype={self.value_dtype!r}, eviction_strategy={self.eviction_strategy}, "
            f"used_blocks={self.used_block_count}, num_sequences={self.num_sequences})"
        )

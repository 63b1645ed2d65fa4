"""`PagedKvCache`: block tables for sequences, and the K and V in the blocks.

Blocks of fixed size and a table per sequence are the design of PagedAttention (Kwon et al., SOSP 2023,
sections 4.1 to 4.3); sharing and copy-on-write follow its section 4.4.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache._arrays import as_floats, as_indices, as_integer
from kvcache._batch import BatchTable
from kvcache._pool import BlockPool
from kvcache._seq_ids import as_seq_ids
from kvcache._store import BlockStore
from kvcache.errors import BlockNotFoundError, InvalidOperationError, SequenceNotFoundError
from kvcache.eviction import EvictionStrategy
from kvcache.paged_handle import PagedKvCacheHandle
from kvcache.paged_info import BlockId, CacheStats, CsrBlockTable, SeqId, SequenceInfo

__all__ = ["PagedKvCache"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


class PagedKvCache:
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

    Calls on one cache are serialised; the kernels run without the GIL.
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
        for name, value in (
            ("num_blocks", num_blocks), ("block_size", block_size), ("num_heads", num_heads),
            ("head_dim", head_dim), ("num_layers", num_layers),
        ):  # fmt: skip
            as_integer(value, name)
        self._store = BlockStore(
            num_layers, num_blocks, block_size, num_heads, head_dim, key_dtype or dtype, value_dtype or dtype, rotate
        )
        self._pool = BlockPool(num_blocks)
        self._table = BatchTable(self._pool, block_size)
        self._lock = threading.RLock()
        # Others that hold references on our blocks (a prefix cache), each a function -> int32 (num_blocks,).
        self._holders: list[Callable[[], Int32]] = []
        self.with_eviction_strategy(eviction_strategy or EvictionStrategy.LRU())
        self.with_eviction_threshold(eviction_threshold)

    # -- configuration --------------------------------------------------------------------------------------

    def with_eviction_strategy(self, strategy: EvictionStrategy) -> PagedKvCache:
        """Choose who leaves first; returns the cache."""
        if not isinstance(strategy, EvictionStrategy):
            raise TypeError(f"expected an EvictionStrategy, got {type(strategy).__name__}")
        with self._lock:
            self._strategy = strategy
            self._table.rank_by(strategy.rank)
        return self

    def with_eviction_threshold(self, threshold: float) -> PagedKvCache:
        """Set the share of blocks in use from which `needs_eviction` is true, clamped to [0, 1]; returns the cache.

        Raises:
            ValueError: NaN.
        """
        if not threshold == threshold:
            raise ValueError("expected a threshold between 0 and 1, got nan")
        self._threshold = min(1.0, max(0.0, float(threshold)))
        return self

    @property
    def eviction_strategy(self) -> EvictionStrategy:
        """Who leaves first."""
        return self._strategy

    @property
    def eviction_threshold(self) -> float:
        """The share of blocks in use from which `needs_eviction` is true."""
        return self._threshold

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._store.num_layers

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self._store.num_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self._store.head_dim

    @property
    def key_dtype(self) -> str:
        """Storage format of K."""
        return self._store.key_dtype

    @property
    def value_dtype(self) -> str:
        """Storage format of V."""
        return self._store.value_dtype

    # -- capacity -------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def total_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def free_block_count(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    @property
    def used_block_count(self) -> int:
        """Blocks that somebody holds; a shared block counts once."""
        return self._pool.num_used

    @property
    def utilization(self) -> float:
        """Used blocks over all blocks; 0.0 for a cache without blocks."""
        return self._pool.num_used / self._pool.num_blocks if self._pool.num_blocks else 0.0

    @property
    def needs_eviction(self) -> bool:
        """Whether `utilization` has reached the threshold; nothing is evicted by itself."""
        return self.utilization >= self._threshold

    @property
    def block_memory_bytes(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self._store.block_bytes

    @property
    def total_memory_bytes(self) -> int:
        """Bytes of K and V of all blocks."""
        return self._store.nbytes

    @property
    def used_memory_bytes(self) -> int:
        """Bytes of K and V of the blocks in use."""
        return self._store.block_bytes * self._pool.num_used

    @property
    def num_sequences(self) -> int:
        """Sequences alive."""
        return len(self._table)

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

    # -- sequences ------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, num_tokens: int) -> None:
        """Start a sequence with room for `num_tokens` tokens, 0 allowed; unwritten tokens read as zeros.

        Raises:
            InvalidOperationError: the id is taken.
            OutOfMemoryError: too few blocks are free.
        """
        with self._lock:
            seq_id, count = self._id(seq_id), as_integer(num_tokens, "num_tokens")
            self._store.allocate(self._table, seq_id, count)

    def adopt(self, seq_id: int, block_ids: npt.ArrayLike, num_tokens: int) -> None:
        """Start a sequence whose first tokens lie in blocks that are in use already: shared, not copied.

        Args:
            block_ids: integers `(ceil(num_tokens / block_size),)`; the last block may be covered in part, and is
                then copied by the first append.

        Raises:
            InvalidOperationError: the id is taken.
            ValueError: the number of blocks does not fit `num_tokens`.
            BlockNotFoundError: a block is not in use.
        """
        with self._lock:
            self._table.adopt(self._id(seq_id), self._block_ids(block_ids), num_tokens)

    def append(self, seq_id: int, num_new_tokens: int) -> None:
        """Room for `num_new_tokens` more tokens, zeros until written; a shared tail block is copied first.

        Raises:
            SequenceNotFoundError: no such sequence.
            OutOfMemoryError: too few blocks are free, the copy counted.
        """
        with self._lock:
            seq_id, count = self._id(seq_id), as_integer(num_new_tokens, "num_new_tokens")
            self._store.append(self._table, seq_id, count)

    def append_batch(self, seq_ids: npt.ArrayLike) -> None:
        """Room for one more token in each of many sequences, all or nothing.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; one named twice.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        with self._lock:
            self._store.append_batch(self._table, seq_ids)

    def allocate_batch(self, seq_ids: npt.ArrayLike, num_tokens: npt.ArrayLike) -> None:
        """Start many sequences with room for as many tokens each, all or nothing.

        Args:
            num_tokens: integers `(len(seq_ids),)`.

        Raises:
            InvalidOperationError, ValueError: an id is taken; one named twice; another number of lengths.
            OutOfMemoryError: too few blocks are free for all of them together.
        """
        with self._lock:
            counts = as_indices(num_tokens, "token counts")
            self._store.allocate_batch(self._table, seq_ids, counts)

    def fork_batch(self, src_seqs: npt.ArrayLike, dst_seqs: npt.ArrayLike) -> None:
        """`fork` for many pairs, all or nothing; one source may have many forks.

        Raises:
            InvalidOperationError, ValueError: a target is taken; one named twice; not as many sources as targets.
            SequenceNotFoundError: a source is not there.
        """
        with self._lock:
            self._table.fork_batch(src_seqs, dst_seqs)

    def free_batch(self, seq_ids: npt.ArrayLike) -> None:
        """End many sequences, all or nothing.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; one named twice.
        """
        with self._lock:
            self._table.free_batch(seq_ids)

    def free(self, seq_id: int) -> None:
        """End a sequence and let go of its blocks.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        with self._lock:
            self._table.free(self._id(seq_id))

    def fork(self, src_seq: int, dst_seq: int) -> None:
        """Start `dst_seq` with the tokens of `src_seq`: every block shared until one of them writes to it.

        Raises:
            InvalidOperationError: `dst_seq` is taken.
            SequenceNotFoundError: there is no `src_seq`.
        """
        with self._lock:
            self._table.fork(self._id(src_seq), self._id(dst_seq))

    def swap(self, first_seq: int, second_seq: int) -> None:
        """Two sequences exchange their ids and handles: the way back to a fork. Takes no memory.

        Raises:
            SequenceNotFoundError: one of them is not there.
        """
        with self._lock:
            self._table.swap(self._id(first_seq), self._id(second_seq))

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, as after a rejected draft in speculative decoding.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; not between 0 and its length.
        """
        with self._lock:
            self._table.truncate(self._id(seq_id), as_integer(num_tokens, "num_tokens"))

    def keep_tokens(self, seq_id: int, indices: npt.ArrayLike) -> None:
        """Evict all tokens of a sequence but those at `indices` (ascending, among those alive).

        Blocks that hold none of them are freed; nothing is moved (see `compact`).

        Raises:
            SequenceNotFoundError, IndexError, ValueError: no such sequence; out of range; not ascending.
        """
        with self._lock:
            self._table.keep(self._id(seq_id), as_indices(indices, "token indices"))

    def compact(self, seq_id: int) -> None:
        """Move scattered tokens into as few blocks as they need, bit for bit.

        Without shared blocks they move within the sequence's own blocks; with shared ones to fresh blocks.

        Raises:
            SequenceNotFoundError: no such sequence.
            OutOfMemoryError: too few blocks are free for the fresh ones.
        """
        with self._lock:
            self._store.compact(self._table, self._id(seq_id))

    def get_sequence(self, seq_id: int) -> SequenceInfo | None:
        """A snapshot of one sequence, or None; not an access."""
        with self._lock:
            seq_id = self._id(seq_id)
            if seq_id not in self._table:
                return None
            tokens, position, last_access, count, priority, _, _ = self._table.info(seq_id)
            blocks = tuple(map(BlockId, self._table.blocks(seq_id).tolist()))
            return SequenceInfo(SeqId(seq_id), tokens, position, blocks, last_access, count, priority)

    def __contains__(self, seq_id: int) -> bool:
        """Whether there is such a sequence; takes no memory."""
        with self._lock:
            return self._id(seq_id) in self._table

    def sequence_ids(self) -> list[SeqId]:
        """Every id, ascending."""
        with self._lock:
            return list(map(SeqId, self._table.seq_ids()))

    def set_priority(self, seq_id: int, priority: int) -> None:
        """Under `EvictionStrategy.Priority(levels)` the lowest leaves first.

        Raises:
            SequenceNotFoundError: no such sequence.
            ValueError: negative, or not below `levels` where the strategy names them.
        """
        levels = self._strategy.levels
        if as_integer(priority, "priority") < 0 or (levels is not None and priority >= levels):
            raise ValueError(f"expected a priority in [0, {levels or 'any'}), got {priority}")
        with self._lock:
            self._table.set_priority(self._id(seq_id), priority)

    def pin(self, seq_id: int) -> None:
        """Never evict this sequence until it was unpinned as often as pinned.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        with self._lock:
            self._table.pin(self._id(seq_id))

    def unpin(self, seq_id: int) -> None:
        """
        Raises:
            SequenceNotFoundError: no such sequence.
            InvalidOperationError: it is not pinned.
        """
        with self._lock:
            self._table.unpin(self._id(seq_id))

    # -- data -----------------------------------------------------------------------------------------------

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
        with self._lock:
            seq_id = self._id(seq_id)
            n = self._table.num_tokens(seq_id)
            start = n - len(k) if start is None else as_integer(start, "start")
            if start < 0 or start + len(k) > n:
                raise IndexError(f"expected tokens within [0, {n}), got [{start}, {start + len(k)})")
            self._store.write_sequence(self._table, as_integer(layer, "layer"), seq_id, start, k, v)

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
        with self._lock:
            self._store.write_batch(self._table, as_integer(layer, "layer"), ids, k, v)

    def read(self, layer: int, seq_id: int, start: int = 0, stop: int | None = None) -> tuple[Float32, Float32]:
        """`(keys, values)` of tokens `start`..`stop`, float32 `(n, num_heads, head_dim)` each.

        Raises:
            SequenceNotFoundError, IndexError: no such sequence, no such layer, tokens outside the sequence.
        """
        with self._lock:
            seq_id = self._id(seq_id)
            n = self._table.num_tokens(seq_id)
            start, stop = as_integer(start, "start"), n if stop is None else as_integer(stop, "stop")
            if not 0 <= start <= stop <= n:
                raise IndexError(f"expected 0 <= start <= stop <= {n}, got [{start}, {stop})")
            rows = self._store.read_sequence(self._table, as_integer(layer, "layer"), seq_id, start, stop)
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
        if scale is not None and not isfinite(scale):
            raise ValueError(f"expected a finite scale, got {scale}")
        if type(layer) is not int or not 0 <= layer < self._store.num_layers:  # a step comes here once per layer
            layer = as_integer(layer, "layer")
        with self._lock:
            return self._store.attend_sequences(
                self._table, layer, queries, seq_ids, query_lens, scale, sink_queries, out, return_scores,
                context_lens, return_lse,
            )  # fmt: skip

    # -- eviction -------------------------------------------------------------------------------------------

    def select_eviction_target(self) -> SeqId | None:
        """The sequence that `evict` would take; None when there is none that is not pinned."""
        with self._lock:
            seq_id = self._table.victim()
            return None if seq_id is None else SeqId(seq_id)

    def evict(self) -> SeqId:
        """Free the eviction target and return its id.

        Raises:
            InvalidOperationError: there is no sequence that may leave.
        """
        with self._lock:
            seq_id = self._table.evict()
            if seq_id is None:
                raise InvalidOperationError("no sequence to evict")
            return SeqId(seq_id)

    def evict_to_threshold(self, target_util: float) -> list[SeqId]:
        """Evict until `utilization` is at most `target_util`; the ids that left, in order.

        Sequences whose blocks are all shared free nothing and are passed over until nothing else is left;
        pinned ones stay always, so the target may be missed.

        Raises:
            ValueError: NaN.
        """
        if not target_util == target_util:
            raise ValueError("expected a utilization, got nan")
        with self._lock:
            evicted = self._table.evict_to(target_util)
            return list(map(SeqId, evicted.tolist()))

    def apply_streaming_llm(self, seq_id: int, sink_tokens: int, window_tokens: int) -> int:
        """Keep exactly the first `sink_tokens` and the last `window_tokens` tokens; the number that left.

        Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section 3.

        Raises:
            SequenceNotFoundError, ValueError: no such sequence; a negative count.
        """
        with self._lock:
            sinks, window = as_integer(sink_tokens, "sink_tokens"), as_integer(window_tokens, "window_tokens")
            return self._table.stream(self._id(seq_id), sinks, window)

    # -- views ----------------------------------------------------------------------------------------------

    def handle(self, seq_id: int) -> PagedKvCacheHandle:
        """A handle on one sequence.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        with self._lock:
            seq_id = self._id(seq_id)
            uid = self._table.uid(seq_id)
            if uid < 0:
                raise SequenceNotFoundError(seq_id)
            return PagedKvCacheHandle(self, seq_id, uid)

    def block_table(self, seq_ids: npt.ArrayLike) -> CsrBlockTable:
        """The block tables of several sequences as CSR arrays, as FlashInfer lays them out.

        Raises:
            SequenceNotFoundError: no such sequence.
        """
        with self._lock:
            return CsrBlockTable(*self._table.csr(seq_ids))

    def copy_blocks(self, sources: npt.ArrayLike, targets: npt.ArrayLike) -> None:
        """Copy the K and V of whole blocks, all layers, in order; sequences and references stay as they are.

        Raises:
            ValueError: not as many targets as sources.
            BlockNotFoundError: a block is not in use.
        """
        with self._lock:
            src, dst = self._block_ids(sources), self._block_ids(targets)
            if len(src) != len(dst):
                raise ValueError(f"expected as many targets as sources, {len(src)}, got {len(dst)}")
            for block in np.concatenate([src, dst]).tolist():
                if self._pool.ref_count(block) == 0:
                    raise BlockNotFoundError(block)
            self._store.copy_blocks(src, dst)

    def check(self) -> None:
        """Verify every invariant of pool, tables and references.

        Raises:
            AssertionError: naming the broken one.
        """
        with self._lock:
            self._pool.check()
            self._table.check()
            held = self._table.references() + sum(holder() for holder in self._holders)
            wrong = np.flatnonzero(held != self._pool.ref_counts())
            assert not len(wrong), f"references held on blocks {wrong.tolist()} differ from their counts"

    def _recount(self) -> None:
        """Count references anew from who holds them: sequences, and the prefix caches over these blocks."""
        with self._lock:
            held = self._table.references() + sum(holder() for holder in self._holders)
            self._pool.recount(held)

    def __str__(self) -> str:
        used, total = self.used_block_count, self.total_blocks
        stats = self.stats()
        return (
            f"PagedKvCache\n"
            f"  strategy: {self._strategy}, block size: {self.block_size}\n"
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
            f"value_dtype={self.value_dtype!r}, eviction_strategy={self._strategy}, "
            f"used_blocks={self.used_block_count}, num_sequences={self.num_sequences})"
        )

    # -- input ----------------------------------------------------------------------------------------------

    @staticmethod
    def _id(seq_id: int) -> int:
        if isinstance(seq_id, bool) or not isinstance(seq_id, (int, np.integer)):
            raise TypeError(f"expected a sequence id, an int, got {type(seq_id).__name__}")
        if not 0 <= seq_id < 1 << 64:
            raise ValueError(f"expected a sequence id in [0, 2**64), got {seq_id}")
        return int(seq_id)

    def _block_ids(self, block_ids: npt.ArrayLike) -> Int32:
        ids = as_indices(block_ids, "block ids")
        outside = ids[(ids < 0) | (ids >= self.total_blocks)]
        if len(outside):
            raise BlockNotFoundError(int(outside[0]))
        return ids.astype(np.int32)

    def _rows(self, x: npt.ArrayLike, name: str) -> Float32:
        return as_floats(x, (None, self._store.num_heads, self._store.head_dim), name)

"""`PrefixCache`: which full blocks of a prompt are cached, in a store of its own or in that of a `PagedKvCache`.

    prompt    s s s s s s s s u u u        block_size 4, s the tokens of a system prompt
              [block 7] [block 2] +3       two blocks match; the next 3 tokens may be the first ones of a third
                                           block, the `tail_block`, from which they can be copied

The index holds one reference on every block that it names. A session pins the blocks that it matched and holds
references of its own, so neither an eviction nor `clear` changes what a request reads. Over the blocks of a
`PagedKvCache` nothing is copied but a tail block, when the sequence first writes to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy.typing as npt

from kvcache.core.arguments import REQUIRED, as_count, as_instance, as_integer, check_integers
from kvcache.core.copying import refuse_copies
from kvcache.core.memory import num_blocks_within
from kvcache.core.store import BlockStore
from kvcache.core.tokens import as_tokens
from kvcache.errors import OutOfMemoryError
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix import lookups, reports, saving
from kvcache.prefix.block_rows import checked_rows
from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.index.source import Source
from kvcache.prefix.indexed import IndexedCache
from kvcache.prefix.sessions import CacheBlock, CacheSession, PrefixCacheStats
from kvcache.trie.policy import Policy

__all__ = ["CacheBlock", "CacheSession", "PrefixCache", "PrefixCacheStats"]


class PrefixCache(IndexedCache):
    """Blocks of K and V by the exact tokens that lead to them.

    Args:
        max_blocks: a hard limit; it may be left out if `max_memory_bytes` is given.
        block_size: tokens per block, 1 to 256.
        num_layers, num_kv_heads, head_dim: the shape of K and V; rows are stored in multiples of 8 channels.
        dtype: storage format; `key_dtype` and `value_dtype` name them apart.
        policy: the order of eviction: `kvcache.LRU()`, the default, or `kvcache.LFU(age)`.
        max_memory_bytes: the most bytes of K and V of all blocks, an int or a text such as "4GiB"; with `max_blocks`
            the lower limit counts.
        source: a `Source` that delivers missing blocks and receives evicted ones, such as `Tiers.source`.

    Raises:
        TypeError, ValueError: a setting that is not supported; too few bytes for one block.

    `namespace` (tenant, model, adapter) is any hashable value; two namespaces share nothing. Calls on one cache are
    serialised.
    """

    _cached: CachedBlocks

    def __init__(
        self, max_blocks: int | None = None, block_size: int = REQUIRED, num_layers: int = REQUIRED,
        num_kv_heads: int = REQUIRED, head_dim: int = REQUIRED, *, dtype: str = "f32", key_dtype: str | None = None,
        value_dtype: str | None = None, policy: Policy | None = None, max_memory_bytes: int | str | None = None,
        source: Source | None = None,
    ) -> None:  # fmt: skip
        check_integers(block_size=block_size, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        padded, head_dim = -(-int(head_dim) // 8) * 8, int(head_dim)
        settings = (block_size, num_kv_heads, padded, key_dtype or dtype, value_dtype or dtype)
        max_blocks = num_blocks_within(max_blocks, max_memory_bytes, num_layers, *settings, name="max_blocks")
        store = BlockStore(num_layers, max_blocks, *settings)
        self._own(CachedBlocks(PagedBlocks(store), (head_dim, head_dim), max_blocks, policy))
        self._cached.attach(source)

    @classmethod
    def over(cls, paged: PagedKvCache, max_blocks: int | None = None, policy: Policy | None = None) -> PrefixCache:
        """A prefix cache over the blocks of a paged cache: sequences adopt its blocks, and it adopts theirs.

        A request computes K and V from token `n` on; its last token is computed in any case, for its logits::

            with cache.open_session(prompt) as session:
                n = min(session.num_tokens, len(prompt) - 1)
                paged.adopt(seq_id, session.shared_blocks[: -(-n // paged.block_size)], n)
            paged.append(seq_id, len(prompt) - n)  # `write` and `attention` follow for these tokens
            cache.adopt(prompt, paged.block_table([seq_id]).indices)  # when they are written

        `max_blocks`, by default all, also those that `grow` adds, is the most that it may name; evict them with
        `evict` when the paged cache needs room.

        Raises:
            TypeError, ValueError: not an integer; negative; a cache with `separate_layers`.
        """
        cache, paged = cls.__new__(cls), as_instance(paged, PagedKvCache, "paged")
        if paged.separate_layers:
            raise ValueError(f"paged: expected one whose blocks hold all layers, got {paged!r}")
        most = None if max_blocks is None else as_count(max_blocks, "max_blocks")
        with paged._blocks.lock:  # no `grow` before the records of its blocks are known
            dims = paged.head_dim, paged.value_head_dim
            cache._own(CachedBlocks(paged._blocks, dims, most, policy, shared=True))
        return cache

    def _own(self, cached: CachedBlocks) -> None:
        self._cached, self._slots, self._lock = cached, cached.slots, cached.lock
        self._store, self._pool = cached.store, cached.pool

    @property
    def source(self) -> Source | None:
        """See the constructor."""
        return self._cached.source

    @source.setter
    def source(self, source: Source | None) -> None:
        self._cached.attach(source)

    def open_session(self, token_ids: Any, namespace: Hashable = None) -> CacheSession:
        """The matched blocks as a session, which holds them until it is released or dropped."""
        ids = as_tokens(token_ids)
        with self._lock:
            return self._cached.open_session(ids, namespace)

    def open_again(self, token_ids: Any, namespace: Hashable = None) -> CacheSession:
        """A session on the full blocks that are cached now, for a request that `open_session` has counted."""
        ids = as_tokens(token_ids)
        with self._lock:
            return self._cached.open_again(ids, namespace)

    def peek(self, token_ids: Any, namespace: Hashable = None) -> int:
        """How many of the first tokens are cached, those of a block that matches in part included.

        Neither a use of the blocks nor counted in `stats`; a `source` is not asked.
        """
        ids = as_tokens(token_ids)
        with self._lock:
            return int(self._cached.index.find(ids, namespace).length)

    def close_session(self, session: CacheSession) -> None:
        """Release what a session holds; during another call, when that call ends. A second call does nothing."""
        self._cached.close_session(as_instance(session, CacheSession, "session"))

    def close_sessions(self) -> None:
        """Close all sessions, also those of calls that an error ended: for an owner who opens every one."""
        with self._lock:
            self._slots.release_dropped(kept=True)

    def insert(self, token_ids: Any, block_start: int, keys: Any, values: Any, namespace: Hashable = None) -> int:
        """Cache the block of tokens `block_start..block_start + block_size`, unless it is; its index.

        Args:
            keys, values: per layer float32 `(num_kv_heads * block_size * head_dim,)`, laid out [head][position][dim];
                over a paged cache, V with its `value_head_dim`.

        Raises:
            ValueError: no full block of the tokens begins at `block_start`; another shape; values that the format
                cannot hold.
            InvalidOperationError: the blocks before it are not cached.
            OutOfMemoryError: every block is held.
        """
        ids, start = as_tokens(token_ids), as_integer(block_start, "block_start")
        size, end = self.block_size, start + self.block_size
        if start < 0 or start % size or end > len(ids):
            raise ValueError(f"block_start: expected a multiple of {size}, at most {len(ids) - size}, got {start}")
        k, v = checked_rows(self._store, [(keys, values)], self._cached.dims, self._cached.formats)
        with self._lock:
            if not self._cached.store_rows(ids[:end], start // self.block_size, k, v, namespace):
                raise OutOfMemoryError(1, 0)
            return int(self._index.find(ids[:end], namespace).pages[-1])

    def store(self, token_ids: Any, block_start: int, pairs: Sequence[Any], namespace: Hashable = None) -> int:
        """Cache one block after another from `block_start` on, as `insert`; how many of them are cached now.

        Pairs beyond the last full block of the tokens are ignored. When nothing can be evicted any more, the rest is
        omitted: of a prompt longer than the cache its beginning is kept.
        """
        ids, size, start = as_tokens(token_ids), self.block_size, as_integer(block_start, "block_start")
        if start < 0 or start % size:
            raise ValueError(f"block_start: expected a multiple of {size}, got {start}")
        count = min(len(pairs := list(pairs)), (len(ids) - start) // size)
        if count <= 0:
            return 0
        keys, values = checked_rows(self._store, pairs[:count], self._cached.dims, self._cached.formats)
        with self._lock:
            return self._cached.store_rows(ids[: start + count * size], start // size, keys, values, namespace)

    def adopt(self, token_ids: Any, block_ids: npt.ArrayLike, namespace: Hashable = None) -> int:
        """Cache the full blocks of a sequence by reference; how many of them are cached now.

        Blocks that are cached already do not change; those that do not fit are omitted.

        Args:
            block_ids: the blocks of its tokens, from the first on, at least the full ones.

        Raises:
            InvalidOperationError: this cache has blocks of its own, not those of a paged cache; a block is cached
                already, for another text or in another namespace.
            ValueError: too few block ids; a block named twice.
            BlockNotFoundError: a block is not in use.
        """
        ids = as_tokens(token_ids)
        blocks = self._cached.as_adoptable(block_ids, len(ids))
        with self._lock:
            return self._cached.adopt(ids, blocks, namespace)

    def evict(self, num_blocks: int) -> int:
        """Evict until `num_blocks` more are free in the pool, or nothing can go; how many became free."""
        count = as_integer(num_blocks, "num_blocks")
        with self._lock:
            return self._cached.free(count)

    def clear(self) -> None:
        """Forget every block; counters stay. What sessions hold stays readable until they are released."""
        with self._lock:
            self._index.clear()

    lookup, release, get_block = lookups.lookup, lookups.release, lookups.get_block
    save, load, block_ids, references = saving.save, saving.load, reports.block_ids, reports.references
    memory, stats, _repr_html_ = reports.memory, reports.stats, reports.as_html
    watch_evictions, namespace_tokens = reports.watch_evictions, reports.namespace_tokens
    num_free_and_idle = reports.num_free_and_idle

    @property
    def pinned_blocks(self) -> int:
        """Blocks that sessions and lookups hold."""
        with self._lock:
            return self._cached.num_pinned()

    @property
    def idle_blocks(self) -> int:
        """Cached blocks to which nothing else refers: those that `evict` can free."""
        with self._lock:
            return self._cached.num_idle()

    @property
    def capacity(self) -> int:
        """The most blocks that it may hold."""
        return self._cached.max_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def memory_bytes(self) -> int:
        """Bytes of K and V of the cached blocks."""
        return len(self) * self._store.block_bytes

    __reduce_ex__ = refuse_copies("`save` writes its blocks to a file")

    def __repr__(self) -> str:
        cached = f"{len(self)} of {self.capacity} blocks of {self.block_size} tokens cached"
        return f"PrefixCache({cached}, {self.pinned_blocks} in use)"

"""`PrefixCache`: which full blocks of a prompt are cached, in a store of its own or in that of a `PagedKvCache`.

    prompt    s s s s s s s s u u u        block_size 4, s the tokens of a system prompt
              [block 7] [block 2] +3       two blocks match; the next 3 tokens may be the first ones of a third
                                           block, the `tail_block`, from which they can be copied

The index holds one reference on every block that it names. A session pins the blocks that it matched and holds
references of its own, so neither an eviction nor `clear` changes what a request reads. Over the blocks of a
`PagedKvCache` nothing is copied but a tail block, when the sequence first writes to it.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import REQUIRED, as_count, as_integer, check_integers
from kvcache.core.copying import refuse_copies
from kvcache.core.memory import num_blocks_within
from kvcache.core.store import BlockStore
from kvcache.core.strip import strip
from kvcache.core.tokens import as_tokens
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.block_rows import Dims, checked_rows
from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.files import fetch_all, load_blocks, save_blocks
from kvcache.prefix.indexed import IndexedCache
from kvcache.prefix.lookups import FoundBlocks, Lookup, cached_block
from kvcache.prefix.sessions import CacheBlock, CacheSession, PrefixCacheStats
from kvcache.prefix.source import Source
from kvcache.prefix.watching import close_sessions, namespace_tokens, num_free_and_idle, watch_evictions
from kvcache.trie.policy import Policy

__all__ = ["CacheBlock", "CacheSession", "PrefixCache", "PrefixCacheStats"]

Int32 = npt.NDArray[np.int32]


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
        self,
        max_blocks: int | None = None,
        block_size: int = REQUIRED,
        num_layers: int = REQUIRED,
        num_kv_heads: int = REQUIRED,
        head_dim: int = REQUIRED,
        *,
        dtype: str = "f32",
        key_dtype: str | None = None,
        value_dtype: str | None = None,
        policy: Policy | None = None,
        max_memory_bytes: int | str | None = None,
        source: Source | None = None,
    ) -> None:
        check_integers(block_size=block_size, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        padded, head_dim = -(-int(head_dim) // 8) * 8, int(head_dim)
        settings = (block_size, num_kv_heads, padded, key_dtype or dtype, value_dtype or dtype)
        max_blocks = num_blocks_within(max_blocks, max_memory_bytes, num_layers, *settings, name="max_blocks")
        store = BlockStore(num_layers, max_blocks, *settings)
        self._own(PagedBlocks(store), (head_dim, head_dim), max_blocks, policy, shared=False)
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
            TypeError, ValueError: not an integer; negative.
        """
        if not isinstance(paged, PagedKvCache):
            raise TypeError(f"paged: expected a PagedKvCache, got {type(paged).__name__}")
        cache = cls.__new__(cls)
        most = None if max_blocks is None else as_count(max_blocks, "max_blocks")
        with paged._blocks.lock:  # no `grow` before the records of its blocks are known
            cache._own(paged._blocks, (paged.head_dim, paged.value_head_dim), most, policy, shared=True)
        return cache

    def _own(self, blocks: PagedBlocks, dims: Dims, limit: int | None, policy: Policy | None, *, shared: bool) -> None:
        self._cached, self._blocks, self._shared = CachedBlocks(blocks, dims, limit, policy), blocks, shared
        self._slots, self._pool, self._store, self._lock = self._cached.slots, blocks.pool, blocks.store, blocks.lock

    @property
    def source(self) -> Source | None:
        """See the constructor."""
        return self._cached.source

    @source.setter
    def source(self, source: Source | None) -> None:
        self._cached.attach(source)

    # -- lookup ---------------------------------------------------------------------------------------------

    def lookup(self, token_ids: Any, namespace: Hashable = None) -> Lookup:
        """`(matched_len, blocks)`: the full blocks that begin the prompt, each held until `release(block.index)`.

        Each block found counts a hit, a stop before the last full block a miss. `blocks` makes each when it is first
        asked for. `with cache.lookup(tokens) as blocks:` releases them all at its end, and `release` none of them.
        """
        ids = as_tokens(token_ids)
        with self._lock:
            self._cached.fetch(ids, namespace)
            claim = self._cached.index.claim(ids, namespace, whole=True)
            blocks = FoundBlocks(self._cached, ids, claim) if claim.num_held else []
            claim.hold_each()
            return Lookup(len(blocks) * self.block_size, blocks)

    def release(self, index: int) -> None:
        """Release a block that `lookup` returned; during another call of this thread, when that call ends.

        Raises:
            InvalidOperationError: no lookup holds it.
        """
        index = as_integer(index, "index")
        if self._lock.inside and not self._slots.is_looked_up(index):
            raise InvalidOperationError(f"expected a block that a lookup holds, got {index}")
        self._lock.when_free(partial(self._slots.release, index))

    def open_session(self, token_ids: Any, namespace: Hashable = None) -> CacheSession:
        """The matched blocks as a session, which holds them until it is released or dropped."""
        ids = as_tokens(token_ids)
        with self._lock:
            self._cached.fetch(ids, namespace)
            claim = self._cached.index.claim(ids, namespace)
            matched = claim.num_held * self.block_size
            return CacheSession(matched, None, claim.tail, claim.tail_tokens, claim, self.close_session)

    def open_again(self, token_ids: Any, namespace: Hashable = None) -> CacheSession:
        """A session on the full blocks that are cached now, for a request that `open_session` has counted."""
        ids = as_tokens(token_ids)
        with self._lock:
            claim, count = self._cached.head(ids, namespace)
            found = [] if claim is None else claim.pages.tolist()
            return CacheSession(count * self.block_size, found, claim=claim, close=self.close_session)

    def peek(self, token_ids: Any, namespace: Hashable = None) -> int:
        """How many of the first tokens are cached, those of a block that matches in part included.

        Neither a use of the blocks nor counted in `stats`; a `source` is not asked.
        """
        ids = as_tokens(token_ids)
        with self._lock:
            return int(self._cached.index.find(ids, namespace).length)

    def close_session(self, session: CacheSession) -> None:
        """Release what a session holds; during another call, when that call ends. A second call does nothing."""
        if not isinstance(session, CacheSession):
            raise TypeError(f"session: expected a CacheSession, got {type(session).__name__}")
        if session._claim is not None and session._claim.slots is self._slots:
            self._lock.hand_over(session._claim.release)

    # -- insert ---------------------------------------------------------------------------------------------

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
        end = start + self.block_size
        if start < 0 or start % self.block_size or end > len(ids):
            most = len(ids) - self.block_size
            raise ValueError(f"block_start: expected a multiple of {self.block_size}, at most {most}, got {start}")
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
        full = len(ids) // self.block_size
        blocks = self._blocks.as_ids(block_ids)[:full]
        if not self._shared:
            raise InvalidOperationError("expected a cache over the blocks of a PagedKvCache")
        if len(blocks) < full:
            raise ValueError(f"block_ids: expected {full} for {len(ids)} tokens, got {len(blocks)}")
        with self._lock:
            return self._cached.adopt(ids, blocks, namespace)

    def evict(self, num_blocks: int) -> int:
        """Evict until `num_blocks` more are free in the pool, or nothing can go; how many became free."""
        count = as_integer(num_blocks, "num_blocks")
        with self._lock:
            self._slots.release_dropped()
            return self._evict(count)

    # A function: from Python 3.12 on, Ctrl-C at the jump back of a loop with a condition skips handlers of the same
    # function, such as the end of a `with`.
    def _evict(self, count: int) -> int:
        before = self._pool.num_free
        while (wanted := before + count - self._pool.num_free) > 0 and self._cached.evict(wanted):
            pass
        return self._pool.num_free - before

    def clear(self) -> None:
        """Forget every block; counters stay. What sessions hold stays readable until they are released."""
        with self._lock:
            self._index.clear()

    # -- save and load --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = ()) -> None:
        """Write every cached block to a file, with its namespace and rank; `load` reads it.

        The file takes the place of the old one at once and whole, or not at all. Other calls wait meanwhile.

        Args:
            model: the model's name; `load` rejects a file with another.
            beside: other caches to save in the same file.

        Raises:
            TypeError: a namespace that is no None, bool, int, str, bytes or tuple of them.
            OSError: of the file system.
        """
        save_blocks(path, str(model), _cached_by([self, *beside]))

    def load(self, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = ()) -> int:
        """Load what `save` wrote, the most recently used blocks first, as many as there is room for; how many.

        This reads which tokens there are, not their K and V: a block is read, and checked, when a lookup first finds
        it. One that is damaged is forgotten, with all that comes after it, and logged as a warning.

        Args:
            model: as in `save`.
            beside: other caches; each loads the blocks of the cache that had its place in `save`, if formats and
                dimensions are the same. All other blocks are ignored.

        Raises:
            InvalidOperationError: blocks are cached here already, or in one of `beside`.
            SnapshotError: not a file of `save`, damaged in what is read now, of another model, or of other formats
                or dimensions; nothing has changed.
            OSError: there is none, or it cannot be read.
        """
        return load_blocks(path, str(model), _cached_by([self, *beside]))

    # -- blocks ---------------------------------------------------------------------------------------------

    def get_block(self, index: int) -> CacheBlock | None:
        """A cached block, or one that is held, by its index; None if there is none."""
        index = as_integer(index, "index")
        if not 0 <= index < self._pool.num_blocks:
            return None
        with self._lock:
            fetch_all(self._index)
            return cached_block(self._cached, index)

    def block_ids(self) -> list[int]:
        """The cached blocks, ascending."""
        with self._lock:
            fetch_all(self._index)
            return [int(block) for block in self._slots.records()["named"].nonzero()[0]]

    @property
    def pinned_blocks(self) -> int:
        """Blocks that sessions and lookups hold."""
        with self._lock:
            self._slots.release_dropped()
            return int(np.count_nonzero(self._slots.counts()))

    @property
    def idle_blocks(self) -> int:
        """Cached blocks to which nothing else refers: those that `evict` can free."""
        with self._lock:
            return self._cached.num_idle()

    watch_evictions, namespace_tokens = watch_evictions, namespace_tokens
    num_free_and_idle, close_sessions = num_free_and_idle, close_sessions
    # -- reports --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The most blocks that it may hold."""
        return self._cached.max_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def evictions(self) -> int:
        """Blocks evicted."""
        return self._index.evictions

    @property
    def memory_bytes(self) -> int:
        """Bytes of K and V of the cached blocks."""
        return len(self) * self._store.block_bytes

    def memory(self) -> dict[str, int]:
        """Bytes: "kv" of all blocks of the pool, "bookkeeping" of the index and the pool's records, and "scratch": 0.

        Over the blocks of a `PagedKvCache` "kv" is 0: `memory` of that cache counts them.
        """
        with self._lock:
            kv = 0 if self._shared else self._store.nbytes
            return {"kv": kv, "bookkeeping": self._bookkeeping(), "scratch": 0}

    def _bookkeeping(self) -> int:
        return self._index.nbytes + (0 if self._shared else self._pool.nbytes + self._store.bookkeeping)

    def stats(self) -> PrefixCacheStats:
        """The counters now."""
        with self._lock:
            index = self._index
            return PrefixCacheStats(
                self.hit_rate, len(self), self.capacity, self.memory_bytes, index.hits, index.misses, index.evictions,
                index.hit_tokens, index.lookup_tokens, index.reasons,
                self._bookkeeping(),
            )  # fmt: skip

    __reduce_ex__ = refuse_copies("`save` writes its blocks to a file")

    def __repr__(self) -> str:
        return (
            f"PrefixCache({len(self)} of {self.capacity} blocks of {self.block_size} tokens cached, "
            f"{self.pinned_blocks} in use)"
        )

    def _repr_html_(self) -> str:
        """The blocks as a strip: those that may still be cached, cached ones, and those that sessions hold."""
        free, pinned = self.capacity - len(self), self.pinned_blocks
        states = np.repeat([0, 1, 2], [max(0, free), len(self) - pinned, pinned])
        return strip(repr(self), ("free", "cached", "in use"), states)

    def references(self) -> Int32:
        """References that this cache holds on each block of the pool, int32 `(num_blocks,)`."""
        with self._lock:
            return self._slots.counts(references=True)

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._cached.check()
            self._blocks.check()


def _cached_by(caches: Sequence[PrefixCache]) -> list[CachedBlocks]:
    if not all(isinstance(cache, PrefixCache) for cache in caches):
        raise TypeError("beside: expected caches, got another object")
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("beside: expected each cache once, got one twice")
    return [cache._cached for cache in caches]

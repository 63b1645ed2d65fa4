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
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.memory import num_blocks_within
from kvcache.core.store import BlockStore
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.block_file import load_blocks, save_blocks, saved_formats
from kvcache.prefix.block_rows import checked_rows
from kvcache.prefix.cache_block import CacheBlock, FoundBlocks, FoundPrefix, block_of
from kvcache.prefix.cache_session import CacheSession
from kvcache.prefix.cached_blocks import CachedBlocks, Evicted, Source
from kvcache.prefix.events.kv_events import SaltOf
from kvcache.prefix.index.event_buffer import EventBuffer, Noted
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.indexed_cache import IndexedCache
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.support.arguments import REQUIRED, as_count, as_instance, as_integer, check_integers, short
from kvcache.support.copies import refuse_copies
from kvcache.support.strip import strip
from kvcache.support.token_ids import as_tokens
from kvcache.trie.policy import Policy

__all__ = ["PrefixCache"]

OwnPart = tuple[npt.NDArray[np.uint32], int]  # a text, and how many of its tokens are before those that it alone has


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

    def __init__(
        self, max_blocks: int | None = None, block_size: int = REQUIRED, num_layers: int = REQUIRED,
        num_kv_heads: int = REQUIRED, head_dim: int = REQUIRED, *, dtype: str = "f32", key_dtype: str | None = None,
        value_dtype: str | None = None, policy: Policy | None = None, max_memory_bytes: int | str | None = None,
        source: Source | None = None,
    ) -> None:
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

        `max_blocks`, by default all, also those that `grow` adds, is the most that it may name. `evict` gives
        blocks back when the paged cache needs room: its OutOfMemoryError counts those that only this cache holds.

        Raises:
            TypeError, ValueError: not an integer; negative; a cache with `separate_layers`.
        """
        cache, paged = cls.__new__(cls), as_instance(paged, PagedKvCache, "paged")
        if paged.separate_layers:
            raise ValueError(f"paged: expected one whose blocks hold all layers, got {paged!r}")
        most = None if max_blocks is None else as_count(max_blocks, "max_blocks")
        with paged.blocks.lock:  # no `grow` before the records of its blocks are known
            dims = paged.head_dim, paged.value_head_dim
            cache._own(CachedBlocks(paged.blocks, dims, most, policy, shared=True))
        return cache

    def _own(self, cached: CachedBlocks) -> None:
        self._cached, self._slots, self._lock = cached, cached.slots, cached.lock
        self._store, self._pool = cached.store, cached.pool

    @property
    def _index(self) -> PrefixIndex:
        return self._cached.index

    @property
    def source(self) -> Source | None:
        """See the constructor."""
        return self._cached.source

    @source.setter
    def source(self, source: Source | None) -> None:
        self._cached.attach(source)

    # -- sessions -------------------------------------------------------------------------------------------

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

    # -- blocks as objects ----------------------------------------------------------------------------------

    def lookup(self, token_ids: Any, namespace: Hashable = None) -> FoundPrefix:
        """`(matched_len, blocks)`: the full blocks that begin the prompt, each held until `release(block.index)`.

        Each block found counts a hit, a stop before the last full block a miss. `blocks` makes each when it is first
        asked for. `with cache.lookup(tokens) as blocks:` releases them all at its end, and `release` none of them.
        """
        ids, cached = as_tokens(token_ids), self._cached
        with self._lock:
            cached.fetch(ids, namespace)
            claim = cached.index.claim(ids, namespace, whole=True)
            blocks = FoundBlocks(cached, ids, claim) if claim.num_held else []
            claim.hold_each()
            return FoundPrefix(len(blocks) * self.block_size, blocks)

    def release(self, index: int) -> None:
        """Release a block that `lookup` returned; during another call of this thread, when that call ends.

        Raises:
            InvalidOperationError: no lookup holds it.
        """
        index = as_integer(index, "index")

        def expect_held() -> None:
            if not self._slots.is_looked_up(index):
                raise InvalidOperationError(f"expected a block that a lookup holds, got {index}")

        def end() -> None:
            expect_held()
            self._slots.release_each(np.array([index], np.int32))

        if self._lock.inside:
            expect_held()
        self._lock.when_free(end)

    def get_block(self, index: int) -> CacheBlock | None:
        """A cached block, or one that is held, by its index; None if there is none."""
        index, slots = as_integer(index, "index"), self._slots
        if not 0 <= index < self._pool.num_blocks:
            return None
        with self._lock:
            self._index.fetch_all()
            slots.release_dropped()
            held, record = int(slots.counts()[index]), slots.records([index])[0]
            if not held and not record["named"]:
                return None
            tokens = slots.tokens_of(np.array([index]))[0].tolist()
            block = block_of(self._cached, index, held, self._index.clock, tokens)
            block.last_used = int(record["used"])
            return block

    # -- insert and evict -----------------------------------------------------------------------------------

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
        if not isinstance(pairs, Iterable):
            raise TypeError(f"pairs: expected keys and values of each block, got {short(pairs)}")
        pairs = list(pairs)
        count = min(len(pairs), (len(ids) - start) // size)
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

    def demote(self, token_ids: Any, namespace: Hashable = None, after: int = 0) -> OwnPart | None:
        """Let the blocks that a text alone has be evicted before all others, unless they are used again.

        Blocks of other texts, and of its first `after` tokens, stay as they are. Blocks behind the text, such as those
        of an answer, are its own where no other text has them.

        Returns:
            The text to the end of these blocks, and how many of its tokens are before them; None: there are none.
        """
        ids, after = as_tokens(token_ids), as_count(after, "after", most=2**31)
        with self._lock:
            return self._index.demote(ids, namespace, after)

    def discard(self, token_ids: Any, namespace: Hashable = None, after: int = 0) -> OwnPart | None:
        """Forget the blocks that `demote` would be about, but for those that are held and those before; returns as it.

        They go to no `source`.
        """
        ids, after = as_tokens(token_ids), as_count(after, "after", most=2**31)
        with self._lock:
            if (found := self._index.discard(ids, namespace, after)) is None:
                return None
            text, start, claim = found
            claim.release()
            return text, start

    def clear(self) -> None:
        """Forget every block; counters stay. What sessions hold stays readable until they are released."""
        with self._lock:
            self._index.clear()

    def forget(self, namespace: Hashable) -> None:
        """Forget every block of a namespace; nothing, if it has none. What sessions hold stays readable."""
        with self._lock:
            while (space := self._index.namespace(namespace)) is not None:
                for page in self._index.trie.all_values(space.root):
                    tokens = self._slots.tokens_of(np.array([page]))[0]
                    if page in self._index.find(tokens, namespace).pages:  # it begins texts, whose other pages go too
                        self._index.forget(tokens, namespace, int(page))
                        break

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
        save_blocks(path, str(model), self._and(beside))

    def load(
        self, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = (), exact: bool = True
    ) -> int:
        """Load what `save` wrote, the most recently used blocks first, as many as there is room for; how many.

        This reads which tokens there are, not their K and V: a block is read, and checked, when a lookup first finds
        it. One that is damaged is forgotten, with all that comes after it, and logged as a warning.

        Args:
            model: as in `save`.
            beside: other caches; each loads the blocks of the cache that had its place in `save`, if formats and
                dimensions are the same. All other blocks are ignored.
            exact: False takes the file of another version of the library too whose K and V have other bits
                (ckernels/BITS.md). `stats().exact` is False from then on: texts that go on from such blocks have other
                bits than those of a cold run, a `source` receives nothing, and files of `save` say the same of
                themselves.

        Raises:
            InvalidOperationError: blocks are cached here already, or in one of `beside`.
            SnapshotError: not a file of `save`, damaged in what is read now, of another model or version of bits, or of
                other formats or dimensions; nothing has changed.
            OSError: there is none, or it cannot be read.
        """
        return load_blocks(path, str(model), self._and(beside), exact=exact)

    @staticmethod
    def saved_formats(path: str | os.PathLike[str]) -> dict[str, str | list[str]]:
        """The formats of K and V in a file of `save`: `key_dtype` and `value_dtype`, each one, or one for each layer.

        An engine has its formats before it loads a file, and one with a budget, `dtype="auto:4.0"`, chooses among the
        formats of its version. Given these in place of the budget, it reads the file.

        Raises:
            SnapshotError: not a file of `save`; damaged; in formats that this version does not have, or of a list of
                them for layers of several kinds, such as windows.
            OSError: there is none, or it cannot be read.
        """
        return saved_formats(path)

    def _and(self, beside: Sequence[PrefixCache]) -> list[CachedBlocks]:
        """The blocks of this cache and of those beside it; TypeError, ValueError: another object, or one twice."""
        cached = [self._cached]
        for cache in beside:
            if not isinstance(cache, PrefixCache):
                raise TypeError("beside: expected caches, got another object")
            cached.append(cache._cached)
        if len({id(each) for each in cached}) < len(cached):
            raise ValueError("beside: expected each cache once, got one twice")
        return cached

    # -- reports --------------------------------------------------------------------------------------------

    def block_ids(self) -> list[int]:
        """The cached blocks, ascending."""
        with self._lock:
            self._index.fetch_all()
            return [int(block) for block in self._slots.records()["named"].nonzero()[0]]

    def references(self) -> npt.NDArray[np.int32]:
        """References that this cache holds on each block of the pool, int32 `(num_blocks,)`."""
        with self._lock:
            return self._slots.counts(references=True)

    def memory(self) -> dict[str, int]:
        """Bytes: "kv" of all blocks of the pool, "bookkeeping" of the index and the pool's records, and "scratch": 0.

        Over the blocks of a `PagedKvCache` "kv" is 0: `memory` of that cache counts them.
        """
        with self._lock:
            return self._cached.memory()

    def stats(self) -> PrefixCacheStats:
        """The counters now."""
        with self._lock:
            index = self._index
            return PrefixCacheStats(
                self.hit_rate, len(self), self.capacity, self.memory_bytes, index.hits, index.misses, index.evictions,
                index.hit_tokens, index.lookup_tokens, index.reasons, self._cached.memory()["bookkeeping"],
                self._cached.exact,
            )

    def watch_evictions(self) -> deque[Evicted]:
        """A queue of what is evicted from now on, in this order; the caller takes it out."""
        with self._lock:
            if self._cached.evicted is None:
                self._cached.evicted = deque()
            return self._cached.evicted

    def record_events(self, salt_of: SaltOf, capacity: int) -> EventBuffer:
        """Record which blocks are stored, removed and cleared from now on; see `EventBuffer` for the arguments.

        Raises:
            InvalidOperationError: blocks are cached, or are recorded already.
        """
        with self._lock:
            return self._index.record(salt_of, capacity)

    def event_snapshot(self) -> Noted:
        """All cached blocks, in place of what the ring of `record_events` has.

        Takes time in proportion to the blocks, 0.1 ms for a thousand, in which other calls wait.
        """
        with self._lock:
            return self._index.snapshot()

    def namespace_tokens(self) -> dict[Hashable, int]:
        """How many tokens of each namespace are cached; takes time in proportion to their blocks."""
        with self._lock:
            index = self._index
            held = [(space.name, len(index.trie.all_values(space.root))) for space in index.namespaces()]
        return {name: count * self.block_size for name, count in held}

    def num_free_and_idle(self) -> tuple[int, int]:
        """How many blocks of the pool are free, and how many `idle_blocks` there are, at one time."""
        with self._lock:
            idle = self._cached.num_idle()
            return self._pool.num_free, idle

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

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._cached.check()

    __reduce_ex__ = refuse_copies("`save` writes its blocks to a file")

    def __repr__(self) -> str:
        cached = f"{len(self)} of {self.capacity} blocks of {self.block_size} tokens cached"
        return f"PrefixCache({cached}, {self.pinned_blocks} in use)"

    def _repr_html_(self) -> str:
        """The blocks as a strip: those that may still be cached, cached ones, and those that sessions hold."""
        with self._lock:
            held = self._slots.counts() > 0
            cached = int(np.count_nonzero((self._slots.records()["named"] != 0) & ~held))
        in_use = int(np.count_nonzero(held))
        states = np.repeat([0, 1, 2], [max(0, self.capacity - cached - in_use), cached, in_use])
        return strip(repr(self), ("free", "cached", "in use"), states)

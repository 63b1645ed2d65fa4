"""`PrefixCache`: which full blocks of a prompt are cached, in a store of its own or in that of a `PagedKvCache`.

    prompt    s s s s s s s s u u u        block_size 4, s the tokens of a system prompt
              [block 7] [block 2] +3       two blocks match; `tail_block` has the next 3 tokens, too, if it
                                           shares them: its head can be copied

The trie holds one reference on every block that it names. A session pins what it matched and holds references
of its own, so neither an eviction nor `clear` touches what a request reads. Over the blocks of a `PagedKvCache`
nothing is copied, a block that matches in part apart, and that by the sequence's first write:

    session, start = prefill.prepare(tokens)
    paged.adopt(seq_id, session.shared_blocks, session.num_tokens)
    ...                                                         compute the rest, append, write
    cache.adopt(tokens, paged.get_sequence(seq_id).block_ids)
    prefill.release_session(session)
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_count, as_integer, check_integers
from kvcache.core.locks import MendingLock, Parting
from kvcache.core.store import BlockStore
from kvcache.core.tokens import as_tokens
from kvcache.errors import BlockNotFoundError, InvalidOperationError, OutOfMemoryError
from kvcache.paged.blocks import PagedBlocks
from kvcache.paged.cache import PagedKvCache
from kvcache.prefix.block_index import BlockIndex
from kvcache.prefix.block_rows import block_rows, read_block, write_blocks
from kvcache.prefix.blocks_saved import load_blocks, save_blocks
from kvcache.prefix.sessions import CacheBlock, CacheSession, PrefixCacheStats

__all__ = ["CacheBlock", "CacheSession", "PrefixCache", "PrefixCacheStats"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


class PrefixCache:
    """Blocks of K and V by the exact tokens that lead to them.

    Args:
        max_blocks: a hard limit.
        block_size: tokens per block, 1 to 256.
        num_layers, num_kv_heads, head_dim: the shape of K and V; rows are stored in multiples of 8 channels.
        dtype: storage format; `key_dtype` and `value_dtype` name them apart.

    Raises:
        ValueError: a setting that is not supported.

    The least recently used block that no other one continues leaves first. `namespace` (tenant, model, adapter)
    is any hashable value; nothing is shared between two of them. Calls on one cache are serialised.
    """

    def __init__(
        self,
        max_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: str = "f32",
        key_dtype: str | None = None,
        value_dtype: str | None = None,
    ) -> None:
        check_integers(
            max_blocks=max_blocks, block_size=block_size, num_layers=num_layers, num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )  # fmt: skip
        padded, head_dim, max_blocks = -(-int(head_dim) // 8) * 8, int(head_dim), int(max_blocks)
        store = BlockStore(
            num_layers, max_blocks, block_size, num_kv_heads, padded, key_dtype or dtype, value_dtype or dtype
        )
        self._own(PagedBlocks(store), head_dim, max_blocks, shared=False)

    @classmethod
    def over(cls, paged: PagedKvCache, max_blocks: int | None = None) -> PrefixCache:
        """A prefix cache over the blocks of a paged cache: sequences `adopt` what it matched, and it what they wrote.

        `max_blocks`, by default all, is the most that it may name; evict them with `evict` when the paged cache
        needs room.

        Raises:
            TypeError, ValueError: not an integer; negative.
        """
        if not isinstance(paged, PagedKvCache):
            raise TypeError(f"paged: expected a PagedKvCache, got {type(paged).__name__}")
        cache = cls.__new__(cls)
        most = paged.total_blocks if max_blocks is None else as_count(max_blocks, "max_blocks")
        cache._own(paged._blocks, paged.head_dim, min(most, paged.total_blocks), shared=True)
        return cache

    def _own(self, blocks: PagedBlocks, head_dim: int, max_blocks: int, *, shared: bool) -> None:
        self._blocks, self._pool, self._store = blocks, blocks.pool, blocks.store
        self._head_dim, self._shared = head_dim, shared
        self._lock = MendingLock(blocks.lock, self._mend)
        self._index = BlockIndex(self._pool, self._store.block_size, max_blocks)
        blocks.holders.append(self._index.references)

    def _mend(self) -> None:
        """After an interrupt: the trie and the open holds say what there is, and all else follows them."""
        self._index.mend()
        self._blocks.recount()

    # -- lookup ---------------------------------------------------------------------------------------------

    def lookup(self, token_ids: Any, namespace: Hashable = None) -> tuple[int, list[CacheBlock]]:
        """`(matched_len, blocks)`: the full blocks that begin the prompt, each held until `release(block.index)`.

        Each block found counts a hit, a stop before the last full block a miss.
        """
        ids = as_tokens(token_ids)
        with self._lock:
            found = self._index.match(ids, namespace)
            indices, node, trie = found.blocks.tolist(), found.node, self._index.trie
            held: dict[int, int] = {}  # block -> key
            try:
                # From the last block up, so that each step cuts one block's node off the rest.
                for i in range(len(indices) - 1, -1, -1):
                    node, key = trie.boundary(node, (i + 1) * self.block_size), self._index.holds.new_key()
                    self._index.holds.take(key, trie, node, found.blocks[i : i + 1], by_lookup=True)
                    held[indices[i]] = key
                blocks = [self._block(i) for i in indices]
                self._index.holds.keep(held)
                return len(indices) * self.block_size, blocks
            except BaseException:  # of an interrupt, `_mend` does the rest
                for key in held.values():
                    self._index.holds.end(key)
                raise

    def release(self, index: int) -> None:
        """Release a block that `lookup` returned; inside another call of this thread, when that leaves.

        Raises:
            InvalidOperationError: no lookup holds it.
        """
        index = as_integer(index, "index")
        if self._lock.inside and not self._index.holds.looked_up.get(index):
            raise InvalidOperationError(f"expected a block that a lookup holds, got {index}")
        self._lock.when_free(partial(self._index.holds.end_lookup, index))

    def open_session(self, token_ids: Any, namespace: Hashable = None) -> CacheSession:
        """The matched blocks as a session, which holds them until it is released or dropped."""
        ids = as_tokens(token_ids)
        with self._lock:
            found = self._index.match(ids, namespace)
            blocks, tail = found.blocks, found.tail_block
            session = CacheSession(len(blocks) * self.block_size, blocks.tolist(), tail, found.tail_tokens)
            holds = self._index.holds
            session._hold, session._close = holds.new_key(), self.close_session
            session._parting = Parting(holds.ended, session._hold)  # from here on what is taken is let go
            holds.take(session._hold, self._index.trie, found.node, blocks, tail)
            session._holds = holds
            return session

    def close_session(self, session: CacheSession) -> None:
        """Release what a session holds; nothing happens the second time, or to one made by hand.

        It waits for nothing: while another call of this cache runs, it is done when that call leaves.
        """
        if not isinstance(session, CacheSession):
            raise TypeError(f"expected a CacheSession, got {type(session).__name__}")
        if session._holds is self._index.holds:
            self._lock.hand_over(partial(self._index.holds.end, session._hold))

    # -- insert ---------------------------------------------------------------------------------------------

    def insert(self, token_ids: Any, block_start: int, keys: Any, values: Any, namespace: Hashable = None) -> int:
        """Cache the block of tokens `block_start..block_start + block_size`; its index.

        A block that is there already stays as it is.

        Args:
            keys, values: per layer float32 `(num_kv_heads * block_size * head_dim,)`, laid out [head][position][dim].

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
            raise ValueError(f"expected block_start a multiple of {self.block_size}, at most {most}, got {start}")
        k, v = self._rows([(keys, values)])
        with self._lock:
            if not self._store_rows(ids[:end], start // self.block_size, k, v, namespace):
                raise OutOfMemoryError(1, 0)
            return int(self._index.find(ids[:end], namespace).blocks[-1])

    def store(self, token_ids: Any, block_start: int, pairs: Sequence[Any], namespace: Hashable = None) -> int:
        """Cache one block after another from `block_start` on, as `insert`; how many of them are cached now.

        What would pass the last full block of the tokens is passed over; when nothing can be evicted any more,
        the rest is left out: the head of a prompt longer than the cache is kept.
        """
        ids, size, start = as_tokens(token_ids), self.block_size, as_integer(block_start, "block_start")
        if start < 0 or start % size:
            raise ValueError(f"expected a multiple of {size} as block_start, got {start}")
        count = min(len(pairs), (len(ids) - start) // size)
        if count <= 0:
            return 0
        keys, values = self._rows(pairs[:count])
        with self._lock:
            return self._store_rows(ids[: start + count * size], start // size, keys, values, namespace)

    def _rows(self, pairs: Sequence[Any]) -> tuple[list[Float32], list[Float32]]:
        """Per layer the rows of K and of V of these blocks; ValueError unless the store can hold them."""
        keys, values = (block_rows(self._store, [pair[i] for pair in pairs], self._head_dim) for i in (0, 1))
        for k, v in zip(keys, values, strict=True):
            self._store.check_values(k, v)
        return keys, values

    def _store_rows(
        self, ids: Tokens, first: int, keys: list[Float32], values: list[Float32], namespace: Hashable
    ) -> int:
        existing, last, room = self._index.open(ids, first, namespace)
        if room:
            blocks = self._pool.acquire(room)
            try:
                write_blocks(self._store, blocks, keys, values, (existing - first) * self.block_size)
                self._index.insert(ids, existing, last, blocks, namespace)
            except Exception:
                self._pool.release(blocks)
                raise
        return existing + room - first

    def adopt(self, token_ids: Any, block_ids: npt.ArrayLike, namespace: Hashable = None) -> int:
        """Cache the full blocks of a sequence by reference; how many of them are cached now.

        Blocks that are cached already stay as they are, those that do not fit are left out.

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
            raise ValueError(f"expected {full} block ids for {len(ids)} tokens, got {len(blocks)}")
        with self._lock:
            known = self._pool.in_use(blocks)
            self._pool.expect_each_once(known)
            ids = ids[: full * self.block_size]
            existing, last, room = self._index.open(ids, 0, namespace, blocks=known)
            if room:
                adopted = known[existing : existing + room]
                self._pool.retain(adopted)
                try:
                    self._index.insert(ids, existing, last, adopted, namespace)
                except Exception:
                    self._pool.release(adopted)
                    raise
            return existing + room

    def evict(self, num_blocks: int) -> int:
        """Evict until `num_blocks` more are free in the pool, or nothing can go; how many became free."""
        count = as_integer(num_blocks, "num_blocks")
        with self._lock:
            return self._index.free_up(count)

    def clear(self) -> None:
        """Forget every block; counters stay. What sessions hold stays readable until they are released."""
        with self._lock:
            self._index.clear()

    # -- save and load --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = ()) -> None:
        """Write every cached block to a file, with its namespace and rank; `load` reads it.

        The file takes the place of the old one at once and whole, or not at all. Other calls wait meanwhile.

        Args:
            model: whose K and V these are; `load` refuses another's.
            beside: other caches to save in the same file.

        Raises:
            TypeError: a namespace that is no None, bool, int, str, bytes or tuple of them.
            OSError: of the file system.
        """
        save_blocks(path, str(model), [self, *beside])

    def load(self, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = ()) -> int:
        """Take in what `save` wrote, the most recently used blocks first, as many as there is room for; how many.

        This reads which tokens there are, not their K and V: a block is read, and checked, when a lookup first finds
        it. One that is damaged is forgotten, with all that comes after it, and logged as a warning.

        Args:
            model: as in `save`.
            beside: other caches, which take in what those beside the saved one had: the first that of the first, where
                formats and dimensions are the same. What finds no taker is passed over.

        Raises:
            InvalidOperationError: blocks are cached here already, or in one of `beside`.
            SnapshotError: not a file of `save`, damaged in what is read now, of another model, or of other formats
                or dimensions; nothing has changed.
            OSError: there is none, or it cannot be read.
        """
        return load_blocks(path, str(model), [self, *beside])

    # -- blocks ---------------------------------------------------------------------------------------------

    def _block(self, index: int) -> CacheBlock:
        """What `index` holds now; its K and V are read when first asked for."""
        block = CacheBlock(self._store.num_layers, self._store.num_heads, self._head_dim, self.block_size)
        block.index, block.token_ids = index, self._index.tokens[index].tolist()
        block.last_used, block.ref_count = int(self._index.used[index]), int(self._index.holds.counts[index])
        born = self._index.born[index]

        def read() -> tuple[list[Float32], list[Float32]]:
            with self._lock:
                if self._index.born[index] != born or not self._pool.ref_count(index):
                    raise BlockNotFoundError(index)
                return read_block(self._store, index, self._head_dim)

        block._read = read
        return block

    def get_block(self, index: int) -> CacheBlock | None:
        """A cached block, or one that is held, by its index; None if there is none."""
        index = as_integer(index, "index")
        if not 0 <= index < self._pool.num_blocks:
            return None
        with self._lock:
            self._index.holds.settle()
            self._index.fetch_all()
            return self._block(index) if self._index.cached[index] or self._index.holds.counts[index] else None

    def block_ids(self) -> list[int]:
        """The cached blocks, ascending."""
        with self._lock:
            self._index.fetch_all()
            return [int(block) for block in np.flatnonzero(self._index.cached)]

    @property
    def pinned_blocks(self) -> int:
        """Blocks that sessions and lookups hold."""
        with self._lock:
            self._index.holds.settle()
            return int(np.count_nonzero(self._index.holds.counts))

    # -- reports --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_empty(self) -> bool:
        """Whether no block is cached."""
        return len(self) == 0

    @property
    def capacity(self) -> int:
        """The most blocks that it may hold."""
        return self._index.max_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def hits(self) -> int:
        """Blocks found."""
        return self._index.hits

    @property
    def misses(self) -> int:
        """Lookups that stopped before the prompt's last full block."""
        return self._index.misses

    @property
    def evictions(self) -> int:
        """Blocks evicted."""
        return self._index.evictions

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses; 0.0 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    @property
    def memory_bytes(self) -> int:
        """Bytes of K and V of the cached blocks."""
        return len(self) * self._store.block_bytes

    def stats(self) -> PrefixCacheStats:
        """The counters now."""
        with self._lock:
            index = self._index
            return PrefixCacheStats(
                self.hit_rate, len(self), self.capacity, self.memory_bytes, index.hits, index.misses, index.evictions,
                index.hit_tokens, index.lookup_tokens, MappingProxyType(dict(index.reasons)),
                index.nbytes + (0 if self._shared else self._pool.nbytes),
            )  # fmt: skip

    def references(self) -> Int32:
        """References that this cache holds on each block of the pool, int32 `(num_blocks,)`."""
        with self._lock:
            return self._index.references()

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._index.check()
            self._blocks.check()

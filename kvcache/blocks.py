"""`PrefixCache`: which full blocks of a prompt are cached, in a store of its own or in that of a `PagedKvCache`.

    prompt    s s s s s s s s u u u        block_size 4, s the tokens of a system prompt
              [block 7] [block 2] +3       two blocks match; `tail_block` has the next 3 tokens, too, if it
                                           shares them: its head can be copied

The trie holds one reference on every block that it names. A session pins what it matched and holds references
of its own, so neither an eviction nor `clear` touches what a request reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache._arrays import as_indices
from kvcache._pool import BlockPool
from kvcache._store import BlockStore
from kvcache._sequences import RUN
from kvcache._tokens import as_tokens
from kvcache._trie import TokenTrie
from kvcache.blocks_info import CacheBlock, CacheSession, PrefixCacheStats
from kvcache.blocks_rows import block_rows, read_block
from kvcache.errors import BlockNotFoundError, InvalidOperationError, OutOfMemoryError
from kvcache.ghosts import GhostTrie
from kvcache.paged import PagedKvCache

__all__ = ["PrefixAwarePrefill", "PrefixCache"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]
REASONS = ("no_shared_prefix", "shorter_than_block", "evicted", "namespace")


class _Match(NamedTuple):
    node: int  # the trie's, good until it changes; -1 where nothing matched
    length: int  # tokens of the full blocks
    blocks: Int32
    tail_block: int
    tail_tokens: int


class _Hold(NamedTuple):
    epoch: int  # clear() ends an epoch, and with it the pins
    node: int  # pinned; -1: none
    blocks: Int32  # referenced
    tail_block: int  # referenced as well; -1: none


_NOTHING = _Match(-1, 0, np.empty(0, np.int32), -1, 0)


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
        padded = -(-head_dim // 8) * 8
        store = BlockStore(
            num_layers, max_blocks, block_size, num_kv_heads, padded, key_dtype or dtype, value_dtype or dtype
        )
        self._own(BlockPool(max_blocks), store, head_dim, max_blocks, threading.RLock())

    @classmethod
    def sharing(cls, paged: PagedKvCache, max_blocks: int | None = None) -> PrefixCache:
        """A prefix cache over the blocks of a paged cache: sequences `adopt` what it matched, and it what they wrote.

        `max_blocks`, by default all, is the most that it may name; evict them with `evict` when the paged cache
        needs room.
        """
        cache = cls.__new__(cls)
        limit = paged.total_blocks if max_blocks is None else min(max_blocks, paged.total_blocks)
        cache._own(paged._pool, paged._store, paged.head_dim, limit, paged._lock)
        cache._shared = True
        paged._holders.append(cache.references)
        return cache

    def _own(self, pool: BlockPool, store: BlockStore, head_dim: int, max_blocks: int, lock: Any) -> None:
        self._pool, self._store, self._head_dim, self._max_blocks, self._lock = pool, store, head_dim, max_blocks, lock
        self._shared = False
        self._counts = np.zeros(pool.num_blocks, np.int32)  # holds on each block, by sessions and lookups
        self._used = np.zeros(pool.num_blocks, np.int64)  # time of each block's last use
        self._born = np.zeros(pool.num_blocks, np.int64)  # time when it got what it holds
        self._cached = np.zeros(pool.num_blocks, bool)  # whether the trie names the block
        self._tokens = np.zeros((pool.num_blocks, store.block_size), np.uint32)
        self._clock = 0
        self._epoch = 0
        self._holds: dict[int, _Hold] = {}
        self._looked_up: dict[int, list[int]] = {}  # block -> the holds that lookups left on it
        self._next_hold = 0
        self._ended: deque[int] = deque()
        self._hits = self._misses = self._evictions = self._hit_tokens = self._lookup_tokens = 0
        self._reasons = dict.fromkeys(REASONS, 0)
        self._forget()

    def _forget(self) -> None:
        self._trie = TokenTrie(self.block_size)
        self._roots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._ghosts = GhostTrie(self.block_size, self._max_blocks)

    # -- lookup ---------------------------------------------------------------------------------------------

    def lookup(self, token_ids: Any, namespace: Hashable = None) -> tuple[int, list[CacheBlock]]:
        """`(matched_len, blocks)`: the full blocks that begin the prompt, each held until `release(block.index)`.

        Each block found counts a hit, a stop before the last full block a miss.
        """
        ids = as_tokens(token_ids)
        with self._lock:
            found = self._match(ids, namespace)
            indices = found.blocks.tolist()
            node, size = found.node, self.block_size
            # From the last block up, so that each step cuts one block's node off the rest.
            for i in range(len(indices) - 1, -1, -1):
                node = self._trie.boundary(node, (i + 1) * size)
                hold = self._hold(node, found.blocks[i : i + 1], -1)
                self._looked_up.setdefault(indices[i], []).append(hold)
            return found.length, [self._block(i) for i in indices]

    def release(self, index: int) -> None:
        """Let go of a block that `lookup` returned. InvalidOperationError if no lookup holds it."""
        with self._lock:
            self._settle()
            holds = self._looked_up.get(index)
            if not holds:
                raise InvalidOperationError(f"expected a block that a lookup holds, got {index}")
            self._end(holds.pop())
            if not holds:
                del self._looked_up[index]

    def open_session(self, token_ids: Any, namespace: Hashable = None) -> CacheSession:
        """The matched blocks as a session, which holds them until it is released or dropped."""
        ids = as_tokens(token_ids)
        with self._lock:
            found = self._match(ids, namespace)
            session = CacheSession(found.length, found.blocks.tolist(), found.tail_block, found.tail_tokens)
            node = self._trie.boundary(found.node, found.length) if found.length else -1
            session._hold = self._hold(node, found.blocks, found.tail_block)
            session._ended = self._ended
            return session

    def close_session(self, session: CacheSession) -> None:
        """Let go of what a session holds; nothing happens the second time."""
        with self._lock:
            self._settle()
            self._end(session._hold)

    def _match(self, ids: Tokens, name: Hashable) -> _Match:
        """Find, count, and use what was found."""
        self._settle()
        found, length, wanted = _NOTHING, 0, len(ids) // self.block_size * self.block_size
        root = self._roots.get(name)
        if root is not None:
            node, length, blocks, tail = self._trie.lookup(root, ids)
            full = len(blocks) * self.block_size
            found = _Match(node, full, blocks, tail, length - full)
        self._lookup_tokens += len(ids)
        self._hit_tokens += found.length
        self._hits += len(found.blocks)
        if found.length < wanted:
            self._misses += 1
            self._reasons[self._why(ids, found.length, length, name)] += 1
        if found.length:
            self._clock += 1
            self._used[found.blocks] = self._clock
            found = found._replace(node=self._trie.touch(found.node, found.length), blocks=found.blocks)
        return found

    def _why(self, ids: Tokens, matched: int, shared: int, name: Hashable) -> str:
        missing = ids[: matched + self.block_size]
        if self._ghosts.remembers(missing, name):
            return "evicted"
        for other, root in self._roots.items():
            if other != name and self._trie.match(root, missing)[1] == len(missing):
                return "namespace"
        return "shorter_than_block" if shared > matched else "no_shared_prefix"

    # -- holds ----------------------------------------------------------------------------------------------

    def _hold(self, node: int, blocks: Int32, tail_block: int) -> int:
        if node >= 0:
            self._trie.pin(node)
        self._pool.retain(blocks)
        self._counts[blocks] += 1
        if tail_block >= 0:
            self._pool.retain([tail_block])
        self._next_hold += 1
        self._holds[self._next_hold] = _Hold(self._epoch, node, blocks, tail_block)
        return self._next_hold

    def _end(self, key: int) -> None:
        hold = self._holds.pop(key, None)
        if hold is None:
            return
        if hold.epoch == self._epoch and hold.node >= 0:
            self._trie.unpin(hold.node)
        self._counts[hold.blocks] -= 1
        self._pool.release(hold.blocks)
        if hold.tail_block >= 0:
            self._pool.release([hold.tail_block])

    def _settle(self) -> None:
        """End the holds of sessions that were dropped."""
        while self._ended:
            self._end(self._ended.popleft())

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
        ids = as_tokens(token_ids)
        end = block_start + self.block_size
        if block_start < 0 or block_start % self.block_size or end > len(ids):
            raise ValueError(
                f"expected a full block of {len(ids)} tokens at a multiple of {self.block_size}, got {block_start}"
            )
        with self._lock:
            if not self.store(ids[:end], block_start, [(keys, values)], namespace):
                raise OutOfMemoryError(1, 0)
            return int(self._trie.lookup(self._roots[namespace], ids[:end])[2][-1])

    def store(self, token_ids: Any, block_start: int, pairs: Sequence[Any], namespace: Hashable = None) -> int:
        """Cache one block after another from `block_start` on, as `insert`; how many are cached now.

        What would pass the last full block of the tokens is passed over; when nothing can be evicted any more,
        the rest is left out: the head of a prompt longer than the cache is kept.
        """
        ids, size = as_tokens(token_ids), self.block_size
        count = min(len(pairs), (len(ids) - block_start) // size)
        if block_start < 0 or block_start % size:
            raise ValueError(f"expected a multiple of {size} as block_start, got {block_start}")
        if count <= 0:
            return 0
        keys, values = (block_rows(self._store, [pair[i] for pair in pairs[:count]], self._head_dim) for i in (0, 1))
        for k, v in zip(keys, values, strict=True):
            self._store.represent(k, v)
        with self._lock:
            first = block_start // size

            def write(existing: int, blocks: Int32) -> None:
                rows = slice((existing - first) * size, (existing - first + len(blocks)) * size)
                runs = np.array([(block, 0, size) for block in blocks], RUN)
                for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                    self._store.write(layer, runs, k[rows], v[rows])

            return self._insert(ids[: block_start + count * size], first, namespace, None, write) - first

    def adopt(self, token_ids: Any, block_ids: npt.ArrayLike, namespace: Hashable = None) -> int:
        """Cache the full blocks of a sequence by reference: `block_ids` of its first tokens; how many are cached now.

        Only for a cache that shares the blocks of a paged one. Blocks that are cached already stay as they are.
        """
        ids = as_tokens(token_ids)
        blocks = as_indices(block_ids, "block ids").astype(np.int32)
        full = len(ids) // self.block_size
        if not self._shared:
            raise InvalidOperationError("expected a cache that shares the blocks of a PagedKvCache")
        if len(blocks) < full:
            raise ValueError(f"expected {full} block ids for {len(ids)} tokens, got {len(blocks)}")
        with self._lock:
            for block in blocks[:full].tolist():
                if not 0 <= block < self._pool.num_blocks or not self._pool.ref_count(block):
                    raise BlockNotFoundError(block)
            return self._insert(ids[: full * self.block_size], 0, namespace, blocks[:full], None)

    def _insert(self, ids: Tokens, first: int, name: Hashable, given: Int32 | None, write: Any) -> int:
        """Cache the blocks of `ids`: `given` ones by reference, or new ones that `write` fills; blocks cached now."""
        self._settle()
        size, wanted = self.block_size, len(ids) // self.block_size
        node, existing = -1, 0
        if name in self._roots:
            node, length = self._trie.match(self._roots[name], ids)
            existing = length // size
        if existing < first:
            raise InvalidOperationError(f"expected {first} blocks before this one in the cache, got {existing}")
        if existing:
            node = self._trie.touch(node, existing * size)
            self._trie.pin(node)
        try:
            room = self._make_room(wanted - existing, given is None)
        finally:
            if existing:
                self._trie.unpin(node)
        if room == 0:
            return existing
        if given is None:
            blocks = self._pool.acquire(room)
            try:
                write(existing, blocks)
            except BaseException:
                self._pool.release(blocks)
                raise
        else:
            blocks = given[existing : existing + room]
            self._pool.retain(blocks)
        cached = existing + room
        if name not in self._roots:
            root = self._trie.add_root()
            self._roots[name], self._names[root] = root, name
        values = np.concatenate([np.zeros(existing, np.int32), blocks])
        self._trie.insert(self._roots[name], ids[: cached * size], values)
        self._clock += 1
        self._used[blocks] = self._born[blocks] = self._clock
        self._cached[blocks] = True
        self._tokens[blocks] = ids[existing * size : cached * size].reshape(room, size)
        return cached

    def _make_room(self, count: int, new: bool) -> int:
        """Evict until `count` more blocks fit; how many do. New ones also need to be free in the pool."""

        def room() -> int:
            spare = self._max_blocks - len(self)
            return min(spare, self._pool.num_free) if new else spare

        while room() < count and self._evict(count - room()):
            pass
        return max(0, min(count, room()))

    def _evict(self, count: int) -> int:
        """Evict up to `count` blocks of the next leaf; how many left."""
        leaf = self._trie.victim()
        if leaf < 0 or count <= 0:
            return 0
        root, tokens, _ = self._trie.path(leaf)
        blocks = self._trie.evict(min(count, self._trie.num_pages_of(leaf)))
        self._ghosts.remember(tokens, self._names[root])
        self._pool.release(blocks)
        self._cached[blocks] = False
        self._evictions += len(blocks)
        if self._trie.is_leaf(root):
            self._trie.drop_root(root)
            del self._roots[self._names.pop(root)]
        return len(blocks)

    def evict(self, num_blocks: int) -> int:
        """Evict until `num_blocks` more are free in the pool, or nothing can go; how many became free."""
        with self._lock:
            self._settle()
            before = self._pool.num_free
            while self._pool.num_free - before < num_blocks:
                if not self._evict(num_blocks - (self._pool.num_free - before)):
                    break
            return self._pool.num_free - before

    def clear(self) -> None:
        """Forget every block; counters stay. What sessions hold stays readable until they are released."""
        with self._lock:
            self._settle()
            self._pool.release(self._trie.clear())
            self._cached[:] = False
            self._epoch += 1
            self._forget()

    # -- blocks ---------------------------------------------------------------------------------------------

    def _block(self, index: int) -> CacheBlock:
        """What `index` holds now; its K and V are read when first asked for."""
        block = CacheBlock(self._store.num_layers, self._store.num_heads, self._head_dim, self.block_size)
        block.index, block.token_ids = index, self._tokens[index].tolist()
        block.last_used, block.ref_count = int(self._used[index]), int(self._counts[index])
        born = self._born[index]

        def read() -> tuple[list[Float32], list[Float32]]:
            with self._lock:
                if self._born[index] != born or not self._pool.ref_count(index):
                    raise BlockNotFoundError(index)
                return read_block(self._store, index, self._head_dim)

        block._read = read
        return block

    def get_block(self, index: int) -> CacheBlock | None:
        """A cached block by its index; None if there is none."""
        with self._lock:
            self._settle()
            if not 0 <= index < self._pool.num_blocks or not (self._cached[index] or self._counts[index]):
                return None
            return self._block(index)

    # -- reports --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._trie)

    @property
    def is_empty(self) -> bool:
        """Whether no block is cached."""
        return len(self) == 0

    @property
    def capacity(self) -> int:
        """The most blocks that it may hold."""
        return self._max_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._store.block_size

    @property
    def hits(self) -> int:
        """Blocks found."""
        return self._hits

    @property
    def misses(self) -> int:
        """Lookups that stopped before the prompt's last full block."""
        return self._misses

    @property
    def evictions(self) -> int:
        """Blocks evicted."""
        return self._evictions

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses; 0.0 before the first."""
        return self._hits / (self._hits + self._misses) if self._hits + self._misses else 0.0

    @property
    def memory_bytes(self) -> int:
        """Bytes of K and V of the cached blocks."""
        return len(self) * self._store.block_bytes

    def stats(self) -> PrefixCacheStats:
        """The counters now."""
        with self._lock:
            return PrefixCacheStats(
                self.hit_rate, len(self), self._max_blocks, self.memory_bytes, self._hits, self._misses,
                self._evictions, self._hit_tokens, self._lookup_tokens, MappingProxyType(dict(self._reasons)),
            )  # fmt: skip

    def references(self) -> Int32:
        """References that this cache holds on each block of the pool, int32 `(num_blocks,)`."""
        held = [self._trie.all_values(root) for root in self._names]
        for hold in self._holds.values():
            held += [hold.blocks, np.array([hold.tail_block] if hold.tail_block >= 0 else [], np.int32)]
        blocks = np.concatenate([np.empty(0, np.int32), *held])
        return np.bincount(blocks, minlength=self._pool.num_blocks).astype(np.int32)

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._settle()
            self._trie.check()
            self._ghosts.check()
            assert self._trie.roots() == sorted(self._names), "prefix cache: roots differ"
            assert {name: root for root, name in self._names.items()} == self._roots, "prefix cache: names differ"
            assert len(self) <= self._max_blocks, "prefix cache: more blocks than allowed"
            named = [self._trie.all_values(root) for root in self._names]
            named = np.sort(np.concatenate([np.empty(0, np.int32), *named]))
            assert np.array_equal(named, np.flatnonzero(self._cached)), "prefix cache: the trie names other blocks"
            assert sum(self._reasons.values()) == self._misses, "prefix cache: reasons do not add up"
            if not self._shared:
                self._pool.check()
                assert np.array_equal(self.references(), self._pool.ref_counts()), "prefix cache: references differ"


class PrefixAwarePrefill:
    """The three steps of a prefill with a prefix cache: prepare, store what was computed, release.

    Attributes:
        cache: the `PrefixCache`.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def prepare(self, tokens: Any, namespace: Hashable = None) -> tuple[CacheSession, int]:
        """`(session, uncached_start)`: what is cached of the prompt, held, and the first token to compute."""
        session = self.cache.open_session(tokens, namespace)
        return session, session.matched_prefix_len

    def store_blocks(self, tokens: Any, uncached_start: int, pairs: Sequence[Any], namespace: Hashable = None) -> int:
        """Cache `(keys, values)` of the blocks from `uncached_start` on; how many of them are cached now."""
        return self.cache.store(tokens, uncached_start, pairs, namespace)

    def release_session(self, session: CacheSession) -> None:
        """Let go of a session; dropping it does the same."""
        self.cache.close_session(session)

    def stats(self) -> PrefixCacheStats:
        """The cache's counters now."""
        return self.cache.stats()

"""`PrefixKvCache`: KV of stored prompts, shared by every prompt that begins alike.

A trie says which token lies in which slot, an arena holds the rows, one per token: the KV of a prefix that
many entries share is there once, and a lookup finds the longest common prefix to the token.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache._arrays import as_integer
from kvcache._entries import EntryTrie
from kvcache._store import BlockStore
from kvcache._tokens import as_tokens
from kvcache.arena import Lease, RowArena
from kvcache.errors import OutOfMemoryError
from kvcache.kv_cache import CachedKvState, KvCache, KvCacheAccess
from kvcache.rows import rows_of

__all__ = ["PrefixCacheConfig", "PrefixKvCache", "PrefixKvStats"]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """What a `PrefixKvCache` may hold, and what counts as a match.

    Attributes:
        max_entries: stored prefixes.
        max_memory_bytes: bytes of K and V, those of states that callers still hold included.
        min_prefix_len: shorter prefixes are neither stored nor matched.
        partial_matches: whether a prompt may match a part of a stored prefix; if not, only whole ones match.
        dtype: storage format, "f32", "f16", "q8", "q4", "q3" or "q2"; `key_dtype` and `value_dtype` name them apart.
        rotate: "auto", True or False: whether quantised rows are stored under a Hadamard rotation.
        head_dim: how quantised rows are cut into heads, each with a scale of its own: a multiple of 8, at most 256,
            that divides kv_dim. None: the whole row is one head. f32 and f16 rows need no heads.

    Raises:
        ValueError: a negative limit, or a format that is not supported.
    """

    max_entries: int = 256
    max_memory_bytes: int = 512 * 2**20
    min_prefix_len: int = 4
    partial_matches: bool = True
    dtype: str = "f32"
    key_dtype: str | None = None
    value_dtype: str | None = None
    rotate: bool | str = "auto"
    head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_entries", "max_memory_bytes", "min_prefix_len"):
            if as_integer(getattr(self, name), name) < 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if self.head_dim is not None:
            as_integer(self.head_dim, "head_dim")
        # A store without blocks says what is supported; without head_dim, what a row will be is not known yet.
        BlockStore(1, 0, 1, 1, 8 if self.head_dim is None else self.head_dim, *self.formats, self.rotate)

    @property
    def formats(self) -> tuple[str, str]:
        """Storage formats of K and of V."""
        return self.key_dtype or self.dtype, self.value_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class PrefixKvStats:
    """A snapshot of the counters.

    Attributes:
        entries: stored prefixes.
        tokens: tokens whose KV is stored; a shared prefix counts once.
        memory_bytes: bytes of K and V held, those of states out there included.
        hits, misses: lookups.
        hit_tokens, lookup_tokens: tokens matched, of tokens asked for.
        evictions: entries evicted.
    """

    entries: int
    tokens: int
    memory_bytes: int
    hits: int
    misses: int
    hit_tokens: int
    lookup_tokens: int
    evictions: int


class _LeasedState(CachedKvState):
    """A state that shows slots of an arena; its rows are read when they are asked for."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._seq_len = len(lease.slots)

    @property
    def num_layers(self) -> int:
        return self._lease.arena.rows.num_layers

    @property
    def kv_dim(self) -> int:
        return self._lease.arena.rows.kv_dim

    @property
    def keys(self) -> list[Float32]:
        return [self._lease.keys(layer) for layer in range(self.num_layers)]

    @property
    def values(self) -> list[Float32]:
        return [self._lease.values(layer) for layer in range(self.num_layers)]


class PrefixKvCache:
    """A radix tree of token prefixes with their KV.

    Entries leave one by one, the least recently used first, none before those that extend it. A state that a
    caller holds stays as it is, whatever leaves; its memory counts until it is let go.

    KV is taken to be a function of the tokens: what is stored for a prefix stays, also when an entry that
    shares it is stored again. `remove` it first to replace it. Calls on one cache are serialised.
    """

    def __init__(self, config: PrefixCacheConfig | None = None) -> None:
        self.config = PrefixCacheConfig() if config is None else config
        if not isinstance(self.config, PrefixCacheConfig):
            raise TypeError(f"expected a PrefixCacheConfig, got {type(config).__name__}")
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._trie = EntryTrie()
        self._roots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._arenas: dict[tuple[int, int], RowArena] = {}  # by num_layers and kv_dim
        self._arena_of: dict[int, RowArena] = {}  # by root
        self._hits = self._misses = self._hit_tokens = self._lookup_tokens = self._evictions = 0

    # -- lookup ---------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, namespace: Hashable = None) -> tuple[int, CachedKvState] | None:
        """`(matched_len, state)`: the longest prefix of `tokens` whose KV is stored, to the token; None if none.

        The entry that serves the match counts as used. Every call is one hit or one miss.
        """
        ids = as_tokens(tokens)
        with self._lock:
            root = self._roots.get(namespace)
            node, length, slots = -1, 0, np.empty(0, np.int32)
            if root is not None:
                node, length, slots, _ = self._trie.lookup(root, ids)
                if not self.config.partial_matches:
                    node, length = self._trie.entry_at(node, length)
            if root is None or length < max(1, self.config.min_prefix_len):
                self._misses += 1
                self._lookup_tokens += len(ids)
                return None
            arena = self._arena_of[root]
            arena.settle()
            state = _LeasedState(arena.lease(slots[:length]))
            self._trie.touch_entry(node)
            self._hits += 1
            self._hit_tokens += length
            self._lookup_tokens += len(ids)
            return length, state

    @staticmethod
    def restore(cached: CachedKvState, target: KvCache) -> None:
        """Replace the content of `target` by a cached state.

        Raises:
            TypeError: something else.
            ValueError: other layers or another kv_dim, or more tokens than fit; `target` is unchanged.
        """
        if not isinstance(cached, CachedKvState) or not isinstance(target, KvCache):
            raise TypeError(
                f"expected a CachedKvState and a KvCache, got {type(cached).__name__} and {type(target).__name__}"
            )
        if cached.seq_len and (cached.num_layers, cached.kv_dim) != (target.num_layers, target.kv_dim):
            raise ValueError(
                f"expected a state of {target.num_layers} layers and kv_dim {target.kv_dim}, "
                f"got {cached.num_layers} and {cached.kv_dim}"
            )
        target.restore_from_snapshot(cached.keys, cached.values, cached.seq_len)

    # -- store ----------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Any,
        kv_cache: KvCacheAccess,
        seq_len: int,
        kv_dim: int,
        num_layers: int,
        namespace: Hashable = None,
    ) -> None:
        """Store the KV of `tokens`, the first `seq_len` tokens of a live cache; as `store_snapshot`.

        Raises:
            IndexError: the cache has fewer layers.
            ValueError: `seq_len` is not the number of tokens, or the cache holds fewer rows.
            OutOfMemoryError: it could never fit.
        """
        if not hasattr(kv_cache, "get_keys") or not hasattr(kv_cache, "get_values"):
            raise TypeError(f"expected a KvCacheAccess, got {type(kv_cache).__name__}")
        size = as_integer(seq_len, "seq_len") * as_integer(kv_dim, "kv_dim")
        if len(as_tokens(tokens)) < self.config.min_prefix_len:
            return
        keys = [kv_cache.get_keys(layer) for layer in range(as_integer(num_layers, "num_layers"))]
        values = [kv_cache.get_values(layer) for layer in range(num_layers)]
        for layer, rows in enumerate(zip(keys, values, strict=True)):
            if min(map(len, rows)) < size:
                raise ValueError(f"expected {size} floats in layer {layer}, got {min(map(len, rows))}")
        state = CachedKvState([k[:size] for k in keys], [v[:size] for v in values], seq_len)
        self.store_snapshot(tokens, state, namespace)

    def store_snapshot(self, tokens: Any, snapshot: CachedKvState, namespace: Hashable = None) -> None:
        """Store a state under its tokens; fewer than `min_prefix_len` are passed over.

        Only the rows of tokens that no entry shares are copied. Entries are evicted as the limits require.

        Raises:
            ValueError: not one row per token, another shape than the namespace has, rows that need another `head_dim`,
                values that are not finite or that the format cannot hold.
            OutOfMemoryError: it could never fit beside the states that callers hold; nothing has changed.
        """
        ids = as_tokens(tokens)
        if not isinstance(snapshot, CachedKvState):
            raise TypeError(f"expected a CachedKvState, got {type(snapshot).__name__}")
        if len(ids) < max(1, self.config.min_prefix_len):
            return
        if snapshot.seq_len != len(ids):
            raise ValueError(f"expected a snapshot of {len(ids)} tokens, got {snapshot.seq_len}")
        keys, values = (self._as_rows(rows, len(ids)) for rows in (snapshot.keys, snapshot.values))
        with self._lock:
            self._store(ids, keys, values, namespace)

    def _as_rows(self, layers: list[Float32], n: int) -> list[Float32]:
        rows = [layer.reshape(n, -1) for layer in layers]
        if not rows or rows[0].shape[1] == 0:
            raise ValueError("expected a snapshot with at least one layer and one float per token, got none")
        return rows

    def _store(self, ids: npt.NDArray[np.uint32], keys: list[Float32], values: list[Float32], name: Hashable) -> None:
        shape = (len(keys), keys[0].shape[1])
        root = self._roots.get(name)
        arena = self._arenas.get(shape) or self._new_arena(*shape)
        if root is not None and self._arena_of[root] is not arena:
            other = self._arena_of[root]
            raise ValueError(
                f"expected {other.rows.num_layers} layers of kv_dim {other.rows.kv_dim} in this namespace, "
                f"got {shape[0]} of {shape[1]}"
            )
        for k, v in zip(keys, values, strict=True):
            arena.rows.represent(k, v)
        node, length, old = -1, 0, np.empty(0, np.int32)
        if root is not None:
            node, length, old, _ = self._trie.lookup(root, ids)
        self._refuse_what_never_fits(arena, len(ids), old)
        if root is not None:
            node = self._trie.touch(node, length)  # What the entry builds on is used, and leaves last.
        self._make_room(arena, len(ids) - length, root, node, length == len(ids))
        slots = np.empty(len(ids), np.int32)
        limit = self.config.max_memory_bytes // arena.rows.slot_bytes
        slots[length:] = arena.take(len(ids) - length, limit)
        new = name not in self._roots
        try:
            arena.rows.write(slots[length:], [k[length:] for k in keys], [v[length:] for v in values])
            if new:
                self._open(name, arena, shape)
            node, _ = self._trie.insert(self._roots[name], ids, slots)
        except BaseException:
            arena.drop(slots[length:][::-1])
            if new and name in self._roots:
                self._close(self._roots[name])
            raise
        self._trie.mark(node)

    def _new_arena(self, num_layers: int, kv_dim: int) -> RowArena:
        config = self.config
        return RowArena(rows_of(num_layers, kv_dim, *config.formats, config.rotate, config.head_dim))

    def _open(self, name: Hashable, arena: RowArena, shape: tuple[int, int]) -> None:
        root = self._trie.add_root()
        self._roots[name], self._names[root] = root, name
        self._arenas[shape] = self._arena_of[root] = arena

    def _refuse_what_never_fits(self, arena: RowArena, n: int, old: npt.NDArray[np.int32]) -> None:
        """OutOfMemoryError unless `n` tokens fit once every other entry has left."""
        if self.config.max_entries == 0:
            raise OutOfMemoryError(1, 0, "entries")
        if self._used_bytes() + (n - len(old)) * arena.rows.slot_bytes <= self.config.max_memory_bytes:
            return
        held = sum(other.num_leased() * other.rows.slot_bytes for other in self._arenas.values())
        if len(old):
            held -= int(np.count_nonzero(arena.leased[old])) * arena.rows.slot_bytes
        if held + n * arena.rows.slot_bytes > self.config.max_memory_bytes:
            raise OutOfMemoryError(n * arena.rows.slot_bytes, max(0, self.config.max_memory_bytes - held), "bytes")

    def _make_room(self, arena: RowArena, count: int, root: int | None, node: int, whole: bool) -> None:
        """Evict until one more entry with `count` new tokens fits; the path to `node` stays."""
        entries = self._trie.num_entries + (not whole or not self._trie.is_marked(node))
        need = count * arena.rows.slot_bytes
        while entries > self.config.max_entries or self._used_bytes() + need > self.config.max_memory_bytes:
            before = self._trie.num_entries
            leaving = self._trie.evict_entry(node)
            assert leaving is not None, "what was found to fit does not"
            self._let_go(*leaving, keep=root)
            entries -= before - self._trie.num_entries
            self._evictions += before - self._trie.num_entries

    def _let_go(self, root: int, slots: npt.NDArray[np.int32], keep: int | None = None) -> None:
        """Give the slots back; a namespace without entries goes, except `keep`."""
        self._arena_of[root].drop(slots)
        if root != keep and self._trie.is_leaf(root):
            self._close(root)

    def _close(self, root: int) -> None:
        arena = self._arena_of[root]
        self._trie.drop_root(root)
        del self._roots[self._names.pop(root)], self._arena_of[root]
        if arena.num_used == 0 and arena not in self._arena_of.values():
            del self._arenas[arena.rows.num_layers, arena.rows.kv_dim]

    # -- the rest -------------------------------------------------------------------------------------------

    def remove(self, tokens: Any, namespace: Hashable = None) -> bool:
        """Forget the entry stored under exactly these tokens; False if there is none."""
        ids = as_tokens(tokens)
        with self._lock:
            root = self._roots.get(namespace)
            if root is None or not len(ids):
                return False
            _, length = self._trie.entry_at(*self._trie.match(root, ids))
            if length < len(ids):
                return False
            self._let_go(root, self._trie.remove(root, ids))
            return True

    def clear(self) -> None:
        """Forget everything and reset all counters; states that callers hold stay valid, and count no more."""
        with self._lock:
            self._reset()

    def _used_bytes(self) -> int:
        for arena in self._arenas.values():
            arena.settle()
        return sum(arena.num_used * arena.rows.slot_bytes for arena in self._arenas.values())

    @property
    def memory_usage(self) -> int:
        """Bytes of K and V held: each shared prefix once, and what states out there still show."""
        with self._lock:
            return self._used_bytes()

    def __len__(self) -> int:
        return self._trie.num_entries

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored."""
        return len(self) == 0

    @property
    def hits(self) -> int:
        """Lookups that found something."""
        return self._hits

    @property
    def misses(self) -> int:
        """Lookups that found nothing."""
        return self._misses

    @property
    def hit_tokens(self) -> int:
        """Tokens matched by all lookups."""
        return self._hit_tokens

    def stats(self) -> PrefixKvStats:
        """The counters now."""
        with self._lock:
            return PrefixKvStats(
                len(self), self._trie.num_tokens, self._used_bytes(), self._hits, self._misses,
                self._hit_tokens, self._lookup_tokens, self._evictions,
            )  # fmt: skip

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._trie.check()
            assert self._trie.roots() == sorted(self._names) == sorted(self._arena_of), "prefix cache: roots differ"
            assert {name: root for root, name in self._names.items()} == self._roots, "prefix cache: names differ"
            assert len(self) <= self.config.max_entries, "prefix cache: more entries than allowed"
            assert self._used_bytes() <= self.config.max_memory_bytes, "prefix cache: more memory than allowed"
            for arena in self._arenas.values():
                roots = [root for root, other in self._arena_of.items() if other is arena]
                arena.check(np.concatenate([np.empty(0, np.int32), *map(self._trie.all_values, roots)]))

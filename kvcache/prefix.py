"""`PrefixKvCache`: KV of stored prompts, shared by every prompt that begins alike.

A trie says which token lies in which slot, an arena holds the rows, one per token: the KV of a prefix that
many entries share is there once, and a lookup finds the longest common prefix to the token.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache._arrays import as_integer
from kvcache._entries import EntryTrie
from kvcache._tokens import as_tokens
from kvcache.arena import Lease, RowArena
from kvcache.errors import InvalidOperationError, OutOfMemoryError, SnapshotError
from kvcache.kv_cache import CachedKvState, KvCache, KvCacheAccess
from kvcache.prefix_info import PrefixCacheConfig, PrefixKvStats
from kvcache.rows import rows_of
from kvcache.saved import SavedRows
from kvcache.segments import newest_entries, ranges, segments_of, walk_back, well_formed
from kvcache.snapshot import Snapshot, write_snapshot

__all__ = ["PrefixCacheConfig", "PrefixKvCache", "PrefixKvStats"]

Float32 = npt.NDArray[np.float32]


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
        self._name_nothing({})
        self._hits = self._misses = self._hit_tokens = self._lookup_tokens = self._evictions = 0

    def _name_nothing(self, arenas: dict[tuple[int, int], RowArena]) -> None:
        self._trie = EntryTrie()
        self._roots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._arenas = arenas  # by num_layers and kv_dim
        self._arena_of: dict[int, RowArena] = {}  # by root

    # -- lookup ---------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, namespace: Hashable = None) -> tuple[int, CachedKvState] | None:
        """`(matched_len, state)`: the longest prefix of `tokens` whose KV is stored, to the token; None if none.

        The entry that serves the match counts as used. Every call is one hit or one miss.
        """
        ids = as_tokens(tokens)
        with self._lock:
            node, length, slots = self._find(ids, namespace)
            if length and not self.config.partial_matches:
                node, length = self._trie.entry_at(node, length)
            if length < max(1, self.config.min_prefix_len):
                self._misses += 1
                self._lookup_tokens += len(ids)
                return None
            arena = self._arena_of[self._roots[namespace]]
            arena.settle()
            state = _LeasedState(arena.lease(slots[:length]))
            self._trie.touch_entry(node)
            self._hits += 1
            self._hit_tokens += length
            self._lookup_tokens += len(ids)
            return length, state

    def _find(self, ids: npt.NDArray[np.uint32], name: Hashable) -> tuple[int, int, npt.NDArray[np.int32]]:
        """`(node, length, slots)` of the longest prefix whose rows are here; what is damaged in a file is forgotten."""
        while (root := self._roots.get(name)) is not None:
            node, length, slots, _ = self._trie.lookup(root, ids)
            good = self._arena_of[root].fetch(slots)
            if good == length:
                return node, length, slots
            self._forget_from(root, ids[: good + 1])
        return -1, 0, np.empty(0, np.int32)

    def _forget_from(self, root: int, ids: npt.NDArray[np.uint32]) -> None:
        """Forget the last of these tokens and all that follows it; what leads to it stays, as an entry if need be."""
        arena, length = self._arena_of[root], len(ids) - 1
        node = self._trie.boundary(self._trie.match(root, ids[:length])[0], length)
        self._trie.pin(node)  # It keeps its id while what follows it goes.
        try:
            arena.drop(self._trie.prune(root, ids))
            new = length > 0 and self._trie.is_leaf(node) and self._trie.mark(node)
        finally:
            self._trie.unpin(node)
        if new and not (self.config.partial_matches and length >= self.config.min_prefix_len):
            arena.drop(self._trie.cut_leaf(node))
        if self._trie.is_leaf(root):
            self._close(root)

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
        node, length, old = self._find(ids, name)
        root = self._roots.get(name)
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
        self._trie.drop_empty(root)
        del self._roots[self._names.pop(root)], self._arena_of[root]
        if arena.num_used == 0 and arena not in self._arena_of.values():
            del self._arenas[arena.rows.num_layers, arena.rows.kv_dim]

    # -- save and load --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], model: str = "") -> None:
        """Write every entry to a file, with its namespace and rank; `load` reads it.

        The file takes the place of the old one at once and whole, or not at all. Other calls wait meanwhile.

        Args:
            model: whose K and V these are; `load` refuses another's.

        Raises:
            TypeError: a namespace that is no None, bool, int, str, bytes or tuple of them.
            OSError: of the file system.
        """
        with self._lock:
            self._fetch_all()
            names, roots = list(self._roots), list(self._roots.values())
            arenas = [arena for arena in self._arenas.values() if arena in self._arena_of.values()]
            arena_of = np.array([arenas.index(self._arena_of[root]) for root in roots], np.int64)
            segments, slots = segments_of(self._trie, roots)
            of_slot = np.repeat(arena_of[segments.namespaces], segments.lengths)
            write_snapshot(
                path, "entries", str(model), [arena.rows.arena() for arena in arenas],
                list(zip(arena_of.tolist(), names, strict=True)), segments,
                lambda i: arenas[i].pages(slots[of_slot == i]),
            )  # fmt: skip

    def _fetch_all(self) -> None:
        """Bring in all that waits in a file, and forget what is damaged there."""
        if any(arena.saved for arena in self._arenas.values()):
            for root, tokens, _ in [self._trie.path(leaf) for leaf in self._trie.leaf_ids()]:
                self._find(tokens, self._names.get(root))

    def load(self, path: str | os.PathLike[str], model: str = "") -> int:
        """Take in what `save` wrote, the most recently used entries first, as far as the limits go; how many.

        This reads what is stored, not the rows: those come when a lookup first asks for them, and are checked
        then. What is damaged is forgotten, with all that is built on it, and logged as a warning.

        Args:
            model: as in `save`.

        Raises:
            InvalidOperationError: something is stored here already.
            SnapshotError: not a file of `save`, damaged in what is read now, of another model, or of other formats;
                nothing has changed.
            OSError: there is none, or it cannot be read.
        """
        with self._lock:
            if self._trie.num_entries:
                raise InvalidOperationError(f"expected an empty cache to load into, got {len(self)} entries")
            snapshot = Snapshot(path, "entries", str(model))
            try:
                arenas = self._arenas_for(snapshot)
                well_formed(snapshot.segments, 1)
            except SnapshotError as error:
                raise SnapshotError(f"{snapshot.path}: {error}") from error
            before = self._trie, self._roots, self._names, self._arenas, self._arena_of
            taken: list[tuple[RowArena, npt.NDArray[np.int32]]] = []
            try:
                self._name_nothing(dict(self._arenas))
                self._take_in(snapshot, arenas, taken)
            except BaseException:
                for arena, slots in taken:
                    arena.saved = None
                    arena.drop(slots)
                self._trie, self._roots, self._names, self._arenas, self._arena_of = before
                raise
            return len(self)

    def _arenas_for(self, snapshot: Snapshot) -> list[RowArena]:
        """The arenas for those of a file; SnapshotError if its rows are not stored as they are here."""
        arenas = []
        for found in snapshot.arenas:
            shape = (found.num_layers, found.num_heads * found.head_dim)
            try:
                arenas.append(self._arenas.get(shape) or self._new_arena(*shape))
            except (ValueError, OverflowError) as error:
                raise SnapshotError(f"expected rows that this cache can store, got {found}: {error}") from error
            arenas[-1].rows.arena().expect(found)
        if len({(arena.rows.num_layers, arena.rows.kv_dim) for arena in arenas}) != len(arenas):
            raise SnapshotError("expected arenas of different shapes, got one twice")
        return arenas

    def _take_in(
        self, snapshot: Snapshot, arenas: list[RowArena], taken: list[tuple[RowArena, npt.NDArray[np.int32]]]
    ) -> None:
        """Name what a file names, in an index that names nothing; `taken`: the slots, also when this fails."""
        segments, config = snapshot.segments, self.config
        costs = [arenas[i].rows.slot_bytes for i in snapshot.arena_of.tolist()]
        budget = config.max_memory_bytes - self._used_bytes()
        entries, needed = newest_entries(segments, costs, budget, config.max_entries, config.min_prefix_len)
        slot_of = []
        for i, arena in enumerate(arenas):
            mine = np.flatnonzero(needed & (snapshot.arena_of[segments.namespaces] == i))
            places = ranges(snapshot.firsts, segments.lengths, mine)
            slot_of.append(np.empty(snapshot.num_slots[i], np.int32))
            slots = arena.take(len(places), config.max_memory_bytes // arena.rows.slot_bytes)
            taken.append((arena, slots))
            slot_of[i][places] = slots
            if len(places):
                arena.saved = SavedRows(snapshot, i, arena.rows)
                arena.saved.expect(slots, places)
        for segment, tokens, places in walk_back(segments, snapshot.firsts, entries):
            space = int(segments.namespaces[segment])
            arena = arenas[snapshot.arena_of[space]]
            name = snapshot.names[space]
            if name not in self._roots:
                self._open(name, arena, (arena.rows.num_layers, arena.rows.kv_dim))
            node, _ = self._trie.insert(self._roots[name], tokens, slot_of[snapshot.arena_of[space]][places])
            self._trie.mark(node)

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

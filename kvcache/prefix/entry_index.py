"""`EntryIndex`: which entries there are, where their rows lie, and which of them leave when room is needed."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvcache.errors import OutOfMemoryError, SnapshotError
from kvcache.prefix.arena import RowArena
from kvcache.prefix.config import PrefixCacheConfig
from kvcache.prefix.rows import rows_of
from kvcache.prefix.saved import SavedRows
from kvcache.prefix.segments import newest_entries, ranges, segments_of, walk_back
from kvcache.saved.snapshot import Segments, Snapshot
from kvcache.trie.entries import EntryTrie

__all__ = ["EntryIndex"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


class EntryIndex:
    """A trie of entries per namespace, each token in a slot of an arena; within the limits of a config.

    Attributes:
        trie: the entries of all namespaces.
        roots, names: the trie's root by namespace, and back.
        arenas: the rows by their shape, `(num_layers, kv_dim)`.
        arena_of: where the rows of a root's entries lie.
        counts: hits and misses of lookups, tokens found and looked up; replaced, never changed, so that an interrupt
            finds all of a lookup counted, or none.
    """

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.config = config
        self.trie = EntryTrie()
        self.roots: dict[Hashable, int] = {}
        self.names: dict[int, Hashable] = {}
        self.arenas: dict[tuple[int, int], RowArena] = {}
        self.arena_of: dict[int, RowArena] = {}
        self.counts = (0, 0, 0, 0)

    # -- lookup -------------------------------------------------------------------------------------------

    def find(self, ids: Tokens, name: Hashable) -> tuple[int, int, Int32]:
        """`(node, length, slots)` of the longest prefix whose rows are here; what is damaged in a file is forgotten."""
        while (root := self.roots.get(name)) is not None:
            node, length, slots, _ = self.trie.lookup(root, ids)
            good = self.arena_of[root].fetch(slots)
            if good == length:
                return node, length, slots
            self._forget_from(root, ids[: good + 1])
        return -1, 0, np.empty(0, np.int32)

    def count(self, length: int, wanted: int) -> None:
        """One more lookup, of `wanted` tokens, that found `length` of them; 0: it was a miss."""
        hits, misses, found, looked_up = self.counts
        if length:
            hits += 1
        else:
            misses += 1
        self.counts = hits, misses, found + length, looked_up + wanted

    def _forget_from(self, root: int, ids: Tokens) -> None:
        """Forget the last of these tokens and all that follows it; what leads to it stays, as an entry if need be."""
        arena, length = self.arena_of[root], len(ids) - 1
        node = self.trie.boundary(self.trie.match(root, ids[:length])[0], length)
        self.trie.pin(node)  # It keeps its id while what follows it goes.
        try:
            arena.drop(self.trie.prune(root, ids))
        finally:
            self.trie.unpin(node)
        if length and self.trie.is_leaf(node) and not self.trie.is_marked(node):
            arena.drop(self._end(node, length))
        if self.trie.is_leaf(root):
            self._close(root)

    def _end(self, leaf: int, length: int) -> Int32:
        """Where what followed a leaf has left: it is an entry now, if lookups may find it, or leaves; what left."""
        if self.config.partial_matches and length >= self.config.min_prefix_len:
            self.trie.mark(leaf)
            return np.empty(0, np.int32)
        return self.trie.cut_leaf(leaf)

    # -- store and forget ---------------------------------------------------------------------------------

    def store(self, ids: Tokens, keys: list[Float32], values: list[Float32], name: Hashable) -> None:
        """An entry with the rows of each layer, float32 `(n, kv_dim)`; evicts what the limits require.

        Raises: as `PrefixKvCache.store_snapshot`.
        """
        shape = (len(keys), keys[0].shape[1])
        root = self.roots.get(name)
        arena = self.arenas.get(shape) or self._new_arena(*shape)
        if root is not None and self.arena_of[root] is not arena:
            other = self.arena_of[root]
            raise ValueError(
                f"expected {other.rows.num_layers} layers of kv_dim {other.rows.kv_dim} in this namespace, "
                f"got {shape[0]} of {shape[1]}"
            )
        for k, v in zip(keys, values, strict=True):
            arena.rows.represent(k, v)
        node, length, old = self.find(ids, name)
        root = self.roots.get(name)
        self._refuse_what_never_fits(arena, len(ids), old)
        if root is not None:
            node = self.trie.touch(node, length)  # What the entry builds on is used, and leaves last.
        self._make_room(arena, len(ids) - length, root, node, length == len(ids))
        slots = np.empty(len(ids), np.int32)
        limit = self.config.max_memory_bytes // arena.rows.slot_bytes
        slots[length:] = arena.take(len(ids) - length, limit)
        new = name not in self.roots
        try:
            arena.rows.write(slots[length:], [k[length:] for k in keys], [v[length:] for v in values])
            if new:
                self._open(name, arena, shape)
            self.trie.store(self.roots[name], ids, slots)
        except Exception:  # after an interrupt `mend` does it
            arena.drop(slots[length:][::-1])
            if new and name in self.roots:
                self._close(self.roots[name])
            raise

    def remove(self, ids: Tokens, name: Hashable) -> bool:
        """Forget the entry of exactly these tokens; False if there is none."""
        root = self.roots.get(name)
        if root is None:
            return False
        _, length = self.trie.entry_at(*self.trie.match(root, ids))
        if length < len(ids):
            return False
        self._let_go(root, self.trie.remove(root, ids))
        return True

    def _new_arena(self, num_layers: int, kv_dim: int) -> RowArena:
        config = self.config
        return RowArena(rows_of(num_layers, kv_dim, *config.formats, config.rotate, config.head_dim))

    def _open(self, name: Hashable, arena: RowArena, shape: tuple[int, int]) -> None:
        root = self.trie.add_root()
        self.roots[name], self.names[root] = root, name
        self.arenas[shape] = self.arena_of[root] = arena

    def _let_go(self, root: int, slots: Int32, keep: int | None = None) -> None:
        """Give the slots back; a namespace without entries goes, except `keep`."""
        self.arena_of[root].drop(slots)
        if root != keep and self.trie.is_leaf(root):
            self._close(root)

    def _close(self, root: int) -> None:
        arena = self.arena_of[root]
        self.trie.drop_empty(root)
        del self.roots[self.names.pop(root)], self.arena_of[root]
        if arena.num_used == 0 and arena not in self.arena_of.values():
            del self.arenas[arena.rows.num_layers, arena.rows.kv_dim]

    # -- room ---------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Bytes of the slots that entries name or states show."""
        for arena in self.arenas.values():
            arena.settle()
        return sum(arena.num_used * arena.rows.slot_bytes for arena in self.arenas.values())

    def _refuse_what_never_fits(self, arena: RowArena, n: int, old: Int32) -> None:
        """OutOfMemoryError unless `n` tokens fit once every other entry has left."""
        if self.config.max_entries == 0:
            raise OutOfMemoryError(1, 0, "entries")
        if self.used_bytes() + (n - len(old)) * arena.rows.slot_bytes <= self.config.max_memory_bytes:
            return
        held = sum(other.num_leased() * other.rows.slot_bytes for other in self.arenas.values())
        if len(old):
            held -= int(np.count_nonzero(arena.leased[old])) * arena.rows.slot_bytes
        if held + n * arena.rows.slot_bytes > self.config.max_memory_bytes:
            raise OutOfMemoryError(n * arena.rows.slot_bytes, max(0, self.config.max_memory_bytes - held), "bytes")

    def _make_room(self, arena: RowArena, count: int, root: int | None, node: int, whole: bool) -> None:
        """Evict until one more entry with `count` new tokens fits; the path to `node` stays."""
        entries = self.trie.num_entries + (not whole or not self.trie.is_marked(node))
        need = count * arena.rows.slot_bytes
        while entries > self.config.max_entries or self.used_bytes() + need > self.config.max_memory_bytes:
            before = self.trie.num_entries
            leaving = self.trie.evict_entry(node)
            assert leaving is not None, "what was found to fit does not"
            self._let_go(*leaving, keep=root)
            entries -= before - self.trie.num_entries

    # -- files --------------------------------------------------------------------------------------------

    def fetch_all(self) -> None:
        """Bring in all that waits in a file, and forget what is damaged there."""
        if any(arena.saved for arena in self.arenas.values()):
            for root, tokens, _ in [self.trie.path(leaf) for leaf in self.trie.leaf_ids()]:
                self.find(tokens, self.names.get(root))

    def segments(self) -> tuple[list[RowArena], npt.NDArray[np.int64], Segments, Int32]:
        """`(arenas, arena_of, segments, slots)`: what a saved cache says of this one; `arena_of` by namespace."""
        roots = list(self.roots.values())
        arenas = [arena for arena in self.arenas.values() if arena in self.arena_of.values()]
        arena_of = np.array([arenas.index(self.arena_of[root]) for root in roots], np.int64)
        return arenas, arena_of, *segments_of(self.trie, roots)

    def arenas_for(self, snapshot: Snapshot) -> list[RowArena]:
        """The arenas for those of a file; SnapshotError if its rows are not stored as they are here."""
        arenas = []
        for found in snapshot.arenas:
            shape = (found.num_layers, found.num_heads * found.head_dim)
            try:
                arenas.append(self.arenas.get(shape) or self._new_arena(*shape))
            except (ValueError, OverflowError) as error:
                raise SnapshotError(f"expected rows that this cache can store, got {found}: {error}") from error
            arenas[-1].rows.arena().expect(found)
        if len({(arena.rows.num_layers, arena.rows.kv_dim) for arena in arenas}) != len(arenas):
            raise SnapshotError("expected arenas of different shapes, got one twice")
        if len(set(snapshot.names)) != len(snapshot.names):
            raise SnapshotError("expected each namespace in one arena, got one in two")
        return arenas

    def loaded(self, snapshot: Snapshot, arenas: list[RowArena]) -> EntryIndex:
        """What takes the place of this one, which names nothing: the newest entries of a file, as many as fit.

        Args:
            arenas: for those of the file, from `arenas_for`; their rows wait there until they are asked for.
        """
        taken: list[tuple[RowArena, Int32]] = []
        try:
            index = EntryIndex(self.config)
            index.arenas, index.counts, index.trie.evicted = dict(self.arenas), self.counts, self.trie.evicted
            index._take_in(snapshot, arenas, taken)
        except Exception:  # after an interrupt `mend` does it
            for arena, slots in taken:
                arena.saved = None
                arena.drop(slots)
            raise
        return index

    def _take_in(self, snapshot: Snapshot, arenas: list[RowArena], taken: list[tuple[RowArena, Int32]]) -> None:
        """Name what a file names, where nothing is named yet; `taken`: the slots, also when this fails."""
        segments, config = snapshot.segments, self.config
        costs = [arenas[i].rows.slot_bytes for i in snapshot.arena_of.tolist()]
        budget = config.max_memory_bytes - self.used_bytes()
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
            if name not in self.roots:
                self._open(name, arena, (arena.rows.num_layers, arena.rows.kv_dim))
            self.trie.store(self.roots[name], tokens, slot_of[snapshot.arena_of[space]][places])

    # -- interrupts ---------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Make all agree with the trie and the leases, wherever between two lines an interrupt has struck.

        What the trie holds is stored, in the namespaces that have something; what no lease shows either, is free.
        """
        trie = self.trie
        trie.repin([])
        while loose := [leaf for leaf in trie.leaf_ids() if not trie.is_marked(leaf)]:
            self._end(loose[0], len(trie.path(loose[0])[1]))
        for root in trie.roots():
            if trie.is_leaf(root):
                trie.drop_empty(root)
        self.names = {root: self.names[root] for root in trie.roots()}
        self.roots = {name: root for root, name in self.names.items()}
        self.arena_of = {root: self.arena_of[root] for root in self.names}
        for arena in self.arenas.values():
            arena.mend(self._held(arena))
        named = list(self.arena_of.values())
        self.arenas = {shape: arena for shape, arena in self.arenas.items() if arena in named or arena.num_used}

    def _held(self, arena: RowArena) -> Int32:
        """The slots of an arena that the trie holds, in no particular order."""
        roots = [root for root, other in self.arena_of.items() if other is arena]
        return np.concatenate([np.empty(0, np.int32), *map(self.trie.all_values, roots)])

    # -- verification -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        self.trie.check()
        assert self.trie.roots() == sorted(self.names) == sorted(self.arena_of), "prefix cache: roots differ"
        assert {name: root for root, name in self.names.items()} == self.roots, "prefix cache: names differ"
        assert self.trie.num_entries <= self.config.max_entries, "prefix cache: more entries than allowed"
        assert self.used_bytes() <= self.config.max_memory_bytes, "prefix cache: more memory than allowed"
        for arena in self.arenas.values():
            arena.check(self._held(arena))

"""Saves prefix caches to files and loads them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import AllLocks, CallLock
from kvcache.errors import InvalidOperationError, SnapshotError
from kvcache.prefix.commit import commit
from kvcache.prefix.index import PrefixIndex
from kvcache.prefix.row_slots import RowSlots
from kvcache.prefix.rows import BLOCK_SIZE, Rows
from kvcache.prefix.saved import saved_blocks, saved_rows
from kvcache.prefix.segments import newest_entries, ranges, segments_of, walk_back, well_formed
from kvcache.prefix.slots import Claim
from kvcache.prefix.source import PageReader, fetch_waiting
from kvcache.saved.snapshot import Arena, Segments, Snapshot, write_snapshot

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache
    from kvcache.prefix.states import PrefixKvCache

__all__ = ["fetch_all", "load_blocks", "load_entries", "save_blocks", "save_entries"]

Int32 = npt.NDArray[np.int32]
Part = tuple[PrefixIndex, PrefixIndex, Sequence[Claim], Sequence[PageReader]]  # of `commit`


def fetch_all(index: PrefixIndex, least: int = -1) -> None:
    """Read all that waits in files, and forget what is damaged there."""
    if any(slots.num_waiting for slots in index.kinds):
        names = {root: space.name for space, root in index.spaces.in_use()}
        for root, tokens, _ in [index.trie.path(leaf) for leaf in index.trie.leaf_ids()]:
            fetch_waiting(index, tokens, names[root], least)


# -- blocks --------------------------------------------------------------------------------------------------


def save_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[PrefixCache]) -> None:
    """Write every block that the caches name; raises as `PrefixCache.save`."""
    with AllLocks(_locks(caches)):
        namespaces: list[tuple[int, Hashable]] = []
        segments, blocks = Segments.none(), []
        for arena, cache in enumerate(caches):
            fetch_all(cache._index)
            spaces = cache._index.spaces.in_use()
            added, named = segments_of(cache._index.trie, [root for _, root in spaces], cache._slots.tokens_of)
            segments = segments.and_then(added, len(namespaces))
            namespaces += [(arena, space.name) for space, _ in spaces]
            blocks.append(named.tolist())
        layers = [[cache._store.raw(layer) for layer in range(cache._store.num_layers)] for cache in caches]
        write_snapshot(
            path, "blocks", model, [_arena(cache) for cache in caches], namespaces, segments,
            lambda arena: ([layer[block] for layer in layers[arena]] for block in blocks[arena]),
        )  # fmt: skip


def load_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[PrefixCache]) -> int:
    """Name the blocks of a file in caches that are empty; how many in the first. Raises as `PrefixCache.load`."""
    with AllLocks(_locks(caches)):
        for cache in caches:
            if len(cache):
                raise InvalidOperationError(f"expected an empty cache to load into, got {len(cache)} blocks")
        snapshot = Snapshot(path, "blocks", model)
        try:
            takers = _takers(snapshot, caches)
        except SnapshotError as error:
            raise SnapshotError(f"{snapshot.path}: {error}") from error
        commit([_blocks_of(snapshot, arena, cache) for arena, cache in takers.items()])
        return len(caches[0])


def _locks(caches: Sequence[PrefixCache]) -> list[CallLock]:
    if any(not hasattr(cache, "_index") for cache in caches):
        raise TypeError("beside: expected caches, got another object")
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("beside: expected each cache once, got one twice")
    return [cache._lock for cache in caches]


def _takers(snapshot: Snapshot, caches: Sequence[PrefixCache]) -> dict[int, PrefixCache]:
    """The cache for each arena, if any; SnapshotError if the first arena has none or the tables are invalid."""
    if not snapshot.arenas:
        raise SnapshotError("expected an arena, got none")
    _arena(caches[0]).expect(snapshot.arenas[0])
    pairs = zip(caches, snapshot.arenas, strict=False)
    takers = {i: cache for i, (cache, arena) in enumerate(pairs) if _arena(cache) == arena}
    of_arena = snapshot.arena_of[snapshot.segments.namespaces]
    for i, cache in takers.items():
        well_formed(snapshot.segments, np.flatnonzero(of_arena == i), cache.block_size)
    return takers


def _arena(cache: PrefixCache) -> Arena:
    """How a file stores the blocks."""
    store = cache._store
    return Arena(
        store.num_layers, store.num_heads, cache._head_dim, store.key_dtype, store.value_dtype, *store.rotated,
        "blocks", store.block_size, store.block_bytes,
    )  # fmt: skip


def _blocks_of(snapshot: Snapshot, arena: int, cache: PrefixCache) -> Part:
    """What a cache takes of its arena: the blocks used last first, as many as there is room for."""
    segments, size, slots = snapshot.segments, cache.block_size, cache._slots
    slots.settle()
    pages, parents = (segments.lengths // size).tolist(), segments.parents.tolist()
    room, kept = cache._room(sum(pages), new=True), [0] * len(pages)
    for i in np.flatnonzero(snapshot.arena_of[segments.namespaces] == arena).tolist():
        parent = parents[i]
        if parent < 0 or kept[parent] == pages[parent]:
            kept[i] = min(pages[i], room)
            room -= kept[i]
    chosen = np.flatnonzero(kept)
    places = ranges(snapshot.firsts // size, np.array(kept, np.int64), chosen)
    claim, filled = slots.take(len(places)), cache._index.like()
    block_of = np.zeros(int(snapshot.num_slots[arena]) // size, np.int32)
    block_of[places] = claim.pages
    for i, ids, of_file in walk_back(segments, snapshot.firsts, chosen):
        count = len(ids) // size - pages[i] + kept[i]
        blocks, name = block_of[of_file[::size][:count] // size], snapshot.names[segments.namespaces[i]]
        filled.name(ids[: count * size], blocks, name)
    source = saved_blocks(snapshot, arena, slots, claim.pages, places, cache._store)
    return cache._index, filled, [claim], [source]


# -- entries -------------------------------------------------------------------------------------------------


def save_entries(path: str | os.PathLike[str], model: str, cache: PrefixKvCache) -> None:
    """Write every entry; raises as `PrefixKvCache.save`. To be called with the cache's lock held."""
    index = cache._index
    fetch_all(index, cache._least)
    spaces = index.spaces.in_use()
    kinds = [kind for kind in index.kinds if any(space.slots is kind for space, _ in spaces)]
    arena_of = np.array([kinds.index(space.slots) for space, _ in spaces], np.int64)
    segments, slots = segments_of(index.trie, [root for _, root in spaces])
    of_slot = np.repeat(arena_of[segments.namespaces], segments.lengths)
    rows = [kind.rows for kind in kinds]
    write_snapshot(
        path, "entries", model, [each.arena() for each in rows],
        [(arena, space.name) for arena, (space, _) in zip(arena_of.tolist(), spaces, strict=True)], segments,
        lambda i: _pages(rows[i], slots[of_slot == i]),
    )  # fmt: skip


def _pages(rows: Rows, slots: Int32) -> Iterator[list[Any]]:
    """The rows at `slots` as the pages of a saved cache; each is good until the next one."""
    page = rows.page()
    for first in range(0, len(slots), BLOCK_SIZE):
        some = slots[first : first + BLOCK_SIZE]
        if len(some) < BLOCK_SIZE:
            page = rows.page()  # the rest is zero, not the rows of before
        page.copy_from(some)
        yield page.buffers


def load_entries(path: str | os.PathLike[str], model: str, cache: PrefixKvCache) -> None:
    """Name the newest entries of a file, as many as fit; raises as `PrefixKvCache.load`. With the lock held."""
    snapshot = Snapshot(path, "entries", model)
    try:
        kinds = _kinds_for(snapshot, cache)
        well_formed(snapshot.segments, np.arange(len(snapshot.segments.lengths)), 1)
    except SnapshotError as error:
        raise SnapshotError(f"{snapshot.path}: {error}") from error
    commit([_entries_of(snapshot, kinds, cache)])


def _kinds_for(snapshot: Snapshot, cache: PrefixKvCache) -> list[RowSlots]:
    """The slots for the arenas of a file; SnapshotError if its rows have another format than this cache's."""
    kinds = []
    for found in snapshot.arenas:
        try:
            kinds.append(cache._kind(found.num_layers, found.num_heads * found.head_dim))
        except (ValueError, OverflowError) as error:
            raise SnapshotError(f"expected rows that this cache can store, got {found}: {error}") from error
        kinds[-1].rows.arena().expect(found)
    if len({kind.shape for kind in kinds}) != len(kinds):
        raise SnapshotError("expected arenas of different shapes, got one twice")
    if len(set(snapshot.names)) != len(snapshot.names):
        raise SnapshotError("expected each namespace in one arena, got one in two")
    return kinds


def _entries_of(snapshot: Snapshot, kinds: list[RowSlots], cache: PrefixKvCache) -> Part:
    """What a cache takes of a file."""
    segments, config, filled = snapshot.segments, cache.config, cache._index.like()
    costs = [kinds[i].rows.slot_bytes for i in snapshot.arena_of.tolist()]
    budget = config.max_memory_bytes - cache._used_bytes()
    entries, needed = newest_entries(segments, costs, budget, config.max_entries, config.min_prefix_len)
    claims, sources, slot_of = [], [], {}
    for i, kind in enumerate(kinds):
        mine = np.flatnonzero(needed & (snapshot.arena_of[segments.namespaces] == i))
        if len(mine):
            places = ranges(snapshot.firsts, segments.lengths, mine)
            claims.append(kind.take_rows(len(places), config.max_memory_bytes))
            slot_of[i] = np.empty(snapshot.num_slots[i], np.int32)
            slot_of[i][places] = claims[-1].pages
            sources.append(saved_rows(snapshot, i, kind, claims[-1].pages, places, kind.rows))
    for segment, tokens, of_file in walk_back(segments, snapshot.firsts, entries):
        space = int(segments.namespaces[segment])
        arena = int(snapshot.arena_of[space])
        filled.name(tokens, slot_of[arena][of_file], snapshot.names[space], kinds[arena])
    return cache._index, filled, claims, sources

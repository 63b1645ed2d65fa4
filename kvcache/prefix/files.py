"""Saves prefix caches to files and loads them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import AllLocks
from kvcache.core.store import BlockStore
from kvcache.errors import InvalidOperationError, SnapshotError
from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.cached_entries import CachedEntries
from kvcache.prefix.index.prefixes import PrefixIndex, load
from kvcache.prefix.index.slots import Claim, Slots
from kvcache.prefix.index.source import fetch_waiting
from kvcache.prefix.row_pages import BLOCK_SIZE
from kvcache.prefix.row_slots import RowSlots
from kvcache.prefix.rows import Rows
from kvcache.prefix.saved import SavedPages, saved_blocks, saved_rows
from kvcache.prefix.segments import segments_of
from kvcache.saved.segments import Segments, newest_entries, newest_pages, ranges, walk_back, well_formed
from kvcache.saved.snapshot import Arena, Snapshot, write_snapshot
from kvcache.saved.tables import MIXED

__all__ = ["arena_of_blocks", "fetch_all", "load_blocks", "load_entries", "save_blocks", "save_entries"]

logger = logging.getLogger("kvcache")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Text = tuple[Hashable, UInt32, Slots, Int32, SavedPages]
Part = tuple[PrefixIndex, Iterator[Text]]  # of `load`


def fetch_all(index: PrefixIndex, least: int = -1) -> None:
    """Read all that waits in files, and forget what is damaged there."""
    if any(slots.num_waiting for slots in index.kinds):
        names = {space.root: space.name for space in index.spaces()}
        for root, tokens, _ in [index.trie.path(leaf) for leaf in index.trie.leaf_ids()]:
            fetch_waiting(index, tokens, names[root], least)


def _write(
    path: str | os.PathLike[str], content: str, model: str, indices: Sequence[PrefixIndex],
    arenas: Sequence[tuple[Slots, Arena, Callable[[Int32], Iterable[list[Any]]]]],
) -> None:  # fmt: skip
    """Write what the indices name.

    Args:
        arenas: the slots of some namespaces, how a file stores them, and a function from such pages to the file's.
    """
    kinds = [slots for slots, _, _ in arenas]
    namespaces: list[tuple[int, Hashable]] = []
    segments, pages = Segments.none(), [np.empty(0, np.int32)]
    for index in indices:
        spaces = index.spaces()
        tokens_of = index.kinds[0].tokens_of if index.trie.page_size > 1 else None
        added, named = segments_of(index.trie, [space.root for space in spaces], tokens_of)
        segments = segments.and_then(added, len(namespaces))
        namespaces += [(kinds.index(space.slots), space.name) for space in spaces]
        pages.append(named)
    arena_of = np.array([arena for arena, _ in namespaces], np.int64)[segments.namespaces]
    sizes = np.array([slots.page_size for slots in kinds], np.int64)
    of_page = np.repeat(arena_of, segments.lengths // sizes[arena_of])
    write_snapshot(
        path, content, model, [arena for _, arena, _ in arenas], namespaces, segments,
        lambda i: arenas[i][2](np.concatenate(pages)[of_page == i]),
    )  # fmt: skip


def _texts(
    snapshot: Snapshot, claims: dict[int, Claim], readers: dict[int, SavedPages], chosen: Int64, kept: Sequence[int]
) -> Iterator[Text]:
    """The texts that an index takes of a file, the oldest first.

    Args:
        claims, readers: by arena.
        chosen: the segments to take with all above them, newest first.
        kept: pages to take of each segment.
    """
    for i, tokens, places in walk_back(snapshot.segments, snapshot.firsts, chosen):
        space = int(snapshot.segments.namespaces[i])
        arena = int(snapshot.arena_of[space])
        slots = claims[arena].slots
        end = len(tokens) - int(snapshot.segments.lengths[i]) + kept[i] * slots.page_size
        pages = readers[arena].pages_at(places[: end : slots.page_size] // slots.page_size)
        yield snapshot.names[space], tokens[:end], slots, pages, readers[arena]


# -- blocks --------------------------------------------------------------------------------------------------


def save_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[CachedBlocks]) -> None:
    """Write every block that the caches name; raises as `PrefixCache.save`."""
    with AllLocks([cache.lock for cache in caches]):
        for cache in caches:
            fetch_all(cache.index)
        model += _meaning(caches)
        arenas = [(cache.slots, arena_of_blocks(cache), _raw_pages(cache.store)) for cache in caches]
        _write(path, "blocks", model, [cache.index for cache in caches], arenas)
        count = sum(len(cache.index) for cache in caches)
    logger.info("%s: saved %d blocks", os.fspath(path), count)


def _meaning(caches: Sequence[CachedBlocks]) -> str:
    """What the model's name in a file has more: keys that another calibration centred mean something else.

    So do rows of another format that is written in Python, since all of them are stored in f32.
    """
    known = [cache.store.calibration for cache in caches if cache.store.calibration is not None]
    calibrated, own = f" calibrated {known[0].fingerprint}" if known else "", caches[0].formats.fingerprint
    return calibrated + "".join(formats_of(cache.store) for cache in caches) + (f" in {own}" if own else "")


def formats_of(store: BlockStore) -> str:
    """The formats of a store whose layers differ, which an `Arena` does not name; else nothing."""
    dtypes = store.key_dtype, store.value_dtype
    if all(isinstance(dtype, str) for dtype in dtypes):
        return ""
    key, value = (dtype if isinstance(dtype, str) else " ".join(dtype) for dtype in dtypes)
    return f" formats {key} / {value}"


def _raw_pages(store: BlockStore) -> Callable[[Int32], Iterable[list[Any]]]:
    layers = [store.raw(layer) for layer in range(store.num_layers)]
    return lambda blocks: ([layer[block] for layer in layers] for block in blocks.tolist())


def load_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[CachedBlocks]) -> int:
    """Name the blocks of a file in caches that are empty; how many in the first. Raises as `PrefixCache.load`."""
    with AllLocks([cache.lock for cache in caches]):
        _require_empty(caches)
        snapshot = Snapshot(path, "blocks", model + _meaning(caches))
        try:
            takers = _takers(snapshot, caches)
        except SnapshotError as error:
            raise SnapshotError(f"{snapshot.path}: {error}") from error
        load([_blocks_of(snapshot, arena, cache) for arena, cache in takers.items()])
        count = len(caches[0].index)
    logger.info("%s: loaded %d blocks", snapshot.path, count)
    return count


def _require_empty(caches: Sequence[CachedBlocks]) -> None:
    for cache in caches:
        if len(cache.index):
            raise InvalidOperationError(f"expected an empty cache to load into, got {len(cache.index)} blocks")


def _takers(snapshot: Snapshot, caches: Sequence[CachedBlocks]) -> dict[int, CachedBlocks]:
    """The cache for each arena, if any; SnapshotError if the first arena has none or the tables are invalid."""
    if not snapshot.arenas:
        raise SnapshotError("expected an arena, got none")
    arena_of_blocks(caches[0]).expect(snapshot.arenas[0])
    pairs = zip(caches, snapshot.arenas, strict=False)
    takers = {i: cache for i, (cache, arena) in enumerate(pairs) if arena_of_blocks(cache) == arena}
    of_arena = snapshot.arena_of[snapshot.segments.namespaces]
    for i, cache in takers.items():
        well_formed(snapshot.segments, np.flatnonzero(of_arena == i), cache.store.block_size)
    return takers


def arena_of_blocks(cache: CachedBlocks) -> Arena:
    """How files and tiers store the blocks of a cache."""
    store = cache.store
    key, value = (dtype if isinstance(dtype, str) else MIXED for dtype in (store.key_dtype, store.value_dtype))
    return Arena(
        store.num_layers, store.num_heads, *cache.dims, key, value, *store.rotated,
        "blocks", store.block_size, store.block_bytes,
    )  # fmt: skip


def _blocks_of(snapshot: Snapshot, arena: int, cache: CachedBlocks) -> Part:
    """What a cache takes of its arena: the blocks used last first, as many as there is room for."""
    segments, size, slots = snapshot.segments, cache.store.block_size, cache.slots
    slots.release_dropped()
    mine = np.flatnonzero(snapshot.arena_of[segments.namespaces] == arena)
    kept = newest_pages(segments, mine, size, cache.room(len(segments.tokens) // size, new=True))
    chosen = np.flatnonzero(kept)
    places = ranges(snapshot.firsts // size, kept, chosen)
    claim = slots.take(len(places))
    reader = saved_blocks(snapshot, arena, claim, places, cache.store)
    return cache.index, _texts(snapshot, {arena: claim}, {arena: reader}, chosen, kept.tolist())


# -- entries -------------------------------------------------------------------------------------------------


def save_entries(path: str | os.PathLike[str], model: str, cache: CachedEntries) -> None:
    """Write every entry; raises as `PrefixKvCache.save`. To be called with the cache's lock held."""
    fetch_all(cache.index, cache.least)
    spaces = cache.index.spaces()
    kinds = [kind for kind in cache.index.kinds if any(space.slots is kind for space in spaces)]
    _write(path, "entries", model, [cache.index], [(kind, kind.rows.arena(), _row_pages(kind.rows)) for kind in kinds])
    logger.info("%s: saved %d entries", os.fspath(path), len(cache.index))


def _row_pages(rows: Rows) -> Callable[[Int32], Iterator[list[Any]]]:
    """A function of slots: their rows as the pages of a saved cache; each is good until the next one."""

    def pages(slots: Int32) -> Iterator[list[Any]]:
        page = rows.page()
        for first in range(0, len(slots), BLOCK_SIZE):
            some = slots[first : first + BLOCK_SIZE]
            if len(some) < BLOCK_SIZE:
                page = rows.page()  # the rest is zero, not the rows of before
            page.copy_from(some)
            yield page.buffers

    return pages


def load_entries(path: str | os.PathLike[str], model: str, cache: CachedEntries) -> int:
    """Name the newest entries of a file, as many as fit; how many. As `PrefixKvCache.load`, with the lock held."""
    snapshot = Snapshot(path, "entries", model)
    try:
        kinds = _kinds_for(snapshot, cache)
        well_formed(snapshot.segments, np.arange(len(snapshot.segments.lengths)), 1)
    except SnapshotError as error:
        raise SnapshotError(f"{snapshot.path}: {error}") from error
    load([_entries_of(snapshot, kinds, cache)])
    logger.info("%s: loaded %d entries", snapshot.path, len(cache.index))
    return len(cache.index)


def _kinds_for(snapshot: Snapshot, cache: CachedEntries) -> list[RowSlots]:
    """The slots for the arenas of a file; SnapshotError if its rows have another format than this cache's."""
    kinds = []
    for found in snapshot.arenas:
        try:
            kinds.append(cache.kind(found.num_layers, found.num_heads * found.head_dim))
        except (ValueError, OverflowError) as error:
            raise SnapshotError(f"expected rows that this cache can store, got {found}: {error}") from error
        kinds[-1].rows.arena().expect(found)
    if len({kind.shape for kind in kinds}) != len(kinds):
        raise SnapshotError("expected arenas of different shapes, got one twice")
    if len(set(snapshot.names)) != len(snapshot.names):
        raise SnapshotError("expected each namespace in one arena, got one in two")
    return kinds


def _entries_of(snapshot: Snapshot, kinds: list[RowSlots], cache: CachedEntries) -> Part:
    """What a cache takes of a file: the entries used last first, as many as the limits allow."""
    segments, config = snapshot.segments, cache.config
    costs = [kinds[i].rows.slot_bytes for i in snapshot.arena_of.tolist()]
    budget = cache.max_bytes - cache.used_bytes()
    entries, needed = newest_entries(segments, costs, budget, config.max_entries, config.min_prefix_len)
    claims, readers = {}, {}
    for i, kind in enumerate(kinds):
        mine = np.flatnonzero(needed & (snapshot.arena_of[segments.namespaces] == i))
        if len(mine):
            places = ranges(snapshot.firsts, segments.lengths, mine)
            claims[i] = kind.take_rows(len(places), cache.max_bytes)
            readers[i] = saved_rows(snapshot, i, claims[i], places, kind.rows)
    return cache.index, _texts(snapshot, claims, readers, entries, segments.lengths.tolist())

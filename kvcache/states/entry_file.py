"""Saves the entries of a `PrefixKvCache` to a file and loads them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import SnapshotError
from kvcache.prefix.index.prefix_index import load
from kvcache.prefix.index.slots import Claim
from kvcache.prefix.index_file import Part, texts_of, write_indices
from kvcache.prefix.saved_pages import SavedPages
from kvcache.saved.segments import newest_entries, ranges, well_formed
from kvcache.saved.snapshot import Snapshot
from kvcache.states.cached_entries import CachedEntries
from kvcache.states.row_slots import RowSlots
from kvcache.states.token_rows import BLOCK_SIZE, Rows

__all__ = ["load_entries", "save_entries"]

logger = logging.getLogger("kvcache")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_ROWS_AT_ONCE = 4  # pages read in one call; more are not faster, since rows are copied out of buffers


def save_entries(path: str | os.PathLike[str], model: str, cache: CachedEntries) -> None:
    """Write every entry; raises as `PrefixKvCache.save`. To be called with the cache's lock held."""
    cache.index.fetch_all(cache.least)
    spaces = cache.index.namespaces()
    kinds = [kind for kind in cache.index.kinds if any(space.slots is kind for space in spaces)]
    arenas = [(kind, kind.rows.arena(), _row_pages(kind.rows)) for kind in kinds]
    write_indices(path, "entries", model, [cache.index], arenas, cache.exact)
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


def load_entries(path: str | os.PathLike[str], model: str, cache: CachedEntries, *, exact: bool) -> int:
    """Name the newest entries of a file, as many as fit; how many. As `PrefixKvCache.load`, with the lock held."""
    snapshot = Snapshot(path, "entries", model, exact=exact)
    try:
        kinds = _kinds_for(snapshot, cache)
        well_formed(snapshot.segments, np.arange(len(snapshot.segments.lengths)), 1)
    except SnapshotError as error:
        raise SnapshotError(f"{snapshot.path}: {error}") from error
    try:
        load([_entries_of(snapshot, kinds, cache)])
    finally:  # also where Ctrl-C comes behind the load
        cache.exact &= snapshot.exact or not len(cache.index)
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
    """The entries that a cache takes of a file: those used last, as many as the limits allow."""
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
    return cache.index, texts_of(snapshot, claims, readers, entries, segments.lengths.tolist())


def saved_rows(snapshot: Snapshot, arena: int, claim: Claim, places: Int64, rows: Rows) -> SavedPages:
    """Slots of `Rows`; a place is a slot of the file."""
    buffered = [rows.page() for _ in range(_ROWS_AT_ONCE)]
    size = snapshot.arenas[arena].page_tokens
    return SavedPages(
        snapshot, arena, claim, places, size, _ROWS_AT_ONCE, lambda turn, _: buffered[turn].buffers,
        lambda turn, mine, inside: buffered[turn].copy_to(mine, inside),
    )

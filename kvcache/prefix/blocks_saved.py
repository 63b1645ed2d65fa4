"""The blocks of prefix caches as a file, and back: each cache has an arena of its own."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcache.core.locks import AllLocks, MendingLock
from kvcache.errors import InvalidOperationError, SnapshotError
from kvcache.prefix.segments import well_formed
from kvcache.saved.snapshot import Arena, Segments, Snapshot, write_snapshot

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache

__all__ = ["load_blocks", "save_blocks"]


def save_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[PrefixCache]) -> None:
    """Write every block that the caches name; raises as `PrefixCache.save`."""
    with AllLocks(_locks(caches)):
        _save(path, model, caches)


def load_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[PrefixCache]) -> int:
    """Name the blocks of a file in caches that are empty; how many in the first. Raises as `PrefixCache.load`."""
    with AllLocks(_locks(caches)):
        _load(path, model, caches)
        return len(caches[0])


def _locks(caches: Sequence[PrefixCache]) -> list[MendingLock]:
    if any(not hasattr(cache, "_index") for cache in caches):
        raise TypeError("beside: expected caches, got something else")
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("expected each cache once, got one twice")
    return [cache._lock for cache in caches]


def _save(path: str | os.PathLike[str], model: str, caches: Sequence[PrefixCache]) -> None:
    namespaces: list[tuple[int, Hashable]] = []
    segments, blocks = Segments.none(), []
    for arena, cache in enumerate(caches):
        cache._index.fetch_all()
        names, added, named = cache._index.segments()
        segments = segments.and_then(added, len(namespaces))
        namespaces += [(arena, name) for name in names]
        blocks.append(named.tolist())
    layers = [[cache._store.raw(layer) for layer in range(cache._store.num_layers)] for cache in caches]
    write_snapshot(
        path, "blocks", model, [_arena(cache) for cache in caches], namespaces, segments,
        lambda arena: ([layer[block] for layer in layers[arena]] for block in blocks[arena]),
    )  # fmt: skip


def _load(path: str | os.PathLike[str], model: str, caches: Sequence[PrefixCache]) -> None:
    for cache in caches:
        if len(cache):
            raise InvalidOperationError(f"expected an empty cache to load into, got {len(cache)} blocks")
    snapshot = Snapshot(path, "blocks", model)
    try:
        takers = _takers(snapshot, caches)
    except SnapshotError as error:
        raise SnapshotError(f"{snapshot.path}: {error}") from error
    _take_in(snapshot, list(takers.items()))


def _take_in(snapshot: Snapshot, takers: list[tuple[int, PrefixCache]]) -> None:
    """One inside the other, so that all of them do or none."""
    if takers:
        (arena, cache), *others = takers
        cache._index.holds.settle()
        cache._index.take_in(snapshot, arena, cache._store, lambda: _take_in(snapshot, others))


def _takers(snapshot: Snapshot, caches: Sequence[PrefixCache]) -> dict[int, PrefixCache]:
    """The cache of each arena that has one; SnapshotError unless the first has, and what they take in is in order."""
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

"""Saves the blocks of prefix caches to files and loads them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import AllLocks
from kvcache.core.store import BlockStore
from kvcache.errors import InvalidOperationError, SnapshotError
from kvcache.kernels.kernels import FORMATS
from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.index.prefix_index import load
from kvcache.prefix.index.slots import Claim
from kvcache.prefix.index_file import Part, texts_of, write_indices
from kvcache.prefix.saved_pages import SavedPages
from kvcache.saved.file_tables import MIXED, Arena
from kvcache.saved.segments import newest_pages, ranges, well_formed
from kvcache.saved.snapshot import Snapshot

__all__ = ["arena_of_blocks", "formats_of", "load_blocks", "save_blocks", "saved_formats"]

logger = logging.getLogger("kvcache")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_BLOCKS_AT_ONCE = 256  # read in one call; more delay Ctrl-C
_FORMATS = " formats "  # begins the part of a name that has them


def save_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[CachedBlocks]) -> None:
    """Write every block that the caches name; raises as `PrefixCache.save`."""
    with AllLocks([cache.lock for cache in caches]):
        for cache in caches:
            cache.index.fetch_all()
        model += _meaning(caches)
        arenas = [(cache.slots, arena_of_blocks(cache), _raw_pages(cache.store)) for cache in caches]
        exact = all(cache.exact for cache in caches)
        write_indices(path, "blocks", model, [cache.index for cache in caches], arenas, exact)
        count = sum(len(cache.index) for cache in caches)
    logger.info("%s: saved %d blocks", os.fspath(path), count)


def _meaning(caches: Sequence[CachedBlocks]) -> str:
    """All but the model that the meaning of stored rows depends on: a suffix of its name in the file.

    Keys centred by another calibration mean something else. So do rows of another format that is written in Python,
    since all of those are stored in f32.
    """
    known = [cache.store.calibration for cache in caches if cache.store.calibration is not None]
    calibrated, own = f" calibrated {known[0].fingerprint}" if known else "", caches[0].formats.fingerprint
    return calibrated + "".join(formats_of(cache.store) for cache in caches) + (f" in {own}" if own else "")


def formats_of(store: BlockStore) -> str:
    """Name index layers, and the formats of a store whose layers differ, which an `Arena` does not; empty: neither."""
    dtypes, index = (store.key_dtype, store.value_dtype), ""
    if store.index is not None:
        index = " index {} x {} {}".format(*store.index)
    if all(isinstance(dtype, str) for dtype in dtypes):
        return index
    key, value = (dtype if isinstance(dtype, str) else " ".join(dtype) for dtype in dtypes)
    return f"{index}{_FORMATS}{key} / {value}"


def _raw_pages(store: BlockStore) -> Callable[[Int32], Iterable[list[Any]]]:
    if store.spill is not None:
        return lambda blocks: map(store.page, blocks.tolist())
    layers = [store.raw(layer) for layer in range(store.num_layers)]
    return lambda blocks: ([layer[block] for layer in layers] for block in blocks.tolist())


def load_blocks(path: str | os.PathLike[str], model: str, caches: Sequence[CachedBlocks], *, exact: bool) -> int:
    """Name the blocks of a file in caches that are empty; how many in the first. Raises as `PrefixCache.load`."""
    with AllLocks([cache.lock for cache in caches]):
        _require_empty(caches)
        snapshot = Snapshot(path, "blocks", None, exact=exact)
        try:
            _expect_model(snapshot, model + _meaning(caches))
            takers = _takers(snapshot, caches)
        except SnapshotError as error:
            raise SnapshotError(f"{snapshot.path}: {error}") from error
        try:
            load([_blocks_of(snapshot, arena, cache) for arena, cache in takers.items()])
        finally:  # also where Ctrl-C comes behind the load; a text is in all caches, so that none is exact alone
            exact = snapshot.exact or not any(len(cache.index) for cache in caches)
            for cache in caches:
                cache.exact &= exact
        count = len(caches[0].index)
    logger.info("%s: loaded %d blocks", snapshot.path, count)
    return count


def _expect_model(snapshot: Snapshot, model: str) -> None:
    """Raise SnapshotError unless the file has this name; where formats of layers alone differ, it names these."""
    (own, want), (other, got) = map(_split, (model, snapshot.model))
    if own == other and want != got:
        named = [" / ".join(map(" ".join, pair)) or "one for all layers" for pair in (want, got)]
        raise SnapshotError(
            f"expected formats {named[0]}, got {named[1]}, which an engine has with those that "
            f"`PrefixCache.saved_formats` reads from the file"
        )
    snapshot.expect_model(model)


def _split(model: str) -> tuple[str, list[list[str]]]:
    """The name of a file without the formats of its last layers, and these: those of K and those of V, or none."""
    before, _, named = model.rpartition(_FORMATS)
    sides = [each.split(" ") for each in named.split(" / ")]
    known = len(sides) == 2 and all(name in FORMATS for side in sides for name in side)
    return (before, sides) if known else (model, [])


def saved_formats(path: str | os.PathLike[str]) -> dict[str, str | list[str]]:
    """See `PrefixCache.saved_formats`."""
    snapshot = Snapshot(path, "blocks", None, exact=False)
    if not snapshot.arenas:
        raise SnapshotError(f"{snapshot.path}: expected an arena, got none")
    arena, (before, formats), found = snapshot.arenas[0], _split(snapshot.model), dict[str, str | list[str]]()
    if _split(before)[1]:
        raise SnapshotError(f"{snapshot.path}: expected layers of one kind, got several with formats of their own")
    for i, name in enumerate(("key_dtype", "value_dtype")):
        dtype: str = getattr(arena, name)
        if dtype not in FORMATS and not (dtype == MIXED and formats and len(formats[i]) == arena.num_layers):
            raise SnapshotError(f"{snapshot.path}: expected a {name} of this library, got {dtype}")
        found[name] = formats[i] if dtype == MIXED else dtype
    return found


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
    """The layout in which files and tiers store the blocks of a cache."""
    store = cache.store
    key, value = (dtype if isinstance(dtype, str) else MIXED for dtype in (store.key_dtype, store.value_dtype))
    return Arena(
        store.num_layers, store.num_heads, *cache.dims, key, value, *store.rotated,
        "latent" if store.latent else "blocks", store.block_size, store.block_bytes,
    )


def _blocks_of(snapshot: Snapshot, arena: int, cache: CachedBlocks) -> Part:
    """The blocks that a cache takes of its arena: those used last, as many as there is room for."""
    segments, size, slots = snapshot.segments, cache.store.block_size, cache.slots
    slots.release_dropped()
    mine = np.flatnonzero(snapshot.arena_of[segments.namespaces] == arena)
    kept = newest_pages(segments, mine, size, cache.room(len(segments.tokens) // size, new=True))
    chosen = np.flatnonzero(kept)
    places = ranges(snapshot.firsts // size, kept, chosen)
    claim = slots.take(len(places))
    reader = saved_blocks(snapshot, arena, claim, places, cache.store)
    return cache.index, texts_of(snapshot, {arena: claim}, {arena: reader}, chosen, kept.tolist())


def saved_blocks(snapshot: Snapshot, arena: int, claim: Claim, places: Int64, store: BlockStore) -> SavedPages:
    """Blocks of a store; a place is a page of the file."""
    waiting: dict[int, list[Any]] = {}

    def buffers(turn: int, block: Int32) -> list[Any]:
        if store.spill is not None:
            waiting[turn] = [np.empty(size, np.uint8) for size in store.layer_bytes]
            return waiting[turn]
        # Read directly into the block: no call reads the block before its checksum is verified.
        return list(store.overwrite(int(block[0])))

    def arrived(turn: int, block: Int32, inside: Int64) -> None:
        if store.spill is not None:
            store.replace(int(block[0]), waiting.pop(turn))

    return SavedPages(snapshot, arena, claim, places, 1, _BLOCKS_AT_ONCE, buffers, arrived)

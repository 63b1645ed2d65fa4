"""The blocks of a `PrefixCache` as a file, and back."""

from __future__ import annotations

import os

from kvcache._store import BlockStore
from kvcache.block_index import BlockIndex
from kvcache.errors import InvalidOperationError, SnapshotError
from kvcache.segments import well_formed
from kvcache.snapshot import Arena, Snapshot, write_snapshot

__all__ = ["load_blocks", "save_blocks"]


def save_blocks(path: str | os.PathLike[str], model: str, index: BlockIndex, store: BlockStore, head_dim: int) -> None:
    """Write every block that the index names; raises as `PrefixCache.save`."""
    index.fetch_all()
    names, segments, blocks = index.segments()
    layers = [store.raw(layer) for layer in range(store.num_layers)]
    write_snapshot(
        path, "blocks", model, [_arena(store, head_dim)], [(0, name) for name in names], segments,
        lambda _: ([layer[block] for layer in layers] for block in blocks.tolist()),
    )  # fmt: skip


def load_blocks(path: str | os.PathLike[str], model: str, index: BlockIndex, store: BlockStore, head_dim: int) -> int:
    """Name the blocks of a file in an index that is empty; how many. Raises as `PrefixCache.load`."""
    if len(index):
        raise InvalidOperationError(f"expected an empty cache to load into, got {len(index)} blocks")
    snapshot = Snapshot(path, "blocks", model)
    try:
        if len(snapshot.arenas) != 1:
            raise SnapshotError(f"expected one arena, got {len(snapshot.arenas)}")
        _arena(store, head_dim).expect(snapshot.arenas[0])
        well_formed(snapshot.segments, store.block_size)
    except SnapshotError as error:
        raise SnapshotError(f"{snapshot.path}: {error}") from error
    index.holds.settle()
    index.take_in(snapshot, store)
    return len(index)


def _arena(store: BlockStore, head_dim: int) -> Arena:
    """How a file stores the blocks."""
    return Arena(
        store.num_layers, store.num_heads, head_dim, store.key_dtype, store.value_dtype, *store.rotated,
        "blocks", store.block_size, store.block_bytes,
    )  # fmt: skip

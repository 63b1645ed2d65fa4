"""Saves the blocks of `PrefixCache`s to a file and loads them: its methods `save` and `load`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcache.prefix.cached_blocks import CachedBlocks
from kvcache.prefix.files import load_blocks, save_blocks

if TYPE_CHECKING:
    from kvcache.prefix.blocks import PrefixCache

__all__ = ["load", "save"]


def save(
    cache: PrefixCache, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = ()
) -> None:
    """Write every cached block to a file, with its namespace and rank; `load` reads it.

    The file takes the place of the old one at once and whole, or not at all. Other calls wait meanwhile.

    Args:
        model: the model's name; `load` rejects a file with another.
        beside: other caches to save in the same file.

    Raises:
        TypeError: a namespace that is no None, bool, int, str, bytes or tuple of them.
        OSError: of the file system.
    """
    save_blocks(path, str(model), _cached_by([cache, *beside]))


def load(
    cache: PrefixCache, path: str | os.PathLike[str], model: str = "", *, beside: Sequence[PrefixCache] = ()
) -> int:
    """Load what `save` wrote, the most recently used blocks first, as many as there is room for; how many.

    This reads which tokens there are, not their K and V: a block is read, and checked, when a lookup first finds
    it. One that is damaged is forgotten, with all that comes after it, and logged as a warning.

    Args:
        model: as in `save`.
        beside: other caches; each loads the blocks of the cache that had its place in `save`, if formats and
            dimensions are the same. All other blocks are ignored.

    Raises:
        InvalidOperationError: blocks are cached here already, or in one of `beside`.
        SnapshotError: not a file of `save`, damaged in what is read now, of another model, or of other formats
            or dimensions; nothing has changed.
        OSError: there is none, or it cannot be read.
    """
    return load_blocks(path, str(model), _cached_by([cache, *beside]))


def _cached_by(caches: Sequence[PrefixCache]) -> list[CachedBlocks]:
    found = [getattr(cache, "_cached", None) for cache in caches]
    cached = [each for each in found if isinstance(each, CachedBlocks)]
    if len(cached) < len(caches):
        raise TypeError("beside: expected caches, got another object")
    if len({id(each) for each in cached}) < len(cached):
        raise ValueError("beside: expected each cache once, got one twice")
    return cached

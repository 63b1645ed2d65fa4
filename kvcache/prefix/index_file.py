"""Prefix indices to and from the tables of a saved cache, whatever lies in their slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.index.slots import Claim, Slots
from kvcache.prefix.saved_pages import SavedPages
from kvcache.saved.file_tables import Arena
from kvcache.saved.segments import Segments, ranges, walk_back
from kvcache.saved.snapshot import Snapshot, write_snapshot
from kvcache.trie.edges import edges_of
from kvcache.trie.trie import TokenTrie

__all__ = ["Part", "segments_of", "texts_of", "write_indices"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Text = tuple[Hashable, UInt32, Slots, Int32, SavedPages]
Part = tuple[PrefixIndex, Iterator[Text]]  # of what `kvcache.prefix.index.prefix_index.load` reads


def write_indices(
    path: str | os.PathLike[str], content: str, model: str, indices: Sequence[PrefixIndex],
    arenas: Sequence[tuple[Slots, Arena, Callable[[Int32], Iterable[list[Any]]]]], exact: bool,
) -> None:
    """Write what the indices name to a file.

    Args:
        arenas: the slots of some namespaces, how a file stores them, and a function from such pages to the file's.
        exact: see `write_snapshot`.
    """
    kinds = [slots for slots, _, _ in arenas]
    namespaces: list[tuple[int, Hashable]] = []
    segments, pages = Segments.none(), [np.empty(0, np.int32)]
    for index in indices:
        spaces = index.namespaces()
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
        lambda i: arenas[i][2](np.concatenate(pages)[of_page == i]), exact=exact,
    )


def texts_of(
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


def segments_of(
    trie: TokenTrie, roots: Sequence[int], tokens_of: Callable[[Int32], UInt32] | None = None
) -> tuple[Segments, Int32]:
    """`(segments, values)`: what is below `roots`, the namespaces, and the trie's values in the same order.

    Where pages have more tokens than one, an edge may begin or end inside a page. `tokens_of` says what pages cover,
    uint32 `(n, page_size)`: a segment then has whole pages, those that its edge owns.
    """
    size, edges = trie.page_size, edges_of(trie, roots)
    begins = np.where(edges.parents >= 0, edges.ends[edges.parents], 0)
    pages = edges.ends // size - begins // size
    kept = np.flatnonzero(pages)
    # An edge without pages is omitted; its children attach to its parent.
    place = np.full(len(pages) + 1, -1)
    place[kept] = np.arange(len(kept))
    for edge in np.flatnonzero(pages == 0):
        place[edge] = place[edges.parents[edge]]
    order = np.lexsort((edges.ends[kept], -edges.stamps[kept]))  # newest first, then by depth
    moved = np.empty(len(kept), np.int64)
    moved[order] = np.arange(len(kept))
    above, pages, chosen = place[edges.parents[kept[order]]], pages[kept], kept[order]
    firsts = np.cumsum(pages) - pages
    tokens = edges.tokens if tokens_of is None else tokens_of(edges.values).reshape(-1)
    segments = Segments(
        edges.roots[chosen], np.where(above >= 0, moved[above], -1), pages[order] * size, edges.marked[chosen],
        tokens[ranges(firsts * size, pages * size, order)],
    )
    return segments, edges.values[ranges(firsts, pages, order)]

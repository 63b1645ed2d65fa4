"""Converts a token trie to the segments of a saved cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcache.saved.segments import Segments, ranges
from kvcache.trie.edges import edges_of
from kvcache.trie.trie import TokenTrie

__all__ = ["segments_of"]

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]


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
    )  # fmt: skip
    return segments, edges.values[ranges(firsts, pages, order)]

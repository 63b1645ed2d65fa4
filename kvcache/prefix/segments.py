"""Converts a token trie to the segments of a saved cache, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvcache.errors import SnapshotError
from kvcache.saved.snapshot import Segments
from kvcache.trie.edges import edges_of
from kvcache.trie.trie import TokenTrie

__all__ = ["newest_entries", "ranges", "segments_of", "walk_back", "well_formed"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
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


def ranges(firsts: Int64, lengths: Int64, order: Int64) -> Int64:
    """The indices from `firsts[i]` on, `lengths[i]` of them, for each i of `order`, int64."""
    firsts, lengths = firsts[order], lengths[order]
    before = np.cumsum(lengths) - lengths
    indices: Int64 = np.arange(int(lengths.sum())) + np.repeat(firsts - before, lengths)
    return indices


def well_formed(segments: Segments, which: Int64, size: int) -> None:
    """SnapshotError unless `which` are whole pages of `size` tokens, and siblings differ in their first page."""
    if (segments.lengths[which] % size).any():
        raise SnapshotError(f"expected segments of whole pages of {size} tokens, got others")
    if not len(which):
        return
    firsts = (np.cumsum(segments.lengths) - segments.lengths)[which]
    heads = segments.tokens[firsts[:, None] + np.arange(size)].astype(np.int64)
    keys = np.column_stack([segments.namespaces[which], segments.parents[which], heads])
    if len(np.unique(keys, axis=0)) != len(keys):
        raise SnapshotError("expected each text once, got one twice")


def newest_entries(
    segments: Segments, costs: Sequence[int], budget: int, max_entries: int, min_tokens: int
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """The marked segments to keep, newest first, as far as the limits go, and every segment that they need.

    Args:
        costs: bytes of one token, by namespace.
        budget: bytes; an entry that does not fit is passed over, also if later ones do.
        min_tokens: shorter entries are passed over.
    """
    parents, lengths, spaces = (x.tolist() for x in (segments.parents, segments.lengths, segments.namespaces))
    depths, taken = [0] * len(parents), [False] * len(parents)
    entries: list[int] = []
    for i, parent in enumerate(parents):
        depths[i] = lengths[i] + (depths[parent] if parent >= 0 else 0)
        if not segments.marked[i] or depths[i] < min_tokens or len(entries) >= max_entries:
            continue
        path, need, at = [], 0, i
        while at >= 0 and not taken[at] and need <= budget:
            path.append(at)
            need += lengths[at] * costs[spaces[at]]
            at = parents[at]
        if need <= budget:
            budget -= need
            entries.append(i)
            for at in path:
                taken[at] = True
    return np.array(entries, np.int64), np.array(taken, bool)


def walk_back(segments: Segments, firsts: Int64, chosen: Int64) -> Iterator[tuple[int, UInt32, Int64]]:
    """`(segment, tokens, slots)` of each of `chosen`, the oldest first: its whole text, and where that lies."""
    starts = np.cumsum(segments.lengths) - segments.lengths
    parents = segments.parents.tolist()
    for segment in chosen[::-1].tolist():
        steps = [segment]
        while parents[steps[-1]] >= 0:
            steps.append(parents[steps[-1]])
        path = np.array(steps[::-1])
        every = np.arange(len(path))
        lengths = segments.lengths[path]
        tokens = segments.tokens[ranges(starts[path], lengths, every)]
        yield segment, tokens, ranges(firsts[path], lengths, every)

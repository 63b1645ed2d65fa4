"""The segments of a saved cache: the edges of a token tree, as snapshot.py draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.errors import SnapshotError

__all__ = ["Segments", "newest_entries", "newest_pages", "ranges", "walk_back", "well_formed"]

Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]


class Segments(NamedTuple):
    """A token tree, see snapshot.py.

    Attributes:
        namespaces, parents: indices of each segment's namespace and of its parent, -1 if none, int64 `(n,)`.
        lengths: tokens of each segment, int64 `(n,)`.
        marked: whether an entry ends there, bool `(n,)`.
        tokens: of all segments, uint32.
    """

    namespaces: Int64
    parents: Int64
    lengths: Int64
    marked: npt.NDArray[np.bool_]
    tokens: UInt32

    @classmethod
    def none(cls) -> Segments:
        """An empty tree."""
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty, np.empty(0, bool), np.empty(0, np.uint32))

    def and_then(self, others: Segments, num_namespaces: int) -> Segments:
        """These segments, of `num_namespaces` namespaces, followed by `others`, with namespaces of their own."""
        parents = np.where(others.parents >= 0, others.parents + len(self.lengths), -1)
        moved: tuple[npt.NDArray[Any], ...] = (others.namespaces + num_namespaces, parents, *others[2:])
        mine: tuple[npt.NDArray[Any], ...] = tuple(self)
        return Segments(*(np.concatenate(pair) for pair in zip(mine, moved, strict=True)))

    def slots(self, arena_of: Int64, num_arenas: int) -> tuple[Int64, Int64]:
        """First slot of each segment in its arena, and slots of each arena; `arena_of` by namespace."""
        firsts, totals = np.zeros(len(self.lengths), np.int64), np.zeros(num_arenas, np.int64)
        arenas = arena_of[self.namespaces]
        np.add.at(totals, arenas, self.lengths)
        order = np.argsort(arenas, kind="stable")
        before = np.cumsum(totals) - totals  # in the arenas before
        firsts[order] = np.cumsum(self.lengths[order]) - self.lengths[order] - before[arenas[order]]
        return firsts, totals


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
    # Not by np.unique: it compares records, and then Ctrl-C may become a TypeError.
    if len({key.tobytes() for key in keys}) != len(keys):
        raise SnapshotError("expected each text once, got one twice")


def newest_pages(segments: Segments, which: Int64, size: int, room: int) -> Int64:
    """Pages to keep of each segment, int64 `(n,)`: of `which`, newest first, `room` in all, none after a cut parent."""
    pages, parents = (segments.lengths // size).tolist(), segments.parents.tolist()
    kept = [0] * len(pages)
    for i in which.tolist():
        parent = parents[i]
        if parent < 0 or kept[parent] == pages[parent]:
            kept[i] = min(pages[i], room)
            room -= kept[i]
    return np.array(kept, np.int64)


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

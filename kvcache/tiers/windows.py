"""The layers that keep a window alone, or a state: their pages in tiers, for the ends of texts.

A request may continue after `n` tokens if the tiers have the groups of the other layers up to there, and, for each
window, the pages that the query at `n` sees. So a lookup of such a network has one place to continue at, the end of a
group, and its blocks are used when all of them have arrived. A value of these layers has one page of them. For layers
with a state that is the state after the group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.tiers.links import Link
from kvcache.tiers.lookups import WINDOW, Lookup, Reader
from kvcache.tiers.source import TierSource
from kvcache.tiers.values import ValueFormat, Wrapping
from kvcache.tiers.writing import WriteBehind

if TYPE_CHECKING:
    from kvcache.prefix.cached_blocks import CachedBlocks

__all__ = ["StateSource", "WindowSource", "WindowedLookup"]

logger = logging.getLogger("kvcache")

Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


class WindowSource(TierSource):
    """The source of the prefix cache of the layers with one window, or with chunks.

    Args:
        links, writers, reader, model, owner: as of `TierSource`.
        first_seen: the first token that the query at a position sees.

    Attributes:
        arrived: what `offers` delivers: the page of each namespace of that cache.
    """

    def __init__(
        self, links: list[Link], writers: list[WriteBehind], reader: Reader, model: str, owner: object,
        first_seen: Callable[[int], int],
    ) -> None:
        super().__init__(links, writers, reader, model, 0.0, owner, group_tokens=1)
        self._first_seen = first_seen
        self.arrived: dict[Hashable, memoryview] = {}
        self._bodies_of: dict[int, memoryview] = {}

    def first_page(self, pos: int) -> int:
        """The first page that the query at `pos` sees."""
        return self._first_seen(pos) // self.format.group_tokens

    def offers(self, name: Hashable, tokens: Tokens, start: int) -> int:
        """See `Source`."""
        return int(start == 0 and name in self.arrived and len(tokens) == self.format.group_tokens)

    def expect(self, name: Hashable, tokens: Tokens, start: int, pages: Int32) -> None:
        """See `Source`."""
        self._bodies_of[int(pages[0])] = self.arrived[name]

    def fetch(self, pages: Int32) -> Int32:
        """See `Source`."""
        self.fill([int(pages[0])], self._bodies_of.pop(int(pages[0])), 0)
        return pages

    def spill(self, name: Hashable, tokens: Tokens, pages: Int32) -> None:
        """Nothing: the windows of a text are written when it ends."""

    def ends(
        self, name: Hashable, tokens: Tokens, pages: Callable[[PrefixIndex], dict[int, int]], *, once: bool = False
    ) -> None:
        """Write the pages of a text that `pages(index)` returns, with the cache's lock held, by their number in it.

        Raises no exception.

        Args:
            once: write them after a single use too.
        """
        assert self._cached is not None
        try:
            with self._cached.lock:
                if found := pages(self._cached.index):
                    blocks = np.full(max(found) + 1, -1, np.int32)
                    blocks[list(found)] = list(found.values())
                    size = self.format.group_tokens
                    self.write(name, tokens[: len(blocks) * size], blocks, sorted(found), evicted=once)
        except Exception:
            logger.warning("the windows of a request are not offered to the tiers", exc_info=True)


class StateSource(WindowSource):
    """The source of the cached states of layers that keep one: a value is the state after the tokens of its group.

    Args:
        links, writers, reader, model, owner: as of `TierSource`.
        group_tokens: of the groups of the other layers.
    """

    def __init__(
        self, links: list[Link], writers: list[WriteBehind], reader: Reader, model: str, owner: object,
        group_tokens: int,
    ) -> None:
        super().__init__(links, writers, reader, model, owner, lambda pos: pos)
        self._group_tokens = group_tokens

    def attach(self, cached: CachedBlocks) -> None:
        """See `Source`."""
        super().attach(cached)
        self._pages = 1
        self.format = ValueFormat(self._group_tokens, cached.store.block_bytes)

    def first_page(self, pos: int) -> int:
        """The group that ends with `pos` tokens."""
        return pos // self.format.group_tokens - 1

    def offers(self, name: Hashable, tokens: Tokens, start: int) -> int:
        """See `Source`."""
        return int(start == 0 and name in self.arrived)


class _Part(NamedTuple):
    """The layers of one window, or those with a state, in a lookup; `bodies` by page."""

    source: WindowSource
    keys: list[list[bytes]]
    wrappings: list[Wrapping]
    bodies: dict[int, memoryview]


class WindowedLookup(Lookup):
    """A lookup of a network with windows or states.

    Attributes:
        target: tokens at which the request may continue; 0: not everything has arrived.
        parts: for each window.
    """

    def __init__(self, *arguments: Any, sources: Sequence[WindowSource]) -> None:
        super().__init__(*arguments)
        self.stop = (len(self.tokens) - 1) // self.format.group_tokens  # the last token runs in any case
        self.target = 0
        self.parts = [_Part(each, *each.names(self.name, self.tokens), {}) for each in sources]
        self.beside = sum(len(self._pages(each, self.stop)) * each.source.format.value_bytes for each in self.parts)

    def available(self, token: int) -> int:
        return max(token, self.target)

    def narrowed(self, number: int, link: Link, at: int, end: int) -> int:
        found = []
        size = self.format.group_tokens
        for part in self.parts:
            pages = range(part.source.first_page((at + 1) * size), end * size // part.source.format.group_tokens)
            there = link.contains([part.keys[number][page] for page in pages])
            if there is None:
                return at
            found.append({page for page, known in zip(pages, there, strict=True) if known})
            for page in set(pages) - found[-1]:
                part.source.lacks(part.keys[0][page], number)
        for stop in range(end, at, -1):
            if all(found[i].issuperset(self._pages(part, stop)) for i, part in enumerate(self.parts)):
                return stop
        return at

    def finish(self, number: int, link: Link, stop: int) -> None:
        for part in self.parts:
            form, pages = part.source.format, self._pages(part, stop)
            step = max(1, WINDOW // form.value_bytes)
            for first in range(pages.start, pages.stop, step):
                some = range(first, min(first + step, pages.stop))
                values = link.get([part.keys[number][page] for page in some], form.value_bytes)
                for page, value in zip(some, values or [], strict=False):
                    tokens = self.tokens[page * form.group_tokens : (page + 1) * form.group_tokens]
                    body = part.wrappings[number].open(form, part.keys[number][page], tokens, value)
                    if body is None:
                        if value is None:
                            link.count("misses")
                        else:
                            link.wrong()
                        part.source.wrong(part.keys[0][page], number)
                        return
                    link.count("hits")
                    link.count("bytes_read", form.value_bytes)
                    part.bodies[page] = body
                if values is None or len(values) < len(some):
                    return
        self.target = stop * self.format.group_tokens

    def _pages(self, part: _Part, stop: int) -> range:
        """The pages that are needed to continue after group `stop - 1`."""
        end = stop * self.format.group_tokens
        return range(part.source.first_page(end), end // part.source.format.group_tokens)

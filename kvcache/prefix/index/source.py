"""`Source`: a store outside of a prefix cache that delivers pages and receives evicted ones: a saved file, a tier."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.prefix.index.prefixes import PrefixIndex
from kvcache.prefix.index.slots import Slots

if TYPE_CHECKING:
    from kvcache.prefix.cached_blocks import CachedBlocks

__all__ = ["PageReader", "Source", "fetch_offered", "fetch_waiting"]

Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


class PageReader(Protocol):
    """What fills the slots of pages. Called with the cache's lock held; a failure to deliver is no exception.

    A page is known by its id; `Slots.of` says where its slots are, for each group of layers.
    """

    def fetch(self, pages: Int32) -> Int32:
        """Fill the slots of pages; the pages that have their content now, which may include others that wait."""


class Source(PageReader, Protocol):
    """A store outside of the cache: it is asked for the pages that the cache lacks, and receives those evicted."""

    def attach(self, cached: CachedBlocks) -> None:
        """The cache whose source it is from now on; the other calls follow, with the lock of the cache held."""

    def offers(self, name: Hashable, tokens: Tokens, start: int) -> int:
        """How many pages of `tokens` it has, from page `start` on, for every group that needs them."""

    def expect(self, name: Hashable, tokens: Tokens, start: int, pages: Int32) -> None:
        """Note that `pages` are for what was offered of `tokens`, from page `start` on; `fetch` of them follows."""

    def spill(self, name: Hashable, tokens: Tokens, pages: Int32) -> None:
        """`tokens` end with `pages`, whose slots are free after this call."""


def fetch_waiting(index: PrefixIndex, tokens: Tokens, name: Hashable, least: int = -1) -> None:
    """Read the pages of a match of `tokens` that wait; forget damaged ones and all that continues them.

    Args:
        least: as of `PrefixIndex.forget`.
    """
    while (space := index.space(name)) is not None and space.slots.num_waiting:
        found, slots = index.find(tokens, name), space.slots
        pages = found.pages if found.tail < 0 else np.append(found.pages, np.int32(found.tail))
        waiting = pages[slots.records(pages)["waits"] != 0]
        if len(waiting) == 0:
            return
        if slots.source is not None:
            slots.arrived(slots.source.fetch(waiting))
        if len(damaged := waiting[slots.records(waiting)["waits"] != 0]):
            index.forget(tokens, name, int(damaged[0]), least)


def fetch_offered(
    index: PrefixIndex, source: Source, slots: Slots, tokens: Tokens, name: Hashable, make_room: Callable[[int], int]
) -> None:
    """Fetch the pages of `tokens` that `source` has and the index lacks, and name them.

    Args:
        make_room: `make_room(count)` evicts until up to `count` more pages fit, and returns how many do.
    """
    size, head = slots.page_size, index.head(tokens, name)
    start = 0 if head is None else len(head)
    wanted = len(tokens) // size - start
    if wanted > 0 and (count := make_room(min(wanted, source.offers(name, tokens, start)))) > 0:
        claim = slots.take(count)
        source.expect(name, tokens, start, claim.pages)
        good = np.isin(claim.pages, source.fetch(claim.pages))
        claim.cut(count if good.all() else int(good.argmin()))
        if len(claim):
            index.insert(tokens[: (start + len(claim)) * size], claim, name, head)

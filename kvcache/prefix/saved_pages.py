"""Reads pages of a cache from a saved file, each when a lookup first matches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import proxy

import numpy as np
import numpy.typing as npt

from kvcache.prefix.index.slots import Claim
from kvcache.saved.snapshot import Snapshot

__all__ = ["SavedPages"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

logger = logging.getLogger("kvcache")


class SavedPages:
    """Reads the pages of a `Slots` from one arena of a file.

    Args:
        claim: on the pages that wait.
        places: what each waits for, int64 `(n,)`, of which a page of the file has `size`.
        at_once: pages of the file that are read in one call.
        buffers: `buffers(turn, pages)` returns the arrays to read a file page into: the `turn`-th page of one call,
            which has the content of `pages`.
        arrived: `arrived(turn, pages, places)` copies the content from these arrays.
    """

    def __init__(
        self, snapshot: Snapshot, arena: int, claim: Claim, places: Int64, size: int, at_once: int,
        buffers: Callable[[int, Int32], list[Any]], arrived: Callable[[int, Int32, Int64], None],
    ) -> None:
        pages = claim.pages
        self._snapshot, self._arena, self._slots = snapshot, arena, proxy(claim.slots)  # the slots refer to this
        self._size, self._at_once, self._buffers, self._arrived = size, at_once, buffers, arrived
        self._page_of = np.full(-(-(int(places.max(initial=-1)) + 1) // self._size) * self._size, -1, np.int32)
        self._place_of = np.full(int(pages.max(initial=-1)) + 1, -1, np.int64)
        self._page_of[places], self._place_of[pages] = pages, places
        self._warned = False

    def pages_at(self, places: Int64) -> Int32:
        """The pages that wait for `places`."""
        return self._page_of[places]

    def fetch(self, pages: Int32) -> Int32:
        """Read the file pages that `pages` wait for, up to the first damaged one; the pages that have their content."""
        arrived = [np.empty(0, np.int32)]
        wanted = list(dict.fromkeys((self._place_of[pages] // self._size).tolist()))
        for first in range(0, len(wanted), self._at_once):
            some = wanted[first : first + self._at_once]
            waiting = [self._waiting(page) for page in some]
            buffers = [self._buffers(turn, mine) for turn, (mine, _) in enumerate(waiting)]
            good = self._snapshot.read_pages(self._arena, some, buffers)
            for turn in range(len(some) if good.all() else int(good.argmin())):
                self._arrived(turn, *waiting[turn])
                arrived.append(waiting[turn][0])
            if not good.all():
                self._warn(some[int(good.argmin())])
                break
        return np.concatenate(arrived)

    def _waiting(self, file_page: int) -> tuple[Int32, Int64]:
        """The pages that wait for a file page, and their places in it."""
        mine = self._page_of[file_page * self._size : (file_page + 1) * self._size]
        inside = np.flatnonzero(mine >= 0)
        inside = inside[
            self._slots.records(mine[inside])["waits"] != 0
        ]  # the others were evicted, and their slots may be in use again
        return mine[inside], inside

    def _warn(self, page: int) -> None:
        # A file that was cut short may have thousands.
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "%s: page %d is damaged; what needs it is forgotten", self._snapshot.path, page)
        self._warned = True

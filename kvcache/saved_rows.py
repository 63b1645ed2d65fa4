"""The rows of a `PrefixKvCache` that was loaded: in their slots by name, until they are first asked for."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from kvcache.rows import Rows
from kvcache.snapshot import Snapshot

__all__ = ["SavedRows"]

Int32 = npt.NDArray[np.int32]

logger = logging.getLogger("kvcache")


class SavedRows:
    """Which slots of an arena wait for which rows of a file.

    Attributes:
        waiting: how many slots do.
    """

    def __init__(self, snapshot: Snapshot, arena: int, rows: Rows) -> None:
        self._snapshot, self._arena = snapshot, arena
        self._page = rows.page()
        self._size = snapshot.arenas[arena].page_tokens
        self._slot_of = np.full(-(-int(snapshot.num_slots[arena]) // self._size) * self._size, -1, np.int32)
        self._place_of = np.empty(0, np.int64)  # by slot
        self.waiting = 0

    def expect(self, slots: Int32, places: npt.NDArray[np.int64]) -> None:
        """`slots` wait for the rows at `places` of the file."""
        grown = np.full(max(len(self._place_of), int(slots.max(initial=-1)) + 1), -1, np.int64)
        grown[: len(self._place_of)] = self._place_of
        self._place_of = grown
        self._place_of[slots], self._slot_of[places] = places, slots
        self.waiting += len(slots)

    def _places(self, slots: Int32) -> npt.NDArray[np.int64]:
        places = np.full(len(slots), -1, np.int64)
        known = slots < len(self._place_of)
        places[known] = self._place_of[slots[known]]
        return places

    def forget(self, slots: Int32) -> None:
        """The trie has let go of `slots`: they wait no more."""
        places = self._places(slots)
        waited = places >= 0
        self._place_of[slots[waited]], self._slot_of[places[waited]] = -1, -1
        self.waiting -= int(np.count_nonzero(waited))

    def fetch(self, slots: Int32) -> int:
        """Bring in what `slots` wait for, page by page; how many of them have their rows before the first that has not.

        Rows of a damaged page stay where they are.
        """
        places = self._places(slots)
        for page in np.unique(places[places >= 0] // self._size).tolist():
            if not self._snapshot.read_page(self._arena, page, self._page.buffers):
                logger.warning("%s: page %d is damaged; what needs it is forgotten", self._snapshot.path, page)
                continue
            of_page = self._slot_of[page * self._size : (page + 1) * self._size]
            inside = np.flatnonzero(of_page >= 0)
            arrived = of_page[inside]
            self._page.copy_to(arrived, inside)
            self.forget(arrived)
        missing = np.flatnonzero(self._places(slots) >= 0)
        return int(missing[0]) if len(missing) else len(slots)

"""What was loaded and not yet read: slots of a cache that wait for pages of a file until they are first asked for."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.store import BlockStore
from kvcache.prefix.rows import Rows
from kvcache.saved.snapshot import Snapshot

__all__ = ["Saved", "SavedBlocks", "SavedRows"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

logger = logging.getLogger("kvcache")

# More would not be faster: rows are copied from pages of their own, and Ctrl-C waits for blocks.
_ROWS_AT_ONCE, _BLOCKS_AT_ONCE = 4, 256


class Saved(ABC):
    """Which slots wait for which places of one arena of a file.

    Args:
        page_slots: so many places make a page.
        at_once: so many pages are read in one call.

    Attributes:
        waiting: how many slots do.
    """

    def __init__(self, snapshot: Snapshot, arena: int, page_slots: int, num_places: int, at_once: int) -> None:
        self.snapshot, self.arena, self._page_slots, self._at_once = snapshot, arena, page_slots, at_once
        self._slot_of = np.full(-(-num_places // page_slots) * page_slots, -1, np.int32)  # by place
        self._place_of = np.empty(0, np.int64)  # by slot, as far as any waits
        self.waiting = 0
        self._warned = False

    @abstractmethod
    def _buffers(self, turn: int, page: int) -> list[Any]:
        """Where to read a page, the `turn`-th of those that are read at once."""

    @abstractmethod
    def _arrived(self, turn: int, slots: Int32, places: Int64) -> None:
        """What was read is good: give `slots` what is at its `places`."""

    def expect(self, slots: Int32, places: Int64) -> None:
        """`slots` wait for `places` of the file."""
        grown = np.full(max(len(self._place_of), int(slots.max(initial=-1)) + 1), -1, np.int64)
        grown[: len(self._place_of)] = self._place_of
        self._place_of = grown
        self._place_of[slots], self._slot_of[places] = places, slots
        self.waiting += len(slots)

    def places(self, slots: Int32) -> Int64:
        """What each slot waits for, -1 where it does not wait."""
        places = np.full(len(slots), -1, np.int64)
        known = slots < len(self._place_of)
        places[known] = self._place_of[slots[known]]
        return places

    def slots(self) -> Int32:
        """Those that wait, in no particular order."""
        return self._slot_of[self._slot_of >= 0]

    def forget(self, slots: Int32) -> None:
        """The cache has let go of `slots`: they wait no more."""
        # One by one, which takes no memory: what is in other hands must not wait.
        place_of, slot_of = self._place_of.data, self._slot_of.data
        for slot in slots.data:
            if slot < len(place_of) and (place := place_of[slot]) >= 0:
                place_of[slot] = slot_of[place] = -1
                self.waiting -= 1

    def mend(self, stored: npt.NDArray[np.bool_]) -> None:
        """After an interrupt: of those that wait for a place, the `stored` ones do, and no others."""
        places = np.flatnonzero(self._slot_of >= 0)
        self._slot_of[places[~stored[self._slot_of[places]]]] = -1
        places = np.flatnonzero(self._slot_of >= 0)
        self._place_of.fill(-1)
        self._place_of[self._slot_of[places]] = places
        self.waiting = len(places)

    def fetch(self, slots: Int32) -> int:
        """Bring in what `slots` wait for, page by page; how many of them come before the first whose page is damaged.

        That one and what comes after it wait on.
        """
        size, places = self._page_slots, self.places(slots)
        pages = list(dict.fromkeys((places[places >= 0] // size).tolist()))
        for first in range(0, len(pages), self._at_once):
            some = pages[first : first + self._at_once]
            good = self.snapshot.read_pages(self.arena, some, [self._buffers(*each) for each in enumerate(some)])
            for turn, page in enumerate(some):
                if not good[turn]:
                    self._warn(page)
                    break
                of_page = self._slot_of[page * size : (page + 1) * size]
                inside = np.flatnonzero(of_page >= 0)
                waiting = of_page[inside]
                self._arrived(turn, waiting, inside)
                self.forget(waiting)
            if not good.all():
                break
        missing = np.flatnonzero(self.places(slots) >= 0)
        return int(missing[0]) if len(missing) else len(slots)

    def _warn(self, page: int) -> None:
        # A file that was cut short may have thousands.
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "%s: page %d is damaged; what needs it is forgotten", self.snapshot.path, page)
        self._warned = True


class SavedRows(Saved):
    """Slots of `Rows`."""

    def __init__(self, snapshot: Snapshot, arena: int, rows: Rows) -> None:
        page_tokens = snapshot.arenas[arena].page_tokens
        super().__init__(snapshot, arena, page_tokens, int(snapshot.num_slots[arena]), _ROWS_AT_ONCE)
        self._pages = [rows.page() for _ in range(_ROWS_AT_ONCE)]

    def _buffers(self, turn: int, page: int) -> list[Any]:
        return self._pages[turn].buffers

    def _arrived(self, turn: int, slots: Int32, places: Int64) -> None:
        self._pages[turn].copy_to(slots, places)


class SavedBlocks(Saved):
    """Blocks of a `BlockStore`; here a slot is a block, and its place a page."""

    def __init__(self, snapshot: Snapshot, arena: int, store: BlockStore) -> None:
        num_blocks = int(snapshot.num_slots[arena]) // store.block_size
        super().__init__(snapshot, arena, 1, num_blocks, _BLOCKS_AT_ONCE)
        self._store = store

    def _buffers(self, turn: int, page: int) -> list[Any]:
        # Straight into the block: nobody reads it before its checksum is found right.
        return self._store.overwrite(int(self._slot_of[page]))

    def _arrived(self, turn: int, slots: Int32, places: Int64) -> None:
        """It is there."""

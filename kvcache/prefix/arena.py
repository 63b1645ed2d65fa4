"""Slots for tokens in an arena that grows, and who still shows them: the memory behind `PrefixKvCache`.

    slot         0   1   2   3   4   5   6              a slot is K and V of one token in all layers
    stored       x   x   x   x   .   x   .              the trie holds it
    leased       1   2   0   0   1   0   0              states out there that still show it

A slot is free when neither holds it. Handing out a state costs nothing per token: its slots are counted only
when an eviction asks who still shows them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import Parting
from kvcache.errors import OutOfMemoryError
from kvcache.prefix.rows import BLOCK_SIZE, Rows
from kvcache.prefix.saved import SavedRows

__all__ = ["Lease", "RowArena"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


_NONE: Int32 = np.empty(0, np.int32)


class Lease:
    """The slots that one state shows, `(seq_len,)`; they stay as they are until the lease is let go."""

    __slots__ = ("_parting", "arena", "slots")

    def __init__(self, arena: RowArena, slots: Int32, key: int) -> None:
        self.arena = arena
        self.slots = slots
        # Collection may strike anywhere, also inside a call on the arena: only a note is left.
        self._parting = Parting(arena.ended, key)

    def keys(self, layer: int) -> Float32:
        """K of one layer, float32 `(seq_len * kv_dim,)`."""
        return self._read(0, layer)

    def values(self, layer: int) -> Float32:
        """V of one layer, float32 `(seq_len * kv_dim,)`."""
        return self._read(1, layer)

    def _read(self, side: int, layer: int) -> Float32:
        """Read-only: a view that keeps the lease where the rows lie there as float32 together, else a copy."""
        rows = self.arena.rows
        view = rows.view(side, layer, self.slots)
        out: Float32
        out = rows.read(side, layer, self.slots) if view is None else np.asarray(_View(view, self))
        out.flags.writeable = False
        return out


class _View:
    """An array that keeps its lease: NumPy holds on to the object that an interface came from."""

    def __init__(self, array: Float32, lease: Lease) -> None:
        self.array = array
        self.lease = lease
        self.__array_interface__ = array.__array_interface__


class RowArena:
    """Slots of `rows`, taken, dropped and leased.

    Attributes:
        rows: what lies in the slots.
        stored, leased: see above, `(num_slots,)`.
        saved: which slots wait for rows of a file; None: none does.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.stored = np.zeros(0, bool)
        self.leased = np.zeros(0, np.int32)
        self.free = np.empty(0, np.int32)
        self.num_free = 0
        self.leases: dict[int, tuple[Int32, bool]] = {}
        self.next_lease = 0
        self.uncounted: list[int] = []
        self.ended: deque[int] = deque()
        self.leaving: deque[Int32] = deque()  # what the trie let go of, not yet free
        self.saved: SavedRows | None = None

    # -- slots ----------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots there is room for."""
        return len(self.stored)

    @property
    def num_used(self) -> int:
        """Slots that the trie holds or a state shows."""
        return self.num_slots - self.num_free

    def take(self, count: int, limit: int) -> Int32:
        """`count` free slots, int32, now stored; consecutive where possible. The arena grows, up to `limit` slots.

        Raises:
            MemoryError: the system refuses the memory; nothing has changed.
        """
        if count > self.num_free:
            self._grow(min(max(2 * self.num_slots, self.num_used + count, 64), max(limit, self.num_used + count)))
        slots = self.free[self.num_free - count : self.num_free][::-1].copy()
        self.stored[slots] = True
        self.num_free -= count
        return slots

    def _grow(self, num_slots: int) -> None:
        old = self.num_slots
        stored, leased, free = np.zeros(num_slots, bool), np.zeros(num_slots, np.int32), np.empty(num_slots, np.int32)
        self.rows.grow(num_slots)
        stored[:old], leased[:old] = self.stored, self.leased
        # A stack with the lowest new slot on top: what is taken together lies together.
        free[: num_slots - old] = np.arange(num_slots - 1, old - 1, -1)
        free[num_slots - old : num_slots - old + self.num_free] = self.free[: self.num_free]
        self.stored, self.leased, self.free = stored, leased, free
        self.num_free += num_slots - old

    def drop(self, slots: Int32) -> None:
        """The trie lets go of `slots`, in the order in which they left it."""
        self.leaving.append(slots)
        try:
            self.settle(count=True)
        except OutOfMemoryError:  # of a signal handler: this call fails
            raise
        except MemoryError:
            pass  # then the next call does it

    def _give(self, slots: Int32) -> None:
        self.free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    # -- files ----------------------------------------------------------------------------------------------

    def fetch(self, slots: Int32) -> int:
        """Bring in the rows that wait in a file; how many of `slots` come before the first whose rows are damaged."""
        if self.saved is None:
            return len(slots)
        good = self.saved.fetch(slots)
        self._put_away_saved()
        return good

    def _put_away_saved(self) -> None:
        if self.saved is not None and not self.saved.waiting:
            self.saved = None  # and with it the file is closed

    def pages(self, slots: Int32) -> Iterator[list[npt.NDArray[Any]]]:
        """The rows at `slots` as the pages of a saved cache; each is good until the next one."""
        page = self.rows.page()
        for first in range(0, len(slots), BLOCK_SIZE):
            some = slots[first : first + BLOCK_SIZE]
            if len(some) < BLOCK_SIZE:
                page = self.rows.page()  # the rest is zero, not the rows of before
            page.copy_from(some)
            yield page.buffers

    # -- leases ---------------------------------------------------------------------------------------------

    def lease(self, slots: Int32) -> Lease:
        """A lease on slots that the trie holds."""
        key = self.next_lease
        self.next_lease += 1
        lease = Lease(self, slots, key)  # from here on it is let go, however this ends
        self.leases[key] = (slots, False)
        self.uncounted.append(key)
        return lease

    def settle(self, count: bool = False) -> None:
        """Close the leases that were let go; with `count`, count the slots of those that were not."""
        # Each step computes first and changes afterwards: without memory it is done by the next call.
        while self.ended:
            slots, counted = self.leases.get(self.ended[0], (_NONE, False))
            if counted:
                at, left = slots.astype(np.intp), self.leased[slots] - 1
                given = slots[(left == 0) & ~self.stored[slots]][::-1]
                self.leased[at] = left
                self._give(given)
            self.leases.pop(self.ended[0], None)
            self.ended.popleft()
        count = count or bool(self.leaving)
        while count and self.uncounted:
            key = self.uncounted[-1]
            if key in self.leases:
                slots, _ = self.leases[key]
                at, more, lease = slots.astype(np.intp), self.leased[slots] + 1, (slots, True)
                self.leases[key] = lease
                self.leased[at] = more
            self.uncounted.pop()
        while count and self.leaving:
            slots = self.leaving[0]
            at, given = slots.astype(np.intp), slots[self.leased[slots] == 0]
            if self.saved is not None:
                self.saved.forget(slots)
                self._put_away_saved()
            self.stored[at] = False
            self._give(given)
            self.leaving.popleft()
        if count:
            return
        if len(self.uncounted) > 2 * len(self.leases) + 64:
            self.uncounted = [key for key in self.uncounted if key in self.leases]

    def mend(self, held: Int32) -> None:
        """After an interrupt: the slots that the trie holds are stored, open leases are counted, the rest is free."""
        while self.ended:
            self.leases.pop(self.ended[0], None)
            self.ended.popleft()
        stored, leased = np.zeros(self.num_slots, bool), np.zeros(self.num_slots, np.int32)
        stored[held] = True
        for slots, _ in self.leases.values():
            leased[slots] += 1
        free, given = np.empty(self.num_slots, np.int32), np.flatnonzero(~stored & (leased == 0))[::-1]
        free[: len(given)] = given
        self.leases = {key: (slots, True) for key, (slots, _) in self.leases.items()}
        self.stored, self.leased, self.free, self.num_free = stored, leased, free, len(given)
        self.uncounted.clear()
        self.leaving.clear()
        if self.saved is not None:
            self.saved.mend(stored)
            self._put_away_saved()

    def num_leased(self) -> int:
        """Slots that states show."""
        self.settle(count=True)
        return int(np.count_nonzero(self.leased))

    # -- verification ---------------------------------------------------------------------------------------

    def check(self, held: Int32) -> None:
        """Verify every invariant, given the slots that the trie holds; AssertionError names the broken one."""
        self.settle(count=True)
        stored = np.zeros(self.num_slots, np.int32)
        np.add.at(stored, held, 1)
        assert (stored == self.stored).all(), "arena: the trie's slots are not those stored, or some twice"
        assert self.saved is None or self.stored[self.saved.slots()].all(), "arena: a slot waits that is not stored"
        leased = np.zeros(self.num_slots, np.int32)
        for slots, counted in self.leases.values():
            assert counted, "arena: a lease was passed over"
            leased[slots] += 1
        assert (leased == self.leased).all(), "arena: leases do not add up"
        free = np.zeros(self.num_slots, bool)
        free[self.free[: self.num_free]] = True
        assert np.count_nonzero(free) == self.num_free, "arena: a slot is free twice"
        assert (free == (~self.stored & (self.leased == 0))).all(), "arena: free + used != total"

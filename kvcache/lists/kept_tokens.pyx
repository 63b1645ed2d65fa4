"""KeptTokens: the entries of one list and their eviction order; drawn in lists/kept_tokens.pxd."""

from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, qsort, realloc

from kvcache.core.heap cimport IndexedHeap

import numpy as np

from kvcache.core.runs import RUN, runs_of

__all__ = ["KeptTokens", "add_to_all", "evict_from_all"]


PLACED = np.dtype([("row", np.int64), ("slot", np.int32)], align=True)


cdef int by_slot(const void *a, const void *b) noexcept nogil:
    cdef int32_t left = (<const placed *>a).slot, right = (<const placed *>b).slot
    return (left > right) - (left < right)


def evict_from_all(lists, rules):
    """`evict` from each of `KeptTokens` by its rule; how many left. One call, which no interrupt can divide."""
    cdef int64_t left = 0
    for kept, rule in zip(lists, rules, strict=True):
        left += kept.evict(*rule)
    return left


def add_to_all(lists, scores):
    """`add_scores` to each of `KeptTokens`; one call, which no interrupt can divide."""
    for kept, part in zip(lists, scores, strict=True):
        kept.add_scores(part)


cdef class KeptTokens:
    """The entries of one list, each in a slot of its own.

    Args:
        by_score: whether the lowest score is evicted first (ties: the earliest), or always the earliest.

    `append` and `evict` take the rule as three numbers: at most `limit` entries stay, the first `front` and the
    last `back` of them whatever their score; `front + back <= limit`. A new entry is part of the back as long as
    that has room. Appending a row and evicting one are O(log n).
    """

    def __init__(self, bint by_score):
        self.by_score = by_score
        self.spare = self.head = self.tail = self.last_front = self.first_back = -1
        self.middle = IndexedHeap()

    def __dealloc__(self):
        free(self.entries)

    # -- the shell ------------------------------------------------------------------------------------------

    def append(self, int64_t count, int32_t limit, int32_t front, int32_t back):
        """Add `count` rows, each followed by the evictions that it makes necessary.

        Returns:
            `(rows, slots)`: int64 and int32, which of the rows in [0, count) stayed, and their slots, which ascend;
            None as rows if all stayed in this order. Some of these slots may have been another entry's before.

        Raises:
            MemoryError: nothing has changed then.
        """
        cdef int64_t _i, i, first = self.next_position, kept = 0
        cdef int32_t slot
        cdef bint in_order = True
        self.reserve(min(self.size + count, <int64_t>limit))
        most = min(count, <int64_t>limit)
        rows, slots, pairs = np.empty(most, np.int64), np.empty(most, np.int32), np.empty(most, PLACED)
        cdef int64_t[::1] row_view = rows
        cdef int32_t[::1] slot_view = slots
        cdef placed[::1] pair = pairs
        with nogil:
            for _i in range(count):
                self.admit(limit, front, back)
            slot = self.tail
            while slot >= 0 and self.entries[slot].position >= first:
                pair[kept].row, pair[kept].slot = self.entries[slot].position - first, slot
                kept += 1
                slot = self.entries[slot].prev
            if kept > 1:
                qsort(&pair[0], kept, sizeof(placed), by_slot)
            for i in range(kept):
                row_view[i], slot_view[i] = pair[i].row, pair[i].slot
                in_order = in_order and pair[i].row == i
        self.text = None
        return None if in_order and kept == count else rows[:kept], slots[:kept]

    def append_to(self, store, keys, values, int32_t limit, int32_t front, int32_t back):
        """`append` rows, float32 `(n, num_heads, head_dim)`, and write those that stay to the `BlockStore`, layer 0.

        One call: no interrupt comes between an entry and its row.

        Raises:
            MemoryError: nothing has changed then.
        """
        # Memory first: after `append` nothing may fail, for every entry needs its row.
        runs = np.empty(min(len(keys), limit), RUN)
        by_slot = np.empty((2, *keys.shape), np.float32)
        rows, slots = self.append(len(keys), limit, front, back)
        if rows is not None:
            # By slot: neighbours share a tile, so each tile is packed once.
            into = by_slot[:, : len(rows)]
            keys, values = keys.take(rows, 0, into[0], "clip"), values.take(rows, 0, into[1], "clip")
        store.write(0, runs_of(slots, store.block_size, runs), keys, values)

    def evict(self, int32_t limit, int32_t front, int32_t back):
        """Evict entries until at most `limit` are left; how many left."""
        cdef int32_t before = self.size
        if self.size <= limit:
            return 0
        with nogil:
            self.protect(front, back)
            while self.size > limit:
                self.remove(self.middle.top())
        self.text = None
        return before - self.size

    def add_scores(self, const double[::1] scores):
        """Add to the score of every entry, in the order of the text; `len(scores)` is `size`, sums are finite."""
        cdef int64_t i = 0
        cdef int32_t slot = self.head
        with nogil:
            while slot >= 0:
                self.entries[slot].score += scores[i]
                if self.by_score and self.middle.has(slot):
                    self.rank(slot)
                i += 1
                slot = self.entries[slot].next

    def slots(self):
        """The slots of all entries in the order of the text, int32 `(size,)`, read-only."""
        cdef int32_t[::1] view
        cdef int32_t slot = self.head
        cdef int64_t i = 0
        if self.text is None:
            text = np.empty(self.size, np.int32)
            view = text
            with nogil:
                while slot >= 0:
                    view[i] = slot
                    i += 1
                    slot = self.entries[slot].next
            text.flags.writeable = False
            self.text = text
        return self.text

    def reading_order(self, int64_t in_order):
        """The slots of all entries, mostly ascending, as they lie in memory, int32 `(size,)`.

        Only the last `in_order` entries of the text, at most `size`, come last and in their order.
        """
        cdef int64_t _i, i, at = self.size, since
        cdef int32_t slot = self.tail
        order = np.empty(self.size, np.int32)
        cdef int32_t[::1] view = order
        for _i in range(in_order):
            at -= 1
            view[at] = slot
            slot = self.entries[slot].prev
        # The entries before them in the text, by slot.
        since = self.entries[slot].position + 1 if slot >= 0 else 0
        with nogil:
            at = 0
            for i in range(self.slots_used):
                if 0 <= self.entries[i].position < since:
                    view[at] = <int32_t>i
                    at += 1
        return order

    def positions(self):
        """The position in the text of every entry, ascending, int64 `(size,)`."""
        cdef const int32_t[::1] slots = self.slots()
        positions = np.empty(self.size, np.int64)
        cdef int64_t[::1] view = positions
        cdef int64_t i
        for i in range(self.size):
            view[i] = self.entries[slots[i]].position
        return positions

    def scores(self):
        """The score of every entry in the order of the text, float64 `(size,)`."""
        cdef const int32_t[::1] slots = self.slots()
        scores = np.empty(self.size, np.float64)
        cdef double[::1] view = scores
        cdef int64_t i
        for i in range(self.size):
            view[i] = self.entries[slots[i]].score
        return scores

    def __len__(self):
        return self.size

    @property
    def nbytes(self):
        """Bytes of memory that the entries take."""
        return self.room * sizeof(Entry) + self.middle.nbytes

    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        cdef int64_t seen = 0, free_slots = 0, last = -1
        cdef int32_t slot = self.head, before = -1
        cdef bint inside
        self.middle.check()
        while slot >= 0:
            if self.entries[slot].prev != before or self.entries[slot].position <= last:
                raise AssertionError(f"kept tokens: slot {slot} is out of order in the text")
            if not isfinite(self.entries[slot].score):
                raise AssertionError(f"kept tokens: the score of slot {slot} is {self.entries[slot].score}")
            inside = self.front <= seen < self.size - self.back
            if self.middle.has(slot) != inside:
                raise AssertionError(f"kept tokens: entry {seen} is {'not ' * inside}in the middle")
            if seen == self.front - 1 and slot != self.last_front:
                raise AssertionError(f"kept tokens: the front ends with slot {slot}, not {self.last_front}")
            if seen == self.size - self.back and slot != self.first_back:
                raise AssertionError(f"kept tokens: the back starts with slot {slot}, not {self.first_back}")
            last, before, seen = self.entries[slot].position, slot, seen + 1
            slot = self.entries[slot].next
        if before != self.tail or seen != self.size or last >= self.next_position:
            raise AssertionError(f"kept tokens: {seen} entries are linked, {self.size} are counted")
        slot = self.spare
        while slot >= 0:
            if self.entries[slot].position != -1:
                raise AssertionError(f"kept tokens: slot {slot} is free and holds an entry")
            free_slots += 1
            slot = self.entries[slot].next
        if free_slots + self.size != self.slots_used or self.slots_used > self.room:
            raise AssertionError(f"kept tokens: {free_slots} free and {self.size} used slots, not {self.slots_used}")
        if self.front + self.back + len(self.middle) != self.size:
            raise AssertionError(f"kept tokens: front, middle and back are not {self.size} entries")

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int reserve(self, int64_t count) except -1:
        cdef int64_t room
        cdef void *grown
        if count <= self.room:
            return 0
        room = min(max(count, 2 * <int64_t>self.room, 16), 0x7FFFFFFF)
        self.middle.reserve(room)
        grown = realloc(self.entries, room * sizeof(Entry))
        if grown is NULL:
            raise MemoryError(f"no memory for {room} entries")
        self.entries = <Entry *>grown
        self.room = <int32_t>room
        return 0

    cdef void rank(self, int32_t slot) noexcept nogil:
        cdef Entry *entry = &self.entries[slot]
        self.middle.put_tied(slot, entry.score if self.by_score else 0.0, <uint64_t>entry.position)

    cdef void shrink_back(self, int32_t back) noexcept nogil:
        cdef int32_t slot
        while self.back > back:
            slot = self.first_back
            self.first_back = self.entries[slot].next
            self.back -= 1
            self.rank(slot)

    cdef void protect(self, int32_t front, int32_t back) noexcept nogil:
        cdef int32_t slot
        while self.front > front:
            slot = self.last_front
            self.last_front = self.entries[slot].prev
            self.front -= 1
            self.rank(slot)
        self.shrink_back(back)
        while self.front < front and self.middle.size > 0:
            self.last_front = self.head if self.front == 0 else self.entries[self.last_front].next
            self.front += 1
            self.middle.drop(self.last_front)
        while self.back < back and self.middle.size > 0:
            self.first_back = self.tail if self.back == 0 else self.entries[self.first_back].prev
            self.back += 1
            self.middle.drop(self.first_back)

    cdef void admit(self, int32_t limit, int32_t front, int32_t back) noexcept nogil:
        cdef int32_t slot
        cdef int64_t position = self.next_position
        self.next_position += 1
        if self.size >= limit:
            if limit == 0:
                return
            # The row takes one place of the back. Without a back it is compared with the middle at once, with score 0.
            self.protect(front, max(back - 1, 0))
            if back == 0 and (self.middle.size == 0 or self.middle.items[0].key > 0):
                return
            self.remove(self.middle.top())
        if self.spare >= 0:
            slot = self.spare
            self.spare = self.entries[slot].next
        else:
            slot = self.slots_used
            self.slots_used += 1
        self.entries[slot].position, self.entries[slot].score = position, 0.0
        self.entries[slot].prev, self.entries[slot].next = self.tail, -1
        if self.tail >= 0:
            self.entries[self.tail].next = slot
        else:
            self.head = slot
        self.tail = slot
        self.size += 1
        self.back += 1
        if self.back == 1:
            self.first_back = slot
        self.shrink_back(back)

    cdef void remove(self, int32_t slot) noexcept nogil:
        cdef int32_t before = self.entries[slot].prev, after = self.entries[slot].next
        self.middle.drop(slot)
        if before >= 0:
            self.entries[before].next = after
        else:
            self.head = after
        if after >= 0:
            self.entries[after].prev = before
        else:
            self.tail = before
        self.entries[slot].position = -1
        self.entries[slot].next = self.spare
        self.spare = slot
        self.size -= 1

"""Records of what an index has stored and removed; drawn and explained in event_buffer.pxd."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cimport numpy as cnp

from kvcache.support.token_ids cimport uint32s

from collections import namedtuple

import numpy as np

__all__ = ["EVENT", "KINDS", "EventBuffer", "Noted"]

cnp.import_array()

KINDS = ("first", "next", "removed", "cleared", "left")    # by number
EVENT = np.dtype([("page", "u8"), ("parent", "u8"), ("space", "i8"), ("kind", "i8")])    # `event_t`
assert EVENT.itemsize == sizeof(event_t)

# events: `(n,)` of `EVENT`; tokens: uint32 `(n, page_size)` of what was stored; salts: of the namespaces in them
Noted = namedtuple("Noted", ("events", "tokens", "salts"))


cdef class EventBuffer:
    """A ring of records for pages of `page_size` tokens.

    Args:
        salt_of: from the name of a namespace to `(number, text)`: what its hashes differ by from those of others,
            below 2**64, and what readers are told of it, None for nothing.
        capacity: the most records.
    """

    def __init__(self, Py_ssize_t page_size, salt_of, Py_ssize_t capacity):
        if capacity < 1 or page_size < 1:
            raise ValueError(f"capacity: expected 1 or more, got {min(capacity, page_size)}")
        events, tokens = np.empty(capacity, EVENT), np.empty((capacity, page_size), np.uint32)
        self.page_size, self.capacity, self.salt_of, self.salts = page_size, capacity, salt_of, {}
        self.arrays = events, tokens
        self.events, self.tokens = <event_t *>cnp.PyArray_DATA(events), uint32s(tokens)

    @cython.critical_section
    def __len__(self):
        """Records that are there to be taken."""
        return self.head - self.tail

    # -- the index writes -----------------------------------------------------------------------------------

    cdef int64_t begin_space(self, object name, uint64_t *salt) except -1:
        number, text = self.salt_of(name)
        salt[0] = number
        self.salts[self.num_spaces_] = text    # no other call begins one
        with cython.critical_section(self):
            self.num_spaces_ += 1
            return self.num_spaces_ - 1

    cdef event_t *next_record(self) noexcept:
        """The record to write; NULL: the ring is full."""
        if self.is_full_ or self.head - self.tail == self.capacity:
            self.is_full_ = True
            self.dropped_ += 1
            return NULL
        self.head += 1
        return &self.events[(self.head - 1) % self.capacity]

    @cython.critical_section
    cdef void stored(self, int64_t kind, uint64_t page, uint64_t parent, int64_t space,
                     const uint32_t *tokens) noexcept:
        cdef event_t *record = NULL    # gcc cannot see that a record is read only where there is one
        if is_partial(tokens, self.page_size) or (record := self.next_record()) == NULL:
            return
        record[0] = event_t(page=page, parent=parent, space=space, kind=kind)
        memcpy(self.tokens + (record - self.events) * self.page_size, tokens, self.page_size * sizeof(uint32_t))

    @cython.critical_section
    cdef void removed(self, uint64_t page, int64_t space, const uint32_t *tokens) noexcept:
        cdef event_t *record = NULL
        if not is_partial(tokens, self.page_size) and (record := self.next_record()) != NULL:
            record[0] = event_t(page=page, parent=0, space=space, kind=REMOVED)

    @cython.critical_section
    cdef void cleared(self) noexcept:
        """Note that no page is cached, which makes up for all that was not taken or dropped before."""
        self.head = self.tail = 0
        self.is_full_ = False
        self.next_record()[0] = event_t(page=0, parent=0, space=self.num_spaces_, kind=CLEARED)

    @cython.critical_section
    cdef void left(self, int64_t space) noexcept:
        cdef event_t *record = self.next_record()
        if record != NULL:
            record[0] = event_t(page=0, parent=0, space=space, kind=LEFT)

    # -- a reader takes -------------------------------------------------------------------------------------

    @cython.critical_section
    cdef Py_ssize_t look(self, event_t *events, Py_ssize_t most) noexcept:
        cdef Py_ssize_t n = min(most, self.head - self.tail), i
        for i in range(n):
            events[i] = self.events[(self.tail + i) % self.capacity]
        return n

    @cython.critical_section
    cdef Py_ssize_t copy_out(self, event_t *events, uint32_t *tokens, Py_ssize_t most) noexcept:
        cdef Py_ssize_t n = 0 if self.is_full_ else min(most, self.head - self.tail), size = self.page_size, i, at
        for i in range(n):
            at = (self.tail + i) % self.capacity
            events[i] = self.events[at]
            memcpy(tokens + i * size, self.tokens + at * size, size * sizeof(uint32_t))
        self.tail += n
        return n

    def take(self, Py_ssize_t most):
        """The oldest records, at most `most`, as `Noted`; none where the ring is full: `PrefixIndex.snapshot` follows.

        An error, of memory or an interrupt, leaves the ring full.
        """
        cdef Py_ssize_t n = max(0, min(most, len(self)))
        events, tokens = np.empty(n, EVENT), np.empty((n, self.page_size), np.uint32)
        try:
            n = self.copy_out(<event_t *>cnp.PyArray_DATA(events), uint32s(tokens), n)    # less, if a clear came
            events, tokens = events[:n], tokens[:n]
            salts = {number: self.salts.get(number) for number in set(events["space"].tolist())}
            for space, kind in events[events["kind"] >= CLEARED][["space", "kind"]].tolist():
                for number in [space] if kind == LEFT else [each for each in list(self.salts) if each < space]:
                    self.salts.pop(number, None)
            return Noted(events, tokens, salts)
        except BaseException:
            self.lose(n)
            raise

    @cython.critical_section
    cdef void lose(self, int64_t count) noexcept:
        self.is_full_ = True
        self.dropped_ += count

    def restart(self, spaces):
        """Drop all records: a snapshot, which names these namespaces (a set of numbers), has taken their place."""
        gone = [number for number in list(self.salts) if number not in spaces]
        with cython.critical_section(self):
            self.dropped_ += self.head - self.tail
            self.head, self.tail, self.is_full_ = 0, 0, False
        for number in gone:    # of the one dict, which another thread may read
            self.salts.pop(number, None)

    # -- reports --------------------------------------------------------------------------------------------

    @property
    def is_full(self):
        """Whether records were dropped."""
        with cython.critical_section(self):
            return self.is_full_

    @property
    def dropped(self):
        """Records that were dropped, and those that a snapshot took the place of."""
        with cython.critical_section(self):
            return self.dropped_

    @property
    def num_spaces(self):
        """Namespaces so far, each with the next number."""
        with cython.critical_section(self):
            return self.num_spaces_

    @property
    def nbytes(self):
        """Bytes of the records."""
        return sum(array.nbytes for array in self.arrays)

    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        cdef bint is_full
        cdef int64_t dropped
        salts = set(self.salts)    # before the records: a reader may take the last ones of a namespace meanwhile
        records = np.empty(self.capacity, EVENT)
        with cython.critical_section(self):
            is_full, dropped = self.is_full_, self.dropped_
        assert dropped or not is_full, "events: full, and nothing was dropped"
        assert 0 <= len(self) <= self.capacity, "events: more records than there is room for"
        records = records[: self.look(<event_t *>cnp.PyArray_DATA(records), self.capacity)]
        assert ((records["kind"] >= FIRST) & (records["kind"] <= LEFT)).all(), "events: a record of no kind"
        named = set(records["space"][records["kind"] != CLEARED].tolist())
        assert named <= salts, "events: a namespace without a salt"
        assert max(salts, default=-1) < self.num_spaces, "events: a namespace that has not begun"

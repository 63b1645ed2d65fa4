"""The tokens that a list keeps, their slots, and the order in which they are evicted.

    text      0  1 | 4  7  9 12 | 13 14 15          positions of the entries, linked both ways
              front    middle     back
    slots     0  1   4  2  7  3    6  5  0

The front (attention sinks) and the back (the recent window) are protected. Every entry of the middle is in the
heap, ranked by its score or, where scores do not count, by its place in the text. A new entry takes the slot of an
evicted one, so no row is moved and appending a row costs O(log n).
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.core.heap cimport IndexedHeap


cdef struct Entry:
    int64_t position   # in the text; -1 while the slot is free
    double score
    int32_t prev       # the entry before it in the text, -1 for the first
    int32_t next       # the entry after it, -1 for the last; of a free slot the next free one


cdef struct placed:       # a row of one append, and its slot
    int64_t row
    int32_t slot


cdef class KeptTokens:
    cdef Entry *entries           # (room,) by slot
    cdef int32_t room
    cdef readonly int32_t size            # entries
    cdef readonly int32_t slots_used      # slots that were ever taken: [0, slots_used)
    cdef readonly int64_t next_position   # of the next row, kept or not
    cdef readonly bint by_score           # False: the middle is evicted in the order of the text
    cdef int32_t spare            # the first free slot below slots_used, -1 for none
    cdef int32_t head, tail       # first and last entry of the text, -1 for none
    cdef int32_t front, back      # how many are protected at either end
    cdef int32_t last_front       # slot of the front's last entry, -1 while the front is empty
    cdef int32_t first_back       # slot of the back's first entry, -1 while the back is empty
    cdef IndexedHeap middle
    cdef object text              # cache of slots(), None when out of date

    cdef int reserve(self, int64_t count) except -1
    # Give both ends the wanted lengths, as far as the middle has entries for it.
    cdef void protect(self, int32_t front, int32_t back) noexcept nogil
    cdef void shrink_back(self, int32_t back) noexcept nogil
    # The next row: kept, perhaps in place of another, or not.
    cdef void admit(self, int32_t limit, int32_t front, int32_t back) noexcept nogil
    cdef void remove(self, int32_t slot) noexcept nogil        # an entry of the middle
    cdef void rank(self, int32_t slot) noexcept nogil          # put it into the middle, or to its new place there

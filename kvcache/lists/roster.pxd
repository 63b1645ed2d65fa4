"""The entries of one list: their slots in memory, and the order in which they are evicted.

    text      0  1 | 4  7  9 12 | 13 14 15          positions of the entries, linked both ways
              front    middle     back
    slots     0  1   4  2  7  3    6  5  0

The front (attention sinks) and the back (the recent window) are protected. Every entry of the middle is in the
heap, ordered by its score or, without scores, by its text position. A new entry takes the slot of an evicted one, so no
data is ever moved and a row costs O(log n).
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


cdef class Roster:
    cdef Entry *entries           # (room,) by slot
    cdef int32_t room
    cdef readonly int32_t size            # number of entries
    cdef readonly int32_t slots_used      # slots that were ever used: [0, slots_used)
    cdef readonly int64_t next_position   # text position of the next row, kept or not
    cdef readonly bint by_score           # False: the middle is evicted in text order
    cdef int32_t first_free       # the first free slot below slots_used, -1 for none
    cdef int32_t head, tail       # first and last entry of the text, -1 for none
    cdef int32_t front, back      # number of protected entries at either end
    cdef int32_t last_front       # slot of the front's last entry, -1 while the front is empty
    cdef int32_t first_back       # slot of the back's first entry, -1 while the back is empty
    cdef IndexedHeap middle
    cdef object text              # cache of slots(), None if out of date

    cdef int reserve(self, int64_t count) except -1
    # Give both ends the wanted lengths, as far as the middle has entries for them.
    cdef void resize_ends(self, int32_t front, int32_t back) noexcept nogil
    cdef void shrink_back(self, int32_t back) noexcept nogil
    # Append the next row, with the eviction that it makes necessary; it may itself be dropped at once.
    cdef void append_one(self, int32_t limit, int32_t front, int32_t back) noexcept nogil
    cdef void evict_slot(self, int32_t slot) noexcept nogil       # a slot of the middle
    cdef void put_in_middle(self, int32_t slot) noexcept nogil    # insert into the heap, or move to the new order

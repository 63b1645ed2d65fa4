"""The hash table of children; explained in trie/children.pxd."""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc


cdef inline uint64_t mix(int32_t node, uint32_t token) noexcept nogil:
    """A hash whose low bits depend on all bits of the key. One product: the hash is on the critical path of a walk.

    The product (by 2**64 over the golden ratio, Knuth, TAOCP 3, section 6.4) has every bit of the key in its high half.
    """
    cdef uint64_t h = ((<uint64_t><uint32_t>node << 32) ^ token) * <uint64_t>0x9E3779B97F4A7C15
    return h ^ (h >> 32)


cdef inline Py_ssize_t probe(child_slot* slots, uint64_t mask, int32_t node, uint32_t token) noexcept nogil:
    """The slot that holds the key, or the free slot where it belongs."""
    cdef uint64_t i = mix(node, token) & mask
    while slots[i].child >= 0 and (slots[i].token != token or slots[i].node != node):
        i = (i + 1) & mask
    return <Py_ssize_t>i


cdef class ChildTable:
    """(node, first token) -> child, for one `NodeTable`."""

    def __dealloc__(self):
        free(self.slots)

    cdef int reserve(self, Py_ssize_t extra) except -1 nogil:
        cdef Py_ssize_t i, j, num_slots = max(self.num_slots, 16)
        cdef child_slot* slots
        while 3 * (self.count + extra) > 2 * num_slots:
            num_slots *= 2
        if num_slots == self.num_slots:
            return 0
        slots = <child_slot*>malloc(num_slots * sizeof(child_slot))
        if slots is NULL:
            raise MemoryError(f"no memory for a table of {num_slots} children")
        for i in range(num_slots):
            slots[i].child = -1
        for i in range(self.num_slots):
            if self.slots[i].child >= 0:
                j = probe(slots, num_slots - 1, self.slots[i].node, self.slots[i].token)
                slots[j] = self.slots[i]
        free(self.slots)
        self.slots = slots
        self.num_slots = num_slots
        return 0

    cdef int32_t find(self, int32_t node, uint32_t token) noexcept nogil:
        if self.count == 0:
            return -1
        return self.slots[probe(self.slots, self.num_slots - 1, node, token)].child

    cdef void put(self, int32_t node, uint32_t token, int32_t child) noexcept nogil:
        cdef Py_ssize_t i = probe(self.slots, self.num_slots - 1, node, token)
        self.count += self.slots[i].child < 0
        self.slots[i] = child_slot(node, token, child)

    cdef void drop(self, int32_t node, uint32_t token) noexcept nogil:
        cdef uint64_t mask = self.num_slots - 1
        cdef uint64_t hole = probe(self.slots, mask, node, token)
        cdef uint64_t i = hole
        self.count -= 1
        while True:
            i = (i + 1) & mask
            if self.slots[i].child < 0:
                break
            # A follower moves into the hole unless its home lies after the hole: then it would be missed.
            if ((i - mix(self.slots[i].node, self.slots[i].token)) & mask) >= ((i - hole) & mask):
                self.slots[hole] = self.slots[i]
                hole = i
        self.slots[hole].child = -1

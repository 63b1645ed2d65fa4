"""Open addressing with linear probing; a drop shifts the rest of its cluster back, so there are no tombstones.

Linear probing on at most half-full tables inspects 1.5 slots per hit on average (Knuth, TAOCP 3, section 6.4);
the shift keeps that true after any history of puts and drops.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc

__all__ = ["IdMap"]


cdef class IdMap:
    """uint64 id -> int32 row >= 0."""

    def __cinit__(self):
        self.reserve(4)

    def __dealloc__(self):
        free(self.keys)
        free(self.values)

    cdef int64_t slot_of(self, uint64_t key) noexcept nogil:
        cdef int64_t mask = self.capacity - 1
        cdef int64_t slot = <int64_t>(mix(key) & <uint64_t>mask)
        while self.values[slot] >= 0 and self.keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    cdef int32_t get(self, uint64_t key) noexcept nogil:
        return self.values[self.slot_of(key)]

    cdef int reserve(self, int64_t count) except -1:
        if 2 * count <= self.capacity:
            return 0
        cdef int64_t capacity = max(self.capacity, 8)
        while capacity < 2 * count:
            capacity *= 2
        cdef uint64_t *keys = <uint64_t *>malloc(capacity * sizeof(uint64_t))
        cdef int32_t *values = <int32_t *>malloc(capacity * sizeof(int32_t))
        if keys == NULL or values == NULL:
            free(keys)
            free(values)
            raise MemoryError(f"no memory for a map of {count} ids")
        cdef uint64_t *old_keys = self.keys
        cdef int32_t *old_values = self.values
        cdef int64_t i, old_capacity = self.capacity
        for i in range(capacity):
            values[i] = -1
        self.keys, self.values, self.capacity, self.used = keys, values, capacity, 0
        for i in range(old_capacity):
            if old_values[i] >= 0:
                self.put(old_keys[i], old_values[i])
        free(old_keys)
        free(old_values)
        return 0

    cdef void put(self, uint64_t key, int32_t value) noexcept nogil:
        cdef int64_t slot = self.slot_of(key)
        if self.values[slot] < 0:
            self.used += 1
            self.keys[slot] = key
        self.values[slot] = value

    cdef void drop(self, uint64_t key) noexcept nogil:
        cdef int64_t mask = self.capacity - 1
        cdef int64_t hole = self.slot_of(key), slot, home
        if self.values[hole] < 0:
            return
        slot = hole
        while True:
            slot = (slot + 1) & mask
            if self.values[slot] < 0:
                break
            # An entry may move into the hole unless its home lies between the hole and itself, cyclically.
            home = <int64_t>(mix(self.keys[slot]) & <uint64_t>mask)
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                self.keys[hole] = self.keys[slot]
                self.values[hole] = self.values[slot]
                hole = slot
        self.values[hole] = -1
        self.used -= 1

    def __len__(self):
        return self.used

    def __contains__(self, uint64_t key):
        return self.get(key) >= 0

    # The key stays an object in these signatures: a typed one would pass through ssize_t, as list indices do.
    def __getitem__(self, key):
        cdef int32_t value = self.get(key)
        if value < 0:
            raise KeyError(key)
        return value

    def __setitem__(self, key, int32_t value):
        if value < 0:
            raise ValueError(f"value: expected a row >= 0, got {value}")
        self.reserve(self.used + 1)
        self.put(key, value)

    def __delitem__(self, key):
        if self.get(key) < 0:
            raise KeyError(key)
        self.drop(key)

    def keys_list(self):
        """Every id, ascending, as a list of int."""
        cdef int64_t i
        return sorted(self.keys[i] for i in range(self.capacity) if self.values[i] >= 0)

    @property
    def nbytes(self):
        """Bytes of the two arrays."""
        return 12 * self.capacity

    def check(self):
        """Verify that every id is found where it lies and that `used` counts them.

        Raises:
            AssertionError: naming the broken one.
        """
        cdef int64_t i, seen = 0
        for i in range(self.capacity):
            if self.values[i] >= 0:
                seen += 1
                assert self.slot_of(self.keys[i]) == i, f"id {self.keys[i]} cannot be found"
        assert seen == self.used, "used != ids present"
        assert 2 * self.used <= self.capacity, "the table is more than half full"

"""The indexed heap behind every eviction order; drawn and explained in core/heap.pxd."""

from libc.math cimport isnan
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport free, realloc

cdef enum:
    MAX_ID = 0x7FFFFFFE
    ARITY = 4    # children of an item: half the levels of a binary heap; each level may be a cache miss


cdef inline bint before(heap_item a, heap_item b) noexcept nogil:
    return a.key < b.key or (a.key == b.key and a.tie < b.tie)


cdef class IndexedHeap:
    """A priority queue of ids with keys that may change.

    Ids are dense small integers (memory grows with the highest one, 28 bytes each); keys are floats or
    integers of less than 2**53 in magnitude. The smallest key comes first, ties go to the lowest id.
    `push`, `update`, `remove` and `pop` are O(log n), the rest O(1).
    """

    def __dealloc__(self):
        free(self.items)
        free(self.place)

    # ------------------------------------------------------------------ below the shell

    cdef int reserve(self, Py_ssize_t num_ids) except -1 nogil:
        cdef Py_ssize_t room, i
        cdef void* grown
        if num_ids <= self.num_ids:
            return 0
        room = max(num_ids, self.num_ids + self.num_ids // 4, 8)
        grown = realloc(self.items, room * sizeof(heap_item))
        if grown is NULL:
            raise MemoryError(f"no memory for a heap of {room} ids")
        self.items = <heap_item*>grown
        grown = realloc(self.place, room * sizeof(int32_t))
        if grown is NULL:
            raise MemoryError(f"no memory for a heap of {room} ids")
        self.place = <int32_t*>grown
        for i in range(self.num_ids, room):
            self.place[i] = -1
        self.num_ids = room
        return 0

    cdef void put(self, int32_t id, double key) noexcept nogil:
        self.put_tied(id, key, <uint64_t>id)

    cdef void put_tied(self, int32_t id, double key, uint64_t tie) noexcept nogil:
        cdef heap_item item
        cdef Py_ssize_t i = self.place[id]
        item.key = key
        item.tie = tie
        item.id = id
        if i < 0:
            self.size += 1
            self._rise(self.size - 1, item)
        elif before(item, self.items[i]):
            self._rise(i, item)
        else:
            self._sink(i, item)

    cdef void drop(self, int32_t id) noexcept nogil:
        cdef Py_ssize_t i
        cdef heap_item last
        if not self.has(id):
            return
        i = self.place[id]
        self.place[id] = -1
        self.size -= 1
        if i == self.size:
            return
        # The last item fills the hole; it may belong above it or below it.
        last = self.items[self.size]
        if i > 0 and before(last, self.items[(i - 1) // ARITY]):
            self._rise(i, last)
        else:
            self._sink(i, last)

    cdef int32_t top(self) noexcept nogil:
        return self.items[0].id if self.size > 0 else -1

    cdef bint has(self, int32_t id) noexcept nogil:
        return 0 <= id < self.num_ids and self.place[id] >= 0

    cdef void empty(self) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self.size):
            self.place[self.items[i].id] = -1
        self.size = 0

    cdef void _rise(self, Py_ssize_t i, heap_item item) noexcept nogil:
        cdef Py_ssize_t parent
        while i > 0:
            parent = (i - 1) // ARITY
            if not before(item, self.items[parent]):
                break
            self.items[i] = self.items[parent]
            self.place[self.items[i].id] = <int32_t>i
            i = parent
        self.items[i] = item
        self.place[item.id] = <int32_t>i

    cdef void _sink(self, Py_ssize_t i, heap_item item) noexcept nogil:
        cdef Py_ssize_t child, other
        while True:
            child = ARITY * i + 1
            if child >= self.size:
                break
            for other in range(child + 1, min(child + ARITY, self.size)):
                if before(self.items[other], self.items[child]):
                    child = other
            if not before(self.items[child], item):
                break
            self.items[i] = self.items[child]
            self.place[self.items[i].id] = <int32_t>i
            i = child
        self.items[i] = item
        self.place[item.id] = <int32_t>i

    # ------------------------------------------------------------------ the shell

    cdef int32_t _id(self, object id) except -1:
        cdef Py_ssize_t number = id
        if not 0 <= number <= MAX_ID:
            raise ValueError(f"id: expected an int in [0, {MAX_ID}], got {id}")
        return <int32_t>number

    cdef int32_t _member(self, object id) except -1:
        cdef int32_t number = self._id(id)
        if not self.has(number):
            raise KeyError(f"id: expected one in the heap, got {id}")
        return number

    def push(self, id, double key):
        """Add `id` with `key`. ValueError if the id is in the heap already, or the key is not a number."""
        cdef int32_t number = self._id(id)
        if isnan(key):
            raise ValueError("key: expected a number, got nan")
        if self.has(number):
            raise ValueError(f"id: expected one that is not in the heap, got {id}")
        self.reserve(number + 1)
        self.put(number, key)

    def update(self, id, double key):
        """Give `id` a new key, up or down. KeyError if it is not in the heap."""
        cdef int32_t number = self._member(id)
        if isnan(key):
            raise ValueError("key: expected a number, got nan")
        self.put(number, key)

    def remove(self, id):
        """Take `id` out. KeyError if it is not in the heap."""
        self.drop(self._member(id))

    def peek(self):
        """`(id, key)` of the first item. IndexError when the heap is empty."""
        if self.size == 0:
            raise IndexError("heap: expected one with items, got an empty one")
        return self.items[0].id, self.items[0].key

    def pop(self):
        """Remove the item with the smallest key and return `(id, key)`. IndexError when the heap is empty."""
        cdef tuple leaving = self.peek()
        self.drop(self.items[0].id)
        return leaving

    def key(self, id):
        """The key of `id`. KeyError if it is not in the heap."""
        return self.items[self.place[self._member(id)]].key

    def clear(self):
        """Take out everything; the memory stays for the next items."""
        self.empty()

    def __contains__(self, id):
        return isinstance(id, int) and 0 <= id <= MAX_ID and self.has(id)

    def __len__(self):
        return self.size

    @property
    def nbytes(self):
        """Bytes of memory that the heap holds."""
        return self.num_ids * (sizeof(heap_item) + sizeof(int32_t))

    def check(self):
        """Verify every invariant; AssertionError names the broken one."""
        cdef Py_ssize_t i, present = 0
        for i in range(self.num_ids):
            present += self.place[i] >= 0
        if present != self.size:
            raise AssertionError(f"heap: {present} ids have a place, {self.size} items are in")
        for i in range(self.size):
            if self.place[self.items[i].id] != i:
                raise AssertionError(f"heap: id {self.items[i].id} stands at {i}, its place says otherwise")
            if i > 0 and before(self.items[i], self.items[(i - 1) // ARITY]):
                raise AssertionError(f"heap: item {i} comes before its parent")

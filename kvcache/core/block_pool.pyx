"""Block ids, reference counts and the free list: all O(1); the block that was freed first is reused first."""

cimport cython
from libc.stdint cimport int32_t, int64_t

import numpy as np

from kvcache.errors import BlockNotFoundError, OutOfMemoryError
from kvcache.support.arguments import as_count

__all__ = ["BlockPool"]

cdef int64_t MAX_BLOCKS = (<int64_t>1 << 31) - 1


@cython.auto_pickle(False)
cdef class BlockPool:
    """Reference-counted block ids.

    `acquire` hands out free ids with one reference each, `retain` adds a reference, `release` drops one and
    frees the block with the last. Not thread safe: the owner serialises.
    """

    def __init__(self, num_blocks):
        cdef int32_t count = as_count(num_blocks, "num_blocks", 0, MAX_BLOCKS)
        self.refs = np.zeros(count, np.int32)
        self.ring = np.arange(count, dtype=np.int32)
        self.marks = np.zeros(count, np.uint8)
        self.num_blocks, self.num_free, self.head = count, count, 0

    cdef int32_t take(self) noexcept nogil:
        cdef int32_t block = self.ring[self.head]
        self.head += 1
        if self.head == self.num_blocks:
            self.head = 0
        self.num_free -= 1
        self.refs[block] = 1
        self.total_allocations += 1
        if self.num_blocks - self.num_free > self.peak_used:
            self.peak_used = self.num_blocks - self.num_free
        return block

    cdef void retain_(self, int32_t block) noexcept nogil:
        self.refs[block] += 1

    cdef bint release_(self, int32_t block) noexcept nogil:
        cdef int64_t tail
        self.refs[block] -= 1
        if self.refs[block] > 0:
            return False
        tail = <int64_t>self.head + self.num_free
        if tail >= self.num_blocks:
            tail -= self.num_blocks
        self.ring[tail] = block
        self.num_free += 1
        self.total_frees += 1
        return True

    cdef void take_each(self, int32_t *blocks, int64_t n, int64_t stride) noexcept nogil:
        cdef int32_t *refs = &self.refs[0]
        cdef int32_t *ring = &self.ring[0]
        cdef int32_t block, head = self.head, size = self.num_blocks
        cdef int64_t i
        for i in range(n):
            block = ring[head]
            head = head + 1 if head + 1 < size else 0
            refs[block] = 1
            blocks[i * stride] = block
        self.head = head
        self.num_free -= <int32_t>n
        self.total_allocations += n
        self.peak_used = max(self.peak_used, size - self.num_free)

    cdef void retain_each(self, const int32_t *blocks, int64_t n, int64_t stride) noexcept nogil:
        cdef int32_t *refs = &self.refs[0]
        cdef int32_t block, previous = -1
        cdef int64_t i
        for i in range(n):
            block = blocks[i * stride]
            refs[block] += block != previous
            previous = block

    cdef bint release_each(self, const int32_t *blocks, int64_t n, int64_t stride) noexcept nogil:
        cdef int32_t *refs = &self.refs[0]
        cdef int32_t *ring = &self.ring[0]
        cdef int32_t block, left, previous = -1, size = self.num_blocks
        cdef int64_t i, freed = 0, tail = <int64_t>self.head + self.num_free
        cdef bint one_left = False
        for i in range(n):
            block = blocks[i * stride]
            if block == previous:
                continue
            previous = block
            left = refs[block] - 1
            refs[block] = left
            one_left |= left == 1
            if left == 0:
                tail = tail if tail < size else tail - size
                ring[tail] = block
                tail += 1
                freed += 1
        self.num_free += <int32_t>freed
        self.total_frees += freed
        return one_left

    @property
    def num_used(self):
        """Blocks with at least one reference; a shared block counts once."""
        return self.num_blocks - self.num_free

    @property
    def nbytes(self):
        """Bytes of this bookkeeping."""
        return 9 * self.num_blocks

    def acquire(self, n=1):
        """`n` free blocks, one reference each, as int32 `(n,)`.

        Raises:
            ValueError: `n` is negative.
            OutOfMemoryError: fewer than `n` blocks are free; nothing was taken.
        """
        if n < 0:
            raise ValueError(f"n: expected a count >= 0, got {n}")
        if n > self.num_free:
            raise OutOfMemoryError(n, self.num_free)
        ids = np.empty(n, np.int32)
        cdef int32_t[::1] view = ids
        cdef int32_t i
        for i in range(<int32_t>n):
            view[i] = self.take()
        return ids

    def grow(self, num_blocks):
        """Make room for `num_blocks` blocks; the new ones are handed out after those that are free now.

        Raises:
            ValueError: more than 2**31 - 1; MemoryError: nothing has changed.
        """
        cdef int32_t old = self.num_blocks, more
        if num_blocks <= old:
            return
        if num_blocks > MAX_BLOCKS:
            raise ValueError(f"num_blocks: expected at most {MAX_BLOCKS}, got {num_blocks}")
        refs, ring, marks = (np.zeros(num_blocks, dtype) for dtype in (np.int32, np.int32, np.uint8))
        refs[:old] = self.refs
        ring[: self.num_free] = np.asarray(self.ring)[(self.head + np.arange(self.num_free)) % max(old, 1)]
        ring[self.num_free : self.num_free + num_blocks - old] = np.arange(old, num_blocks, dtype=np.int32)
        cdef int32_t[::1] new_refs = refs, new_ring = ring
        cdef unsigned char[::1] new_marks = marks
        self.refs, self.ring, self.marks, self.head = new_refs, new_ring, new_marks, 0
        more = <int32_t>num_blocks - old
        self.num_free += more
        self.num_blocks = old + more

    def retain(self, blocks):
        """One more reference on each of `blocks` (int32 `(n,)`).

        Raises:
            BlockNotFoundError: one of them is free or out of range; no count has changed.
        """
        cdef const int32_t[::1] view = self.in_use(blocks)
        cdef Py_ssize_t i
        for i in range(view.shape[0]):
            self.retain_(view[i])

    def release(self, blocks):
        """One reference less on each of `blocks` (int32 `(n,)`); the number of blocks that this freed.

        Raises:
            BlockNotFoundError: one of them is out of range, or named more often than it is held; no count
                has changed.
        """
        cdef const int32_t[::1] view = self.in_use(blocks)
        cdef Py_ssize_t i, undo, freed = 0
        for i in range(view.shape[0]):
            # A block listed twice passes the check above even if it has only one reference.
            if self.refs[view[i]] == 0:
                for undo in range(i):
                    self.refs[view[undo]] += 1
                raise BlockNotFoundError(view[i])
            self.refs[view[i]] -= 1
        for i in range(view.shape[0]):
            self.refs[view[i]] += 1
        for i in range(view.shape[0]):
            freed += self.release_(view[i])
        return freed

    def in_use(self, blocks):
        """`blocks` as int32 `(n,)`; BlockNotFoundError names the first that is free or out of range."""
        ids = np.ascontiguousarray(blocks, np.int32)
        cdef const int32_t[::1] view = ids
        cdef Py_ssize_t i
        for i in range(view.shape[0]):
            if not 0 <= view[i] < self.num_blocks or self.refs[view[i]] == 0:
                raise BlockNotFoundError(int(view[i]))
        return ids

    def expect_each_once(self, blocks):
        """ValueError names a block that is listed twice in `blocks` (int32 `(n,)`, all of them in use)."""
        cdef const int32_t[::1] view = blocks
        cdef Py_ssize_t i, seen = view.shape[0]
        for i in range(view.shape[0]):
            if self.marks[view[i]]:
                seen = i
                break
            self.marks[view[i]] = 1
        for i in range(seen):
            self.marks[view[i]] = 0
        if seen < view.shape[0]:
            raise ValueError(f"block_ids: expected each block once, got {blocks[seen]} twice")

    def ref_count(self, block):
        """References held on `block`; 0 when it is free.

        Raises:
            BlockNotFoundError: no such id.
        """
        if not 0 <= block < self.num_blocks:
            raise BlockNotFoundError(block)
        return self.refs[block]

    def ref_counts(self):
        """References held on every block, int32 `(num_blocks,)`, a copy."""
        return np.array(self.refs)

    def check(self):
        """Verify every invariant.

        Raises:
            AssertionError: naming the broken one.
        """
        cdef int64_t i, block, used = 0
        cdef char[::1] is_free = np.zeros(self.num_blocks, np.int8)
        for i in range(self.num_free):
            block = self.ring[(self.head + i) % self.num_blocks]
            assert 0 <= block < self.num_blocks, "the free list names a block that there is not"
            assert self.refs[block] == 0, "a block on the free list has references"
            assert not is_free[block], "the free list names a block twice"
            is_free[block] = True
        for block in range(self.num_blocks):
            assert self.refs[block] >= 0, "a reference count is negative"
            used += self.refs[block] > 0
        assert used + self.num_free == self.num_blocks, "free + used != total"
        assert self.total_allocations - self.total_frees == self.num_used, "allocations - frees != used"
        assert self.num_used <= self.peak_used <= self.num_blocks, "peak is below what is used, or above all"

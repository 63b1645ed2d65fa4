"""A file for the blocks of a store that memory has no room for; see core/spill.pxd."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.core.layouts cimport Layouts
from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport kvc_run
from kvcache.kernels.spill_units cimport (
    KVC_CHECKSUM_FAULT, KVC_FORK_FAULT, KVC_FULL_FAULT, KVC_NO_FAULT, KVC_READ_FAULT, KVC_SHORT_FAULT, kvc_fault,
    kvc_spill_stats, kvc_units,
)
from kvcache.support.mapped cimport MappedMemory

import os

import numpy as np

from kvcache.errors import SpillError
from kvcache.support.spill_file import open_spill_file

__all__ = ["Spill"]

cdef int SLOT = 4096         # bytes: direct requests are of whole ones
cdef int THREADS = 16        # that read and write: as many requests are in flight
cdef dict REASONS = {        # of faults; {}: what the system says
    KVC_READ_FAULT: "a file that can be read, got {}",
    KVC_SHORT_FAULT: "all bytes that were written, got a shorter file",
    KVC_CHECKSUM_FAULT: "the bytes that were written, got others",
    KVC_FULL_FAULT: "room for it in memory or in the file, got {}",
    KVC_FORK_FAULT: "the process that made the cache, got a child of it",
}


@cython.no_gc_clear    # the threads end before the memory and the file
cdef class Spill:
    """A file beside the memory of `num_blocks` blocks, of which at most `limit` bytes are in memory.

    Args:
        folder: see `open_spill_file`.
        limit: bytes, in whole pages of the system. While calls need more, they have more: each thread of a call what it
            attends to, of one layer 1,024 tokens, or the chosen ones.
        memory: of the blocks, zero and untouched.
        layouts, num_blocks: of the blocks.

    Raises:
        PermissionError, OSError: of the folder.
        ValueError: more blocks of layers than the records count.
        MemoryError: no memory for the records.
    """

    def __cinit__(self, folder, size_t limit, MappedMemory memory not None, Layouts layouts not None,
                  int32_t num_blocks):
        cdef int32_t layer
        cdef size_t[::1] sizes
        if <int64_t>layouts.num_layers * num_blocks >= 2**31:
            raise ValueError(f"num_blocks: expected at most {2**31 // max(1, layouts.num_layers) - 1} with spill, "
                             f"got {num_blocks}")
        self.folder, self.limit, self.memory = os.path.abspath(os.fspath(folder)), limit, memory
        self.file = open_spill_file(self.folder)
        sizes = np.empty(layouts.num_layers + 1, np.uintp)
        for layer in range(layouts.num_layers):
            sizes[layer] = layouts.of[layer].block_bytes
        self.c = kernels.spill_open(self.file.fd, memory.bytes, layouts.num_layers, &sizes[0], num_blocks,
                                    layouts.first.block_size, limit, SLOT, THREADS)
        if self.c == NULL:
            raise MemoryError(f"no memory for the records of {num_blocks} blocks")

    def __dealloc__(self):
        if self.c != NULL:
            with nogil:
                kernels.spill_close(self.c)

    def refer(self, BlockPool pool not None):
        """Units of blocks without references in this pool, which does not grow, are dropped and not written."""
        self.pool = pool
        kernels.spill_refer(self.c, &pool.refs[0] if pool.num_blocks else NULL)

    @property
    def fd(self):
        """The descriptor of the file, which has no name."""
        return self.file.fd

    @property
    def nbytes(self):
        """Bytes of the records, and of buffers."""
        return kernels.spill_bytes(self.c)

    def stats(self):
        """Counters since the beginning: units are blocks of one layer, `resident` are bytes in memory now."""
        cdef kvc_spill_stats stats
        kernels.spill_count(self.c, &stats)
        return stats

    def state(self, int64_t layer, int64_t block):
        """`(in memory, saved)` of a block of a layer of the bytes, in range."""
        cdef int state = kernels.spill_state(self.c, <int32_t>layer, <int32_t>block)
        return bool(state & 1), bool(state & 2)

    def check(self):
        """Verify the records, between calls; AssertionError says what is wrong."""
        cdef const char *wrong
        with nogil:
            wrong = kernels.spill_check(self.c)
        assert wrong == NULL, f"spill: {(<bytes>wrong).decode()}"

    # -- below the shell ------------------------------------------------------------------------------------

    cdef int64_t hold_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil:
        cdef kvc_units units
        units.runs, units.list, units.count, units.divisor, units.layer = runs, NULL, num_runs, 1, <int32_t>layer
        return kernels.hold(self.c, &units, use)

    cdef void release_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil:
        cdef kvc_units units
        units.runs, units.list, units.count, units.divisor, units.layer = runs, NULL, num_runs, 1, <int32_t>layer
        kernels.release(self.c, &units, use)

    cdef void spoil_(self, int64_t layer, const kvc_run *runs, int64_t num_runs) noexcept nogil:
        cdef kvc_units units
        units.runs, units.list, units.count, units.divisor, units.layer = runs, NULL, num_runs, 1, <int32_t>layer
        kernels.spoil(self.c, &units)

    cdef bint blank_(self, int64_t layer, int32_t block) noexcept nogil:
        return kernels.blank(self.c, <int32_t>layer, block) != 0

    cdef int raise_fault_(self) except -1:
        cdef kvc_fault fault
        kernels.take_fault(self.c, &fault)
        if fault.kind == KVC_NO_FAULT:
            return 0
        reason = REASONS[fault.kind].format(os.strerror(fault.code))
        raise SpillError(self.folder, fault.layer, fault.block, reason, fault.kind == KVC_FULL_FAULT)

    cdef void forget_faults_(self) noexcept nogil:
        cdef kvc_fault fault
        kernels.take_fault(self.c, &fault)

    cdef int expect_room_(self) except -1:
        cdef int error
        with nogil:
            self.trim_()
            error = kernels.spill_expect_room(self.c)
        if error:
            raise SpillError(self.folder, -1, -1, f"a file that takes more, got {os.strerror(error)}", True)
        return 0

    cdef void trim_(self) noexcept nogil:
        if self.pool is not None:
            kernels.spill_trim(self.c, self.pool.num_blocks - self.pool.num_free)

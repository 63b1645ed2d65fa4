"""Where the blocks of a store lie that memory has no room for: a file (ckernels/kvc_spill.h).

Blocks keep their addresses, and whoever reads or changes one holds it meanwhile, in the kernels (kvc_job.h), in the
store and beside it. What could not be read is told behind: bytes are undefined until `raise_fault_`.
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.core.block_pool cimport BlockPool
from kvcache.kernels.kernels cimport kvc_run, kvc_spill
from kvcache.support.mapped cimport MappedMemory


cdef class Spill:
    cdef kvc_spill *c
    cdef MappedMemory memory       # of the blocks: threads read into it
    cdef BlockPool pool            # whose references say which blocks are free; or None
    cdef object file
    cdef readonly str folder
    cdef readonly size_t limit     # bytes of blocks in memory

    cdef int64_t hold_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil
    cdef void release_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil
    cdef void spoil_(self, int64_t layer, const kvc_run *runs, int64_t num_runs) noexcept nogil
    cdef bint blank_(self, int64_t layer, int32_t block) noexcept nogil    # False: it is in memory, and has not changed
    cdef int raise_fault_(self) except -1    # or SpillError
    cdef void forget_faults_(self) noexcept nogil
    cdef int expect_room_(self) except -1    # or SpillError: the file takes nothing more
    cdef void trim_(self) noexcept nogil     # where most slots of the file are of nobody, gives these back

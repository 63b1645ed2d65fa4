"""The bytes: blocks of one layout, in one piece of memory per layer, written and read as runs of slots."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint16_t

from kvcache.core.knownkeys cimport KnownKeys
from kvcache.core.kvrows cimport KvRows
from kvcache.core.layouts cimport Layouts
from kvcache.core.page_summaries cimport PageSummaries
from kvcache.core.spill cimport Spill
from kvcache.kernels.kernels cimport kvc_head_keys, kvc_layout, kvc_run, kvc_spill
from kvcache.support.mapped cimport MappedMemory
from kvcache.support.shared_numbers cimport shared_int32


cdef class BlockStore:
    cdef kvc_layout layout             # the sizes, which all layers share, and the formats of the first layer
    cdef Layouts layouts
    cdef readonly int32_t num_layers   # of the bytes
    cdef readonly int32_t num_named    # layers that calls may name
    cdef readonly bint separate        # one layer of bytes for all of these
    cdef readonly shared_int32 num_blocks
    cdef MappedMemory memory           # of the next two; views of the bytes keep it
    cdef unsigned char *arena          # an arena of num_blocks blocks for each layer, zero until first written
    # (num_blocks,) slots from here on are zero and unused. Every write raises it, also in a block that no sequence
    # holds: a slot below it is cleared when it becomes the slot of a new token.
    cdef uint16_t *written_slots
    cdef KnownKeys known               # of the keys, by a calibration
    cdef readonly Spill spill          # where the blocks lie that are not in memory; None: all are
    cdef kvc_spill *spilled            # of it, or NULL
    cdef bint spills
    cdef PageSummaries page_summaries    # of the keys, for sparse attention; None until some are reserved

    # Of a layer that a call names, in range: where its blocks lie, and what is known of the keys of each head; NULL
    # without a calibration.
    cdef int64_t named_layer(self, int64_t layer) except -1                # the same; or IndexError
    cdef int64_t attended_layer(self, int64_t layer) except -1             # the same; IndexError for an index layer too
    cdef unsigned char *base_(self, int64_t layer) noexcept nogil
    cdef const kvc_head_keys *known_(self, int64_t layer) noexcept nogil

    # Blocks that may spill are held while their bytes are read or changed: returns how many are not there. Nothing in a
    # store that does not spill.
    cdef int64_t hold_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil
    cdef void release_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, int use) noexcept nogil
    cdef int expect_good_(self) except -1    # or SpillError of what was not there since the last time
    # Nothing is told of what was not there: whoever reads or writes what was to be cleared or copied is told.
    cdef void forget_faults_(self) noexcept nogil
    cdef int expect_room_(self) except -1    # or SpillError where nothing more can be written
    cdef void trim_(self) noexcept nogil     # gives slots of the file back that are of nobody, once these are many

    # Arguments
    cdef unsigned char *layer_base(self, int64_t layer) except NULL      # or IndexError
    cdef unsigned char *layer_base_(self, int64_t layer) noexcept nogil   # of a layer in range
    cdef const kvc_run[::1] runs_(self, object runs, int64_t num_slots)   # inside the arena; -1: of any number
    cdef void note_written_(self, int64_t layer, const kvc_run *runs, int64_t num_runs) noexcept nogil
    # Slots [first, stop) of a block change, in all layers.
    cdef void forget_(self, int32_t block, int first, int stop) noexcept nogil
    cdef int check_values_(self, KvRows rows, int64_t layer) except -1   # shape and values, or ValueError
    # Store rows of values that were checked, from `first` on as many as the runs have slots.
    # On several threads runs of one block follow one another.
    cdef void write_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, KvRows rows, int64_t first,
                     int threads) noexcept nogil

    cdef void _write_held(self, int64_t layer, const kvc_run *runs, int64_t num_runs, KvRows rows, int64_t first,
                          int threads) noexcept nogil

    cdef int dim_(self, int64_t layer, int side) noexcept nogil           # head_dim of K (0) or of V (1)
    # Into float32 (n, num_heads, dim_), channels together, no negative strides; None: that side is not read.
    cdef int read_(self, int64_t layer, const kvc_run *runs, int64_t num_runs, cnp.ndarray keys,
                   cnp.ndarray values) except -1
    cdef object new_rows(self, int64_t layer, int64_t n, int side)    # float32 (n, num_heads, dim_), not filled
    cdef void copy_(self, const int32_t *sources, const int32_t *targets, int64_t n) noexcept nogil    # whole blocks
    cdef void _copy_held(self, int64_t layer, int32_t source, int32_t target) noexcept nogil
    cdef void _move(self, int64_t layer, BlockStore other, const int32_t *move) noexcept nogil    # a row of move_slots
    cdef void _clear(self, int64_t layer, int32_t block, int first, int count) noexcept nogil
    # The last `count` slots of these runs are new tokens: they read as zeros until they are written.
    cdef void clear_new_(self, const kvc_run *runs, int64_t num_runs, int64_t count) noexcept nogil

    # Growing takes two steps: what can fail, then what cannot. `move_to` copies blocks that were ever written, layer by
    # layer, and gives the old layer back to the system: at most one layer is there twice. Views of the bytes are void.
    cdef MappedMemory memory_for(self, num_blocks)       # of a store of `num_blocks`; or OutOfMemoryError, ValueError
    cdef void move_to(self, MappedMemory memory, int32_t num_blocks)
    cdef void _take(self, MappedMemory memory, int32_t num_blocks)

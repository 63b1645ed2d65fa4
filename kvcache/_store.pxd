"""The bytes: one arena per layer, blocks of one layout, and the kernels that write, read and attend over runs."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

from kvcache._kernels cimport kvc_layout, kvc_run, kvc_seq
from kvcache._batch cimport BatchTable
from kvcache._records cimport Sequence
from kvcache._table cimport SequenceTable


cdef class BlockStore:
    cdef kvc_layout layout
    cdef readonly int32_t num_layers
    cdef readonly int32_t num_blocks
    cdef unsigned char *arena          # num_layers arenas of num_blocks blocks each, zero until first written
    cdef size_t arena_bytes
    cdef uint16_t *reached             # (num_blocks,) slots from here on are zero, and nobody's
    cdef void *scratch                 # of the attention call, grown to the largest so far
    cdef size_t scratch_bytes
    cdef kvc_seq *seqs                 # (seqs_capacity,) the sequences of the attention call
    cdef int64_t seqs_capacity
    cdef readonly str key_dtype        # "f32", "f16", "q8", "q4", "q3" or "q2"
    cdef readonly str value_dtype

    cdef unsigned char *layer_base(self, int64_t layer) except NULL      # or IndexError
    cdef void hand_out_(self, const Sequence *seq, int64_t count) noexcept nogil    # its last `count` tokens
    cdef int represent_(self, const float[:, :, ::1] keys, const float[:, :, ::1] values) except -1
    cdef int reserve_seqs(self, int64_t count) except -1
    cdef cnp.ndarray queries_(self, object queries, str name)             # or TypeError, ValueError
    cdef cnp.ndarray result_(self, object out, cnp.ndarray q)
    cdef int describe_(self, SequenceTable table, const uint64_t *ids, int64_t n, object query_lens,
                       object context_lens, int64_t num_queries) except -1
    cdef int attend_(self, unsigned char *base, int64_t num_seqs, cnp.ndarray queries, cnp.ndarray sink_queries,
                     float scale, cnp.ndarray out, cnp.ndarray scores, cnp.ndarray lse) except -1

"""The types of a spill, blocks that lie in memory or in a file (ckernels/kvc_spill.h).

kernels/kernels.pxd has its functions.
"""

from libc.stdint cimport int32_t, int64_t

from kvcache.kernels.kernels cimport kvc_run


cdef extern from "kvc_spill.h" nogil:
    ctypedef struct kvc_units:          # blocks of a layer: of runs[i], or of runs[list[i] / divisor]
        const kvc_run *runs
        const int32_t *list
        int64_t count
        int32_t divisor
        int32_t layer

    ctypedef enum kvc_use:
        KVC_TO_READ, KVC_TO_CHANGE, KVC_TO_REPLACE

    ctypedef enum kvc_fault_kind:
        KVC_NO_FAULT, KVC_READ_FAULT, KVC_SHORT_FAULT, KVC_CHECKSUM_FAULT, KVC_FULL_FAULT, KVC_FORK_FAULT

    ctypedef struct kvc_fault:
        int32_t kind
        int32_t layer
        int32_t block
        int32_t code

    ctypedef struct kvc_spill_stats:
        int64_t resident
        int64_t holds
        int64_t held_units
        int64_t waits
        int64_t read_units
        int64_t read_bytes
        int64_t ahead_units
        int64_t written_units
        int64_t written_bytes
        int64_t dropped_units
        int64_t faults
        double read_seconds

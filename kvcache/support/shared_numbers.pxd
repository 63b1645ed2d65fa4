"""Numbers that one thread at a time changes while others look at them without its lock (ckernels/kvc_shared.h)."""

from libc.stdint cimport int32_t, int64_t


cdef extern from "kvc_shared.h" nogil:
    ctypedef int32_t shared_int32 "kvc_shared_int32"
    ctypedef int64_t shared_int64 "kvc_shared_int64"
    ctypedef size_t shared_size "kvc_shared_size"

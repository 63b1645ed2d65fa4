"""Weight matrices: see kernels/matrix.pyx."""

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvcache.kernels.kernels cimport kvc_matrix
from kvcache.support.shared_numbers cimport shared_size


cdef class Matrix:
    cdef kvc_matrix c
    cdef object memory      # uint8 array that holds the panels
    cdef readonly str format
    cdef readonly shared_size scratch_bytes    # the most that a product has taken; each frees it when it ends
    cdef cnp.ndarray _bias(self, object bias)
    cdef int _multiply(self, const float *x, int64_t n, cnp.ndarray bias, float *out, bint add,
                       object activations) except -1
    cdef object _packed(self)
    cdef object _shapes(self, int64_t count)
    cdef int64_t _rows(self, object row, int64_t count, int64_t columns) except -1

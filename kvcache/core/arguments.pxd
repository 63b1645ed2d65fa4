"""Whether an argument needs no conversion by core/arguments.py."""

cimport numpy as cnp


# A C-contiguous, aligned array of this type and so many dimensions.
cdef inline bint is_plain(object x, int dtype, int ndim):
    return (cnp.PyArray_CheckExact(x) and cnp.PyArray_TYPE(<cnp.ndarray>x) == dtype
            and cnp.PyArray_NDIM(<cnp.ndarray>x) == ndim and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>x))

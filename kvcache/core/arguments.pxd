"""Whether an argument needs no conversion by core/arguments.py, and whether two arrays share memory."""

cimport numpy as cnp


# A C-contiguous, aligned array of this type and so many dimensions.
cdef inline bint is_plain(object x, int dtype, int ndim):
    return (cnp.PyArray_CheckExact(x) and cnp.PyArray_TYPE(<cnp.ndarray>x) == dtype
            and cnp.PyArray_NDIM(<cnp.ndarray>x) == ndim and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>x))


# Whether two C-contiguous arrays share a byte.
cdef inline bint overlap(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef char *first = <char *>cnp.PyArray_DATA(a)
    cdef char *other = <char *>cnp.PyArray_DATA(b)
    return first < other + cnp.PyArray_NBYTES(b) and other < first + cnp.PyArray_NBYTES(a)

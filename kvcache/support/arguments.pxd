"""Whether an argument needs no conversion by support/arguments.py, and whether two arrays share memory."""

cimport numpy as cnp


# A C-contiguous, aligned array of type `dtype` with `ndim` dimensions.
cdef inline bint is_plain(object x, int dtype, int ndim):
    return (cnp.PyArray_CheckExact(x) and cnp.PyArray_TYPE(<cnp.ndarray>x) == dtype
            and cnp.PyArray_NDIM(<cnp.ndarray>x) == ndim and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>x))


# Whether the first array, C-contiguous, has a byte between the first and the last one of the other array.
cdef inline bint overlap(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef char *first = <char *>cnp.PyArray_DATA(a)
    cdef char *other = <char *>cnp.PyArray_DATA(b)
    cdef char *end = other + cnp.PyArray_ITEMSIZE(b)
    cdef cnp.npy_intp extent
    cdef int axis
    if cnp.PyArray_SIZE(b) == 0:
        return False
    for axis in range(cnp.PyArray_NDIM(b)):
        extent = (cnp.PyArray_DIM(b, axis) - 1) * cnp.PyArray_STRIDE(b, axis)
        if extent < 0:
            other += extent
        else:
            end += extent
    return first < end and other < first + cnp.PyArray_NBYTES(a)

"""Array-likes of integers as uint32 tokens and int32 values; see support/token_ids.pxd."""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_Clear
from cpython.list cimport PyList_CheckExact
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport uint32_t

from kvcache.support.arguments cimport is_plain

import operator

import numpy as np

from kvcache.support.arguments import as_array, expect_list, is_masked

cnp.import_array()

cdef extern from "Python.h":
    Py_ssize_t PySequence_Fast_GET_SIZE(object)
    PyObject** PySequence_Fast_ITEMS(object)
    bint PyLong_CheckExact(PyObject*)
    Py_ssize_t PyLong_AsSsize_t(PyObject*)    # -1 with an error set if it is too large

cdef object BOOLS = (bool, np.bool_)


cdef cnp.ndarray uint32_tokens(object tokens):
    if is_plain(tokens, cnp.NPY_UINT32, 1):
        return tokens
    if PyList_CheckExact(tokens) or PyTuple_CheckExact(tokens):
        return from_sequence(tokens)
    if isinstance(tokens, (list, tuple, range)):
        return from_sequence(list(tokens))
    if isinstance(tokens, (str, bytes)):
        raise TypeError(f"tokens: expected integers, got {type(tokens).__name__}")
    array = as_array(tokens, "tokens")
    expect_list(array, tokens, "tokens")
    return from_array(array)


cdef cnp.ndarray from_sequence(object tokens):
    """A list or tuple: exact ints in one pass in C, anything else one by one."""
    cdef cnp.npy_intp n
    cdef cnp.ndarray out
    cdef bint plain
    with cython.critical_section(tokens):
        n = PySequence_Fast_GET_SIZE(tokens)
        out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_UINT32, 0)
        plain = plain_ints(PySequence_Fast_ITEMS(tokens), n, <uint32_t*>cnp.PyArray_DATA(out))
    if not plain:
        PyErr_Clear()
        for i, item in enumerate(list(tokens)):
            number = item if type(item) is int else whole_number(item)
            if not 0 <= number <= 0xFFFFFFFF:
                raise ValueError(f"tokens: expected ids in [0, 2**32), got {item} at position {i}")
            out[i] = number
    return out


cdef bint plain_ints(PyObject** items, Py_ssize_t n, uint32_t* out) noexcept:
    """Copy exact ints; False if there is anything else, or one out of range, with or without an error set.

    No Python code runs here, and no other thread changes a list in a critical section, so it stays as it is meanwhile.
    The range is checked once, at the end: a branch per item costs more than the conversion.
    """
    cdef Py_ssize_t i
    cdef long long number
    cdef long long seen = 0
    for i in range(n):
        if not PyLong_CheckExact(items[i]):
            return False
        number = PyLong_AsSsize_t(items[i])
        seen |= number
        out[i] = <uint32_t>number
    return 0 <= seen <= 0xFFFFFFFF


cdef object whole_number(object item):
    """An integer of another type (NumPy's) as int; TypeError for bools, floats and anything else."""
    if not isinstance(item, BOOLS) and not is_masked(item) and hasattr(item, "__index__"):
        return operator.index(item)
    raise TypeError(f"tokens: expected integers, got {type(item).__name__}")


cdef cnp.ndarray from_array(cnp.ndarray array):
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got dtype {array.dtype}")
    if array.dtype.itemsize > 4 or array.dtype.kind == "i":
        if array.size and not (array.min() >= 0 and array.max() <= 0xFFFFFFFF):
            raise ValueError(f"tokens: expected ids in [0, 2**32), got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.uint32)


cdef cnp.ndarray int32_values(object values):
    if is_plain(values, cnp.NPY_INT32, 1):
        return values
    cdef cnp.ndarray array = as_array(values, "values")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"values: expected integers, got dtype {array.dtype}")
    if array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
        raise ValueError(f"values: expected integers in [-2**31, 2**31), got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)


def as_tokens(tokens):
    """`tokens` as a C-contiguous uint32 array, shape (num_tokens,).

    Takes any one-dimensional array-like of integers in [0, 2**32): a uint32 array is returned as it is,
    without a copy. TypeError for bools, floats and anything else that is no integer, ValueError for an id
    out of range or more than one dimension.
    """
    return uint32_tokens(tokens)

"""Any one-dimensional integer array-like as uint64 sequence ids; see paged/seq_ids.pxd.

Every decoding step converts ids, so the two usual inputs, a uint64 array and a list of ints, do without NumPy.
"""

cimport cython
cimport numpy as cnp
from cpython.list cimport PyList_CheckExact
from cpython.long cimport PyLong_AsUnsignedLongLong, PyLong_CheckExact
from libc.stdint cimport uint64_t

from kvcache.support.arguments cimport is_plain

import numpy as np

from kvcache.support.arguments import as_integers, is_integer, plain_int

cnp.import_array()


cdef cnp.ndarray uint64_ids(object ids, str name="seq_ids"):
    if is_plain(ids, cnp.NPY_UINT64, 1):
        return ids
    if PyList_CheckExact(ids):
        with cython.critical_section(ids):    # no other thread changes it meanwhile
            array = from_list(ids, name)
        if array is not None:
            return array
    return from_array(as_integers(ids, name), name)


cdef object from_list(list ids, str name):
    """The ids of a list of ints; None for any other list, which NumPy then converts or refuses."""
    cdef cnp.npy_intp n = len(ids)
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_UINT64, 0)
    cdef uint64_t* numbers = <uint64_t*>cnp.PyArray_DATA(out)
    cdef Py_ssize_t i
    for i in range(n):
        if isinstance(ids[i], bool):
            raise TypeError(f"{name}: expected integers, got {ids[i]}")
        if not PyLong_CheckExact(ids[i]):
            return None
        try:
            numbers[i] = PyLong_AsUnsignedLongLong(ids[i])
        except OverflowError:
            raise ValueError(f"{name}: expected integers in [0, 2**64), got {ids[i]}") from None
    return out


cdef cnp.ndarray from_array(object array, str name):
    if array.size and array.dtype.kind == "i" and array.min() < 0:
        raise ValueError(f"{name}: expected integers in [0, 2**64), got {array.min()}")
    return np.ascontiguousarray(array, np.uint64)


def as_seq_ids(ids, str name="seq_ids"):
    """`ids`, each in [0, 2**64), as uint64, shape (num_sequences,); a uint64 array is returned as it is.

    Raises:
        TypeError: not integers.
        ValueError: an id out of range; more than one dimension.
    """
    return uint64_ids(ids, name)


def as_seq_id(seq_id, str name="seq_id"):
    """One id as an int in [0, 2**64).

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    if type(seq_id) is int and 0 <= seq_id < 1 << 64:  # nearly always
        return seq_id
    if not is_integer(seq_id):
        raise TypeError(f"{name}: expected an int, got {type(seq_id).__name__}")
    number = plain_int(seq_id)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: expected an int in [0, 2**64), got {number}")
    return number

"""Tensors of other libraries through DLPack, where NumPy does not read them: bfloat16, and memory to write to.

The structures are those of dlpack.h, version 0 ("dltensor"), which every exporter makes unless it is asked for another.
That version cannot mark memory as read-only, so exporters refuse to export such memory.
"""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

__all__ = ["bfloat16_words", "writeable"]

cnp.import_array()

cdef struct tensor_t:
    void *data
    int32_t device_type    # 1: CPU
    int32_t device_id
    int32_t ndim
    uint8_t code           # 2: float, 4: bfloat
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides       # in elements; NULL: C order
    uint64_t byte_offset

cdef enum:
    CPU = 1, FLOAT = 2, BFLOAT = 4, MOST_DIMENSIONS = 32


cdef object view(object x, int code, int bits, int type_number):
    """The memory of a tensor on the CPU as an array of this type, not copied; None for a tensor of another type."""
    cdef object capsule = x.__dlpack__()
    if not PyCapsule_IsValid(capsule, "dltensor"):
        return None
    cdef tensor_t *tensor = <tensor_t *>PyCapsule_GetPointer(capsule, "dltensor")
    cdef cnp.npy_intp shape[MOST_DIMENSIONS]
    cdef int i
    if tensor.device_type != CPU or tensor.code != code or tensor.bits != bits or tensor.lanes != 1 \
            or not 0 <= tensor.ndim <= MOST_DIMENSIONS:
        return None
    for i in range(tensor.ndim):
        shape[i] = tensor.shape[i]
    cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(tensor.ndim, shape, type_number,
                                                           <char *>tensor.data + tensor.byte_offset)
    if tensor.strides != NULL:
        for i in range(tensor.ndim):
            cnp.PyArray_STRIDES(array)[i] = tensor.strides[i] * (bits // 8)
    cnp.PyArray_UpdateFlags(array, cnp.NPY_ARRAY_UPDATE_ALL)    # contiguous, aligned
    # A capsule that nobody renames frees its tensor when it is dropped.
    cnp.set_array_base(array, capsule)
    return array


def bfloat16_words(x):
    """The words of a bfloat16 tensor, a uint16 array over its memory; None for any other tensor."""
    return view(x, BFLOAT, 16, cnp.NPY_UINT16)


def writeable(x):
    """A float32 tensor as an array over its memory, to be written; None for any other tensor."""
    return view(x, FLOAT, 32, cnp.NPY_FLOAT32)

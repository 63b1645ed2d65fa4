"""Tensors of other libraries through DLPack, where NumPy does not read them: bfloat16, and memory to write to.

The structures are those of dlpack.h, version 0 ("dltensor"), which every exporter makes unless it is asked for another.
That version cannot mark memory as read-only, so exporters refuse to export such memory.
"""

cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

__all__ = ["array_of", "as_words", "bfloat16_words", "writeable"]

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    cnp.ndarray PyArray_NewFromDescr(PyTypeObject *subtype, cnp.dtype descr, int nd, const cnp.npy_intp *dims,
                                     const cnp.npy_intp *strides, void *data, int flags, PyObject *obj)

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


cdef tensor_t *tensor_of(object capsule, int code, int bits) except? NULL:
    """The tensor of a capsule; NULL for one on another device or of another type."""
    if not PyCapsule_IsValid(capsule, "dltensor"):
        return NULL
    cdef tensor_t *tensor = <tensor_t *>PyCapsule_GetPointer(capsule, "dltensor")
    if tensor.device_type != CPU or tensor.code != code or tensor.bits != bits or tensor.lanes != 1 \
            or not 0 <= tensor.ndim <= MOST_DIMENSIONS:
        return NULL
    return tensor


cdef rows_t rows_of(object capsule, str name) except *:
    cdef tensor_t *tensor = tensor_of(capsule, FLOAT, 32)
    cdef rows_t rows
    cdef int64_t elements = 1
    cdef bint gaps = False
    cdef int i
    rows.words = tensor == NULL
    if rows.words:
        tensor = tensor_of(capsule, BFLOAT, 16)
    if tensor == NULL or tensor.ndim == 0:
        raise ValueError(f"{name}: expected a tensor (..., columns) of float32 or bfloat16 on the CPU, got another")
    for i in reversed(range(tensor.ndim)):
        gaps |= tensor.strides != NULL and tensor.shape[i] != 1 and tensor.strides[i] != elements
        elements *= tensor.shape[i]
    if gaps and elements:
        raise ValueError(f"{name}: expected a contiguous tensor, got one with gaps between its elements")
    rows.columns = tensor.shape[tensor.ndim - 1]
    rows.n = elements // rows.columns if rows.columns else 0
    rows.data = <char *>tensor.data + tensor.byte_offset
    return rows


cdef bint rows_overlap(rows_t a, rows_t b) noexcept:
    cdef int64_t a_bytes = a.n * a.columns * (2 if a.words else 4), b_bytes = b.n * b.columns * (2 if b.words else 4)
    return a.data < b.data + b_bytes and b.data < a.data + a_bytes


cdef object view(object capsule, int code, int bits, int type_number):
    """The memory of a tensor on the CPU as an array of this type, not copied; None for a tensor of another type."""
    cdef tensor_t *tensor = tensor_of(capsule, code, bits)
    cdef cnp.npy_intp shape[MOST_DIMENSIONS]
    cdef int i
    if tensor == NULL:
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
    return view(x.__dlpack__(), BFLOAT, 16, cnp.NPY_UINT16)


def writeable(x):
    """A float32 tensor as an array over its memory, to be written; None for any other tensor."""
    return view(x.__dlpack__(), FLOAT, 32, cnp.NPY_FLOAT32)


def array_of(capsule, words=None):
    """The tensor of a capsule as an array over its memory: of float32, or of `words`, a dtype of the words of bfloat16.

    None for any other tensor, and for a capsule that was used.
    """
    if words is None:
        return view(capsule, FLOAT, 32, cnp.NPY_FLOAT32)
    array = view(capsule, BFLOAT, 16, cnp.NPY_UINT16)
    return None if array is None else as_words(array, words)


def as_words(cnp.ndarray x not None, cnp.dtype words not None):
    """`x.view(words)` for a dtype of as many bytes; a sixth of the time where one of both has fields."""
    if cnp.PyArray_ITEMSIZE(x) != words.itemsize or words.hasobject or x.dtype.hasobject:
        raise ValueError(f"words: expected {x.dtype.itemsize} bytes without objects, got {words}")
    cdef PyObject *none = NULL
    Py_INCREF(words)    # of which the call takes a reference
    array = PyArray_NewFromDescr(
        <PyTypeObject *>cnp.ndarray, words, cnp.PyArray_NDIM(x), cnp.PyArray_DIMS(x), cnp.PyArray_STRIDES(x),
        cnp.PyArray_DATA(x), cnp.PyArray_FLAGS(x) & cnp.NPY_ARRAY_WRITEABLE, none)
    cnp.set_array_base(array, x)
    return array

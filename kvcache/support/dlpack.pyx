"""Tensors of other libraries through DLPack, where NumPy does not read them: bfloat16, and memory to write to.

The structures are those of dlpack.h, version 0 ("dltensor"), which every exporter makes unless it is asked for another.
That version cannot mark memory as read-only, so exporters refuse to export such memory. NumPy asks for version 1.

A capsule does not say how much memory there is: its maker is trusted with that. Shapes and strides that no memory can
have are refused, since their products would be other numbers than they seem.
"""

cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

__all__ = ["Checked", "array_of", "as_words", "bfloat16_words", "writeable"]

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

cdef struct versioned_t:
    uint32_t major, minor
    void *context
    void *deleter
    uint64_t flags
    tensor_t tensor

cdef enum:
    CPU = 1, FLOAT = 2, BFLOAT = 4, MOST_DIMENSIONS = 32

cdef int64_t MOST_BYTES = <int64_t>1 << 57     # between the first and the last byte of a tensor

cdef extern from *:
    bint add_overflows "__builtin_add_overflow"(int64_t a, int64_t b, int64_t *sum) noexcept nogil
    bint multiply_overflows "__builtin_mul_overflow"(int64_t a, int64_t b, int64_t *product) noexcept nogil


cdef int64_t count(const tensor_t *tensor) noexcept:
    """The elements of a tensor; -1 if its numbers are none that memory can have."""
    cdef int64_t elements = 1, low = 0, high = 0, size = (<int64_t>tensor.bits * tensor.lanes + 7) // 8, span, stride
    cdef uint64_t first = <uint64_t>tensor.data + tensor.byte_offset
    cdef int i
    if not 0 <= tensor.ndim <= MOST_DIMENSIONS or (tensor.ndim and tensor.shape == NULL):
        return -1
    for i in range(tensor.ndim):
        if tensor.shape[i] < 0:
            return -1
    for i in range(tensor.ndim):
        if tensor.shape[i] == 0:
            return 0
    for i in reversed(range(tensor.ndim)):
        stride = elements if tensor.strides == NULL else tensor.strides[i]
        if multiply_overflows(tensor.shape[i] - 1, stride, &span) \
                or (add_overflows(high, span, &high) if span > 0 else add_overflows(low, span, &low)) \
                or multiply_overflows(elements, tensor.shape[i], &elements):
            return -1
    if add_overflows(high, 1, &high) or multiply_overflows(high, size, &high) or multiply_overflows(low, size, &low) \
            or multiply_overflows(elements, size, &span) or high > MOST_BYTES or low < -MOST_BYTES or span > MOST_BYTES:
        return -1
    if tensor.data == NULL or first < <uint64_t>tensor.data or first <= <uint64_t>-low \
            or first + <uint64_t>high < first:
        return -1
    return elements


cdef int check(const tensor_t *tensor, str name) except -1:
    """ValueError unless memory can have a tensor."""
    if tensor.device_type == CPU and count(tensor) < 0:
        sizes = strides = None
        if 0 <= tensor.ndim <= MOST_DIMENSIONS and tensor.shape != NULL:
            sizes = tuple([tensor.shape[i] for i in range(tensor.ndim)])
            strides = None if tensor.strides == NULL else tuple([tensor.strides[i] for i in range(tensor.ndim)])
        raise ValueError(f"{name}: expected a tensor that memory can have, got {tensor.ndim} dimensions {sizes} with "
                         f"strides {strides} from {tensor.byte_offset} on")
    return 0


cdef tensor_t *tensor_of(object capsule, int code, int bits, str name) except? NULL:
    """The tensor of a capsule; NULL for one on another device or of another type."""
    if not PyCapsule_IsValid(capsule, "dltensor"):
        return NULL
    cdef tensor_t *tensor = <tensor_t *>PyCapsule_GetPointer(capsule, "dltensor")
    if tensor.device_type != CPU or tensor.code != code or tensor.bits != bits or tensor.lanes != 1:
        return NULL
    check(tensor, name)
    return tensor


cdef rows_t rows_of(object capsule, str name) except *:
    cdef tensor_t *tensor = tensor_of(capsule, FLOAT, 32, name)
    cdef rows_t rows
    cdef int64_t elements = 1
    cdef bint gaps = False
    cdef int i
    rows.words = tensor == NULL
    if rows.words:
        tensor = tensor_of(capsule, BFLOAT, 16, name)
    if tensor == NULL or tensor.ndim == 0:
        raise ValueError(f"{name}: expected a tensor (..., columns) of float32 or bfloat16 on the CPU, got another")
    cdef int64_t total = count(tensor)
    for i in reversed(range(tensor.ndim if total else 0)):
        gaps |= tensor.strides != NULL and tensor.shape[i] != 1 and tensor.strides[i] != elements
        elements *= tensor.shape[i]
    if gaps:
        raise ValueError(f"{name}: expected a contiguous tensor, got one with gaps between its elements")
    rows.columns = tensor.shape[tensor.ndim - 1]
    rows.n = total // rows.columns if rows.columns else 0
    rows.data = <char *>tensor.data + tensor.byte_offset
    if <uint64_t>rows.data % (2 if rows.words else 4):
        raise ValueError(f"{name}: expected aligned memory, got a tensor that begins inside of an element")
    return rows


cdef bint rows_overlap(rows_t a, rows_t b) noexcept:
    cdef int64_t a_bytes = a.n * a.columns * (2 if a.words else 4), b_bytes = b.n * b.columns * (2 if b.words else 4)
    return a.data < b.data + b_bytes and b.data < a.data + a_bytes


cdef object view(object capsule, int code, int bits, int type_number):
    """The memory of a tensor on the CPU as an array of this type, not copied; None for a tensor of another type."""
    cdef tensor_t *tensor = tensor_of(capsule, code, bits, "tensor")
    cdef cnp.npy_intp shape[MOST_DIMENSIONS]
    cdef int i
    if tensor == NULL:
        return None
    for i in range(tensor.ndim):
        shape[i] = tensor.shape[i]
    cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(tensor.ndim, shape, type_number,
                                                           <char *>tensor.data + tensor.byte_offset)
    if tensor.strides != NULL:
        for i in range(tensor.ndim if cnp.PyArray_SIZE(array) else 0):
            if tensor.shape[i] > 1:    # other strides have no meaning, and no limit
                cnp.PyArray_STRIDES(array)[i] = tensor.strides[i] * (bits // 8)
    cnp.PyArray_UpdateFlags(array, cnp.NPY_ARRAY_UPDATE_ALL)    # contiguous, aligned
    # A capsule that nobody renames frees its tensor when it is dropped.
    cnp.set_array_base(array, capsule)
    return array


cdef class Checked:
    """A tensor for NumPy to read, whose numbers are checked before.

    Args:
        x: a tensor.
        name: of the tensor in messages.
    """

    cdef object x
    cdef str name

    def __init__(self, x, str name not None):
        self.x, self.name = x, name

    def __dlpack__(self, **options):
        """The capsule; ValueError for numbers that no memory can have."""
        capsule = self.x.__dlpack__(**options)
        if PyCapsule_IsValid(capsule, "dltensor"):
            check(<tensor_t *>PyCapsule_GetPointer(capsule, "dltensor"), self.name)
        elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
            check(&(<versioned_t *>PyCapsule_GetPointer(capsule, "dltensor_versioned")).tensor, self.name)
        return capsule

    def __dlpack_device__(self):
        """The device."""
        return self.x.__dlpack_device__()


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

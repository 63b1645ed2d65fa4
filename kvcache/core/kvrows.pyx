"""K and V of some tokens as a caller has them; see core/kvrows.pxd."""

cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from kvcache.kernels cimport kernels
from kvcache.kernels.kernels cimport (
    KVC_ELEMENT_BF16, KVC_ELEMENT_F16, KVC_ELEMENT_F32, KVC_ELEMENT_F64, kvc_float_rows, kvc_format, kvc_tensor,
)

import numpy as np

__all__ = ["KvRows"]

cnp.import_array()


cdef class KvRows:
    """K and V of some tokens, converted to float32 a few tokens at a time where they are not float32 already.

    Args:
        keys, values: `(n, num_heads, head_dim)`, each with a head_dim of its own, of float32, float16, float64, or
            words of bfloat16 (uint16). An array whose channels do not lie together, or that is not aligned, is copied.

    Attributes:
        given: the rows as a caller has them, where a `Format` in Python has made these of them; None: these are they.

    Raises:
        ValueError: other dimensions, or another number of rows or heads in each.
        MemoryError: no memory for the converted rows of a few tokens.
    """

    def __cinit__(self, cnp.ndarray keys not None, cnp.ndarray values not None):
        if keys.ndim != 3 or values.ndim != 3 or keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[1]:
            raise ValueError(f"values: expected as many rows and heads as keys of shape {np.shape(keys)}, "
                             f"got {np.shape(values)}")
        self.count, self.num_heads = keys.shape[0], <int>keys.shape[1]
        self.dims[0], self.dims[1] = <int>keys.shape[2], <int>values.shape[2]
        self.keys, self.values = together(keys), together(values)
        self.tensors[0], self.tensors[1] = tensor_of(self.keys), tensor_of(self.values)
        self.plain = _has_heads_together(&self.tensors[0], self.num_heads, self.dims[0]) \
            and _has_heads_together(&self.tensors[1], self.num_heads, self.dims[1])
        if self.plain:
            return
        cdef size_t size = STEP * sizeof(float) * <size_t>self.num_heads * (<size_t>self.dims[0] + <size_t>self.dims[1])
        self.staged = <float *>malloc(size)
        if self.staged == NULL:
            raise MemoryError(f"no memory for {size} bytes of converted rows")

    def __dealloc__(self):
        free(self.staged)

    def part(self, int64_t start, int64_t stop):
        """The rows [start, stop)."""
        return KvRows(self.keys[start:stop], self.values[start:stop])

    cdef bint has_values_in_keys(self) except -1:
        cdef const kvc_tensor *keys = &self.tensors[0]
        cdef const kvc_tensor *values = &self.tensors[1]
        if keys.data == values.data and keys.token_stride == values.token_stride and keys.element == values.element \
                and (self.num_heads == 1 or keys.head_stride == values.head_stride):
            return self.dims[1] <= self.dims[0]
        return np.array_equal(np.asarray(self.keys)[..., :self.dims[1]], np.asarray(self.values))

    cdef kvc_float_rows rows(self, int side, int64_t first, int64_t n) noexcept nogil:
        cdef kvc_float_rows rows
        cdef float *staged = self.staged + side * STEP * <int64_t>self.num_heads * self.dims[0]
        if self.plain:
            rows.stride = self.tensors[side].token_stride // <int64_t>sizeof(float)
            rows.data = <const float *>self.tensors[side].data + first * rows.stride
        else:
            kernels.gather_rows(&self.tensors[side], first, n, self.num_heads, self.dims[side], staged)
            rows.data, rows.stride = staged, <int64_t>self.num_heads * self.dims[side]
        return rows

    cdef int64_t joined(self, int side) noexcept nogil:
        if not self.plain:
            return STEP
        return self.count if self.rows(side, 0, 1).stride == <int64_t>self.num_heads * self.dims[side] else 1

    cdef int64_t first_bad(self, int side, kvc_format format) noexcept nogil:
        cdef const kvc_tensor *tensor = &self.tensors[side]
        cdef int64_t row = <int64_t>self.num_heads * self.dims[side], bad = -1, first = 0, n
        cdef int head, dim = self.dims[side]
        cdef int64_t most = self.joined(side)
        while first < self.count:
            if tensor.element == KVC_ELEMENT_F32 and not self.plain:    # as it lies there
                n = 1
                for head in range(self.num_heads):
                    bad = kernels.check_representable(<const float *>(
                        tensor.data + first * tensor.token_stride + head * tensor.head_stride), dim, format)
                    if bad >= 0:
                        return first * row + head * dim + bad
            else:
                n = min(most, self.count - first)
                bad = kernels.check_representable(self.rows(side, first, n).data, n * row, format)
                if bad >= 0:
                    return first * row + bad
            first += n
        return -1

    cdef int64_t first_above(self, float most) noexcept nogil:
        cdef int64_t row = <int64_t>self.num_heads * self.dims[0], most_rows = self.joined(0), first = 0, n, i
        cdef const float *x
        while first < self.count:
            n = min(most_rows, self.count - first)
            x = self.rows(0, first, n).data
            for i in range(n * row):
                if not -most <= x[i] <= most:
                    return first * row + i
            first += n
        return -1


cdef bint _has_heads_together(const kvc_tensor *tensor, int num_heads, int dim) noexcept:
    cdef int64_t size = sizeof(float)
    return tensor.element == KVC_ELEMENT_F32 and (tensor.head_stride == dim * size or num_heads == 1) \
        and tensor.token_stride % size == 0 and tensor.token_stride >= 0


cdef cnp.ndarray together(cnp.ndarray x):
    if cnp.PyArray_ISALIGNED(x) and (x.shape[2] == 1 or cnp.PyArray_STRIDE(x, 2) == cnp.PyArray_ITEMSIZE(x)):
        return x
    return np.ascontiguousarray(x)


cdef kvc_tensor tensor_of(cnp.ndarray x) except *:
    cdef kvc_tensor tensor
    cdef int number = cnp.PyArray_TYPE(x)
    if number == cnp.NPY_FLOAT32:
        tensor.element = KVC_ELEMENT_F32
    elif number == cnp.NPY_FLOAT16:
        tensor.element = KVC_ELEMENT_F16
    elif number == cnp.NPY_UINT16:
        tensor.element = KVC_ELEMENT_BF16
    elif number == cnp.NPY_FLOAT64:
        tensor.element = KVC_ELEMENT_F64
    else:
        raise TypeError(f"rows: expected float32, float16, float64 or words of bfloat16, got {x.dtype}")
    tensor.data = <const unsigned char *>cnp.PyArray_DATA(x)
    tensor.token_stride, tensor.head_stride = cnp.PyArray_STRIDE(x, 0), cnp.PyArray_STRIDE(x, 1)
    return tensor

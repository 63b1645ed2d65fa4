"""Tensors as other libraries have them, with nothing but DLPack; made from NumPy arrays."""

import ctypes
import re

import numpy as np

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
DEVICE, CODE = 8, 20  # where a DLTensor has the type of its device (int32) and the code of its dtype (uint8)
NDIM, SHAPE, STRIDES, OFFSET = 16, 24, 32, 40  # int32, two pointers to int64, uint64
VERSIONED = 32  # where a versioned capsule has its DLTensor


class Tensor:
    """An array behind DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Bfloat16(Tensor):
    """A bfloat16 tensor over an array of its words, uint16."""

    def __init__(self, words):
        assert words.dtype == np.uint16
        super().__init__(words)

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__()
        ctypes.c_uint8.from_address(_pointer(capsule, b"dltensor") + CODE).value = 4
        return capsule


class Forged(Tensor):
    """A tensor that says other numbers than its memory has.

    Args:
        array: float32, or words of bfloat16 (uint16).
        numbers: some of `shape`, `strides` (in elements; None: there are none), `offset`, `ndim`, `data` (an address).
    """

    def __init__(self, array, **numbers):
        super().__init__(array)
        self.numbers = numbers
        self.kept = []  # the shapes and strides of all its capsules

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__(**options)
        name = re.search('"(.*)"', repr(capsule))[1]
        at = _pointer(capsule, name.encode()) + VERSIONED * name.endswith("versioned")
        numbers = {"ndim": len(self.numbers.get("shape") or self.array.shape), **self.numbers}
        ctypes.c_int32.from_address(at + NDIM).value = numbers["ndim"]
        if self.array.dtype == np.uint16:
            ctypes.c_uint8.from_address(at + CODE).value = 4
        for name, place in (("shape", SHAPE), ("strides", STRIDES)):
            if name in numbers:
                values = numbers[name]
                self.kept.append(None if values is None else (ctypes.c_int64 * max(1, len(values)))(*values))
                to = 0 if values is None else ctypes.addressof(self.kept[-1])
                ctypes.c_uint64.from_address(at + place).value = to
        for name, place in (("offset", OFFSET), ("data", 0)):
            if name in numbers:
                ctypes.c_uint64.from_address(at + place).value = numbers[name]
        return capsule


class Elsewhere(Tensor):
    """A tensor on another device."""

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__()
        ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + DEVICE).value = 2
        return capsule

    def __dlpack_device__(self):
        return (2, 0)


class LikeTorch(Bfloat16):
    """As a bfloat16 tensor of torch: it has `__array__`, which refuses."""

    def __array__(self, *arguments, **options):
        raise TypeError("Got unsupported ScalarType BFloat16")


def words_of(values):
    """The words of bfloat16 that begin float32 numbers; the rest is cut off."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats_of(words):
    """The numbers of words of bfloat16, float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)

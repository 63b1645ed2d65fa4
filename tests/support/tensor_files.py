"""Files of tensors, written by hand."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np

NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
PARTS = {
    np.dtype(np.uint8): "U8", np.dtype(np.int8): "I8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def pack(header, data=b"", length=None):
    """The bytes of a file; `header` is any JSON value, or raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def pack_arrays(arrays):
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = entry((NAMES | PARTS)[array.dtype], list(array.shape), len(data), len(data) + array.nbytes)
        data += array.tobytes()
    return pack(header, data)

"""A strict reader of the safetensors file format, for untrusted files.

A file is an 8-byte little-endian length, a JSON header of that length, and the bytes of the tensors:

    | u64 n | {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | data ... |
              '------------------------- n bytes, padded with spaces -----------------'

Offsets count from the start of the data. The tensors cover the data exactly: no gap, no overlap, nothing after them.
The library has its own reader: NumPy has no bfloat16, and a hostile header must be refused before it costs memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.networks.files import MAX_JSON_BYTES, open_file, parse_json
from kvcache.support.arguments import short
from kvcache.support.json_text import json_fault
from kvcache.support.regular_files import file_version, read_part

__all__ = ["SafetensorsFile", "TensorInfo"]

Float32 = NDArray[np.float32]

_MAX_RANK = 32
_MAX_BYTES = 2**62

_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}
_LOADABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Parts of quantised tensors: read in rows, as whole numbers.
_PARTS = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E8M0": "u1"}


class TensorInfo(NamedTuple):
    """One tensor of a file: its dtype in the format's spelling, its shape, and its bytes [start, stop) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile(Mapping[str, TensorInfo]):
    """One open file: a mapping from tensor names to `TensorInfo`.

    Opening reads and checks the whole header and no data. Tensors are copied into memory, never mapped, so later
    changes of the file change no value. The file stays open until this object is freed.

    Raises FileNotFoundError, or CheckpointError that names the file, the tensor and the fault.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file, size = open_file(self.path)
        self._version = file_version(self._file.fd)
        first = bytearray(min(size, 8))
        read_part(self._file.fd, [first], 0, f"{self.path}: header")
        length = int.from_bytes(first, "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{self.path}: expected a header of {length} bytes, got {max(size - 8, 0)}: truncated"
            )
        if length > MAX_JSON_BYTES:
            raise CheckpointError(f"{self.path}: expected a header of at most {MAX_JSON_BYTES} bytes, got {length}")
        header = bytearray(length)
        read_part(self._file.fd, [header], 8, f"{self.path}: header")
        self._tensors = _parse(header, 8 + length, size, self.path)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def is_changed(self) -> bool:
        """Whether the file was replaced or written since it was opened, as far as its times tell."""
        try:
            return file_version(self.path) != self._version
        except OSError:
            return True

    def read(self, name: str) -> Float32:
        """A tensor of floats as a new float32 array.

        Raises CheckpointError if the file has become shorter or cannot be read.
        """
        info = self[name]
        stored = self._stored(name, info.start, math.prod(info.shape), _LOADABLE).reshape(info.shape)
        if info.dtype == "BF16":  # the upper half of a float32
            stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        found: Float32 = stored.astype(np.float32, copy=False)
        return found

    def rows(self, name: str, first: int, stop: int) -> NDArray[Any]:
        """Rows [first, stop) of a matrix as they are stored: float32, 16-bit words of F16 and BF16, or whole numbers.

        A tensor of more axes counts as one matrix: all but the last axis are rows.

        Raises CheckpointError as `read` does.
        """
        info = self[name]
        columns, size = info.shape[-1], _BITS[info.dtype] // 8
        stored = self._stored(name, info.start + first * columns * size, (stop - first) * columns, _LOADABLE | _PARTS)
        return (stored.view(np.uint16) if size == 2 else stored).reshape(stop - first, columns)

    def _stored(self, name: str, start: int, count: int, known: Mapping[str, str]) -> NDArray[Any]:
        """`count` values from `start` on, of the tensor's own dtype, one of `known`."""
        dtype = self[name].dtype
        if dtype not in known:
            listed = list(known)
            expected = f"{', '.join(listed[:-1])} or {listed[-1]}"
            raise CheckpointError(f"{self.path}: {name}: expected {expected}, got {dtype}")
        stored = np.empty(count, known[dtype])
        if count:
            read_part(self._file.fd, [stored], start, f"{self.path}: {name}")
        return stored


def _parse(header: bytearray, data_start: int, file_size: int, path: Path) -> dict[str, TensorInfo]:
    """Check a header against the size of its file; returns its tensors in the header's order."""
    try:
        entries = parse_json(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header: expected valid JSON, got {json_fault(error)}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: header: expected a JSON object, got {type(entries).__name__}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: expected an object of strings, got {short(metadata)}")

    tensors = {name: _entry(name, entry, data_start, path) for name, entry in entries.items()}
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if info.start != position:
            problem = "overlaps the one before it" if info.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: {name}: expected offset {position - data_start}, got {info.start - data_start}: {problem}"
            )
        position = info.stop
    if position != file_size:
        what = "truncated" if position > file_size else "bytes left over"
        raise CheckpointError(f"{path}: expected {position} bytes, got {file_size}: {what}")
    return tensors


def _entry(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    """One tensor of the header. Raises CheckpointError if a part is missing, mistyped or contradicts another."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name}: expected dtype, shape and data_offsets, got {short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{path}: {name}: expected a known dtype, got {short(dtype)}")
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{path}: {name}: expected a shape of whole numbers, got {short(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name}: expected data_offsets [start, stop], got {short(offsets)}")
    start, stop = offsets
    # The product of the nonzero sizes: NumPy cannot make an array of shape (0, 2**62) either.
    if math.prod(size for size in shape if size) > _MAX_BYTES // 8:
        raise CheckpointError(f"{path}: {name}: expected a size that fits memory, got shape {short(shape)}")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (stop - start) * 8:
        raise CheckpointError(
            f"{path}: {name}: expected {-(-bits // 8)} bytes for {dtype} {short(shape)}, got {stop - start}"
        )
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_BYTES for value in values)

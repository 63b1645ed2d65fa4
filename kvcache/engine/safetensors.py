"""The safetensors file format, read strictly and without trust.

A file is an 8-byte little-endian length, a JSON header of that length, and the bytes of the tensors:

    | u64 n | {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | data ... |
              '------------------------- n bytes, padded with spaces -----------------'

Offsets count from the start of the data, and the tensors tile it: no hole, no overlap, nothing left over.
NumPy has no bfloat16, and the reader must refuse a hostile header before it costs memory, so it is our own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError

__all__ = ["SafetensorsFile", "TensorInfo"]

Float32 = NDArray[np.float32]

# The format allows 100 MB. A tensor takes about 100 bytes of header, so this describes more than 100 000 of
# them, and it bounds what parsing hostile JSON can cost.
MAX_HEADER_BYTES = 16 * 2**20
_MAX_RANK = 32
_MAX_BYTES = 2**62

_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_LOADABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_BAND = 256  # rows converted at a time on their way into columns


class TensorInfo(NamedTuple):
    """Where a tensor lies: its dtype as the format names it, its shape, and its span in the file in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile(Mapping[str, TensorInfo]):
    """One file, mapped into memory; a mapping from tensor names to where they lie.

    Opening reads and checks the whole header and no data. Raises FileNotFoundError, or CheckpointError that
    names the file, the tensor and what is wrong with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > size - 8:
                    raise CheckpointError(
                        f"{self.path}: truncated: expected a header of {length} bytes, got {max(size - 8, 0)}"
                    )
                if length > MAX_HEADER_BYTES:
                    raise CheckpointError(
                        f"{self.path}: expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}"
                    )
                header = file.read(length)
        except IsADirectoryError:
            raise CheckpointError(f"{self.path}: expected a file, got a directory") from None
        self._tensors = _parse(header, 8 + length, size, self.path)
        # Mapped, not read: tensors are converted straight from where they lie.
        self._bytes = np.memmap(self.path, np.uint8, "r", shape=(size,))

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str) -> Float32:
        """The tensor as float32: a read-only view of the file if stored so and aligned, else a new array."""
        stored = self._stored(name)
        if stored.dtype == np.float32 and stored.flags.aligned:
            return stored
        out = np.empty(stored.shape, np.float32)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Float32) -> None:
        """Convert the tensor into `out`, float32 of its shape in any memory order, with no copy but of some rows."""
        stored = self._stored(name)
        if out.flags.c_contiguous or not len(out):
            _convert(stored, out)
            return
        # Some rows at a time are widened, then spread over the columns: several times as fast as both at once.
        rows = np.empty((min(_BAND, len(out)), *out.shape[1:]), np.float32)
        for first in range(0, len(out), _BAND):
            band = rows[: len(out) - first]
            _convert(stored[first : first + _BAND], band)
            out[first : first + _BAND] = band

    def _stored(self, name: str) -> NDArray[Any]:
        info = self[name]
        if info.dtype not in _LOADABLE:
            raise CheckpointError(f"{self.path}: {name}: expected F32, F16 or BF16, got {info.dtype}")
        count = math.prod(info.shape)
        if not count:  # which may lie at the very end, where NumPy finds no buffer
            return np.empty(info.shape, _LOADABLE[info.dtype])
        stored: NDArray[Any] = np.frombuffer(self._bytes, _LOADABLE[info.dtype], count, info.start)
        return stored.reshape(info.shape)


def _convert(stored: NDArray[Any], out: Float32) -> None:
    if stored.dtype == np.uint16:  # BF16, the upper half of a float32
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = stored


def _parse(header: bytes, data_start: int, file_size: int, path: Path) -> dict[str, TensorInfo]:
    """Check a header against the size of its file; tensors in the order of their names in it."""
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged header: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: damaged header: expected a JSON object, got {type(entries).__name__}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: expected an object of strings")

    tensors = {name: _entry(name, entry, data_start, path) for name, entry in entries.items()}
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if info.start != position:
            problem = "overlaps the one before it" if info.start < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: {name}: {problem}: expected offset {position - data_start}")
        position = info.stop
    if position != file_size:
        what = "truncated" if position > file_size else "bytes left over"
        raise CheckpointError(f"{path}: {what}: expected {position} bytes, the file has {file_size}")
    return tensors


def _entry(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    """One tensor of the header. Raises CheckpointError where its parts are missing, mistyped or disagree."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name}: expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{path}: {name}: expected a known dtype, got {_short(dtype)}")
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{path}: {name}: expected a shape of whole numbers, got {_short(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name}: expected data_offsets [start, stop], got {_short(offsets)}")
    start, stop = offsets
    # Zeros left out: NumPy cannot make an array of shape (0, 2**62) either.
    if math.prod(size for size in shape if size) > _MAX_BYTES // 8:
        raise CheckpointError(f"{path}: {name}: expected a size that fits memory, got shape {_short(shape)}")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (stop - start) * 8:
        raise CheckpointError(
            f"{path}: {name}: expected {-(-bits // 8)} bytes for {dtype} {_short(shape)}, got {stop - start}"
        )
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_BYTES for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ: of two tensors with one name, which one would be meant?"""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {_short(key)}")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _short(value: Any) -> str:
    """`repr`, cut to a line: what came may be megabytes of hostile input."""
    text = f"{value!r:.100}" if isinstance(value, str) else repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= 120 else text[:117] + "..."

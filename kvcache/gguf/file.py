"""A strict reader of the GGUF file format, for untrusted files.

All numbers are little-endian; strings are a u64 length and UTF-8, but for texts of the metadata that no reader needs.
A tensor's sizes begin with its row length:

    | "GGUF" | u32 version | u64 tensors | u64 entries |
    | entry: string key, u32 kind, value | ...                    an array is: u32 kind, u64 count, values
    | tensor: string name, u32 rank, u64 sizes ..., u32 type, u64 offset | ...
    | padding | data ... |

Offsets count from the start of the data; tensors follow each other, each padded to `general.alignment` bytes.

A large file may be split into `NAME-00001-of-00003.gguf` and so on: entries `split.no` (from 0) and `split.count` say
which part this is. The first has all metadata. Each has tensors of its own, with offsets in that part.

The library has its own reader since `gguf.GGUFReader` is not made for untrusted files (an array that claims 2**60
bytes keeps it busy for ever, and a mapped file that shrinks ends the process) and makes three arrays of each string:
4 s and 160 MB for a vocabulary of 49152 tokens, where this one takes 0.10 s and 12 MB.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.gguf.blocks import TYPES
from kvcache.support.arguments import short
from kvcache.support.regular_files import open_regular, read_part

__all__ = ["MAGIC", "MAX_HEADER_BYTES", "GgufFile", "TensorInfo"]

# Metadata and tensor lists of all parts: the vocabularies of today take up to 20 MB. It bounds the cost of hostile
# headers to half a GiB (short strings) and some seconds.
MAX_HEADER_BYTES = 64 * 2**20
MAGIC = b"GGUF"  # which files begin with
_CHUNK = 1 << 20  # bytes of the header read at a time
_LENGTH = struct.Struct("<Q").unpack_from  # of a string
_MAX_RANK = 4
_MAX_VALUES = 2**48  # of one tensor: keeps sizes in bytes inside int64
_MAX_ALIGNMENT = 1 << 20
_MAX_COUNT = 1 << 16  # entries, and tensors; large networks have some thousands
_MAX_PARTS = 512  # all are open while a checkpoint is read; a process may have 1024 files open
_MAX_KEY = 65535  # bytes of a key or of a tensor's name
_VERSIONS = (2, 3)  # 3 differs from 2 by allowing big-endian files

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class TensorInfo(NamedTuple):
    """One tensor: its type's name, its shape (rows first), its bytes [start, stop) in a file, and the file's number."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    part: int = 0


class GgufFile(Mapping[str, TensorInfo]):
    """One open file, with the other files that it was split into: a mapping from tensor names to `TensorInfo`.

    Opening reads and checks metadata and tensor list, and no data. Tensors are copied into memory, never mapped, so
    later changes of a file change no value. The files stay open until `close`, or until this object is freed.

    Raises FileNotFoundError, or CheckpointError that names the file and the fault.

    Attributes:
        path: of the (first) file.
        metadata: the entries: int, float, bool, str; lists of str; arrays of numbers and bools. A float32 has the
            value of its shortest decimal, such as 1e-5. A text that is not UTF-8 is bytes, which are an error
            only where the entry is used.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        first = _Part(self.path, MAX_HEADER_BYTES)
        self.metadata = first.metadata
        self._parts = [first]
        self._tensors = dict(first.tensors)
        count = _count_of(first.metadata, self.path)
        room = MAX_HEADER_BYTES - first.header_bytes
        for number, other in enumerate(_other_names(self.path, count), 1):
            part = _Part(other, room)
            room -= part.header_bytes
            _check_part(part, number, count)
            for name, info in part.tensors.items():
                if name in self._tensors:
                    raise CheckpointError(f"{other}: {name:.100}: expected each tensor once, got it twice")
                self._tensors[name] = info._replace(part=number)
            self._parts.append(part)
        total = first.metadata.get("split.tensors.count", len(self)) if count > 1 else len(self)
        if total != len(self):
            raise CheckpointError(f"{self.path}: split.tensors.count: expected {len(self)}, got {short(total)}")

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, buffers: list[Any], name: str, skip: int = 0) -> None:
        """Fill buffers with the bytes of a tensor, but for the first `skip`.

        Raises CheckpointError if the file has become shorter or cannot be read.
        """
        info = self[name]
        self._parts[info.part].read(buffers, info.start + skip, name)

    def close(self) -> None:
        """Close the files; metadata and the list of tensors stay."""
        for part in self._parts:
            part.close()


class _Part:
    """One file: its metadata, its tensors, and the bytes of its header, which may have at most `most`."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        try:
            self._file, self.size = open_regular(path, CheckpointError)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"path: expected a GGUF file, got none at {path}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, got {error.strerror}") from error
        header = _Header(self, most)
        num_tensors, num_entries = header.start()
        self.metadata: dict[str, Any] = header.entries(num_entries)
        self.tensors = header.tensors(num_tensors, _alignment(self.metadata, path))
        self.header_bytes = header.size

    def read(self, buffers: list[Any], offset: int, what: str) -> None:
        """Fill buffers from `offset` on. Raises CheckpointError that names `what`, the part that was to be read."""
        read_part(self._file.fd, buffers, offset, f"{self.path}: {what}")

    def close(self) -> None:
        self._file.close()


def _count_of(metadata: Mapping[str, Any], path: Path) -> int:
    """How many files this one was split into; it has to be the first."""
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if type(count) is not int or not 0 <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path}: split.count: expected a whole number up to {_MAX_PARTS}, got {short(count)}")
    if count > 1 and (type(number) is not int or number):
        raise CheckpointError(f"{path}: split.no: expected 0, that of the first file, got {short(number)}")
    return count


def _other_names(path: Path, count: int) -> list[Path]:
    """The other files beside the first one. Names are made from its name: a file does not say where to look."""
    if count < 2:
        return []
    end = f"-00001-of-{count:05d}.gguf"
    if not path.name.endswith(end):
        raise CheckpointError(f"{path}: split.count: expected a file named NAME{end}, got {short(path.name)}")
    stem = path.name.removesuffix(end)
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]


def _check_part(part: _Part, number: int, count: int) -> None:
    for key, expected in (("split.no", number), ("split.count", count)):
        found = part.metadata.get(key)
        if type(found) is not int or found != expected:
            raise CheckpointError(f"{part.path}: {key}: expected {expected}, got {short(found)}")


class _Header:
    """Reads the parts of a header one after the other, in chunks; checks every count before it acts on it."""

    def __init__(self, file: _Part, most: int) -> None:
        self._file = file
        self._most = most
        self._data = bytearray()
        self._at = 0
        self._what = "header"  # the part that is read

    @property
    def size(self) -> int:
        """Bytes that were read so far."""
        return self._at

    def start(self) -> tuple[int, int]:
        """Magic, version and counts: `(tensors, entries)`."""
        path, magic = self._file.path, self._take(4)
        if magic != MAGIC:
            raise CheckpointError(f"{path}: magic: expected GGUF, got {short(bytes(magic))}")
        version = self._take(4)
        number = int.from_bytes(version, "little")
        if number not in _VERSIONS:
            swapped = int.from_bytes(version, "big") in _VERSIONS
            found = "a big-endian file" if swapped else str(number)
            raise CheckpointError(f"{path}: version: expected 2 or 3, little-endian, got {found}")
        counts = self._u64(), self._u64()
        for count, what in zip(counts, ("tensors", "entries"), strict=True):
            if count > _MAX_COUNT:
                raise CheckpointError(f"{path}: {what}: expected at most {_MAX_COUNT}, got {count}")
        return counts

    def entries(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):  # a count beyond the file ends at the first read beyond it
            self._what = "metadata"
            key = self._name()
            if key in found:
                raise CheckpointError(f"{self._file.path}: {key:.100}: expected each key once, got it twice")
            self._what = f"{key:.100}"
            kind = self._u32()
            found[key] = self._array() if kind == _ARRAY else self._scalar(kind)
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensor list, checked against the size of the file."""
        found: dict[str, TensorInfo] = {}
        position = 0  # where the next tensor begins in the data
        for _ in range(count):
            self._what = "tensors"
            name = self._name()
            if name in found:
                raise CheckpointError(f"{self._file.path}: {name:.100}: expected each tensor once, got it twice")
            self._what = f"{name:.100}"
            info = self._tensor(name)
            if info.start != position:
                raise CheckpointError(f"{self._file.path}: {name:.100}: expected offset {position}, got {info.start}")
            position = -(-info.stop // alignment) * alignment
            found[name] = info
        first = -(-self._at // alignment) * alignment
        for name, info in found.items():
            stop = first + info.stop
            if stop > self._file.size:
                raise CheckpointError(
                    f"{self._file.path}: {name:.100}: expected bytes up to {stop}, got {self._file.size}: truncated"
                )
            found[name] = info._replace(start=first + info.start, stop=stop)
        return found

    def _tensor(self, name: str) -> TensorInfo:
        """One entry of the list; start and stop count from the start of the data."""
        path, rank = self._file.path, self._u32()
        if not 1 <= rank <= _MAX_RANK:
            raise CheckpointError(f"{path}: {name:.100}: expected 1 to {_MAX_RANK} dimensions, got {rank}")
        shape = tuple(self._u64() for _ in range(rank))[::-1]
        number = self._u32()
        if number not in TYPES:
            raise CheckpointError(f"{path}: {name:.100}: expected a known type, got type {number}")
        kind = TYPES[number]
        if math.prod(size or _MAX_VALUES + 1 for size in shape) > _MAX_VALUES:
            raise CheckpointError(f"{path}: {name:.100}: expected sizes that fit memory, got shape {short(shape)}")
        if shape[-1] % kind.values:
            raise CheckpointError(
                f"{path}: {name:.100}: expected rows of a multiple of {kind.values} values for {kind.name}, "
                f"got {shape[-1]}"
            )
        offset = self._u64()
        return TensorInfo(kind.name, shape, offset, offset + math.prod(shape) // kind.values * kind.bytes)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _BOOL:
            return self._bools(1)[0].item()
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self._file.path}: {self._what}: expected a known kind of value, got {kind}")
        value = self._numbers(kind, 1)[0]
        return float(str(value)) if value.dtype == np.float32 else value.item()

    def _array(self) -> Any:
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            return self._strings(count)
        if kind == _BOOL:
            return self._bools(count)
        if kind not in _NUMBERS:
            raise CheckpointError(
                f"{self._file.path}: {self._what}: expected an array of numbers, bools or strings, got kind {kind}"
            )
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _bools(self, count: int) -> NDArray[np.bool_]:
        stored = np.frombuffer(self._take(count), np.uint8)
        if len(stored) and stored.max() > 1:
            raise CheckpointError(f"{self._file.path}: {self._what}: expected 0 or 1, got {stored.max()}")
        return stored.astype(np.bool_)

    def _strings(self, count: int) -> list[str | bytes]:
        """Like `_text` for each, in a third of the time: vocabularies have hundreds of thousands."""
        self._need(8 * count)
        found: list[str | bytes] = []
        while len(found) < count:
            data, at, there = self._data, self._at, len(self._data)
            try:
                for _ in range(count - len(found)):
                    begin = at + 8
                    stop = begin + _LENGTH(data, at)[0]
                    if stop > there:
                        break
                    found.append(data[begin:stop].decode())
                    at = stop
            except (struct.error, UnicodeDecodeError):  # `data` ends inside of a length, or this text is bytes
                pass
            self._at = at
            if len(found) < count:
                found.append(self._text())
        return found

    def _name(self) -> str:
        """A key, or the name of a tensor."""
        found = self._text(_MAX_KEY)
        if isinstance(found, bytes):
            raise CheckpointError(f"{self._file.path}: {self._what}: expected UTF-8, got {short(found)}")
        return found

    def _text(self, most: int = MAX_HEADER_BYTES) -> str | bytes:
        """A string, as bytes if it is not UTF-8."""
        size = self._u64()
        if size > most:
            raise CheckpointError(
                f"{self._file.path}: {self._what}: expected a string of at most {most} bytes, got {size}"
            )
        stored = self._take(size)
        try:
            return stored.decode()
        except UnicodeDecodeError:
            return bytes(stored)

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, size: int) -> bytearray:
        stop = self._at + size
        if stop > len(self._data):
            self._need(size)
        taken = self._data[self._at : stop]
        self._at = stop
        return taken

    def _need(self, size: int) -> None:
        """Read on until `size` more bytes are there."""
        path, stop, have = self._file.path, self._at + size, len(self._data)
        if stop > self._file.size:
            raise CheckpointError(
                f"{path}: {self._what}: expected {size} bytes at {self._at}, got a file of {self._file.size}: truncated"
            )
        if stop > self._most:
            raise CheckpointError(f"{path}: expected a header of at most {self._most} bytes, got a longer one")
        if stop > have:
            more = bytearray(min(max(stop - have, _CHUNK), self._file.size - have, self._most - have))
            self._file.read([more], have, self._what)
            self._data += more


def _alignment(metadata: Mapping[str, Any], path: Path) -> int:
    found = metadata.get("general.alignment", 32)
    if type(found) is not int or not 1 <= found <= _MAX_ALIGNMENT or found & (found - 1):
        raise CheckpointError(f"{path}: general.alignment: expected a power of two, got {short(found)}")
    return found

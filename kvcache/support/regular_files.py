"""Open regular files, and read and write whole buffers at a position, over partial system calls.

support/descriptors.pyx owns descriptors and replaces files.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable
from typing import Any

from kvcache.errors import CheckpointError
from kvcache.support.arguments import as_path
from kvcache.support.descriptors import File, kind_of
from kvcache.support.file_calls import READ, read_some, write_some

__all__ = ["checksum", "file_version", "open_regular", "read_at", "read_part", "write_at"]

_BUFFERS = 1000  # of one system call; the system takes 1024
_BYTES = 1 << 30  # of one system call; the system takes just under 2**31


def open_regular(path: str | os.PathLike[str], error: type[Exception]) -> tuple[File, int]:
    """`(file, size)` of a regular file, opened to be read.

    Another kind of file is rejected before it is opened, since opening a device can act on it, and again afterwards by
    its descriptor, since the name may have changed.

    Args:
        error: raised, with the path and the kind of file, for what is not a regular file.

    Raises:
        TypeError: no path.
        OSError: of the file system.
    """
    path = as_path(path)
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        file = File(path, READ)
        status = os.fstat(file.fd)
        if stat.S_ISREG(status.st_mode):
            return file, status.st_size
        mode = status.st_mode
        file.close()
    raise error(f"{path}: expected a regular file, got {kind_of(mode)}")


def _views(buffers: Iterable[Any]) -> list[memoryview]:
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def _some(views: list[memoryview]) -> list[memoryview]:
    """The first of them, as many as one system call accepts."""
    room, taken = _BYTES, []
    for view in views[:_BUFFERS]:
        taken.append(view[:room])
        room -= taken[-1].nbytes
        if room <= 0:
            break
    return taken


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """The rest of them after the first `count` bytes."""
    first = 0
    while first < len(views) and count >= views[first].nbytes:
        count -= views[first].nbytes
        first += 1
    return [views[first][count:], *views[first + 1 :]] if first < len(views) else []


def write_at(fd: int, buffers: Iterable[Any], offset: int) -> int:
    """Write buffers, one after the other, from `offset` on; returns the offset after them."""
    views = _views(buffers)
    while views:
        count = write_some(fd, _some(views), offset)
        offset += count
        views = _after(views, count)
    return offset


def read_at(fd: int, buffers: Iterable[Any], offset: int) -> bool:
    """Fill writable buffers, one after the other, from `offset` on; False if the file ends before."""
    views = _views(buffers)
    while views:
        count = read_some(fd, _some(views), offset)
        if count == 0:
            return False
        offset += count
        views = _after(views, count)
    return True


def read_part(fd: int, buffers: list[Any], offset: int, what: str) -> None:
    """`read_at` of a part of a checkpoint. Raises CheckpointError that begins with `what`, the path and the part."""
    try:
        whole = read_at(fd, buffers, offset)
    except OSError as error:
        raise CheckpointError(f"{what}: expected a readable file, got {error.strerror}") from error
    if not whole:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        raise CheckpointError(f"{what}: expected {size} bytes at {offset}, got a truncated file")


def file_version(path: str | os.PathLike[str] | int) -> tuple[int, ...]:
    """Numbers that differ if a file, or an open one, was replaced or written, as far as its times tell."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def checksum(buffers: Iterable[Any]) -> int:
    """The CRC-32 of buffers, one after the other."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value

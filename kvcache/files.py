"""Bytes to and from a position of a file, whatever one system call takes; _file.pyx opens and replaces files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

__all__ = ["checksum", "read_at", "write_at"]

_BUFFERS = 1000  # of one system call; the system takes 1024
_BYTES = 1 << 30  # of one system call; the system takes just under 2**31


def _views(buffers: Iterable[Any]) -> list[memoryview]:
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def _some(views: list[memoryview]) -> list[memoryview]:
    """What one system call may take of them."""
    room, taken = _BYTES, []
    for view in views[:_BUFFERS]:
        taken.append(view[:room])
        room -= taken[-1].nbytes
        if room <= 0:
            break
    return taken


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them after the first `count` bytes."""
    first = 0
    while first < len(views) and count >= views[first].nbytes:
        count -= views[first].nbytes
        first += 1
    return [views[first][count:], *views[first + 1 :]] if first < len(views) else []


def write_at(fd: int, buffers: Iterable[Any], offset: int) -> int:
    """Write buffers, one behind the other, from `offset` on; the offset behind them."""
    views = _views(buffers)
    while views:
        count = os.pwritev(fd, _some(views), offset)
        offset += count
        views = _behind(views, count)
    return offset


def read_at(fd: int, buffers: Iterable[Any], offset: int) -> bool:
    """Fill writable buffers, one behind the other, from `offset` on; False if the file ends before."""
    views = _views(buffers)
    while views:
        count = os.preadv(fd, _some(views), offset)
        if count == 0:
            return False
        offset += count
        views = _behind(views, count)
    return True


def checksum(buffers: Iterable[Any]) -> int:
    """The CRC-32 of buffers, one behind the other."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value

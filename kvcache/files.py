"""Files that are replaced as a whole or not at all, and bytes to and from a position of one.

    with replacing(path) as fd:        a new file under a temporary name, in the same folder
        write_at(fd, buffers, 0)
    ...                                synced, renamed to `path`, the folder synced

Whenever the process or the system dies, `path` is the old file or the new one. An exception inside leaves the old
one and takes the temporary file away; only a crash can leave that behind, as `.NAME.*.tmp`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["read_at", "replacing", "write_at"]

_BUFFERS = 1000  # of one system call; the system takes 1024
_BYTES = 1 << 30  # of one system call; the system takes just under 2**31


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor to write the new content of `path` to; it takes its place when the block ends without an error.

    The new file can be read and written by its owner alone. A symbolic link stays, what it names is replaced.

    Raises:
        OSError: of the file system; `path` is the old file, or, if only the last sync of the folder failed, the new.
    """
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    fd, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


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

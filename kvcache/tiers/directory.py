"""`DirectoryTier`: values as files of a directory, bounded in bytes, the least recently used of them deleted first."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import RLock
from time import time_ns

from kvcache.core.arguments import as_bytes
from kvcache.core.copying import refuse_copies
from kvcache.core.files import read_at, write_at
from kvcache.errors import KvCacheError
from kvcache.tiers.keys import as_secret
from kvcache.tiers.protocol import Buffer
from kvcache.tiers.spaces import SPACE

__all__ = ["DirectoryTier"]

_SECRET = "secret"  # the file of a secret of the directory's own
_SHARE = 16  # what processes may write before they count the files again: a 16th of the limit each
_MOST_BYTES = 1 << 30  # of a file that is read


class DirectoryTier:
    """A directory of values, on a local disk or a shared file system. Several processes may use it at once.

    A value is written to a temporary file and renamed, so a process that is killed at any point leaves whole values,
    and at most one temporary file, which is deleted as the least recently used one. No file is forced to the disk:
    after a power failure a damaged value is a miss. A read marks the file as used.

    Args:
        path: made if it is missing, readable by its owner alone.
        max_bytes: the most bytes of all files, an int or a text such as "20GiB". While several processes write, each
            may exceed it by a 16th.
        secret: see `Tiers`; None: one that is drawn when the directory is made, and kept in it. Whoever can read the
            directory can then also write values that are accepted.

    Raises:
        TypeError, ValueError: another kind; not one byte.
        OSError: the directory cannot be made or read.

    Attributes:
        path: the directory.
        max_bytes: the limit.
        secret: see above.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | str, *, secret: bytes | None = None) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.max_bytes = as_bytes(max_bytes, "max_bytes")
        if not self.max_bytes:
            raise ValueError("max_bytes: expected at least 1, got 0")
        given = None if secret is None else as_secret(secret)
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        self.secret = self._own_secret() if given is None else given
        self._lock = RLock()
        self._number = 0
        self._bytes, self._written = self._count(), 0

    def get_many(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """See `Tier`."""
        return [self._read(self._path_of(key), SPACE) for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [os.path.isfile(self._path_of(key)) for key in keys]

    def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """See `Tier`. A value that is larger than the directory may be is not stored.

        Raises:
            OSError: of the file system; the values before the one that failed are stored.
        """
        for key, value in items:
            size = memoryview(value).nbytes
            if size <= self.max_bytes:
                self._make_room(size)
                self._write(self._path_of(key), value)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, as this process counts them."""
        return self._bytes

    def _path_of(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.path}/{name[:2]}/{name[2:]}"

    def _read(self, path: str, space: Callable[[int], Buffer] = bytearray) -> Buffer | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                return None
            value = space(status.st_size)
            whole = read_at(fd, [value], 0)
        finally:
            os.close(fd)
        with suppress(OSError):  # another process may have deleted it, or another user may own it
            os.utime(path)
        return value if whole else None

    def _write(self, path: str, value: Buffer) -> None:
        folder = os.path.dirname(path)
        with self._lock:
            self._number += 1
            temporary = f"{folder}/.{os.getpid()}-{self._number}-{secrets.token_hex(4)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            fd = os.open(temporary, flags, 0o600)
        try:
            try:
                size = write_at(fd, [value], 0)
            finally:
                os.close(fd)
            replaced = _size(path)
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        with self._lock:
            self._bytes += size - replaced
            self._written += size

    def _make_room(self, size: int) -> None:
        with self._lock:
            if self._bytes + size > self.max_bytes or self._written > self.max_bytes // _SHARE:
                self._shrink(size)

    def _shrink(self, size: int) -> None:
        """Count the files again; delete those used longest ago until `size` more bytes fit, with a 16th to spare."""
        files = sorted(self._files())
        self._bytes, self._written = sum(each[1] for each in files), 0
        if self._bytes + size <= self.max_bytes:
            return
        for _, length, path in files:
            if self._bytes + size <= self.max_bytes - self.max_bytes // _SHARE:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._bytes -= length

    def _count(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """`(when it was used last, bytes, path)` of every file of values."""
        for number in range(256):
            try:
                with os.scandir(f"{self.path}/{number:02x}") as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime_ns, status.st_size, entry.path
            except (FileNotFoundError, NotADirectoryError):
                continue

    def _own_secret(self) -> bytes:
        """The secret in the directory, which the first process draws."""
        path = f"{self.path}/{_SECRET}"
        if not os.path.exists(path):
            temporary = f"{path}.{os.getpid()}-{time_ns()}.tmp"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                try:
                    write_at(fd, [secrets.token_bytes(32)], 0)
                    os.fsync(fd)  # every value depends on it
                finally:
                    os.close(fd)
                with suppress(FileExistsError):
                    os.link(temporary, path)  # at once and whole, and never over another one
            finally:
                os.unlink(temporary)
        found = self._read(path)
        if found is None or len(found) != 32:
            raise KvCacheError(f"{path}: expected a secret of 32 bytes, got {0 if found is None else len(found)}")
        return bytes(found)

    __reduce_ex__ = refuse_copies("make another one over the same path")

    def __repr__(self) -> str:
        return f"DirectoryTier({self.path!r}, {self._bytes} of {self.max_bytes} bytes)"


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0

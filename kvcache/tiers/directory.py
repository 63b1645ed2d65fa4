"""`DirectoryTier`: values as files of a directory, bounded in bytes, the least recently used of them deleted first."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from threading import RLock
from time import monotonic, sleep

from kvcache.support.arguments import as_bytes, as_path
from kvcache.support.copies import refuse_copies
from kvcache.support.descriptors import File, kind_of
from kvcache.support.file_calls import (
    DIRECTORY,
    NOFOLLOW,
    PLACE_TAKEN,
    READ,
    make_folder,
    names_in,
    remove,
    rename,
    set_mode,
    status_in,
    touch,
)
from kvcache.support.private_folders import expect_private, is_own
from kvcache.support.regular_files import read_at, write_at
from kvcache.tiers.keys import KEY_BYTES, as_secret
from kvcache.tiers.protocol import MOST_BYTES, Buffer
from kvcache.tiers.spaces import SPACE

__all__ = ["DirectoryTier"]

logger = logging.getLogger("kvcache")

_SECRET, _SECRET_BYTES = "secret", 32  # the file of a secret of the directory's own
_WRITING, _POLL = 1.0, 0.01  # seconds that another process has to complete that file; how often it is looked at
_SHARE = 16  # what processes may write before they count the files again: a 16th of the limit each
_ROOT = os.O_RDONLY | DIRECTORY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
_OTHER = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO}  # nothing, or another kind
_OWN = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES - 2}}}|\.[0-9]+-[0-9]+-[0-9a-f]{{8}}\.tmp")  # values, unfinished ones


class DirectoryTier:
    """A directory of values, on a local disk or a shared file system. Several processes may use it at once.

    A value is written to a temporary file and renamed, so a process that is killed at any point leaves whole values,
    and at most one temporary file, which is deleted as the least recently used one. No file is forced to the disk:
    after a power failure a damaged value is a miss. A read marks the file as used. Files of other names and kinds are
    never read, counted or deleted, and links below the directory are not followed.

    Whoever can write to the directory can delete values. Without `secret` it must belong to this user, or to root, and
    nobody else may write to it. With `secret` it may belong to another user, and a group may share it: a directory of
    mode 2770 gives the group every file. One that everybody can write to is refused. On Windows modes say
    nothing about other users: `secret` must be given, and files get the access list of the directory.

    Args:
        path: made if it is missing, readable by its owner alone.
        max_bytes: the most bytes of all files, an int or a text such as "20GiB". While several processes write, each
            may exceed it by a 16th.
        secret: see `Tiers`; None: one that is drawn when the directory is made, and kept in its file `secret`. Whoever
            can read that file can write values that are accepted. If it is damaged, a new one is drawn, with a warning
            in the log: what was stored under the old one is not found again and leaves as the least recently used.

    Raises:
        TypeError, ValueError: another kind; an empty name; not one byte.
        PermissionError: the directory or its secret belongs to another user, or others may write to it; see above.
        OSError: the directory cannot be made or read.

    Attributes:
        path: the directory.
        max_bytes: the limit.
        secret: see above.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | str, *, secret: bytes | None = None) -> None:
        if not (path := as_path(path)):
            raise ValueError("path: expected a directory, got an empty name")
        self.path = os.path.abspath(path)
        self.max_bytes = as_bytes(max_bytes, "max_bytes")
        if not self.max_bytes:
            raise ValueError("max_bytes: expected at least 1, got 0")
        given = None if secret is None else as_secret(secret)
        self._shared = given is not None
        self._lock = RLock()
        self._number = 0
        with self._root(make=True) as root:
            assert root is not None
            self.secret = _own_secret(root, self.path) if given is None else given
            self._bytes, self._written = sum(size for _, size, _, _ in _files(root)), 0

    def get_many(self, keys: Sequence[bytes], most_bytes: int = MOST_BYTES) -> list[Buffer | None]:
        """See `Tier`."""
        with self._root() as root:
            return [_value(root, key, most_bytes) for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        there: set[bytes] = set()
        with self._root() as root:
            for name, group in groupby(sorted(set(keys)), _folder_of):
                with _folder(root, name) as folder:
                    there.update(key for key in group if folder is not None and _status(folder, _file_of(key)))
        return [key in there for key in keys]

    def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """See `Tier`. A value is not stored if it is larger than the directory may be, or if its place is taken by
        something that is no value, such as a folder of its name.

        Raises:
            OSError: of the file system; the values before the one that failed are stored.
        """
        with self._root(make=True) as root:
            assert root is not None
            for key, value in items:
                size = memoryview(value).nbytes
                if size <= self.max_bytes and self._make_room(root, size):
                    with _folder(root, _folder_of(key), make=True) as folder:
                        if folder is not None:
                            self._write(folder, _file_of(key), value, _mode(root) & 0o660)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, as this process counts them."""
        return self._bytes

    @contextmanager
    def _root(self, make: bool = False) -> Iterator[File | None]:
        """The directory, opened for one call, since another one may have taken its place; None if there is none."""
        if make:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        try:
            opened = File(self.path, _ROOT)
        except FileNotFoundError:
            yield None
            return
        with opened as root:
            self._check(os.fstat(root.fd))
            yield root

    def _check(self, status: os.stat_result) -> None:
        """PermissionError if others than the directory's users could put something in place of a value or a secret."""
        expected = "a directory that not everybody can write to"
        if not self._shared:
            expected = "a secret, or a directory of this user that no other can write to (such as a new one in it)"
        expect_private(status, self.path, expected, self._shared)

    def _write(self, folder: File, name: str, value: Buffer, mode: int) -> None:
        with self._lock:
            self._number += 1
            temporary = f".{os.getpid()}-{self._number}-{secrets.token_hex(4)}.tmp"
        try:
            with File(temporary, _NEW, folder) as file:
                if mode & 0o060:
                    set_mode(file, mode)
                size = write_at(file.fd, [value], 0)
            before = _status(folder, name)
            rename(temporary, name, folder)
        except BaseException as error:
            with suppress(OSError):
                remove(temporary, folder)
            if isinstance(error, PLACE_TAKEN):
                return
            raise
        with self._lock:
            self._bytes += size - (before.st_size if before else 0)
            self._written += size

    def _make_room(self, root: File, size: int) -> bool:
        """Whether `size` bytes more fit; others are deleted, if need be."""
        with self._lock:
            if self._bytes + size > self.max_bytes or self._written > self.max_bytes // _SHARE:
                self._shrink(root, size)
            return self._bytes + size <= self.max_bytes

    def _shrink(self, root: File, size: int) -> None:
        """Count the files again; delete those used longest ago until `size` more bytes fit, with a 16th to spare."""
        files = sorted(_files(root))
        self._bytes, self._written = sum(each[1] for each in files), 0
        if self._bytes + size <= self.max_bytes:
            return
        for _, length, name, file in files:
            if self._bytes + size <= self.max_bytes - self.max_bytes // _SHARE:
                break
            with suppress(PermissionError), _folder(root, name) as folder:
                if folder is not None:
                    with suppress(FileNotFoundError):
                        remove(file, folder)
                self._bytes -= length

    __reduce_ex__ = refuse_copies("make another one over the same path")

    def __repr__(self) -> str:
        return f"DirectoryTier({self.path!r}, {self._bytes} of {self.max_bytes} bytes)"


def _folder_of(key: bytes) -> str:
    return key[:1].hex()


def _file_of(key: bytes) -> str:
    return key[1:].hex()


def _mode(root: File) -> int:
    """The permissions of what is made in a directory: those of its owner and its group."""
    return stat.S_IMODE(os.fstat(root.fd).st_mode) & 0o2770 | 0o700


def _opened(name: str, flags: int, folder: File) -> File | None:
    """An open file of a folder; None if there is none of this kind, such as a link."""
    try:
        return File(name, flags, folder)
    except OSError as error:
        if error.errno not in _OTHER:
            raise
        return None


@contextmanager
def _folder(root: File | None, name: str, make: bool = False) -> Iterator[File | None]:
    """A folder of the directory; None if there is none, or something else in its place."""
    flags = _ROOT | NOFOLLOW
    folder = None if root is None else _opened(name, flags, root)
    if make and folder is None and root is not None:
        with suppress(FileExistsError):
            make_folder(name, root)
        folder = _opened(name, flags, root)
        if folder is not None and (mode := _mode(root)) & 0o070:
            set_mode(folder, mode)
    if folder is None:
        yield None
        return
    with folder:
        yield folder


def _status(folder: File, name: str) -> os.stat_result | None:
    """The status of a regular file; None if there is none."""
    try:
        status = status_in(name, folder)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _value(root: File | None, key: bytes, most: int) -> Buffer | None:
    """The bytes of a value; empty if it has more than `most`, None if there is none, or none that may be read."""
    with _folder(root, _folder_of(key)) as folder:
        if folder is None or (status := _status(folder, _file_of(key))) is None:
            return None
        if status.st_size > most:
            return b""
        with suppress(PermissionError):
            return _read(folder, _file_of(key), most)
        return None


def _read(folder: File, name: str, most: int, space: Callable[[int], Buffer] = SPACE) -> Buffer | None:
    """The bytes of a regular file; None if there is none, or if it has more than `most`."""
    file = None if _status(folder, name) is None else _opened(name, READ | NOFOLLOW, folder)
    if file is None:
        return None
    with file:
        status = os.fstat(file.fd)  # another file may have taken the name
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            return None
        value = space(status.st_size)
        whole = read_at(file.fd, [value], 0)
        with suppress(OSError):  # another user may own it
            touch(file)
    return value if whole else None


def _files(root: File) -> Iterator[tuple[int, int, str, str]]:
    """`(when it was used last, bytes, folder, name)` of every file that a tier has written, as far as they are open."""
    for name in map(_folder_of, map(bytes, zip(range(256), strict=True))):
        with suppress(PermissionError), _folder(root, name) as folder:
            if folder is not None:
                for file in filter(_OWN.fullmatch, names_in(folder)):
                    if (status := _status(folder, file)) is not None:
                        yield status.st_mtime_ns, status.st_size, name, file


def _own_secret(root: File, path: str) -> bytes:
    """The secret in a directory, which the first process draws.

    Its file is created and then written, since not all file systems have hard links: one that is too short is being
    written, or damaged if it stays so.
    """
    end = None
    while (found := _secret(root, path)) is None or len(found) != _SECRET_BYTES:
        drawn = secrets.token_bytes(_SECRET_BYTES)
        if found is None:
            with suppress(FileExistsError):
                _write_secret(root, _SECRET, drawn)
            continue
        end = end or monotonic() + _WRITING
        if monotonic() < end:
            sleep(_POLL)
            continue
        logger.warning(
            "%s/%s: expected %d bytes, got a damaged file: a new secret takes its place; values under the old one "
            "are not found again", path, _SECRET, _SECRET_BYTES,
        )
        temporary = f".{_SECRET}-{secrets.token_hex(4)}.tmp"
        _write_secret(root, temporary, drawn)
        rename(temporary, _SECRET, root)
    return found


def _secret(root: File, path: str) -> bytes | None:
    """The bytes of the secret's file, none if it is too long; None if there is none.

    Raises:
        PermissionError: it is no regular file, another user may write to it, or this one may not read it.
    """
    try:
        status = status_in(_SECRET, root)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode) and is_own(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        with suppress(PermissionError):
            return bytes(_read(root, _SECRET, _SECRET_BYTES, bytearray) or b"")
    raise PermissionError(
        f"{path}/{_SECRET}: expected a regular file that this user alone can read and write, got "
        f"{kind_of(status.st_mode)} of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"
    )


def _write_secret(root: File, name: str, secret: bytes) -> None:
    with File(name, _NEW, root) as file:
        try:
            write_at(file.fd, [secret], 0)
            os.fsync(file.fd)  # every value depends on it
        except BaseException:
            remove(name, root)
            raise

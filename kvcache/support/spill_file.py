"""The file that a spill writes to: it has no name, so that nothing stays of it when the process ends in any way."""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from contextlib import suppress

from kvcache.support.descriptors import File
from kvcache.support.file_calls import DIRECT, DIRECTORY, NOFOLLOW, UNNAMED, remove
from kvcache.support.private_folders import expect_private
from kvcache.support.regular_files import read_at, write_at

__all__ = ["bytes_on_disk", "open_spill_file"]

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW


def open_spill_file(folder: str) -> File:
    """A new file of a folder, for this user alone, without a name.

    Args:
        folder: made if it is missing, readable by its owner alone. It must belong to this user or to root, and nobody
            else may write to it, as the folder of a `DirectoryTier`.

    Raises:
        PermissionError: it belongs to another user, or others may write to it.
        OSError: of the file system.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with File(folder, os.O_RDONLY | DIRECTORY) as root:
        if os.name != "nt":  # there nobody else can open the file
            expect_private(os.fstat(root.fd), folder, "a directory of this user that no other can write to")
        if DIRECT:
            with suppress(OSError):  # file systems that lack it say so here, or at the first request
                file = _nameless(root, DIRECT)
                if _takes_requests(file):
                    return file
        return _nameless(root, 0)


def bytes_on_disk(fd: int) -> int:
    """Bytes that an open file takes on its disk; on Windows, which does not count blocks, those up to its end."""
    status = os.fstat(fd)
    return status.st_size if sys.platform == "win32" else status.st_blocks * 512


def _nameless(root: File, more: int) -> File:
    name = f".spill-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    if os.name == "nt":
        return File(name, _NEW | UNNAMED | more, root)
    if UNNAMED:
        with suppress(OSError):
            return File(".", os.O_RDWR | UNNAMED | more, root)
    file = File(name, _NEW | more, root)
    remove(name, root)
    return file


def _takes_requests(file: File) -> bool:
    """Whether a page can be written and read: what is opened as direct may still refuse it."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        write_at(file.fd, [page], 0)
        whole = read_at(file.fd, [page], 0)
    os.ftruncate(file.fd, 0)
    return whole

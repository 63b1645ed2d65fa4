"""Owned descriptors, and files that are replaced as a whole; compiled for the reason in core/locks.pxd.

    with Replacement(path) as fd:        a new file under a temporary name, in the same folder
        write_at(fd, buffers, 0)
    ...                                  synced, renamed to `path`, the folder synced

If the process or the system crashes, `path` is the old file or the new one. An exception in the block (Ctrl-C at any
moment too) leaves the old file and removes the temporary one. Only a crash leaves a temporary file, `.NAME.*.tmp`. A
writer holds a lock on its temporary file, which ends with the process: the next writer of the same name removes
the temporary files whose lock is free.
"""

cimport cython
from posix.unistd cimport close

import errno
import os
import re
import stat

from kvcache.support import file_calls

__all__ = ["File", "Replacement", "kind_of"]


def kind_of(int mode):
    """The kind of file that `st_mode` names, for messages."""
    for name, of_kind in (("a regular file", stat.S_ISREG), ("a directory", stat.S_ISDIR), ("a FIFO", stat.S_ISFIFO),
                          ("a socket", stat.S_ISSOCK), ("a symbolic link", stat.S_ISLNK),
                          ("a device", stat.S_ISCHR), ("a device", stat.S_ISBLK)):
        if of_kind(mode):
            return name
    return "another kind of file"


cdef class File:
    """A descriptor, opened and owned in one call, and closed by `close`, at the latest when this is deallocated.

    Args: as of `os.open`, with the flags of support/file_calls.pyx; a created file must be new, and can be read and
        written only by its owner. `folder`: the open folder that the path is relative to.

    Raises:
        OSError: of the file system.
    """

    cdef readonly int fd    # -1 once it is closed
    cdef readonly object path    # str, in that of its folder

    def __cinit__(self):
        self.fd = -1

    def __init__(self, path, int flags, File folder=None):
        self.path = os.fsdecode(path) if folder is None else os.path.join(folder.path, os.fsdecode(path))
        self.fd = file_calls.open_file(path, flags, folder)

    def close(self):
        """Close it; no-op the second time."""
        cdef int fd
        with cython.critical_section(self):
            fd, self.fd = self.fd, -1    # closed afterwards, even if the system reports an error
        if fd >= 0:
            os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)


cdef class Replacement:
    """A descriptor of a new file, which replaces `path` when the block ends without an error.

    Only its owner can read and write the new file. A symbolic link stays; its target is replaced. Temporary files of
    killed writers of this name are removed.

    Raises:
        FileExistsError: `path` is not a regular file; nothing has changed.
        OSError: of the file system; `path` is the old file, or, if only the last sync of the folder failed, the new.
    """

    cdef object path, temporary
    cdef File file

    def __init__(self, path):
        self.path = os.path.realpath(os.fsdecode(path))

    def __enter__(self):
        self.expect_regular()
        folder, name = os.path.split(self.path)
        sweep(folder, name)
        while self.file is None:
            self.temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
            try:
                self.file = File(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | file_calls.NOFOLLOW)
            except FileExistsError:
                continue
            except FileNotFoundError:
                raise FileNotFoundError(f"path: expected a folder that exists, got {folder}") from None
            # Another writer's `sweep` may have locked and removed it between these two calls: then the next name.
            try:
                if not (file_calls.lock(self.file.fd) and is_named(self.temporary, self.file.fd)):
                    self.discard()
                    self.file = None
            except BaseException:
                self.discard()
                raise
        return self.file.fd

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                os.fsync(self.file.fd)
                self.expect_regular()
                # The lock is held until the temporary name is gone.
                file_calls.replace(self.temporary, self.path)
        except BaseException:
            self.discard()
            raise
        if error is not None:
            self.discard()
            return
        self.file.close()
        file_calls.sync_folder(os.path.dirname(self.path))

    cdef int expect_regular(self) except -1:
        """FileExistsError if there is something at `path` that is not a regular file."""
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return 0
        if not stat.S_ISREG(mode):
            raise FileExistsError(
                errno.EEXIST, f"{self.path}: expected a regular file or none, got {kind_of(mode)}"
            )
        return 0

    cdef int discard(self) except -1:
        try:
            os.unlink(self.temporary)
        except FileNotFoundError:
            pass
        finally:
            self.file.close()
        return 0


cdef bint is_named(path, int fd) except -1:
    """Whether `path` still names the file that is open as `fd`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


cdef int sweep(folder, name) except -1:
    """Remove the temporary files of `name` whose writers are dead; those that cannot be opened stay."""
    cdef File file
    temporary = re.compile(re.escape(f".{name}.") + r"[0-9a-f]{8}\.tmp")
    try:
        found = [each for each in os.listdir(folder) if temporary.fullmatch(each)]
    except OSError:
        return 0
    for each in found:
        path = os.path.join(folder, each)
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                continue
            file = File(path, os.O_RDWR | file_calls.READ | file_calls.NOFOLLOW)
            if file_calls.lock(file.fd) == 1 and is_named(path, file.fd):
                os.unlink(path)
            file.close()
        except OSError:
            pass
    return 0

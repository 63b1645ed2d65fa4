"""Open files that nobody loses, and files that are replaced as a whole; why this is compiled, says _guard.pxd.

    with Replacement(path) as fd:        a new file under a temporary name, in the same folder
        write_at(fd, buffers, 0)
    ...                                  synced, renamed to `path`, the folder synced

Whenever the process or the system dies, `path` is the old file or the new one. An exception inside, Ctrl-C at any
moment among them, leaves the old one and takes the temporary file away; only a crash can leave that behind, as
`.NAME.*.tmp`.
"""

from posix.unistd cimport close

import os

__all__ = ["File", "Replacement"]


cdef class File:
    """A descriptor, opened and owned in one call, and closed by `close`, at the latest when this dies.

    Args: as of `os.open`; what is created can be read and written by its owner alone.

    Raises:
        OSError: of the file system.
    """

    cdef readonly int fd    # -1 once it is closed

    def __cinit__(self):
        self.fd = -1

    def __init__(self, path, int flags):
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self):
        """Close it; nothing happens the second time."""
        cdef int fd = self.fd
        if fd >= 0:
            self.fd = -1    # whatever the system says, it is closed then
            os.close(fd)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)


cdef class Replacement:
    """A descriptor to write the new content of `path` to; it takes its place when the block ends without an error.

    The new file can be read and written by its owner alone. A symbolic link stays, what it names is replaced.

    Raises:
        OSError: of the file system; `path` is the old file, or, if only the last sync of the folder failed, the new.
    """

    cdef object path, temporary
    cdef File file

    def __init__(self, path):
        self.path = os.path.realpath(path)

    def __enter__(self):
        folder, name = os.path.split(self.path)
        while self.file is None:
            self.temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
            try:
                self.file = File(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
            except FileExistsError:
                pass
        return self.file.fd

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                os.fsync(self.file.fd)
                self.file.close()
                os.replace(self.temporary, self.path)
        except BaseException:
            self.discard()
            raise
        if error is not None:
            self.discard()
            return
        folder = File(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder.fd)
        finally:
            folder.close()

    cdef int discard(self) except -1:
        try:
            self.file.close()
        finally:
            try:
                os.unlink(self.temporary)
            except FileNotFoundError:
                pass
        return 0

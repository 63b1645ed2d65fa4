"""The calls of the system for files, relative to open folders; on Windows the same by what it has.

There a folder that is open can be neither renamed nor removed, nor any folder above it, since it is opened without
that permission for others: so paths of what lies in it mean the same files until it is closed. Files are opened so that
others may rename and remove them. A file without a folder has an access list of its owner alone, one in a folder that
of its folder.
"""

from libc.errno cimport errno as last_error
from libc.stdint cimport int64_t

import errno
import os
import stat
import sys

__all__ = ["DIRECT", "DIRECTORY", "NOFOLLOW", "PLACE_TAKEN", "READ", "UNNAMED", "lock", "make_folder", "names_in",
           "open_file", "read_first", "read_some", "remove", "rename", "replace", "set_mode", "status_in",
           "sync_folder", "touch", "write_first", "write_some"]

cdef extern from "kvc_system.h" nogil:
    int64_t kvc_read_at(int fd, void *buffer, size_t n, int64_t offset)
    int64_t kvc_write_at(int fd, const void *buffer, size_t n, int64_t offset)


cdef int64_t transfer(int fd, const unsigned char[::1] view, int64_t offset, bint reads) except -1:
    """Read into a view, which is then writable, or write it; how many bytes one call of the system moved."""
    cdef int64_t count
    cdef int code
    with nogil:
        if reads:
            count = kvc_read_at(fd, <void *>&view[0], <size_t>view.shape[0], offset)
        else:
            count = kvc_write_at(fd, &view[0], <size_t>view.shape[0], offset)
    if count < 0:
        code = last_error
        raise OSError(code, os.strerror(code))
    return count


def read_first(int fd, list views, int64_t offset):
    """Fill the first of these writable views from `offset` on, or its beginning; how many bytes, 0 at the end."""
    cdef unsigned char[::1] writable = views[0]
    return transfer(fd, writable, offset, True)


def write_first(int fd, list views, int64_t offset):
    """Write the first of these views from `offset` on, or its beginning; how many bytes."""
    return transfer(fd, views[0], offset, False)


if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    # Flags of `open_file` that the C library of Windows does not have; bits that it does not use.
    NOFOLLOW, DIRECTORY, DIRECT = 1 << 24, 1 << 25, 1 << 26
    READ = os.O_RDONLY  # no file of Windows waits for a writer, and no device passes `stat.S_ISREG`
    UNNAMED = os.O_TEMPORARY  # removed when it is closed, and until then nobody else can open it
    PLACE_TAKEN = (IsADirectoryError, PermissionError)  # also by a file that somebody reads
    read_some, write_some = read_first, write_first

    _READS, _WRITES, _SHARE_ALL, _SHARE_FOLDER = 0x80000000, 0x40000000, 7, 3
    _CREATE_NEW, _OPEN_EXISTING = 1, 3
    _NO_BUFFERING, _DELETE_ON_CLOSE, _BACKUP_SEMANTICS, _OPEN_REPARSE_POINT = 1 << 29, 1 << 26, 1 << 25, 1 << 21
    _DELETES, _ACCESS_DENIED, _LOCK_VIOLATION, _IO_PENDING = 0x10000, 5, 33, 997
    _REPLACE_EXISTING, _WRITE_THROUGH = 1, 8
    _EXCLUSIVE_NOW = 3
    _OWNER_ALONE = "D:P(A;OICI;FA;;;OW)(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)"  # and the system and its administrators
    _LOCKED_AT = 1 << 30  # of the upper half of an offset: behind the end of every file

    class _Security(ctypes.Structure):
        """SECURITY_ATTRIBUTES."""

        _fields_ = [("length", wintypes.DWORD), ("descriptor", ctypes.c_void_p), ("inherits", wintypes.BOOL)]

    class _Place(ctypes.Structure):
        """OVERLAPPED."""

        _fields_ = [
            ("internal", ctypes.c_void_p), ("internal_high", ctypes.c_void_p), ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD), ("event", wintypes.HANDLE),
        ]

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _security = ctypes.WinDLL("advapi32", use_last_error=True)
    _create = _kernel.CreateFileW
    _create.restype = wintypes.HANDLE
    _create.argtypes = [wintypes.LPCWSTR, wintypes.DWORD, wintypes.DWORD, ctypes.c_void_p, wintypes.DWORD,
                        wintypes.DWORD, wintypes.HANDLE]
    _move = _kernel.MoveFileExW
    _move.argtypes = [wintypes.LPCWSTR, wintypes.LPCWSTR, wintypes.DWORD]
    _lock = _kernel.LockFileEx
    _lock.argtypes = [wintypes.HANDLE, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD, wintypes.DWORD, ctypes.c_void_p]
    _descriptor_of = _security.ConvertStringSecurityDescriptorToSecurityDescriptorW
    _descriptor_of.argtypes = [wintypes.LPCWSTR, wintypes.DWORD, ctypes.c_void_p, ctypes.c_void_p]
    _kernel.CloseHandle.argtypes = [wintypes.HANDLE]
    _kernel.LocalFree.argtypes = [ctypes.c_void_p]

    def _error(path):
        code = ctypes.get_last_error()
        error = ctypes.WinError(code)
        return type(error)(error.errno, error.strerror, path, code)

    def _path(name, folder):
        path = os.fsdecode(name)
        return path if folder is None else os.path.join(folder.path, path)

    def _handle(path, flags, is_private):
        """CreateFileW with the flags of `os.open`; None: see the last error."""
        access = {os.O_RDONLY: _READS, os.O_WRONLY: _WRITES, os.O_RDWR: _READS | _WRITES}[flags & 3]
        sharing, more = _SHARE_ALL, 0
        if flags & DIRECTORY:
            sharing, more = _SHARE_FOLDER, _BACKUP_SEMANTICS
        if flags & UNNAMED:
            access, sharing, more = access | _DELETES, 0, more | _DELETE_ON_CLOSE
        more |= _NO_BUFFERING * bool(flags & DIRECT) | _OPEN_REPARSE_POINT * bool(flags & NOFOLLOW)
        how = _CREATE_NEW if flags & os.O_CREAT else _OPEN_EXISTING
        descriptor = ctypes.c_void_p()
        if is_private and not _descriptor_of(_OWNER_ALONE, 1, ctypes.byref(descriptor), None):
            raise _error(path)
        try:
            security = _Security(ctypes.sizeof(_Security), descriptor, False)
            found = _create(path, access, sharing, ctypes.byref(security) if is_private else None, how, more, None)
            code = ctypes.get_last_error()
        finally:
            _kernel.LocalFree(descriptor)
        ctypes.set_last_error(code)
        return None if found in (None, ctypes.c_void_p(-1).value) else int(found)

    def open_file(name, flags, folder):
        """A descriptor. A file that is created must be new (O_EXCL)."""
        path = _path(name, folder)
        handle = _handle(path, flags, folder is None and bool(flags & os.O_CREAT))
        if handle is None:
            if ctypes.get_last_error() == _ACCESS_DENIED and not flags & DIRECTORY and os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise _error(path)
        try:
            fd = msvcrt.open_osfhandle(handle, flags & 3 | os.O_BINARY | os.O_NOINHERIT)
        except BaseException:
            _kernel.CloseHandle(handle)
            raise
        try:
            status = os.fstat(fd)
            if flags & NOFOLLOW and status.st_file_attributes & stat.FILE_ATTRIBUTE_REPARSE_POINT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if flags & DIRECTORY and not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def status_in(name, folder):
        """The status of what is there, links included."""
        return os.stat(_path(name, folder), follow_symlinks=False)

    def rename(old, new, folder):
        """Rename a file of a folder, over another one if there is one."""
        path = _path(new, folder)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not _move(_path(old, folder), path, _REPLACE_EXISTING):
            raise _error(path)

    def remove(name, folder):
        """Remove a file of a folder."""
        os.unlink(_path(name, folder))

    def make_folder(name, folder):
        """Make a folder in a folder."""
        os.mkdir(_path(name, folder))

    def names_in(folder):
        """The names in a folder."""
        return os.listdir(folder.path)

    def touch(file):
        """Set the times of a file to now."""
        os.utime(file.path)

    def set_mode(file, mode):
        """Nothing: what is made in a folder has the access list of the folder."""

    def replace(temporary, path):
        """Rename a file, over another one if there is one; on return the new name is on the disk."""
        if not _move(temporary, path, _REPLACE_EXISTING | _WRITE_THROUGH):
            raise _error(path)

    def sync_folder(path):
        """Nothing: `replace` waited for the disk."""

    def lock(fd):
        """Lock a file without waiting: 1 on success, 0 if another process has it."""
        place = _Place(offset_high=_LOCKED_AT)
        if _lock(msvcrt.get_osfhandle(fd), _EXCLUSIVE_NOW, 0, 1, 0, ctypes.byref(place)):
            return 1
        if ctypes.get_last_error() in (_LOCK_VIOLATION, _IO_PENDING):
            return 0
        raise ctypes.WinError(ctypes.get_last_error())

else:
    import fcntl

    NOFOLLOW, DIRECTORY = os.O_NOFOLLOW, os.O_DIRECTORY
    DIRECT = getattr(os, "O_DIRECT", 0)  # requests bypass the page cache, whose memory no limit counts
    UNNAMED = getattr(os, "O_TMPFILE", 0)
    # Opening a device can act on it, and without O_NONBLOCK a FIFO would wait for a writer.
    READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    PLACE_TAKEN = (IsADirectoryError,)
    _NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

    def read_some(fd, views, offset):
        """Fill writable views from `offset` on, as far as one call does; how many bytes, 0 at the end of the file."""
        return os.preadv(fd, views, offset)

    def write_some(fd, views, offset):
        """Write views from `offset` on, as far as one call does; how many bytes."""
        return os.pwritev(fd, views, offset)

    def open_file(name, flags, folder):
        """A descriptor. Only its owner can read and write a file that is created."""
        return os.open(name, flags | os.O_CLOEXEC, 0o600, dir_fd=None if folder is None else folder.fd)

    def status_in(name, folder):
        """The status of what is there, links included."""
        return os.stat(name, dir_fd=folder.fd, follow_symlinks=False)

    def rename(old, new, folder):
        """Rename a file of a folder, over another one if there is one."""
        os.rename(old, new, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)

    def remove(name, folder):
        """Remove a file of a folder."""
        os.unlink(name, dir_fd=folder.fd)

    def make_folder(name, folder):
        """Make a folder in a folder, for its owner alone."""
        os.mkdir(name, 0o700, dir_fd=folder.fd)

    def names_in(folder):
        """The names in a folder."""
        return os.listdir(folder.fd)

    def touch(file):
        """Set the times of a file to now."""
        os.utime(file.fd)

    def set_mode(file, mode):
        """Set the permissions of a file or folder."""
        os.fchmod(file.fd, mode)

    def replace(temporary, path):
        """Rename a file, over another one if there is one; `sync_folder` brings the new name to the disk."""
        os.replace(temporary, path)

    def sync_folder(path):
        """Bring the names of a folder to the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(fd):
        """Lock a file without waiting: 1 on success, 0 if another process has it, 2 if the file system has no locks."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return 2
        return 1

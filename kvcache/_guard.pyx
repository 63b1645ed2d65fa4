"""Locks that mend what an interrupt has torn, and notes that are left by what dies; explained in _guard.pxd."""

cimport cython

from weakref import WeakMethod

__all__ = ["MendingLock", "Parting"]


cdef bint interrupts(error) except -1:
    """Whether an exception is, or came while one was handled that is, no `Exception`: Ctrl-C, an exit."""
    while error is not None:
        if not isinstance(error, Exception):
            return True
        error = error.__context__
    return False


cdef class MendingLock:
    """A reentrant lock; when an interrupt leaves its block, `mend()` is called before anybody else gets in.

    An `Exception` is no interrupt: whoever raises it has put things right. `mend` is a bound method, whose object the
    lock does not keep alive; it must be good to call at any time, any number of times, with the lock taken. Where it
    fails itself (memory, a second interrupt), the next one who takes the lock calls it first.
    """

    def __init__(self, lock, mend):
        self.lock, self.mend = lock, WeakMethod(mend)

    cdef int make_good(self) except -1:
        self.torn = False    # `mend` may take the lock
        try:
            mend = self.mend()
            if mend is not None:
                mend()
        except BaseException:
            self.torn = True
            raise
        return 0

    def __enter__(self):
        self.lock.acquire()
        if self.torn:
            try:
                self.make_good()
            except BaseException:
                self.lock.release()
                raise

    def __exit__(self, kind, error, trace):
        try:
            if error is not None and interrupts(error):
                try:
                    self.make_good()
                except Exception:
                    pass    # The interrupt goes on its way; the next one in mends.
        finally:
            self.lock.release()


@cython.no_gc_clear
cdef class Parting:
    """Appends `key` to the deque `notes` when it dies: a last word that neither collection nor interrupts cut short."""

    def __init__(self, notes, key):
        self.notes, self.key = notes, key

    def __dealloc__(self):
        if self.notes is not None:
            self.notes.append(self.key)

"""Turns, which outlast calls; explained in engine/turns.pxd."""

cimport cython
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_get_thread_ident,
    PyThread_release_lock,
)

from kvcache.core.locks cimport MendingLock, acquire, innermost

from kvcache.errors import InvalidOperationError

__all__ = ["CallInTurn", "Turn", "Turns"]


cdef class Turns:
    """One turn at a time over a state with a version, for what lasts longer than a call.

    A stream has its turn from its first token to its last. A turn may be used and given back on any thread; one that
    is dropped is given back when it dies.
    """

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no memory for a lock")

    def __dealloc__(self):
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    def take(self, long long version):
        """The turn, as soon as it is free.

        A thread that has a turn out would wait for itself, so that raises. But if another call has changed the state
        since (its version is `version` now, and the turn has left another), the old turn is given back first.

        Raises:
            InvalidOperationError: this thread has a turn out, and has not been overtaken; or it would have to wait and
                holds a lock.
        """
        cdef Turn turn = Turn.__new__(Turn)
        cdef Turn other
        if self.thread == PyThread_get_thread_ident():
            other = <Turn>self.turn
            if other.version == -1 or other.version == version:
                raise InvalidOperationError("expected no open stream of this thread on this engine, got one")
            other.give_back()
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            if innermost() != NULL:    # the stream that has the turn may need what this thread holds
                raise InvalidOperationError("expected no other call of this thread to be running, got one")
            acquire(self.lock, &self.thread)
        self.thread = PyThread_get_thread_ident()
        turn.turns, turn.version, self.turn = self, -1, <void *>turn
        return turn

    cdef int give_back_(self) except -1:
        self.turn, self.thread = NULL, 0
        PyThread_release_lock(self.lock)
        return 0


@cython.no_gc_clear
cdef class Turn:
    """The right to go on, from `Turns.take` until `give_back`, at the latest when it dies.

    Attributes:
        version: of the state as its owner has left it; -1 before the first `leave`.
    """

    def go_on(self, long long version):
        """This thread takes the next step; `version` is the one that the state has now.

        Raises:
            InvalidOperationError: it is not the one that this turn has left.
        """
        if version != self.version:
            raise InvalidOperationError("another call has changed the sequence that this stream continues")
        if self.turns is not None:
            self.turns.thread = PyThread_get_thread_ident()

    def leave(self, long long version):
        """A step is done, and the state has this version."""
        self.version = version

    def give_back(self):
        """The next one may come; nothing happens the second time."""
        cdef Turns turns = self.turns
        if turns is not None:
            self.turns = None
            turns.give_back_()

    def __dealloc__(self):
        if self.turns is not None:
            self.turns.give_back_()


cdef class CallInTurn:
    """A context manager for one call that changes the state: inside, no turn of another thread is out.

    A turn of the same thread is no obstacle: its owner notices at its next step that the version is another.

    Args:
        turns: see there.
        lock: held inside.
    """

    def __init__(self, Turns turns not None, MendingLock lock not None):
        self.turns, self.lock = turns, lock

    def __enter__(self):
        cdef Turn turn = None
        if self.turns.thread != PyThread_get_thread_ident():
            turn = self.turns.take(-1)
        self.lock.__enter__()    # if it raises, the turn is given back as `turn` dies
        self.turn = turn

    def __exit__(self, kind, error, trace):
        cdef Turn turn = self.turn
        self.turn = None
        try:
            self.lock.__exit__(kind, error, trace)
        finally:
            if turn is not None:
                turn.give_back()

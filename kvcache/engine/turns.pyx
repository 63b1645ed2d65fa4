"""Turns: exclusive use of an engine for longer than a call. See engine/turns.pxd."""

cimport cython
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_get_thread_ident,
    PyThread_release_lock,
)

from kvcache.core.locks cimport MendingLock, acquire, innermost

from kvcache.errors import InvalidOperationError

__all__ = ["CallInTurn", "Turn", "Turns"]


cdef class Turns:
    """Hands out one turn at a time over a state with a version.

    A stream has a turn from its first token to its last. A turn may be used and given back on any thread; a dropped
    turn is given back when it is freed.
    """

    def __cinit__(self):
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no memory for a lock")

    def __dealloc__(self):
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    def take(self, long long version):
        """Wait until the turn is free, and take it.

        A thread that has the turn would wait for itself, so this raises. But if another call has since changed the
        state (`version`, its current version, differs from the turn's), the old turn is given back first.

        Raises:
            InvalidOperationError: this thread has the turn, and its version is current; or the thread would have to
                wait while it holds a lock.
        """
        cdef Turn turn = Turn.__new__(Turn)
        cdef unsigned long me = PyThread_get_thread_ident(), taker
        if self.has_thread(me) and not self.give_back_stale(me, version):
            raise InvalidOperationError("expected no open stream of this thread on this engine, got one")
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            if innermost() != NULL:    # the stream that has the turn may need a lock of this thread
                raise InvalidOperationError("expected no other call of this thread to be running, got one")
            acquire(self.lock, &taker)
        turn.turns, turn.version, turn.number = self, -1, self.begin(me)
        return turn

    @cython.critical_section
    cdef bint has_thread(self, unsigned long thread) noexcept:
        return self.thread == thread

    @cython.critical_section
    cdef bint give_back_stale(self, unsigned long thread, long long version) noexcept:
        """Give back the turn of this thread if the state has changed; False: it has not."""
        if self.thread == thread:
            if self.version == -1 or self.version == version:
                return False
            self.end()
        return True

    @cython.critical_section
    cdef long long begin(self, unsigned long thread) noexcept:
        self.last += 1
        self.turn, self.thread, self.version = self.last, thread, -1
        return self.last

    @cython.critical_section
    cdef void go_on(self, long long turn, unsigned long thread) noexcept:
        if self.turn == turn:
            self.thread = thread

    @cython.critical_section
    cdef void leave(self, long long turn, long long version) noexcept:
        if self.turn == turn:
            self.version = version

    @cython.critical_section
    cdef void give_back(self, long long turn) noexcept:
        if self.turn == turn:
            self.end()

    cdef void end(self) noexcept:
        self.turn = self.thread = 0
        PyThread_release_lock(self.lock)


@cython.no_gc_clear
cdef class Turn:
    """Exclusive use of the state, from `Turns.take` until `give_back` or until the object is freed.

    Attributes:
        version: the version of the state at the last `leave`; -1 before the first one.
    """

    def go_on(self, long long version):
        """Begin a step on this thread; `version` is the current version of the state.

        Raises:
            InvalidOperationError: it differs from the version at the last `leave`.
        """
        if version != self.version:
            raise InvalidOperationError("another call has changed the sequence that this stream continues")
        if self.turns is not None:
            self.turns.go_on(self.number, PyThread_get_thread_ident())

    def leave(self, long long version):
        """End a step and record the version of the state."""
        self.version = version
        if self.turns is not None:
            self.turns.leave(self.number, version)

    def give_back(self):
        """Free the turn for the next one. The second call does nothing."""
        if self.turns is not None:
            self.turns.give_back(self.number)

    def __dealloc__(self):
        if self.turns is not None:
            self.turns.give_back(self.number)


cdef class CallInTurn:
    """A context manager for one call that changes the state: inside, no other thread has a turn.

    If this thread has a turn, the call runs all the same; the turn's next step finds another version and raises.

    Args:
        turns: the turns over the state.
        lock: held inside.
    """

    def __init__(self, Turns turns not None, MendingLock lock not None):
        self.turns, self.lock = turns, lock

    def __enter__(self):
        cdef Turn turn = None
        if not self.turns.has_thread(PyThread_get_thread_ident()):
            turn = self.turns.take(-1)
        self.lock.__enter__()    # if it raises, `turn` is freed and so given back
        self.turn = turn

    def __exit__(self, kind, error, trace):
        cdef Turn turn = self.turn
        self.turn = None
        try:
            self.lock.__exit__(kind, error, trace)
        finally:
            if turn is not None:
                turn.give_back()

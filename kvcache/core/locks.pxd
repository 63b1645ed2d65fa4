"""Locks that one thread holds once, and what stays right when Python code runs between two lines.

Python runs the caller's code at places that no source line shows: signal handlers between any two instructions,
finalisers and weakref callbacks wherever an object is made or dropped, `__array__`, `__index__`, `__eq__` and
`__hash__` where a value is converted or compared. Such code may call the object that is at work, on the same thread:

    conversions      run before the lock is taken; then pointers are taken; then no Python code runs until the end
    a second call    of the thread that is inside is refused: InvalidOperationError, and nothing has changed
    a wait           is refused where it could last for ever: a thread that holds a lock waits for those of a lower
                     level alone, and on one level for those made later (`CallLock`)
    a release        is never refused: inside another call it is queued, and done when that call leaves (`when_free`)
    an exception     that leaves a call, whatever raised it, is followed by `mend`, which restores what was torn; where
                     `mend` fails too, it runs again before anything else happens under the lock

What must not be lost is done in one compiled call, which no handler interrupts: taking and leaving a lock. An object
whose changes all are such calls needs no `mend`, and has a `CallLock` (prefix/index.pxd).
"""

from cpython.pythread cimport PyThread_type_lock

# Waits for a lock and notes this thread as its owner, both at once; signal handlers run while it waits.
cdef int acquire(PyThread_type_lock lock, unsigned long *owner) except -1
cdef void *innermost() noexcept nogil    # the `CallLock` that this thread took last and holds; NULL: it holds none


cdef class CallLock:
    cdef PyThread_type_lock lock
    cdef unsigned long owner    # the thread that is inside; 0: none
    cdef readonly int level          # of what it guards: an engine's is above that of its caches
    cdef readonly long long order    # of creation
    cdef void *outer                 # the lock that its owner took before and still holds; NULL: none
    cdef object dues            # a deque of functions: releases that wait until the thread that is inside leaves
    cdef list torn              # the `MendingLock`s on this one whose objects have to be mended

    cdef bint take(self, bint wait) except -1    # False: it is not to be had; InvalidOperationError: never
    cdef bint comes_before(self, CallLock other)
    cdef int enter(self) except -1      # or InvalidOperationError; mends what is torn
    cdef int settle(self) except -1     # does the releases that are due
    cdef int leave(self) except -1      # the same, and gives the lock back
    cdef int make_good(self) except -1  # mends what is torn
    cdef object attempt(self, object due)    # does a release; the exception that it raised, or None
    cdef bint enter_to_release(self, object release, bint wait) except -1    # False: it is due
    cdef int run_to_release(self, object release, bint wait) except -1


cdef class MendingLock:
    cdef readonly CallLock core    # several objects may share one
    cdef object mend       # a weak bound method: makes all that the lock guards agree again

    cdef int tear(self) except -1         # an exception has left: `mend` must run
    cdef int make_good(self) except -1    # runs it

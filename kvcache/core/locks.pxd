"""Locks that a thread can take once, and how an object stays consistent when Python code runs in the middle of a call.

Python runs the caller's code at places that no source line shows: signal handlers between any two instructions,
finalisers and weakref callbacks wherever an object is made or dropped, `__array__`, `__index__`, `__eq__` and
`__hash__` where a value is converted or compared. Such code may call the object whose call is running, on the same
thread:

    conversions      run before the lock is taken; then pointers are taken; then no Python code runs until the end
    a second call    of the thread that holds the lock raises InvalidOperationError; nothing has changed
    a wait           that could last for ever raises InvalidOperationError: a thread that holds a lock may wait for
                     locks of a lower level and, on its own level, for locks made later (`CallLock`)
    a release        never raises for that reason: during another call, of its object or of one on a lower level, it is
                     queued, and runs when that call ends (`when_free`)
    an exception     that ends a call is followed by `mend`, which restores a consistent state; if `mend` fails, it runs
                     again before the next call

Taking and leaving a lock are single compiled calls, which no signal handler can divide. An object whose changes all are
such calls needs no `mend`, and has a `CallLock` (prefix/index/prefix_index.pyx).
"""

from cpython.pythread cimport PyThread_type_lock

# Wait for a lock and record this thread as its owner, atomically; signal handlers run while it waits.
cdef int acquire(PyThread_type_lock lock, unsigned long *owner) except -1
cdef void *innermost() noexcept nogil    # the `CallLock` that this thread took last of those it holds, or NULL


cdef class CallLock:
    cdef PyThread_type_lock lock
    cdef unsigned long owner    # the thread that holds it; 0: none
    cdef unsigned long meetings      # of a thread that leaves and one that has queued a release
    cdef readonly int level          # an engine's is above that of its caches
    cdef readonly long long order    # of creation
    cdef readonly long long calls    # how often it was taken: the number of the call that has it
    cdef void *outer                 # the lock that its owner took before this one and still holds, or NULL
    cdef object dues            # a deque of functions: releases to run when the current call ends
    cdef object behind          # a deque of `CallLock`s of higher levels: their releases wait for the end of this call
    cdef list torn              # the `MendingLock`s on this one whose `mend` must run

    cdef bint is_inside(self) noexcept           # whether this thread holds it
    cdef bint take(self, bint wait) except -1    # False: another has it; InvalidOperationError: must not wait
    cdef bint comes_before(self, CallLock other)
    cdef int enter(self) except -1      # or InvalidOperationError; mends and runs the due releases first
    cdef Py_ssize_t run_dues(self) except -1    # run the releases that are due; how many cannot run now
    cdef int leave(self) except -1      # the same, then release the lock, then `settle` those behind it
    cdef int settle(self) except -1     # run the releases that are due, unless another call does when it ends
    cdef CallLock outermost_below(self)    # the lock of a lower level that this thread took first of those it holds
    cdef int make_good(self) except -1  # run `mend` of all in `torn`
    cdef object attempt(self, object due)    # run a release; the exception that it raised, or None
    cdef bint enter_to_release(self, object release, bint wait) except -1    # False: it is queued
    cdef int run_to_release(self, object release, bint wait) except -1


cdef class MendingLock:
    cdef readonly CallLock core    # several objects may share one
    cdef object mend       # a weak bound method that restores a consistent state

    cdef int tear(self) except -1         # an exception has ended a call: `mend` must run
    cdef int make_good(self) except -1    # run it

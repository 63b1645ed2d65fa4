"""Whose turn it is, for what lasts longer than a call: a stream of tokens has its engine from the first to the last.

A turn is taken, waited for and given back like a lock, but by an object and not by a thread: it may be used on any
thread, and dies with whoever has it. While it is out, calls of other threads wait (`CallInTurn`).
"""

from cpython.pythread cimport PyThread_type_lock

from kvcache.core.locks cimport MendingLock


cdef class Turns:
    cdef PyThread_type_lock lock
    cdef unsigned long thread    # that took the turn, or used it last; 0: nobody has it
    cdef void *turn              # the `Turn` that is out, not counted as a reference: it says when it dies

    cdef int give_back_(self) except -1


cdef class Turn:
    cdef Turns turns             # None: given back
    cdef readonly long long version    # of what its owner has left; -1: nothing yet


cdef class CallInTurn:
    cdef Turns turns
    cdef MendingLock lock
    cdef Turn turn               # of the call that is inside

"""Turns: exclusive use of an engine for longer than a call, as a stream needs it from its first token to its last.

A turn is taken, waited for and given back like a lock. It belongs to an object instead of a thread: it may be used on
any thread, and is given back at the latest when its object is freed. Meanwhile calls of other threads wait
(`CallInTurn`).
"""

from cpython.pythread cimport PyThread_type_lock

from kvcache.core.locks cimport MendingLock


cdef class Turns:
    cdef PyThread_type_lock lock
    cdef unsigned long thread    # the thread that took the turn or used it last; 0: the turn is free
    cdef void *turn              # the `Turn` in use, a borrowed reference: its __dealloc__ resets this

    cdef int give_back_(self) except -1


cdef class Turn:
    cdef Turns turns             # None: given back
    cdef readonly long long version    # of the state after the last `leave`; -1: none yet


cdef class CallInTurn:
    cdef Turns turns
    cdef MendingLock lock
    cdef Turn turn               # of the current call; None: it runs inside the turn of a stream of its thread

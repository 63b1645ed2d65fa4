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
    cdef long long turn          # the number of the turn in use; 0: it is free
    cdef long long last          # the number of the last one
    cdef long long version       # of the state after the last `leave` of the turn in use; -1: none yet

    # Each of these is one step for other threads; of a turn that was given back they do nothing.
    cdef bint has_thread(self, unsigned long thread) noexcept
    cdef bint give_back_stale(self, unsigned long thread, long long version) noexcept
    cdef long long begin(self, unsigned long thread) noexcept
    cdef void go_on(self, long long turn, unsigned long thread) noexcept
    cdef void leave(self, long long turn, long long version) noexcept
    cdef void give_back(self, long long turn) noexcept
    cdef void end(self) noexcept


cdef class Turn:
    cdef Turns turns
    cdef long long number
    cdef readonly long long version    # of the state after the last `leave`; -1: none yet


cdef class CallInTurn:
    cdef Turns turns
    cdef MendingLock lock
    cdef Turn turn               # of the current call; None: it runs inside the turn of a stream of its thread

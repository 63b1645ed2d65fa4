"""What stays right when Python is interrupted between two lines.

Ctrl-C becomes an exception between any two instructions of Python code, never inside a call of compiled code. So
what must not be lost is done here, in one call: taking and leaving a lock, and the note of an object that died. Files
are opened and replaced so in _file.pyx; and wherever several things must change together, the last step is one call
that changes them all, or one assignment, and what was computed before it is nobody's.
"""


cdef class MendingLock:
    cdef object lock       # a reentrant lock
    cdef object mend       # a weak bound method: makes all that the lock guards agree again
    cdef readonly bint torn    # an interrupt has struck, and nothing has mended it yet

    cdef int make_good(self) except -1


cdef class Parting:
    cdef object notes      # a deque
    cdef object key        # what is appended to it when this dies

"""Memory of the system, mapped at once, zero and untouched until it is first written."""


cdef class MappedMemory:
    cdef unsigned char *bytes
    cdef readonly size_t nbytes
    cdef size_t mapped      # and what lies behind

    # Let the system take back the whole pages of bytes `start` to `stop`, which nobody reads any more.
    cdef void give_back(self, size_t start, size_t stop) noexcept nogil

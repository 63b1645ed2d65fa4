"""MappedMemory: bytes of the system, unmapped with the last object that refers to them; see support/mapped.pxd."""

from kvcache.errors import OutOfMemoryError

__all__ = ["MappedMemory"]

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void *addr, size_t length)
    int madvise(void *addr, size_t length, int advice)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MADV_HUGEPAGE, MADV_DONTNEED
    void *MAP_FAILED

cdef enum:
    LARGEST_PAGE = 65536    # of the systems that this runs on: a multiple of their page sizes


cdef class MappedMemory:
    """`nbytes` bytes, zero; huge pages where the system has them.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __cinit__(self, nbytes):
        cdef void *bytes = MAP_FAILED
        if nbytes < 1 << 62:
            self.nbytes = max(nbytes, 1)    # zero bytes cannot be mapped
            bytes = mmap(NULL, self.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if bytes == MAP_FAILED:
            raise OutOfMemoryError(nbytes, 0, "bytes")
        madvise(bytes, self.nbytes, MADV_HUGEPAGE)
        self.bytes = <unsigned char *>bytes

    def __dealloc__(self):
        if self.bytes != NULL:
            munmap(self.bytes, self.nbytes)

    cdef void give_back(self, size_t start, size_t stop) noexcept nogil:
        cdef size_t base = <size_t>self.bytes
        cdef size_t first = (base + start + LARGEST_PAGE - 1) // LARGEST_PAGE * LARGEST_PAGE
        cdef size_t last = (base + stop) // LARGEST_PAGE * LARGEST_PAGE
        if first < last:
            madvise(<void *>first, last - first, MADV_DONTNEED)

"""MappedMemory: bytes of the system, unmapped with the last object that refers to them; see support/mapped.pxd."""

from kvcache.errors import OutOfMemoryError

__all__ = ["MappedMemory"]

cdef extern from * nogil:
    """
    #include <sys/mman.h>
    #ifndef MADV_HUGEPAGE /* of Linux alone */
    #define MADV_HUGEPAGE MADV_NORMAL
    #define MADV_NOHUGEPAGE MADV_NORMAL
    #endif
    """
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void *addr, size_t length)
    int mprotect(void *addr, size_t length, int prot)
    int madvise(void *addr, size_t length, int advice)
    int PROT_NONE, PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
    int MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTNEED
    void *MAP_FAILED

cdef enum:
    LARGEST_PAGE = 65536    # of the systems that this runs on: a multiple of their page sizes
    HUGE_PAGE = 1 << 21


cdef void *_map(size_t size, int prot) noexcept nogil:
    return mmap(NULL, size, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)


cdef void *_map_aligned(size_t size) noexcept nogil:
    """`size` bytes, a multiple of LARGEST_PAGE, from a huge page on; MAP_FAILED if the system refuses them.

    Kernels before 6.7 do not align by themselves. A page that nobody may read stays behind them: so the system merges
    them with no other mapping, and its count of huge pages is theirs.
    """
    cdef size_t whole = size + HUGE_PAGE + LARGEST_PAGE, start, first
    cdef void *bytes = _map(whole, PROT_NONE)
    if bytes == MAP_FAILED:
        return bytes
    start = <size_t>bytes
    first = (start + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    if first > start:
        munmap(bytes, first - start)
    if start + whole > first + size + LARGEST_PAGE:
        munmap(<void *>(first + size + LARGEST_PAGE), start + whole - (first + size + LARGEST_PAGE))
    if mprotect(<void *>first, size, PROT_READ | PROT_WRITE):
        munmap(<void *>first, size + LARGEST_PAGE)
        return MAP_FAILED
    return <void *>first


cdef class MappedMemory:
    """`nbytes` bytes, zero; on huge pages where the system has them.

    Args:
        in_parts: whether parts are in use at a time, of more than the system may have: without huge pages.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __cinit__(self, nbytes, bint in_parts=False):
        cdef void *bytes = MAP_FAILED
        if in_parts and nbytes < 1 << 62:
            self.mapped = self.nbytes = max(nbytes, 1)
            bytes = mmap(NULL, self.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        elif nbytes < 1 << 62:
            self.nbytes = max(nbytes, 1)    # zero bytes cannot be mapped
            if self.nbytes >= HUGE_PAGE:
                self.mapped = (self.nbytes + LARGEST_PAGE - 1) // LARGEST_PAGE * LARGEST_PAGE
                bytes = _map_aligned(self.mapped)
                self.mapped += LARGEST_PAGE
            else:
                self.mapped = self.nbytes
                bytes = _map(self.nbytes, PROT_READ | PROT_WRITE)
        if bytes == MAP_FAILED:
            raise OutOfMemoryError(nbytes, 0, "bytes")
        madvise(bytes, self.nbytes, MADV_NOHUGEPAGE if in_parts else MADV_HUGEPAGE)
        self.bytes = <unsigned char *>bytes

    def __dealloc__(self):
        if self.bytes != NULL:
            munmap(self.bytes, self.mapped)

    cdef void give_back(self, size_t start, size_t stop) noexcept nogil:
        cdef size_t base = <size_t>self.bytes
        cdef size_t first = (base + start + LARGEST_PAGE - 1) // LARGEST_PAGE * LARGEST_PAGE
        cdef size_t last = (base + stop) // LARGEST_PAGE * LARGEST_PAGE
        if first < last:
            madvise(<void *>first, last - first, MADV_DONTNEED)

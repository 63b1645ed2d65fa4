"""MappedMemory: bytes of the system, unmapped with the last object that refers to them; see support/mapped.pxd."""

from libc.stdint cimport uint64_t

from kvcache.errors import OutOfMemoryError

__all__ = ["MappedMemory", "physical_memory"]

cdef extern from "kvc_system.h" nogil:
    enum: KVC_LARGEST_PAGE
    unsigned char *kvc_map(size_t nbytes, bint in_parts, size_t *mapped)
    void kvc_unmap(void *bytes, size_t mapped)
    void kvc_give_back(void *bytes, size_t n)
    void kvc_machine_memory(uint64_t *total, uint64_t *available)


def physical_memory():
    """`(total, available)`, bytes: the memory of the machine, and how much of it is free, as far as the system tells.

    Linux tells the second number elsewhere (`support/machine_memory.py`); here it is the first one again.
    """
    cdef uint64_t total, available
    kvc_machine_memory(&total, &available)
    return total, available


cdef class MappedMemory:
    """`nbytes` bytes, zero; on huge pages where the system has them.

    Args:
        in_parts: whether parts are in use at a time, of more than the system may have: without huge pages.

    Raises:
        OutOfMemoryError: the system refuses the memory (in bytes).
    """

    def __cinit__(self, nbytes, bint in_parts=False):
        if nbytes < 1 << 62:
            self.nbytes = max(nbytes, 1)    # zero bytes cannot be mapped
            self.bytes = kvc_map(self.nbytes, in_parts, &self.mapped)
        if self.bytes == NULL:
            raise OutOfMemoryError(nbytes, 0, "bytes")

    def __dealloc__(self):
        if self.bytes != NULL:
            kvc_unmap(self.bytes, self.mapped)

    cdef void give_back(self, size_t start, size_t stop) noexcept nogil:
        cdef size_t base = <size_t>self.bytes
        cdef size_t first = (base + start + KVC_LARGEST_PAGE - 1) // KVC_LARGEST_PAGE * KVC_LARGEST_PAGE
        cdef size_t last = (base + stop) // KVC_LARGEST_PAGE * KVC_LARGEST_PAGE
        if first < last:
            kvc_give_back(<void *>first, last - first)

"""Memory of results and of scratch, which later calls take again when it is free.

Memory that comes from the system costs a page fault for each 4 KiB when it is first written, and `malloc` may give
large pieces back to the system as soon as they are free: then each layer of a forward pass pays for its arrays again.

So large pieces, of 128 KiB and more, are kept when they are free: 16 at most, of 128 MiB in all. Of more, those go that
were freed first.
"""

from kvcache.support.mapped cimport MappedMemory


# `size` bytes, not zero, until the object is gone. Large ones begin at a page and are kept when they are free; others
# are of malloc.
cdef class Piece:
    cdef MappedMemory memory        # None: malloc
    cdef unsigned char *bytes


# A float32 array of this shape, of at most three axes, not filled.
cdef object new_floats(tuple shape)

"""Pages of a file, read and checked: one thread reads while another one checks the pages read before.

Copying a page out of the system's memory takes about as long as computing its checksum. Reading needs no interpreter,
so the two do not wait for each other. Compiled code joins the threads, which no interrupt can prevent: after a call has
returned or raised, no thread writes to its buffers.
"""

from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc

import numpy as np

cimport numpy as cnp

from kvcache.kernels cimport kernels
from kvcache.support.regular_files import checksum

__all__ = ["read_pages"]

cnp.import_array()

cdef extern from "kvc_system.h" nogil:
    ctypedef struct kvc_part:
        void *iov_base
        size_t iov_len
    int64_t kvc_read_parts_at(int fd, const kvc_part *parts, int count, int64_t offset)

cdef enum:
    MOST_PARTS = 1000    # buffers of one system call; the limit of the system is 1024
    STEPS = 16           # of one `read_pages`; a step is read while the one before is checked


cdef struct Page:
    int64_t offset
    kvc_part *parts          # one of its buffers each
    int64_t num_parts
    bint is_whole            # whether the file had all of it


cdef struct Step:            # pages [done, first) are checked while [first, stop) are read
    int fd
    Page *table
    int64_t done, first, stop
    void *pages              # list: of each page, its arrays
    const uint32_t *checksums
    unsigned char *good
    void *errors             # list with room for one


def read_pages(int fd, const int64_t[::1] offsets, list pages, const uint32_t[::1] checksums):
    """Read pages, each into its buffers; whether it is there as a whole and has its checksum, bool `(len(pages),)`.

    Buffers of a bad page have undefined contents. A page that cannot be read, because of a bad sector say, is bad.

    Args:
        fd: of the file.
        offsets: of each page, int64.
        pages: of each, the arrays that it fills, one behind the other: C-contiguous, writable.
        checksums: of each, its CRC-32, uint32.

    Raises:
        ValueError: arguments of different lengths, an array of another kind; nothing was read.
        MemoryError: nothing was read.
    """
    cdef int64_t i, count = 0, n = len(pages)
    cdef cnp.ndarray buffer
    good = np.zeros(n, np.bool_)
    if offsets.shape[0] != n or checksums.shape[0] != n:
        raise ValueError(f"pages: expected {n} offsets and checksums, got {offsets.shape[0]} and {checksums.shape[0]}")
    for buffers in pages:
        for buffer in buffers:
            if not (cnp.PyArray_IS_C_CONTIGUOUS(buffer) and cnp.PyArray_ISWRITEABLE(buffer)):
                raise ValueError("pages: expected C-contiguous and writable arrays, got another one")
            count += 1
    if n == 0:
        return good
    cdef Page *table = <Page *>malloc(n * sizeof(Page) + count * sizeof(kvc_part))
    if table == NULL:
        raise MemoryError()
    cdef kvc_part *part = <kvc_part *>(table + n)
    try:
        for i in range(n):
            table[i] = Page(offsets[i], part, len(pages[i]), False)
            for buffer in pages[i]:
                part[0] = kvc_part(cnp.PyArray_DATA(buffer), <size_t>buffer.nbytes)
                part += 1
        read_and_check(fd, table, n, pages, checksums, good)
    finally:
        free(table)
    return good


cdef int read_and_check(int fd, Page *table, int64_t n, list pages, const uint32_t[::1] checksums,
                        unsigned char[::1] good) except -1:
    cdef int64_t size = max(1, n // STEPS), done = 0, first = 0, stop = min(n, size)
    errors = [None]    # allocated now, since storing an error may not need memory
    cdef Step step
    step.fd, step.table, step.pages, step.checksums = fd, table, <void *>pages, &checksums[0]
    step.good, step.errors = &good[0], <void *>errors
    while done < n:
        step.done, step.first, step.stop = done, first, stop
        with nogil:
            kernels.run_items(2, min(2, kernels.num_threads()), check_or_read, &step)
        if errors[0] is not None:
            raise errors[0]
        done, first, stop = first, stop, min(n, stop + size)
    return 0


cdef void check_or_read(void *context, int64_t index, int thread) noexcept nogil:
    """Item 0, which is the caller's, checks the pages of the step before; item 1 reads those of this one."""
    cdef Step *step = <Step *>context
    cdef int64_t i
    if index == 0:
        with gil:
            check(step)
        return
    for i in range(step.first, step.stop):
        step.table[i].is_whole = fill(step.fd, step.table[i].parts, step.table[i].num_parts, step.table[i].offset)


cdef void check(Step *step) noexcept:
    """Check the pages of one step; an exception is stored as `errors[0]`, since an item cannot raise."""
    cdef int64_t i
    try:
        pages = <list>step.pages
        for i in range(step.done, step.first):
            step.good[i] = step.table[i].is_whole and checksum(pages[i]) == step.checksums[i]
    except BaseException as error:
        (<list>step.errors)[0] = error


cdef bint fill(int fd, kvc_part *part, int64_t num_parts, int64_t offset) noexcept nogil:
    """Read the parts from `offset` on, and change them; False if the file ends before, or cannot be read."""
    cdef int64_t got
    cdef kvc_part *end = part + num_parts
    while part < end:
        got = 0
        if part.iov_len > 0:
            got = kvc_read_parts_at(fd, part, <int>min(end - part, MOST_PARTS), offset)
            if got <= 0:
                if got < 0 and errno == EINTR:
                    continue
                return False
        offset += got
        while part < end and got >= <int64_t>part.iov_len:
            got -= <int64_t>part.iov_len
            part += 1
        if part < end:
            part.iov_base = <char *>part.iov_base + got
            part.iov_len -= <size_t>got
    return True

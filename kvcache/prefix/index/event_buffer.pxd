"""Records of what an index has stored and removed, until a reader takes them: a ring, written as it happens.

    tail            head          records `tail` to `head - 1` are there to be taken, each at its number % capacity
      |---------------|
    FIRST  NEXT  NEXT  REMOVED  FIRST  CLEARED ..

The writer is a call of the index, the reader another thread; both run compiled code with the interpreter's lock, or in
critical sections of the ring where there is none, so neither sees the other half done. A record costs two hashes and a
copy of a page's tokens, and takes no memory: if the ring is full, it drops what comes, and is to be emptied by a
snapshot of the index (`PrefixIndex.snapshot`). So a reader that is late costs the index nothing, and has no gap.

A page is known by a hash of its namespace and of the text that ends with it, the same in every process.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvcache.core.idmap cimport mix


cdef enum:
    FIRST      # a page that begins a text is cached
    NEXT       # a page behind another one is cached
    REMOVED    # a page is not cached any more
    CLEARED    # no page is; namespaces of lower numbers have ended
    LEFT       # a namespace has ended, with all its pages


cdef struct event_t:
    uint64_t page       # its hash
    uint64_t parent     # of the page before it
    int64_t space       # number of its namespace
    int64_t kind


# The hash of the page that ends a text in a namespace: 63 bits, which every reader has a type for.
cdef inline uint64_t page_hash(uint64_t salt, uint64_t text) noexcept nogil:
    return mix(salt ^ text) >> 1


# Whether a page ends a text before its own end, and so is none that a prompt can begin with: it is not told.
cdef inline bint is_partial(const uint32_t *tokens, Py_ssize_t page_size) noexcept nogil:
    return tokens[page_size - 1] == <uint32_t>-1


cdef class EventBuffer:
    cdef readonly Py_ssize_t page_size, capacity
    cdef readonly dict salts          # the text of each namespace that records may name, by its number
    cdef object salt_of
    cdef bint is_full_                # records were dropped
    cdef int64_t dropped_             # records, and those that a snapshot took the place of
    cdef int64_t num_spaces_          # namespaces so far, each with the next number
    cdef int64_t head, tail
    cdef tuple arrays                 # the arrays of NumPy behind the next two
    cdef event_t *events              # (capacity,)
    cdef uint32_t *tokens             # (capacity, page_size) of pages that were stored

    # The number of a new namespace, and into `salt` what its hashes differ by from those of others; may raise.
    cdef int64_t begin_space(self, object name, uint64_t *salt) except -1
    # A page is cached; `parent`: the hash of the page before it, if it is `NEXT`.
    cdef void stored(self, int64_t kind, uint64_t page, uint64_t parent, int64_t space,
                     const uint32_t *tokens) noexcept
    cdef void removed(self, uint64_t page, int64_t space, const uint32_t *tokens) noexcept
    cdef void cleared(self) noexcept
    cdef void left(self, int64_t space) noexcept
    cdef void lose(self, int64_t count) noexcept    # records that were taken
    cdef event_t *next_record(self) noexcept
    cdef Py_ssize_t look(self, event_t *events, Py_ssize_t most) noexcept    # a copy of the records, which stay
    cdef Py_ssize_t copy_out(self, event_t *events, uint32_t *tokens, Py_ssize_t most) noexcept

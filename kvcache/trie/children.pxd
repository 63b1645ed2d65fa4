"""The child of a node that begins with a token: one hash table for the whole tree.

    (node, first token) -> child

Open addressing with linear probing over 12-byte slots that hold the key itself, so a miss costs one random access and
reads no node. Deletion shifts the followers back instead of leaving tombstones, so the table does not degrade while
children come and go. At most two thirds of the slots are in use.
"""

from libc.stdint cimport int32_t, uint32_t


cdef struct child_slot:
    int32_t node      # the parent
    uint32_t token    # the first token of the child's edge
    int32_t child     # -1: the slot is free


cdef class ChildTable:
    cdef child_slot* slots       # (num_slots,), num_slots a power of two
    cdef Py_ssize_t num_slots    # 0 before the first reserve
    cdef Py_ssize_t count        # slots in use

    # Room for `extra` more children: putting these cannot fail.
    cdef int reserve(self, Py_ssize_t extra) except -1 nogil
    # The child of `node` whose edge begins with `token`, -1 if there is none.
    cdef int32_t find(self, int32_t node, uint32_t token) noexcept nogil
    # Set the child of (node, token), new or not.
    cdef void put(self, int32_t node, uint32_t token, int32_t child) noexcept nogil
    # Forget the child of (node, token), which must be there.
    cdef void drop(self, int32_t node, uint32_t token) noexcept nogil

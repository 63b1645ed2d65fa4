"""The sequences of a call of attention, and which of their tokens the queries are; converted once."""

cimport numpy as cnp


cdef class QueriedSequences:
    cdef readonly cnp.ndarray ids        # uint64 (n,)
    # int64 (n,), or None: one query each, all tokens, from position 0 on.
    cdef readonly cnp.ndarray lens, shown, starts
    cdef readonly cnp.ndarray parents    # int64 (total_queries,), or None: no tree
    cdef readonly cnp.ndarray firsts     # int64 (total_queries,), first tokens that each does not see; or None: none
    cdef readonly cnp.ndarray tokens     # int32 (total_queries, num_heads, n) to attend to; or None: what is seen

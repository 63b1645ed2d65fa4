"""The sequences of a call of attention; see paged/queried.pxd."""

cimport numpy as cnp

from kvcache.paged.seq_ids cimport uint64_ids
from kvcache.support.arguments cimport is_plain

import numpy as np

from kvcache.support.arguments import as_array, as_indices

__all__ = ["QueriedSequences"]

cnp.import_array()


cdef class QueriedSequences:
    """The sequences that queries attend to, for every layer of a pass. Arguments are those of `PagedKvCache.attention`.

    Raises:
        TypeError, ValueError: not integers in one dimension. Each call checks the numbers themselves.
    """

    def __cinit__(self, seq_ids, query_lens=None, context_lens=None, starts=None, mask=None, tokens=None,
                  firsts=None):
        self.ids = uint64_ids(seq_ids)
        self.lens = _indices(query_lens, "query_lens")
        self.shown = _indices(context_lens, "context_lens")
        self.starts = _indices(starts, "starts")
        self.parents = _indices(mask, "mask")
        if tokens is not None:
            self.tokens = _numbers(tokens)
        if firsts is not None:
            self.firsts = _copy(_indices(firsts, "firsts"))    # as of `tokens`

    def kept(self):
        """The sequences, for later calls too: with copies of the arrays."""
        self.ids = self.ids.copy()
        self.lens, self.shown = _copy(self.lens), _copy(self.shown)
        self.starts, self.parents = _copy(self.starts), _copy(self.parents)
        return self


cdef cnp.ndarray _indices(object values, str name):
    if values is None or is_plain(values, cnp.NPY_INT64, 1):
        return values
    return as_indices(values, name)


cdef cnp.ndarray _numbers(object tokens):
    """A copy in int32 of three dimensions: kernels read what was checked, whatever another thread writes meanwhile."""
    array = as_array(tokens, "tokens")
    if array.ndim != 3:
        raise ValueError(f"tokens: expected three dimensions, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got {array.dtype}")
    if array.size and not -(2 ** 31) <= array.min() <= array.max() < 2 ** 31:
        raise ValueError("tokens: expected integers of 32 bits, got some beyond")
    return np.array(array, np.int32, order="C")


cdef cnp.ndarray _copy(cnp.ndarray array):
    return None if array is None else array.copy()

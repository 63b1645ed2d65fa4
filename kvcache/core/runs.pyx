"""Runs: the tokens of a sequence as ranges of neighbouring slots, `[first, stop)` of a block."""

from libc.stdint cimport int32_t, int64_t

from kvcache.kernels.kernels cimport kvc_run

import numpy as np

__all__ = ["RUN", "runs_of"]


# As kvc_run in ckernels/kvc.h.
RUN = np.dtype([("block", np.int32), ("first", np.uint16), ("stop", np.uint16)])


def runs_of(const int32_t[::1] slots, int32_t block_size, out=None):
    """The slots in this order as runs (dtype `RUN`); slot s is in block s // block_size.

    Consecutive slots of one block share a run. `out`, dtype `RUN`, receives them; it has room for a run per slot.
    """
    cdef int64_t i, n = slots.shape[0], count = 0
    runs = np.empty(n, RUN) if out is None else out
    cdef kvc_run[::1] view = runs
    with nogil:
        for i in range(n):
            if i > 0 and slots[i] == slots[i - 1] + 1 and slots[i] % block_size != 0:
                view[count - 1].stop += 1
                continue
            view[count].block = slots[i] // block_size
            view[count].first = slots[i] % block_size
            view[count].stop = view[count].first + 1
            count += 1
    return runs[:count]

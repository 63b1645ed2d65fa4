"""Levels and threads of the kernels, loaded so that their threads wait asleep.

Between two calls of attention an engine multiplies matrices, on the threads of a BLAS that knows nothing of ours. A
waiting OpenMP thread spins for milliseconds by default, on the very core that the other library needs: on two busy
cores a decode step took ten times as long. libgomp reads how to wait once, when it is loaded, which is with `_kernels`.
Whoever has said it in the environment is obeyed, and the environment is left as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["get_num_threads", "set_num_threads", "simd_level", "simd_levels", "use_simd"]


@contextmanager
def _waiting_asleep() -> Iterator[None]:
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


with _waiting_asleep():
    from kvcache._kernels import get_num_threads, set_num_threads, simd_level, simd_levels, use_simd

"""Levels and threads of the kernels, loaded so that threads, theirs and those of BLAS, soon sleep where they wait.

A decode step goes back and forth between attention, on threads of OpenMP, and matrix products, on threads of a BLAS
that knows nothing of them. Either's threads spin where they wait, for milliseconds by default, on the very core that
the other's need: on two busy cores a step took ten times as long where OpenMP's spun, and twice where OpenBLAS's did.
Each library reads how long to wait once, when it is loaded: libgomp with `_kernels`, OpenBLAS with NumPy, unless that
was there first. Whoever has said it in the environment is obeyed, and the environment is left as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["get_num_threads", "set_num_threads", "simd_level", "simd_levels", "use_simd"]

# What is set while the libraries are loaded, unless one of these variables is.
_WAITS = {
    ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"): "500",  # some microseconds: enough to meet at a barrier, and no more
    # 2 to the 17 cycles, about 50 microseconds: from one product of a layer to the next, but not through its attention.
    ("OPENBLAS_THREAD_TIMEOUT",): "17",
}


@contextmanager
def _waiting_shortly() -> Iterator[None]:
    names = {any_of[0]: wait for any_of, wait in _WAITS.items() if not any(name in os.environ for name in any_of)}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


with _waiting_shortly():
    # Before NumPy, which says less clearly that it does not load in a subinterpreter.
    from kvcache.core.kernels import get_num_threads, set_num_threads, simd_level, simd_levels, use_simd

    # isort: split
    import numpy  # noqa: F401

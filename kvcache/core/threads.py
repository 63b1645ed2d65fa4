"""Levels and threads of the kernels, loaded so that waiting threads of OpenMP and of BLAS soon sleep.

A decode step alternates between attention, on threads of OpenMP, and matrix products, on threads of a BLAS. By default
waiting threads of either spin for milliseconds on the cores that the other needs: on two busy cores a step took ten
times as long while OpenMP's spun, and twice as long while OpenBLAS's did. Each library reads how long to spin once,
when it is loaded: libgomp with `kernels`, OpenBLAS with NumPy, unless NumPy was loaded before. A value that the user
has set in the environment stays in force; the environment is restored afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["get_num_threads", "set_num_threads", "simd_level", "simd_levels", "use_simd"]

# Set while the libraries are loaded, unless one of these variables is set already.
_WAITS = {
    ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"): "500",  # some microseconds: enough for a barrier
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
    # Before NumPy, whose own error about subinterpreters is less clear.
    from kvcache.core.kernels import get_num_threads, set_num_threads, simd_level, simd_levels, use_simd

    # isort: split
    import numpy  # noqa: F401

"""Levels and threads of the kernels, loaded so that the threads of a BLAS soon sleep.

A network of your own may multiply with NumPy: its steps then alternate between attention, on threads of the library's
pool, and products, on threads of a BLAS. OpenBLAS's threads spin for 18 ms after a product by default, on the core
that attention needs next: on two busy cores a step takes twice as long. OpenBLAS reads how long to spin once, when
NumPy loads it. A variable that the user has set is obeyed, and the environment stays as it was.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["get_num_threads", "preset", "set_num_threads", "simd_level", "simd_levels", "use_simd"]


@contextmanager
def preset(name: str, value: str, *others: str) -> Iterator[None]:
    """Set a variable of the environment while a library is loaded, unless it or one of `others` is set already."""
    if any(each in os.environ for each in (name, *others)):
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# 2 to the 17 cycles, about 50 microseconds: from one product of a layer to the next, but not through its attention.
with preset("OPENBLAS_THREAD_TIMEOUT", "17"):
    # Before NumPy, which says less clearly that it does not load in a subinterpreter.
    try:
        from kvcache.kernels.kernels import (
            best_level,
            get_num_threads,
            set_num_threads,
            simd_level,
            simd_levels,
            use_simd,
        )
    except ModuleNotFoundError as error:
        if error.name != "kvcache.kernels.kernels":
            raise
        clone = Path(__file__).parents[2]
        raise ImportError(
            f"kvcache: expected its compiled modules, got sources alone, in {clone}; leave this folder to import an "
            "installed kvcache, or build the modules here: pip install -e ."
        ) from None
    import numpy  # noqa: F401

if best_level() not in simd_levels() and not os.environ.get("KVCACHE_SIMD"):
    warnings.warn(
        f"kvcache: expected a build with kernels for {best_level()}, which this CPU runs best, got {simd_level()}, "
        "which is slower; to build them: KVCACHE_LEVELS=all pip install -e .",
        RuntimeWarning,
        stacklevel=2,
    )

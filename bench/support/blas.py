"""Threads: sets the same number for kvcache, PyTorch and NumPy's BLAS."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import kvcache

__all__ = ["blas_found", "set_threads"]

PREFIXES, SUFFIXES = ("scipy_", ""), ("64_", "")


@cache
def _setter() -> Any:
    """`openblas_set_num_threads` of NumPy's own library, or None."""
    folders = [Path(np.__file__).parent.with_name("numpy.libs"), Path(np.__file__).parent / ".dylibs"]
    for path in [p for folder in folders for p in folder.glob("*openblas*")]:
        library = ctypes.CDLL(str(path))
        for name in [f"{prefix}openblas_set_num_threads{suffix}" for prefix in PREFIXES for suffix in SUFFIXES]:
            if hasattr(library, name):
                return getattr(library, name)
    return None


def blas_found() -> bool:
    """True if NumPy's number of threads can be set."""
    return _setter() is not None


def set_threads(threads: int) -> None:
    """Set the number of threads of all BLAS libraries, as far as they are loaded."""
    kvcache.set_num_threads(threads)
    if _setter() is not None:
        _setter()(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)

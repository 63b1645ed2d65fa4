"""The bytes that the allocator of this process has allocated."""

import ctypes
import gc

import pytest


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def allocated():
    """Bytes allocated by malloc: in its arenas, and in separate mappings for large blocks."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("needs glibc's mallinfo2")
    mallinfo2.restype = Mallinfo
    gc.collect()
    info = mallinfo2()
    if info.uordblks == 0:
        pytest.skip("needs glibc's allocator, got another one in its place, as a sanitizer brings")
    return info.uordblks + info.hblkhd


def middle_growth(measure):
    """Return the one of three calls of `measure() -> (grown, ...)` whose growth is the middle one.

    What an earlier test has left, a thread or a buffer, may be freed during one of them.
    """
    return sorted((measure() for _ in range(3)), key=lambda seen: seen[0])[1]

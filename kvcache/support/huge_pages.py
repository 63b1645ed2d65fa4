"""How much of a process's memory lies on huge pages, as Linux tells in /proc/self/smaps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["HUGE_PAGE", "huge_bytes", "span_of"]

HUGE_PAGE = 1 << 21
_GAP = 4096
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def span_of(array: NDArray[np.generic]) -> tuple[int, int]:
    """The address of a contiguous array's first byte, and its bytes."""
    return array.ctypes.data, array.nbytes


def huge_bytes(spans: Iterable[tuple[int, int]], smaps: str = "/proc/self/smaps") -> int:
    """How many bytes of the spans, `(address, bytes)` each, lie on huge pages now; 0 if the system does not say.

    It tells the huge pages of a mapping as a sum, so what several share counts as far as each could have it.
    """
    parts = [(start, stop) for start, stop in _joined(spans) if stop - start >= HUGE_PAGE]
    if not parts:
        return 0
    found = 0
    for start, stop, huge in _huge_mappings(smaps):
        covered = sum(max(0, min(stop, end) - max(start, begin)) for begin, end in parts)
        found += min(huge, covered)
    return found


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first and last address of what lies together but for the gaps of alignment, as the matrices of a layer do."""
    parts: list[tuple[int, int]] = []
    for start, size in sorted(spans):
        if parts and start - parts[-1][1] < _GAP:
            parts[-1] = (parts[-1][0], max(parts[-1][1], start + size))
        else:
            parts.append((start, start + size))
    return parts


def _huge_mappings(smaps: str) -> Iterator[tuple[int, int, int]]:
    """First and last address of each mapping that has huge pages, and how many bytes of them."""
    try:
        lines = Path(smaps).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    start = stop = 0
    for line in lines:
        if line.startswith("AnonHugePages:"):
            huge = int(line.split()[1]) << 10
            if huge:
                yield start, stop, huge
        elif found := _MAPPING.match(line):
            start, stop = int(found[1], 16), int(found[2], 16)

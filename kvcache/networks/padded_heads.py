"""Heads of sizes that no kernel has: a cache keeps them with zeros behind their channels.

Zeros add nothing to a score, and the results of their channels are dropped. The scale of scores is that of the true
size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError

__all__ = ["check_sizes", "padded", "stored_sizes"]

_UNIT = 32  # channels that packed formats multiply together: in q4 a prompt takes 4 times as long with 80 as with 96
_STEP = 8  # of sizes that kernels take
_MOST, _MOST_LATENT = 512, 576  # channels that kernels take


def stored_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The channels that a cache has for a head.

    Args:
        sizes: the channels of a head, or those of a latent and of what turns beside it.

    Returns:
        The same for sizes that kernels have, else multiples of 32. A small head of a multiple of 8 stays as it is,
        since it would take up to four times its memory.
    """
    small = sum(sizes) <= _UNIT or len(sizes) > 1
    if not sizes[0] % (_STEP if small else _UNIT) and not sum(sizes) % _STEP:
        return sizes
    return tuple(-(-size // _UNIT) * _UNIT for size in sizes)


def check_sizes(sizes: tuple[int, ...], key: str) -> None:
    """Raise CheckpointError that names `key` for a head of more channels than kernels take."""
    most = _MOST if len(sizes) == 1 else _MOST_LATENT
    true, stored = sum(sizes), sum(stored_sizes(sizes))
    if stored > most:
        kept = f", which are kept as {stored}" if stored > true else ""
        raise CheckpointError(f"{key}: expected a head of at most {most} channels, got {true}{kept}")


def padded(rows: NDArray[np.float32], sizes: tuple[int, ...]) -> NDArray[np.float32]:
    """Rows `(n, heads, channels)` of these sizes as a cache takes them."""
    stored = stored_sizes(sizes)
    if stored == sizes:
        return rows
    found, first, place = np.zeros((*rows.shape[:2], sum(stored)), np.float32), 0, 0
    for size, width in zip(sizes, stored, strict=True):
        found[:, :, place : place + size] = rows[:, :, first : first + size]
        first, place = first + size, place + width
    return found

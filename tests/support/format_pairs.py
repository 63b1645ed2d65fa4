"""Formats of K and V for loops of tests, from the table of the kernels: a new format is tested beside the others."""

from kvcache.kernels.kernels import FORMATS

__all__ = ["ALIKE", "NEIGHBOURS", "RING"]

_NAMES = [*FORMATS]
ALIKE = [(name, name) for name in _NAMES]
# Each format as K beside the next one as V, and the last one beside the first.
RING = [(name, _NAMES[(i + 1) % len(_NAMES)]) for i, name in enumerate(_NAMES)]
NEIGHBOURS = RING[::2]  # each format once

"""Rows that are difficult to quantise, and the formats that do so."""

import numpy as np

from kvcache.kernels import kernels

BITS = {format.name: format.bits for format in kernels.FORMATS.values() if format.quantised}


def hard_rows(rng, dim):
    """Difficult rows: outliers, constants, tiny, huge, offsets, few values; and ordinary ones."""
    normal = rng.standard_normal((40, dim))
    rows = [*normal, *(normal * np.exp(rng.standard_normal((40, 1)) * 6)), *(normal * 1e-6), *(normal * 1e-8)]
    rows += [np.full(dim, c) for c in (0.0, 1.0, -1.0, 0.1, -3.3, 65504.0, -65504.0, 6e-8, -6e-8, 1e-30)]
    rows += [
        x * 0.01 + c for x, c in zip(normal[:8], (1, -1, 1000, -1000, 30000.4, -0.001, 65000, -65000), strict=True)
    ]
    rows += [np.where(np.arange(dim) == 3, a, b) for a in (-65504.0, 1.0, 1e-7) for b in (65504.0, 0.0, -1e-7)]
    rows += [
        np.eye(dim)[0],
        -np.eye(dim)[0],
        np.linspace(-1, 1, dim),
        np.arange(dim) % 2,
        np.arange(dim) % 4 * -0.5,
    ]
    return np.clip(np.array(rows, np.float32), -65504, 65504)

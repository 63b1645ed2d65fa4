"""`Subject`: an object and the operations that faults.py and interrupts.py fail or interrupt; see subjects/."""

import numpy as np

LAYERS, HEADS, DIM, BLOCK = 2, 2, 16, 4


def rows(n, seed, *shape):
    return np.random.default_rng(seed).standard_normal((2, n, *shape)).astype(np.float32)


def plain(x):
    """Arrays as tuples, which can be compared and which print when they differ."""
    if isinstance(x, np.ndarray):
        return (str(x.dtype), x.shape, x.tobytes())
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return tuple(map(plain, x)) if isinstance(x, (list, tuple)) else x


class Subject:
    """An object in a state where its operations have something to do.

    Each method of a subject without a leading underscore is an operation on `self.it`.
    """

    evicts = False  # whether an operation called "evict" may have evicted something where it failed

    def __init__(self):
        self.it = self._build()

    def _check(self):
        self.it.check()

    @staticmethod
    def _kept(state):
        """The part of the state that a call that failed may not change."""
        return state

    @classmethod
    def operations(cls):
        return [name for name, value in vars(cls).items() if not name.startswith("_") and callable(value)]

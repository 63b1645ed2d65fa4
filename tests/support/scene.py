"""What a scene of failing allocations is; faults.py runs them, and scenes_*.py has them, floor by floor."""

import numpy as np

LAYERS, HEADS, DIM, BLOCK = 2, 2, 16, 4


def rows(n, seed, *shape):
    return np.random.default_rng(seed).standard_normal((2, n, *shape)).astype(np.float32)


def plain(x):
    """Arrays as what can be compared, and reads as something when it differs."""
    if isinstance(x, np.ndarray):
        return (str(x.dtype), x.shape, x.tobytes())
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return tuple(map(plain, x)) if isinstance(x, (list, tuple)) else x


class Scene:
    """An object in a state where its operations have something to do.

    Each method of a scene without a leading underscore is an operation on `self.it`.
    """

    evicts = False  # whether an operation called "evict" may have evicted something where it failed

    def __init__(self):
        self.it = self._build()

    def _check(self):
        self.it.check()

    @staticmethod
    def _kept(state):
        """What a call that failed may not have changed."""
        return state

    @classmethod
    def operations(cls):
        return [name for name, value in vars(cls).items() if not name.startswith("_") and callable(value)]

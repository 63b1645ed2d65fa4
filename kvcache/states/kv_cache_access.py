"""`KvCacheAccess`: what every live cache offers that is written token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidOperationError

__all__ = ["KvCacheAccess"]

Float32 = npt.NDArray[np.float32]


@runtime_checkable
class KvCacheAccess(Protocol):
    """A live cache that is written token by token; any code that runs a model can implement it.

    `kv_dim`, `for_each_key` and `for_each_value` are provided; a subclass that does not say its `kv_dim` has 0.
    """

    @property
    def seq_len(self) -> int:
        """Tokens committed."""
        ...

    def store_kv(self, layer: int, key: npt.ArrayLike, value: npt.ArrayLike) -> None:
        """Write one token's row `(kv_dim,)` of K and V at position `seq_len`."""
        ...

    def get_keys(self, layer: int) -> Float32:
        """K written so far, float32 `(tokens * kv_dim,)`."""
        ...

    def get_values(self, layer: int) -> Float32:
        """V written so far, float32 `(tokens * kv_dim,)`."""
        ...

    def advance(self) -> None:
        """Commit the token that was written in all layers."""
        ...

    @property
    def kv_dim(self) -> int:
        """Floats per row, KV heads times head_dim; 0 means unknown."""
        return 0

    def for_each_key(self, layer: int, visit: Callable[[int, Float32], None]) -> None:
        """Call `visit(position, row)` for every row of K. InvalidOperationError if `kv_dim` is unknown."""
        _visit(self.kv_dim, lambda: self.get_keys(layer), visit)

    def for_each_value(self, layer: int, visit: Callable[[int, Float32], None]) -> None:
        """Call `visit(position, row)` for every row of V. InvalidOperationError if `kv_dim` is unknown."""
        _visit(self.kv_dim, lambda: self.get_values(layer), visit)


def _visit(kv_dim: int, get: Callable[[], Float32], visit: Callable[[int, Float32], None]) -> None:
    if kv_dim == 0:
        raise InvalidOperationError("expected a cache that says its kv_dim, got one with kv_dim 0")
    for position, row in enumerate(np.reshape(get(), (-1, kv_dim))):
        visit(position, row)

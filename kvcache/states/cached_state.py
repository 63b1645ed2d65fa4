"""K and V of a token prefix in plain vectors: in arrays of its own, or in the slots of a `PrefixKvCache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.prefix.index.slots import Claim
from kvcache.states.row_slots import RowSlots
from kvcache.support.arguments import as_flat, as_integer

__all__ = ["CachedKvState", "LeasedState", "checked_layers", "finite"]

Float32 = npt.NDArray[np.float32]


def finite(rows: Float32, name: str) -> Float32:
    """These rows; ValueError unless all are finite."""
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: expected finite values, got {rows[~np.isfinite(rows)][0]}")
    return rows


def checked_layers(keys: Any, values: Any, num_layers: int, size: int) -> list[tuple[Float32, Float32]]:
    """K and V of each layer, float32 `(size,)`; TypeError, ValueError: other layers, sizes, dtypes or not finite."""
    if len(keys) != num_layers or len(values) != num_layers:
        raise ValueError(f"keys, values: expected {num_layers} layers, got {len(keys)} and {len(values)}")
    rows = [(as_flat(k, "keys"), as_flat(v, "values")) for k, v in zip(keys, values, strict=True)]
    for k, v in rows:
        if k.shape != (size,) or v.shape != (size,):
            raise ValueError(f"keys, values: expected {size} floats per layer, got {len(k)} and {len(v)}")
        finite(k, "keys"), finite(v, "values")
    return rows


class CachedKvState:
    """K and V of a token prefix: per layer one float32 vector, token after token.

    Args:
        keys, values: per layer the rows of all tokens, `(seq_len * kv_dim,)` or `(seq_len, kv_dim)`.
        seq_len: tokens.

    Raises:
        TypeError, ValueError: no floats, layers of different lengths, a length that `seq_len` does not divide.
    """

    def __init__(self, keys: Any, values: Any, seq_len: int) -> None:
        self._keys = [as_flat(layer, "keys") for layer in keys]
        self._values = [as_flat(layer, "values") for layer in values]
        self._seq_len = seq_len = as_integer(seq_len, "seq_len")
        sizes = {len(layer) for layer in (*self._keys, *self._values)}
        if len(self._keys) != len(self._values) or len(sizes) > 1:
            counts = f"{len(self._keys)} and {len(self._values)}, of {len(sizes)} lengths"
            raise ValueError(f"keys, values: expected as many layers of each, all of one length, got {counts}")
        size = sizes.pop() if sizes else 0
        if seq_len < 0 or (size % seq_len if seq_len else size):
            raise ValueError(f"seq_len: expected a divisor of the {size} floats per layer, got {seq_len}")

    @property
    def seq_len(self) -> int:
        """Tokens."""
        return self._seq_len

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.keys)

    @property
    def kv_dim(self) -> int:
        """Floats per row; 0 for a state without tokens."""
        return len(self.keys[0]) // self.seq_len if self.keys and self.seq_len else 0

    @property
    def keys(self) -> list[Float32]:
        """K per layer, float32 `(seq_len * kv_dim,)`."""
        return self._keys

    @property
    def values(self) -> list[Float32]:
        """V per layer, float32 `(seq_len * kv_dim,)`."""
        return self._values

    def __repr__(self) -> str:
        return f"CachedKvState({self.num_layers} layers, {self.seq_len} tokens, kv_dim {self.kv_dim})"


class LeasedState(CachedKvState):
    """A state that shows claimed slots; its rows are read when they are asked for."""

    def __init__(self, claim: Claim) -> None:
        assert isinstance(claim.slots, RowSlots)
        self._claim, self._rows, self._seq_len = claim, claim.slots.rows, len(claim)
        claim.keep()

    @property
    def num_layers(self) -> int:
        return self._rows.num_layers

    @property
    def kv_dim(self) -> int:
        return self._rows.kv_dim

    @property
    def keys(self) -> list[Float32]:
        return self._read(0)

    @property
    def values(self) -> list[Float32]:
        return self._read(1)

    def __reduce__(self) -> tuple[type[CachedKvState], tuple[list[Float32], list[Float32], int]]:
        return CachedKvState, (self.keys, self.values, self.seq_len)

    def _read(self, side: int) -> list[Float32]:
        """Read-only: views that keep the claim where the rows lie there as float32 together, else copies."""
        layers, slots, rows = [], self._claim.pages, self._rows
        for layer in range(self.num_layers):
            view = rows.view(side, layer, slots)
            layers.append(rows.read(side, layer, slots) if view is None else np.asarray(_View(view, self._claim)))
            layers[-1].flags.writeable = False
        return layers


class _View:
    """An array that keeps its claim: NumPy holds on to the object that an interface came from."""

    def __init__(self, array: Float32, claim: Claim) -> None:
        self.array: Any = array
        self.claim = claim
        self.__array_interface__ = array.__array_interface__

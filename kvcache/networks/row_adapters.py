"""`RowAdapters`: which rows of a pass have which adapters, and what these add to the products of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.low_rank import LowRankPair, add_low_rank
from kvcache.kernels.matrix import Matrix
from kvcache.networks.adapter import Adapter, adapted_shapes
from kvcache.networks.config import ModelConfig
from kvcache.support.arguments import as_instance

__all__ = ["PLACES", "Adapt", "PreparedAdapter", "RowAdapters"]

Float32 = NDArray[np.float32]
Adapt = Callable[[Float32, Float32], None]
# The products of a layer, and the projections that each one stacks.
PLACES = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_FORMATS = {"<f4": "f32", "<f2": "f16"}  # any other type is bf16


class PreparedAdapter:
    """An adapter in the matrices that products read.

    Args:
        layers: of each layer by place, one of `PLACES`.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, tuple[LowRankPair, ...]]]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, adapter: Adapter, config: ModelConfig) -> PreparedAdapter:
        """Prepare an adapter for a network. ValueError: it does not fit, see `Adapter.expect`."""
        as_instance(adapter, Adapter, "adapter").expect(config)
        shapes, found = adapted_shapes(config), dict[int, dict[str, tuple[LowRankPair, ...]]]()
        for layer in range(config.trunk_layers):
            for place, names in PLACES.items():
                pairs, column = list[LowRankPair](), 0
                for name in names:
                    if (own := adapter.matrices.get((layer, name))) is not None:
                        pairs.append(LowRankPair(_matrix(own.a), _matrix(own.b), own.scale, column))
                    column += shapes.get((layer, name), (0, 0))[0]
                if pairs:
                    found.setdefault(layer, {})[place] = tuple(pairs)
        return cls(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(pair.nbytes for places in self.layers.values() for pairs in places.values() for pair in pairs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.layers)} layers, {self.nbytes} bytes)"


class RowAdapters(NamedTuple):
    """The rows of a pass that have adapters.

    Attributes:
        spans: `(first row, last row + 1, adapter)`, ascending and apart.
    """

    spans: tuple[tuple[int, int, PreparedAdapter], ...]

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, PreparedAdapter]], n: int) -> RowAdapters | None:
        """The adapters of a pass of `n` rows; None: no row has one. ValueError: other rows than there are."""
        begin = 0
        for first, stop, prepared in spans:
            as_instance(prepared, PreparedAdapter, "adapters")
            if not begin <= first < stop <= n:
                raise ValueError(f"adapters: expected ascending spans of {n} rows, got {first} to {stop} at {begin}")
            begin = stop
        return cls(tuple(spans)) if spans else None

    def taken(self, rows: Any) -> RowAdapters | None:
        """Those of some rows: of a slice, or of ascending indices."""
        if isinstance(rows, slice):
            start, end = rows.start or 0, self.spans[-1][1] if rows.stop is None else rows.stop
            cut = ((max(first, start) - start, min(stop, end) - start, each) for first, stop, each in self.spans)
        else:
            places = np.searchsorted(rows, [span[:2] for span in self.spans]).tolist()
            cut = ((*place, each) for place, (_, _, each) in zip(places, self.spans, strict=True))
        found = tuple(span for span in cut if span[0] < span[1])
        return RowAdapters(found) if found else None

    def of_layer(self, layer: int) -> dict[str, Adapt]:
        """By place of a layer what adds to a product of rows, given these, what adapters have there."""
        found: dict[str, list[Any]] = {}
        for first, stop, each in self.spans:
            for place, pairs in each.layers.get(layer, {}).items():
                found.setdefault(place, []).append((first, stop, pairs))
        return {place: partial(_add, spans) for place, spans in found.items()}


def _add(spans: Sequence[tuple[int, int, tuple[LowRankPair, ...]]], x: Float32, out: Float32) -> None:
    add_low_rank(np.ascontiguousarray(x), out, spans)


def _matrix(values: NDArray[Any]) -> Matrix:
    """A matrix of floats as an adapter has them. `LowRank` says of which types."""
    format = _FORMATS.get(values.dtype.str, "bf16")
    rows, columns = values.shape
    matrix = Matrix(rows, columns, format)
    matrix.put_words(0, values.view(np.uint16) if format == "bf16" else values)
    return matrix

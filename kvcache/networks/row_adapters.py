"""`RowAdapters`: which rows of a pass have which adapters, and what these add to the products of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.low_rank import LowRankProduct, add_low_rank
from kvcache.kernels.matrix import Matrix
from kvcache.networks.adapter import Adapter, LowRank, adapted_shapes, floats_of
from kvcache.networks.config import ModelConfig
from kvcache.networks.linear import empty_matrices
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

    def __init__(self, layers: Mapping[int, Mapping[str, LowRankProduct]]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, adapter: Adapter, config: ModelConfig) -> PreparedAdapter:
        """Prepare an adapter for a network. ValueError: it does not fit, see `Adapter.expect`."""
        as_instance(adapter, Adapter, "adapter").expect(config)
        shapes = adapted_shapes(config)
        places = [each for layer in range(config.trunk_layers) for each in _places(adapter, shapes, layer)]
        stacks = [stack for _, _, own, _ in places for stack in ([each.a for each in own], *([each.b] for each in own))]
        # One allocation in the order of reading: it lies on huge pages if it is large.
        matrices = empty_matrices((sum(map(len, stack)), stack[0].shape[1], _format_of(stack)) for stack in stacks)
        for each, stack in zip(matrices, stacks, strict=True):
            _fill(each, stack)
        found, left = dict[int, dict[str, LowRankProduct]](), iter(matrices)
        for layer, place, own, columns in places:
            first = next(left)
            parts = [(next(left), each.scale, column) for each, column in zip(own, columns, strict=True)]
            found.setdefault(layer, {})[place] = LowRankProduct(first, parts)
        return cls(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(product.nbytes for places in self.layers.values() for product in places.values())

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
        """Take some of the rows: those of a slice, or of ascending indices."""
        if isinstance(rows, slice):
            start, end = rows.start or 0, self.spans[-1][1] if rows.stop is None else rows.stop
            if not start and end >= self.spans[-1][1]:
                return self
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
            for place, product in each.layers.get(layer, {}).items():
                found.setdefault(place, []).append((first, stop, product))
        return {place: partial(_add, spans) for place, spans in found.items()}


def _add(spans: Sequence[tuple[int, int, LowRankProduct]], x: Float32, out: Float32) -> None:
    add_low_rank(np.ascontiguousarray(x), out, spans)


def _places(
    adapter: Adapter, shapes: Mapping[tuple[int, str], tuple[int, int]], layer: int
) -> Iterator[tuple[int, str, list[LowRank], list[int]]]:
    """Where an adapter changes a layer: layer, place, its matrices there, and the first columns of what each gives."""
    for place, names in PLACES.items():
        own, columns, column = list[LowRank](), list[int](), 0
        for name in names:
            if (each := adapter.matrices.get((layer, name))) is not None:
                own.append(each)
                columns.append(column)
            column += shapes.get((layer, name), (0, 0))[0]
        if own:
            yield layer, place, own, columns


def _format_of(stack: Sequence[NDArray[Any]]) -> str:
    """The format that arrays above each other have as one matrix: their own, or of several types that of all."""
    formats = {_FORMATS.get(values.dtype.str, "bf16") for values in stack}
    return formats.pop() if len(formats) == 1 else "f32"


def _fill(matrix: Matrix, stack: Sequence[NDArray[Any]]) -> None:
    row = 0
    for values in stack:
        if matrix.format == "f32":
            matrix.put(row, floats_of(values))
        else:
            matrix.put_words(row, values.view(np.uint16))
        row += len(values)

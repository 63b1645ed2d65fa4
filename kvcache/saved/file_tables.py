"""The tables of a saved cache: arenas and segments, as values and as bytes; snapshot.py says how a file holds them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import SnapshotError
from kvcache.kernels.kernels import FORMATS

__all__ = [
    "ARENA", "LAYOUTS", "MIXED", "NO_PARENT", "SEGMENT", "Arena", "aligned", "check_segments", "unpack_arenas",
]

# layers, KV heads, channels per head; formats of K and of V; rotated K and V, how bytes lie; page_tokens, page_bytes;
# channels per head of V where how bytes lie is `_APART` or `_LATENT`, else 0
ARENA = struct.Struct("<III4s4sBBHIQI24x")
# How the bytes of a page lie, the same at every SIMD level. rows: [K, V][layer][token][channel]. blocks: [layer], each
# as one block in ckernels/kvc.h.
LAYOUTS = {"rows": 1, "blocks": 2}
# Readers that do not know these refuse them: blocks whose V has other channels per head than K, or is a part of K.
_APART, _LATENT = 3, 4
SEGMENT = np.dtype([("namespace", "<u4"), ("parent", "<u4"), ("tokens", "<u4"), ("marked", "<u4")])
NO_PARENT = 2**32 - 1
_PAGE_ALIGNMENT = 64
MIXED = "mix"  # in the place of a format: layers differ, and the name of the model has their formats
_LEAST_BITS = min(format.bits for format in FORMATS.values())


def aligned(size: int, alignment: int) -> int:
    """`size`, rounded up."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Arena:
    """The layout of the K and V of some namespaces.

    Attributes:
        num_layers, num_heads, head_dim: the shape of one token's K; that of its V has `value_head_dim`.
        key_dtype, value_dtype: storage formats, or `MIXED`.
        rotate_keys, rotate_values: whether rows lie under a Hadamard rotation.
        layout: "rows" or "blocks", see `LAYOUTS`; "latent": blocks whose V is the first channels of K.
        page_tokens, page_bytes: slots of a page, and its bytes without what aligns the next one.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    value_head_dim: int
    key_dtype: str
    value_dtype: str
    rotate_keys: bool
    rotate_values: bool
    layout: str
    page_tokens: int
    page_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from page to page."""
        return aligned(self.page_bytes, _PAGE_ALIGNMENT)

    def pack(self) -> bytes:
        """The bytes that a file holds."""
        apart, number = self.value_head_dim != self.head_dim, LAYOUTS.get(self.layout, _LATENT)
        if number == LAYOUTS["blocks"] and apart:
            number = _APART
        return ARENA.pack(
            self.num_layers, self.num_heads, self.head_dim, self.key_dtype.encode(), self.value_dtype.encode(),
            self.rotate_keys, self.rotate_values, number, self.page_tokens,
            self.page_bytes, self.value_head_dim if number in (_APART, _LATENT) else 0,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Arena:
        """From the bytes of one; SnapshotError where they contradict each other."""
        layers, heads, dim, key, value, keys, values, layout, tokens, size, value_dim = ARENA.unpack(data)
        names = {number: name for name, number in LAYOUTS.items()} | {_APART: "blocks", _LATENT: "latent"}
        if layout not in names or not tokens or keys > 1 or values > 1:
            raise SnapshotError(f"expected an arena with pages of layout 1 to 4, got {tokens}, {layout}")
        fits = {_APART: value_dim not in (0, dim), _LATENT: 0 < value_dim <= dim}
        if not fits.get(layout, value_dim == 0):
            raise SnapshotError(f"expected V of other than {dim} channels, got {value_dim} in layout {layout}")
        value_dim = value_dim or dim
        # Pages of no layer have no bytes.
        least = tokens * layers * heads * (dim + (0 if layout == _LATENT else value_dim)) * _LEAST_BITS // 8
        if not heads * dim or bool(size) > bool(layers) or size < least:
            raise SnapshotError(f"expected pages of {layers} x {heads} x {dim} channels or more, got {size} bytes")
        key, value = (name.rstrip(b"\0").decode("latin-1") for name in (key, value))
        return cls(layers, heads, dim, value_dim, key, value, bool(keys), bool(values), names[layout], tokens, size)

    def expect(self, other: Arena) -> None:
        """SnapshotError that names the first difference between this arena and `other`, that of a file."""
        for field in fields(self):
            want, got = getattr(self, field.name), getattr(other, field.name)
            if want != got:
                raise SnapshotError(f"expected {field.name} {want}, got {got}")


def unpack_arenas(data: bytearray | memoryview) -> list[Arena]:
    """The arenas of a table. SnapshotError for an invalid one."""
    return [Arena.unpack(bytes(data[first : first + ARENA.size])) for first in range(0, len(data), ARENA.size)]


def check_segments(table: npt.NDArray[Any], first: int) -> None:
    """SnapshotError for segments, the first of them number `first`, without tokens or that precede their parents."""
    parents = table["parent"]
    early = (parents != NO_PARENT) & (parents >= np.arange(first, first + len(table)))
    if (table["tokens"] < 1).any() or (table["marked"] > 1).any() or early.any():
        raise SnapshotError("expected segments that follow their parents, got others")

"""Storage formats: one for all layers, or a list or tuple of one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.kernels.kernels import FORMATS

__all__ = ["Formats", "formats_of_layers", "is_mixed", "names_of", "unpacked"]

Formats = str | Sequence[str]


def is_mixed(dtype: Formats) -> bool:
    """Whether there is a format for each layer."""
    return isinstance(dtype, (list, tuple))


def names_of(dtype: Formats) -> list[str]:
    """The formats that occur, those of the table alone: a store refuses others."""
    names = dtype if isinstance(dtype, (list, tuple)) else [dtype]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name in FORMATS))


def formats_of_layers(dtype: Any, layers: Sequence[int]) -> Any:
    """The formats of some layers, in their order; a single format of any kind as it is."""
    return [dtype[layer] for layer in layers] if isinstance(dtype, (list, tuple)) else dtype


def unpacked(dtype: Formats) -> str:
    """Format of the tokens that stay unpacked: f16, or f32 if `dtype` stores a layer in f32."""
    names = names_of(dtype)
    floats = [name for name in names if not FORMATS[name].quantised]
    alone = floats and len(floats) == len(names)
    return max(floats if alone else ["f16", *floats], key=lambda name: FORMATS[name].bits)

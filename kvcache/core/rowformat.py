"""`Format`: a storage format written in Python, for experiments.

Rows are encoded and decoded when they are written, and what `decode` returned is stored in f32. So attention reads the
values that the format would keep, while memory and speed are those of f32: a quantiser of this kind is called fake. The
bytes in tables are those that the format says, `bits` per value.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.support.arguments import as_finite, as_floats, short

__all__ = ["Format", "RowFormats", "is_format", "name_of", "stored_dtype", "stored_dtypes"]

Float32 = npt.NDArray[np.float32]


class Format(Protocol):
    """A storage format of rows: `dtype`, `key_dtype` and `value_dtype` of a `PagedKvCache` or an engine take one.

    A row that is encoded by itself has the same values whatever is written with it. A format whose rows depend on each
    other gives other results where a text runs in other pieces.

    Attributes:
        bits: bits per value, what scales take included; for tables.
        name: part of the names of saved caches, which another format refuses to load; by default that of the class.
            Formats that differ in a setting need different names.
    """

    bits: float

    def encode(self, rows: Float32, /) -> Any:
        """The codes of rows, float32 `(n, num_heads, head_dim)`, a copy of the caller's own; anything at all."""

    def decode(self, codes: Any, /) -> npt.ArrayLike:
        """The rows of codes: finite floats `(n, num_heads, head_dim)`."""


def is_format(value: Any) -> bool:
    """Whether it is an object with methods `encode` and `decode`."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("encode", "decode"))


def stored_dtype(dtype: Any) -> Any:
    """The storage format of the library under `dtype`: "f32" for a `Format`, anything else as it is.

    Raises:
        TypeError: a class in the place of its instance; a list that has a `Format`.
    """
    if isinstance(dtype, type) and callable(getattr(dtype, "encode", None)):
        raise TypeError(f"dtype: expected an object with `encode` and `decode`, got the class {dtype.__qualname__}")
    if isinstance(dtype, (list, tuple)) and any(map(is_format, dtype)):
        raise TypeError("dtype: expected names of formats for each layer, got one in Python, which is for all layers")
    return "f32" if is_format(dtype) else dtype


def stored_dtypes(formats: tuple[Any, Any], calibrate: Any, name: str = "calibrate") -> tuple[Any, Any]:
    """`stored_dtype` of K and V.

    Raises:
        TypeError: as `stored_dtype`.
        ValueError: a calibration for keys of a `Format`, which knows none.
    """
    if is_format(formats[0]) and calibrate is not False and calibrate is not None:
        raise ValueError(f"{name}: expected none for keys of a format in Python, got {type(calibrate).__name__}")
    return stored_dtype(formats[0]), stored_dtype(formats[1])


class RowFormats:
    """The formats of K and V; None in the place of one of the library's.

    Attributes:
        pair: the two.
        fingerprint: their names; empty without any.

    Raises:
        TypeError, ValueError: `bits` that is no finite number above 0; `name` that is no text.
    """

    def __init__(self, key_dtype: Any, value_dtype: Any) -> None:
        self.pair: tuple[Format | None, Format | None] = (
            key_dtype if is_format(key_dtype) else None,
            value_dtype if is_format(value_dtype) else None,
        )
        names = []
        for side, each in zip("KV", self.pair, strict=True):
            if each is not None:
                as_finite(getattr(each, "bits", None), "bits", 0.0, above=True)
                names.append(f"{side} {name_of(each)}")
        self.fingerprint = ", ".join(names)

    def rows(self, side: int, rows: Any, shape: tuple[int | None, ...], name: str) -> Any:
        """Rows as the format of a side keeps them; those of the library's formats as they are.

        Args:
            side: 0 for K, 1 for V.
            rows: of `shape`; `name` is what to call them in messages.

        Raises:
            TypeError, ValueError: not such rows of finite floats; `decode` returned none. Whatever the format raises.
        """
        own = self.pair[side]
        if own is None:
            return rows
        mine = as_floats(rows, shape, name)
        if not mine.size:
            return mine
        found = as_floats(own.decode(own.encode(mine.copy())), mine.shape, "decode")
        if not np.isfinite(found).all():
            raise ValueError(f"decode: expected finite numbers, got {found[~np.isfinite(found)][0]}")
        return found


def name_of(own: Format) -> str:
    """The name of a format."""
    name = getattr(own, "name", type(own).__qualname__)
    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a text, got {short(name)}")
    return name

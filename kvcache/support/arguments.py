"""Arguments, checked and converted: every module checks its callers' arguments with these functions.

A message reads `name: expected X, got Y`. Nothing here changes what it is given.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import reprlib
import sys
from collections.abc import Collection
from contextlib import suppress
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvcache.support import dlpack

__all__ = [
    "BFLOAT16", "REQUIRED", "as_array", "as_bytes", "as_count", "as_finite", "as_flat", "as_floats", "as_index",
    "as_indices", "as_instance", "as_integer", "as_integers", "as_number", "as_output", "as_pair", "as_path", "as_rows",
    "as_scores", "as_share", "as_sinks", "as_stored", "check_integers", "checked_scores", "described", "expect_list",
    "hash_of", "is_integer", "is_masked", "plain_int", "short", "spelled",
]

Float32 = npt.NDArray[np.float32]
Kind = TypeVar("Kind")

# The default of a parameter without a default that follows one that has it: every check refuses None.
REQUIRED: Any = None

_INT64 = 2**63 - 1
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # its words
_WORD, _FLOAT32, _INDEX = np.dtype(np.uint16), np.dtype(np.float32), np.dtype(np.int64)
_UNITS = {"B": 1} | {f"{c}{i}B": (1024 if i else 1000) ** n for n, c in enumerate("KMGT", 1) for i in ("", "i")}
_BYTES = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*(B|[KMGT]i?B)\s*")
# Formats by their names in other libraries.
_SPELLINGS = {
    "float32": "f32", "fp32": "f32", "float": "f32", "float16": "f16", "fp16": "f16", "half": "f16",
    "bfloat16": "bf16", "int8": "q8", "q8_0": "q8", "q5_0": "q5", "q5_1": "q5", "int4": "q4", "q4_0": "q4",
    "q4_1": "q4",
}
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = 100


def short(value: Any) -> str:
    """`repr`, cut to a line: the value may be megabytes of hostile input."""
    try:
        text = _shortened.repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits
        text = f"<{type(value).__name__}>"
    text = " ".join(map(str.strip, text.splitlines()))  # of a large array
    return text if len(text) <= 120 else text[:117] + "..."


def spelled(value: Any, names: Collection[str]) -> str:
    """How a format of another library is called here, for the end of a message; empty: none of `names` is meant."""
    name = str(getattr(value, "__name__", value)).rpartition(".")[2].lower()
    meant = _SPELLINGS.get(name, name)
    return f"; kvcache calls it {meant!r}" if meant in names else ""


def described(value: Any) -> str:
    """An argument in a message: dtype and shape of an array, else its type."""
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def as_instance(value: Any, kind: type[Kind], name: str) -> Kind:
    """`value`, an instance of `kind`; TypeError if it is none."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name}: expected {article} {kind.__name__}, got {type(value).__name__}")
    return value


def as_path(value: Any, name: str = "path") -> str:
    """A path as text; TypeError for what is none."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name}: expected a path, got {type(value).__name__}")
    return os.fsdecode(value)


def hash_of(value: Any, name: str) -> int:
    """The hash of `value`. TypeError: it has none; the message has the type of the item where a tuple holds it."""
    try:
        return hash(value)
    except TypeError:
        for each in value if isinstance(value, tuple) else ():
            hash_of(each, name)
        raise TypeError(f"{name}: expected a hashable value, got {type(value).__name__}") from None


def as_array(x: Any, name: str) -> npt.NDArray[Any]:
    """`x` as a plain NumPy array in native byte order, without a copy where it has the buffer protocol or DLPack.

    DLPack tensors of bfloat16, which NumPy does not have, become float32.

    Raises:
        TypeError: what NumPy cannot read as an array.
        ValueError: an array with masked values, or a list of those; lists of different lengths.
    """
    array = _as_it_is(x, name)
    structured = array.dtype.kind == "V"  # quickly: equality of dtypes such as BFLOAT16 is slow
    return _widened(array["bfloat16"]) if structured and array.dtype == BFLOAT16 else array


def _as_it_is(x: Any, name: str) -> npt.NDArray[Any]:
    """Convert as `as_array` does, but bfloat16 tensors of DLPack are arrays of `BFLOAT16` over their memory."""
    if type(x) is np.ndarray and (x.dtype is BFLOAT16 or x.dtype.isnative):
        return x
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        array = _from_dlpack(x, name)
    else:
        try:
            if _has_masked(x):
                raise ValueError(f"{name}: expected an array without masked values, got a masked one")
            array = np.asanyarray(x)
        except TypeError:
            if not hasattr(x, "__dlpack__"):
                raise
            array = _from_dlpack(x, name)  # tensors of torch have `__array__`, which refuses bfloat16
        except (OverflowError, AttributeError, RuntimeError, RecursionError, BufferError) as error:
            raise TypeError(f"{name}: expected what NumPy can read, got {type(x).__name__}: {error}") from error
        if _has_masked(array):
            raise ValueError(f"{name}: expected an array without masked values, got a masked one")
    array = array.view(np.ndarray)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_dlpack(x: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.from_dlpack(dlpack.Checked(x, name))
    except (BufferError, RuntimeError, TypeError) as error:
        words = None
        with suppress(BufferError, RuntimeError, TypeError):
            words = dlpack.bfloat16_words(x)
        if words is None:
            raise TypeError(f"{name}: expected what NumPy can read, got {type(x).__name__}: {error}") from error
        return words.view(BFLOAT16)


def _widened(words: npt.NDArray[np.uint16]) -> Float32:
    """Words of bfloat16 as float32, of which they are the upper halves."""
    wide = words.astype(np.uint32, order="C")
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def is_masked(x: Any) -> bool:
    """Whether `x` is a masked array. NumPy imports `numpy.ma` on demand; before that, there is none.

    So it is not imported for this question: that takes time and allocates, in the middle of somebody's call.
    """
    return "numpy.ma" in sys.modules and isinstance(x, np.ma.MaskedArray)


def _has_masked(x: Any) -> bool:
    """Whether an array, or one in a list of lists, has a masked value, which would be read. RecursionError: a ring."""
    if is_masked(x):
        return bool(np.ma.getmaskarray(x).any())
    if isinstance(x, (list, tuple)):
        return any(_has_masked(each) for each in x if isinstance(each, (list, tuple, np.ndarray)))
    return False


def as_floats(x: Any, shape: tuple[int | None, ...], name: str) -> Float32:
    """`x` as a C-contiguous float32 array of `shape`, without a copy where it is one already.

    Args:
        x: any float array of 16, 32 or 64 bits (bfloat16 of ml_dtypes and of DLPack too), or what has the buffer
            protocol, DLPack or `__array__`. An axis of length 1 may have any stride.
        shape: the expected shape; `None` stands for any length.
        name: what to call it in messages.

    Raises:
        TypeError: not an array of floats.
        ValueError: another shape.
    """
    array = as_stored(x, shape, name)
    if array.dtype == np.uint16:
        array = _widened(array)
    elif array.dtype != np.float32:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32, order="C")
    return np.ascontiguousarray(array)


def as_stored(x: Any, shape: tuple[int | None, ...], name: str) -> npt.NDArray[Any]:
    """`x` as `as_floats` takes it, in place: float16, float32, float64 of any strides, or words of bfloat16 (uint16).

    Raises as `as_floats`. Floats of other sizes are converted to float64.
    """
    array = x if type(x) is np.ndarray and x.dtype is _FLOAT32 else _as_it_is(x, name)
    dtype = array.dtype
    if dtype is BFLOAT16:  # quickly: equality of such a type is slow
        array = dlpack.as_words(array, _WORD)
    elif dtype is not _FLOAT32 and dtype != np.float32:
        # bfloat16 is no NumPy kind of its own: ml_dtypes registers it under kind "V" or "f" by version.
        if array.dtype == BFLOAT16 or array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        elif array.dtype.kind != "f":
            raise TypeError(f"{name}: expected a float dtype, got {array.dtype}")
        elif array.dtype not in (np.float16, np.float64):
            with np.errstate(over="ignore"):
                array = array.astype(np.float64)
    if shape[:1] == (None,) and array.shape[1:] == shape[1:]:  # quickly: rows of a cache
        return array
    fits = array.ndim == len(shape)
    for want, got in zip(shape, array.shape, strict=False):
        fits &= want is None or want == got
    if not fits:
        wanted = "(" + ", ".join("any" if want is None else str(want) for want in shape) + ")"
        raise ValueError(f"{name}: expected shape {wanted}, got {array.shape}")
    return array


def as_sinks(sinks: Any, shape: tuple[int, int]) -> Float32:
    """Sink logits as float32 `shape`, of each query and query head, or `shape[1:]`, the same for all queries.

    Raises as `as_floats`, and ValueError for NaN or an infinity.
    """
    found = as_floats(sinks, shape if getattr(sinks, "ndim", 1) == 2 else shape[1:], "sinks")
    if not np.isfinite(found).all():
        raise ValueError("sinks: expected finite numbers, got NaN or infinity")
    return found


def as_output(x: Any) -> Any:
    """The memory of `x`, which has the buffer protocol or DLPack, as an array to write to; else `x` itself.

    The caller checks whether this is an array of the dtype, shape and layout that it writes.
    """
    if x is None or isinstance(x, np.ndarray):
        return x
    with suppress(BufferError, RuntimeError, TypeError, ValueError):
        array = dlpack.writeable(x) if hasattr(x, "__dlpack__") else np.asarray(memoryview(x))
        return x if array is None else array
    return x


def as_pair(x: Any, name: str) -> tuple[Any, Any]:
    """The two items of a tuple or list, `(None, None)` for None; TypeError for anything else."""
    if x is None:
        return None, None
    if not isinstance(x, (tuple, list)) or len(x) != 2 or x[0] is None:
        count = f" of {len(x)}" if isinstance(x, (tuple, list)) else ""
        raise TypeError(f"{name}: expected a pair of arrays, got {type(x).__name__}{count}")
    return x[0], x[1]


def as_flat(x: Any, name: str) -> Float32:
    """`x`, of any shape but a single number, as a float32 array of one dimension; raises as `as_floats`."""
    array = as_array(x, name)
    return as_floats(array, (None,) * max(1, array.ndim), name).reshape(-1)


def as_rows(x: Any, num_heads: int, head_dim: int, name: str) -> Float32:
    """Rows of K or V as float32 `(n, num_heads, head_dim)`.

    Args:
        x: one row `(num_heads * head_dim,)`, or many, `(n, num_heads * head_dim)` or `(n, num_heads, head_dim)`.

    Raises:
        TypeError, ValueError: not an array of floats; another shape.
    """
    array = as_array(x, name)
    if array.ndim == 3:
        return as_floats(array, (None, num_heads, head_dim), name)
    row = num_heads * head_dim
    rows = as_floats(array, (row,) if array.ndim == 1 else (None, row), name)
    return rows.reshape(-1, num_heads, head_dim)


def as_scores(x: Any) -> npt.NDArray[np.float64]:
    """Attention scores as float64, of any shape and value; TypeError for what are no numbers."""
    array = as_array(x, "scores")
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"scores: expected a float dtype, got {array.dtype}")
    return np.asarray(array, np.float64)


def checked_scores(scores: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.float64]:
    """`scores` of `as_scores`, one finite number for each of `length` entries; ValueError otherwise."""
    if scores.shape != (length,):
        raise ValueError(f"scores: expected {length}, one per entry, got shape {scores.shape}")
    scores = np.ascontiguousarray(scores)
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise ValueError(f"scores: expected finite numbers, got {scores[bad[0]]} at {bad[0]}")
    return scores


def is_integer(value: Any) -> bool:
    """Whether it is an int or a NumPy integer: no bool, and no duration, which NumPy counts among its integers."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def as_number(value: Any, name: str) -> float:
    """`value` as a float, NaN and infinite too; TypeError for what is no real number, and for a bool.

    Any object with `__float__` is one, as are arrays without a dimension.
    """
    if type(value) is float:  # nearly always, and several times as fast
        return value
    real = isinstance(value, numbers.Real) or (hasattr(value, "__float__") and not getattr(value, "shape", ()))
    if isinstance(value, (bool, np.timedelta64)) or not real:
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number below 2**1024, got a larger one") from None


def as_share(value: Any, name: str) -> float:
    """`value` as a float that is not NaN; raises as `as_number`."""
    number = as_number(value, name)
    if math.isnan(number):
        raise ValueError(f"{name}: expected a number, got nan")
    return number


def as_finite(value: Any, name: str, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> float:
    """`value` as a finite float from `low` (or, with `above`, more than that) to `high`; raises as `as_number`."""
    number = as_number(value, name)
    if not (math.isfinite(number) and low <= number <= high) or (above and number == low):
        least = "" if low == -math.inf else f" {'above' if above else 'of at least'} {low:g}"
        most = "" if high == math.inf else f"{' and' * bool(least)} of at most {high:g}"
        raise ValueError(f"{name}: expected a finite number{least}{most}, got {short(value)}")
    return number


def as_count(value: Any, name: str, least: int = 0, most: int | None = _INT64) -> int:
    """`value` as an int from `least` to `most`; TypeError for what is no int or a bool, ValueError beyond them."""
    if type(value) is int:  # nearly always, and several times as fast
        number = value
    elif is_integer(value):
        number = plain_int(value)
    else:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if number < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {_digits(number)}")
    if most is not None and number > most:
        raise ValueError(f"{name}: expected an int <= {most}, got {_digits(number)}")
    return number


def as_bytes(value: Any, name: str) -> int:
    """A number of bytes: an int, or a text such as "4GiB", "512MiB", "2GB" or "1.5 TiB", rounded down.

    Raises:
        TypeError: neither.
        ValueError: a text without a number or a unit (B, kilo to tera in decimal or binary form); below 0, above 2**63.
    """
    if not isinstance(value, str):
        if not is_integer(value):
            raise TypeError(f'{name}: expected an int or a text such as "4GiB", got {type(value).__name__}')
        return as_count(value, name)
    found = _BYTES.fullmatch(value)
    if found is None:
        raise ValueError(f'{name}: expected an int or a text such as "4GiB", "512MiB" or "2GB", got {short(value)}')
    return as_count(int(Fraction(found[1]) * _UNITS[found[2]]), name)


def as_integer(value: Any, name: str) -> int:
    """`value` as an int of 64 bits; TypeError if it is no integer, ValueError beyond 64 bits."""
    if type(value) is int and -_INT64 <= value <= _INT64:
        return value
    return as_count(value, name, -(2**63))


def as_index(value: Any, name: str, size: int | None = None) -> int:
    """`value` as an int from 0 to `size - 1`, without an end if `size` is None; TypeError, IndexError otherwise."""
    index = as_integer(value, name)
    if index < 0 or (size is not None and index >= size):
        expected = "an int >= 0" if size is None else f"an int in [0, {size})"
        raise IndexError(f"{name}: expected {expected}, got {index}")
    return index


def plain_int(value: Any) -> int:
    """The number that an int or a NumPy integer is, whatever a subclass makes of its operators."""
    return int.__add__(value, 0) if isinstance(value, int) else int(value)


def _digits(value: int) -> str:
    """An integer for a message; one of thousands of digits has no text."""
    return str(value) if -(2**100) < value < 2**100 else "one beyond 100 bits"


def check_integers(**values: Any) -> None:
    """Raise as `as_integer` for the first argument that is no integer, by its name."""
    for name, value in values.items():
        as_integer(value, name)


def as_integers(x: Any, name: str) -> npt.NDArray[Any]:
    """`x` as an integer array `(n,)` of whatever width it has; TypeError, ValueError if it is none."""
    array = as_array(x, name)
    expect_list(array, x, name)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    return array


def expect_list(array: npt.NDArray[Any], x: Any, name: str) -> None:
    """Raise unless `array`, as which NumPy reads `x`, has one dimension.

    Raises:
        TypeError: `x` is one value that is no number, such as None, a dict or a set.
        ValueError: another number of dimensions; a number has none.
    """
    if not array.ndim and array.dtype.hasobject and not isinstance(x, np.ndarray):
        raise TypeError(f"{name}: expected integers, got {type(x).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")


def as_indices(x: Any, name: str) -> npt.NDArray[np.int64]:
    """Integers as int64 `(n,)`.

    Raises:
        TypeError, ValueError: not integers, not one-dimensional, beyond int64.
    """
    if type(x) is np.ndarray and x.dtype is _INDEX and x.ndim == 1 and x.flags.c_contiguous:
        return x
    array = as_integers(x, name)
    if array.size and array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected integers below 2**63, got {int(array.max())}")
    return np.ascontiguousarray(array, np.int64)

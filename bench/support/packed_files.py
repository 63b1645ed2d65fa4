"""GGUF files of large random networks, packed tensor by tensor: no file of float16 is written before.

Each matrix has rows that are drawn from a few, which ggml quantised: the time of a product does not depend on them.
The type of each is the one that llama.cpp gives it: it quantises a file of the same names with two rows in each matrix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.kernels import ggml
from bench.support.checkpoints import Stored, stored_as, write_file
from kvcache.gguf import GgufFile
from kvcache.gguf.blocks import TYPES

__all__ = ["quantise", "types_of", "write_packed"]

Tensors = Callable[[], Iterator[tuple[str, tuple[int, ...]]]]
Values = Callable[[np.random.Generator, str, tuple[int, ...]], npt.NDArray[Any]]
ROWS = 256  # those that the rows of one type and width are drawn from
_NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def quantise(source: Path, target: Path, file_type: int) -> bool:
    """Have llama.cpp pack a file; False: it refuses. ImportError: it is not installed."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_type
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)):
        target.unlink(missing_ok=True)
        return False
    return True


def types_of(entries: dict[str, Any], tensors: Tensors, values: Values, file_type: int, folder: Path) -> dict[str, str]:
    """The type that llama.cpp gives each tensor of a network. ValueError: it refuses.

    Args:
        entries: the metadata of its file.
        tensors: yields `(name, shape)`.
        values: makes values of a shape, of which only the type counts here.
        folder: has two small files for a moment.
    """

    def thin() -> Iterator[Stored]:
        rng = np.random.default_rng(0)
        for name, shape in tensors():
            rows = (*(2,) * (len(shape) - 1), shape[-1])
            yield stored_as(name, values(rng, name, rows))

    source, target = folder / "thin-f16.gguf", folder / f"thin-{file_type}.gguf"
    write_file(source, entries, thin)
    try:
        if not quantise(source, target, file_type):
            raise ValueError(f"file_type: expected one that llama.cpp writes for this network, got {file_type}")
        return {name: info.dtype for name, info in GgufFile(target).items()}
    finally:
        source.unlink()
        target.unlink(missing_ok=True)


def write_packed(path: Path, entries: dict[str, Any], tensors: Tensors, values: Values, file_type: int) -> Path:
    """Write a file with the types that llama.cpp chooses; arguments as of `types_of`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    types = types_of(entries, tensors, values, file_type, path.parent)
    few: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}

    def outlines() -> Iterator[Stored]:
        for name, shape in tensors():
            number = _NUMBERS[types[name]]
            kind = TYPES[number]
            rows = np.broadcast_to(np.uint8(0), (prod(shape[:-1]), shape[-1] // kind.values * kind.bytes))
            yield Stored(name, shape, number, rows)

    def stored() -> Iterator[Stored]:
        rng = np.random.default_rng(0)
        for name, shape, number, outline in outlines():
            if types[name] == "F32":
                yield stored_as(name, values(rng, name, shape).astype(np.float32))
                continue
            if (number, shape[-1]) not in few:
                few[number, shape[-1]] = _packed_rows(values(rng, name, (ROWS, shape[-1])), number)
            rows = few[number, shape[-1]][rng.integers(0, ROWS, len(outline))]
            yield Stored(name, shape, number, rows)

    unfinished = path.with_suffix(".part")
    write_file(unfinished, entries, stored, outlines=outlines)
    return unfinished.rename(path)


def _packed_rows(rows: npt.NDArray[Any], number: int) -> npt.NDArray[np.uint8]:
    """The bytes of rows as ggml packs them."""
    if TYPES[number].name == "F16":
        return rows.astype(np.float16).view(np.uint8)
    count, width = rows.shape
    floats, kind = np.ascontiguousarray(rows, np.float32), TYPES[number]
    packed = np.empty((count, width // kind.values * kind.bytes), np.uint8)
    size = ggml.load().base.ggml_quantize_chunk(
        number, floats.ctypes.data, packed.ctypes.data, 0, count, width, None
    )
    assert size == packed.nbytes, (size, packed.nbytes)
    return packed

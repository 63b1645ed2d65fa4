"""The tensor types of GGUF: how a network's matrices are kept, and how far their values are from the file's.

A file with one type of matrices is written and loaded as any other; its values are compared with those that the gguf
package computes from the same bytes.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.kernels import ggml
from bench.support.checkpoints import Size, Stored, stored_as, tensors, write_gguf
from kvcache.engine import Transformer

__all__ = ["HEADER", "TYPES", "measure", "rows"]

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

HEADER = ["type", "bits/weight", "kept as", "bits/weight", "error, any codes", "error, normal weights", "its own error"]
# Where a block has its float16 numbers: scales, and minima. Blocks of K types have scales of 6 or 8 bits beside them.
TYPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "F32": ((), ()), "F16": ((), ()), "BF16": ((), ()), "Q8_0": ((0,), ()), "Q4_0": ((0,), ()), "Q4_1": ((0,), (2,)),
    "Q5_0": ((0,), ()), "Q4_K": ((0,), (2,)), "Q5_1": ((0,), (2,)), "Q5_K": ((0,), (2,)), "Q6_K": ((208,), ()),
    "Q3_K": ((108,), ()), "Q2_K": ((80,), (82,)), "IQ4_NL": ((0,), ()), "IQ4_XS": ((0,), ()), "MXFP4": ((0,), ()),
    "NVFP4": ((0,), ()), "IQ3_S": ((0,), ()), "IQ3_XXS": ((0,), ()), "IQ2_S": ((0,), ()), "IQ2_XS": ((0,), ()),
    "IQ2_XXS": ((0,), ()),
}
_BY_IMPORTANCE = ("IQ2_XS", "IQ2_XXS")  # ggml quantises these with the importance of each channel alone
SIZE = Size(256, 1, 4, 2, 512, 1024, 64)
MATRIX = "model.layers.0.mlp.down_proj.weight"  # (256, 512), not permuted


def measure() -> dict[str, Any]:
    """Every type's figures. Raises ImportError without the gguf package."""
    import gguf

    rng = np.random.default_rng(5)
    normal = next(tensor for name, tensor in tensors(SIZE) if name == MATRIX)
    found = {}
    for kind in TYPES:
        number = gguf.GGMLQuantizationType[kind]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        figures: dict[str, Any] = {"bits": 8 * block_bytes / per_block}
        codes = _random_blocks(kind, normal.size // per_block, block_bytes, rng)
        for what, raw in (("any", codes), ("normal", _quantised(kind, normal))):
            if raw is None:
                figures[what] = figures["own"] = None
                continue
            truth = gguf.quants.dequantize(raw.reshape(len(normal), -1), number).reshape(normal.shape)
            matrix = _loaded(int(number), raw)
            figures |= {"format": matrix.format, "kept_bits": 8 * matrix.nbytes / normal.size}
            figures[what] = _error(matrix.to_float32(), truth)
            figures["own"] = _error(truth, normal)
        found[kind] = figures
    return found


def _random_blocks(kind: str, count: int, size: int, rng: np.random.Generator) -> Bytes:
    """Blocks of random bits, with scales within a factor of 3, and minima that centre the values."""
    scales, minima = TYPES[kind]
    if not scales:
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind)
        values = rng.standard_normal(count, np.float32)
        raw = values.view(np.uint16)[1::2].copy() if dtype is None else values.astype(dtype)
        return raw.view(np.uint8).reshape(count, size)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    steps = rng.uniform(0.001, 0.003, count)
    if kind == "MXFP4":  # whose scales are powers of two in a byte
        blocks[:, 0] = rng.integers(117, 119, count)
        return blocks
    if kind == "NVFP4":  # whose scales are 8-bit floats
        blocks[:, :4] = rng.integers(1, 16, (count, 4))
        return blocks
    middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}.get(kind, 0.0)  # K types subtract
    for at, values in ((scales, steps), (minima, middle * steps)):
        for first in at:
            blocks[:, first : first + 2] = values.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def _quantised(kind: str, values: Float32) -> Bytes | None:
    """The values in blocks of type `kind`: by the gguf package, or by ggml; None if neither can make them."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    try:
        return np.ascontiguousarray(gguf.quants.quantize(values, number)).view(np.uint8)
    except NotImplementedError:
        pass
    if kind in _BY_IMPORTANCE:
        return None
    try:
        base = ggml.load().base
    except (ImportError, OSError):
        return None
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    raw = np.empty(values.size // per_block * block_bytes, np.uint8)
    base.ggml_quantize_chunk(
        int(number), ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(raw.ctypes.data), 0, *values.shape, None
    )
    return raw


def _loaded(number: int, raw: Bytes) -> Any:
    """The matrix that a network has of these blocks."""

    def stored() -> Iterator[Stored]:
        for name, tensor in tensors(SIZE):
            yield Stored(name, tensor.shape, number, raw) if name == MATRIX else stored_as(name, tensor)

    with tempfile.TemporaryDirectory() as folder:
        network = Transformer.from_gguf(write_gguf(SIZE, Path(folder) / "one.gguf", stored=stored))
        return network.weights.layers[0].mlps[0].down


def _error(found: Float32, truth: Float32) -> float:
    """The root mean square of the differences, relative to that of the values."""
    away = found.astype(np.float64) - truth
    return float(np.sqrt((away**2).sum() / (truth.astype(np.float64) ** 2).sum()))


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""

    def shown(value: float | None) -> str:
        return "-" if value is None else "none" if value == 0 else f"{100 * value:.3g} %"

    return [
        [
            kind, f"{f['bits']:.4g}", f["format"], f"{f['kept_bits']:.4g}", shown(f["any"]), shown(f["normal"]),
            shown(f["own"]),
        ]
        for kind, f in figures.items()
    ]

"""Quantised matrices in Hugging Face folders: how they are named and packed, and the rows of `Matrix` that they become.

| method | tensors of a matrix `(out, in)` | kept as |
|---|---|---|
| mxfp4 (gpt-oss) | `_blocks` U8 `(experts, out, in / 32, 16)`, `_scales` U8 | mxfp4 |
| fp8, float-quantized | F8_E4M3, a scale of all, of each row or of each block | f16 |
| int-quantized | I8, a scale of each row or group | q8_0 |
| mxfp4-pack-quantized, nvfp4-pack-quantized, modelopt | U8 of two 4-bit floats, U8 or F8_E4M3 scales | mxfp4, nvfp4 |
| pack-quantized, gptq, awq | I32 of 4 or 8 bits, a scale and a zero of each group | q4_0, q8_0; with zeros q4_1 |

Shapes and dtypes are checked when a folder is opened; what is beside a matrix is read with it, and forgotten after it.
A matrix keeps scales in f16: those of F32 and small ones of BF16 are rounded, and so are the minima of q4_1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.checkpoint import Checkpoint
from kvcache.networks.files import read_json
from kvcache.networks.packed_matrices import (
    Blocks,
    Floats,
    MatrixTensors,
    PackedMatrix,
    SmallFloats,
    awq_of,
    bytes_of,
    gptq_of,
    packed_of,
)
from kvcache.networks.quantisation import Quantisation, quantisation_of
from kvcache.networks.tensors import StoredRows, require
from kvcache.networks.towers import text_config_of

__all__ = ["QuantisedTensors", "open_folder"]

Float32 = NDArray[np.float32]

# The tensors beside a matrix. The last four say how activations were rounded; the rows here do not depend on them.
_BESIDE = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "scales", "qzeros", "g_idx", "activation_scale", "input_scale", "input_global_scale",
    "input_zero_point",
)


_MODELOPT = "hf_quant_config.json"
_SMALL = (("weight_packed", "compressed-tensors"), ("weight", "modelopt"))  # main tensors of 4-bit floats


def open_folder(directory: str | Path) -> Checkpoint | QuantisedTensors:
    """The tensors of a checkpoint folder, by the names of its files.

    Raises:
        FileNotFoundError: a file is missing.
        CheckpointError: a file is damaged, or quantised in a way that is not read.
    """
    directory = Path(directory)
    config = dict(text_config_of(read_json(directory / "config.json", infinity=True)))
    if (directory / _MODELOPT).exists():
        config = read_json(directory / _MODELOPT) | config
    quantisation = quantisation_of(config)
    checkpoint = Checkpoint(directory)
    return checkpoint if quantisation is None else QuantisedTensors(checkpoint, quantisation)


class _Info(NamedTuple):
    """A tensor as `require` sees it: a quantised one counts as F32."""

    dtype: str
    shape: tuple[int, ...]


class QuantisedTensors:
    """The tensors of a folder some of which are quantised: each of these under one name, with its logical shape.

    The name is that of the matrix (`... .weight`), of mxfp4 that of its blocks.

    Args:
        checkpoint: the tensors as they are stored.
        quantisation: what `config.json` says of them.

    Raises:
        CheckpointError: a part is missing, of the wrong shape or dtype, or packed in a way that is not read.
    """

    def __init__(self, checkpoint: Checkpoint, quantisation: Quantisation) -> None:
        self._checkpoint = checkpoint
        self._packed: dict[str, PackedMatrix] = {}
        self._biases: dict[str, int] = {}  # of matrices in words: some writers add zeros to each
        self._left = set(checkpoint.names())
        for name in sorted(self._left):
            if name in self._left:
                self._find(name, quantisation)

    def __contains__(self, name: str) -> bool:
        """See `Tensors.__contains__`."""
        return name in self._left or name in self._packed

    def require(
        self, expected: Iterable[tuple[str, tuple[int, ...]]], optional: Callable[[str], bool] = lambda _: False
    ) -> None:
        """See `Tensors.require`."""
        found: dict[str, Any] = {name: self._checkpoint.info(name) for name in self._left}
        found |= {name: _Info("F32", packed.shape) for name, packed in self._packed.items()}

        def needless(name: str) -> bool:
            rows = self._biases.get(name)
            zeros = rows is not None and found[name].shape == (rows,) and self._checkpoint.is_zero(name)
            return zeros or optional(name)

        require(found, self._checkpoint.directory, self._checkpoint.dtypes, expected, needless)

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        yield from self._left
        yield from self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""
        return self._packed[name].shape if name in self._packed else self._checkpoint.shape(name)

    def read(self, name: str) -> Float32:
        """See `Tensors.read`."""
        return self._checkpoint.read(name)

    def format(self, name: str) -> str:
        """See `Tensors.format`."""
        packed = self._packed.get(name)
        return self._checkpoint.format(name) if packed is None else packed.format

    def rows(self, name: str, first: int, stop: int) -> StoredRows:
        """See `Tensors.rows`."""
        packed = self._packed.get(name)
        return self._checkpoint.rows(name, first, stop) if packed is None else packed.rows(first, stop)

    def _find(self, name: str, quantisation: Quantisation) -> None:
        """Add the matrix whose main tensor has this name, if it is one, and take its parts away from the others."""
        tensors, (stem, _, kind) = MatrixTensors(self._checkpoint, name), name.rpartition(".")
        method, dtype = quantisation.method, self._checkpoint.info(name).dtype
        compressed = method == "compressed-tensors"
        if method == "mxfp4" and name.endswith("_blocks"):
            self._packed[name] = Blocks(tensors)
            self._left -= {name, f"{name.removesuffix('blocks')}scales"}
            return
        packed: PackedMatrix
        if kind == "qweight" and method in ("gptq", "awq"):
            packed = (gptq_of if method == "gptq" else awq_of)(tensors, stem, quantisation)
            self._biases[f"{stem}.bias"] = packed.shape[0]
        elif dtype == "U8" and (kind, method) in _SMALL:
            packed = SmallFloats(tensors, stem)
        elif kind == "weight_packed" and compressed:
            packed = packed_of(tensors, stem)
        elif kind == "weight" and dtype == "F8_E4M3" and (compressed or method in ("fp8", "modelopt")):
            packed = Floats(tensors, stem, quantisation.block)
        elif kind == "weight" and dtype == "I8" and compressed:
            packed = bytes_of(tensors, stem)
        else:
            return
        if kind != "weight" and f"{stem}.weight" in self._checkpoint:
            tensors.fail(f"{stem}.weight", f"none beside {name}", "the matrix twice")
        self._packed[f"{stem}.weight"] = packed
        beside = (*_BESIDE, "k_scale", "v_scale") if method == "modelopt" else _BESIDE  # how K and V may be rounded
        self._left -= {name, *(f"{stem}.{each}" for each in beside)}

"""Packed weights of a model in a file: `save_packed` writes what `pack_weights` made, `load_packed` reads it.

The file is one of safetensors. It has codes and scales as the formats define them, not as they lie in memory, so it is
the same on every machine; and what was not packed, as `state_dict` would have it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from kvcache.errors import CheckpointError
from kvcache.integrations.transformers.experts import PackedExperts
from kvcache.integrations.transformers.hf import safe_open, save_file, torch
from kvcache.integrations.transformers.linear import PackedLinear
from kvcache.integrations.transformers.weights import PackedWeights, pack_parts, parts_to_pack
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix, checked_activations

__all__ = ["load_packed", "save_packed"]

_KEY = "kvcache packed weights"
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@torch.no_grad()
def save_packed(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model that `pack_weights` has packed: packed weights as they are, and all other parameters and buffers.

    `load_packed` reads it into a fresh model of the same configuration, which `model.config.save_pretrained` keeps.

    Raises:
        ValueError: nothing of the model is packed.
        OSError: an error of the file system.
    """
    tensors: dict[str, Any] = {}
    formats: dict[str, str] = {}
    inner: list[str] = []  # modules of experts within the packed ones, whose names the model does not know
    seen: set[int] = set()
    activations = "int8"
    for name, module in model.named_modules(remove_duplicate=False):
        known = name
        for each in inner:
            known = f"{each.rpartition('.')[0]}{name.removeprefix(each)}" if name.startswith(each) else known
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, PackedLinear):
            activations = module.activations
            formats[f"{known}.weight"] = module.matrix.format
            tensors |= _tensors_of(f"{known}.weight", module.matrix)
            if module.bias is not None:
                tensors[f"{known}.bias"] = module.bias
        elif isinstance(module, PackedExperts):
            inner.append(f"{name}.experts")
            for weight, part in module.projections.items():
                activations = part.activations
                formats[f"{known}.{weight}"] = part.matrices[0].format
                for expert, matrix in enumerate(part.matrices):
                    tensors |= _tensors_of(f"{known}.{weight}.{expert}", matrix)
                if part.bias is not None:
                    tensors[f"{known}.{weight}_bias"] = torch.tensor(part.bias)
        else:
            tensors |= {each: t.contiguous() for each, t in _own_tensors(known, module, seen).items()}
    if not formats:
        raise ValueError("model: expected one that pack_weights has packed, got none of its layers packed")
    about = json.dumps({"version": 1, "activations": activations, "formats": formats})
    save_file(tensors, os.fspath(path), {_KEY: about})


@torch.no_grad()
def load_packed(model: Any, path: str | os.PathLike[str]) -> PackedWeights:
    """Give a model the weights of a file that `save_packed` wrote; its own are replaced.

    Args:
        model: as `AutoModelForCausalLM.from_config(config)` makes one, on the CPU, not packed.
        path: of the file.

    Returns:
        As `pack_weights`.

    Raises:
        OSError: no such file.
        CheckpointError: not such a file, or one of another model; the model is as it was.
    """
    with safe_open(os.fspath(path), "pt") as file:
        source = _SavedWeights(path, file)
        plan = parts_to_pack(model, source)
        packed = {name for part in plan for name in part.packed}
        if missing := sorted(source.formats.keys() - packed):
            raise CheckpointError(f"{path}: expected packed weights of this model, got {missing[0]} beside them")
        rest: dict[str, Any] = {}
        seen: set[int] = set()
        for module_name, module in model.named_modules():
            rest |= _own_tensors(module_name, module, seen)
        rest = {name: tensor for name, tensor in rest.items() if name not in packed}
        for name, tensor in rest.items():
            source.expect(name, tuple(tensor.shape))
        for name, tensor in rest.items():
            tensor.copy_(file.get_tensor(name))
        return pack_parts(model, plan, source)


class _SavedWeights:
    """The packed weights of a file, as a `PackSource`."""

    def __init__(self, path: Any, file: Any) -> None:
        self._path, self._file, self._names = path, file, set(file.keys())
        try:
            about = json.loads((file.metadata() or {}).get(_KEY, "null"))
            self.activations: str = checked_activations(about["activations"])
            self.formats: dict[str, str] = dict(about["formats"])
            wrong = about["version"] != 1 or not all(each in MATRIX_FORMATS for each in self.formats.values())
        except (KeyError, TypeError, ValueError):
            wrong = True
        if wrong:
            raise CheckpointError(f"{path}: expected a file of save_packed, got another one")

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the file has a tensor of this shape."""
        got = tuple(self._file.get_slice(name).get_shape()) if name in self._names else None
        if got != shape:
            raise CheckpointError(f"{self._path}: {name}: expected {shape}, got {'none' if got is None else got}")

    def format_of(self, name: str, tensor: Any, layer: Any) -> str | None:
        """The format that the file has; CheckpointError: of a matrix of another shape."""
        found = self.formats.get(name)
        if found is None:
            return None
        shape, suffix = tuple(tensor.shape), ".codes" if MATRIX_FORMATS[found].packed else ""
        if len(shape) == 3:
            outputs, inputs = shape[:0:-1] if layer.is_transposed else shape[1:]
            for expert in range(shape[0]):
                self._expect_matrix(f"{name}.{expert}{suffix}", found, outputs, inputs)
        else:
            outputs, inputs = shape if isinstance(layer, torch.nn.Linear) else shape[::-1]
            self._expect_matrix(f"{name}{suffix}", found, outputs, inputs)
        return found

    def _expect_matrix(self, name: str, format: str, outputs: int, inputs: int) -> None:
        self.expect(name, (outputs, -(-inputs // 2) if MATRIX_FORMATS[format].bits == 4 else inputs))

    def fill(self, matrix: Matrix, first: int, name: str, weight: Any) -> None:
        """Put the rows of the file into a matrix."""
        line = MATRIX_FORMATS[matrix.format]
        if not line.packed:
            matrix.put(first, self._file.get_tensor(name).float().numpy())
            return
        codes = self._file.get_tensor(f"{name}.codes").numpy()
        if line.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)[:, : matrix.shape[1]]
        names = ("scales", "minima") if line.has_minima else ("scales",)
        parts = [self._file.get_tensor(f"{name}.{each}").numpy() for each in names]
        try:
            matrix.put_codes(first, codes, *parts)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {name}: expected codes and scales, got {error}") from None


def _tensors_of(name: str, matrix: Matrix) -> dict[str, Any]:
    """A matrix in a file: its floats, or its codes, two of 4 bits in a byte, with their scales and minima."""
    line = MATRIX_FORMATS[matrix.format]
    if not line.packed:
        return {name: torch.from_numpy(matrix.to_float32()).to(_FLOATS[matrix.format])}
    rows = [matrix.codes(row) for row in range(len(matrix))]
    codes = np.stack([row[0] for row in rows])
    if line.bits == 4:
        codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    found = {"codes": codes, "scales": np.stack([row[1] for row in rows])}
    if line.has_minima:
        found["minima"] = np.stack([row[2] for row in rows if row[2] is not None])
    return {f"{name}.{each}": torch.from_numpy(np.ascontiguousarray(array)) for each, array in found.items()}


def _own_tensors(name: str, module: Any, seen: set[int]) -> dict[str, Any]:
    """The parameters and buffers of a module itself, each tensor once; of leaves the persistent ones."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if next(module.children(), None) is None:
        own = {each: own[each] for each in module.state_dict() if each in own}
    found = {}
    for each, tensor in own.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[f"{name}.{each}".removeprefix(".")] = tensor
    return found

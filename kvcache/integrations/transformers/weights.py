"""Packed weights for a model of transformers: its linear layers multiply by the library's matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import short
from kvcache.core.matrix import ACTIVATIONS, MATRIX_FORMATS, Matrix
from kvcache.integrations.transformers.hf import Conv1D, torch
from kvcache.networks.weights import FORMATS

__all__ = ["PackedLinear", "PackedWeights", "pack_weights"]

Float32 = npt.NDArray[np.float32]

_STORED = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_SKIPPED = ("gate", "router", "dt_proj")
_BAND_BYTES = 1 << 20  # of float32 values that are converted at a time


class PackedWeights(NamedTuple):
    """What `pack_weights` did.

    Attributes:
        layers: how many linear layers were packed.
        nbytes: bytes of their weights now.
        nbytes_before: and before. A matrix that is also the embedding stays in the embedding.
    """

    layers: int
    nbytes: int
    nbytes_before: int


class PackedLinear(torch.nn.Module):
    """A linear layer without gradients, on the CPU, whose weights lie in a `Matrix`.

    Args:
        matrix: `(out_features, in_features)`.
        bias: float32 `(out_features,)`, or None.
        dtype: of the weights before they were packed.
        activations: as of `Matrix.multiply`. Inputs in bfloat16 meet weights in bf16 as they are.

    Attributes:
        weight: has the shape and the dtype that the weights had, and no values: a tensor on the device "meta".
        bias: in that dtype, a copy; None: there is none.
    """

    def __init__(self, matrix: Matrix, bias: Float32 | None, dtype: Any, activations: str) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.matrix, self._dtype, self._bias, self._activations = matrix, dtype, bias, activations

    @property
    def weight(self) -> Any:
        return torch.empty(self.matrix.shape, dtype=self._dtype, device="meta")

    @property
    def bias(self) -> Any:
        return None if self._bias is None else torch.tensor(self._bias, dtype=self._dtype)

    @torch.compiler.disable
    def forward(self, x: Any) -> Any:
        """`x` `(..., in_features)` times the weights transposed, plus the bias, in the dtype of `x`.

        Raises:
            RuntimeError: `x` needs a gradient.
            ValueError: it is not on the CPU.
        """
        if x.requires_grad:
            if torch.is_grad_enabled():
                raise RuntimeError("x: expected no gradients (torch.no_grad()), got an input that requires one")
            x = x.detach()
        if x.device.type != "cpu":
            raise ValueError(f"x: expected a tensor on the CPU, where packed weights are, got one on {x.device}")
        rows = x.reshape(-1, self.in_features)
        activations = self._activations
        if x.dtype != torch.float32:
            if activations == "int8" and x.dtype == torch.bfloat16:
                activations = "bf16"
            rows = rows.float()
        product = torch.from_numpy(self.matrix.multiply(rows.numpy(), self._bias, activations=activations))
        out = product.reshape(*x.shape[:-1], self.out_features)
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` says of the layer."""
        return f"{self.in_features}, {self.out_features}, bias={self._bias is not None}, {self.matrix.format}"

    def __deepcopy__(self, memo: Any) -> PackedLinear:
        return PackedLinear(self.matrix, self._bias, self._dtype, self._activations)  # nothing changes a matrix

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("state_dict: expected a model before pack_weights, got packed weights")


@torch.no_grad()
def pack_weights(
    model: Any, weights: str = "auto", *, activations: str = "int8", skip: Collection[str] = _SKIPPED,
    progress: Callable[[int, int], None] | None = None,
) -> PackedWeights:  # fmt: skip
    """Let the linear layers of a model multiply by packed weights; their own weights are freed.

    Every `torch.nn.Linear`, and every `Conv1D` of transformers, becomes a `PackedLinear`. All else stays: embeddings,
    norms, convolutions, experts whose matrices lie in one tensor, subclasses of `Linear`. The model is for inference
    then: it has no gradients and no `state_dict`, so it cannot be saved. `copy.deepcopy` shares the packed weights.

    Args:
        model: of transformers, or any `torch.nn.Module`, on the CPU.
        weights: "auto" keeps the values as they are, "q8" and "q4" quantise; also "f32", "f16", "bf16", as for
            `InferenceEngine.from_pretrained`. The head of "q4" has 8 bits.
        activations: how inputs meet the weights, "int8", "exact" or "bf16": see `Matrix.multiply`.
        skip: last names of layers that stay as they are. By default these are routers, whose errors choose other
            experts, and the time steps of Mamba, whose weights models read as a tensor.
        progress: called with the weights that are packed, and those of all, in bytes before packing.

    Returns:
        What was packed; a model that is packed already has nothing more to pack.

    Raises:
        ValueError: unknown `weights` or `activations`; a weight is not on the CPU, of another dtype, or has numbers
            that the format cannot hold. The model is as it was.
        MemoryError: layers before the one for which there was no memory are packed. The model works, and a second call
            packs the others; so does it after Ctrl-C.
    """
    if weights not in FORMATS:
        raise ValueError(f"weights: expected one of {', '.join(FORMATS)}, got {short(weights)}")
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: expected one of {', '.join(ACTIVATIONS)}, got {short(activations)}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    plan = _plan(model, weights, skip)
    size, done, nbytes = sum(part.nbytes for part in plan), 0, 0
    for part in plan:
        nbytes += part.pack(model, activations)
        done += part.nbytes
        if progress is not None:
            progress(done, size)
    return PackedWeights(sum(len(part.names) for part in plan), nbytes, size)


class _Part(NamedTuple):
    """Layers with the same weights, by name, the format they get, and the bytes that the weights have."""

    names: list[str]
    format: str
    nbytes: int

    def pack(self, model: Any, activations: str) -> int:
        """Put packed layers in their place; the bytes of the new weights."""
        layers = [model.get_submodule(name) for name in self.names]
        weight = layers[0].weight.T if isinstance(layers[0], Conv1D) else layers[0].weight
        rows, columns = weight.shape
        matrix = Matrix(rows, columns, self.format)
        band = max(1, _BAND_BYTES // (4 * columns))
        for row in range(0, rows, band):
            matrix.put(row, weight[row : row + band].float().numpy())
        made: dict[int, PackedLinear] = {}  # one layer may have several names
        for name, layer in zip(self.names, layers, strict=True):
            if id(layer) not in made:
                bias = None if layer.bias is None else layer.bias.float().numpy().copy()
                made[id(layer)] = PackedLinear(matrix, bias, weight.dtype, activations).train(layer.training)
            model.set_submodule(name, made[id(layer)])
        return matrix.nbytes


def _plan(model: Any, weights: str, skip: Collection[str]) -> list[_Part]:
    """What is to be packed, each weight once; it refers to no tensor, so that weights are freed one after another."""
    parts: dict[int, _Part] = {}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, layer in model.named_modules(remove_duplicate=False):
        if type(layer) not in (torch.nn.Linear, Conv1D) or name.rpartition(".")[2] in skip or not name:
            continue
        weight = layer.weight
        if weight.numel() == 0:
            continue
        if id(weight) in parts:
            parts[id(weight)].names.append(name)
            continue
        if weight.device.type != "cpu" or weight.dtype not in _STORED:
            raise ValueError(
                f"{name}.weight: expected float32, float16 or bfloat16 on the CPU, got {weight.dtype} on "
                f"{weight.device}"
            )
        kind = FORMATS[weights][layer is head] or _STORED[weight.dtype]
        largest, most = max(abs(float(end)) for end in torch.aminmax(weight)), _most(kind)
        if not largest <= most:
            raise ValueError(f"{name}.weight: expected finite numbers up to {most:g} for {kind}, got {largest:g}")
        parts[id(weight)] = _Part([name], kind, weight.nbytes)
    return list(parts.values())


def _most(kind: str) -> float:
    """The largest magnitude that a format of weights holds; scales of packed ones are f16."""
    line = MATRIX_FORMATS[kind]
    return 65504.0 if line.packed or kind == "f16" else 3.38e38

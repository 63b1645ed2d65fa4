"""Packed weights for a model of transformers: its linear layers and experts multiply by the library's matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcache.integrations.transformers.experts import PackedExperts, Projection, weights_of, without_weights
from kvcache.integrations.transformers.hf import Conv1D, torch
from kvcache.integrations.transformers.linear import Joint, PackedLinear
from kvcache.kernels.matrix import MATRIX_FORMATS, Matrix, checked_activations
from kvcache.networks.linear import empty_matrices
from kvcache.networks.weights import FORMATS
from kvcache.support.arguments import short, spelled

__all__ = ["PackSource", "PackedWeights", "pack_parts", "pack_weights", "parts_to_pack"]

_STORED = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_SKIPPED = ("gate", "router", "dt_proj")
# Layers that models call one after another with the same input, by their last names.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
_BAND_BYTES = 1 << 20  # of float32 values that are converted at a time


class PackedWeights(NamedTuple):
    """The result of `pack_weights`.

    Attributes:
        layers: how many linear layers were packed, and modules of experts.
        nbytes: bytes of their weights now.
        nbytes_before: and before. A matrix that is also the embedding stays in the embedding.
    """

    layers: int
    nbytes: int
    nbytes_before: int


@torch.no_grad()
def pack_weights(
    model: Any, weights: str = "auto", *, activations: str = "int8", skip: Collection[str] = _SKIPPED,
    progress: Callable[[int, int], None] | None = None,
) -> PackedWeights:
    """Let the linear layers and experts of a model multiply by packed weights; their own weights are freed.

    Every `torch.nn.Linear`, and every `Conv1D` of transformers, becomes a `PackedLinear`. Where transformers keeps the
    weights of a layer's experts in tensors with three axes, they become `PackedExperts`. All else stays: embeddings,
    norms, convolutions, subclasses of `Linear`, layers with forward hooks or with a `forward` of their own. The model
    is for inference then: it has no gradients and no `state_dict`; `save_packed` writes it. `copy.deepcopy` shares the
    packed weights.

    Args:
        model: of transformers, or any `torch.nn.Module`, on the CPU.
        weights: "auto" keeps the values as they are, "q8" and "q4" quantise; also "f32", "f16", "bf16", as for
            `InferenceEngine.from_pretrained`. The head of "q4" has 8 bits.
        activations: how inputs meet the weights, "int8", "exact" or "bf16": see `Matrix.multiply`.
        skip: last names of layers that stay as they are. By default these are routers, whose errors choose other
            experts, and the time steps of Mamba, whose weights models read as a tensor.
        progress: called with the weights that are packed, and those of all, in bytes before packing.

    Returns:
        What was packed. A model that is packed already has nothing more to pack: a UserWarning says so, and in which
        formats its weights are, since their values before are gone.

    Raises:
        ValueError: unknown `weights` or `activations`; a weight is not on the CPU, of another dtype, or has numbers
            that the format cannot hold. The model is as it was.
        MemoryError: layers before the one for which there was no memory are packed. The model works, and a second call
            packs the others; so does it after Ctrl-C.
    """
    if weights not in FORMATS:
        also = spelled(weights, FORMATS)
        raise ValueError(f"weights: expected one of {', '.join(FORMATS)}, got {short(weights)}{also}")
    checked_activations(activations)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    source = _OwnWeights(weights, activations, skip, head)
    plan = parts_to_pack(model, source)
    if not plan and (formats := _formats(model)):
        warnings.warn(
            f"model: expected layers that are not packed yet, got a model packed in {formats}; nothing has changed",
            stacklevel=2,
        )
    return pack_parts(model, plan, source, progress)


class PackSource(Protocol):
    """The values of packed weights: those of the model itself, or of a file."""

    @property
    def activations(self) -> str:
        """How inputs meet the weights."""
        ...

    def format_of(self, name: str, tensor: Any, layer: Any) -> str | None:
        """The format of the matrix of a tensor, by the tensor's name; None: it is not packed. ValueError: not fit."""

    def fill(self, matrix: Matrix, first: int, name: str, weight: Any) -> None:
        """Put the rows of a weight, `(outputs, inputs)`, into a matrix from row `first` on."""


class _OwnWeights(NamedTuple):
    """The values that the model has, quantised; `head` is its last layer."""

    weights: str
    activations: str
    skip: Collection[str]
    head: Any

    def format_of(self, name: str, tensor: Any, layer: Any) -> str | None:
        if name.rpartition(".")[0].rpartition(".")[2] in self.skip:
            return None
        return _kind(name, tensor, FORMATS[self.weights][layer is self.head])

    def fill(self, matrix: Matrix, first: int, name: str, weight: Any) -> None:
        band = max(1, _BAND_BYTES // (4 * weight.shape[1]))  # some rows at a time
        for row in range(0, len(weight), band):
            matrix.put(first + row, weight[row : row + band].float().numpy())


def pack_parts(
    model: Any, plan: list[Part], source: PackSource, progress: Callable[[int, int], None] | None = None
) -> PackedWeights:
    """Put packed layers in the place of those of a plan; arguments and result are those of `pack_weights`."""
    size, done, nbytes = sum(part.nbytes for part in plan), 0, 0
    for part in plan:
        nbytes += part.pack(model, source)
        done += part.nbytes
        if progress is not None:
            progress(done, size)
    return PackedWeights(sum(part.layers for part in plan), nbytes, size)


def _formats(model: Any) -> str:
    """The formats of the packed layers of a model; empty: there are none."""
    found: set[str] = set()
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            found.add(layer.matrix.format)
        elif isinstance(layer, PackedExperts):
            found.update(matrix.format for matrix in layer.matrices)
    return ", ".join(sorted(found))


class _Part(NamedTuple):
    """Weights that become one matrix, one above the other.

    Attributes:
        names: lists of as many layers as there are weights. Layers that share a weight are in lists of their own.
        format: of the matrix.
        nbytes: that the weights have.
        like: width, dtype, and whether there are biases, as all weights of a part have them.
        sizes: outputs of each layer.
    """

    names: list[list[str]]
    format: str
    nbytes: int
    like: tuple[int, Any, bool]
    sizes: list[int]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(map(len, self.names))

    @property
    def packed(self) -> list[str]:
        """The names of the parameters that it packs."""
        return [f"{name}.weight" for names in self.names for name in names]

    def pack(self, model: Any, source: PackSource) -> int:
        """Put packed layers in their place; the bytes of the new weights."""
        layers = [[model.get_submodule(name) for name in names] for names in self.names]
        columns, dtype, _ = self.like
        matrix = Matrix(sum(self.sizes), columns, self.format)
        at = 0
        for name, layer in zip(self.names[0], layers[0], strict=True):
            weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
            source.fill(matrix, at, f"{name}.weight", weight)
            at += len(weight)
        made: dict[int, list[PackedLinear]] = {}  # one layer may have several names
        for names, old in zip(self.names, layers, strict=True):
            if id(old[0]) not in made:
                biases = [layer.bias.float().numpy() for layer in old if layer.bias is not None]
                bias = np.concatenate(biases) if biases else None
                joint = Joint(matrix, self.sizes, bias, dtype, source.activations)
                made[id(old[0])] = [PackedLinear(joint, i).train(layer.training) for i, layer in enumerate(old)]
            for name, layer in zip(names, made[id(old[0])], strict=True):
                model.set_submodule(name, layer)
        return matrix.nbytes


class _Experts(NamedTuple):
    """A module of experts, by all its names, the format that its weights get, and the bytes that they have."""

    names: list[str]
    format: str
    nbytes: int
    weights: list[str]
    layers: int = 1

    @property
    def packed(self) -> list[str]:
        """The names of the parameters that it packs."""
        return [f"{name}.{weight}" for name in self.names for weight in self.weights]

    def pack(self, model: Any, source: PackSource) -> int:
        """Put the packed experts in their place; the bytes of the new weights."""
        module = model.get_submodule(self.names[0])
        up, down = (self._projection(module, name, source) for name in self.weights)
        packed = PackedExperts(without_weights(module), up, down, module.down_proj.dtype).train(module.training)
        for name in self.names:
            model.set_submodule(name, packed)
        return sum(matrix.nbytes for matrix in packed.matrices)

    def _projection(self, module: Any, name: str, source: PackSource) -> Projection:
        weights = getattr(module, name).mT if module.is_transposed else getattr(module, name)
        count, rows, columns = weights.shape
        matrices = empty_matrices([(rows, columns, self.format)] * count)
        for expert, (matrix, weight) in enumerate(zip(matrices, weights, strict=True)):
            source.fill(matrix, 0, f"{self.names[0]}.{name}.{expert}", weight)
        bias = getattr(module, f"{name}_bias").float().numpy().copy() if module.has_bias else None
        return Projection(matrices, bias, source.activations)


Part = _Part | _Experts


def parts_to_pack(model: Any, source: PackSource) -> list[Part]:
    """List the parts to pack, each weight once, without references to tensors: weights are freed one after another."""
    parts: dict[int, _Part] = {}
    experts: dict[int, _Experts] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not name or _is_hooked(layer):
            continue
        if id(layer) in experts:
            experts[id(layer)].names.append(name)
        elif tensors := {each: getattr(layer, each) for each in weights_of(layer)}:
            kinds = [source.format_of(f"{name}.{each}", tensor, layer) for each, tensor in tensors.items()]
            if kinds[0] is not None:
                nbytes = sum(tensor.nbytes for tensor in tensors.values())
                experts[id(layer)] = _Experts([name], kinds[0], nbytes, [*tensors])
        if type(layer) not in (torch.nn.Linear, Conv1D) or layer.weight.numel() == 0:
            continue
        weight = layer.weight
        if id(weight) in parts:
            parts[id(weight)].names.append([name])
            continue
        kind = source.format_of(f"{name}.weight", weight, layer)
        if kind is None:
            continue
        rows, columns = weight.T.shape if isinstance(layer, Conv1D) else weight.shape
        like = columns, weight.dtype, layer.bias is not None
        parts[id(weight)] = _Part([[name]], kind, weight.nbytes, like, [rows])
    return [*_joined(list(parts.values())), *experts.values()]


def _is_hooked(layer: Any) -> bool:
    """True if a call of the layer does more than its class says: a packed layer would not do it."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _kind(name: str, weight: Any, wanted: str | None) -> str:
    """The format of a matrix: the wanted one, or that of the weights. ValueError: it cannot hold them."""
    if weight.device.type != "cpu" or weight.dtype not in _STORED:
        raise ValueError(
            f"{name}: expected float32, float16 or bfloat16 on the CPU, got {weight.dtype} on {weight.device}"
        )
    kind = wanted or _STORED[weight.dtype]
    largest, most = max(abs(float(end)) for end in torch.aminmax(weight)), _most(kind)
    if not largest <= most:
        raise ValueError(f"{name}: expected finite numbers up to {most:g} for {kind}, got {largest:g}")
    return kind


def _joined(parts: list[_Part]) -> list[_Part]:
    """The same, where layers that models call together are one part."""
    alone = {part.names[0][0]: part for part in parts if len(part.names) == 1}
    out = []
    for part in parts:
        parent, dot, last = part.names[0][0].rpartition(".")
        names = next((names for names in _TOGETHER if last in names), (last,))
        members = [alone[each] for name in names if (each := f"{parent}{dot}{name}") in alone]
        if len(members) < len(names) or not _fit(members):
            out.append(part)
        elif last == names[0]:
            sizes, nbytes = [each.sizes[0] for each in members], sum(each.nbytes for each in members)
            out.append(part._replace(names=[[each.names[0][0] for each in members]], sizes=sizes, nbytes=nbytes))
    return out


def _fit(parts: list[_Part]) -> bool:
    """True if parts of one layer each can be one matrix, of which each has whole panels."""
    first = parts[0]
    return all(each.format == first.format and each.like == first.like for each in parts) and not any(
        each.sizes[0] % 16 for each in parts[:-1]
    )


def _most(kind: str) -> float:
    """The largest magnitude that a format of weights holds; scales of packed ones are f16."""
    line = MATRIX_FORMATS[kind]
    return 65504.0 if line.packed or kind == "f16" else 3.38e38

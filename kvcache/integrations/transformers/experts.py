"""`PackedExperts`: the experts of a mixture. Their weights lie in matrices.

transformers keeps the weights of all experts of a layer in tensors with three axes, and says in attributes of the
module how they lie (`use_experts_implementation`). So one module takes the place of those of all its models.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvcache.integrations.transformers.hf import to_dlpack, torch
from kvcache.integrations.transformers.linear import are_few, copy_of, meets, product, refuse_state, usable
from kvcache.kernels.grouped import multiply_groups
from kvcache.kernels.matrix import Matrix

__all__ = ["PackedExperts", "Projection", "weights_of", "without_weights"]

Float32 = npt.NDArray[np.float32]


def weights_of(module: Any) -> list[str]:
    """The names of the two weights of a module of experts, `(experts, outputs, inputs)` or transposed; else none."""
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "is_transposed"):
        return []
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    return names if all(getattr(module._parameters.get(name), "ndim", 0) == 3 for name in names) else []


def without_weights(module: Any) -> Any:
    """A copy of a module of experts that lacks its weights and their biases; the module itself stays whole."""
    names = weights_of(module)
    gone = {*names, *(f"{name}_bias" for name in names)}
    copied = copy.copy(module)
    copied._parameters = {name: value for name, value in module._parameters.items() if name not in gone}
    return copied


class Projection(NamedTuple):
    """One of the products of each expert.

    Attributes:
        matrices: of each expert.
        bias: float32 `(experts, outputs)`, or None.
        activations: as of `Matrix.multiply`.
    """

    matrices: Sequence[Matrix]
    bias: Float32 | None
    activations: str

    def of_groups(self, rows: Any, groups: Sequence[tuple[int, int]]) -> Any:
        """The products of contiguous rows `(n, channels)` with matrices; `groups`: an expert and its number of rows."""
        out = rows.new_empty((len(rows), len(self.matrices[0])))
        biases = None if self.bias is None else [self.bias[expert] for expert, _ in groups]
        if groups and are_few(rows, rows.shape[1]):
            matrices, counts = [self.matrices[expert] for expert, _ in groups], [count for _, count in groups]
            meeting = meets(self.activations, rows.dtype, matrices[0])
            multiply_groups(matrices, counts, to_dlpack(rows), to_dlpack(out), biases, activations=meeting)
            return out
        stop = 0
        for i, (expert, count) in enumerate(groups):
            start, stop = stop, stop + count
            bias = None if biases is None else biases[i]
            out[start:stop] = product(self.matrices[expert], bias, rows[start:stop], self.activations)
        return out


class PackedExperts(torch.nn.Module):
    """The experts of a layer, without gradients, on the CPU.

    Args:
        experts: transformers' module, `without_weights`. Its gate is used.
        up, down: the products before the gate and after it.
        dtype: of the weights before they were packed.
    """

    def __init__(self, experts: Any, up: Projection, down: Projection, dtype: Any) -> None:
        super().__init__()
        self.experts, self._up, self._down, self._dtype = experts, up, down, dtype
        self.num_experts = len(up.matrices)

    @property
    def projections(self) -> dict[str, Projection]:
        """The products by the names that transformers has for their weights, those before the gate first."""
        return {"gate_up_proj" if self.experts.has_gate else "up_proj": self._up, "down_proj": self._down}

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All of them."""
        return iter([*self._up.matrices, *self._down.matrices])

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Return the weighted sum of the outputs of each row's chosen experts.

        Args:
            hidden_states: `(n, channels)`.
            top_k_index: `(n, k)`, the experts of each row; a number that no expert has stands for none.
            top_k_weights: `(n, k)`.

        Raises:
            RuntimeError, ValueError: as of `PackedLinear.forward`.
        """
        if torch.compiler.is_compiling():
            return _apart(self, hidden_states, top_k_index, top_k_weights)
        x, k, count = usable(hidden_states), top_k_index.shape[-1], self.num_experts
        shares, order = top_k_weights.reshape(-1), None
        if len(x) == 1 and max(chosen := top_k_index[0].tolist()) < count:  # a step of one text: no expert twice
            rows, groups = x.expand(k, -1).contiguous(), [(expert, 1) for expert in chosen]
        else:
            flat = top_k_index.reshape(-1)
            counts = torch.bincount(flat, minlength=count)[:count].tolist()
            groups = [(expert, number) for expert, number in enumerate(counts) if number]
            order = torch.argsort(flat, stable=True)[: sum(counts)]
            rows, shares = x[order // k], shares[order]
        part = self._up.of_groups(rows, groups)
        part = self.experts._apply_gate(part) if self.experts.has_gate else self.experts.act_fn(part)
        part = self._down.of_groups(part.contiguous(), groups)
        if getattr(self.experts, "has_post_expert_norm", False):
            part = self.experts.post_expert_norm(part)
        part = part * shares[:, None]
        if order is not None:
            part = part.new_zeros((len(x) * k, part.shape[-1])).index_copy_(0, order, part)
        return part.view(len(x), k, part.shape[-1]).sum(1).to(x.dtype)

    def extra_repr(self) -> str:
        """Describe the experts for `print(model)`."""
        up, down = self._up.matrices[0], self._down.matrices[0]
        return f"{self.num_experts} x ({up.shape[1]}, {up.shape[0]}), ({down.shape[1]}, {down.shape[0]}), {up.format}"

    def __deepcopy__(self, memo: Any) -> PackedExperts:
        return copy_of(self, memo, self._up, self._down)  # type: ignore[no-any-return]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_state()


_apart = torch.compiler.disable(PackedExperts.forward)

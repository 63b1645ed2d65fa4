"""`PackedLinear`: a linear layer over a `Matrix`; `Joint`: those that models call one after another with one input."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvcache.integrations.transformers.hf import to_dlpack, torch
from kvcache.kernels.matrix import Matrix

__all__ = ["Joint", "PackedLinear", "are_few", "copy_of", "few_products", "meets", "product", "refuse_state", "usable"]

Float32 = npt.NDArray[np.float32]

_FEW_ROWS = 32  # of one input: a call takes tens of microseconds then, more than some of the products


def product(matrix: Matrix, bias: Float32 | None, x: Any, activations: str) -> Any:
    """`x` `(..., columns)` times a matrix transposed, plus a bias, in the dtype of `x`.

    Args:
        activations: as of `Matrix.multiply`. Inputs in bfloat16 meet weights in bf16 as they are.
    """
    rows, columns = matrix.shape
    if are_few(x, columns):
        return few_products(matrix, bias, x, activations, [rows])[0]
    flat = x.reshape(-1, columns).float().numpy()
    out = matrix.multiply(flat, bias, activations=meets(activations, x.dtype, matrix))
    return torch.from_numpy(out).reshape(*x.shape[:-1], rows).to(x.dtype)


def are_few(x: Any, columns: int) -> bool:
    """True if the rows of `x` are multiplied where they lie, without an array between."""
    return x.numel() <= _FEW_ROWS * columns and x.dtype in (torch.float32, torch.bfloat16)


def few_products(
    matrix: Matrix, bias: Float32 | None, x: Any, activations: str, sizes: Sequence[int]
) -> list[Any]:
    """`product` in one tensor for each of `sizes`, its number of columns."""
    if not x.is_contiguous():
        x = x.contiguous()
    outs = [x.new_empty((*x.shape[:-1], size)) for size in sizes]
    matrix.multiply_tensors(to_dlpack(x), map(to_dlpack, outs), bias, activations=meets(activations, x.dtype, matrix))
    return outs


def meets(activations: str, dtype: Any, matrix: Matrix) -> str:
    """The `activations` of `Matrix.multiply` for inputs of a dtype."""
    return "bf16" if activations == "int8" and dtype == torch.bfloat16 and matrix.format == "bf16" else activations


def usable(x: Any) -> Any:
    """An input of a packed layer, detached, with its values in memory as they are.

    Raises:
        RuntimeError: it needs a gradient.
        ValueError: it is not on the CPU.
    """
    if x.requires_grad:
        if torch.is_grad_enabled():
            raise RuntimeError("x: expected no gradients (torch.no_grad()), got an input that requires one")
        x = x.detach()
    if not x.is_cpu:
        raise ValueError(f"x: expected a tensor on the CPU, where packed weights are, got one on {x.device}")
    return x.resolve_neg() if x.is_neg() else x


def refuse_state(name: str = "state_dict") -> NoReturn:
    """Packed weights are not replaced, tied, or saved by torch."""
    raise NotImplementedError(
        f"{name}: expected a model before pack_weights, got packed weights, which save_packed writes"
    )


def copy_of(module: Any, memo: dict[int, Any], *shared: Any) -> Any:
    """A deep copy of a module, with its hooks and attributes, that shares objects which nothing changes."""
    memo.update({id(each): each for each in shared})
    made = memo[id(module)] = object.__new__(type(module))
    made.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return made


class Joint:
    """The weights of one or more linear layers with inputs of the same width, above each other in one matrix.

    Models call some layers one after another with the same few rows: q_proj, k_proj and v_proj, gate_proj and up_proj.
    If all layers were called with one input, the first of them that is called with the next input multiplies for all;
    the others take what is theirs, as long as they are called with the same tensor and it is unchanged.

    Args:
        matrix: the rows of the layers, one layer after another.
        sizes: rows of each layer; all but the last a multiple of 16.
        bias: float32 `(rows of the matrix,)`, or None.
        dtype: of the weights before they were packed.
        activations: as of `Matrix.multiply`. Inputs in bfloat16 meet weights in bf16 as they are.
    """

    def __init__(
        self, matrix: Matrix, sizes: Sequence[int], bias: Float32 | None, dtype: Any, activations: str
    ) -> None:
        self.matrix, self.sizes, self.bias = matrix, tuple(sizes), bias
        self.dtype, self.activations = dtype, activations
        places = list(zip(np.cumsum((0, *self.sizes)).tolist(), self.sizes, strict=False))
        self.parts = [matrix.part(row, size) if len(places) > 1 else matrix for row, size in places]
        self.biases = [None if bias is None else bias[row : row + size] for row, size in places]
        self._last = _Input(None, 0, {})

    def product(self, layer: int, x: Any) -> Any:
        """`x` `(..., columns)` times the weights of a layer transposed, plus its bias, in the dtype of `x`."""
        count, columns = len(self.sizes), self.matrix.shape[1]
        # torch does not count the changes of tensors of inference mode
        if count > 1 and are_few(x, columns) and not x.is_inference():
            last = self._last
            if last.x is not x or last.version != x._version:
                outs: dict[int, Any] = {}
                if len(last.called) == count:
                    products = few_products(self.matrix, self.bias, x, self.activations, self.sizes)
                    outs = dict(enumerate(products))
                last = self._last = _Input(x, x._version, outs)
            last.called.add(layer)
            if len(last.called) == count:
                last.x = None
            out = last.outs.pop(layer, None)
            if out is not None:
                return out
        return product(self.parts[layer], self.biases[layer], x, self.activations)

    def __deepcopy__(self, memo: Any) -> Joint:
        return Joint(self.matrix, self.sizes, self.bias, self.dtype, self.activations)  # nothing changes a matrix


class _Input:
    """The last input of the layers of a `Joint`.

    Attributes:
        x: the tensor, until all layers have been called with it.
        version: how often it had changed.
        outs: products that were computed and not yet taken, by layer.
        called: the layers that were called with it.
    """

    def __init__(self, x: Any, version: int, outs: dict[int, Any]) -> None:
        self.x, self.version, self.outs = x, version, outs
        self.called: set[int] = set()


class PackedLinear(torch.nn.Module):
    """A linear layer without gradients, on the CPU, whose weights lie in a `Matrix`.

    Args:
        joint: its weights and those of layers that are called together with it.
        layer: its place among them.

    Attributes:
        matrix: its weights, `(out_features, in_features)`.
        weight: has the shape and the dtype that the weights had, and no values: a tensor on the device "meta".
        bias: in that dtype, a copy; None: there is none.
    """

    def __init__(self, joint: Joint, layer: int = 0) -> None:
        super().__init__()
        self._joint, self._layer, self.matrix = joint, layer, joint.parts[layer]
        self.out_features, self.in_features = self.matrix.shape

    @property
    def activations(self) -> str:
        """How inputs meet the weights."""
        return self._joint.activations

    @property
    def weight(self) -> Any:
        return torch.empty(self.matrix.shape, dtype=self._joint.dtype, device="meta")

    @property
    def bias(self) -> Any:
        bias = self._joint.biases[self._layer]
        return None if bias is None else torch.tensor(bias, dtype=self._joint.dtype)

    def forward(self, x: Any) -> Any:
        """`x` `(..., in_features)` times the weights transposed, plus the bias, in the dtype of `x`.

        Raises:
            RuntimeError: `x` needs a gradient.
            ValueError: it is not on the CPU, or has another width.
        """
        if torch.compiler.is_compiling():
            return _apart(self, x)
        return self._joint.product(self._layer, usable(x))

    def extra_repr(self) -> str:
        """Describe the layer for `print(model)`."""
        bias = self._joint.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, {self.matrix.format}"

    def __deepcopy__(self, memo: Any) -> PackedLinear:
        return copy_of(self, memo, self.matrix)  # type: ignore[no-any-return]

    def register_parameter(self, name: str, param: Any) -> None:
        """Take a parameter that is assigned, as `tie_weights` does."""
        if name in ("weight", "bias"):
            refuse_state(name)
        super().register_parameter(name, param)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_state()


_apart = torch.compiler.disable(PackedLinear.forward)

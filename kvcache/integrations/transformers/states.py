"""`StoredStates`: K or V of one layer as a tensor that is made dense only when an operation needs its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache.integrations.transformers.hf import torch, tree_map

if TYPE_CHECKING:
    from kvcache.integrations.transformers.layer import PagedLayer

__all__ = ["StoredStates"]

_make, _CPU = torch.Tensor._make_wrapper_subclass, torch.device("cpu")


class StoredStates(torch.Tensor):
    """K (`which` 0) or V (1) of a layer, `(batch, KV heads, tokens, head_dim)`, as they stand in the blocks.

    The registered attention reads the blocks and never asks for values. Any other operation gets a dense tensor: of
    what the cache holds, so in a quantised format the rounded values.

    Raises:
        RuntimeError: an operation needs values that the cache has dropped, replaced or reordered since.
        ValueError: an operation needs values of a layer that evicts tokens.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, layer: PagedLayer, which: int, shape: tuple[int, int, int, int], dtype: Any, total: int) -> Any:
        states = _make(cls, shape, dtype=dtype, device=_CPU)
        states._layer, states._which, states._total, states._epoch = layer, which, total, layer.epoch
        return states

    def dense(self, reason: str) -> Any:
        """The values, `shape` and `dtype` as of this tensor; `reason`: why they are needed."""
        self._layer.refuse_dense(reason)
        if self._epoch != self._layer.epoch:
            raise RuntimeError("states: expected a cache without changes since `update`, got a crop, reorder or reset")
        return self._layer.dense(self._which, self._total, self.shape[2]).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (old,) = args
            new = cls(old._layer, old._which, tuple(old.shape), old.dtype, old._total)
            new._epoch = old._epoch
            return new
        reason = f"the operation {func} on cached states"
        dense = tree_map(lambda each: each.dense(reason) if type(each) is cls else each, (args, kwargs or {}))
        for each in args:
            if type(each) is cls:
                each._layer.state.ways.went_dense(reason)
        return func(*dense[0], **dense[1])

    def __repr__(self) -> str:
        return f"StoredStates({'KV'[self._which]}, shape={tuple(self.shape)}, dtype={self.dtype})"

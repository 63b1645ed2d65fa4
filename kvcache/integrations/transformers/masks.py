"""Attention masks: `PatternMask` says a known pattern in a few words, and is made dense where an operation needs it.

transformers builds the mask of a forward pass with the function registered here, once per kind of layer. Causal,
causal within a window and bidirectional patterns, each with any 2D padding, become a `PatternMask`; or None if every
query sees all tokens up to its own, as for `sdpa`. Any other pattern becomes the boolean 4D mask of `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.integrations.transformers.hf import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    torch,
    tree_map,
)

__all__ = ["PatternMask", "make_mask"]

# Model types that add the mask to scores, or scores to the mask, by themselves: they need one of numbers, always.
ADDED = ("deepseek_v4", "git")


class PatternMask(torch.Tensor):
    """A boolean mask `(batch, 1, queries, keys)`.

    Attributes:
        causal: whether a query sees the tokens up to its own; otherwise all.
        window: a query at position p sees positions p - window + 1 to p; None: no limit.
        padding: bool `(batch, keys)`, False if a token is masked; None: no token is.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, shape: tuple[int, int, int, int], causal: bool, window: int | None, padding: npt.NDArray[np.bool_] | None,
        make: Callable[[], Any],
    ) -> Any:
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device="cpu", requires_grad=False)
        mask.causal, mask.window, mask.padding, mask._make = causal, window, padding, cache(make)
        return mask

    def dense(self) -> Any:
        """The boolean tensor."""
        return self._make()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.alias.default:
            return _last_queries(*args)
        if func is torch.ops.aten.slice.Tensor and (part := _last_queries(*args)) is not None:
            return part
        args, kwargs = tree_map(lambda each: each.dense() if type(each) is cls else each, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"PatternMask(shape={tuple(self.shape)}, causal={self.causal}, window={self.window})"


def _last_queries(mask: PatternMask, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    """The mask of the last queries alone, or all of it; None: the slice is another one."""
    size = mask.shape[dim]
    first, last, _ = slice(start, stop).indices(size)
    if step != 1 or last != size or (first and dim != 2):
        return None
    batch, one, queries, keys = mask.shape
    shape = batch, one, queries - first, keys
    return PatternMask(shape, mask.causal, mask.window, mask.padding, lambda: mask.dense()[:, :, first:])


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Any = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **kwargs: Any,
) -> Any:
    """The mask of one kind of layers; arguments as of transformers' `sdpa_mask`."""
    if getattr(kwargs.get("config"), "model_type", None) in ADDED:
        return eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs,
        )

    def make(**skips: bool) -> Any:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            **{"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, **skips}, **kwargs,
        )

    causal, window, known = _pattern(mask_function, local_size)
    if causal:  # where a mask must not be skipped, models compute with it
        known = known and allow_is_causal_skip and not isinstance(q_offset, torch.Tensor)
        known = known and q_offset + q_length == kv_offset + kv_length
    else:
        known = known and allow_is_bidirectional_skip
    if not known or torch.compiler.is_compiling():
        return make(allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].numpy()
        if padding.shape[1] < kv_length:  # as transformers: tokens that the mask does not reach are masked
            padding = np.pad(padding, ((0, 0), (0, kv_length - padding.shape[1])))
        if padding.all():
            padding = None
    if window is not None and kv_length <= window:
        window = None
    # None if `sdpa` may have None, and reads it alike: all visible, or causal over equally many queries and keys.
    if padding is None and window is None and (not causal or q_length in (1, kv_length)):
        return None
    return PatternMask((batch_size, 1, q_length, kv_length), causal, window, padding, make)


def _pattern(mask_function: Any, local_size: int | None) -> tuple[bool, int | None, bool]:
    """`(causal, window, known)` of transformers' function of indices."""
    if local_size is None:
        return mask_function is not bidirectional_mask_function, None, mask_function in _PLAIN
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return True, local_size, False
    parts = mask_function.__closure__[0].cell_contents
    names = [getattr(part, "__qualname__", "") for part in parts]
    known = names == ["sliding_window_overlay.<locals>.inner_mask", "causal_mask_function"]
    return True, local_size, known and parts[0].__closure__[0].cell_contents == local_size


_PLAIN = (causal_mask_function, bidirectional_mask_function)

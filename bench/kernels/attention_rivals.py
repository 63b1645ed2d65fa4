"""Attention of rivals: NumPy, PyTorch, and llama.cpp's CPU kernels if llama-cpp-python is installed.

Each rival has as many distinct K and V as our cache has layers, contiguous and in its best layout; each call attends
over the next one. A rival is yielded as `(name, run)`; `run` makes one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.common import timed
from bench.support.scattered import Shape, fill_rows, queries_of

__all__ = ["LLAMA", "NUMPY", "TORCH", "TORCH_BEST", "TORCH_HALF", "availability", "decode_rivals", "prefill_rivals"]

Float32 = npt.NDArray[np.float32]
Runs = Iterator[tuple[str, Callable[[], object]]]

NUMPY, TORCH, TORCH_BEST, TORCH_HALF = "NumPy", "torch SDPA", "torch best f32", "torch best bf16"
LLAMA = {"f16": "llama.cpp f16", "q8_0": "llama.cpp q8_0", "q4_0": "llama.cpp q4_0"}


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _ggml() -> Any:
    try:
        from bench.kernels.ggml import load

        return load()
    except (ImportError, OSError, AttributeError):
        return None


def availability() -> list[str]:
    """A line per rival: its version, or a note that it is absent."""
    torch, ggml = _torch(), _ggml()
    return [
        f"PyTorch {torch.__version__}" if torch else "not measured: PyTorch (not installed)",
        f"llama-cpp-python {ggml.version}" if ggml else "not measured: llama.cpp (llama-cpp-python not installed)",
    ]


def _heads_first(shape: Shape) -> tuple[Float32, Float32]:
    """Keys and values as `(batch, kv_heads, tokens, head_dim)`."""
    rows = fill_rows(shape.context, shape.kv_heads, shape.head_dim)
    return tuple(np.repeat(x.transpose(1, 0, 2)[None], shape.batch, axis=0) for x in rows)  # type: ignore[return-value]


class _Turns:
    """Calls `function` on each of several sets of arrays in turn."""

    def __init__(self, function: Callable[[Any, Any], object], sets: list[tuple[Any, Any]]) -> None:
        self._function, self._sets, self._turn = function, sets, 0

    def __call__(self) -> object:
        self._turn = (self._turn + 1) % len(self._sets)
        return self._function(*self._sets[self._turn])


def decode_rivals(shape: Shape, layers: int, threads: int) -> Runs:
    """The decode step of each rival, one query per sequence: `(name, run)`."""
    keys, values = _heads_first(shape)
    queries = queries_of(shape, shape.batch)
    grouped = queries.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)
    yield NUMPY, _Turns(partial(_numpy_decode, grouped), [(keys.copy(), values.copy()) for _ in range(layers)])
    torch = _torch()
    if torch is not None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        sets = [(torch.from_numpy(keys.copy()), torch.from_numpy(values.copy())) for _ in range(layers)]
        single = torch.from_numpy(queries[:, :, None].copy())
        yield TORCH, _Turns(lambda k, v: sdpa(single, k, v, enable_gqa=True), sets)
        stacked = torch.from_numpy(grouped.copy())
        yield TORCH_BEST, _Turns(lambda k, v: sdpa(stacked, k, v), sets)
        half = [tuple(x.to(torch.bfloat16) for x in pair) for pair in sets]
        yield TORCH_HALF, _Turns(partial(sdpa, stacked.to(torch.bfloat16)), half)
    if _ggml() is not None:
        from bench.kernels.ggml import FlashAttention

        for name, label in LLAMA.items():
            yield label, FlashAttention(name, queries[:, None], keys, values, layers, threads, causal=False).run


def _numpy_decode(queries: Float32, keys: Float32, values: Float32) -> Float32:
    scores = queries @ keys.transpose(0, 1, 3, 2)
    scores *= np.float32(queries.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ values


def prefill_rivals(shape: Shape, rows: int, threads: int) -> Runs:
    """Attention of `rows` causal queries at the last positions of one sequence: `(name, run)`."""
    keys, values = _heads_first(shape)
    queries = np.ascontiguousarray(queries_of(shape, rows).transpose(1, 0, 2))[None]
    mask = np.tril(np.ones((rows, shape.context), bool), shape.context - rows)
    torch = _torch()
    if torch is not None:
        arrays = [torch.from_numpy(x) for x in (queries, keys, values)]
        runs = dict(_torch_prefill(torch, *arrays, torch.from_numpy(mask)))
        yield TORCH, runs["gqa"]
        yield TORCH_BEST, _fastest(runs)
        yield TORCH_HALF, _fastest(dict(_torch_prefill(torch, *(x.bfloat16() for x in arrays), torch.from_numpy(mask))))
    if _ggml() is not None:
        from bench.kernels.ggml import FlashAttention

        rows_first = np.ascontiguousarray(queries.transpose(0, 2, 1, 3))
        for name, label in LLAMA.items():
            yield label, FlashAttention(name, rows_first, keys, values, 1, threads, causal=True).run


def _torch_prefill(torch: Any, queries: Any, keys: Any, values: Any, mask: Any) -> Runs:
    """The ways to call SDPA: grouped heads, heads repeated beforehand, the queries of a group as one head's rows."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    group = queries.shape[1] // keys.shape[1]
    additive = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, float("-inf"))
    yield "gqa", partial(sdpa, queries, keys, values, attn_mask=additive, enable_gqa=True)
    yield "gqa, boolean mask", partial(sdpa, queries, keys, values, attn_mask=mask, enable_gqa=True)
    wide = [x.repeat_interleave(group, dim=1) for x in (keys, values)]
    yield "repeated heads", partial(sdpa, queries, *wide, attn_mask=additive)
    stacked = queries.reshape(1, keys.shape[1], -1, queries.shape[-1])
    yield "stacked heads", partial(sdpa, stacked, keys, values, attn_mask=additive.repeat(group, 1))


def _fastest(runs: dict[str, Callable[[], object]]) -> Callable[[], object]:
    return min(runs.values(), key=lambda run: min(timed(run), timed(run)))

"""Other ways of keeping K and V, in the table of a checkpoint: KIVI's recipe, and transformers' QuantizedCache."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.engine import Transformer

__all__ = ["HF", "Kivi", "hf_installed", "hf_missing", "hf_runs", "is_plain", "quantised"]

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.uint32]

GROUP, RESIDUAL = 32, 128  # of KIVI's paper; transformers has the same residual
PIECE = 32  # tokens that QuantizedCache gets at once; a piece sees itself unrounded
HF = {"transformers hqq, 4 bits": 4, "transformers hqq, 2 bits": 2}


def quantised(values: Floats, bits: int) -> Floats:
    """Values as `bits` and a step and a minimum for each group along the last axis give them back."""
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    step = (high - low) / np.float32((1 << bits) - 1)
    return np.asarray(np.rint((values - low) / np.where(step > 0, step, 1)) * step + low, np.float32)


def is_plain(model: Transformer) -> bool:
    """Whether all layers attend to all tokens, without soft caps and sinks: what `Kivi` computes."""
    return all(each.window is None and not each.softcap and each.sinks is None for each in model.attention)


class Kivi:
    """The logits of a network over K and V by KIVI's recipe (arXiv 2402.02750), computed by NumPy.

    Keys are rounded per channel in groups of 32 tokens, values per token in groups of 32 channels, with a step and a
    minimum in f16 for each group. Groups of 128 tokens are read unrounded by their own queries. A recipe and not the
    authors' code, which needs a GPU.
    """

    def __init__(self, model: Transformer, bits: int, context: int) -> None:
        self._model, self._bits = model, bits
        self.bits = bits + 32 / GROUP + 16 * min(RESIDUAL, context) / context

    def __call__(self, tokens: Tokens) -> Floats:
        count = len(tokens) - 1
        return np.asarray(self._model.forward(tokens[:-1], np.arange(count), self._attend, "all"))

    def _attend(self, layer: int, queries: Floats, keys: Floats, values: Floats, *_: Any) -> Floats:
        count, num_heads, dim = queries.shape
        scale, num_kv = self._model.attention[layer].scale or dim**-0.5, keys.shape[1]
        whole = count // RESIDUAL * RESIDUAL
        width = min(GROUP, dim)
        by_channel = keys[:whole].reshape(whole // GROUP, GROUP, num_kv, dim).swapaxes(1, 3)
        packed_keys = quantised(by_channel, self._bits).swapaxes(1, 3).reshape(whole, num_kv, dim)
        by_group = values[:whole].reshape(whole, num_kv, dim // width, width)
        packed_values = quantised(by_group, self._bits).reshape(whole, num_kv, dim)
        found = np.empty_like(queries)
        for start in range(0, count, RESIDUAL):
            stop = min(start + RESIDUAL, count)
            seen_keys = np.concatenate([packed_keys[:start], keys[start:stop]])
            seen_values = np.concatenate([packed_values[:start], values[start:stop]])
            rows = queries[start:stop].reshape(stop - start, num_kv, num_heads // num_kv, dim)
            scores = np.einsum("qhgd,khd->hgqk", rows, seen_keys, optimize=True) * np.float32(scale)
            scores[..., start:][..., np.triu(np.ones((stop - start,) * 2, bool), 1)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hgqk,khd->qhgd", scores / scores.sum(-1, keepdims=True), seen_values, optimize=True)
            found[start:stop] = mixed.reshape(stop - start, num_heads, dim)
        return found


def hf_installed() -> bool:
    """Whether transformers' QuantizedCache can run here with hqq."""
    return not hf_missing()


def hf_missing() -> list[str]:
    """The packages that its rows need and that are not installed."""
    return [name for name in ("torch", "transformers", "hqq") if importlib.util.find_spec(name) is None]


def hf_runs(path: Path, context: int) -> dict[str, Any]:
    """transformers over its DynamicCache, the reference, and over QuantizedCache with hqq; by name."""
    import torch
    from transformers import AutoModelForCausalLM

    place: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()
    return {"transformers f32": _Hf(model, 0, context)} | {
        name: _Hf(model, bits, context) for name, bits in HF.items()
    }


class _Hf:
    """The logits of a model of transformers. Its cache gets a text in pieces of 32 tokens."""

    def __init__(self, model: Any, bits: int, context: int) -> None:
        self._model, self._nbits = model, bits
        group = 64  # of QuantizedCache: `q_group_size`, a scale and a zero in f16 for each
        self.bits = bits + 32 / group + 16 * min(RESIDUAL, context) / context if bits else 32.0

    def __call__(self, tokens: Tokens) -> Floats:
        import torch
        from transformers import DynamicCache, QuantizedCache

        config, cache = self._model.config, DynamicCache(config=self._model.config)
        if self._nbits:
            cache = QuantizedCache("hqq", config, nbits=self._nbits, axis_key=1, axis_value=1)
        ids, found = torch.from_numpy(tokens[:-1].astype(np.int64))[None], []
        with torch.no_grad():
            for start in range(0, ids.shape[1], PIECE):
                piece = ids[:, start : start + PIECE]
                found.append(self._model(piece, past_key_values=cache).logits[0].float().numpy())
        return np.concatenate(found)

"""Other ways of keeping K and V, in the table of a checkpoint: KIVI's recipe, and transformers' QuantizedCache."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.engine import Transformer

__all__ = ["HF", "Kivi", "hf_missing", "hf_rows", "hf_runs", "is_plain", "quantised"]

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.uint32]

GROUP, RESIDUAL = 32, 128  # of KIVI's paper; transformers has the same residual
PIECE = 32  # tokens that QuantizedCache gets at once; a piece sees itself unrounded
# rows of QuantizedCache: its backend, bits, and the axis that transformers' guide names for it
HF = {
    "transformers quanto, 4 bits": ("quanto", 4, 0), "transformers quanto, 2 bits": ("quanto", 2, 0),
    "transformers hqq, 4 bits": ("hqq", 4, 1), "transformers hqq, 2 bits": ("hqq", 2, 1),
}
_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq"}  # of the backends


def quantised(values: Floats, bits: int) -> Floats:
    """Values as `bits` and a step and a minimum for each group along the last axis give them back."""
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    step = (high - low) / np.float32((1 << bits) - 1)
    return np.asarray(np.rint((values - low) / np.where(step > 0, step, 1)) * step + low, np.float32)


def is_plain(model: Transformer) -> bool:
    """True if all layers attend to all tokens, without soft caps and sinks: what `Kivi` computes."""
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


def hf_rows() -> list[str]:
    """The rows of QuantizedCache that can be measured here."""
    missing = {*hf_missing()}
    return [] if missing & {"torch", "transformers"} else [name for name in HF if _MODULES[HF[name][0]] not in missing]


def hf_missing() -> list[str]:
    """The modules that its rows need and that are not installed."""
    return [name for name in ("torch", "transformers", *_MODULES.values()) if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    package, dot, _ = module.partition(".")
    return importlib.util.find_spec(package) is not None and (not dot or importlib.util.find_spec(module) is not None)


def hf_runs(path: Path, context: int, names: Sequence[str]) -> dict[str, Any]:
    """transformers over its DynamicCache, the reference, and over QuantizedCache in some rows of `HF`; by name."""
    import torch
    from transformers import AutoModelForCausalLM

    place: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()
    return {"transformers f32": _Hf(model, None, context)} | {name: _Hf(model, HF[name], context) for name in names}


class _Hf:
    """The logits of a model of transformers. Its cache gets a text in pieces of 32 tokens."""

    def __init__(self, model: Any, kind: tuple[str, int, int] | None, context: int) -> None:
        self._model, self._kind = model, kind
        group = 64  # of QuantizedCache: `q_group_size`, a scale and a zero in f16 for each
        self.bits = kind[1] + 32 / group + 16 * min(RESIDUAL, context) / context if kind else 32.0

    def __call__(self, tokens: Tokens) -> Floats:
        import torch
        from transformers import DynamicCache, QuantizedCache

        config, cache = self._model.config, DynamicCache(config=self._model.config)
        if self._kind:
            backend, nbits, axis = self._kind
            cache = QuantizedCache(backend, config, nbits=nbits, axis_key=axis, axis_value=axis)
        ids, found = torch.from_numpy(tokens[:-1].astype(np.int64))[None], []
        with torch.no_grad():
            for start in range(0, ids.shape[1], PIECE):
                piece = ids[:, start : start + PIECE]
                found.append(self._model(piece, past_key_values=cache).logits[0].float().numpy())
        return np.concatenate(found)

"""The transformer: a decoder of the Llama kind (Llama, Mistral, Qwen2, Qwen3), in float32 NumPy.

It owns no cache. `forward` calls its argument `attend` with queries, keys and values once per layer and uses the
result, so the same network runs over a paged, a quantised or a shared cache.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.config import ModelConfig
from kvcache.engine.linear import linear
from kvcache.engine.protocols import Attend, Logits
from kvcache.engine.rope import RopeTable
from kvcache.engine.weights import LayerWeights, Weights

__all__ = ["Transformer"]

Float32 = NDArray[np.float32]


class Transformer:
    """A network and its weights.

    Attributes:
        config: sizes and options.
        weights: in float32.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._rope = RopeTable(config.rope, config.head_dim, config.max_position_embeddings)

    def __repr__(self) -> str:
        c = self.config
        return f"Transformer({c.architecture}, {c.num_layers} layers, hidden_size {c.hidden_size})"

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Transformer:
        """Load a Hugging Face checkpoint directory. Errors are those of `ModelConfig` and `Weights`."""
        config = ModelConfig.from_pretrained(directory)
        return cls(config, Weights.from_pretrained(directory, config))

    def forward(
        self,
        tokens: NDArray[np.uint32],
        positions: NDArray[np.int64],
        attend: Attend,
        logits: Logits = "last",
        *,
        sink_positions: NDArray[np.int64] | None = None,
    ) -> Float32:
        """Run new tokens through all layers; `protocols.StreamingModel.forward` gives the shapes."""
        config, eps = self.config, self.config.rms_norm_eps
        x = self.weights.embedding[tokens]
        turns = self._rope.rows(positions)
        sink_turns = () if sink_positions is None else (self._rope.rows(sink_positions),)
        for i, layer in enumerate(self.weights.layers):
            projected = self._project(_rms_norm(x, layer.input_norm, eps), layer, turns, *sink_turns)
            mixed = attend(i, *projected).reshape(len(x), -1)
            if i == config.num_layers - 1 and logits != "all":
                # After the last attention rows are independent: continue with the requested ones only.
                first = len(x) - 1 if logits == "last" else len(x)
                x, mixed = x[first:], mixed[first:]
            if len(x):
                x += linear(mixed, layer.output, layer.output_bias)
                x += _mlp(_rms_norm(x, layer.mlp_norm, eps), layer)
        if not len(x):
            return np.empty((0, config.vocab_size), np.float32)
        return linear(_rms_norm(x, self.weights.norm, eps), self.weights.head)

    def _project(
        self, x: Float32, layer: LayerWeights, turns: tuple[Float32, Float32], *sink_turns: tuple[Float32, Float32]
    ) -> tuple[Float32, ...]:
        """Rotated queries, rotated keys and values of `x` `(n, hidden)`, each `(n, heads, head_dim)`.

        They are followed, for each of `sink_turns`, by the queries rotated by it.
        """
        config = self.config
        heads = linear(x, layer.qkv, layer.qkv_bias).reshape(len(x), -1, config.head_dim)
        turning = config.num_heads + config.num_kv_heads
        turned = heads[:, :turning]
        if layer.qk_norm is not None:
            turned = _rms_norm(turned, layer.qk_norm, config.rms_norm_eps)
        more = [self._rope.rotate(turned[:, : config.num_heads], each) for each in sink_turns]
        turned = self._rope.rotate(turned, turns)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, turning:], *more


def _rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, over the last axis."""
    if x.shape[:-1] == (1,):  # a decode step: scalars take a third of the time of arrays with one element
        row = x[0]
        normed: Float32 = x * np.float32(1 / math.sqrt(float(np.dot(row, row)) / len(row) + eps))
        normed *= weight
        return normed
    mean = np.einsum("...i,...i->...", x, x)
    mean /= x.shape[-1]
    mean += eps
    normed = x / np.sqrt(mean)[..., None]
    normed *= weight
    return normed


def _mlp(x: Float32, layer: LayerWeights) -> Float32:
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202): `down(silu(gate(x)) * up(x))`.

    silu(g) = g * sigmoid(g) = h + h * tanh(h) with h = g / 2, which cannot overflow.
    """
    both = linear(x, layer.gate_up, layer.gate_up_bias)
    half = both.shape[1] // 2
    gate, up = both[:, :half], both[:, half:]
    gate *= np.float32(0.5)
    hidden = np.tanh(gate)
    hidden += np.float32(1)
    hidden *= gate
    hidden *= up
    return linear(hidden, layer.down, layer.down_bias)

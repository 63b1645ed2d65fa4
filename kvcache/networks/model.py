"""The transformer: a decoder of the Llama kind (Llama, Mistral, Qwen2, Qwen3), with float32 activations.

It owns no cache. `forward` calls its argument `attend` with queries, keys and values once per layer and uses the
result, so the same network runs over a paged, a quantised or a shared cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.core.arguments import short
from kvcache.core.layers import rms_norm, swiglu
from kvcache.networks.config import ModelConfig
from kvcache.networks.gguf import GgufCheckpoint, is_gguf
from kvcache.networks.protocols import Attend, Logits
from kvcache.networks.rope import RopeTable
from kvcache.networks.weights import LayerWeights, Progress, Weight, Weights

__all__ = ["Transformer"]

Float32 = NDArray[np.float32]


class Transformer:
    """A network and its weights.

    A row of every result has the same bits whatever other rows it is computed with, and on any number of threads.

    Args:
        config: sizes and options.
        weights: as `Weights` loads them.
        activations: how rows meet packed weights: "int8", a scale per group of 32 channels, or "exact", with 15 bits
            and half of the speed of many rows. Weights in floats are always multiplied in float32.
    """

    def __init__(self, config: ModelConfig, weights: Weights, activations: str = "int8") -> None:
        if activations not in ("int8", "exact"):
            raise ValueError(f"activations: expected int8 or exact, got {short(activations)}")
        self.config = config
        self.weights = weights
        self.activations = activations
        self._rope = RopeTable(config.rope, config.head_dim, config.max_position_embeddings)

    def __repr__(self) -> str:
        c = self.config
        return f"Transformer({c.architecture}, {c.num_layers} layers, hidden_size {c.hidden_size})"

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        weights: str = "auto",
        activations: str = "int8",
        progress: Progress | None = None,
    ) -> Transformer:
        """Load a Hugging Face checkpoint directory, or a GGUF file.

        Args:
            directory: of `config.json` and safetensors; or a file whose name ends in `.gguf`.
            weights, progress: as for `Weights.read`.
            activations: as for the constructor.

        Errors are those of `ModelConfig` and `Weights`.
        """
        if is_gguf(directory):
            return cls.from_gguf(directory, weights=weights, activations=activations, progress=progress)
        config = ModelConfig.from_pretrained(directory)
        return cls(config, Weights.from_pretrained(directory, config, weights, progress), activations)

    @classmethod
    def from_gguf(
        cls, path: str | Path, *, weights: str = "auto", activations: str = "int8", progress: Progress | None = None
    ) -> Transformer:
        """Load a GGUF file of any name. Errors are those of `GgufCheckpoint` and `Weights`."""
        checkpoint = GgufCheckpoint(path)
        return cls(checkpoint.config, Weights.read(checkpoint, checkpoint.config, weights, progress), activations)

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
        x = self.weights.embedding[tokens.astype(np.int64)]
        turns = self._rope.rows(positions)
        sink_turns = () if sink_positions is None else (self._rope.rows(sink_positions),)
        for i, layer in enumerate(self.weights.layers):
            projected = self._project(rms_norm(x, layer.input_norm, eps), layer, turns, *sink_turns)
            mixed = attend(i, *projected).reshape(len(x), -1)
            if i == config.num_layers - 1 and logits != "all":
                # After the last attention rows are independent: continue with the requested ones only.
                first = len(x) - 1 if logits == "last" else len(x)
                x, mixed = x[first:], mixed[first:]
            if len(x):
                x += self._times(mixed, layer.output, layer.output_bias)
                both = self._times(rms_norm(x, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
                x += self._times(swiglu(both), layer.down, layer.down_bias)
        if not len(x):
            return np.empty((0, config.vocab_size), np.float32)
        return self._times(rms_norm(x, self.weights.norm, eps), self.weights.head)

    def _times(self, x: Float32, weight: Weight, bias: Float32 | None = None) -> Float32:
        return weight.multiply(x, bias, exact=self.activations == "exact")

    def _project(
        self, x: Float32, layer: LayerWeights, turns: tuple[Float32, Float32], *sink_turns: tuple[Float32, Float32]
    ) -> tuple[Float32, ...]:
        """Rotated queries, rotated keys and values of `x` `(n, hidden)`, each `(n, heads, head_dim)`.

        They are followed, for each of `sink_turns`, by the queries rotated by it.
        """
        config = self.config
        heads = self._times(x, layer.qkv, layer.qkv_bias).reshape(len(x), -1, config.head_dim)
        turning = config.num_heads + config.num_kv_heads
        turned = heads[:, :turning]
        if layer.qk_norm is not None:
            turned = rms_norm(turned, layer.qk_norm, config.rms_norm_eps)
        more = [self._rope.rotate(turned[:, : config.num_heads], each) for each in sink_turns]
        turned = self._rope.rotate(turned, turns)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, turning:], *more

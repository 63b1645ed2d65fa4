"""The configuration of a network: `config.json` of its checkpoint, read strictly.

An option that changes the network's result is either supported or refused by name. Absent keys have the defaults
of the transformers library, which wrote the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvcache.networks.config_fields import read_fields
from kvcache.networks.expert_sizes import ExpertSizes
from kvcache.networks.families import family_of
from kvcache.networks.files import read_json, refuse_adapter
from kvcache.networks.index_sizes import IndexSizes
from kvcache.networks.latent_sizes import LatentSizes
from kvcache.networks.layer_sizes import LayerSizes
from kvcache.networks.recurrent_sizes import Mixer, Mlp, Multipliers, NextLayer, RecurrentSizes
from kvcache.networks.residual_streams import StreamSizes
from kvcache.networks.rope import QueryGrowth, Rope
from kvcache.networks.towers import text_config_of

__all__ = ["ModelConfig"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Its features are fields; `families` says which architecture has which.

    Attributes:
        architecture: the class name in the checkpoint, e.g. "LlamaForCausalLM"; that of the text network, if it has
            more than one.
        intermediate_size: of the MLP, or of one expert.
        num_heads, num_kv_heads, head_dim: query heads (`sizes` may have others), KV heads (a divisor), channels of
            one head. With `latent` one KV head, of the channels that a cache has.
        latent: the sizes of latent attention; None: heads have K and V of their own.
        index: those of the indexers that choose its tokens; None: a query attends to all that it sees.
        sizes: those of each layer, which may be others.
        max_position_embeddings: positions are in [0, max_position_embeddings).
        rope: the rotary position embedding.
        window_rope: that of the layers with a window, if it is another one.
        rotary_dim: the channels of a head that it turns, the first ones.
        window_rotary_dim: those in layers with a window.
        rotated: which layers have one.
        mixers: what mixes the tokens of each layer: attention, a recurrence with a state, or nothing.
        paired: whether layers come in pairs: one with a state, and one that attends and takes the rows that this took.
        multipliers: numbers that parts of paired layers multiply by.
        recurrence: the sizes of the layers with a state; None: there are none.
        windows: for each layer the number of tokens that a query sees, itself among them; None: all tokens before it.
        causal: False: a query also sees the tokens behind it; with a window as many as before it.
        chunked: whether these are chunks: a query sees the tokens of its own one, from position 0 on, up to itself.
        attention_scale: of the scores; None: `head_dim**-0.5`.
        attention_softcap: scores become `cap * tanh(score / cap)`; None: they stay.
        sinks: in which layers each query head has a logit that joins the normaliser of its softmax.
        attention_gate: whether each head of queries is followed by a gate, whose sigmoid its results are multiplied by.
        gates: what the results of attention are multiplied by: nothing, or a curve of one number for each head or
            channel.
        gate_curve: the curve: a sigmoid, or `ln(1 + e^x)`.
        qkv_bias, output_bias, mlp_bias: which projections add a bias.
        value_scale: multiplies values.
        value_norm: whether values pass through an RMSNorm without a weight.
        qk_norm: how queries and keys pass through an RMSNorm before RoPE: not, each head alone, or all heads at once;
            "turned": each head alone after it; "layer": each head alone through a LayerNorm with weights of its own;
            "plain": each head alone, without weights; "unit": so after RoPE, in layers that have one.
        unrotated_growth: how queries grow with their position, from 1 on, in layers without RoPE; None: they do not.
        norm: of the residual stream: an RMSNorm or a LayerNorm; `norm_bias`: whether that adds a bias.
        norms: where each layer's norms are: before attention and MLP, after them, or both; "parallel": one before
            both, which then take the same rows; "mixed": before in layers with a state, after in the others.
        mlps: what follows the mixer of each layer: an MLP, experts, or nothing.
        mlp_gate: whether an MLP has a gate; if not, it is `down(activation(up(x)))`.
        activation: of the gate in the MLP, or of an MLP without one; "relu2" is `max(x, 0)**2`, "xielu" has
            four numbers of its own in each layer.
            "clamped" is `gate * sigmoid(alpha * gate) * (up + 1)`, with gate and up
            limited to `clamped_limit`, and `clamped_alpha` as alpha.
        limits: for each layer what bounds SwiGLU in its MLP, or in the one beside its experts, and in its experts: its
            silu is at most this, up is from minus this to it; 0: nothing does.
        experts_per_token: of `num_experts`; 0: there are none.
        experts: what layers with experts have beside their number; None: there are none.
        layer_inputs: the size of what each layer is given of each token beside the residual stream; 0: nothing.
        layer_input_tokens: the first tokens have inputs of their own; others have those of token 0.
        streams: the residual streams, and what goes along with them; None: there is one.
        layer_scales: whether each layer multiplies its result by a number.
        embedding_norm: whether the embedding passes through an RMSNorm without a weight.
        post_norm_eps: what norms of what attention and MLP add have in place of `rms_norm_eps`.
        embedding_scale, residual_scale, logit_scale: multiply the embedding, what a layer's parts add, the logits.
        logit_softcap: as `attention_softcap`, for the logits.
        head_bias: whether the output matrix adds a bias.
        tie_word_embeddings: whether the output matrix is the embedding, unless the files have another one.
        eos_token_ids: tokens that end a text.
        next_layers: how many MTP layers the files have, behind the last one.
        next_layer: how these are made; None: no layer attends as they do, and they are not read.
        draft_layers: how many of the layers are such ones: 0, or 1 by `with_draft_layer`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentSizes | None
    index: IndexSizes | None
    sizes: tuple[LayerSizes, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    post_norm_eps: float
    rope: Rope
    window_rope: Rope | None
    rotary_dim: int
    window_rotary_dim: int
    rotated: tuple[bool, ...]
    mixers: tuple[Mixer, ...]
    paired: bool
    multipliers: Multipliers | None
    recurrence: RecurrentSizes | None
    windows: tuple[int | None, ...]
    causal: bool
    chunked: bool
    attention_scale: float | None
    attention_softcap: float | None
    sinks: Literal["", "all", "windows"]
    attention_gate: bool
    gates: Literal["", "head", "channel"]
    gate_curve: Literal["sigmoid", "softplus"]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    value_norm: bool
    value_scale: float
    qk_norm: Literal["", "head", "all", "turned", "layer", "plain", "unit"]
    unrotated_growth: QueryGrowth | None
    norm: Literal["rms", "layer"]
    norm_bias: bool
    norms: Literal["before", "after", "both", "parallel", "mixed"]
    mlps: tuple[Mlp, ...]
    mlp_gate: bool
    activation: Literal["silu", "gelu_tanh", "relu2", "xielu", "clamped"]
    clamped_alpha: float
    clamped_limit: float
    limits: tuple[tuple[float, float], ...]
    num_experts: int
    experts_per_token: int
    experts: ExpertSizes | None
    layer_inputs: int
    layer_input_tokens: int
    streams: StreamSizes | None
    layer_scales: bool
    embedding_norm: bool
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None
    head_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    next_layers: int = 0
    next_layer: NextLayer | None = None
    draft_layers: int = 0

    @property
    def trunk_layers(self) -> int:
        """The layers of the network itself."""
        return self.num_layers - self.draft_layers

    def norms_of(self, layer: int) -> str:
        """Where the norms of a layer are."""
        return self.norms if self.norms != "mixed" else "before" if self.mixers[layer] == "state" else "after"

    def head_parts(self, layer: int) -> tuple[int, ...]:
        """The channels of a key of a layer: those of a head, or of a latent and of what turns beside it."""
        latent = self.latent
        return (self.sizes[layer].head_dim,) if latent is None else (latent.latent, latent.turned)

    def gates_of(self, sizes: LayerSizes) -> int:
        """The number of gates of the results of a layer of these sizes."""
        return {"": 0, "head": sizes.num_heads, "channel": sizes.num_heads * sizes.head_dim}[self.gates]

    def with_draft_layer(self) -> ModelConfig:
        """This network and the first MTP layer, behind its last one; itself if it has none."""
        if not self.next_layers or self.draft_layers or self.next_layer is None:
            return self
        like, mlp, rotated, _ = self.next_layer
        index = None if self.index is None else replace(self.index, own=(*self.index.own, True))
        return replace(
            self, num_layers=self.num_layers + 1, draft_layers=1, sizes=(*self.sizes, self.sizes[like]),
            windows=(*self.windows, self.windows[like]), rotated=(*self.rotated, rotated),
            mixers=(*self.mixers, self.mixers[like]), mlps=(*self.mlps, mlp), limits=(*self.limits, (0.0, 0.0)),
            index=index,
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` if it exists, from a checkpoint directory.

        Raises:
            FileNotFoundError: there is no `config.json`.
            CheckpointError: not JSON, a key is missing or of the wrong type, an option is not supported, or the
                directory has an adapter.
        """
        directory = Path(directory)
        refuse_adapter(directory)
        config = read_json(directory / "config.json", infinity=True)
        generation = directory / "generation_config.json"
        # Both files may hold `eos_token_id`; generation_config.json takes precedence.
        if generation.exists() and (eos := read_json(generation).get("eos_token_id")) is not None:
            config = {**config, "eos_token_id": eos}
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Validate the contents of a `config.json`. Raises CheckpointError naming the key and its value."""
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a Mapping, got {type(config).__name__}")
        config = text_config_of(config)
        architecture, family = family_of(config)
        return cls(architecture=architecture, **read_fields(config, family))

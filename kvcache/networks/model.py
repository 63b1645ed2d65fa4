"""The transformer: a decoder with the features that `ModelConfig` lists, with float32 activations.

It owns no cache. `forward` calls its argument `attend` with queries, keys and values once per layer and uses the
result, so the same network runs over a paged, a quantised or a shared cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels.layers import (
    gate,
    layer_norm,
    near_experts,
    rms_norm,
    softcap,
    softplus_gate,
    thin,
    top_experts,
)
from kvcache.kernels.matrix import checked_activations
from kvcache.networks.activations import activation_of, limited_swiglu
from kvcache.networks.adapter import Adapter
from kvcache.networks.config import ModelConfig
from kvcache.networks.experts import mix_experts
from kvcache.networks.gguf import GgufCheckpoint, is_gguf
from kvcache.networks.hidden_rows import HiddenRows
from kvcache.networks.latent import LatentWeights, index_rows, latent_queries, latent_results, latent_rows, turn_of
from kvcache.networks.layer_sizes import LayerSizes, first_sharing
from kvcache.networks.padded_heads import padded, stored_sizes
from kvcache.networks.protocols import Attend, LayerAttention, LayerIndex, Logits, Recur
from kvcache.networks.recurrence import Layer, layer_of
from kvcache.networks.rope import Rope, RopeTable
from kvcache.networks.row_adapters import Adapt, PreparedAdapter, RowAdapters
from kvcache.networks.weights import InputWeights, LayerWeights, MlpWeights, Progress, Weight, Weights
from kvcache.support.arguments import short

__all__ = ["Transformer"]

Float32 = NDArray[np.float32]
Turns = dict[RopeTable | None, list[tuple[NDArray[Any], ...]]]

_AFTER = ("turned", "unit")  # norms of queries and keys behind their rotary embedding
_MOST_TOGETHER = 192  # rows that an MLP takes at a time: what is between its products then stays in the CPU's cache
_TILE_ROWS = 24  # a multiple of the rows that a product computes together


class Transformer:
    """A network and its weights.

    A row of every result has the same bits whatever other rows it is computed with, and on any number of threads.
    `logits` of `forward` may also be the indices of rows, and its rows those before the head (`selects_rows` and
    `gives_hidden`, see `protocols.Model`).

    Args:
        config: sizes and options.
        weights: as `Weights` loads them.
        activations: how rows meet weights. "int8": packed ones in 8 bits with a scale per group of 32 channels, floats
            in float32. "exact": packed ones in 15 bits, half as fast for many rows. "bf16": rows and weights rounded to
            bf16, faster for many rows on CPUs that multiply bf16: see `Matrix.multiply`.
    """

    selects_rows = gives_hidden = True

    def __init__(self, config: ModelConfig, weights: Weights, activations: str = "int8") -> None:
        checked_activations(activations)
        self.config = config
        self.weights = weights
        self.activations = activations
        self._first_shared = first_sharing(config.sizes)
        self._rope = self._table(config.rope, config.rotary_dim)
        self._activated, self._drafts = activation_of(config), config.draft_layers > 0
        self._gate = softplus_gate if config.gate_curve == "softplus" else partial(gate, silu=False)
        self._raw = config.next_layer is not None and config.next_layer.is_raw
        self._last_mixing = max((i for i in range(config.trunk_layers) if config.mixers[i]), default=0)
        parts = [config.head_parts(i) for i in range(config.num_layers)]
        self._padded = [each if stored_sizes(each) != each else None for each in parts]  # None: heads need no zeros
        self._scaled = _scaled_of(config)
        self._recurrent = tuple(
            layer_of(config.recurrence, layer.recurrence, config.rms_norm_eps, activations) for layer in weights.layers
        )
        other = config.window_rope or config.rope, config.window_rotary_dim
        window = self._rope if other == (config.rope, config.rotary_dim) else self._table(*other)
        # For each regime the tables of layers without and with a window.
        self._tables = [(self._rope, window)]
        if self.regime(config.max_position_embeddings):
            self._tables.append((self._table(config.rope, config.rotary_dim, 1), self._table(*other, 1)))

    def _table(self, rope: Rope, rotary_dim: int, regime: int = 0) -> RopeTable:
        return RopeTable(rope, rotary_dim, self.config.max_position_embeddings, regime)

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
        draft_layer: bool = False,
    ) -> Transformer:
        """Load a Hugging Face checkpoint directory, or a GGUF file.

        Args:
            directory: of `config.json` and safetensors; or a GGUF file.
            weights, progress: as for `Weights.read`.
            activations: as for the constructor.
            draft_layer: whether the MTP layer ("mtp", "nextn") is loaded, if there is one: the last layer of the
                network then, which changes no logits.

        Errors are those of `ModelConfig` and `Weights`.
        """
        if is_gguf(directory):
            return cls.from_gguf(
                directory, weights=weights, activations=activations, progress=progress, draft_layer=draft_layer
            )
        config = ModelConfig.from_pretrained(directory)
        if draft_layer:
            config = Weights.with_draft_layer(directory, config)
        return cls(config, Weights.from_pretrained(directory, config, weights, progress), activations)

    @classmethod
    def from_gguf(
        cls, path: str | Path, *, weights: str = "auto", activations: str = "int8", progress: Progress | None = None,
        draft_layer: bool = False,
    ) -> Transformer:
        """Load a GGUF file of any name. Errors are those of `GgufCheckpoint` and `Weights`."""
        checkpoint = GgufCheckpoint(path)
        if draft_layer:
            checkpoint.take_draft_layer()
        return cls(checkpoint.config, Weights.read(checkpoint, checkpoint.config, weights, progress), activations)

    @property
    def attention(self) -> tuple[LayerAttention | None, ...]:
        """How each layer attends; None: it does not. Heads have the sizes of a cache, see `padded_heads`."""
        return tuple(
            self._attention_of(i) if mixer == "attention" else None for i, mixer in enumerate(self.config.mixers)
        )

    def _attention_of(self, i: int) -> LayerAttention:
        config, own, scale = self.config, self.config.sizes[i], self.config.attention_scale
        stored = stored_sizes(config.head_parts(i))
        if scale is None and sum(stored) != own.head_dim:
            scale = 1 / math.sqrt(own.head_dim)
        return LayerAttention(
            scale, config.windows[i], config.attention_softcap, self.weights.layers[i].sinks, own.num_kv_heads,
            sum(stored), own.kv_layer, None if config.latent is None else stored[0], config.causal,
            config.chunked and config.windows[i] is not None,
            None if config.index is None else LayerIndex(config.index.stored, config.index.most, config.index.own[i]),
        )

    def prepare_adapter(self, adapter: Adapter) -> PreparedAdapter:
        """An adapter as `forward` takes it. ValueError: it does not fit the network, see `Adapter.expect`."""
        return PreparedAdapter.of(adapter, self.config)

    @property
    def draft_layers(self) -> int:
        """The MTP layers, see `Model`: 1 or 0."""
        return self.config.draft_layers

    @property
    def recurrences(self) -> tuple[Layer | None, ...]:
        """The recurrence of each layer with a state; empty: there are none."""
        return self._recurrent if any(self._recurrent) else ()

    def regime(self, num_tokens: int) -> int:
        """The regime of a text of `num_tokens`, see `Model`: 1 beyond the original context of longrope, else 0."""
        window, regime = self.config.window_rope, self.config.rope.regime_of(num_tokens)
        return regime if window is None else max(regime, window.regime_of(num_tokens))

    def key_bias(self, positions: NDArray[np.int64]) -> Float32 | None:
        """The biases of key projections as keys at these positions have them; None: no biases, or a norm follows.

        float32 `(num_layers, len(positions), num_kv_heads, head_dim)`, with the channels that a cache has.
        """
        config, found = self.config, []
        if config.latent is not None:  # whose keys pass through a norm
            return None
        for i, layer in enumerate(self.weights.layers):
            if layer.qkv_bias is None or layer.qk_norm is not None or config.mixers[i] != "attention":
                return None
            if config.sizes[i].value_dim:
                return None
            heads = layer.qkv_bias.reshape(-1, config.head_dim)[config.sizes[i].num_heads :][: config.num_kv_heads]
            rows = np.ascontiguousarray(np.broadcast_to(heads, (len(positions), *heads.shape)))
            table = self._tables[0][config.windows[i] is not None]
            turned = table.rotate(rows, table.rows(positions)) if config.rotated[i] else rows
            found.append(padded(turned, config.head_parts(i)))
        return np.stack(found)

    def forward(
        self,
        tokens: NDArray[np.uint32],
        positions: NDArray[np.int64],
        attend: Attend,
        logits: Logits | NDArray[np.int64] = "last",
        *,
        sink_positions: NDArray[np.int64] | None = None,
        sink_rows: NDArray[np.int64] | None = None,
        regime: int = 0,
        recur: Recur | None = None,
        hidden: HiddenRows | None = None,
        head: bool = True,
        adapters: Sequence[tuple[int, int, PreparedAdapter]] = (),
    ) -> Float32:
        """Run new tokens through all layers; `protocols.StreamingModel.forward` gives the shapes.

        Args:
            recur: called once for each layer with a state; `protocols.Model`.
            hidden: of a network with an MTP layer; None: the rows are one text from its start.
            head: False returns the rows behind the last norm, `(rows, hidden_size)`, in place of their logits.
            adapters: those of some rows, `(first row, last row + 1, of prepare_adapter)`, ascending and apart.

        Raises:
            ValueError: a position that no text of this regime has; no `recur` for layers with a state.
        """
        if recur is None and any(self._recurrent):
            raise ValueError("recur: expected a function for the layers with a state, got None")
        end = int(np.maximum.reduce(positions, initial=-1)) + 1
        if regime not in range(len(self._tables)) or self.regime(end) > regime:
            raise ValueError(f"regime: expected that of a text with these positions, got {short(regime)}")
        places = (positions,) if sink_positions is None else (positions, sink_positions)
        rows = self._rows(tokens, places, regime)
        if sink_rows is not None:
            rows = rows._replace(others=sink_rows)
        if adapters:
            rows = rows._replace(adapters=RowAdapters.of(adapters, len(tokens)))
        chosen: Any = slice(len(tokens) - (logits == "last"), None) if isinstance(logits, str) else logits
        whole = isinstance(logits, str) and (logits == "all" or (logits == "last" and len(tokens) == 1))
        finish = self._scores if head else np.ascontiguousarray
        if not self._drafts or not len(tokens):
            rows = self._through(0, rows, attend, recur, regime, None if whole else chosen)
            return finish(self._normed(rows.x, self.weights.norm) if len(rows.x) else rows.x)
        rows = self._through(0, rows, attend, recur, regime, None)  # the hidden rows of all tokens are read
        normed = self._normed(rows.x, self.weights.norm)
        hidden = hidden or HiddenRows(np.zeros(1, np.int64), np.zeros((1, normed.shape[1]), np.float32))
        rows = self._joined(tokens, rows, hidden.set(rows.x if self._raw else normed))
        # K and V alone are of use here.
        self._mixed(self.config.trunk_layers, self.weights.layers[-1], rows, attend, None, regime)
        return finish(normed if isinstance(logits, str) and logits == "all" else normed[chosen])

    def _through(
        self, first: int, rows: _Rows, attend: Attend, recur: Recur | None, regime: int, chosen: Any
    ) -> _Rows:
        """Run rows through the layers of the network from `first` on; the `chosen` ones come out, None: all.

        An MTP layer is the first one of such a call, or none.
        """
        stop, taken = len(self.weights.layers) - (1 if self._drafts and not first else 0), rows
        for i in range(first, stop):
            layer = self.weights.layers[i]
            if i == self._first_shared and chosen is not None:  # from here on no layer has K and V of its own
                rows = rows.taken(chosen)
                if not len(rows.x):
                    return rows
            if rows.streams is not None:
                rows = self._begun(layer, rows)
            if not self.config.paired:
                taken = rows
            elif self.config.mixers[i] == "state":
                taken = rows._replace(x=rows.x.copy())
            mixed = self._mixed(i, layer, taken, attend, recur, regime)
            if i == self._last_mixing < self._first_shared and chosen is not None:
                # After the last layer that mixes tokens rows are independent: continue with the requested ones only.
                rows, mixed = rows.taken(chosen), None if mixed is None else mixed[chosen]
            few = layer.router is not None or len(rows.x) <= _MOST_TOGETHER  # an expert has few rows in any case
            together = len(rows.x) if few else _rows_together(len(rows.x))
            for start in range(0, len(rows.x), max(1, together)):
                part = slice(start, start + together)
                self._add_parts(
                    i, layer, rows.x[part], None if mixed is None else mixed[part],
                    None if rows.inputs is None else rows.inputs[part, i],
                    None if rows.streams is None else rows.streams[part],
                    None if rows.adapters is None else rows.adapters.taken(part),
                )
            if layer.scale is not None:
                rows.x[...] *= layer.scale
        if rows.streams is not None and self.weights.ends is not None:
            rows = rows._replace(x=self.weights.ends.merged(rows.streams, self._times))
        return rows

    def _begun(self, layer: LayerWeights, rows: _Rows) -> _Rows:
        """The rows that a layer begins with: those of the stream that it runs on, where there are several."""
        sizes = self.config.streams
        if rows.streams is None or layer.streams is None or sizes is None:
            return rows
        streams = layer.streams.predicted(rows.streams, sizes.active, self._times, self.config.rms_norm_eps)
        return rows._replace(x=streams[:, sizes.active].copy(), streams=streams)

    def _add_parts(
        self, i: int, layer: LayerWeights, x: Float32, mixed: Float32 | None, inputs: Float32 | None,
        streams: Float32 | None, adapters: RowAdapters | None,
    ) -> None:
        """Add what the parts of a layer compute of some rows to their residual stream `x`, or to all `streams`."""
        config, eps, normed, beside = self.config, self.config.rms_norm_eps, None, None
        adapt: Mapping[str, Adapt] = {} if adapters is None else adapters.of_layer(i)
        if config.norms == "parallel":
            normed = self._normed(x, layer.input_norm)
        if layer.streams is not None:
            beside = layer.streams.beside(self._normed(x, layer.input_norm), self._times, eps)
        if mixed is not None and layer.output is not None:
            self._add_times(x, mixed, layer.output, layer.output_bias, layer.output_norm, adapt.get("output"))
        if beside is not None:
            x += beside
            x *= np.float32(math.sqrt(0.5))
        if layer.mlps:
            normed = self._normed(x, layer.mlp_norm) if normed is None else normed
            if layer.router is None:
                (mlp,) = layer.mlps
                gated = self._gated(normed, mlp, adapt.get("gate_up"))
                self._add_times(x, gated, mlp.down, mlp.down_bias, layer.down_norm, adapt.get("down"))
            else:
                self._add_experts(x, layer, layer.router, normed)
        to = x
        if layer.streams is not None and streams is not None and config.streams is not None:
            x = layer.streams.correct_by(x, streams, config.streams.active, self._times, eps)
            to = streams[:, 1:].swapaxes(0, 1)
        if layer.inputs is not None and inputs is not None:
            self._add(to, self._of_inputs(x, inputs, layer.inputs), layer.inputs.norm)

    def draft(
        self, tokens: NDArray[np.uint32], positions: NDArray[np.int64], attend: Attend, hidden: Float32, regime: int = 0
    ) -> tuple[Float32, Float32]:
        """Run tokens through the MTP layer alone.

        Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.2: `norm(layer(joint @ [norm(embedding of the
        token), norm(hidden row before it)]))` is the hidden row of the token, from which the head gives the logits.

        Args:
            tokens, positions, attend: as of `forward`; the layer is the last one.
            hidden: `(n, hidden_size)`, of the token before each: as a pass has left it, or as this function returns it.

        Returns:
            The logits `(n, vocab_size)` of the token behind each, and their hidden rows `(n, hidden_size)`.
        """
        weights, rows = self.weights.layers[-1].next, self._rows(tokens, (positions,), regime)
        assert weights is not None, "the network has such a layer"
        rows = self._through(
            self.config.trunk_layers, self._joined(tokens, rows, hidden), attend, None, regime, None
        )
        normed = self._normed(rows.x, weights.norm)
        return self._scores(normed), rows.x if self._raw else normed

    def _joined(self, tokens: NDArray[np.uint32], rows: _Rows, hidden: Float32) -> _Rows:
        """The rows that the MTP layer begins with."""
        weights = self.weights.layers[-1].next
        assert weights is not None, "the network has such a layer"
        embedded = self.weights.embedding[tokens.astype(np.int64)] * np.float32(self.config.embedding_scale)
        normed = self._normed(embedded, weights.token_norm), self._normed(hidden, weights.hidden_norm)
        return rows._replace(x=self._times(np.concatenate(normed, axis=1), weights.joint))

    def _rows(self, tokens: NDArray[np.uint32], places: Sequence[NDArray[np.int64]], regime: int) -> _Rows:
        """The rows that a pass begins with: the embedding of the tokens, and what goes along with it."""
        config = self.config
        x = self.weights.embedding[tokens.astype(np.int64)]
        if config.embedding_norm:
            x = rms_norm(x, np.ones(config.hidden_size, np.float32), config.rms_norm_eps)
        if config.embedding_scale != 1:
            x *= np.float32(config.embedding_scale)
        turns: Turns = {table: [table.rows(each) for each in places] for table in set(self._tables[regime])}
        turns[None] = [(each,) for each in places]
        growth = config.unrotated_growth
        factors = config.rope.query_factors(places[0]) if growth is None else growth.factors(places[0] + 1)
        streams = None if self.weights.ends is None else self.weights.ends.spread(x, self._times)
        return _Rows(x, turns, factors, self._token_inputs(tokens, x), streams)

    def _token_inputs(self, tokens: NDArray[np.uint32], x: Float32) -> Float32 | None:
        """The inputs of each layer, `(n, layers, inputs)`, of the table and of the embedding `x`."""
        weights, config, size = self.weights.inputs, self.config, self.config.layer_inputs
        if weights is None:
            return None
        found = self._times(x, weights.projection)
        found *= np.float32(1 / math.sqrt(config.hidden_size))
        found = rms_norm(found.reshape(-1, size), weights.norm, config.rms_norm_eps)
        known = np.where(tokens < len(weights.table), tokens, 0)  # those of images and sounds have no row
        stored = weights.table[known.astype(np.int64)].reshape(found.shape)
        stored *= np.float32(math.sqrt(size))
        found += stored
        found *= np.float32(math.sqrt(0.5))
        return found.reshape(len(x), config.num_layers, size)

    def _mixed(
        self, i: int, layer: LayerWeights, rows: _Rows, attend: Attend, recur: Recur | None, regime: int
    ) -> Float32 | None:
        """The rows that the mixer of a layer gives for its output projection; None: it has none."""
        if layer.qkv is None:
            return None
        config, normed = self.config, self._normed(rows.x, layer.input_norm)
        if (state := self._recurrent[i]) is not None and recur is not None:
            inputs = self._times(normed, layer.qkv, layer.qkv_bias)
            if self._scaled is not None:
                inputs *= self._scaled.state
            mixed = state.gated(inputs, recur(i, state.rows(inputs)))
            return mixed if config.multipliers is None else mixed * np.float32(config.multipliers.state_out)
        table = self._tables[regime][config.windows[i] is not None] if config.rotated[i] else None
        if layer.latent is not None:
            return self._mixed_latent(i, layer, layer.latent, normed, rows, table, attend)
        sizes = config.sizes[i]
        adapt = None if rows.adapters is None else rows.adapters.of_layer(i).get("qkv")
        heads, values, gates = self._project(normed, layer, sizes, adapt)
        after = layer.qk_norm if config.qk_norm in _AFTER else None
        factors = rows.factors if config.unrotated_growth is None or table is None else None
        turned = self._turned(sizes.num_heads, heads, values, table, rows.turns[table], factors, after, rows.others)
        if (parts := self._padded[i]) is not None:
            turned = tuple(padded(each, parts) for each in turned)
        if sizes.kv_layer is not None:
            turned = (turned[0], None, None, *turned[3:])
        mixed = attend(i, *turned)
        channels = sizes.value_dim or (None if parts is None else parts[0])
        mixed = mixed[:, :, :channels].reshape(len(normed), -1)
        if config.multipliers is not None:
            mixed = mixed * np.float32(config.multipliers.attention_out)
        return mixed if gates is None else self._gate(mixed, gates)

    def _mixed_latent(
        self, i: int, layer: LayerWeights, weights: LatentWeights, normed: Float32, rows: _Rows,
        table: RopeTable | None, attend: Attend,
    ) -> Float32:
        """`_mixed` of a layer with latent attention."""
        config = self.config
        assert config.latent is not None, "a layer has latent attention"
        assert layer.qkv is not None, "it has a first matrix"
        turns = [turn_of(table, each) for each in rows.turns[table]]
        projected, gates, index = self._times(normed, layer.qkv, layer.qkv_bias), None, None
        if config.gates:
            count = config.gates_of(config.sizes[i])
            gates = np.repeat(projected[:, -count:], config.latent.value, axis=1)
            projected = np.ascontiguousarray(projected[:, :-count])
        own = latent_queries(projected, config.latent, weights)
        if config.index is not None and weights.index is not None:
            index = index_rows(normed, own, config.index, weights.index, self._times, turns[0])
        keys, queries, *others = latent_rows(
            projected, own, config.latent, weights, self._times, turns, self.activations, rows.others
        )
        if rows.factors is not None:
            queries = queries * rows.factors[:, None, None]
            others = [each * rows.factors[rows.others, None, None] for each in others]
        if (parts := self._padded[i]) is not None:
            queries, keys, *others = (padded(each, parts) for each in (queries, keys, *others))
        sinks: Any = others
        mixed = attend(i, queries, keys, None, *(sinks if config.index is None else (None, index)))
        found = latent_results(mixed if parts is None else mixed[:, :, : parts[0]], weights, self.activations)
        return found if gates is None else gate(found, gates, False)

    def _scores(self, normed: Float32) -> Float32:
        """The logits of rows behind the last norm."""
        config = self.config
        if not len(normed):
            return np.empty((0, config.vocab_size), np.float32)
        scores = self._times(normed, self.weights.head, self.weights.head_bias)
        if config.logit_scale != 1:
            scores *= np.float32(config.logit_scale)
        return scores if config.logit_softcap is None else softcap(scores, config.logit_softcap)

    def _times(self, x: Float32, weight: Weight, bias: Float32 | None = None, adapt: Adapt | None = None) -> Float32:
        """A product, and what adapters add to it."""
        product = weight.multiply(x, bias, activations=self.activations)
        if adapt is not None:
            adapt(x, product)
        return product

    def _normed(self, x: Float32, norm: Float32 | None, eps: float = 0.0) -> Float32:
        if norm is None:
            return x
        eps = eps or self.config.rms_norm_eps
        return rms_norm(x, norm, eps) if self.config.norm == "rms" else layer_norm(x, norm[0], norm[1], eps)

    def _add_times(
        self, x: Float32, rows: Float32, weight: Weight, bias: Float32 | None, norm: Float32 | None,
        adapt: Adapt | None,
    ) -> None:
        """Add a product, and what adapters add to it, to the residual stream `x`."""
        if norm is None and self.config.residual_scale == 1:
            weight.multiply(rows, bias, activations=self.activations, out=x, add=True)
            if adapt is not None:
                adapt(rows, x)
        else:
            self._add(x, self._times(rows, weight, bias, adapt), norm)

    def _add(self, x: Float32, part: Float32, norm: Float32 | None) -> None:
        """Add what a part of a layer computes to the residual stream `x`."""
        part = self._normed(part, norm, self.config.post_norm_eps)
        if self.config.residual_scale != 1:
            part *= np.float32(self.config.residual_scale)
        x += part

    def _project(
        self, x: Float32, layer: LayerWeights, sizes: LayerSizes, adapt: Adapt | None
    ) -> tuple[Float32, Float32, Float32 | None]:
        """Queries and keys of `x` `(n, hidden)` before RoPE, `(n, num_heads + num_kv_heads, head_dim)`; V; gates.

        A layer that reads K and V of another one has no keys and values.
        """
        config, eps = self.config, self.config.rms_norm_eps
        assert layer.qkv is not None
        projected, gates = self._times(x, layer.qkv, layer.qkv_bias, adapt), None
        if self._scaled is not None:
            projected *= self._scaled.heads
        if config.gates:
            count = config.gates_of(sizes)
            gates = np.repeat(projected[:, -count:], sizes.num_heads * sizes.head_dim // count, axis=1)
            projected = np.ascontiguousarray(projected[:, :-count])
        narrow = None
        if sizes.value_dim:
            count = sizes.num_kv_heads * sizes.value_dim
            narrow = projected[:, -count:].reshape(len(x), sizes.num_kv_heads, sizes.value_dim)
            projected = np.ascontiguousarray(projected[:, :-count])
        heads = projected.reshape(len(x), -1, sizes.head_dim)
        if config.attention_gate:  # of each head first its queries, then its gates
            stop = 2 * sizes.num_heads
            gates = heads[:, 1:stop:2].reshape(len(x), -1)
            heads = np.concatenate([heads[:, :stop:2], heads[:, stop:]], axis=1)
        turning = sizes.num_heads + (sizes.num_kv_heads if sizes.kv_layer is None else 0)
        turned, values = heads[:, :turning], heads[:, turning if sizes.has_values else sizes.num_heads :]
        if narrow is not None:  # zeros stand for the channels that they have not
            values = np.zeros((len(x), sizes.num_kv_heads, sizes.head_dim), np.float32)
            values[:, :, : sizes.value_dim] = narrow
        if config.value_scale != 1:
            values = values * np.float32(config.value_scale)
        if config.value_norm and sizes.kv_layer is None:
            values = rms_norm(values, np.ones(values.shape[1:], np.float32), eps)
        if layer.qk_norm is None or config.qk_norm in _AFTER:
            return turned, values, gates
        if config.qk_norm in ("head", "plain"):
            return rms_norm(turned, layer.qk_norm, eps), values, gates
        if config.qk_norm == "layer":
            plain = np.ones(sizes.head_dim, np.float32), np.zeros(sizes.head_dim, np.float32)
            normed = layer_norm(np.ascontiguousarray(turned).reshape(-1, sizes.head_dim), *plain, eps)
            return normed.reshape(turned.shape) * layer.qk_norm, values, gates
        size = sizes.num_heads * sizes.head_dim
        weight, stop = layer.qk_norm.ravel(), turning * sizes.head_dim
        queries = rms_norm(projected[:, :size], weight[:size], eps)
        keys = rms_norm(projected[:, size:stop], weight[size:], eps)
        return np.concatenate([queries, keys], axis=1).reshape(turned.shape), values, gates

    def _turned(
        self, count: int, heads: Float32, values: Float32, table: RopeTable | None, turns: Sequence[Any],
        factors: Float32 | None, norm: Float32 | None, others: Any,
    ) -> tuple[Any, ...]:
        """The `count` queries, keys and values, rotated by the first of `turns`; for each other the queries, by that.

        `others`: the rows of these. Queries are multiplied by `factors`, if there are any. `norm` follows, if given.
        """
        if factors is not None:
            heads = np.concatenate([heads[:, :count] * factors[:, None, None], heads[:, count:]], axis=1)
        found: list[Float32] = []
        for rows in turns:
            some = heads[others, :count] if found else heads
            turned = some if table is None else table.rotate(some, rows)
            turned = turned if norm is None else rms_norm(turned, norm[: some.shape[1]], self.config.rms_norm_eps)
            found += [turned] if found else [turned[:, :count], turned[:, count:], values]
        return tuple(found)

    def _add_experts(self, x: Float32, layer: LayerWeights, router: Weight, normed: Float32) -> None:
        """Add what the experts of each row compute, and an MLP beside them, to the residual stream `x`.

        `normed`: the rows that they take.
        """
        if (beside := layer.beside) is None:
            self._add(x, self._experts(normed, normed, router, layer), layer.down_norm)
            return
        part = self._normed(self._times(self._gated(normed, beside.mlp), beside.mlp.down), beside.mlp_norm)
        rows, routed = self._normed(x, beside.experts_norm), self._normed(x, beside.router_norm)
        part += self._normed(self._experts(rows, routed, router, layer), beside.experts_down_norm)
        self._add(x, part, layer.down_norm)

    def _experts(self, x: Float32, routed: Float32, router: Weight, layer: LayerWeights) -> Float32:
        """The results of the experts of each row of `x`, and of the MLP that they share; the router sees `routed`."""
        chosen, weights = self._routed(self._times(routed, router, layer.router_bias), layer)
        if layer.beside is not None:
            weights *= layer.beside.factors[chosen]

        def expert(i: int, rows: Float32) -> Float32:
            mlp = layer.mlps[i]
            return self._times(self._gated(rows, mlp), mlp.down, mlp.down_bias)

        rows = x if layer.latent_in is None else self._times(x, layer.latent_in)
        sizes = self.config.experts
        part = mix_experts(rows, chosen, weights, expert, sizes is not None and sizes.choice.before)
        if layer.latent_out is not None:
            part = self._times(part, layer.latent_out)
        if layer.shared is not None:
            shared = self._times(self._gated(x, layer.shared), layer.shared.down)
            if layer.shared_gate is not None:
                shared *= gate(np.ones((len(x), 1), np.float32), self._times(x, layer.shared_gate), False)
            part += shared
            if sizes is not None and sizes.mean:
                part *= np.float32(0.5)
        return part

    def _routed(self, logits: Float32, layer: LayerWeights) -> tuple[NDArray[np.int64], Float32]:
        """The experts of each row and their weights."""
        sizes = self.config.experts
        assert sizes is not None, "a network with a router has experts"
        choice = sizes.choice
        if choice.softcap:
            logits = softcap(logits, choice.softcap)
        if choice.jitter is not None:
            return near_experts(logits, self.config.experts_per_token, choice.jitter)
        return top_experts(
            logits, self.config.experts_per_token, choice.normalise, sigmoid=choice.sigmoid, bias=layer.expert_bias,
            eps=choice.eps, factor=choice.factor, groups=choice.groups, kept=choice.kept, best=choice.best,
            least=choice.least,
        )

    def _of_inputs(self, x: Float32, inputs: Float32, weights: InputWeights) -> Float32:
        """Rows that a layer makes of its inputs of each token and of the residual stream `x`, before their norm."""
        both = np.concatenate([self._times(x, weights.gate), inputs], axis=1)
        return self._times(self._activated(both), weights.projection)

    def _gated(self, x: Float32, mlp: MlpWeights, adapt: Adapt | None = None) -> Float32:
        """The rows that the last matrix of an MLP takes."""
        both = self._times(x, mlp.gate_up, mlp.gate_up_bias, adapt)
        if mlp.cutoff is not None:
            thin(both, mlp.cutoff[0])
        if self._scaled is not None:
            both *= self._scaled.gate_up
            return self._activated(both) * self._scaled.down
        if mlp.limit is not None:
            return limited_swiglu(both, mlp.limit)
        return self._activated(both) if mlp.curve is None else self._activated(both, *mlp.curve.tolist())


class _Rows(NamedTuple):
    """The rows of a pass, and what goes along with each.

    Attributes:
        x: the residual stream; where there are several, that of the layer.
        turns: for each table the rows of the positions, and of the sink positions; for None these positions.
        factors: of the queries; None: 1.
        inputs: see `Transformer._token_inputs`.
        streams: all residual streams, `(n, streams, hidden)`; None: there is one.
        adapters: those of some rows; None: no row has one.
        others: the rows whose queries are turned to the sink positions too, where there are any.
    """

    x: Float32
    turns: Turns
    factors: Float32 | None
    inputs: Float32 | None
    streams: Float32 | None
    adapters: RowAdapters | None = None
    others: Any = slice(None)

    def taken(self, rows: Any) -> _Rows:
        """Some of the rows; without sink positions, where `others` names rows."""
        stop = None if isinstance(self.others, slice) else 1
        turns = {
            key: [tuple(part[rows] for part in each) for each in places[:stop]] for key, places in self.turns.items()
        }
        others = (None if each is None else each[rows] for each in (self.factors, self.inputs, self.streams))
        adapters = None if self.adapters is None else self.adapters.taken(rows)
        return _Rows(self.x[rows], turns, *others)._replace(adapters=adapters)


class _Scaled(NamedTuple):
    """Factors of columns of products (of a layer with a state, of heads, of gate and up), and of rows before down."""

    state: Float32
    heads: Float32
    gate_up: Float32
    down: np.float32


def _scaled_of(config: ModelConfig) -> _Scaled | None:
    sizes, found = config.recurrence, config.multipliers
    if sizes is None or found is None:
        return None
    pairs, shared = config.num_kv_heads * config.head_dim, sizes.groups * sizes.size

    def columns(values: Sequence[float], counts: Sequence[int]) -> Float32:
        return np.repeat(np.array(values, np.float32), counts)

    return _Scaled(
        columns(found.parts, (sizes.inner, sizes.inner, shared, shared, sizes.heads)),
        columns((1.0, found.key, 1.0), (config.num_heads * config.head_dim, pairs, pairs)),
        columns((found.gate, 1.0), (config.intermediate_size,) * 2), np.float32(found.down),
    )


def _rows_together(n: int) -> int:
    """The rows of each of the fewest pieces of `n` rows: about as many in each, in whole tiles of a product."""
    pieces = max(1, -(-n // _MOST_TOGETHER))
    return -(-n // (pieces * _TILE_ROWS)) * _TILE_ROWS

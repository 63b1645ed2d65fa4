"""The interface between the engine and a network: an engine runs any object with the `Model` protocol.

Text without a length limit (`EvictionPolicy.StreamingLLM`) needs a `StreamingModel`: a network that also rotates its
queries for a shorter distance to the sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core.attention_call import AttentionCall

__all__ = [
    "Attend", "IndexRows", "LayerAttention", "LayerIndex", "Logits", "Model", "NetworkConfig", "Recur", "Recurrence",
    "StreamingModel", "cached_sizes", "draft_layers", "is_causal", "latent_layers", "layer_attention",
    "layer_recurrences",
]

Float32 = NDArray[np.float32]
Logits = Literal["last", "all", "none"]


class LayerIndex(NamedTuple):
    """How an indexer chooses the tokens that a layer attends to; see `PagedKvCache.choose_tokens`.

    Attributes:
        dim: channels of its queries and keys.
        most: the tokens that a query attends to, of those that it sees.
        own: whether the layer has an indexer; if not, the choice is that of the last layer before it that has one.
    """

    dim: int
    most: int
    own: bool


class IndexRows(NamedTuple):
    """The rows that a layer's indexer chooses by: float32 `(n, heads, dim)`, `(n, heads)` and `(n, 1, dim)`."""

    queries: Float32
    weights: Float32
    keys: Float32


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """How one layer attends, beyond causal attention; the defaults change nothing. All layers or none are causal.

    Attributes:
        scale: of the scores; None: `head_dim**-0.5`.
        window: a query sees itself and the `window - 1` tokens before it; None: all tokens before it.
        chunked: whether it sees those of its own chunk of `window` positions instead.
        softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
        sinks: `(num_heads,)`, a logit per query head that joins the normaliser of the softmax; None: there are none.
        num_kv_heads, head_dim: of this layer; None: those of the configuration.
        kv_layer: an earlier layer, whose K and V this one reads; None: it has its own.
        latent: the number of first channels of K that are V, and `values` of `Attend` is None; None: V is given.
        causal: False: a query also sees the tokens behind it, with a window the next `window - 1`. Texts run whole.
        index: the choice of tokens, in layers of latent rows; None: a query attends to all that it sees.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Float32 | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    kv_layer: int | None = None
    latent: int | None = None
    causal: bool = True
    chunked: bool = False
    index: LayerIndex | None = None

    def call(self, return_lse: bool = False, top_tokens: int | None = None) -> AttentionCall:
        """These options, checked and copied, for all calls of the layer; others as of `PagedKvCache.attention`."""
        own = self.scale, self.window, self.softcap, self.sinks, self.causal
        return AttentionCall(*own, return_lse=return_lse, top_tokens=top_tokens, chunked=self.chunked).kept()

    def options(self) -> dict[str, Any]:
        """The arguments of `PagedKvCache.attention` that differ from its defaults."""
        values = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        found = {name: value for name, value in values.items() if value is not None}
        found |= {} if self.causal else {"causal": False}
        return found | {"chunked": True} if self.chunked else found


class NetworkConfig(Protocol):
    """The sizes of a network. The optional attribute `eos_token_ids`, a tuple of token ids, is read too."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


class Attend(Protocol):
    """The function that a network calls once per layer, in order: it stores keys and values and attends."""

    def __call__(
        self, layer: int, queries: Float32, keys: Float32 | None, values: Float32 | None,
        sink_queries: Float32 | None = None, index: IndexRows | None = None, /,
    ) -> Float32:
        """Causal attention over all tokens stored so far, the new ones included.

        Args:
            layer: 0 to `num_layers - 1`.
            queries: `(n, num_heads, head_dim)`, position embedding applied. Scores are scaled by
                `head_dim**-0.5`. Of a layer with a `kv_layer` they may be those of the rows of `logits` alone.
            keys: `(n, num_kv_heads, head_dim)`, position embedding applied; None of a layer with a `kv_layer`.
            values: `(n, num_kv_heads, head_dim)`; None of such a layer, and where V is a part of K.
            sink_queries: the same queries with the position embedding of `sink_positions`, if `forward` got these;
                shaped like `queries`, or, with `sink_rows`, `(len(sink_rows), num_heads, head_dim)`.
            index: of a layer with an indexer of its own; None of any other one.

        Returns:
            float32 `(n, num_heads, head_dim)`; with `latent` `(n, num_heads, latent)`.
        """
        ...


class Recurrence(Protocol):
    """A layer that keeps a state of fixed size per text, and how rows change it, token by token in one fixed order."""

    @property
    def size(self) -> int:
        """The float32 numbers of a text's state, a multiple of 16; zeros are the state of an empty text."""
        ...

    def run(
        self, rows: tuple[Float32, ...], slots: Float32, index: NDArray[np.int64], lens: NDArray[np.int64]
    ) -> Float32:
        """Run rows of texts through their states, which change in place.

        The bits of results and states do not depend on how the rows of a text are cut into calls, on other texts, or on
        threads: a caller may split rows, repeat them on a copy of a state, or replay them.

        Args:
            rows: arrays `(n, ...)`, as the network hands them to `Recur`: the texts' rows, one text after another.
            slots: float32 `(num_slots, size)`, C-contiguous; fastest where it begins at a multiple of 64 bytes.
            index: `(texts,)`, the slot of each text, all different.
            lens: `(texts,)`, the rows of each text; their sum is n.

        Returns:
            float32 `(n, ...)`.
        """
        ...


Recur = Callable[[int, tuple[Float32, ...]], Float32]
"""The function that a network calls for each layer with a state, `(layer, rows) -> results`: `Recurrence.run` of it."""


class Model(Protocol):
    """A network whose caller computes the attention.

    Seven optional attributes are read too:

    - `attention`, one `LayerAttention` for each layer; None for one that does not attend, and never calls `attend`.
    - `recurrences`, for each layer its `Recurrence`, or None; empty if no layer has one. A layer may also have neither
      that nor attention. Where there are any, `forward` is called with the keyword `recur`, a `Recur`.
    - `regime`, a function of the number of tokens of a text, the tokens that are still to come from this call
      included. It says by an int which weights of position the text has; it does not fall as a text grows. K and V of
      one regime are of no use to another: where a text enters another regime, it runs again from its start, and a
      cached prefix serves texts of its own regime alone. `forward` is then called with the keyword `regime`. A
      network without the attribute has one regime.
    - `draft_layers`, how many of the last layers are MTP layers (multi-token prediction): 1, or 0. `forward` is then
      called with the keyword `hidden`, the `HiddenRows` of the pass, of `config.hidden_size` numbers, and calls
      `attend` of that layer too.
      `draft(tokens, positions, attend, hidden, regime)` runs it alone, see `Transformer.draft`.
    - `selects_rows`: true if `logits` may also be an int64 array, the ascending indices of the rows to return. A
      `BatchEngine` asks other networks for all rows.
    - `gives_hidden`: true if `forward` takes the keyword `head`. With False it returns the rows behind the last norm,
      `(rows, config.hidden_size)`, in place of logits: vectors of texts are made of these.
    - `prepare_adapter`: a function of an `Adapter` that returns it as the network needs it, with `nbytes`; ValueError:
      it does not fit. `forward` is called with the keyword `adapters` where rows have some, a list of `(first row, last
      row + 1, what the function returned)`, ascending and apart. An engine over any other network takes no adapters.
    """

    @property
    def config(self) -> NetworkConfig: ...

    def forward(
        self, tokens: NDArray[np.uint32], positions: NDArray[np.int64], attend: Attend, logits: Logits
    ) -> Float32:
        """Run `n` new tokens through the network.

        Args:
            tokens: `(n,)`, ids below `vocab_size`. Several sequences may be concatenated; only `attend` needs to know
                where each ends.
            positions: `(n,)`, the position of each token in its sequence.
            attend: called once for each layer, of those with a `kv_layer` only if there are queries.
            logits: which rows to return.

        Returns:
            float32 logits: `(n, vocab_size)` for "all", `(1, vocab_size)` of the last token for "last",
            `(0, vocab_size)` for "none".
        """
        ...


class StreamingModel(Protocol):
    """A network that can rotate its queries for two positions."""

    @property
    def config(self) -> NetworkConfig: ...

    def forward(
        self,
        tokens: NDArray[np.uint32],
        positions: NDArray[np.int64],
        attend: Attend,
        logits: Logits,
        *,
        sink_positions: NDArray[np.int64] | None = None,
        sink_rows: NDArray[np.int64] | None = None,
    ) -> Float32:
        """As `Model.forward`.

        Texts without a length limit need no `sink_rows`; texts that see parts of cached texts (`SeenParts`) do.

        Args:
            sink_positions: `(n,)`, the position of each token relative to the sinks, the tokens before the evicted
                ones. If given, every `attend` also gets the queries with the position embedding of these. `positions`
                may then exceed `max_position_embeddings`; distances do not.
            sink_rows: `(m,)`, the rows of the pass whose queries are turned so, in any order, perhaps several times;
                `sink_positions` is `(m,)` then. None: all rows, once each.
        """
        ...


def layer_attention(model: Model) -> tuple[LayerAttention | None, ...]:
    """How each layer of a network attends, with its sizes; None: it does not. A window of all positions is none.

    Raises:
        ValueError: a `kv_layer` that is no earlier layer with K and V of its own, or has another window or other sizes.
    """
    config, found = model.config, list[LayerAttention | None]()
    most = config.max_position_embeddings
    for layer, each in enumerate(getattr(model, "attention", None) or (LayerAttention(),) * config.num_layers):
        if each is None:
            found.append(None)
            continue
        window = None if each.window and each.window >= most else each.window
        each = replace(
            each, window=window, chunked=each.chunked and window == each.window,
            num_kv_heads=each.num_kv_heads or config.num_kv_heads, head_dim=each.head_dim or config.head_dim,
        )
        found.append(each)
        if each.kv_layer is not None:
            _check_owner(found, layer)
    return tuple(found)


def cached_sizes(model: Model) -> tuple[int, int]:
    """KV heads and channels of a head as a cache has them, of a network whose K and V have one size."""
    first = next(each for each in layer_attention(model) if each is not None)
    return first.num_kv_heads or model.config.num_kv_heads, first.head_dim or model.config.head_dim


def layer_recurrences(model: Model) -> dict[int, Recurrence]:
    """The recurrence of each layer of a network that keeps a state, ascending."""
    return {layer: each for layer, each in enumerate(getattr(model, "recurrences", ())) if each is not None}


def draft_layers(model: Model) -> int:
    """How many of the last layers are MTP layers, see `Model`."""
    found: int = getattr(model, "draft_layers", 0)
    return found


def is_causal(model: Model) -> bool:
    """Whether no token of a network sees later ones."""
    return all(each is None or each.causal for each in layer_attention(model))


def latent_layers(model: Model) -> str:
    """A name of layers with latent rows, for messages; empty: there are none."""
    latent = any(each is not None and each.latent for each in layer_attention(model))
    return "layers whose V is a part of K" if latent else ""


def _check_owner(found: list[LayerAttention | None], layer: int) -> None:
    """Raise ValueError unless the last layer can read the K and V of its `kv_layer`."""
    each = found[layer]
    assert each is not None
    owner = found[each.kv_layer] if each.kv_layer is not None and 0 <= each.kv_layer < layer else None
    if owner is None or owner.kv_layer is not None:
        raise ValueError(
            f"attention.{layer}.kv_layer: expected an earlier layer with K and V of its own, got {each.kv_layer}"
        )
    own, wanted = ((a.window, a.chunked, a.num_kv_heads, a.head_dim) for a in (each, owner))
    if own != wanted:
        raise ValueError(
            f"attention.{layer}: expected window, chunked, num_kv_heads and head_dim of layer {each.kv_layer}, "
            f"{wanted}, got {own}"
        )

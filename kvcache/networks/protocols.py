"""The interface between the engine and a network: an engine runs any object with the `Model` protocol.

Text without a length limit (`EvictionPolicy.StreamingLLM`) needs a `StreamingModel`: a network that also rotates its
queries for a shorter distance to the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.core.attention_call import AttentionCall

__all__ = ["Attend", "LayerAttention", "Logits", "Model", "NetworkConfig", "StreamingModel", "layer_attention"]

Float32 = NDArray[np.float32]
Logits = Literal["last", "all", "none"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """How one layer attends, beyond causal attention; the defaults change nothing.

    Attributes:
        scale: of the scores; None: `head_dim**-0.5`.
        window: a query sees itself and the `window - 1` tokens before it; None: all tokens before it.
        softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
        sinks: `(num_heads,)`, a logit per query head that joins the normaliser of the softmax; None: there are none.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Float32 | None = None

    def call(self) -> AttentionCall:
        """These options, checked and copied, for all calls of the layer."""
        return AttentionCall(self.scale, self.window, self.softcap, self.sinks).kept()

    def options(self) -> dict[str, Any]:
        """The arguments of `PagedKvCache.attention` that differ from its defaults."""
        values = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return {name: value for name, value in values.items() if value is not None}


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
        self, layer: int, queries: Float32, keys: Float32, values: Float32, sink_queries: Float32 | None = None, /
    ) -> Float32:
        """Causal attention over all tokens stored so far, the new ones included.

        Args:
            layer: 0 to `num_layers - 1`.
            queries: `(n, num_heads, head_dim)`, position embedding applied. Scores are scaled by
                `head_dim**-0.5`.
            keys: `(n, num_kv_heads, head_dim)`, position embedding applied.
            values: `(n, num_kv_heads, head_dim)`.
            sink_queries: the same queries with the position embedding of `sink_positions`, if `forward` got these;
                shaped like `queries`.

        Returns:
            float32 `(n, num_heads, head_dim)`.
        """
        ...


class Model(Protocol):
    """A network whose caller computes the attention.

    Three optional attributes are read too:

    - `attention`, one `LayerAttention` for each layer.
    - `regime`, a function of the number of tokens of a text, the tokens that are still to come from this call
      included. It says by an int which weights of position the text has; it does not fall as a text grows. K and V of
      one regime are of no use to another: where a text enters another regime, it runs again from its start, and a
      cached prefix serves texts of its own regime alone. `forward` is then called with the keyword `regime`. A
      network without the attribute has one regime.
    - `selects_rows`: true if `logits` may also be an int64 array, the ascending indices of the rows to return. A
      `BatchEngine` asks other networks for all rows.
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
            attend: called once for each layer.
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
    ) -> Float32:
        """As `Model.forward`.

        Args:
            sink_positions: `(n,)`, the position of each token relative to the sinks, the tokens before the evicted
                ones. If given, every `attend` also gets the queries with the position embedding of these. `positions`
                may then exceed `max_position_embeddings`; distances do not.
        """
        ...


def layer_attention(model: Model) -> tuple[LayerAttention, ...]:
    """How each layer of a network attends. A window of all positions or more is none."""
    config = model.config
    found = getattr(model, "attention", None)
    if found is None:
        return (LayerAttention(),) * config.num_layers
    most = config.max_position_embeddings
    return tuple(replace(each, window=None) if each.window and each.window >= most else each for each in found)

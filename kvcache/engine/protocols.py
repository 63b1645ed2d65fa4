"""What the engine asks of a network: anything with the `Model` protocol can be run with this cache.

Endless text (`EvictionPolicy.StreamingLLM`) takes a `StreamingModel`: a network that also rotates its queries to
the distance at which they are to meet the sinks.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Attend", "Logits", "Model", "NetworkConfig", "StreamingModel"]

Float32 = NDArray[np.float32]
Logits = Literal["last", "all", "none"]


class NetworkConfig(Protocol):
    """The sizes of a network. `eos_token_ids`, a tuple of token ids, is read where it is present."""

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
    """What a network calls once per layer, in order: store these keys and values, attend with the queries."""

    def __call__(
        self, layer: int, queries: Float32, keys: Float32, values: Float32, sink_queries: Float32 | None = None, /
    ) -> Float32:
        """Causal attention over everything stored so far, these tokens included.

        Args:
            layer: 0 to `num_layers - 1`.
            queries: `(n, num_heads, head_dim)`, position embedding applied. Scores are scaled by
                `head_dim**-0.5`.
            keys: `(n, num_kv_heads, head_dim)`, position embedding applied.
            values: `(n, num_kv_heads, head_dim)`.
            sink_queries: the same queries under the position embedding of `sink_positions`, where `forward` was
                given some; shaped like `queries`.

        Returns:
            float32 `(n, num_heads, head_dim)`.
        """
        ...


class Model(Protocol):
    """A network whose attention is done by the caller."""

    @property
    def config(self) -> NetworkConfig: ...

    def forward(
        self, tokens: NDArray[np.uint32], positions: NDArray[np.int64], attend: Attend, logits: Logits
    ) -> Float32:
        """Run `n` new tokens through the network.

        Args:
            tokens: `(n,)`, ids below `vocab_size`. Tokens of several sequences may follow one another; only
                `attend` needs to know where one ends.
            positions: `(n,)`, where each token stands in its own sequence.
            attend: to be called once for each layer.
            logits: which rows to return.

        Returns:
            float32 logits: `(n, vocab_size)` for "all", `(1, vocab_size)` of the last token for "last",
            `(0, vocab_size)` for "none".
        """
        ...


class StreamingModel(Protocol):
    """A network that can place its queries twice."""

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
            sink_positions: `(n,)`, where each token stands for the first tokens of the text, those before the hole
                that eviction has left. If given, every `attend` also gets the queries under the position embedding
                of these. `positions` may then go beyond `max_position_embeddings`; distances do not.
        """
        ...

"""`PrefixPolicy`: the choice of what stays of a whole prefix, by how the network attends to it when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import NetworkConfig
from kvcache.networks.tokens import as_tokens
from kvcache.support.arguments import as_count, short
from kvcache.texts.policy import as_kept

__all__ = ["Asking", "Encode", "PrefixPolicy", "Probe", "as_kept_in_all", "as_probes", "is_prefix_policy"]

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Tokens = NDArray[np.uint32]
Encode = Callable[[str], Sequence[int]]
"""The token ids of a text, without special tokens."""


class Probe(NamedTuple):
    """Tokens that run behind a prefix, and the part of it to which their attention counts.

    Attributes:
        start, stop: the part.
        tokens: what runs, `(m,)`.
    """

    start: int
    stop: int
    tokens: Tokens


class Asking(NamedTuple):
    """Probes of a prefix, and the sinks that they attend to, as `as_probes` has checked them."""

    probes: list[Probe]
    sinks: int


class PrefixPolicy(Protocol):
    """Which tokens stay of a prefix, in all layers and KV heads at once: `InferenceEngine.compress` takes one.

    Attributes:
        sinks: first tokens of the prefix that each probe attends to beside the part that counts and its own tokens.
    """

    sinks: int

    def probes(self, tokens: Tokens, encode: Encode, /) -> Sequence[Probe]:
        """Make what runs behind a prefix `(n,)`, one after another, each on the prefix alone.

        Args:
            encode: of the engine's tokenizer.
        """
        ...

    def keep_in_all(self, scores: Float32, budget: int, /) -> Any:
        """Choose what stays.

        Args:
            scores: `(num_layers, num_kv_heads, n)`: the highest weight that a query of a probe gives to each token, in
                a softmax over sinks, part and the tokens of the probe so far; 0 of those that are in no part.
            budget: tokens that may stay in a head, on average over all heads of all layers.

        Returns:
            For each layer and head indices of tokens, ascending, perhaps none.
        """
        ...


def is_prefix_policy(value: Any) -> TypeGuard[PrefixPolicy]:
    """Whether it is an object with the methods of a `PrefixPolicy`."""
    methods = [getattr(value, name, None) for name in ("probes", "keep_in_all")]
    return not isinstance(value, type) and all(map(callable, methods))


def as_probes(policy: PrefixPolicy, tokens: Tokens, encode: Encode, config: NetworkConfig) -> Asking:
    """Ask a policy for the probes of a prefix, and check them.

    Raises:
        TypeError, ValueError: `sinks` is no number from 0 on; no probes of parts of the prefix, or token ids that the
            network does not have; more tokens than positions, those of the prefix counted.
    """
    sinks, found, count = as_count(policy.sinks, "sinks"), policy.probes(tokens, encode), len(tokens)
    if not isinstance(found, Sequence) or not all(isinstance(each, Probe) for each in found):
        raise TypeError(f"probes: expected a list of Probe, got {short(found)}")
    probes = []
    for i, each in enumerate(found):
        name = f"probes[{i}]"
        start, stop = as_count(each.start, f"{name}.start"), as_count(each.stop, f"{name}.stop")
        if not start < stop <= count:
            raise ValueError(f"{name}: expected a part of {count} tokens, got {start} to {stop}")
        try:
            own = as_tokens(each.tokens, config.vocab_size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}.{error}") from None
        if not len(own):
            raise ValueError(f"{name}.tokens: expected at least one, got none")
        probes.append(Probe(start, stop, own))
    longest, most = max((len(each.tokens) for each in probes), default=0), config.max_position_embeddings
    if count + longest > most:
        raise ValueError(
            f"prompt: expected at most {most - longest} tokens before {longest} that ask about them, got {count}"
        )
    return Asking(probes, sinks)


def as_kept_in_all(found: Any, shape: tuple[int, int, int], budget: int) -> list[list[Int64]]:
    """Check what `keep_in_all` returned for scores of a shape.

    Raises:
        TypeError, ValueError: not ascending indices for each layer and head; more than `budget` on average.
    """
    layers, heads, count = shape
    try:
        rows = [list(layer) for layer in found]
    except TypeError:
        raise TypeError(f"keep_in_all: expected indices of {layers} x {heads} heads, got {short(found)}") from None
    if [len(layer) for layer in rows] != [heads] * layers:
        raise ValueError(f"keep_in_all: expected indices of {layers} x {heads} heads, got {[len(x) for x in rows]}")
    kept = [
        [as_kept(each, count, count, f"keep_in_all[{i}][{j}]") if len(each) else np.empty(0, np.int64)
         for j, each in enumerate(layer)]
        for i, layer in enumerate(rows)
    ]
    total, most = sum(len(each) for layer in kept for each in layer), layers * heads * budget
    if not 0 < total <= most:
        raise ValueError(f"keep_in_all: expected 1 to {most} indices in all, got {total}")
    return kept

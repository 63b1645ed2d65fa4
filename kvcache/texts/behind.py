"""`Behind`: the protocol of all that a text may stand behind; its tokens are not among the text's own.

There are two of them: a `CompressedPrefix`, which has K and V of its own, and `SeenParts`, which names parts of cached
texts. Cached blocks of a text behind something have a namespace of their own, which `space` gives.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.networks.protocols import Float32, Model

__all__ = ["NO_PLACES", "Behind", "Part", "base_of", "is_behind", "name_of_space", "reused_before", "space_behind"]

Int64 = NDArray[np.int64]
NO_PLACES: Int64 = np.empty(0, np.int64)
_BEHIND = "behind a compressed prefix"
_SEEN = "behind seen parts"


class Part(Protocol):
    """A part of a cached text; see `SeenPart`."""

    @property
    def tokens(self) -> NDArray[np.uint32]: ...
    @property
    def behind(self) -> Behind | None: ...
    @property
    def offset(self) -> int: ...
    @property
    def since(self) -> int: ...
    @property
    def indices(self) -> Int64: ...
    @property
    def positions(self) -> Int64: ...
    @property
    def key(self) -> tuple[bytes, bytes]: ...

    def space(self, own: Hashable) -> Hashable:
        """The namespace of the cached text, within that of the request."""
        ...

    def begins_within(self, count: int) -> bool:
        """Whether it has one of the first `count` tokens of the request."""
        ...


class Behind(Protocol):
    """The protocol of all that a text may stand behind; it never changes.

    Attributes:
        num_tokens: the position of the text's first token behind all of it.
        places: the positions of the text's first tokens where these lie among it, ascending; else empty.
        parts: the parts of cached texts that a query sees; those of a `CompressedPrefix`, which attends, are empty.
        sinces, offsets: those of the parts, int64.
        gaps: see `SeenParts`.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def places(self) -> Int64: ...
    @property
    def parts(self) -> Sequence[Part]: ...
    @property
    def sinces(self) -> Int64: ...
    @property
    def offsets(self) -> Int64: ...
    @property
    def gaps(self) -> Sequence[int]: ...

    def space(self, namespace: Hashable) -> Hashable:
        """The namespace of cached blocks of the texts behind it."""
        ...

    def positions(self, layer: int, head: int | None = None) -> Int64:
        """The positions that a KV head of a layer has, ascending, int64 `(m,)`; None: any head."""
        ...

    def expect(self, model: Model) -> None:
        """Raise ValueError unless texts of this network may stand behind it."""
        ...

    def attend(self, layer: int, queries: Float32) -> tuple[Float32, Float32]:
        """Outputs and log-sum-exps of queries over what a layer has of it; of `parts` the cache of the text attends."""
        ...


def base_of(prefix: Behind | None) -> int:
    """The position of a text's first token, if the tokens before `places` end were consecutive; see `Text.base`."""
    return 0 if prefix is None else prefix.num_tokens - len(prefix.places)


def reused_before(prefix: Behind | None, cached: Mapping[tuple[bytes, bytes], int]) -> int:
    """How many tokens before a text did not run for it.

    Args:
        prefix: what it stands behind.
        cached: of each cached text that it sees a part of the number of tokens that did not run.
    """
    if prefix is None:
        return 0
    return max(0, base_of(prefix) - sum(len(part.tokens) - cached.get(part.key, 0) for part in prefix.parts))


def space_behind(name: bytes, namespace: Hashable, *, parts: bool = False) -> Hashable:
    """The namespace of cached blocks of texts behind something of this name."""
    return (_SEEN if parts else _BEHIND, name, namespace)


def is_behind(space: Any) -> bool:
    """Whether a namespace is one that `space_behind` gives."""
    return isinstance(space, tuple) and len(space) == 3 and space[0] in (_BEHIND, _SEEN)


def name_of_space(space: Any) -> Any:
    """The namespace that `space_behind` was called with, or this one."""
    return space[2] if is_behind(space) else space

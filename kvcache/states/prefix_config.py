"""The settings of a `PrefixKvCache`, and a frozen snapshot of its counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.core.store import BlockStore
from kvcache.support.arguments import as_bytes, as_count, as_integer

__all__ = ["PrefixCacheConfig", "PrefixKvStats"]


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """The limits and the storage of a `PrefixKvCache`, and which matches count.

    Attributes:
        max_entries: stored prefixes.
        max_memory_bytes: bytes of K and V, those of states that callers still hold included. A text such as "4GiB" is
            converted to an int.
        min_prefix_len: shorter prefixes are neither stored nor matched.
        partial_matches: whether a prompt may match a part of a stored prefix; if not, only whole ones match.
        dtype: storage format, "f32", "f16", "q8", "q6", "q5", "q4", "q3" or "q2"; `key_dtype`, `value_dtype` name
            them apart.
        rotate: "auto", True or False: whether quantised rows are stored under a Hadamard rotation.
        head_dim: how quantised rows are cut into heads, each with a scale of its own: a multiple of 8, at most 512,
            that divides kv_dim. None: the whole row is one head. f32 and f16 rows need no heads.

    Raises:
        TypeError, ValueError: a limit that is not an int, or negative; a format that is not supported.
    """

    max_entries: int = 256
    max_memory_bytes: int | str = 512 * 2**20
    min_prefix_len: int = 4
    partial_matches: bool = True
    dtype: str = "f32"
    key_dtype: str | None = None
    value_dtype: str | None = None
    rotate: bool | str = "auto"
    head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_entries", "min_prefix_len"):
            object.__setattr__(self, name, as_count(getattr(self, name), name))
        object.__setattr__(self, "max_memory_bytes", as_bytes(self.max_memory_bytes, "max_memory_bytes"))
        if self.head_dim is not None:
            object.__setattr__(self, "head_dim", as_integer(self.head_dim, "head_dim"))
        if not isinstance(self.partial_matches, (bool, np.bool_)):
            raise TypeError(f"partial_matches: expected a bool, got {type(self.partial_matches).__name__}")
        # A store without blocks says what is supported; without head_dim, what a row will be is not known yet.
        BlockStore(0, 0, 1, 1, 8 if self.head_dim is None else self.head_dim, *self.formats, self.rotate)

    @property
    def formats(self) -> tuple[str, str]:
        """Storage formats of K and of V."""
        return self.key_dtype or self.dtype, self.value_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class PrefixKvStats:
    """A snapshot of the counters.

    Attributes:
        entries: stored prefixes.
        tokens: tokens whose KV is stored; a shared prefix counts once.
        memory_bytes: bytes of K and V held, those of states that callers hold included.
        hits, misses: lookups.
        hit_tokens, lookup_tokens: tokens matched, of tokens asked for.
        evictions: entries evicted.
        exact: whether no file of another version of bits was loaded.
    """

    entries: int
    tokens: int
    memory_bytes: int
    hits: int
    misses: int
    hit_tokens: int
    lookup_tokens: int
    evictions: int
    exact: bool = True

    @property
    def hit_rate(self) -> float:
        """`hit_tokens` over `lookup_tokens`; 0.0 before the first lookup."""
        return self.hit_tokens / max(self.lookup_tokens, 1)

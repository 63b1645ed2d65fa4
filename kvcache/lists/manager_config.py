"""The configuration of a `CacheManager`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.core.memory import num_blocks_within
from kvcache.eviction import EvictionPolicy
from kvcache.kernels.kernels import FORMATS
from kvcache.lists.token_list import BLOCK_SIZE
from kvcache.support.arguments import REQUIRED, as_count, as_instance, as_integer

__all__ = ["FORMAT_OF_BITS", "KVCacheConfig"]

_DOCUMENTED = (2, 3, 4, 8)  # bits that the interface has; caches and engines have more formats
FORMAT_OF_BITS = {line.bits: name for name, line in FORMATS.items() if line.quantised and line.bits in _DOCUMENTED}
_BITS = ", ".join(map(str, _DOCUMENTED))
MAX_ENTRIES = 2**31 - 64


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The sizes, bits and policy of a `CacheManager`.

    Args:
        max_seq_len: maximum number of entries of all lists together, 1 to 2**31 - 64. It may be left out if
            `max_memory_bytes` is given, and is then the number of entries that these hold.
        num_heads: KV heads.
        head_dim: channels per head, 1 to 512. They are padded to a multiple of 8 in storage.
        quantization_bits: bits per value: 2, 3, 4 or 8.
        eviction_policy: chooses the entries that stay, by default `EvictionPolicy.H2O()`.
        key_bits, value_bits: bits of K and bits of V, by default `quantization_bits` each.
        max_memory_bytes: the most bytes of packed K and V of the entries, an int or a text such as "4GiB". Memory comes
            in blocks of 64 entries; with `max_seq_len` the lower limit counts.

    Raises:
        TypeError, ValueError: a setting that is not supported; too few bytes for one block.
    """

    max_seq_len: int = REQUIRED
    num_heads: int = REQUIRED
    head_dim: int = REQUIRED
    quantization_bits: int = 4
    eviction_policy: EvictionPolicy = field(default_factory=EvictionPolicy.H2O)
    key_bits: int | None = field(default=None, kw_only=True)
    value_bits: int | None = field(default=None, kw_only=True)
    max_memory_bytes: int | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, most in (("num_heads", 2**16), ("head_dim", 512)):
            object.__setattr__(self, name, as_count(getattr(self, name), name, 1, most))
        for name in ("quantization_bits", "key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits is not None or name == "quantization_bits":
                if as_integer(bits, name) not in FORMAT_OF_BITS:
                    raise ValueError(f"{name}: expected one of {_BITS}, got {bits}")
                object.__setattr__(self, name, int(bits))
        as_instance(self.eviction_policy, EvictionPolicy, "eviction_policy")
        if self.eviction_policy.endless:
            raise ValueError(
                f"eviction_policy: expected H2O, SlidingWindow or PyramidKV, got {self.eviction_policy}, which needs "
                f"an engine: its sinks meet other queries than the rest"
            )
        object.__setattr__(self, "max_seq_len", self._entries())

    def _entries(self) -> int:
        """`max_seq_len`, or what `max_memory_bytes` allow of it."""
        entries = self.max_seq_len
        if entries is not None or self.max_memory_bytes is None:
            entries = as_count(entries, "max_seq_len", 1, MAX_ENTRIES)
        if self.max_memory_bytes is None:
            return entries
        head_dim = self.head_dim + -self.head_dim % 8
        blocks = num_blocks_within(
            None, self.max_memory_bytes, 1, BLOCK_SIZE, self.num_heads, head_dim, *self.formats, False
        )
        return min(MAX_ENTRIES if entries is None else entries, blocks * BLOCK_SIZE)

    @property
    def formats(self) -> tuple[str, str]:
        """Storage formats of K and of V."""
        key, value = (self.quantization_bits if bits is None else bits for bits in (self.key_bits, self.value_bits))
        return FORMAT_OF_BITS[key], FORMAT_OF_BITS[value]

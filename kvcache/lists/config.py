"""The configuration of a `CacheManager`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.core.arguments import as_count, as_instance, as_integer
from kvcache.core.kernels import FORMATS
from kvcache.eviction import EvictionPolicy

__all__ = ["FORMAT_OF_BITS", "KVCacheConfig"]

FORMAT_OF_BITS = {format.bits: format.name for format in FORMATS.values() if format.quantised}
_BITS = ", ".join(map(str, sorted(FORMAT_OF_BITS)))
MAX_ENTRIES = 2**31 - 64


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The sizes, bits and policy of a `CacheManager`.

    Args:
        max_seq_len: most entries of all lists together, 1 to 2**31 - 64.
        num_heads: KV heads.
        head_dim: channels per head, 1 to 256. They are padded to a multiple of 8 in storage.
        quantization_bits: bits per value, those of a quantised format: 2, 3, 4 or 8.
        eviction_policy: chooses the entries that stay, by default `EvictionPolicy.H2O()`.
        key_bits, value_bits: bits of K and bits of V, by default `quantization_bits` each.

    Raises:
        TypeError, ValueError: a setting that is not supported.
    """

    max_seq_len: int
    num_heads: int
    head_dim: int
    quantization_bits: int = 4
    eviction_policy: EvictionPolicy = field(default_factory=EvictionPolicy.H2O)
    key_bits: int | None = field(default=None, kw_only=True)
    value_bits: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, most in (("max_seq_len", MAX_ENTRIES), ("num_heads", 2**16), ("head_dim", 256)):
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

    @property
    def formats(self) -> tuple[str, str]:
        """Storage formats of K and of V."""
        key, value = (self.quantization_bits if bits is None else bits for bits in (self.key_bits, self.value_bits))
        return FORMAT_OF_BITS[key], FORMAT_OF_BITS[value]

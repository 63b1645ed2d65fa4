"""The sizes of multi-head latent attention, as a `config.json` has them, and the rows of its matrices in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.kernels.functions import log
from kvcache.networks.entries import Entries

__all__ = ["LatentSizes", "latent_scale"]


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token keeps a latent, of which each head makes its key and its value by two matrices of its own, and channels that
    turn with the position, which all heads share. A query meets the latent itself: its head's key matrix is applied to
    the query in place of the key, and its value matrix to the result ("absorbed", section 2.1.2).

    Attributes:
        latent: channels of the latent.
        turned: channels of queries and keys that RoPE turns; a cache has `latent + turned` channels of one KV head.
        plain: channels of a query that meet the latent.
        value: channels of a head's result.
        queries: channels of the queries' own latent; 0: they are made of the hidden state.
        neighbours: whether files have turned channels in the order of a RoPE that turns neighbours.
    """

    latent: int
    turned: int
    plain: int
    value: int
    queries: int
    neighbours: bool

    @classmethod
    def of(cls, read: Entries) -> LatentSizes:
        """Read the keys of a `config.json`; CheckpointError: a key of the wrong kind, an odd number to turn."""
        turned = read.size("qk_rope_head_dim", 64)
        if turned % 2:
            raise CheckpointError(f"qk_rope_head_dim: expected an even number (RoPE turns pairs), got {turned}")
        absent = read.get("q_lora_rank") is None
        return cls(
            latent=read.size("kv_lora_rank", 512), turned=turned, plain=read.size("qk_nope_head_dim", 128),
            value=read.size("v_head_dim", 128), queries=0 if absent else read.size("q_lora_rank"),
            neighbours=read.flag("rope_interleave", True),
        )

    @property
    def key(self) -> int:
        """Channels of a key as the cache has it."""
        return self.latent + self.turned

    @property
    def query(self) -> int:
        """Channels of a head of queries before its key matrix is applied; its square root divides scores."""
        return self.plain + self.turned

    def file_rows(self, part: str, first: int, stop: int) -> NDArray[np.int64] | None:
        """The rows of a file for rows [first, stop) of a projection; None: they follow each other.

        Args:
            part: the name of the tensor in its layer.

        Returns:
            int64 `(stop - first,)`: turned channels i and i + turned / 2 are a pair, those of a file may be neighbours.
        """
        head, before = {
            "self_attn.q_proj": (self.query, self.plain), "self_attn.q_b_proj": (self.query, self.plain),
            "self_attn.kv_a_proj_with_mqa": (self.key, self.latent),
        }.get(part.rpartition(".")[0], (0, 0))
        if not head or not self.neighbours:
            return None
        rows, half = np.arange(first, stop), self.turned // 2
        channels = rows % head - before
        pairs = np.where(channels < half, 2 * channels, 2 * (channels - half) + 1)
        return np.where(channels < 0, rows, rows - channels + pairs)


def latent_scale(sizes: LatentSizes, rope: Mapping[str, Any]) -> float:
    """The factor of scores: the usual one, times the squared temperature of a stretched context.

    Args:
        rope: the entry of a `config.json`, whose `mscale_all_dim` says that queries and keys both have it.
    """
    scale, read = 1 / math.sqrt(sizes.query), Entries(rope, "rope_parameters.")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not read.get("mscale_all_dim"):
        return scale
    factor = read.number("factor", 1.0)
    temperature = 0.1 * read.number("mscale_all_dim") * log(factor) + 1.0 if factor > 1 else 1.0
    return scale * temperature * temperature

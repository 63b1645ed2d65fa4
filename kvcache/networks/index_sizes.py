"""The sizes of indexers, which choose the tokens that latent attention reads, as a `config.json` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CheckpointError
from kvcache.networks.entries import Entries
from kvcache.networks.padded_heads import stored_sizes
from kvcache.support.arguments import short

__all__ = ["INDEXED", "IndexSizes"]

INDEXED = "indexed_attention"  # what files call layers with an indexer
_LETTERS = {"F": "full", "S": "shared"}


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """The sizes of indexers (DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1).

    Attributes:
        heads: of the queries of an indexer.
        dim: channels of these, and of the one key of a token.
        turned: the first of them, which RoPE turns.
        most: the tokens that a query attends to, of those that it sees.
        neighbours: whether files have turned channels in the order of a RoPE that turns neighbours.
        own: which layers have an indexer; the others take the choice of the last layer before them that has one.
    """

    heads: int
    dim: int
    turned: int
    most: int
    neighbours: bool
    own: tuple[bool, ...]

    @classmethod
    def of(cls, read: Entries, num_layers: int, turned: int, neighbours: bool) -> IndexSizes:
        """Read the keys of a `config.json`; CheckpointError: a key of the wrong kind, layers without a choice."""
        if read.get("q_lora_rank") is None:
            raise CheckpointError("q_lora_rank: expected a size, of the rows that indexers take, got null")
        dim = read.size("index_head_dim", 128)
        if dim < turned or sum(stored_sizes((dim,))) > 512:
            raise CheckpointError(f"index_head_dim: expected {turned} (qk_rope_head_dim) to 512, got {dim}")
        return cls(
            read.size("index_n_heads", 64), dim, turned, read.size("index_topk", 2048), neighbours,
            _own_of(read, num_layers),
        )

    @property
    def stored(self) -> int:
        """The channels of a key that a cache has."""
        return sum(stored_sizes((self.dim,)))

    def file_rows(self, part: str, first: int, stop: int) -> NDArray[np.int64] | None:
        """The rows of a file for rows [first, stop) of a tensor of an indexer; None: they follow each other."""
        if not self.neighbours or part.rpartition(".")[0] not in ("self_attn.indexer.wq_b", "self_attn.indexer.wk"):
            return None
        rows, half = np.arange(first, stop), self.turned // 2
        channels = rows % self.dim
        pairs = np.where(channels < half, 2 * channels, 2 * (channels - half) + 1)
        return np.where(channels < self.turned, rows - channels + pairs, rows)


def _own_of(read: Entries, num_layers: int) -> tuple[bool, ...]:
    """Which layers have an indexer: as a list says, or letters F and S, or every so manyth layer from one on."""
    if not any(map(read.has_default, ("indexer_types", "index_topk_freq"))):
        return (True,) * num_layers
    listed: Any = read.get("indexer_types")
    key = "indexer_types" if listed is not None else "index_topk_pattern"
    listed = read.get(key)
    if listed is None:
        every, first = read.size("index_topk_freq", 1, at_least=0), read.size("index_skip_topk_offset", 2, at_least=0)
        kinds = ["full" if max(i - first + 1, 0) % max(every, 1) == 0 else "shared" for i in range(num_layers)]
    else:
        kinds = [_LETTERS.get(each, "") for each in listed] if isinstance(listed, str) else listed
    known = isinstance(kinds, list) and len(kinds) == num_layers and set(map(str, kinds)) <= {*_LETTERS.values()}
    if not known or kinds[0] != "full":
        expected = f"full, then full or shared for each of {num_layers} layers"
        raise CheckpointError(f"{key}: expected {expected}, got {short(listed)}")
    return tuple(each == "full" for each in kinds)

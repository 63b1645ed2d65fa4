"""`PagedPool`: the `PagedKvCache`s of one or many caches of a model, which grow with what is stored, up to a limit.

Layers with the same window, KV heads and head_dim share a `PagedKvCache`: a block holds the tokens of all of them. A
pool for prefixes ignores the windows, so that a block holds a prefix whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.store import BlockStore
from kvcache.errors import OutOfMemoryError
from kvcache.integrations.transformers.hf import get_layer_types_and_kwargs
from kvcache.integrations.transformers.layer_storage import Kind, LayerStorage
from kvcache.paged.cache import PagedKvCache
from kvcache.support.arguments import as_bytes, as_count

__all__ = ["MOST_CHANNELS", "PAGED_TYPES", "Kind", "PagedPool", "UInt64"]

PAGED_TYPES = ("full_attention", "sliding_attention")
MOST_CHANNELS = 512  # of a head: what the kernels take

UInt64 = npt.NDArray[np.uint64]


class PagedPool:
    """Blocks for the K and V of a model.

    Threads may share it. A step that finds its blocks, its layers and its sequences made takes no lock here.

    Args:
        config: of the model.
        formats: `dtype`, `key_dtype`, `value_dtype` and `calibrate` of `PagedCache`.
        block_size: tokens per block.
        max_memory_bytes: the most bytes of K and V of all blocks; None: no limit.
        by: "window", layers share blocks with those of the same window; "shape", with those of the same shape;
            "layer", with none.

    Attributes:
        lock: held where `PagedKvCache`s, what is kept of them, or ids are made.
        paged: the `PagedKvCache` of each kind; a new dict replaces it, so it can be iterated without the lock.
    """

    def __init__(
        self, config: Any, formats: dict[str, Any], block_size: int, max_memory_bytes: int | str | None, by: str
    ) -> None:
        self.types, self._options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        self.block_size = as_count(block_size, "block_size", 1, 256)
        self.limit = None if max_memory_bytes is None else as_bytes(max_memory_bytes, "max_memory_bytes")
        self.lock = RLock()
        self.paged: dict[Kind, PagedKvCache] = {}
        self.reclaim: Callable[[Kind, int], int] | None = None  # frees blocks that are kept for later
        self._by = by
        self._slots: dict[int, tuple[Kind, int]] = {}  # layer -> its kind and its number among those of its kind
        self.said = self.kinds_of(config.get_text_config(decoder=True))
        self._next_id = 1
        self.formats = LayerStorage.of(formats, len(self.types), self.said)
        self.formats.check(self.block_size)

    def window(self, layer: int) -> int | None:
        """The window of a layer, in tokens."""
        window: int | None = self._options[layer].get("sliding_window")
        return window if self.types[layer] == "sliding_attention" else None

    def _kind(self, layer: int, heads: int, channels: int) -> Kind:
        window = None if self._by == "shape" else self.window(layer)
        return Kind(window, heads, -(-channels // 8) * 8, layer if self._by == "layer" else None)

    def place(self, layer: int, heads: int, channels: int) -> tuple[Kind, int]:
        """The kind of a layer and its number in the `PagedKvCache` of that kind."""
        with self.lock:
            if layer not in self._slots:
                kind = self._kind(layer, heads, channels)
                own = self._said_of(kind)
                used = own.index(layer) if layer in own else sum(other == kind for other, _ in self._slots.values())
                if layer not in own and (own or used == self._layers_of(kind)):  # more layers than the config says
                    kind, used = kind._replace(layer=layer), 0
                self._slots[layer] = kind, used
            return self._slots[layer]

    def _said_of(self, kind: Kind) -> list[int]:
        """The layers of a kind, as the configuration says."""
        return [layer for layer, each in self.said.items() if each == kind]

    def kinds_of(self, config: Any) -> dict[int, Kind]:
        """The kinds of the layers by what the configuration says of heads, before a model has run."""
        kinds = {}
        for layer, each in enumerate(config.per_layer_config):
            heads = getattr(each, "num_key_value_heads", None) or getattr(each, "num_attention_heads", None)
            width = getattr(each, "head_dim", None) or getattr(each, "hidden_size", 0) // max(1, heads or 0)
            if self.types[layer] in PAGED_TYPES and heads and width:
                kinds[layer] = self._kind(layer, heads, width)
        return kinds

    def blocks_of(self, kind: Kind, wanted: int) -> PagedKvCache:
        """The `PagedKvCache` of a kind, made with `wanted` blocks if there is none."""
        with self.lock:
            if kind not in self.paged:
                layers, size = self._layers_of(kind), self.block_bytes(kind)
                count = wanted if self.limit is None else min(wanted, (self.limit - self._mapped()) // size)
                if count < 1:
                    raise OutOfMemoryError(size, max(0, (self.limit or 0) - self._mapped()), "bytes")
                made = PagedKvCache(
                    count, self.block_size, kind.heads, kind.channels, num_layers=layers,
                    **self.formats.of_layers(self._said_of(kind)),
                )
                self.paged = {**self.paged, kind: made}
            return self.paged[kind]

    def block_bytes(self, kind: Kind) -> int:
        """Bytes of a block of this kind, of all its layers."""
        formats = self.formats.stored(self._said_of(kind))
        store = BlockStore(self._layers_of(kind), 0, self.block_size, kind.heads, kind.channels, *formats)
        return int(store.block_bytes)

    def _layers_of(self, kind: Kind) -> int:
        if kind.layer is not None:
            return 1
        return len(self._said_of(kind)) or sum(
            name in PAGED_TYPES and (self._by == "shape" or self.window(layer) == kind.window)
            for layer, name in enumerate(self.types)
        )

    def _mapped(self) -> int:
        return sum(paged.total_memory_bytes for paged in self.paged.values())

    def make_room(self, kind: Kind, error: OutOfMemoryError) -> None:
        """Free or add the blocks that a call of the `PagedKvCache` lacked, or raise its error."""
        paged = self.paged[kind]
        lacking = error.requested - error.available
        if error.unit != "blocks" or lacking < 1:
            raise error
        with self.lock:
            wanted = max(lacking, paged.total_blocks // 2)
            if self.limit is not None:
                room = max(0, self.limit - self._mapped()) // max(1, paged.block_memory_bytes)
                wanted = min(max(lacking, wanted // (2 * len(self.paged))), room)
                if wanted < lacking and self.reclaim is not None:
                    lacking -= self.reclaim(kind, lacking - wanted)
                if wanted < lacking:
                    raise error
            if wanted:
                paged.grow(wanted)

    def prepare(self, kind: Kind, count: int) -> None:
        """Make or add blocks until `count` are free, as far as the limit allows."""
        with self.lock:
            if kind not in self.paged:
                with suppress(OutOfMemoryError):
                    self.blocks_of(kind, count)
                return
            paged = self.paged[kind]
            lacking = count - paged.free_block_count
            if self.limit is not None:
                lacking = min(lacking, (self.limit - self._mapped()) // max(1, paged.block_memory_bytes))
            if lacking > 0:
                paged.grow(lacking)

    def new_ids(self, count: int) -> UInt64:
        """Ids of new sequences."""
        with self.lock:
            first, self._next_id = self._next_id, self._next_id + count
        return np.arange(first, first + count, dtype=np.uint64)

"""`CacheArguments`: the arguments of an engine about its caches, and the sizes that all kinds of layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.calibration.residual import most_unpacked
from kvcache.core.layer_formats import Formats, formats_of_layers, names_of, unpacked
from kvcache.core.store import BlockStore
from kvcache.kernels.kernels import FORMATS
from kvcache.networks.protocols import LayerAttention, Model, Recurrence
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.residual import row_block
from kvcache.support.machine_memory import as_memory
from kvcache.texts.budgets import Budgets
from kvcache.texts.newest import num_newest
from kvcache.texts.storage import Storage

__all__ = ["CacheArguments", "Load"]


@dataclass(frozen=True, slots=True)
class Load:
    """The most that an engine runs at a time.

    Attributes:
        texts: the most texts; 0: one, which a change leaves as it was until it has succeeded.
        piece: the most tokens of a pass.
        drafts: the most draft tokens of a text in a pass.
        prompts: the most prompts of which a pass has several tokens.
        spare: tokens before a window that stay, so that a text can be cut.
        default_tokens: of the default pool, at most; and how many whole contexts it has room for.
        default_contexts: see there.
    """

    texts: int
    piece: int
    drafts: int = 0
    prompts: int = 1
    spare: int = 64
    default_tokens: int = 8192
    default_contexts: int = 1


@dataclass(frozen=True, slots=True)
class CacheArguments:
    """The arguments of an engine about its caches, checked.

    Attributes:
        model: the network.
        load: what runs at a time.
        storage: formats, calibration, residual, sink tokens.
        budgets: of layers that evict; None: they keep all tokens.
        rotate, block_size, num_blocks, max_memory_bytes: see `InferenceEngine`.
        make_cache: makes a cache of its keyword arguments.
        attention: how each layer attends.
        recurrences: of the layers that keep a state.
        layers: by the name of each kind, the layers of its groups, ascending; those that read K and V of another layer
            are left out.
        max_state_bytes: the most bytes of cached states, None: as many as K and V have, and at least eight states.
        sparse_tokens: see `InferenceEngine`.
        spill: the folder of what memory has no room for; None: all is in memory.
        cached_limit: the `max_memory_bytes` of a prefix cache, of all K and V; None: it has none.
    """

    model: Model
    load: Load
    storage: Storage
    budgets: Budgets | None
    rotate: bool | str
    block_size: int
    num_blocks: int | None
    max_memory_bytes: int | str | None
    make_cache: Callable[..., PagedKvCache]
    attention: tuple[LayerAttention | None, ...]
    recurrences: dict[int, Recurrence]
    layers: dict[str, tuple[tuple[int, ...], ...]]
    max_state_bytes: int | None = None
    sparse_tokens: int | None = None
    spill: str | None = None
    cached_limit: int | str | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """The layers that keep all tokens, or all that evict."""
        return (self.layers["whole"] or self.layers["evicting"])[0]

    @property
    def keeps_f16(self) -> bool:
        """Whether texts read some tokens in f16 beside packed ones."""
        return self.budgets is None and (self.storage.residual_length > 0 or self.storage.firsts > 0)

    def shares(self, cached: int | None) -> bool:
        """Whether prefixes are cached: those of many texts, or of one beside a prefix cache of `cached` blocks."""
        return bool(self.load.texts) or cached is not None

    # -- layers ---------------------------------------------------------------------------------------------

    def has_kv(self, layer: int) -> bool:
        """Whether a layer has K and V of its own."""
        each = self.attention[layer]
        return each is not None and each.kv_layer is None

    def window_of(self, layer: int) -> int:
        """The window of a layer; one of all positions, if it has none."""
        return self.attention_of(layer).window or self.model.config.max_position_embeddings

    def attention_of(self, layer: int) -> LayerAttention:
        """How a layer attends."""
        return self.attention[layer] or LayerAttention()

    def sizes(self, layers: Sequence[int]) -> tuple[int, int, int | None]:
        """KV heads of a block and channels of a head in these layers; the channels of a key that are V, None: none."""
        any_layer = next((i for i, each in enumerate(self.attention) if each is not None), 0)
        config, each = self.model.config, self.attention_of(layers[0] if len(layers) else any_layer)
        heads = each.num_kv_heads or config.num_kv_heads
        return heads // self._lists, each.head_dim or config.head_dim, each.latent

    @property
    def _lists(self) -> int:
        """The sequences of a layer: 1, or one for each KV head where these keep tokens of their own."""
        return 1 if self.budgets is None else self.budgets.lists

    # -- bytes ----------------------------------------------------------------------------------------------

    def block_bytes(self, layers: Sequence[int]) -> int:
        """Bytes of K and V of a block of these layers, and of the summaries of its keys where queries choose tokens."""
        formats = [formats_of_layers(each, layers) for each in self.storage.dtypes]
        summaries = self.sparse_tokens is not None and layers == self.whole
        return self._store_bytes(len(layers), layers, self.block_size, formats, summaries)

    def _store_bytes(
        self, num_layers: int, layers: Sequence[int], block_size: int, formats: Sequence[Formats],
        summaries: bool = False,
    ) -> int:
        """Bytes of a block of `num_layers` layers with the sizes of `layers`, and of the summaries of its keys."""
        (heads, dim, latent), (key, value) = self.sizes(layers), formats
        store = BlockStore(
            num_layers, 0, block_size, heads, dim, key, value, self.rotate, latent, latent=latent is not None,
            index=self.index_of(layers),
        )
        if summaries:
            store.reserve_summaries()
        return store.block_bytes + (0 if store.summaries is None else store.summaries.block_bytes)

    def index_of(self, layers: Sequence[int]) -> tuple[int, int, str] | None:
        """Index layers beside these layers: their number, channels and format; None: there are none.

        Keys of indexers choose tokens, so that their format is q8 beside packed layers, that of the layers otherwise.
        """
        own = [each for each in (self.attention_of(layer).index for layer in layers) if each is not None and each.own]
        names = names_of(formats_of_layers(self.storage.dtypes[0], layers))
        if not own or not names:
            return None
        packed = any(FORMATS[name].quantised for name in names)
        return len(own), own[0].dim, "q8" if packed else max(names, key=lambda name: FORMATS[name].bits)

    @property
    def own_bytes(self) -> int:
        """Bytes of a block of the layers that keep all tokens; with a policy of one layer."""
        return self.block_bytes(self.whole if self.budgets is None else self.whole[:1])

    @property
    def spilled_bytes(self) -> int:
        """Bytes of a block that need not be in memory."""
        formats = [formats_of_layers(each, self.whole) for each in self.storage.dtypes]
        return self._store_bytes(len(self.whole), self.whole, self.block_size, formats)

    def bytes_of_whole(self, layers: Sequence[int], blocks: int, cached: int) -> int:
        """Bytes of these blocks, and of the tokens in f16; see `LayerKind.nbytes`."""
        own, (number, size) = blocks * self.own_bytes, self.newest(cached)  # own_bytes raises for an unknown format
        count, formats = self.most_unpacked + number * size, [unpacked(each) for each in self.storage.dtypes]
        f16 = count * self._store_bytes(len(layers) * self._lists, layers, 1, formats) if count else 0
        return own + f16

    @property
    def most_unpacked(self) -> int:
        """Tokens that the texts of a pass keep in f16 at most, in blocks of them.

        Each has its group behind its sink tokens; with groups, a piece of several tokens has these too, and at most one
        block in part. `unpack` makes room for two blocks more than it needs. The parts that a text sees have the sink
        tokens of the request, perhaps two parts; beside many texts one may run whose parts they see.
        """
        length, firsts, load = self.storage.residual_length, self.storage.firsts, self.load
        if not length and not firsts:
            return 0
        size = row_block(length, firsts)
        parts = firsts + size if firsts and self.budgets is None else 0
        if not load.texts or self.budgets is not None:
            own = most_unpacked(length, min(load.piece, self.model.config.max_position_embeddings), firsts)
            return own + 2 * parts  # those that are held, and those of the text
        pieces = load.piece + size * load.prompts if length else 0
        return (load.texts + 1) * (firsts + length + parts) + pieces + 2 * size

    def newest(self, cached: int) -> tuple[int, int]:
        """Number and size of the blocks of tokens in f16 beside a prefix cache of `cached` blocks."""
        texts = 4 * self.load.texts if self.storage.firsts else 0
        cached = 0 if self.load.texts else cached
        return num_newest(self.storage.residual_length, self.storage.firsts, self.block_size, cached, texts)

    def spilling(self, blocks: int, cached: int | None) -> dict[str, Any]:
        """More arguments of the cache of the layers that keep all tokens, where it spills."""
        if self.spill is None:
            return {}
        beside = self.bytes_beside_spill(blocks, cached or 0)
        limit = as_memory(self.max_memory_bytes, "max_memory_bytes")
        if limit <= beside:
            raise ValueError(
                f"max_memory_bytes: expected more than {beside}, what {blocks} blocks that spill keep in memory, "
                f"got {limit}"
            )
        return {"spill": self.spill, "max_memory_bytes": limit - beside}

    def kv_bytes(self, blocks: int, cached: int = 0) -> int:
        """Bytes of K, V and states of a pool of `blocks` blocks; of a subclass, which knows the kinds."""
        raise NotImplementedError

    def bytes_beside_spill(self, blocks: int, cached: int = 0) -> int:
        """The bytes of a pool of `blocks` blocks that stay in memory; of a subclass, which knows the kinds."""
        raise NotImplementedError

    def options(self, layers: Sequence[int], num_blocks: int) -> dict[str, Any]:
        """The arguments of a cache of these layers."""
        (keys, values), (num_heads, head_dim, latent) = self.storage.formats_of(layers), self.sizes(layers)
        sizes: dict[str, Any] = {"num_heads": num_heads, "head_dim": head_dim}
        if latent is not None:
            sizes = {"latent": (latent, head_dim - latent)}
        if (index := self.index_of(layers)) is not None:
            sizes |= dict(zip(("index_layers", "index_dim", "index_dtype"), index, strict=True))
        return {
            "num_blocks": num_blocks, "block_size": self.block_size, "num_layers": len(layers), "key_dtype": keys,
            "value_dtype": values, "rotate": self.rotate, "calibration": self.storage.calibration_of(layers),
            "residual_length": self.storage.residual_length, "first_tokens": self.storage.firsts, **sizes,
        }

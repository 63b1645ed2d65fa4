"""`CacheSettings`: how an engine stores K and V, and the pool that it makes of that, with one formula for its size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

from kvcache.calibration.residual import most_unpacked
from kvcache.core.layer_formats import Formats, formats_of_layers, is_mixed, unpacked
from kvcache.core.rowformat import Format
from kvcache.core.store import BlockStore
from kvcache.eviction import EvictionPolicy
from kvcache.kernels.kernels import bits_in_use
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.protocols import LayerAttention, Model, Recurrence, layer_attention, layer_recurrences
from kvcache.paged.cache import PagedKvCache
from kvcache.paged.residual import row_block
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.support.arguments import as_bytes, as_count, as_instance
from kvcache.support.exclusions import expect
from kvcache.support.machine_memory import as_memory
from kvcache.support.memory_nodes import warn_of_nodes
from kvcache.texts.budgets import Budgets
from kvcache.texts.cached_states import CachedStates, page_shape
from kvcache.texts.compressed_prefix import CompressedPrefix
from kvcache.texts.evicting import EvictingLayers
from kvcache.texts.features import features_of
from kvcache.texts.group import Group
from kvcache.texts.newest import NewestGroups, num_newest
from kvcache.texts.policy import Policy
from kvcache.texts.pool import Pool
from kvcache.texts.state import StateLayers
from kvcache.texts.storage import Storage, computed_with
from kvcache.texts.whole import WholeLayers
from kvcache.texts.window import WindowLayers, num_kept, num_pages

__all__ = ["CacheSettings", "LayerKind", "Load"]

_LEAST_STATES = 8  # that are cached, unless a limit says otherwise
_STATES_ALONE = 64  # the same, of a network without K and V
_SPACING = 64  # tokens between states that are kept in any text, where states are small
_SPACING_ALONE = 1024  # the same, of a network without K and V
_MOST_CONTEXTS = 16  # that a prefix cache names of such a network


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


class LayerKind(NamedTuple):
    """The sizes that the layers of one cache share."""

    window: int
    num_kv_heads: int
    head_dim: int
    latent: int


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The arguments of an engine about its caches, checked.

    Attributes:
        model: the network.
        load: what runs at a time.
        storage: formats, calibration, residual, sink tokens.
        budgets: of layers that evict; None: they keep all tokens.
        rotate, block_size, num_blocks, max_memory_bytes: see `InferenceEngine`.
        make_cache: makes a cache of its keyword arguments.
        attention: how each layer attends.
        whole: the layers that keep all tokens, ascending.
        windows: the layers of each window, or of other sizes; those that read K and V of another layer are left out.
        recurrences: of the layers that keep a state.
        max_state_bytes: the most bytes of cached states, None: as many as K and V have, and at least eight states.
        sparse_tokens: see `InferenceEngine`.
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
    whole: tuple[int, ...]
    windows: dict[LayerKind, tuple[int, ...]]
    recurrences: dict[int, Recurrence]
    max_state_bytes: int | None = None
    sparse_tokens: int | None = None

    @classmethod
    def of(
        cls, model: Model, load: Load, *, dtype: Formats | Format, key_dtype: Formats | Format | None,
        value_dtype: Formats | Format | None, rotate: bool | str, block_size: int, num_blocks: int | None,
        max_memory_bytes: int | str | None, residual_length: int | None, calibrate: Any,
        eviction_policy: EvictionPolicy | Policy | None, kv_budget: int | None,
        make_cache: Callable[..., PagedKvCache] = PagedKvCache, max_state_bytes: int | str | None = None,
        sparse_tokens: int | None = None,
    ) -> CacheSettings:
        """Check the arguments of an engine; see there for the errors."""
        warn_of_nodes()
        block_size, config = as_count(block_size, "block_size", 1, most=None), model.config
        budgets = Budgets.of(eviction_policy, kv_budget, model)
        attention = layer_attention(model)
        whole, windows = _groups_of(attention, config.max_position_embeddings)
        storage = Storage.of(model, dtype, key_dtype, value_dtype, calibrate, residual_length, budgets)
        if num_blocks is not None:
            num_blocks = as_count(num_blocks, "num_blocks", 1, most=None)
        if max_memory_bytes is not None:
            max_memory_bytes = as_memory(max_memory_bytes, "max_memory_bytes")
        for each, name in zip(storage.dtypes, ("key_dtype", "value_dtype"), strict=True):
            if is_mixed(each) and len(each) != config.num_layers:
                count = config.num_layers
                raise ValueError(f"{name}: expected one format, or one for each of {count} layers, got {each}")
        settings = cls(
            model, load, storage, budgets, rotate, block_size, num_blocks, max_memory_bytes, make_cache, attention,
            whole, windows, layer_recurrences(model),
        ).with_states(max_state_bytes).with_sparse_tokens(sparse_tokens)
        for layers in (whole, *windows.values()):
            settings.block_bytes(layers)  # raises for a format that is not supported
        return settings

    def with_states(self, max_state_bytes: int | str | None) -> CacheSettings:
        """These settings with another limit of cached states.

        Raises:
            TypeError, ValueError: no number of bytes; a network without a state; too few for one state, and not 0.
        """
        if max_state_bytes is None:
            return self
        limit, own = as_bytes(max_state_bytes, "max_state_bytes"), self.page_bytes
        if not self.recurrences:
            raise ValueError(f"max_state_bytes: expected None for a network without a state, got {max_state_bytes}")
        if 0 < limit < own:
            raise ValueError(f"max_state_bytes: expected 0 or at least {own}, the bytes of a state, got {limit}")
        return replace(self, max_state_bytes=limit)

    def within(self, max_memory_bytes: int) -> CacheSettings:
        """These settings with another limit of bytes."""
        return replace(self, max_memory_bytes=max_memory_bytes)

    def expect(self, prefix: CompressedPrefix | None) -> CompressedPrefix | None:
        """Check that texts may stand behind a prefix, and return it.

        Raises:
            TypeError: another kind.
            ValueError: it is of another network; layers evict, or queries choose tokens.
        """
        if prefix is None:
            return None
        as_instance(prefix, CompressedPrefix, "prefix").expect(self.model)
        expect("prefix", prefix, self.features)
        return prefix

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that exclude settings, see `kvcache.support.exclusions`."""
        own = set() if self.sparse_tokens is None else {"sparse"}
        return features_of(self.model) | own | (set() if self.budgets is None else self.budgets.features)

    def with_sparse_tokens(self, sparse_tokens: int | None) -> CacheSettings:
        """These settings, where queries choose tokens.

        Raises:
            TypeError, ValueError: no number from 1 on; layers that evict or are latent; none that keep all tokens, or
                some of other sizes than the first; a block size that is no multiple of 16.
        """
        if sparse_tokens is None:
            return self
        expect("sparse_tokens", count := as_count(sparse_tokens, "sparse_tokens", 1), self.features)
        if self.block_size % 16:
            raise ValueError(f"block_size: expected a multiple of 16 with sparse_tokens, got {self.block_size}")
        return replace(self, sparse_tokens=count)

    def named(self, network: str | None) -> str:
        """The name of a network in saved caches, with what else its K and V depend on.

        Args:
            network: its name; None: its `fingerprint`, or a TypeError.
        """
        name = fingerprint(self.model) if network is None else network
        made = computed_with(self.model, self.storage.residual_length, self.sparse_tokens)
        return f"{name}{made}, {bits_in_use()}"

    @property
    def piece(self) -> int:
        """The most tokens of a pass that a text may have."""
        positions = self.model.config.max_position_embeddings
        return self.load.piece if self.budgets is None else self.budgets.piece(self.load.piece, positions)

    @property
    def max_positions(self) -> int | None:
        """The most positions of a text; None: its length is not limited."""
        endless = self.budgets is not None and self.budgets.endless
        return None if endless else self.model.config.max_position_embeddings

    @property
    def keeps_f16(self) -> bool:
        """Whether texts read some tokens in f16 beside packed ones."""
        return self.budgets is None and (self.storage.residual_length > 0 or self.storage.firsts > 0)

    # -- sizes ----------------------------------------------------------------------------------------------

    def _attention_of(self, layer: int) -> LayerAttention:
        return self.attention[layer] or LayerAttention()

    def _sizes(self, layers: Sequence[int]) -> tuple[int, int, int | None]:
        """KV heads of a block and channels of a head in these layers; the channels of a key that are V, None: none."""
        any_layer = next((i for i, each in enumerate(self.attention) if each is not None), 0)
        config, each = self.model.config, self._attention_of(layers[0] if len(layers) else any_layer)
        heads = each.num_kv_heads or config.num_kv_heads
        return heads // self._lists, each.head_dim or config.head_dim, each.latent

    @property
    def _lists(self) -> int:
        """The sequences of a layer: 1, or one for each KV head where these keep tokens of their own."""
        return 1 if self.budgets is None else self.budgets.lists

    def _store_bytes(
        self, num_layers: int, layers: Sequence[int], block_size: int, formats: Sequence[Formats],
        summaries: bool = False,
    ) -> int:
        """Bytes of K and V of a block of so many layers with the sizes of these, and of the summaries of its keys."""
        (heads, dim, latent), (key, value) = self._sizes(layers), formats
        store = BlockStore(
            num_layers, 0, block_size, heads, dim, key, value, self.rotate, latent, latent=latent is not None
        )
        if summaries:
            store.reserve_summaries()
        return store.block_bytes + (0 if store.summaries is None else store.summaries.block_bytes)

    def block_bytes(self, layers: Sequence[int]) -> int:
        """Bytes of K and V of a block of these layers, and of the summaries of its keys where queries choose tokens."""
        formats = [formats_of_layers(each, layers) for each in self.storage.dtypes]
        summaries = self.sparse_tokens is not None and layers == self.whole
        return self._store_bytes(len(layers), layers, self.block_size, formats, summaries)

    @property
    def _f16_bytes(self) -> int:
        """Bytes of a token in all layers, as a residual has it."""
        layers, formats = self.whole, [unpacked(each) for each in self.storage.dtypes]
        return self._store_bytes(len(layers) * self._lists, layers, 1, formats)

    @property
    def _most_f16(self) -> int:
        """Tokens that the texts of a pass keep in f16 at most, in blocks of them.

        Each has its group behind its sink tokens; with groups, a piece of several tokens has these too, and at most one
        block in part. `unpack` makes room for two blocks more than it needs.
        """
        length, firsts, load = self.storage.residual_length, self.storage.firsts, self.load
        if not length and not firsts:
            return 0
        if not load.texts or self.budgets is not None:
            return most_unpacked(length, min(load.piece, self.model.config.max_position_embeddings), firsts)
        size = row_block(length, firsts)
        pieces = load.piece + size * load.prompts if length else 0
        return load.texts * (firsts + length) + pieces + 2 * size

    def _newest(self, cached: int) -> tuple[int, int]:
        """Number and size of the blocks of tokens in f16 beside a prefix cache of so many blocks."""
        texts = 4 * self.load.texts if self.storage.firsts else 0
        cached = 0 if self.load.texts else cached
        return num_newest(self.storage.residual_length, self.storage.firsts, self.block_size, cached, texts)

    def window_blocks(self, window: int, blocks: int, cached: int) -> int:
        """The blocks of a window's cache beside `blocks` of the layers that keep all tokens.

        There is room for the windows of all texts that run, the pieces of a pass, and some cached pages. With many
        texts there are never more than `blocks`, so that a window takes no more memory than all tokens would.

        Args:
            cached: the most blocks of the prefix cache.
        """
        load, size, kept = self.load, self.block_size, window - 1 + self.load.spare
        piece = -(-load.piece // size) + 1
        if load.texts:
            return min(blocks, load.texts * num_kept(kept, size) + piece + num_pages(kept, size, blocks, 16))
        most = 2 * (-(-self.model.config.max_position_embeddings // size) + 1)
        return min(2 * (num_kept(kept, size) + piece), most) + num_pages(kept, size, cached)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a text in all layers."""
        return 4 * sum(each.size for each in self.recurrences.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of a cached state."""
        heads, dim = page_shape(max((each.size for each in self.recurrences.values()), default=1))
        return 8 * heads * dim * len(self.recurrences)

    @property
    def state_slots(self) -> int:
        """The most texts that have a state: as fit a quarter of `max_memory_bytes`, at least one."""
        if not self.recurrences or not self.load.texts:
            return 2 if self.recurrences else 0
        if self.max_memory_bytes is None:
            return self.load.texts
        share = as_bytes(self.max_memory_bytes, "max_memory_bytes") // 4 // self.state_bytes
        return max(1, min(self.load.texts, share))

    def state_pages(self, blocks: int) -> int:
        """The most cached states beside a prefix cache of so many blocks."""
        if not self.recurrences or not blocks:
            return 0
        if self.max_state_bytes is not None:
            return self.max_state_bytes // self.page_bytes
        kv = blocks * self.block_bytes(self.whole)
        return max(_LEAST_STATES, kv // self.page_bytes) if kv else _STATES_ALONE

    def kv_bytes(self, blocks: int, cached: int = 0) -> int:
        """Bytes of K, V and states of a pool with so many blocks, of which the prefix cache may have `cached`."""
        number, size = self._newest(cached)
        windows = [
            self.window_blocks(kind.window, blocks, cached) * self.block_bytes(layers)
            for kind, layers in self.windows.items()
        ]
        f16 = self._most_f16 + number * size
        states = self.state_slots * self.state_bytes
        pages = self.state_pages(blocks if self.load.texts else cached) * self.page_bytes if self.recurrences else 0
        return blocks * self._own_bytes + sum(windows) + (f16 * self._f16_bytes if f16 else 0) + states + pages

    @property
    def _own_bytes(self) -> int:
        """Bytes of a block of the layers that keep all tokens; with a policy of one layer."""
        return self.block_bytes(self.whole if self.budgets is None else self.whole[:1])

    def fitting(self, most: int, needed: Callable[[int], int], limit: Any, of_what: str = "of one block") -> int:
        """The most blocks, at most `most`, for which `needed` has no more bytes than `limit`.

        Raises:
            TypeError, ValueError: no number of bytes; too few for one block.
        """
        limit = as_memory(limit, "max_memory_bytes")
        if limit < needed(1):
            raise ValueError(f"max_memory_bytes: expected at least {needed(1)}, the bytes {of_what}, got {limit}")
        return bisect_right(range(min(most, 2**31 - 1) + 1), limit, key=needed) - 1

    def total_blocks(self) -> int:
        """The blocks of a pool: `num_blocks`, or what `max_memory_bytes` allow, or the lower of both, or the default.

        With a policy those of the cache of a text.
        """
        if self.budgets is not None:
            return self._evicting_blocks(self.budgets)
        load, size, positions = self.load, self.block_size, self.model.config.max_position_embeddings
        # Plus one block: cutting the last token off may copy the last block.
        count, context = self.num_blocks, -(-load.default_contexts * positions // size) + 1
        if self.max_memory_bytes is None:
            tokens = min(load.default_contexts * positions, load.default_tokens)
            return -(-tokens // size) + 1 if count is None else count
        if count is None:
            bounded = self.windows or not self._own_bytes
            count = context if not load.texts else load.texts * context if bounded else 2**31 - 1
        return self._fitting_pool(count)

    def _fitting_pool(self, count: int) -> int:
        beside = self.kv_bytes(0)
        also = f" ({beside} beside it)" if beside else ""
        return self.fitting(count, self.kv_bytes, self.max_memory_bytes, f"of one block{also}")

    def _evicting_blocks(self, budgets: Budgets) -> int:
        peak = budgets.peak_blocks(self.block_size, self.load.piece, self.model.config.max_position_embeddings)
        if self.load.texts:
            return peak
        count = peak if self.num_blocks is None else self.num_blocks
        return count if self.max_memory_bytes is None else self._fitting_pool(count)

    def evicting_texts(self, blocks: int) -> int:
        """The most texts that evict, each with so many blocks of its own. ValueError: there is too little for one."""
        most = max(1, self.load.texts)
        if not self.load.texts:
            return most
        if self.num_blocks is not None:
            most = min(most, as_count(self.num_blocks, "num_blocks", blocks, most=None) // blocks)
        if self.max_memory_bytes is not None:
            limit, own = as_bytes(self.max_memory_bytes, "max_memory_bytes"), self.kv_bytes(blocks)
            if limit < own:
                raise ValueError(f"max_memory_bytes: expected at least {own}, the bytes of one text, got {limit}")
            most = min(most, limit // own)
        return most

    def cached_blocks(self, pool_blocks: int, count: int | None, max_memory_bytes: int | str | None) -> int:
        """The blocks of a prefix cache beside a pool: `count`, or what `max_memory_bytes` of all K and V allow.

        Raises:
            TypeError: neither is given; another kind.
            ValueError: a negative number; too few bytes for one block.
        """
        if count is None and max_memory_bytes is None:
            raise TypeError("max_cache_blocks: expected an int, or max_memory_bytes in its place, got None")
        count = None if count is None else as_count(count, "max_cache_blocks", most=None)
        if max_memory_bytes is None:
            assert count is not None
            return count
        size, positions = self._own_bytes, self.model.config.max_position_embeddings
        if count is not None:
            most = count
        elif size:
            most = (max_memory_bytes := as_memory(max_memory_bytes, "max_memory_bytes")) // size + 1
        else:  # blocks without bytes: they name what is cached of other layers
            most = _MOST_CONTEXTS * (-(-positions // self.block_size) + 1)
        return self.fitting(
            max(most, 1), lambda blocks: self.kv_bytes(pool_blocks + blocks, blocks), max_memory_bytes,
            "of one block and of the engine's K and V",
        )

    def shared_blocks(self, pool_blocks: int, max_memory_bytes: int | str | None) -> int:
        """The blocks of a pool of which a prefix cache may have all: `pool_blocks`, or fewer within `max_memory_bytes`.

        Raises:
            TypeError, ValueError: no number of bytes; too few for one block.
        """
        if max_memory_bytes is None:
            return pool_blocks
        return self.fitting(pool_blocks, lambda blocks: self.kv_bytes(blocks, blocks), max_memory_bytes)

    # -- caches ---------------------------------------------------------------------------------------------

    def _options(self, layers: Sequence[int], num_blocks: int) -> dict[str, Any]:
        """The arguments of a cache of these layers."""
        (keys, values), (num_heads, head_dim, latent) = self.storage.formats_of(layers), self._sizes(layers)
        sizes: dict[str, Any] = {"num_heads": num_heads, "head_dim": head_dim}
        if latent is not None:
            sizes = {"latent": (latent, head_dim - latent)}
        return {
            "num_blocks": num_blocks, "block_size": self.block_size, "num_layers": len(layers), "key_dtype": keys,
            "value_dtype": values, "rotate": self.rotate, "calibration": self.storage.calibration_of(layers),
            "residual_length": self.storage.residual_length, "first_tokens": self.storage.firsts, **sizes,
        }

    def pool(self, num_blocks: int, cached: int | None = None) -> Pool:
        """Make a pool; without texts.

        Args:
            num_blocks: of the layers that keep all tokens.
            cached: the most blocks of the prefix cache; None: of many texts all, of one none.
        """
        if self.budgets is not None:
            return self._evicting(self.budgets, num_blocks)
        load, attention = self.load, self.attention
        cache = self.make_cache(**self._options(self.whole, num_blocks))
        if self._most_f16:
            cache.reserve_unpacked(self._most_f16)
        if self.sparse_tokens is not None:
            cache.reserve_summaries()
        own_ids = None if load.texts else (0, 1)
        newest, (number, _) = None, self._newest(cached or 0)
        if number:
            newest = NewestGroups(cache, texts=4 * load.texts) if load.texts else NewestGroups(cache, cached or 0)
        shares = bool(load.texts) or cached is not None
        index = PrefixCache.over(cache, cached) if shares else None
        exact = bool(self.recurrences) and not self.keeps_f16
        whole = self.whole, attention, cache, index, newest, load.drafts, own_ids, exact, self.sparse_tokens
        groups: list[Group] = [WholeLayers(*whole)]
        for (window, *_), layers in self.windows.items():
            kept, pages = window - 1 + load.spare, None
            paged = self.make_cache(**self._options(layers, self.window_blocks(window, num_blocks, cached or 0)))
            if shares:
                most = None if cached is None else num_pages(kept, self.block_size, cached)
                pages = PrefixCache.over(paged, most)
            groups.append(WindowLayers(window, kept, layers, attention, paged, pages, load.piece, own_ids))
        if self.recurrences:
            groups.append(self._states(num_blocks if cached is None else cached, shares))
        return Pool(groups, self.block_size)

    def _states(self, blocks: int, shares: bool) -> StateLayers:
        """The group of the layers that keep a state, beside a prefix cache of so many blocks."""
        sizes, pages = [each.size for each in self.recurrences.values()], self.state_pages(blocks) if shares else 0
        unit = (self.storage.residual_length or self.block_size) if self.keeps_f16 else 1
        if self.windows:  # which are cached in whole blocks
            unit = lcm(unit, self.block_size)
        per_token = -(-self.block_bytes(self.whole) // self.block_size)
        # As far apart as K and V of as many bytes are long.
        spacing = max(_SPACING, self.page_bytes // per_token) if per_token else _SPACING_ALONE
        return StateLayers(
            self.recurrences, self.state_slots, CachedStates(sizes, pages) if pages else None, unit,
            -(-spacing // unit) * unit, one_text=not self.load.texts,
        )

    def _evicting(self, budgets: Budgets, num_blocks: int) -> Pool:
        layers = range(self.model.config.num_layers)
        options = self._options(layers, num_blocks) | {"separate_layers": True}
        if budgets.per_head:
            known = self.storage.calibration
            by_head = None if known is None else known.by_head()
            options |= {"num_layers": len(layers) * budgets.lists, "calibration": by_head}

        def make_cache() -> PagedKvCache:
            return self.make_cache(**options)

        group = EvictingLayers(budgets, self.attention, make_cache, self.evicting_texts(num_blocks))
        return Pool([group], self.block_size, self.piece)


def _groups_of(
    attention: Sequence[LayerAttention | None], positions: int
) -> tuple[tuple[int, ...], dict[LayerKind, tuple[int, ...]]]:
    """The layers that keep all tokens, ascending, and the others with K and V of their own by their kind.

    The layers that keep all tokens and have the sizes of the first such layer are together. Those with other sizes
    count as layers with a window of all positions.
    """
    whole, found = list[int](), dict[LayerKind, tuple[int, ...]]()
    for layer, each in enumerate(attention):
        if each is None or each.kv_layer is not None:
            continue
        first = attention[whole[0]] or each if whole else each
        sizes = each.num_kv_heads or 0, each.head_dim or 0, each.latent or 0
        if each.window is None and sizes == (first.num_kv_heads, first.head_dim, first.latent or 0):
            whole.append(layer)
            continue
        kind = LayerKind(each.window or positions, *sizes)
        found[kind] = (*found.get(kind, ()), layer)
    return tuple(whole), {kind: found[kind] for kind in sorted(found)}

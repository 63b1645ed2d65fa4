"""`CacheSettings`: how an engine stores K and V, and the pool that it makes of that, with one formula for its size."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from kvcache.core.layer_formats import is_mixed
from kvcache.networks.fingerprint import fingerprint
from kvcache.networks.protocols import Model, is_causal, layer_attention, layer_recurrences
from kvcache.paged.cache import PagedKvCache
from kvcache.support.arguments import as_bytes, as_count, as_instance, as_path
from kvcache.support.exclusions import expect
from kvcache.support.machine_memory import as_memory
from kvcache.support.memory_nodes import warn_of_nodes
from kvcache.texts.behind import Behind
from kvcache.texts.budgets import Budgets, expect_turning
from kvcache.texts.cache_arguments import CacheArguments, Load
from kvcache.texts.compressed_prefix import CompressedPrefix
from kvcache.texts.features import features_of
from kvcache.texts.kinds import KINDS
from kvcache.texts.kinds.state import page_bytes
from kvcache.texts.kv_settings import Settings
from kvcache.texts.pool import Pool
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.storage import Storage, computed_with

__all__ = ["CacheSettings", "Load"]

_PAGE = 4096  # bytes of the file of a spill that a block of a layer begins with
_MOST_CONTEXTS = 16  # that a prefix cache names of such a network


@dataclass(frozen=True, slots=True)
class CacheSettings(CacheArguments):
    """The arguments of an engine about its caches: their checks, and the pool that is made of them."""

    @classmethod
    def of(
        cls, model: Model, load: Load, given: Settings, make_cache: Callable[..., PagedKvCache] = PagedKvCache,
        max_state_bytes: int | str | None = None,
    ) -> CacheSettings:
        """Check the settings of an engine; see there for the errors."""
        warn_of_nodes()
        block_size, num_layers = as_count(given.block_size, "block_size", 1, most=None), model.config.num_layers
        budgets = Budgets.of(given.eviction_policy, given.kv_budget, model)
        storage = Storage.of(model, given, budgets)
        num_blocks, most = given.num_blocks, given.max_memory_bytes
        if num_blocks is not None:
            num_blocks = as_count(num_blocks, "num_blocks", 1, most=None)
        if most is not None:
            most = as_memory(most, "max_memory_bytes")
        for each, name in zip(storage.dtypes, ("key_dtype", "value_dtype"), strict=True):
            if is_mixed(each) and len(each) != num_layers:
                raise ValueError(f"{name}: expected one format, or one for each of {num_layers} layers, got {each}")
        settings = cls(
            model, load, storage, budgets, given.rotate, block_size, num_blocks, most, make_cache,
            layer_attention(model), layer_recurrences(model), {},
        )
        settings = replace(settings, layers=_layers_of(settings)).with_states(max_state_bytes)
        if given.sparse_tokens is not None:
            sparse = as_count(given.sparse_tokens, "sparse_tokens", 1)
            expect("sparse_tokens", sparse, settings.features)
            if block_size % 16:
                raise ValueError(f"block_size: expected a multiple of 16 with sparse_tokens, got {block_size}")
            settings = replace(settings, sparse_tokens=sparse)
        settings.kv_bytes(0)  # raises for a format that is not supported
        return settings if given.spill is None else settings.with_spill(given.spill)

    def with_spill(self, folder: str | os.PathLike[str]) -> CacheSettings:
        """These settings with a folder for what memory has no room for.

        Raises:
            TypeError: no limit of memory, another kind.
            ValueError: an empty name; what excludes it.
        """
        if self.max_memory_bytes is None:
            raise TypeError("max_memory_bytes: expected the bytes in memory beside spill, got None")
        if not (folder := as_path(folder, "spill")):
            raise ValueError("spill: expected a folder, got an empty name")
        expect("spill", folder, self.features)
        if self.sparse_tokens is None:
            warnings.warn(
                "spill without sparse_tokens: queries attend to all tokens, and each step reads from the disk those "
                "that max_memory_bytes have no room for",
                stacklevel=4,
            )
        return replace(self, spill=os.path.abspath(folder))

    def with_states(self, max_state_bytes: int | str | None) -> CacheSettings:
        """These settings with another limit of cached states.

        Raises:
            TypeError, ValueError: no number of bytes; a network without a state; too few for one state, and not 0.
        """
        if max_state_bytes is None:
            return self
        limit, own = as_bytes(max_state_bytes, "max_state_bytes"), page_bytes(self.recurrences)
        if not self.recurrences:
            raise ValueError(f"max_state_bytes: expected None for a network without a state, got {max_state_bytes}")
        if 0 < limit < own:
            raise ValueError(f"max_state_bytes: expected 0 or at least {own}, the bytes of a state, got {limit}")
        return replace(self, max_state_bytes=limit)

    def expect(
        self, prefix: Behind | None, adapter: Any = None, features: Collection[str] | None = None
    ) -> Behind | None:
        """Check that texts, perhaps with an adapter, may stand behind a prefix, and return it.

        Args:
            features: `self.features`, where they are known.

        Raises:
            TypeError: another kind; a network that turns no queries to other positions.
            ValueError: it is of another network; what `EXCLUSIONS` names: layers evict, or queries choose tokens, or
                the texts have an adapter.
        """
        if prefix is None:
            return None
        found = {*(self.features if features is None else features), *(() if adapter is None else ("adapter",))}
        if isinstance(prefix, SeenParts):
            expect("prefix: of parts of cached texts", prefix, found)
            if "window" in found and min(prefix.reaches().values(), default=0) < 0:
                raise ValueError(
                    f"prefix: expected parts that are seen from behind the ends of their texts with layers that have "
                    f"a window, which keep the newest tokens, got {prefix!r}"
                )
            expect_turning(self.model, "sink_rows", "prefix", "texts that see parts of cached texts")
            return prefix
        as_instance(prefix, CompressedPrefix, "prefix").expect(self.model)
        expect("prefix", prefix, found)
        return prefix

    @property
    def features(self) -> frozenset[str]:
        """The names of the features that exclude settings, see `kvcache.support.exclusions`."""
        given = (("sparse", self.sparse_tokens), ("spill", self.spill))
        own = {name for name, value in given if value is not None}
        return features_of(self.model) | own | (set() if self.budgets is None else self.budgets.features)

    def named(self, network: str | None) -> str:
        """The name of a network in saved caches, with what else its K and V depend on.

        Args:
            network: its name; None: its `fingerprint`, or a TypeError.
        """
        name = fingerprint(self.model) if network is None else network
        made = computed_with(self.model, self.storage.residual_length, self.sparse_tokens)
        return f"{name}{made}"

    @property
    def piece(self) -> int:
        """The most tokens of a pass that a text may have."""
        positions = self.model.config.max_position_embeddings
        if not is_causal(self.model):
            return positions
        return self.load.piece if self.budgets is None else self.budgets.piece(self.load.piece, positions)

    @property
    def max_positions(self) -> int | None:
        """The most positions of a text; None: its length is not limited."""
        endless = self.budgets is not None and self.budgets.endless
        return None if endless else self.model.config.max_position_embeddings

    # -- sizes ----------------------------------------------------------------------------------------------

    def kv_bytes(self, blocks: int, cached: int = 0) -> int:
        """Bytes of K, V and states of a pool of `blocks` blocks, of which the prefix cache may have `cached`."""
        return sum(kind.nbytes(self, each, blocks, cached) for kind in KINDS for each in self.layers[kind.name])

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
        if self.spill is not None:
            return self._spilling_blocks((-(-positions // size) + 1) * max(load.texts, 1) if count is None else count)
        if self.max_memory_bytes is None:
            tokens = min(load.default_contexts * positions, load.default_tokens)
            return -(-tokens // size) + 1 if count is None else count
        if count is None:
            bounded = self.layers["window"] or not self.own_bytes
            count = context if not load.texts else load.texts * context if bounded else 2**31 - 1
        return self._fitting_pool(count)

    def _fitting_pool(self, count: int) -> int:
        beside = self.kv_bytes(0)
        also = f" ({beside} beside it)" if beside else ""
        return self.fitting(count, self.kv_bytes, self.max_memory_bytes, f"of one block{also}")

    def _spilling_blocks(self, count: int) -> int:
        """As many blocks, at most `count`, as the disk and the memory beside blocks allow."""
        assert self.spill is not None
        os.makedirs(self.spill, mode=0o700, exist_ok=True)
        slot = self.spilled_bytes + _PAGE * len(self.whole)  # of the file, in whole pages of each layer
        room = shutil.disk_usage(self.spill).free // slot
        if not room:
            raise OSError(errno.ENOSPC, f"spill: expected room for a block of {slot} bytes, got none", self.spill)
        always = self.bytes_beside_spill(0)

        def needed(blocks: int) -> int:
            beside = self.bytes_beside_spill(blocks)
            return beside + max(beside - always, self.spilled_bytes)

        return self.fitting(min(count, room), needed, self.max_memory_bytes, "of one block and of what stays in memory")

    def bytes_beside_spill(self, blocks: int, cached: int = 0) -> int:
        """The bytes of a pool of `blocks` blocks that stay in memory."""
        return self.kv_bytes(blocks, cached) - blocks * self.spilled_bytes

    def _evicting_blocks(self, budgets: Budgets) -> int:
        peak = budgets.peak_blocks(self.block_size, self.load.piece, self.model.config.max_position_embeddings)
        if self.load.texts:
            return peak
        count = peak if self.num_blocks is None else self.num_blocks
        return count if self.max_memory_bytes is None else self._fitting_pool(count)

    def cached_blocks(self, pool_blocks: int, count: int | None, max_memory_bytes: int | str | None) -> int:
        """The blocks of a prefix cache beside a pool: `count`, or what `max_memory_bytes` of all K and V allow.

        Raises:
            TypeError: neither is given; another kind.
            ValueError: a negative number; too few bytes for one block.
        """
        self._expect_no_limit(max_memory_bytes)
        if count is None and max_memory_bytes is None:
            raise TypeError("max_cache_blocks: expected an int, or max_memory_bytes in its place, got None")
        count = None if count is None else as_count(count, "max_cache_blocks", most=None)
        if max_memory_bytes is None:
            assert count is not None
            return count
        size, positions = self.own_bytes, self.model.config.max_position_embeddings
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

    def _expect_no_limit(self, max_memory_bytes: int | str | None) -> None:
        if self.spill is not None and max_memory_bytes is not None:
            raise ValueError(
                f"max_memory_bytes: expected None with an engine that spills, whose own limit counts, "
                f"got {max_memory_bytes}"
            )

    def shared_blocks(self, pool_blocks: int, max_memory_bytes: int | str | None) -> int:
        """The blocks of a pool of which a prefix cache may have all: `pool_blocks`, or fewer within `max_memory_bytes`.

        Raises:
            TypeError, ValueError: no number of bytes; too few for one block.
        """
        self._expect_no_limit(max_memory_bytes)
        if max_memory_bytes is None:
            return pool_blocks
        return self.fitting(pool_blocks, lambda blocks: self.kv_bytes(blocks, blocks), max_memory_bytes)

    # -- caches ---------------------------------------------------------------------------------------------

    def pool(self, num_blocks: int, cached: int | None = None) -> Pool:
        """Make a pool; without texts.

        Args:
            num_blocks: of the layers that keep all tokens.
            cached: the most blocks of the prefix cache; None: of many texts all, of one none.
        """
        rows = [(kind, layers) for kind in KINDS[::-1] for layers in self.layers[kind.name]]
        groups = [kind.make(self, layers, num_blocks, cached) for kind, layers in rows]
        return Pool(groups, self.block_size, 0 if self.budgets is None else self.piece)


def _layers_of(made: CacheArguments) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The layers of the groups of each kind, by its name."""
    found, left = dict[str, tuple[tuple[int, ...], ...]](), list(range(len(made.attention)))
    for kind in KINDS:
        found[kind.name] = tuple(kind.of(made, left))
        taken = {layer for group in found[kind.name] for layer in group}
        left = [layer for layer in left if layer not in taken]
    return found

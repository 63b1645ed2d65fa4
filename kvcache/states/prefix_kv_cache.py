"""`PrefixKvCache`: KV of stored prompts, shared by every prompt that begins alike.

An index says which token lies in which slot, an arena holds the rows, one per token: the KV of a prefix that
many entries share is there once, and a lookup finds the longest common prefix to the token.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock
from kvcache.errors import InvalidOperationError
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.indexed_cache import IndexedCache
from kvcache.states.cached_entries import CachedEntries
from kvcache.states.cached_state import CachedKvState, LeasedState
from kvcache.states.entry_file import load_entries, save_entries
from kvcache.states.kv_cache import KvCache
from kvcache.states.kv_cache_access import KvCacheAccess
from kvcache.states.prefix_config import PrefixCacheConfig, PrefixKvStats
from kvcache.support.arguments import as_bytes, as_integer
from kvcache.support.copies import refuse_copies
from kvcache.support.strip import bar
from kvcache.support.token_ids import as_tokens

__all__ = ["PrefixKvCache"]

Float32 = npt.NDArray[np.float32]


class PrefixKvCache(IndexedCache):
    """A radix tree of token prefixes with their KV.

    Entries are evicted one by one, the least recently used first, an entry always after those that extend it. Evictions
    do not change a state that a caller holds; its memory counts until the caller drops it.

    KV is taken to be a function of the tokens: the rows stored for a prefix stay when another entry with this prefix
    is stored. To replace an entry, `remove` it first. Calls on one cache are serialised.

    Args:
        config: its limits and storage, by default `PrefixCacheConfig()`.
        max_memory_bytes: the most bytes of K and V, an int or a text such as "4GiB"; with a `config` the lower limit
            counts.

    Raises:
        TypeError, ValueError: not a `PrefixCacheConfig`; not a number of bytes.
    """

    def __init__(self, config: PrefixCacheConfig | None = None, *, max_memory_bytes: int | str | None = None) -> None:
        self.config = PrefixCacheConfig() if config is None else config
        if not isinstance(self.config, PrefixCacheConfig):
            raise TypeError(f"config: expected a PrefixCacheConfig, got {type(config).__name__}")
        if max_memory_bytes is not None:
            limit = as_bytes(max_memory_bytes, "max_memory_bytes")
            if config is not None:
                limit = min(limit, as_bytes(config.max_memory_bytes, "max_memory_bytes"))
            self.config = replace(self.config, max_memory_bytes=limit)
        self._lock = CallLock()
        self._cached = CachedEntries(self.config, self._lock)

    @property
    def _index(self) -> PrefixIndex:
        return self._cached.index

    # -- lookup ---------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, namespace: Hashable = None) -> tuple[int, CachedKvState] | None:
        """`(matched_len, state)`: the longest prefix of `tokens` whose KV is stored, to the token; None if none.

        The entry that serves the match counts as used. Every call is one hit or one miss.
        """
        ids = as_tokens(tokens)
        with self._lock:
            claim = self._cached.lease(ids, namespace)
            return None if claim is None else (len(claim), LeasedState(claim))

    @staticmethod
    def restore(cached: CachedKvState, target: KvCache) -> None:
        """Replace the content of `target` by a cached state.

        Raises:
            TypeError: something else.
            ValueError: other layers or another kv_dim, or more tokens than fit; `target` is unchanged.
        """
        if not isinstance(cached, CachedKvState) or not isinstance(target, KvCache):
            raise TypeError(
                f"cached, target: expected a CachedKvState and a KvCache, got {type(cached).__name__} and "
                f"{type(target).__name__}"
            )
        if cached.seq_len and (cached.num_layers, cached.kv_dim) != (target.num_layers, target.kv_dim):
            raise ValueError(
                f"cached: expected a state of {target.num_layers} layers and kv_dim {target.kv_dim}, "
                f"got {cached.num_layers} and {cached.kv_dim}"
            )
        target.restore_from_snapshot(cached.keys, cached.values, cached.seq_len)

    # -- store ----------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Any,
        kv_cache: KvCacheAccess,
        seq_len: int,
        kv_dim: int,
        num_layers: int,
        namespace: Hashable = None,
    ) -> None:
        """Store the KV of `tokens`, the first `seq_len` tokens of a live cache; as `store_snapshot`.

        Raises:
            IndexError: the cache has fewer layers.
            ValueError: `seq_len` is not the number of tokens, or the cache holds fewer rows.
            OutOfMemoryError: it could never fit.
        """
        if not hasattr(kv_cache, "get_keys") or not hasattr(kv_cache, "get_values"):
            raise TypeError(f"kv_cache: expected a KvCacheAccess, got {type(kv_cache).__name__}")
        size = as_integer(seq_len, "seq_len") * as_integer(kv_dim, "kv_dim")
        if len(as_tokens(tokens)) < self.config.min_prefix_len:
            return
        keys = [kv_cache.get_keys(layer) for layer in range(as_integer(num_layers, "num_layers"))]
        values = [kv_cache.get_values(layer) for layer in range(num_layers)]
        for layer, rows in enumerate(zip(keys, values, strict=True)):
            if min(map(len, rows)) < size:
                raise ValueError(f"kv_cache: expected {size} floats in layer {layer}, got {min(map(len, rows))}")
        state = CachedKvState([k[:size] for k in keys], [v[:size] for v in values], seq_len)
        self.store_snapshot(tokens, state, namespace)

    def store_snapshot(self, tokens: Any, snapshot: CachedKvState, namespace: Hashable = None) -> None:
        """Store a state under its tokens; fewer than `min_prefix_len` are passed over.

        Only the rows of tokens that no entry shares are copied. Entries are evicted as the limits require.

        Raises:
            ValueError: not one row per token, another shape than the namespace has, rows that need another `head_dim`,
                values that are not finite or that the format cannot hold.
            OutOfMemoryError: it could never fit beside the states that callers hold; nothing has changed.
        """
        ids = as_tokens(tokens)
        if not isinstance(snapshot, CachedKvState):
            raise TypeError(f"snapshot: expected a CachedKvState, got {type(snapshot).__name__}")
        if len(ids) < max(1, self.config.min_prefix_len):
            return
        if snapshot.seq_len != len(ids):
            raise ValueError(f"snapshot: expected one of {len(ids)} tokens, got {snapshot.seq_len}")
        keys, values = (self._as_rows(rows, len(ids)) for rows in (snapshot.keys, snapshot.values))
        with self._lock:
            self._cached.store(ids, keys, values, namespace)

    def _as_rows(self, layers: list[Float32], n: int) -> list[Float32]:
        rows = [layer.reshape(n, -1) for layer in layers]
        if not rows or rows[0].shape[1] == 0:
            raise ValueError("snapshot: expected one with at least one layer and one float per token, got none")
        return rows

    # -- save and load --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], model: str = "") -> None:
        """Write every entry to a file, with its namespace and rank; `load` reads it.

        The file takes the place of the old one at once and whole, or not at all. Other calls wait meanwhile.

        Args:
            model: the model's name; `load` rejects a file with another.

        Raises:
            TypeError: a namespace that is no None, bool, int, str, bytes or tuple of them.
            OSError: of the file system.
        """
        with self._lock:
            save_entries(path, str(model), self._cached)

    def load(self, path: str | os.PathLike[str], model: str = "", *, exact: bool = True) -> int:
        """Load what `save` wrote, the most recently used entries first, as many as the limits allow; how many.

        This reads the tables, not the rows: a lookup reads them when it first matches them, and checks them
        then. Damaged rows are forgotten, with all entries that need them, and logged as a warning.

        Args:
            model: as in `save`.
            exact: False takes the file of another version of bits too; see `PrefixCache.load`.

        Raises:
            InvalidOperationError: something is stored here already.
            SnapshotError: not a file of `save`, damaged in what is read now, of another model or version of bits, or of
                other formats; nothing has changed.
            OSError: there is none, or it cannot be read.
        """
        with self._lock:
            if len(self):
                raise InvalidOperationError(f"expected an empty cache to load into, got {len(self)} entries")
            return load_entries(path, str(model), self._cached, exact=exact)

    # -- the rest -------------------------------------------------------------------------------------------

    def remove(self, tokens: Any, namespace: Hashable = None) -> bool:
        """Forget the entry stored under exactly `tokens`; False if there is none."""
        ids = as_tokens(tokens)
        with self._lock:
            removed = self._cached.index.remove(ids, namespace)
            if removed is not None:
                removed.release()
            return removed is not None

    def clear(self) -> None:
        """Forget everything and reset all counters; states that callers hold stay valid, and count no more."""
        with self._lock:
            cached = CachedEntries(self.config, self._lock)
            cached.exact = self._cached.exact  # states that callers hold may come back
            self._cached = cached

    @property
    def memory_usage(self) -> int:
        """Bytes of K and V held: each shared prefix once, and the rows of states that callers hold."""
        with self._lock:
            return self._cached.used_bytes()

    def memory(self) -> dict[str, int]:
        """Bytes: "kv" of all slots, those that wait for tokens included, "bookkeeping" of the index, and "scratch": 0.

        Slots double as they are needed, up to `max_memory_bytes`; of quantised formats they come in blocks of 64. The
        system maps their memory at the first write.
        """
        with self._lock:
            return self._cached.memory()

    def stats(self) -> PrefixKvStats:
        """The counters now."""
        with self._lock:
            index = self._index
            counts = index.hits, index.misses, index.hit_tokens, index.lookup_tokens, index.evictions
            cached = self._cached
            return PrefixKvStats(len(self), index.trie.num_tokens, cached.used_bytes(), *counts, cached.exact)

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._cached.check()

    __reduce_ex__ = refuse_copies("`save` writes its entries to a file")

    def _repr_html_(self) -> str:
        """The bytes of K and V that entries and states take."""
        return bar(repr(self), "bytes", self.memory_usage, int(self.config.max_memory_bytes))

    def __repr__(self) -> str:
        stats, limits = self.stats(), self.config
        return (
            f"PrefixKvCache({stats.entries} of {limits.max_entries} entries, {stats.tokens} tokens, "
            f"{stats.memory_bytes} of {limits.max_memory_bytes} bytes)"
        )

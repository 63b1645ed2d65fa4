"""`CachedEntries`: the entries of a `PrefixKvCache`, their rows, and its limits on both."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock
from kvcache.errors import OutOfMemoryError
from kvcache.prefix.index.prefix_index import PrefixIndex
from kvcache.prefix.index.slots import Claim
from kvcache.states.prefix_config import PrefixCacheConfig
from kvcache.states.row_slots import RowSlots
from kvcache.states.token_rows import rows_of
from kvcache.support.arguments import as_bytes
from kvcache.support.huge_pages import huge_bytes
from kvcache.trie.entries import EntryTrie

__all__ = ["CachedEntries"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint32]


class CachedEntries:
    """An index of whole keys over rows of one token each. Every method is called with the cache's lock held.

    Attributes:
        max_bytes: of K and V, those of states that callers hold included.
        exact: see `CachedBlocks`.
    """

    def __init__(self, config: PrefixCacheConfig, lock: CallLock) -> None:
        self.config, self.lock, self.index, self.exact = config, lock, PrefixIndex(EntryTrie()), True
        self.max_bytes = as_bytes(config.max_memory_bytes, "max_memory_bytes")
        # The undamaged head of an entry becomes an entry, if lookups may find it.
        self.least = config.min_prefix_len if config.partial_matches else -1

    def fetch(self, ids: Tokens, name: Hashable) -> None:
        """Load the rows of `ids` that a file has, if they are good."""
        self.index.fetch_waiting(ids, name, self.least)

    def lease(self, ids: Tokens, name: Hashable) -> Claim | None:
        """`PrefixIndex.lease` by the settings, after `fetch`."""
        self.fetch(ids, name)
        return self.index.lease(ids, name, self.config.min_prefix_len, not self.config.partial_matches)

    def store(self, ids: Tokens, keys: list[Float32], values: list[Float32], name: Hashable) -> None:
        """Cache an entry with rows `(len(ids), kv_dim)` of each layer; raises as `PrefixKvCache.store_snapshot`."""
        kind, index = self.kind(len(keys), keys[0].shape[1]), self.index
        space = index.namespace(name)
        if space is not None and space.slots is not kind:
            rows = space.slots.rows
            raise ValueError(
                f"snapshot: expected {rows.num_layers} layers of kv_dim {rows.kv_dim} in this namespace, "
                f"got {kind.rows.num_layers} of {kind.rows.kv_dim}"
            )
        for k, v in zip(keys, values, strict=True):
            kind.rows.check_values(k, v)
        self.fetch(ids, name)
        found = index.find(ids, name)
        self._refuse_what_never_fits(kind, len(ids), found.pages)
        head = index.head(ids, name)  # What the entry builds on is used, and stays in its slots.
        length = 0 if head is None else len(head)
        self._make_room(kind, len(ids) - length, not found.is_entry)
        claim = kind.take_rows(len(ids) - length, self.max_bytes)
        kind.rows.write(claim.pages, [k[length:] for k in keys], [v[length:] for v in values])
        index.insert(ids, claim, name, head)

    def kind(self, num_layers: int, kv_dim: int) -> RowSlots:
        """The slots for rows of this shape, in use or new."""
        for kind in self.index.kinds:
            if isinstance(kind, RowSlots) and kind.shape == (num_layers, kv_dim):
                return kind
        config = self.config
        return RowSlots(rows_of(num_layers, kv_dim, *config.formats, config.rotate, config.head_dim), self.lock)

    def used_bytes(self) -> int:
        """Bytes of the slots that entries name or states show."""
        for kind in self.index.kinds:
            kind.release_dropped()
        return sum(kind.used_bytes for kind in self.index.kinds)

    def memory(self) -> dict[str, int]:
        """See `PrefixKvCache.memory`."""
        kinds = [kind for kind in self.index.kinds if isinstance(kind, RowSlots)]
        records = sum(pool.nbytes for kind in kinds for pool in kind.pools)
        kv = sum(kind.rows.nbytes for kind in kinds)
        huge = huge_bytes(span for kind in kinds for span in kind.rows.spans())
        return {"kv": kv, "bookkeeping": self.index.nbytes + records, "scratch": 0, "huge": huge}

    def _refuse_what_never_fits(self, kind: RowSlots, n: int, old: Int32) -> None:
        """OutOfMemoryError unless `n` tokens, `old` of them stored, fit after every other entry is evicted."""
        limit, size = self.max_bytes, kind.rows.slot_bytes
        if self.config.max_entries == 0:
            raise OutOfMemoryError(1, 0, "entries")
        if self.used_bytes() + (n - len(old)) * size <= limit:
            return
        held = sum(int(np.count_nonzero(each.counts())) * each.rows.slot_bytes for each in self.index.kinds)
        held -= int(np.count_nonzero(kind.counts()[old])) * size
        if held + n * size > limit:
            raise OutOfMemoryError(n * size, max(0, limit - held), "bytes")

    def _make_room(self, kind: RowSlots, count: int, new: bool) -> None:
        """Evict until `count` more tokens fit, and, of entries that no other extends, until one more does."""
        config, need = self.config, count * kind.rows.slot_bytes
        while len(self.index) + new > config.max_entries or self.used_bytes() + need > self.max_bytes:
            evicted = self.index.evict()
            assert evicted is not None, "an entry that fits beside no other was refused before"
            evicted.release()

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        self.index.check()
        assert len(self.index) <= self.config.max_entries, "prefix cache: more entries than allowed"
        assert self.used_bytes() <= self.max_bytes, "prefix cache: more memory than allowed"

"""`KvCache`: the live KV of one running request in plain arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock, MendingLock
from kvcache.errors import OutOfMemoryError
from kvcache.handle import BlockTable, CacheHandleStats, Device, KvCacheHandle, LiveBlockTable
from kvcache.states.cached_state import CachedKvState, checked_layers, finite
from kvcache.states.kv_cache_access import KvCacheAccess
from kvcache.states.pending_writes import PendingWrites
from kvcache.support.arguments import as_count, as_floats, as_integer
from kvcache.support.copies import refuse_copies
from kvcache.support.huge_pages import huge_bytes, span_of
from kvcache.support.strip import bar

__all__ = ["KvCache"]

Float32 = npt.NDArray[np.float32]
_names = itertools.count()


class KvCache(KvCacheHandle, KvCacheAccess):
    """The live KV of one request: zeroed float32 arrays for `max_seq_len` tokens of every layer.

    Args:
        num_layers, max_seq_len, kv_dim: at least 1 each; kv_dim is KV heads times head_dim.
        num_heads: KV heads, a divisor of kv_dim: how the rows are shown by the `KvCacheHandle` members.

    Raises:
        TypeError, ValueError: a setting that is not supported.
        OutOfMemoryError: the system refuses the memory.

    Calls on one cache, whatever handles they come through, are serialised.
    """

    def __init__(self, num_layers: int, max_seq_len: int, kv_dim: int, *, num_heads: int = 1) -> None:
        num_layers, max_seq_len = as_count(num_layers, "num_layers", 1), as_count(max_seq_len, "max_seq_len", 1)
        kv_dim, num_heads = as_count(kv_dim, "kv_dim", 1), as_integer(num_heads, "num_heads")
        if num_heads < 1 or kv_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of kv_dim {kv_dim}, got {num_heads}")
        try:
            self._keys = np.zeros((num_layers, max_seq_len, kv_dim), np.float32)
            self._values = np.zeros((num_layers, max_seq_len, kv_dim), np.float32)
        except (MemoryError, ValueError):  # NumPy says ValueError if the bytes pass 2**63
            raise OutOfMemoryError(8 * num_layers * max_seq_len * kv_dim, 0, "bytes") from None
        self._num_heads = num_heads
        self._writes = PendingWrites()  # shared, like all of this, by all handles on this cache
        self._name = f"kv-cache-{next(_names)}"
        self._lock = MendingLock(CallLock(), self._writes.finish)

    # -- the live cache -------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Tokens committed by `advance`."""
        return self._writes.committed

    @property
    def max_seq_len(self) -> int:
        """Tokens there is room for."""
        return self._keys.shape[1]

    @property
    def kv_dim(self) -> int:
        """Floats per row: KV heads times head_dim."""
        return self._keys.shape[2]

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._keys.shape[0]

    def clear(self) -> None:
        """Zero the data and both lengths."""
        with self._lock:
            self._writes.write([(self._keys, 0), (self._values, 0)], (0, 0))

    def advance(self) -> None:
        """Commit one token; stops at `max_seq_len`."""
        with self._lock:
            committed = min(self.seq_len + 1, self.max_seq_len)
            self._writes.write([], (committed, max(committed, self._writes.written)))

    def truncate(self, seq_len: int) -> None:
        """Keep the first `seq_len` tokens at most; never extends. ValueError for a negative count."""
        seq_len = as_count(seq_len, "seq_len")
        with self._lock:
            kept = min(seq_len, self.seq_len)
            self._writes.write([], (kept, kept))

    def store_kv(self, layer: int, key: npt.ArrayLike, value: npt.ArrayLike) -> None:
        """Write K and V of the token at position `seq_len`, `(kv_dim,)` each.

        Raises:
            IndexError: no such layer.
            OutOfMemoryError: `max_seq_len` tokens are committed (in tokens).
            TypeError, ValueError: another shape or dtype; not finite.
        """
        self._layer(layer)
        k, v = (finite(as_floats(x, (self.kv_dim,), name), name) for x, name in ((key, "key"), (value, "value")))
        with self._lock:
            n = self.seq_len
            if n == self.max_seq_len:
                raise OutOfMemoryError(n + 1, n, "tokens")
            self._writes.write([(self._keys[layer, n], k), (self._values[layer, n], v)], (n, n + 1))

    def get_keys(self, layer: int) -> Float32:
        """K written so far, a view, float32 `(tokens * kv_dim,)`. IndexError: no such layer."""
        with self._lock:
            return self._keys[self._layer(layer), : self._writes.written].reshape(-1)

    def get_values(self, layer: int) -> Float32:
        """V written so far, a view, float32 `(tokens * kv_dim,)`. IndexError: no such layer."""
        with self._lock:
            return self._values[self._layer(layer), : self._writes.written].reshape(-1)

    def _layer(self, layer: int) -> int:
        if not 0 <= as_integer(layer, "layer") < self.num_layers:
            raise IndexError(f"layer: expected an int in [0, {self.num_layers}), got {layer}")
        return layer

    def snapshot(self) -> CachedKvState:
        """A copy of the committed tokens."""
        layers = range(self.num_layers)
        with self._lock:
            n = self.seq_len
            keys = [self._keys[layer, :n].flatten() for layer in layers]
            values = [self._values[layer, :n].flatten() for layer in layers]
        return CachedKvState(keys, values, n)

    def restore_from_snapshot(self, keys: Any, values: Any, seq_len: int) -> None:
        """Replace the content by `seq_len` tokens: per layer `(seq_len * kv_dim,)` or `(seq_len, kv_dim)`.

        Raises:
            TypeError, ValueError: other layers, lengths or dtypes, more than `max_seq_len` tokens, or values that are
                not finite; nothing changes.
        """
        seq_len = as_integer(seq_len, "seq_len")
        if not 0 <= seq_len <= self.max_seq_len:
            raise ValueError(f"seq_len: expected at most {self.max_seq_len} tokens, got {seq_len}")
        rows = checked_layers(keys, values, self.num_layers, seq_len * self.kv_dim)
        with self._lock:
            sides, n = (self._keys, self._values), self.kv_dim
            places = [(side[layer, :seq_len], new[i]) for layer, new in enumerate(rows) for i, side in enumerate(sides)]
            self._writes.write([(at, self._apart(x).reshape(seq_len, n)) for at, x in places], (seq_len, seq_len))

    def _apart(self, rows: Float32) -> Float32:
        """These rows, copied if they may be views of this cache, which is about to be written."""
        mine = np.may_share_memory(rows, self._keys) or np.may_share_memory(rows, self._values)
        return rows.copy() if mine else rows

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        with self._lock:
            self._writes.check(self.max_seq_len)
        assert self._keys.shape == self._values.shape, "kv cache: K and V of different shapes"

    # -- the handle -----------------------------------------------------------------------------------------

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self._num_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.kv_dim // self._num_heads

    @property
    def device(self) -> Device:
        """The CPU."""
        return Device.CPU

    @property
    def is_valid(self) -> bool:
        """True: the arrays live as long as any handle on them."""
        return True

    @property
    def cache_id(self) -> str:
        """A name that no other cache of this process has."""
        return self._name

    @property
    def block_table(self) -> BlockTable:
        """One block of `max_seq_len` tokens."""
        return BlockTable(self.max_seq_len, [0], [0], self.seq_len)

    def block_table_mut(self) -> LiveBlockTable:
        """The live table; a shorter `sequence_length` is `truncate`, a longer one commits the tokens in the arrays."""
        return LiveBlockTable(self.max_seq_len, lambda: self.block_table, self._resize)

    def _resize(self, num_tokens: int) -> None:
        num_tokens = as_count(num_tokens, "sequence_length")
        if num_tokens > self.max_seq_len:
            raise OutOfMemoryError(num_tokens, self.max_seq_len, "tokens")
        with self._lock:
            if num_tokens < self.seq_len:
                self._writes.write([], (num_tokens, num_tokens))
            else:
                self._writes.write([], (num_tokens, max(num_tokens, self._writes.written)))

    def key_cache(self, layer: int) -> Float32:
        """K of one layer, float32 `(num_tokens, num_heads, head_dim)`, a read-only view."""
        return self._heads(self._keys[self._layer(layer)])

    def value_cache(self, layer: int) -> Float32:
        """V of one layer, float32 `(num_tokens, num_heads, head_dim)`, a read-only view."""
        return self._heads(self._values[self._layer(layer)])

    def _heads(self, rows: Float32) -> Float32:
        count = self.seq_len  # read once: other threads may change it
        view = rows[:count].reshape(count, self.num_heads, self.head_dim)
        view.flags.writeable = False
        return view

    def clone_handle(self) -> KvCache:
        """Another handle on the same data and lengths."""
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    __reduce_ex__ = refuse_copies("`snapshot` copies its content")

    def _repr_html_(self) -> str:
        """The tokens that are written."""
        return bar(repr(self), "tokens", self.seq_len, self.max_seq_len)

    def __repr__(self) -> str:
        tokens = f"{self.seq_len} of {self.max_seq_len} tokens"
        return f"KvCache({self.num_layers} layers, {tokens}, kv_dim {self.kv_dim}, num_heads {self.num_heads})"

    def as_any(self) -> KvCache:
        """The cache itself."""
        return self

    def memory(self) -> dict[str, int]:
        """Bytes: "kv" of the two arrays; "bookkeeping" and "scratch" are 0; "huge" on huge pages."""
        huge = huge_bytes([span_of(self._keys), span_of(self._values)])
        return {"kv": self._keys.nbytes + self._values.nbytes, "bookkeeping": 0, "scratch": 0, "huge": huge}

    def stats(self) -> CacheHandleStats:
        """Memory and tokens; `last_access` is the number of tokens written, since a `KvCache` has no other clock."""
        memory, count = self._keys.nbytes + self._values.nbytes, self.seq_len
        return CacheHandleStats(memory, 1, count, count / self.max_seq_len, self._writes.written)

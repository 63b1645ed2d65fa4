"""`KvCache`: the live KV of one running request in plain arrays, and `KvCacheAccess`, what every live cache offers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_count, as_flat, as_floats, as_integer
from kvcache.core.copying import refuse_copies
from kvcache.core.locks import CallLock, MendingLock
from kvcache.core.strip import bar
from kvcache.errors import InvalidOperationError, OutOfMemoryError
from kvcache.handle import BlockTable, CacheHandleStats, Device, KvCacheHandle, LiveBlockTable

__all__ = ["CachedKvState", "KvCache", "KvCacheAccess"]

Float32 = npt.NDArray[np.float32]
_names = itertools.count()


@runtime_checkable
class KvCacheAccess(Protocol):
    """A live cache that is written token by token; any code that runs a model can implement it.

    `kv_dim`, `for_each_key` and `for_each_value` are provided; a subclass that does not say its `kv_dim` has 0.
    """

    @property
    def seq_len(self) -> int:
        """Tokens committed."""
        ...

    def store_kv(self, layer: int, key: npt.ArrayLike, value: npt.ArrayLike) -> None:
        """Write one token's row `(kv_dim,)` of K and V at position `seq_len`."""
        ...

    def get_keys(self, layer: int) -> Float32:
        """K written so far, float32 `(tokens * kv_dim,)`."""
        ...

    def get_values(self, layer: int) -> Float32:
        """V written so far, float32 `(tokens * kv_dim,)`."""
        ...

    def advance(self) -> None:
        """Commit the token that was written in all layers."""
        ...

    @property
    def kv_dim(self) -> int:
        """Floats per row, KV heads times head_dim; 0 means unknown."""
        return 0

    def for_each_key(self, layer: int, visit: Callable[[int, Float32], None]) -> None:
        """Call `visit(position, row)` for every row of K. InvalidOperationError where `kv_dim` is unknown."""
        _visit(self.kv_dim, lambda: self.get_keys(layer), visit)

    def for_each_value(self, layer: int, visit: Callable[[int, Float32], None]) -> None:
        """Call `visit(position, row)` for every row of V. InvalidOperationError where `kv_dim` is unknown."""
        _visit(self.kv_dim, lambda: self.get_values(layer), visit)


def _visit(kv_dim: int, get: Callable[[], Float32], visit: Callable[[int, Float32], None]) -> None:
    if kv_dim == 0:
        raise InvalidOperationError("expected a cache that says its kv_dim, got one with kv_dim 0")
    for position, row in enumerate(np.reshape(get(), (-1, kv_dim))):
        visit(position, row)


def _finite(rows: Float32, name: str) -> Float32:
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: expected finite values, got {rows[~np.isfinite(rows)][0]}")
    return rows


class CachedKvState:
    """K and V of a token prefix: per layer one float32 vector, token after token.

    Args:
        keys, values: per layer the rows of all tokens, `(seq_len * kv_dim,)` or `(seq_len, kv_dim)`.
        seq_len: tokens.

    Raises:
        TypeError, ValueError: no floats, layers of different lengths, a length that `seq_len` does not divide.
    """

    def __init__(self, keys: Any, values: Any, seq_len: int) -> None:
        self._keys = [as_flat(layer, "keys") for layer in keys]
        self._values = [as_flat(layer, "values") for layer in values]
        self._seq_len = seq_len = as_integer(seq_len, "seq_len")
        sizes = {len(layer) for layer in (*self._keys, *self._values)}
        if len(self._keys) != len(self._values) or len(sizes) > 1:
            counts = f"{len(self._keys)} and {len(self._values)}, of {len(sizes)} lengths"
            raise ValueError(f"keys, values: expected as many layers of each, all of one length, got {counts}")
        size = sizes.pop() if sizes else 0
        if seq_len < 0 or (size % seq_len if seq_len else size):
            raise ValueError(f"seq_len: expected a divisor of the {size} floats per layer, got {seq_len}")

    @property
    def seq_len(self) -> int:
        """Tokens."""
        return self._seq_len

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.keys)

    @property
    def kv_dim(self) -> int:
        """Floats per row; 0 for a state without tokens."""
        return len(self.keys[0]) // self.seq_len if self.keys and self.seq_len else 0

    @property
    def keys(self) -> list[Float32]:
        """K per layer, float32 `(seq_len * kv_dim,)`."""
        return self._keys

    @property
    def values(self) -> list[Float32]:
        """V per layer, float32 `(seq_len * kv_dim,)`."""
        return self._values

    def __repr__(self) -> str:
        return f"CachedKvState({self.num_layers} layers, {self.seq_len} tokens, kv_dim {self.kv_dim})"


class _Writes:
    """The lengths of a `KvCache`, and the pending writes of a call, which are completed after an interrupt.

    Attributes:
        lengths: tokens committed, and tokens written.
        due: `(rows, lengths)`: pairs of a view and what to write there, and the lengths afterwards; None: no write.
    """

    def __init__(self) -> None:
        self.lengths = (0, 0)
        self.due: tuple[list[tuple[Float32, Any]], tuple[int, int]] | None = None

    def write(self, rows: list[tuple[Float32, Any]], lengths: tuple[int, int]) -> None:
        """Write rows, which are no views of the cache, and set the lengths."""
        self.due = rows, lengths  # once this is set, an interrupt cannot lose the change: the lock calls `finish`
        self.finish()

    def finish(self) -> None:
        """Write the rows that are due; may run a second time after an interrupt."""
        if self.due is not None:
            rows, lengths = self.due
            for place, row in rows:
                place[...] = row
            self.lengths = lengths
            self.due = None


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
        except (MemoryError, ValueError):  # NumPy says ValueError where the bytes pass 2**63
            raise OutOfMemoryError(8 * num_layers * max_seq_len * kv_dim, 0, "bytes") from None
        self._num_heads = num_heads
        self._writes = _Writes()  # shared, like all of this, by all handles on this cache
        self._name = f"kv-cache-{next(_names)}"
        self._lock = MendingLock(CallLock(), self._writes.finish)

    # -- the live cache -------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Tokens committed by `advance`."""
        return self._writes.lengths[0]

    @property
    def _written(self) -> int:
        """Tokens written: those committed and maybe the next one."""
        return self._writes.lengths[1]

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
            self._writes.write([], (committed, max(committed, self._written)))

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
        k, v = (_finite(as_floats(x, (self.kv_dim,), name), name) for x, name in ((key, "key"), (value, "value")))
        with self._lock:
            n = self.seq_len
            if n == self.max_seq_len:
                raise OutOfMemoryError(n + 1, n, "tokens")
            self._writes.write([(self._keys[layer, n], k), (self._values[layer, n], v)], (n, n + 1))

    def get_keys(self, layer: int) -> Float32:
        """K written so far, a view, float32 `(tokens * kv_dim,)`. IndexError: no such layer."""
        with self._lock:
            return self._keys[self._layer(layer), : self._written].reshape(-1)

    def get_values(self, layer: int) -> Float32:
        """V written so far, a view, float32 `(tokens * kv_dim,)`. IndexError: no such layer."""
        with self._lock:
            return self._values[self._layer(layer), : self._written].reshape(-1)

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
        if len(keys) != self.num_layers or len(values) != self.num_layers:
            raise ValueError(f"keys, values: expected {self.num_layers} layers, got {len(keys)} and {len(values)}")
        size = (seq_len * self.kv_dim,)
        rows = [(as_flat(k, "keys"), as_flat(v, "values")) for k, v in zip(keys, values, strict=True)]
        for k, v in rows:
            if k.shape != size or v.shape != size:
                raise ValueError(f"keys, values: expected {size[0]} floats per layer, got {len(k)} and {len(v)}")
            _finite(k, "keys"), _finite(v, "values")
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
            committed, written = self._writes.lengths
        assert 0 <= committed <= self.max_seq_len, f"kv cache: {committed} tokens committed of {self.max_seq_len}"
        assert committed <= written <= committed + 1, f"kv cache: {written} tokens written, {committed} committed"
        assert written <= self.max_seq_len, f"kv cache: {written} tokens written of {self.max_seq_len}"
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
                self._writes.write([], (num_tokens, max(num_tokens, self._written)))

    def key_cache(self, layer: int) -> Float32:
        """K of one layer, float32 `(num_tokens, num_heads, head_dim)`, a read-only view."""
        return self._heads(self._keys[self._layer(layer)])

    def value_cache(self, layer: int) -> Float32:
        """V of one layer, float32 `(num_tokens, num_heads, head_dim)`, a read-only view."""
        return self._heads(self._values[self._layer(layer)])

    def _heads(self, rows: Float32) -> Float32:
        view = rows[: self.seq_len].reshape(self.seq_len, self.num_heads, self.head_dim)
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
        """Bytes: "kv" of the two arrays; "bookkeeping" and "scratch" are 0."""
        return {"kv": self._keys.nbytes + self._values.nbytes, "bookkeeping": 0, "scratch": 0}

    def stats(self) -> CacheHandleStats:
        """Memory and tokens; `last_access` is the number of tokens written, since a `KvCache` has no other clock."""
        memory = self._keys.nbytes + self._values.nbytes
        return CacheHandleStats(memory, 1, self.seq_len, self.seq_len / self.max_seq_len, self._written)

"""`CacheManager`: quantised K and V of one text, kept within a budget by a policy that evicts token by token.

Rows are quantised asymmetrically per token and head, as KIVI does for values (Liu et al., "KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache", 2024). A rotation of the head replaces KIVI's per-channel keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal as L
from typing import overload

import numpy as np
import numpy.typing as npt

from kvcache.core.locks import CallLock, MendingLock
from kvcache.eviction import MAX_LAYERS, pyramid_budgets
from kvcache.lists.kept_tokens import add_to_all, evict_from_all
from kvcache.lists.manager_config import KVCacheConfig
from kvcache.lists.token_list import BLOCK_SIZE, TokenList
from kvcache.support.arguments import (
    as_count,
    as_finite,
    as_floats,
    as_index,
    as_indices,
    as_instance,
    as_integer,
    as_rows,
    as_scores,
    checked_scores,
)
from kvcache.support.copies import refuse_copies
from kvcache.support.huge_pages import huge_bytes
from kvcache.support.strip import bar

__all__ = ["CacheManager"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class CacheManager:
    """A quantised KV cache that evicts automatically: lists of entries, each one token's K and V of all heads.

    Args:
        config: sizes, bits and policy.
        max_memory_bytes: lowers `max_seq_len` to what these bytes hold, as in `KVCacheConfig`.

    Raises:
        TypeError, ValueError: not a `KVCacheConfig`; not a number of bytes, or too few for one block.

    **Layers.** Every `layer_idx` that was appended to has its own list; a cache that is used without `layer_idx` is
    one list. `max_seq_len` bounds all lists together. Under `PyramidKV` each layer has its `pyramid_budget`. Under the
    other policies the layers appended to so far share it evenly, with the remainder in the lowest layers, so the first
    row of a new layer can evict entries of the others. `layer_idx=None` means the lists of all layers, concatenated
    from the lowest layer; `len` counts these.

    **Order.** An index counts the entries of a list in text order and shifts when earlier entries are evicted.
    `positions` gives each entry's text position, which never changes.

    Appending a row and evicting an entry are O(log n) and move no data: a row overwrites an evicted one. Calls that
    read all entries (`get`, `positions`, `attention`, `update_attention_scores`) are O(n).

    Calls on one manager are serialised; the kernels run without the GIL.
    """

    def __init__(self, config: KVCacheConfig, *, max_memory_bytes: int | str | None = None) -> None:
        config = as_instance(config, KVCacheConfig, "config")
        if max_memory_bytes is not None:
            config = replace(config, max_memory_bytes=max_memory_bytes)
        self._config = config
        self._policy = config.eviction_policy
        self._padding = -config.head_dim % 8
        self._entry_bytes = self._new_list(0).store.block_bytes // BLOCK_SIZE
        self._layers: dict[int, TokenList] = {}  # ascending; replaced, never changed
        self._lock = MendingLock(CallLock(), self._keep_to_shares)

    def _new_list(self, num_slots: int) -> TokenList:
        config = self._config
        # Padding repeats a channel, which costs no precision unless it is rotated into the others.
        rotate = "auto" if self._padding == 0 else False
        head_dim = config.head_dim + self._padding
        return TokenList(num_slots, config.num_heads, head_dim, *config.formats, rotate, self._policy.by_score)

    # -- size -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> KVCacheConfig:
        """The configuration of the manager."""
        return self._config

    def __len__(self) -> int:
        """The number of entries of all lists; at most `max_seq_len`."""
        return sum(len(entries) for entries in self._layers.values())

    @property
    def is_empty(self) -> bool:
        """Whether there are no entries."""
        return len(self) == 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a list, ascending."""
        return tuple(self._layers)

    @property
    def compression_ratio(self) -> float:
        """Bytes of one entry in float32 over its packed bytes, scales and minima included."""
        return 8 * self._config.num_heads * self._config.head_dim / self._entry_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of packed K and V of all entries, scales and minima included."""
        return len(self) * self._entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots, used or not, and of the lists. The system maps a slot at its first write."""
        return sum(entries.nbytes for entries in self._layers.values())

    def memory(self) -> dict[str, int]:
        """Bytes: "kv" of all slots, used or not, "bookkeeping" of the lists of entries, "scratch" of attention.

        A list has slots for its share of `max_seq_len` when it is added, and the share shrinks when others are added.
        """
        with self._lock:
            lists = self._layers.values()
            kv = sum(entries.store.nbytes for entries in lists)
            bookkeeping = sum(entries.nbytes for entries in lists) - kv
            scratch, huge = sum(each.scratch_bytes for each in lists), huge_bytes(each.store.span for each in lists)
            return {"kv": kv, "bookkeeping": bookkeeping, "scratch": scratch, "huge": huge}

    def pyramid_budget(self, layer_idx: int, total_layers: int) -> int:
        """The maximum number of entries of `layer_idx` out of `total_layers` layers under PyramidKV.

        It is proportional to `total_layers - layer_idx`, rounded so that all budgets sum to `max_seq_len`, and at
        least 1 if `max_seq_len >= total_layers`.

        Raises:
            TypeError, ValueError: not integers; `total_layers` not from 1 to 4096.
            IndexError: no such layer.
        """
        layer, layers = as_integer(layer_idx, "layer_idx"), as_count(total_layers, "total_layers", 1, MAX_LAYERS)
        return pyramid_budgets(self._config.max_seq_len, layers)[as_index(layer, "layer_idx", layers)]

    # -- entries --------------------------------------------------------------------------------------------

    def append(self, key: npt.ArrayLike, value: npt.ArrayLike, layer_idx: int = 0) -> None:
        """Add the next tokens of the text to a layer's list; each is followed by the evictions it makes necessary.

        Args:
            key, value: one row `(num_heads * head_dim,)`, or many, `(n, num_heads * head_dim)` or
                `(n, num_heads, head_dim)`; float32 is read without a copy.
            layer_idx: which list.

        Raises:
            IndexError: no such layer.
            TypeError, ValueError: another shape or dtype; different numbers of keys and values; numbers that are not
                finite or that the format cannot hold.
            OutOfMemoryError: the system refuses the memory of a new list.
        """
        config = self._config
        k = as_rows(key, config.num_heads, config.head_dim, "key")
        v = as_rows(value, config.num_heads, config.head_dim, "value")
        if len(k) != len(v):
            raise ValueError(f"value: expected {len(k)} rows, as many as key has, got {len(v)}")
        if self._padding:
            widths = ((0, 0), (0, 0), (0, self._padding))
            k, v = np.pad(k, widths, "edge"), np.pad(v, widths, "edge")
        index = self._layer_index(layer_idx)
        if len(k) == 0:
            return
        with self._lock:
            entries, layers = self._layers.get(index), self._layers
            if entries is None:
                shares = self._policy.shares(config.max_seq_len, sorted([*layers, index]))
                entries = self._new_list(self._policy.rule(shares[index]).limit)
                layers = {i: layers.get(i, entries) for i in shares}
            shares = self._policy.shares(config.max_seq_len, layers)
            entries.append(k, v, self._policy.rule(shares[index]))
            if layers is not self._layers:
                self._layers = layers
                self._keep_to_shares()

    def _keep_to_shares(self) -> None:
        """Evict what lists hold beyond their shares; runs when a list is added, and after an interrupt."""
        self._evict(self._policy.shares(self._config.max_seq_len, self._layers))

    def _evict(self, limits: Mapping[int, int]) -> int:
        """Evict from every list down to its limit and return the number of evicted entries; all or nothing."""
        rules = [self._policy.rule(limits[i]) for i in self._layers]
        return evict_from_all([entries.kept for entries in self._layers.values()], rules)

    def get(self, positions: npt.ArrayLike, layer_idx: int | None = None) -> tuple[Float32, Float32]:
        """K and V of the entries at `positions`, dequantised.

        Args:
            positions: integers `(n,)`, indices into the list in text order; repetitions are allowed.
            layer_idx: which list; None: all lists, concatenated.

        Returns:
            `(keys, values)`, float32 `(n, num_heads * head_dim)` each.

        Raises:
            IndexError: no such layer, or no such entry.
            TypeError, ValueError: not integers in one dimension.
        """
        wanted, config, index = as_indices(positions, "positions"), self._config, self._layer_or_all(layer_idx)
        with self._lock:
            lists = self._lists(index)
            total = sum(map(len, lists))
            outside = wanted[(wanted < 0) | (wanted >= total)]
            if len(outside):
                raise IndexError(f"positions: expected ints in [0, {total}), got {outside[0]}")
            if len(lists) == 1:
                keys, values = lists[0].read(wanted)
            else:
                keys = np.empty((len(wanted), config.num_heads, config.head_dim + self._padding), np.float32)
                values, start = np.empty_like(keys), 0
                for entries in lists:
                    rows = np.flatnonzero((wanted >= start) & (wanted < start + len(entries)))
                    keys[rows], values[rows] = entries.read(wanted[rows] - start)
                    start += len(entries)
        shape = len(wanted), config.num_heads * config.head_dim
        return keys[..., : config.head_dim].reshape(shape), values[..., : config.head_dim].reshape(shape)

    def positions(self, layer_idx: int = 0) -> Int64:
        """The text positions of a list's entries, ascending, int64 `(n,)`; the first row appended has position 0.

        Raises:
            IndexError: no such layer.
        """
        index = self._layer_index(layer_idx)
        with self._lock:
            entries = self._layers.get(index)
            return np.empty(0, np.int64) if entries is None else entries.kept.positions()

    @overload
    def attention(
        self, queries: npt.ArrayLike, layer_idx: int = 0, return_scores: L[False] = False, *,
        scale: float | None = None, softcap: float | None = None, sinks: npt.ArrayLike | None = None,
    ) -> Float32: ...
    @overload
    def attention(
        self, queries: npt.ArrayLike, layer_idx: int = 0, *, return_scores: L[True], scale: float | None = None,
        softcap: float | None = None, sinks: npt.ArrayLike | None = None,
    ) -> tuple[Float32, Float32]: ...
    @overload
    def attention(
        self, queries: npt.ArrayLike, layer_idx: int, return_scores: L[True], *, scale: float | None = None,
        softcap: float | None = None, sinks: npt.ArrayLike | None = None,
    ) -> tuple[Float32, Float32]: ...
    @overload
    def attention(
        self, queries: npt.ArrayLike, layer_idx: int = 0, return_scores: bool = False, *, scale: float | None = None,
        softcap: float | None = None, sinks: npt.ArrayLike | None = None,
    ) -> Float32 | tuple[Float32, Float32]: ...
    def attention(
        self, queries: npt.ArrayLike, layer_idx: int = 0, return_scores: bool = False, *, scale: float | None = None,
        softcap: float | None = None, sinks: npt.ArrayLike | None = None,
    ) -> Float32 | tuple[Float32, Float32]:
        """softmax(q K^T scale) V over a list's entries, computed on the packed rows.

        Causal: the last query has the position of the last entry, the query before it that of the entry before, and so
        on. The result is that of a whole batch of rows only if none of them has been evicted.

        Args:
            queries: `(num_queries, num_query_heads, head_dim)`, num_queries at most the number of entries,
                num_query_heads a multiple of num_heads; query head h reads KV head
                h // (num_query_heads / num_heads).
            layer_idx: which list.
            return_scores: also return each entry's attention mass, summed over queries and heads, for
                `update_attention_scores(scores, layer_idx)`.
            scale: by default head_dim ** -0.5.
            softcap: a score s, after the scale, becomes softcap * tanh(s / softcap); finite, above 0.
            sinks: `(num_query_heads,)`, finite: a logit per query head that joins the normaliser of the softmax alone.
                There is no window: a policy, such as StreamingLLM's, says which tokens stay.

        Returns:
            float32, shaped like `queries`; with `return_scores` a pair with float32 `(n,)`.

        Raises:
            IndexError: no such layer.
            TypeError, ValueError: other shapes or dtypes; more queries than entries.
        """
        config = self._config
        q = as_floats(queries, (None, None, config.head_dim), "queries")
        if q.shape[1] == 0 or q.shape[1] % config.num_heads:
            raise ValueError(f"queries: expected a multiple of {config.num_heads} heads, got {q.shape[1]}")
        if not np.isfinite(q).all():
            raise ValueError("queries: expected finite numbers, got NaN or infinity")
        scale = 1 / math.sqrt(config.head_dim) if scale is None else as_finite(scale, "scale")
        cap = None if softcap is None else as_finite(softcap, "softcap", 0.0, above=True)
        logits = None if sinks is None else as_floats(sinks, (q.shape[1],), "sinks")
        if logits is not None and not np.isfinite(logits).all():
            raise ValueError("sinks: expected finite numbers, got NaN or infinity")
        index = self._layer_index(layer_idx)
        if self._padding:
            q = np.pad(q, ((0, 0), (0, 0), (0, self._padding)))
        with self._lock:
            entries = self._layers.get(index)
            n = 0 if entries is None else len(entries)
            if len(q) > n:
                raise ValueError(f"queries: expected at most {n}, one per entry, got {len(q)}")
            scores = np.zeros(n, np.float32)
            out = q if entries is None else entries.attend(q, scale, scores if return_scores else None, cap, logits)
        if self._padding:
            out = np.ascontiguousarray(out[..., : config.head_dim])
        return (out, scores) if return_scores else out

    # -- eviction -------------------------------------------------------------------------------------------

    def evict(self, budget: int, layer_idx: int | None = None) -> int:
        """Evict entries until there are at most `budget`, and return the number of evicted entries.

        The policy evicts as in a cache of `budget` entries. With several layers, each evicts what exceeds its share;
        unused parts of shares go to the layers that exceed theirs, the lowest first. Later appends may fill the cache
        up to `max_seq_len` again.

        Args:
            layer_idx: the layer whose entries are counted and evicted; None: all layers.

        Raises:
            TypeError, ValueError: not an integer, negative.
            IndexError: no such layer.
        """
        budget, index = as_count(budget, "budget"), self._layer_or_all(layer_idx)
        budget = min(budget, self._config.max_seq_len)  # a larger one has no effect; `KeptTokens` counts in 32 bits
        with self._lock:
            if index is not None:
                return sum(entries.kept.evict(*self._policy.rule(budget)) for entries in self._lists(index))
            return self._evict(self._policy.targets(budget, {i: len(entries) for i, entries in self._layers.items()}))

    def update_attention_scores(self, scores: npt.ArrayLike, layer_idx: int | None = None) -> None:
        """Add to the score of every entry; H2O and PyramidKV evict the lowest scores.

        Args:
            scores: one finite number per entry, in the order of the list.
            layer_idx: which list; None: all lists, concatenated.

        Raises:
            TypeError, ValueError: not numbers, another length, not finite; sums that overflow.
            IndexError: no such layer.
        """
        numbers, index = as_scores(scores), self._layer_or_all(layer_idx)
        with self._lock:
            lists = self._lists(index)
            added = checked_scores(numbers, sum(map(len, lists)))
            parts = np.split(added, np.cumsum([len(entries) for entries in lists])[:-1])
            with np.errstate(over="ignore"):
                if any(not np.isfinite(e.kept.scores() + part).all() for e, part in zip(lists, parts, strict=False)):
                    raise ValueError("scores: expected finite sums, got an overflow")
            if lists:
                add_to_all([entries.kept for entries in lists], parts)

    def attention_scores(self, layer_idx: int = 0) -> Float64:
        """The accumulated score of a list's entries, float64 `(n,)`; new entries have 0.

        Raises:
            IndexError: no such layer.
        """
        index = self._layer_index(layer_idx)
        with self._lock:
            entries = self._layers.get(index)
            return np.empty(0, np.float64) if entries is None else entries.kept.scores()

    # -- layers ---------------------------------------------------------------------------------------------

    def _layer_index(self, layer_idx: int) -> int:
        return as_index(layer_idx, "layer_idx", self._policy.total_layers)

    def _layer_or_all(self, layer_idx: int | None) -> int | None:
        return None if layer_idx is None else self._layer_index(layer_idx)

    def _lists(self, index: int | None) -> list[TokenList]:
        if index is None:
            return list(self._layers.values())
        entries = self._layers.get(index)
        return [] if entries is None else [entries]

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            AssertionError: naming the broken one.
        """
        with self._lock:
            assert len(self) <= self._config.max_seq_len, f"{len(self)} entries, max {self._config.max_seq_len}"
            assert list(self._layers) == sorted(self._layers), f"layers {list(self._layers)} are not ascending"
            for i, share in self._policy.shares(self._config.max_seq_len, self._layers).items():
                self._layers[i].check(self._policy.rule(share))

    __reduce_ex__ = refuse_copies("append its entries to another manager")

    def _repr_html_(self) -> str:
        """The entries of all lists."""
        return bar(repr(self), "entries", len(self), self._config.max_seq_len)

    def __repr__(self) -> str:
        c = self._config
        return (
            f"CacheManager(max_seq_len={c.max_seq_len}, num_heads={c.num_heads}, head_dim={c.head_dim}, "
            f"quantization_bits={c.quantization_bits}, eviction_policy={c.eviction_policy}, len={len(self)})"
        )

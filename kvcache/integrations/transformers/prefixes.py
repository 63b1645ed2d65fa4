"""`PrefixStore`: K and V of prompts by their exact tokens, for `generate`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.calibration import Calibration
from kvcache.core.layer_formats import Formats
from kvcache.core.memory import total
from kvcache.core.rowformat import Format
from kvcache.errors import InvalidOperationError
from kvcache.integrations.transformers.cache import PagedCache
from kvcache.integrations.transformers.hf import torch
from kvcache.integrations.transformers.layer import State
from kvcache.integrations.transformers.pool import PAGED_TYPES, Kind, PagedPool
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.prefix.prefix_stats import PrefixCacheStats
from kvcache.support.arguments import as_instance, short
from kvcache.support.copies import refuse_copies
from kvcache.tiers.source import TierSource
from kvcache.tiers.tiers import Tiers

__all__ = ["PrefixStore"]

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]

# With these models `generate` drops the cache where "longrope" changes, and runs the text again.
_DROPS_ITS_CACHE = ("phi3", "phimoe", "phi4_multimodal")


class PrefixStore:
    """Blocks of K and V that the caches of one model share, by the exact tokens that lead to them.

    For example::

        store = PrefixStore(model.config, dtype="q8", max_memory_bytes="1GiB")
        cache = store.cache_for(inputs.input_ids, inputs.attention_mask)
        out = model.generate(**inputs, cache=cache)
        store.keep(cache, out)

    `generate` skips the tokens that a cache begins with. With an assistant or prompt lookup it runs the whole prompt
    again, so a cache that is not empty raises there: take a new `PagedCache`. Layers with a window keep all tokens
    here, so that a block holds a prefix whole; their attention reads the window alone.

    Args:
        config: of the model. Its layers have full attention or windows, and rotate K by position alone.
        dtype, key_dtype, value_dtype, block_size, calibrate: as of `PagedCache`.
        max_memory_bytes: the most bytes of K and V, of caches in use and of what is kept; None: they grow. When they
            are in use, kept blocks go, the least recently used first.
        tiers: where prefixes go beyond this process and come from, see `kvcache.tiers.Tiers`; `cache_for` waits for
            them up to their `deadline`, for each row.
        model: with tiers, a name of the weights and their revision, the same wherever values are shared.

    Raises:
        TypeError, ValueError: another kind; layers of another kind; a `rope_type` "dynamic" or "longrope", which
            rotates K by the length of the text; tiers without a name of the model.
    """

    def __init__(
        self,
        config: Any,
        dtype: Formats | Format = "f16",
        *,
        key_dtype: Formats | Format | None = None,
        value_dtype: Formats | Format | None = None,
        block_size: int = 16,
        max_memory_bytes: int | str | None = None,
        tiers: Tiers | None = None,
        model: str | None = None,
        calibrate: Calibration | None = None,
    ) -> None:
        if tiers is not None:
            as_instance(tiers, Tiers, "tiers")
            if not isinstance(model, str):
                raise ValueError(f"model: expected a name of the weights with tiers, got {short(model)}")
        formats = {"dtype": dtype, "key_dtype": key_dtype, "value_dtype": value_dtype, "calibrate": calibrate}
        self._pool = PagedPool(config, formats, block_size, max_memory_bytes, "shape")
        for name in self._pool.types:
            if name not in (*PAGED_TYPES, "dummy"):
                raise ValueError(f"config: expected layers with full attention or windows, got {name}")
        _refuse_ropes_of_length(config.get_text_config(decoder=True))
        self._config, self._tiers, self._model = config, tiers, model
        self._sources: dict[Kind, TierSource] = {}
        self._indexes: dict[Kind, PrefixCache] = {}
        indexes = self._indexes  # not `self`: the pool would refer back to the store
        self._pool.reclaim = lambda kind, count: indexes[kind].evict(count) if kind in indexes else 0

    def _opened(self) -> dict[Kind, PrefixCache]:
        """The index of each kind, made if there is none; a copy, for other threads may add kinds."""
        with self._pool.lock:
            for kind, paged in self._pool.paged.items():
                if kind not in self._indexes:
                    index = PrefixCache.over(paged)
                    if self._tiers is not None:
                        known, own = paged.calibration, paged.formats.fingerprint
                        meaning = "" if known is None else f" calibrated {known.fingerprint}"
                        # PyTorch computes K and V, and its bits depend on the instructions of the CPU.
                        meaning += f" by {torch.backends.cpu.get_cpu_capability()}" + (f" {own}" if own else "")
                        name = f"{self._model} {self._digest(('dtype',))} {kind}{meaning}"
                        index.source = self._tiers.source(name)
                        self._sources[kind] = index.source
                    self._indexes[kind] = index
            return dict(self._indexes)

    def _expect(self, rows: list[Int64], namespace: Hashable) -> None:
        """Make room for what tiers may have of prompts, as far as the limit allows."""
        for kind in set(self._pool.said.values()) if self._tiers is not None else ():
            index = self._indexes.get(kind)
            known = [0 if index is None else index.peek(row, namespace) for row in rows]
            size = self._pool.block_size
            self._pool.prepare(kind, sum(-(-len(row) // size) - n // size for row, n in zip(rows, known, strict=True)))

    # -- around a call of generate --------------------------------------------------------------------------

    def cache_for(self, input_ids: Any, attention_mask: Any = None, namespace: Hashable = None) -> PagedCache:
        """A cache that holds the longest prefix that is kept of every row, the last token left out.

        Args:
            input_ids: `(batch, tokens)`.
            attention_mask: `(batch, tokens)`; without padding, or with left padding, prefixes are found.
            namespace: tenant, adapter or so: prefixes are shared within one alone.
        """
        ids, mask = _as_rows(input_ids, attention_mask)
        state = State(self._pool)
        state.prompt = ids, mask, namespace
        cache = PagedCache._over(state)
        pads = mask.argmax(1)
        self._expect([row[n:] for row, n in zip(ids, pads, strict=True)], namespace)
        indexes = self._opened()
        if not indexes or not ids.shape[1] or not (mask.sum(1) == ids.shape[1] - pads).all():
            return cache
        with ExitStack() as held:
            found = {
                kind: [
                    held.enter_context(index.open_session(row[n:], namespace)) for row, n in zip(ids, pads, strict=True)
                ]
                for kind, index in indexes.items()
            }
            lengths = [pads + [session.num_tokens for session in sessions] for sessions in found.values()]
            length = min(int(np.min(lengths)), ids.shape[1] - 1)
            if length <= pads.min() or len(found) < len(self._pool.paged):  # another thread has made a kind since
                return cache
            first = np.minimum(pads, length)
            for kind, sessions in found.items():
                counts = -(-(length - first) // self._pool.block_size)
                blocks = [list(session.shared_blocks)[:n] for session, n in zip(sessions, counts, strict=True)]
                hidden = ~mask[:, :length]
                rows = state.rows_of(kind, 0, 0)
                rows.adopt(blocks, first.astype(np.int64), length, hidden if hidden.any() else None)
        for layer in cache._paged():
            layer.seen = length
        return cache

    def keep(self, cache: PagedCache, output: Any) -> int:
        """Keep the full blocks of a cache of `cache_for` after `generate`; how many are kept of its rows.

        Of beams the prompts alone are kept: transformers does not say which tokens a row of the cache has.

        Args:
            output: what `generate` returned: token ids `(batch, n)` that begin with the prompts, or an object with
                such `sequences`.

        Raises:
            TypeError, ValueError: a cache of another store, or of other rows than the prompts; an output that does not
                begin with the prompts; a cache with more tokens than the output, for then it does not hold the output.
        """
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache: expected a PagedCache of cache_for, got {type(cache).__name__}")
        state = cache.state
        if state.pool is not self._pool or state.prompt is None:
            raise ValueError("cache: expected one of this store's cache_for, got another")
        cache._settle()
        ids, mask, namespace = state.prompt
        origin = np.arange(len(ids)) if state.row_of is None else state.row_of
        if any(rows.batch != len(origin) for rows in state.rows.values()) or origin.max(initial=-1) >= len(ids):
            raise ValueError(f"cache: expected the {len(ids)} rows of cache_for, got {cache._batch()}")
        tokens, mask = ids[origin], mask[origin]
        prompt = tokens.shape[1]
        known, _ = _as_rows(getattr(output, "sequences", output), None)
        by_row = state.row_of is None or state.mixed_at < prompt
        # The output of beams has another number of rows for each prompt than the cache.
        at = np.arange(len(known)) * len(tokens) // max(1, len(known))
        right = known.shape[1] >= prompt and (len(known) == len(tokens) or not by_row)
        if not right or (known[:, :prompt] != tokens[at])[mask[at]].any():
            raise ValueError(f"output: expected rows that begin with the {len(tokens)} prompts, got other tokens")
        if by_row:
            length = max((rows.length for rows in state.rows.values()), default=0)
            if length > known.shape[1]:
                raise ValueError(f"cache: expected at most the {known.shape[1]} tokens of the output, got {length}")
            tokens = known
        kept = 0
        for kind, index in self._opened().items():
            rows = state.rows.get(kind)
            if rows is None or rows.positions is not None:
                continue
            stop = min(rows.length, tokens.shape[1])
            kept = sum(
                index.adopt(tokens[row, first:stop], rows.paged.block_table([seq_id]).indices, namespace)
                for row, (seq_id, first) in enumerate(zip(rows.ids, rows.first, strict=True))
            )
            if kind in self._sources:
                for row, first in enumerate(rows.first):
                    self._sources[kind].used(namespace, tokens[row, first:stop].astype(np.uint32))
        return kept

    # -- save and load --------------------------------------------------------------------------------------

    def _name(self, model: str | None) -> str:
        if model is not None:
            return str(model)
        return f"{self._config.name_or_path} {self._digest()}"

    def _digest(self, named: tuple[str, ...] = ()) -> str:
        """Hash the settings of the config that K and V depend on, and the volatile ones that are `named`."""
        volatile = {"transformers_version", "dtype", "torch_dtype", "_name_or_path"} - {*named}
        settings = {name: value for name, value in self._config.to_dict().items() if name not in volatile}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _in_order(self) -> list[PrefixCache]:
        indexes = self._opened()
        return [indexes[kind] for kind in sorted(indexes, key=lambda kind: (kind.heads, kind.channels))]

    def save(self, path: str | os.PathLike[str], model: str | None = None) -> None:
        """Write every kept block to a file, with its namespace; the file takes the place of an old one at once.

        Args:
            model: a name for the weights, which `load` compares; by default the name and settings of the config.

        Raises:
            InvalidOperationError: nothing was ever stored.
            TypeError: a namespace that is no None, bool, int, str, bytes or tuple of them.
            OSError: of the file system.
        """
        if not self._opened():
            raise InvalidOperationError("expected a store that has held K and V, got a new one")
        first, *others = self._in_order()
        first.save(path, self._name(model), beside=others)

    def load(self, path: str | os.PathLike[str], model: str | None = None, *, exact: bool = True) -> int:
        """Load what `save` wrote, as much as there is room for; how many blocks. K and V are read when first used.

        Args:
            model: as in `save`.
            exact: False takes the file of another version of bits too; see `PrefixCache.load`.

        Raises:
            InvalidOperationError: blocks are kept here already.
            SnapshotError: damaged, of another model, version of bits, format or shape; nothing has changed.
            OSError: there is none, or it cannot be read.
        """
        new = set() if self._pool.paged else set(self._pool.said.values())
        size = os.path.getsize(path)
        try:
            for kind in new:
                block = self._pool.block_bytes(kind)
                self._pool.blocks_of(kind, max(1, size // block + 1))
            first, *others = self._in_order()
            return first.load(path, self._name(model), beside=others, exact=exact)
        except BaseException:
            for kind in new:
                self._indexes.pop(kind, None)
                self._pool.paged.pop(kind, None)
            raise

    # -- reports --------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Evict until `num_blocks` more are free of each kind of layers, or nothing can go; how many became free."""
        return sum(index.evict(num_blocks) for index in self._opened().values())

    def clear(self) -> None:
        """Forget every prefix; caches in use stay as they are."""
        for index in self._opened().values():
            index.clear()

    def stats(self) -> PrefixCacheStats | None:
        """The counters of the prefix index, of the first kind of layers; None before the first model call."""
        for index in self._opened().values():
            return index.stats()
        return None

    def memory(self) -> dict[str, int]:
        """Bytes by purpose: "kv" of all blocks, "bookkeeping", "scratch"."""
        reports = [paged.memory() for paged in self._pool.paged.values()]
        reports += [index.memory() for index in self._opened().values()]
        return total({"kv": 0, "bookkeeping": 0, "scratch": 0, "huge": 0}, *reports)

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        for kind, index in self._opened().items():
            index.check()
            self._pool.paged[kind].check()

    __reduce_ex__ = refuse_copies("`save` writes its blocks to a file")

    def __repr__(self) -> str:
        kept = sum(len(index) for index in self._opened().values())
        return f"PrefixStore({self._pool.formats}, {kept} blocks of {self._pool.block_size} tokens kept)"


def _refuse_ropes_of_length(config: Any) -> None:
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # the values are of types of layers, in some models
        name = str(rope.get("rope_type")) if isinstance(rope, dict) else ""
        dropped = name == "longrope" and config.model_type in _DROPS_ITS_CACHE
        if ("dynamic" in name or name == "longrope") and not dropped:
            raise ValueError(f"config: expected a rope_type that rotates K by its position alone, got {name}")


def _as_rows(input_ids: Any, attention_mask: Any) -> tuple[Int64, Bool]:
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError(f"input_ids: expected integers (batch, tokens), got {ids.dtype} {ids.shape}")
    mask = np.ones(ids.shape, np.bool_) if attention_mask is None else np.asarray(attention_mask).astype(np.bool_)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: expected shape {ids.shape}, as of input_ids, got {mask.shape}")
    return ids.astype(np.int64), mask

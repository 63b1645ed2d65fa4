"""`PagedCache`: the K and V of a model of transformers in packed blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.core.calibration import Calibration
from kvcache.core.layer_formats import Formats
from kvcache.core.memory import total
from kvcache.core.rowformat import Format
from kvcache.eviction import EvictionPolicy
from kvcache.integrations.transformers.evicting import budgets_of
from kvcache.integrations.transformers.hf import DYNAMIC_LAYER_TYPE_MAPPING, DynamicCache, torch
from kvcache.integrations.transformers.layer import PagedLayer, State
from kvcache.integrations.transformers.pace import advise
from kvcache.integrations.transformers.pool import PAGED_TYPES, PagedPool
from kvcache.support.copies import refuse_copies
from kvcache.texts.policy import Policy

__all__ = ["PagedCache", "PagedCacheStats"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedCacheStats:
    """A snapshot of a cache.

    Attributes:
        num_tokens: tokens of the text so far, masked ones included.
        batch_size: rows.
        stored_tokens: K and V stored, of all rows in the layers of the kind that has most.
        used_blocks, total_blocks: blocks with tokens, and all, of all kinds of layers; shared blocks count once.
        used_bytes: bytes of K and V of the used blocks.
        evicted_tokens: tokens that the policy evicted, of all rows and layers.
        packed_calls: attention calls over packed blocks.
        dense_calls: calls that needed dense K and V, by reason.
    """

    num_tokens: int
    batch_size: int
    stored_tokens: int
    used_blocks: int
    total_blocks: int
    used_bytes: int
    evicted_tokens: int
    packed_calls: int
    dense_calls: dict[str, int]


class PagedCache(DynamicCache):
    """K and V of a model in blocks of any storage format, which its attention reads as they are.

    For example::

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvcache")
        model.generate(**inputs, cache=PagedCache(model.config, dtype="q4"))

    It does what `DynamicCache` does. Layers that have no K and V per token (linear attention, convolutions) and those
    with chunked attention are transformers' own. With another `attn_implementation` results are the same, but K and V
    become dense in every step, and an `eviction_policy` raises.

    Args:
        config: of the model.
        dtype: storage format, "f32", "f16", "q8", "q6", "q5", "q4", "q3" or "q2"; `key_dtype`, `value_dtype` name
            them apart. A list or tuple has one for each layer, "auto:4.0" chooses them within a budget of bits per
            value, by the losses of the calibration. A `Format` in Python is applied to what is written, and stored in
            f32.
        block_size: tokens per block, 1 to 256.
        max_memory_bytes: the most bytes of K and V, an int or a text such as "1GiB"; None: they grow with the text.
        eviction_policy: which tokens of a layer with full attention stay: `EvictionPolicy.SlidingWindow`, `H2O` or
            `PyramidKV`, or a `kvcache.engine.Policy` for all heads of a layer, which counts the layers with full
            attention; None: all.
        kv_budget: tokens per layer and row under the policy.
        calibrate: what `calibrate` measured: quantised keys are rounded by it. None: each channel by itself.

    Every call can raise these errors.

    Raises:
        TypeError, ValueError: a setting that is not supported; K and V of another batch or device; a mask that shows a
            token which was masked when it came; dense attention under an `eviction_policy`.
        RuntimeError: Q, K or V that require gradients; `crop` into a window that has lost its tokens.
        OutOfMemoryError: `max_memory_bytes` are in use; `reset` the cache then.
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
        eviction_policy: EvictionPolicy | Policy | None = None,
        kv_budget: int | None = None,
        calibrate: Calibration | None = None,
    ) -> None:
        formats = {"dtype": dtype, "key_dtype": key_dtype, "value_dtype": value_dtype, "calibrate": calibrate}
        by = "window" if eviction_policy is None else "layer"
        pool = PagedPool(config, formats, block_size, max_memory_bytes, by)
        self._own(State(pool, *budgets_of(eviction_policy, kv_budget, pool)))

    @classmethod
    def _over(cls, state: State) -> PagedCache:
        """A cache of this state."""
        cache = cls.__new__(cls)
        cache._own(state)
        return cache

    def _own(self, state: State) -> None:
        advise()
        self.state, pool = state, state.pool
        self.layers: list[Any] = [
            PagedLayer(state, layer)
            if name in PAGED_TYPES
            else DYNAMIC_LAYER_TYPE_MAPPING[name](**pool._options[layer])
            for layer, name in enumerate(pool.types)
        ]
        self.layer_class_to_replicate, self.offloading = None, False

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the new K and V of a layer; the whole K and V of the layer, `StoredStates`."""
        if torch.compiler.is_compiling():
            return _update_apart(self, key_states, value_states, layer_idx)  # type: ignore[no-any-return]
        layer = self.layers[layer_idx]
        if type(layer) is not PagedLayer:
            self.state.ways.went_dense(f"layers with {self.state.pool.types[layer_idx].replace('_', ' ')}")
        states: tuple[Any, Any] = layer.update(key_states, value_states, *args, **kwargs)
        return states

    # -- rows and tokens ------------------------------------------------------------------------------------

    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if type(layer) is PagedLayer]

    def _settle(self) -> None:
        self.state.settle()
        self.state.epoch += 1

    def _others(self, name: str, *args: Any) -> None:
        """The same of layers that are transformers' own."""
        for layer in self.layers:
            inner = layer.inner if type(layer) is PagedLayer else layer
            if inner is not None:
                getattr(inner, name)(*args)

    def _select(self, rows: Int64) -> None:
        self._settle()
        for each in self.state.rows.values():
            each.select(rows)
        before, self.state.mixed_at = self.state.row_of, self.get_seq_length()
        self.state.row_of = rows if before is None else before[rows]

    def _rows(self) -> Int64 | None:
        """Indices of the rows; of an empty cache those of the prompts of a `PrefixStore`, or None."""
        state = self.state
        if state.rows:
            return np.arange(self._batch())
        if state.prompt is None:
            return None
        return np.arange(len(state.prompt[0] if state.row_of is None else state.row_of))

    def _batch(self) -> int:
        return max((rows.batch for rows in self.state.rows.values()), default=0)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let row i be what row `beam_idx[i]` was, as a step of beam search does; shares blocks."""
        if self.get_seq_length():
            self._select(beam_idx.cpu().numpy().astype(np.int64))
        self._others("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; shares blocks."""
        self._settle()
        if (rows := self._rows()) is not None:
            self._select(rows.repeat(repeats))
        self._others("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows `indices`: integers, or booleans."""
        self._settle()
        if (rows := self._rows()) is not None:
            self._select(rows[np.asarray(indices)])
        self._others("batch_select_indices", indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; 0 only drops what lies before the windows.

        Raises:
            ValueError: a positive number.
            RuntimeError: past a window, without `activate_past_recording`.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or a negative number, got {tokens_to_remove}")
        self._settle()
        for each in self.state.rows.values():
            window = each.kind.window
            if window is not None and each.length >= window and not self.state.recording:
                raise RuntimeError(
                    "crop: expected a cache that records the past (activate_past_recording), got one that drops "
                    f"tokens before its window of {window}"
                )
            each.expect_past(-tokens_to_remove)
        self._others("crop", tokens_to_remove)  # theirs may raise, too
        for each in self.state.rows.values():
            each.crop(-tokens_to_remove, trim=True)
        for layer in self._paged():
            layer.seen = max(0, layer.seen + tokens_to_remove)

    def reset(self) -> None:
        """Empty the cache; its blocks are free."""
        self.state.clear()
        for layer in self._paged():
            layer.forget()
        for other in self.layers:
            if type(other) is not PagedLayer:
                other.reset()

    def activate_past_recording(self) -> None:
        """Keep what windows and policies drop until the next `crop`, as assisted decoding needs it.

        Raises:
            ValueError: the cache begins with a prefix of a `PrefixStore`: assisted decoding runs the whole prompt.
        """
        if self.state.prompt is not None and self.get_seq_length():
            raise ValueError(
                "cache: expected an empty one with an assistant or prompt lookup, which run the whole prompt, got "
                f"{self.get_seq_length()} tokens of a PrefixStore"
            )
        self.state.recording = True
        super().activate_past_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        from copy import deepcopy

        self._settle()
        state = State(self.state.pool, self.state.budgets, [*self.state.evicting])
        state.recording, state.row_of = self.state.recording, self.state.row_of
        state.prompt, state.mixed_at = self.state.prompt, self.state.mixed_at
        for kind, rows in self.state.rows.items():
            state.rows[kind] = rows.fork()
        new = memo[id(self)] = self._over(state)
        for i, layer in enumerate(self.layers):
            if type(layer) is PagedLayer:
                layer.copy_to(new.layers[i])
                if layer.inner is not None:
                    new.layers[i].inner, new.layers[i].is_initialized = deepcopy(layer.inner, memo), True
            else:
                new.layers[i] = deepcopy(layer, memo)
        return new

    __reduce_ex__ = refuse_copies("copy.deepcopy shares its blocks, PrefixStore.save writes them to a file")

    # -- reports --------------------------------------------------------------------------------------------

    def stats(self) -> PagedCacheStats:
        """The counters now."""
        rows, paged = self.state.rows.values(), self.state.pool.paged.values()
        return PagedCacheStats(
            self.get_seq_length(),
            self._batch(),
            max((int(each.stored().sum()) for each in rows), default=0),
            sum(each.used_block_count for each in paged),
            sum(each.total_blocks for each in paged),
            sum(each.used_memory_bytes for each in paged),
            sum(each.eviction.evicted for each in rows if each.eviction is not None),
            self.state.ways.packed,
            dict(self.state.ways.dense),
        )

    def memory(self) -> dict[str, int]:
        """Bytes by purpose: "kv", "bookkeeping", "scratch"; of all caches that share the blocks."""
        reports = [paged.memory() for paged in self.state.pool.paged.values()]
        return total({"kv": 0, "bookkeeping": 0, "scratch": 0, "huge": 0}, *reports)

    def check(self) -> None:
        """Verify every invariant; AssertionError names the broken one."""
        for paged in self.state.pool.paged.values():
            paged.check()
        for kind, rows in self.state.rows.items():
            assert len(rows.first) == rows.batch, f"{kind}: {len(rows.first)} first positions for {rows.batch} rows"
            for row, seq_id in enumerate(rows.ids):
                held = rows.paged.get_sequence(int(seq_id))
                assert held is not None, f"{kind}: sequence {seq_id} is gone"
                at = rows.positions_of(row)
                assert held.num_tokens == len(at), f"{kind}: {held.num_tokens} tokens of row {row}, {len(at)} counted"
                steps = np.diff(at, prepend=-1, append=rows.length)
                assert (steps > 0).all(), f"{kind}: positions of row {row} do not ascend"

    def __repr__(self) -> str:
        return f"PagedCache({self.state.pool.formats}, {self._batch()} rows of {self.get_seq_length()} tokens)"


# A break in every graph of torch.compile: the decorator itself would cost 2 us per layer if nothing is compiled.
_update_apart = torch.compiler.disable(
    PagedCache.update, reason="kvcache: expected no fullgraph=True, got it: its attention is no graph of torch's"
)

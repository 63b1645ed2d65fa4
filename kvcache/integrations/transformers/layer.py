"""`PagedLayer`: one layer of a `PagedCache`, whose K and V lie in the blocks of its kind.

`update` keeps the new K and V until attention says which tokens are masked, and returns `StoredStates`. `State.store`
stores them. The first layer of a kind that is stored in a forward pass makes room for the tokens of all layers of that
kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvcache.integrations.transformers.evicting import Eviction
from kvcache.integrations.transformers.hf import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    to_dlpack,
    torch,
)
from kvcache.integrations.transformers.pool import MOST_CHANNELS, Kind, PagedPool
from kvcache.integrations.transformers.rows import Rows
from kvcache.integrations.transformers.states import StoredStates
from kvcache.integrations.transformers.ways import Ways
from kvcache.support import dlpack
from kvcache.support.arguments import BFLOAT16
from kvcache.support.copies import refuse_copies
from kvcache.texts.budgets import Budgets

__all__ = ["PagedLayer", "State", "array_of", "refuse_gradient"]

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


class Pending(NamedTuple):
    """K and V that a layer's `update` took, until attention says which tokens are masked; `total`: its tokens then."""

    kind: Kind
    slot: int
    keys: Any
    values: Any
    total: int


class State:
    """The state that a cache and its layers share.

    It refers to none of them, so the blocks are free as soon as the cache is deleted, without the garbage collector.

    Attributes:
        rows: the batch, by kind of layer.
        pending: what is not stored yet, by layer.
        recording: whether dropped and evicted tokens stay until the next `crop` (`activate_past_recording`).
        budgets: of the layers that evict tokens; None: none does.
        evicting: their numbers among those, by layer.
        epoch: number of changes other than `update`.
        row_of: of each row, the row of the first batch that it goes back to; None: it is the same.
        mixed_at: the most tokens at which rows were reordered or selected.
        prompt: of a cache of a `PrefixStore`: token ids, their mask and the namespace.
    """

    def __init__(self, pool: PagedPool, budgets: Budgets | None = None, layers: Sequence[int] = ()) -> None:
        self.pool, self.budgets = pool, budgets
        self.evicting = {layer: i for i, layer in enumerate(layers)}
        self.rows: dict[Kind, Rows] = {}
        self.pending: dict[int, Pending] = {}
        self.recording = False
        self.ways = Ways()
        self.epoch = 0
        self.row_of: Int64 | None = None
        self.mixed_at = 0
        self.prompt: tuple[Int64, Bool, Any] | None = None

    def rows_of(self, kind: Kind, batch: int, num_tokens: int) -> Rows:
        """The rows of a kind, made if there are none."""
        if kind not in self.rows:
            own = None if kind.layer is None else self.evicting.get(kind.layer)
            eviction = None if own is None or self.budgets is None else Eviction(self.budgets, own, batch)
            self.rows[kind] = Rows(self.pool, kind, batch, num_tokens, eviction)
        return self.rows[kind]

    def store(self, layer: int, padding: Bool | None = None) -> None:
        """Store what a layer's `update` took, if it waits; `padding`: of the last tokens, see `Rows.extend`.

        Raises:
            OutOfMemoryError: within `max_memory_bytes` there are too few blocks. The cache is in the middle of a
                forward pass then: `reset` it.
            RuntimeError: another number of tokens than other layers have.
        """
        if layer not in self.pending:
            return
        kind, slot, keys, values, total = self.pending[layer]
        batch, _, new, _ = keys.shape
        rows = self.rows.get(kind) or self.rows_of(kind, batch, new)
        if total > rows.length:
            rows.extend(total, padding, trim=not self.recording)
        if total != rows.length or new != rows.new:
            raise RuntimeError(
                f"layer {layer}: expected the {rows.new} tokens up to {rows.length} that other layers have, got {new} "
                f"up to {total}"
            )
        del self.pending[layer]
        if new:
            rows.write(slot, array_of(keys, kind.channels), array_of(values, kind.channels))

    def settle(self) -> None:
        """Store what waits in any layer."""
        for layer in list(self.pending):
            self.store(layer)

    def clear(self) -> None:
        """Give all blocks back."""
        self.pending.clear()
        while self.rows:
            self.rows.popitem()[1].free()
        self.epoch += 1
        self.row_of, self.mixed_at = None, 0

    def __del__(self) -> None:
        self.clear()


class PagedLayer(CacheLayerMixin):
    """A layer with full attention or attention within a window.

    Args:
        state: of the cache.
        index: of the layer.
    """

    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, state: State, index: int) -> None:
        self.state, self.index = state, index
        self.window = state.pool.window(index)
        self.is_sliding = self.window is not None
        self.sliding_window = self.window
        self.is_initialized = False
        self.seen = 0
        self.inner: Any = None  # transformers' layer, where a head is too wide for the kernels
        self._kind: Kind
        self.slot: int

    @property
    def epoch(self) -> int:
        """Number of changes of the cache other than `update`."""
        return self.state.epoch

    @property
    def waits(self) -> bool:
        """True if `update` took K and V that are not stored."""
        return self.index in self.state.pending

    @property
    def rows(self) -> Rows:
        """The batch of the layer's kind."""
        return self.state.rows[self._kind]

    @property
    def record_past(self) -> bool:
        """True if tokens before the window stay until the next `crop`."""
        return self.state.recording

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.state.recording = on

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Take shape, dtype and place from the first K and V.

        Raises:
            ValueError: they are on another device than the CPU.
        """
        if key_states.device.type != "cpu":
            raise ValueError(f"key_states: expected a tensor on the CPU, got one on {key_states.device}")
        self.heads, self.channels = key_states.shape[1], (key_states.shape[3], value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        width = max(self.channels)
        if width > MOST_CHANNELS:
            self.inner = DynamicSlidingWindowLayer(self.window) if self.window else DynamicLayer()
            if self.state.recording and self.window:
                self.inner.activate_past_recording()
        else:
            self._kind, self.slot = self.state.pool.place(self.index, self.heads, width)
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new K and V, `(batch, KV heads, tokens, head_dim)`; the layer's whole K and V, as `StoredStates`.

        Raises:
            RuntimeError: they need gradients, which blocks do not keep.
            ValueError: another batch than before.
        """
        refuse_gradient("K", key_states)
        refuse_gradient("V", value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, new, _ = key_states.shape
        if self.inner is not None:
            reason = f"heads of more than {MOST_CHANNELS} channels"
            self.refuse_dense(reason)
            self.seen += new
            self.state.ways.went_dense(reason)
            return self.inner.update(key_states, value_states)  # type: ignore[no-any-return]
        if self.waits:  # the step before ended without attention in this layer, so perhaps in others
            self.state.settle()
        rows = self.state.rows.get(self._kind)
        if rows is not None and rows.batch != batch:
            raise ValueError(
                f"key_states: expected the {rows.batch} rows that the cache holds, got {batch}; "
                "batch_repeat_interleave and batch_select_indices change their number"
            )
        past = self.seen if self.window is None else min(self.seen, self.window - 1)
        self.seen += new
        self.state.pending[self.index] = Pending(self._kind, self.slot, key_states, value_states, self.seen)
        return self._states(batch, past + new)

    def _states(self, batch: int, visible: int) -> tuple[StoredStates, StoredStates]:
        (k, v), heads, dtype, seen = self.channels, self.heads, self.dtype, self.seen
        return (
            StoredStates(self, 0, (batch, heads, visible, k), dtype, seen),
            StoredStates(self, 1, (batch, heads, visible, v), dtype, seen),
        )

    def commit(self, padding: Bool | None = None) -> None:
        """Store what `update` took; `padding`: of the last tokens, see `Rows.extend`."""
        self.state.store(self.index, padding)

    def refuse_dense(self, reason: str) -> None:
        """Raise ValueError if the layer evicts tokens: dense attention would neither score nor miss them."""
        if self.index in self.state.evicting:
            raise ValueError(
                "eviction_policy: expected attn_implementation='kvcache' over packed blocks, got dense attention "
                f"({reason})"
            )

    def dense(self, which: int, total: int, visible: int) -> Any:
        """K (0) or V (1) of the last `visible` of the first `total` tokens, float32."""
        self.commit()
        dense = torch.from_numpy(self.rows.read(self.slot, which, total, visible))
        return dense[..., : self.channels[which]].contiguous()

    # A model that runs its layers in loops copies layers for the later ones.
    __reduce_ex__ = refuse_copies("a model that copies layers of its cache needs a DynamicCache of transformers")

    # -- what transformers reads ----------------------------------------------------------------------------

    @property
    def keys(self) -> Any:
        """K of the layer, as `update` returns it; None before the first."""
        return self._now(0)

    @property
    def values(self) -> Any:
        """V of the layer, as `update` returns it; None before the first."""
        return self._now(1)

    def _now(self, which: int) -> Any:
        if self.inner is not None:
            return (self.inner.keys, self.inner.values)[which]
        if not self.seen or not self.is_initialized:
            return None
        self.commit()
        visible = self.seen if self.window is None else min(self.seen, self.window - 1)
        return self._states(self.rows.batch, visible)[which]

    def get_seq_length(self) -> int:
        """Tokens of the text so far, masked and dropped ones included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of the next mask."""
        past = self.seen if self.window is None else min(self.seen, self.window - 1)
        return past + query_length, self.seen - past

    def get_max_length(self) -> int:
        """-1, or the window."""
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        """Keep tokens before the window until the next `crop`."""
        self.state.recording = True
        if self.inner is not None and self.window:
            self.inner.activate_past_recording()

    def forget(self) -> None:
        """Set the layer to no tokens; its blocks are given back elsewhere."""
        self.seen = 0
        if self.inner is not None:
            self.inner.reset()

    def copy_to(self, other: PagedLayer) -> None:
        """Give another layer this one's shape and length."""
        if self.is_initialized and self.inner is None:
            other.heads, other.channels, other.dtype, other.device = self.heads, self.channels, self.dtype, self.device
            other._kind, other.slot, other.is_initialized = self._kind, self.slot, True
        other.seen = self.seen

    def _refuse(self, *args: Any) -> NoReturn:
        raise NotImplementedError("layer: expected the call on the PagedCache, whose layers share blocks, got one here")

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


def refuse_gradient(name: str, states: Any) -> None:
    """Raise RuntimeError if Q, K or V need gradients."""
    if states.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"PagedCache: expected no gradients (torch.no_grad()), got {name} that requires one")


def array_of(states: Any, channels: int) -> npt.NDArray[Any]:
    """`states` with `channels` channels, the last ones zero, as an array: float32, or bfloat16 in place."""
    if states.requires_grad:
        states = states.detach()
    dtype, missing = states.dtype, channels - states.shape[3]
    if not missing:
        if dtype == torch.bfloat16:
            return dlpack.array_of(to_dlpack(states), BFLOAT16)  # type: ignore[return-value]
        if dtype == torch.float32:
            return dlpack.array_of(to_dlpack(states))  # type: ignore[return-value]
    return torch.nn.functional.pad(states.float(), (0, missing)).numpy()  # type: ignore[no-any-return]

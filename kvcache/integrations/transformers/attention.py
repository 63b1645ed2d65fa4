"""The attention that `attn_implementation="kvcache"` names: over the packed blocks of a `PagedCache` where it can."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.integrations.transformers.dense import dense_attention
from kvcache.integrations.transformers.evicting import Eviction
from kvcache.integrations.transformers.hf import torch
from kvcache.integrations.transformers.layer import PagedLayer, array_of, refuse_gradient
from kvcache.integrations.transformers.masks import PatternMask
from kvcache.integrations.transformers.rows import Rows
from kvcache.integrations.transformers.sight import Call, calls_for
from kvcache.integrations.transformers.states import StoredStates
from kvcache.paged.cache import PagedKvCache
from kvcache.support.arguments import as_floats

__all__ = ["attention"]

Float32 = npt.NDArray[np.float32]


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Any = None, is_causal: bool | None = None,
    position_bias: Any = None, indices: Any = None, sinks: Any = None, **kwargs: Any,
) -> tuple[Any, None]:
    """softmax(q K^T scaling) V; arguments as of every attention function of transformers.

    Args:
        query: `(batch, query heads, queries, head_dim)`.
        key, value: `StoredStates` of a `PagedCache`, or tensors.
        attention_mask: what `make_mask` returned, or a 4D mask of the caller.
        softcap: a score s becomes `softcap * tanh(s / softcap)`.
        s_aux: a logit per query head that joins the normaliser of the softmax.
        position_bias: added to the scores.
        indices: `(batch, queries, n)`, the keys that a query sees of those which the mask shows.
        sinks: `s_aux` of each query, `(batch, query heads, queries, 1)`.

    Returns:
        `(batch, queries, query heads, head_dim of V)`, and None in the place of weights.

    Raises:
        ValueError: `output_attentions` is asked for: no weights are computed; attention of a layer that evicts tokens
            cannot read the blocks; a model hands over numbers under a name that this attention does not know.
        RuntimeError: Q or sinks need gradients, which attention over blocks does not compute.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions: expected False, for attn_implementation='kvcache' computes no weights, got True; "
            "set_attn_implementation('eager') does"
        )
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            raise ValueError(
                f"attention: expected numbers that attn_implementation='kvcache' knows, got {name!r} of "
                f"{type(module).__name__}; set_attn_implementation('eager') computes with it"
            )
    if torch.compiler.is_compiling():
        out: tuple[Any, None] = _apart(
            module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, is_causal, position_bias,
            indices, sinks,
        )
        return out
    if type(key) is StoredStates and type(value) is StoredStates and key._layer is value._layer:
        layer: PagedLayer = key._layer
        refuse_gradient("Q", query)
        if s_aux is not None:
            refuse_gradient("sinks", s_aux)
        beside = {"position biases": position_bias, "keys that a model chose": indices, "sinks per query": sinks}
        reason = _why_dense(layer, key, query, attention_mask, dropout, beside)
        if reason is None:
            if attention_mask is not None:
                causal, window = attention_mask.causal, attention_mask.window
            else:  # as `sdpa` reads it; one query sees all there is, and is the last token if there is a window
                causal, window = getattr(module, "is_causal", True) if is_causal is None else is_causal, None
                causal = bool(causal or (query.shape[2] == 1 and layer.window))
            window = (window or layer.window) if causal else None
            return _packed(layer, query, causal, window, scaling, softcap, s_aux), None
        key, value = key.dense(reason).to(query.dtype), value.dense(reason).to(query.dtype)
        layer.state.ways.went_dense(reason)
    mask = attention_mask.dense() if type(attention_mask) is PatternMask else attention_mask
    out = dense_attention(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, softcap=softcap,
        s_aux=s_aux if sinks is None else sinks, is_causal=is_causal, position_bias=position_bias, indices=indices,
    )
    return out, None


_apart = torch.compiler.disable(attention)


def _why_dense(
    layer: PagedLayer, key: StoredStates, query: Any, mask: Any, dropout: float, beside: dict[str, Any]
) -> str | None:
    """Store what waits; why attention cannot read the blocks, or None."""
    known = mask is None or type(mask) is PatternMask
    padding = mask.padding if known and mask is not None else None
    if layer.waits:
        layer.commit(padding)
    if not known:
        return "a mask of another pattern than causal, window and padding"
    if key._epoch != layer.epoch or key._total != layer.rows.length:
        return "states of an earlier step"
    if not layer.rows.agrees(padding, key.shape[2]):
        return "a mask that hides stored tokens"
    if layer.window and key.shape[2] > layer.window and query.shape[2] > 1 and (mask is None or mask.window is None):
        return "a layer with a window under a mask without one"
    for name, given in beside.items():
        if given is not None:
            return name
    if dropout:
        return "dropout"
    return None


def _packed(
    layer: PagedLayer, query: Any, causal: bool, window: int | None, scaling: float | None, softcap: float | None,
    s_aux: Any,
) -> Any:
    rows, (batch, heads, n, width) = layer.rows, query.shape
    layer.state.ways.packed += 1
    scale = 1 / math.sqrt(width) if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.detach().float().numpy()
    channels = rows.kind.channels
    queries = array_of(query, channels)
    if n == 1:
        flat = queries.reshape(batch, heads, channels)
    else:
        flat = queries.transpose(0, 2, 1, 3).reshape(batch * n, heads, channels)
    calls = calls_for(rows, n, causal, window)
    out = None
    for call in calls:
        if call.queries is None:
            out = _call(rows, layer.slot, call, flat, scale, softcap, sinks)
        else:
            out = np.zeros(flat.shape, np.float32) if out is None else out
            out[call.queries] = _call(rows, layer.slot, call, flat[call.queries], scale, softcap, sinks)
    if out is None:
        out = np.zeros(flat.shape, np.float32)
    if rows.eviction is not None and not layer.state.recording:
        rows.evict()
    mixed = torch.from_numpy(out.reshape(batch, n, heads, channels))
    if layer.channels[1] != channels:
        mixed = mixed[..., : layer.channels[1]].contiguous()
    if query.dtype == torch.bfloat16:
        return mixed.bfloat16()  # two thirds of the time of `to`
    return mixed if query.dtype == torch.float32 else mixed.to(query.dtype)


def _call(
    rows: Rows, slot: int, call: Call, queries: npt.NDArray[Any], scale: float, softcap: float | None, sinks: Any
) -> Float32:
    ids = call.ids if call.shown is None else rows.fork_up_to(call.ids, call.shown)
    try:
        options = {
            "scale": scale, "window": call.window, "softcap": softcap, "sinks": sinks, "causal": call.causal,
        }
        if rows.eviction is not None and rows.eviction.scores:
            return _scored(rows.eviction, rows.paged, slot, call, queries, ids, options)
        mixed: Float32 = rows.paged.attention(
            slot, queries, ids, query_lens=call.lens, starts=call.starts, **options
        )
        return mixed
    finally:
        if call.shown is not None:
            rows.paged.free_batch(ids)


def _scored(
    eviction: Eviction, paged: PagedKvCache, slot: int, call: Call, queries: npt.NDArray[Any],
    ids: npt.NDArray[np.uint64], options: dict[str, Any],
) -> Float32:
    """One row after another, as `EvictingLayers` of an engine does; the eviction notes what each has drawn."""
    lens, mixed = np.ones(len(ids), np.int64) if call.lens is None else call.lens, []
    for i, part in enumerate(np.split(queries, np.cumsum(lens)[:-1])):
        own = as_floats(part, part.shape, "query")
        found, drawn = eviction.budgets.scoring.attend(paged, slot, own, ids[i : i + 1], lens[i : i + 1], options)
        eviction.add(int(call.rows[i]), drawn)
        mixed.append(found)
    return np.concatenate(mixed)

"""Attention over dense K and V: without a cache, and for what the kernels do not have."""

from __future__ import annotations

from typing import Any

from kvcache.integrations.transformers.hf import sdpa_attention_forward, torch

__all__ = ["dense_attention"]


def dense_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float | None, dropout: float,
    softcap: float | None, s_aux: Any, is_causal: bool | None, position_bias: Any,
    indices: Any = None,
) -> Any:
    """softmax(q K^T scaling + mask) V as transformers' `sdpa` computes it, with soft caps and sinks.

    Args:
        query, key, value: `(batch, heads, tokens, head_dim)`, fewer heads in `key` and `value`.
        mask: boolean or additive `(batch, 1 or heads, queries, keys)`, or None.
        s_aux: one sink per query head, or `(batch, heads, queries, 1)`.
        indices: `(batch, queries, n)`, the keys that are seen of those which the mask shows.

    Returns:
        `(batch, queries, heads, head_dim of V)`.
    """
    queries, keys, heads = query.shape[2], key.shape[2], query.shape[1]
    causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    plain = softcap is None and s_aux is None
    skipped = plain and queries == keys and indices is None  # `sdpa` needs no mask for these
    if mask is None and causal and not skipped:  # the last query sees all keys
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    if indices is not None:
        mask = _chosen(mask, indices, keys)
    if plain:
        extra = {} if position_bias is None else {"position_bias": position_bias}
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **extra
        )[0]
    key, value = (states.repeat_interleave(heads // states.shape[1], 1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if s_aux is not None:
        sinks = s_aux if s_aux.dim() == 4 else s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, queries, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout, getattr(module, "training", False))
    return (weights @ value).transpose(1, 2).contiguous()


def _chosen(mask: Any, indices: Any, keys: int) -> Any:
    """The mask, or all keys, without those that `indices` leaves out."""
    seen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)

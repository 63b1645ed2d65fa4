"""`calibrate`: the calibration of a model of transformers, measured by running a text through it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.calibration.calibrating import measure
from kvcache.calibration.layer_losses import measure_losses
from kvcache.core.calibration import Calibration
from kvcache.integrations.transformers.hf import AttentionInterface, AttentionMaskInterface, torch
from kvcache.integrations.transformers.layer import array_of
from kvcache.integrations.transformers.layer_storage import Kind
from kvcache.integrations.transformers.pool import PagedPool
from kvcache.networks.protocols import Attend, Logits
from kvcache.networks.tokens import as_tokens

__all__ = ["calibrate"]

Float32 = npt.NDArray[np.float32]
_CHOSEN = "_attn_implementation"  # which transformers sets by a method, and has no other name to read it by
_NAME = "kvcache_calibrate"  # the attention function that hands Q, K and V to the measurement


def calibrate(model: Any, tokens: Any, *, losses: bool = False) -> Calibration:
    """Measure what a `PagedCache` or `PrefixStore` of a model takes as `calibrate=`.

    For example::

        known = kvt.calibrate(model, tokenizer(text).input_ids, losses=True)
        known.save("model.calibration")  # Calibration.load reads it
        cache = kvt.PagedCache(model.config, dtype="auto:4.0", calibrate=known)

    Keys are then rounded so that errors cancel in the queries that read them. Centres of keys, which engines subtract,
    are not used: they need the first tokens of each text unpacked, and a cache of transformers may drop or hide these.

    Args:
        model: on the CPU; every layer has full attention of one size, without soft caps and sinks.
        tokens: ids of a text, a few thousand of them: a list, an array or a tensor.
        losses: whether to measure too what is lost where a layer alone is packed, for `dtype="auto:4.0"`: two passes
            of 512 tokens for each layer.

    Raises:
        TypeError, ValueError: another kind of model or of tokens; fewer than 64 tokens.
    """
    ids = as_tokens(tokens.reshape(-1).numpy() if isinstance(tokens, torch.Tensor) else tokens, model.config.vocab_size)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    before = getattr(model.config, _CHOSEN)
    model.set_attn_implementation(_NAME)
    try:
        with torch.no_grad():
            measured = _MeasuredModel(model)
            found = measure(measured, ids)
            return Calibration(found.centres, found.moments, measure_losses(measured, found, ids) if losses else None)
    finally:
        model.set_attn_implementation(before)


class _MeasuredModel:
    """A model of transformers as a network that an engine could run, one text at a time."""

    def __init__(self, model: Any) -> None:
        pool = PagedPool(model.config, {"dtype": "f32", "key_dtype": None, "value_dtype": None}, 16, None, "window")
        kinds = set(pool.said.values())
        if len(kinds) != 1 or len(pool.said) != len(pool.types) or next(iter(kinds)).window is not None:
            raise ValueError("model: expected layers with full attention of one size, got others")
        kind: Kind = next(iter(kinds))
        config = model.config.get_text_config(decoder=True)
        self._model, self.config, self.channels = model, self, kind.channels
        self.num_layers, self.num_kv_heads, self.head_dim = len(pool.types), kind.heads, kind.channels
        self.num_heads, self.vocab_size = config.num_attention_heads, config.vocab_size
        self.max_position_embeddings = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.attend: Attend

    def forward(
        self, tokens: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64], attend: Attend, logits: Logits
    ) -> Float32:
        """See `Model.forward`."""
        self.attend = attend
        places = torch.from_numpy(positions)[None]
        before = _running.set(self)
        try:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            out = self._model(input_ids=ids, position_ids=places, use_cache=False)
        finally:
            _running.reset(before)
        found: Float32 = out.logits[0].float().numpy()
        return found


_running: ContextVar[_MeasuredModel] = ContextVar("_running")  # the model of the pass that runs


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Any, None]:
    """Attention by whoever measures, over all tokens that it has been given."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or kwargs.get("sliding_window"):
        raise ValueError("model: expected attention without soft caps, sinks and windows, got some")
    measured = _running.get()
    channels = measured.channels
    scale = (query.shape[3] ** -0.5 if scaling is None else scaling) * channels**0.5
    found = (array_of(each.float(), channels)[0].swapaxes(0, 1) for each in (query * scale, key, value))
    queries, keys, values = map(np.ascontiguousarray, found)
    mixed = measured.attend(module.layer_idx, queries, keys, values)
    return torch.from_numpy(mixed)[None, ..., : value.shape[3]].to(query.dtype), None

"""A trace through `PrefixCachedEngine`, for networks with and without windows at the same bytes of cached K and V.

The network computes nothing: it predicts the answers of the trace, and K and V are not written. Matches, pages,
evictions and copies are the engine's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.prefix.workloads import Trace
from kvcache.engine import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.networks.protocols import Attend, LayerAttention, Logits
from kvcache.texts.kinds.window import num_pages

__all__ = ["NETWORKS", "hit_rates"]

Tokens = NDArray[np.uint32]

LAYERS, WINDOW, BLOCK, VOCABULARY = 6, 512, 16, 256
SPARE = 64  # tokens before a window that an engine keeps
_FULL, _WINDOW = LayerAttention(), LayerAttention(window=WINDOW)
NETWORKS = {
    "all layers keep all tokens": (_FULL,) * LAYERS,
    f"5 of 6 layers keep {WINDOW} tokens": (*(_WINDOW,) * (LAYERS - 1), _FULL),
}


class _Predicted:
    """A network that predicts `text`, without attention."""

    def __init__(self, attention: Sequence[LayerAttention], positions: int) -> None:
        self.attention, self.text = attention, np.empty(0, np.uint32)
        self.config = SimpleNamespace(
            num_layers=LAYERS, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=VOCABULARY,
            max_position_embeddings=positions,
        )

    def forward(
        self, tokens: Tokens, positions: NDArray[np.int64], attend: Attend, logits: Logits
    ) -> NDArray[np.float32]:
        """The logits of the next tokens of the text."""
        rows = np.zeros(({"last": 1, "none": 0}[logits], VOCABULARY), np.float32)
        following = int(positions[-1]) + 1
        rows[:, int(self.text[following]) if following < len(self.text) else 0] = 1.0
        return rows


def _tokens(pages: Sequence[int]) -> Tokens:
    """A page's name in the first of its tokens."""
    tokens = np.zeros((len(pages), BLOCK), np.uint32)
    tokens[:, :4] = np.array(pages, np.uint32)[:, None] >> np.array([0, 8, 16, 24], np.uint32) & 255
    return tokens.reshape(-1)


def hit_rates(trace: Trace, capacity: int) -> dict[str, Any]:
    """Hit rates in tokens by network; the cached K and V have the bytes of `capacity` blocks of all layers."""
    positions = max(len(request.pages) for request in trace.requests) * BLOCK + BLOCK
    found: dict[str, Any] = {}
    for name, attention in NETWORKS.items():
        windowed = sum(each.window is not None for each in attention)

        def layer_blocks(blocks: int, windowed: int = windowed) -> int:
            pages = num_pages(WINDOW - 1 + SPARE, BLOCK, blocks) if windowed else 0
            return (LAYERS - windowed) * blocks + windowed * pages

        blocks = bisect_right(range(LAYERS * capacity), LAYERS * capacity, key=layer_blocks) - 1
        model = _Predicted(attention, positions)
        engine = InferenceEngine(model, dtype="f16", num_blocks=positions // BLOCK + 1, prefill_chunk=2048)
        cached = PrefixCachedEngine(engine, blocks, strict=True)
        for request in trace.requests:
            model.text = _tokens(request.pages)
            prompt = request.num_prompt * BLOCK
            cached.generate(model.text[:prompt], SamplingParams(temperature=0.0, max_tokens=len(model.text) - prompt))
        stats = cached.cache_stats()
        found[name] = {
            "hit_rate": stats.hit_rate, "blocks": blocks, "windows_gone": stats.miss_reasons.get("window", 0),
        }
    return found

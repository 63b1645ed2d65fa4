"""Prefix reuse: the logits after a hit against those of a cold run, split by split, in every format."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.quality.heldout import Heldout
from bench.quality.network import Recorder
from kvcache import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer

__all__ = ["FORMATS", "HEADER", "measure", "rows"]

FORMATS = ("f32", "f16", "q8", "q4", "q3", "q2")
HEADER = ["format", "splits", "tokens reused", "largest difference", "median", "same token"]
LENGTH, PROMPTS = 192, 10
ONE = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=1)


def measure(model: Transformer, text: Heldout, dtype: str, splits: int) -> dict[str, float]:
    """Prompts cut at random: the head is served first, with another tail, then the whole prompt hits it."""
    rng = np.random.default_rng(3)
    recorder = Recorder(model, lambda rows: rows[-1:].copy())
    cold = InferenceEngine(model, dtype=dtype)
    cached = PrefixCachedEngine(InferenceEngine(recorder, dtype=dtype), max_cache_blocks=64, strict=True)
    windows = text.windows(2 * LENGTH, PROMPTS * 2 * LENGTH)
    differences, same, reused = [], 0, 0
    for i in range(splits):
        window = windows[i % len(windows)]
        prompt, split = window[:LENGTH], int(rng.integers(1, LENGTH))
        cached.clear_cache()
        cached.generate([*window[:split], *window[LENGTH : LENGTH + 8]], ONE)
        before = cached.inner.prefill_token_count
        recorder.take()
        cached.generate(prompt, ONE)
        found, exact = recorder.take()[-1], cold.prefill_from_pos(prompt, 0)
        reused += LENGTH - (cached.inner.prefill_token_count - before)
        differences.append(float(np.abs(found - exact).max()))
        same += int(found.argmax() == exact.argmax())
    return {
        "splits": splits, "reused": reused, "largest": max(differences), "median": float(np.median(differences)),
        "same": same / splits,
    }  # fmt: skip


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """The table."""
    return [
        [
            name, f"{f['splits']}", f"{f['reused']:,}", f"{f['largest']:.2g}", f"{f['median']:.2g}",
            f"{100 * f['same']:.1f} %",
        ]
        for name, f in figures.items()
    ]  # fmt: skip

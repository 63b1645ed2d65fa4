"""Prefix reuse: logits and texts after a hit compared with those of a cold run, in every format."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.quality.heldout import Heldout
from bench.quality.network import Recorder
from kvcache import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer

__all__ = ["HEADER", "measure", "rows"]

HEADER = ["format", "splits", "tokens reused", "largest difference", "median", "same bits", "same token", "other texts"]
LENGTH, PROMPTS = 192, 10
ONE = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=1)
TEXT = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=32)


def measure(model: Transformer, text: Heldout, dtype: str, splits: int) -> dict[str, float]:
    """Split prompts at random, serve the head first with another tail, then the whole prompt, which hits the head.

    The logits and the next 32 greedy tokens are compared with those of an engine without a prefix cache.
    """
    rng = np.random.default_rng(3)
    recorder = Recorder(model, lambda rows: rows[-1:].copy())
    cold = InferenceEngine(model, dtype=dtype)
    cached = PrefixCachedEngine(InferenceEngine(recorder, dtype=dtype), max_cache_blocks=64, strict=True)
    windows = text.windows(2 * LENGTH, PROMPTS * 2 * LENGTH)
    differences, same, reused, others = [], 0, 0, 0
    for i in range(splits):
        window = windows[i % len(windows)]
        prompt, split = window[:LENGTH], int(rng.integers(1, LENGTH))
        cached.clear_cache()
        cached.generate([*window[:split], *window[LENGTH : LENGTH + 8]], ONE)
        before = cached.inner.prefill_token_count
        recorder.take()
        answer = cached.generate(prompt, TEXT)
        steps = len(answer) - (len(answer) == TEXT.max_tokens)  # the last token does not run
        found, exact = recorder.take()[-1 - steps], cold.prefill_from_pos(prompt, 0)
        reused += LENGTH - (cached.inner.prefill_token_count - before)
        differences.append(float(np.abs(found - exact).max()))
        same += int(found.argmax() == exact.argmax())
        others += answer != cold.generate(prompt, TEXT)
    return {
        "splits": splits, "reused": reused, "largest": max(differences), "median": float(np.median(differences)),
        "same_bits": differences.count(0.0) / splits, "same": same / splits, "other_texts": others,
    }


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            name, f"{f['splits']}", f"{f['reused']:,}", f"{f['largest']:.2g}", f"{f['median']:.2g}",
            f"{100 * f['same_bits']:.0f} %", f"{100 * f['same']:.1f} %", f"{f['other_texts']}",
        ]
        for name, f in figures.items()
    ]

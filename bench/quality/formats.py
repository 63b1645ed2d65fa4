"""Storage formats on text: perplexity and KL divergence from the f32 cache, window by window."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.quality.divergence import tails
from bench.quality.heldout import Heldout
from bench.quality.network import Recorder, log_softmax
from bench.quality.parts import verdict
from kvcache import InferenceEngine
from kvcache.calibration.residual import LENGTHS
from kvcache.engine import Transformer
from kvcache.kernels.kernels import FORMATS as STORED

__all__ = ["BOUNDS", "FORMATS", "HEADER", "measure", "rows", "speeds", "verdicts"]


def _mixed(name: str) -> dict[str, Any]:
    keys, _, values = name.partition("/")
    return {"key_dtype": keys, "value_dtype": values or keys}


PACKED, PLAIN = ", no residual", ", not rotated"
FORMATS: dict[str, dict[str, Any]] = {
    name: _mixed(name) for name in (*STORED, "q8/q4", "q4/q8", "q4/q3", "q4/q2", "q2/q4")
}
FORMATS |= {name + PACKED: _mixed(name) | {"residual_length": 0} for name in (*LENGTHS, "q8/q4", "q4/q8")}
FORMATS |= {name + PLAIN: _mixed(name) | {"rotate": False} for name in STORED if STORED[name].quantised}

# The bounds of a format: name -> (figure, bound).
BOUNDS = {"q8": ("kl", 0.001), "q4": ("rise", 0.005), "q3": ("rise", 0.02), "q2": ("rise", 0.08)}
HEADER = ["K/V format", "bytes/token", "bits/value", "perplexity", "against f32"]
HEADER += ["KL, mean", "p99", "p99.9", "same token"]


class _Sums:
    """The running sums of one format."""

    def __init__(self) -> None:
        self.nats, self.same, self.tokens = 0.0, 0, 0
        self.kl: list[np.ndarray] = []


def measure(
    model: Transformer, text: Heldout, context: int, total: int, names: list[str],
    tell: Callable[[dict[str, Any], int], None] = lambda figures, count: None,
) -> dict[str, Any]:
    """All figures of all formats over windows of `context` tokens, about `total` tokens in all.

    Each window is scored with every format in turn; the f32 cache is the first. Attention reads the stored codes of
    the current piece too, apart from the residual, so no token is read with more precision than in decoding.
    `tell` takes the figures after the first window and whenever there are twice as many, and how many there are.
    """
    engines = {}
    for name in names:
        recorder = Recorder(model, np.copy)  # the engine overwrites the logits
        engines[name] = InferenceEngine(recorder, num_blocks=context // 16 + 1, **FORMATS[name]), recorder
    sums = {name: _Sums() for name in names}

    def figures() -> dict[str, Any]:
        return {name: _figures(engines[name][0], one, sums[names[0]]) for name, one in sums.items()}

    chosen = text.windows(context, total)
    for count, window in enumerate(chosen, 1):
        truth = sure = best = np.empty(0)
        for name, (engine, recorder) in engines.items():
            scores = engine.score(window)
            found = log_softmax(recorder.take())
            if name == names[0]:
                truth, sure, best = found, np.exp(found), found.argmax(axis=1)
            one = sums[name]
            one.nats -= float(scores.sum(dtype=np.float64))
            one.tokens += len(scores)
            one.same += int((found.argmax(axis=1) == best).sum())
            one.kl.append(np.einsum("tv,tv->t", sure, truth - found))
        if count & (count - 1) == 0 and count < len(chosen):
            tell(figures(), count)
    return figures()


def _figures(engine: InferenceEngine, one: _Sums, exact: _Sums) -> dict[str, float]:
    cache, config = engine.cache, engine.config
    per_token = cache.block_memory_bytes / cache.block_size
    kl = np.concatenate(one.kl)
    return {
        "bytes": per_token,
        "bits": 8 * per_token / (2 * config.num_layers * config.num_kv_heads * config.head_dim),
        "perplexity": float(np.exp(one.nats / one.tokens)),
        "rise": float(np.expm1((one.nats - exact.nats) / one.tokens)),
        "kl": float(kl.mean()),
        **tails(kl),
        "same": one.same / one.tokens,
        "tokens": one.tokens,
    }


def rows(figures: dict[str, dict[str, float]], speed: dict[str, float]) -> list[list[str]]:
    """The rows of the table, with the decode speed."""
    return [
        [
            name, f"{f['bytes']:.0f}", f"{f['bits']:.2f}", f"{f['perplexity']:.4f}", f"{100 * f['rise']:+.2f} %",
            f"{f['kl']:.2g}", f"{f['kl_p99']:.2g}", f"{f['kl_p999']:.2g}", f"{100 * f['same']:.2f} %",
            f"{speed[name]:.0f}",
        ]
        for name, f in figures.items()
    ]


def verdicts(figures: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The bounds of the formats, and their values."""
    found = []
    for name, (key, bound) in BOUNDS.items():
        if name in figures:
            found.append(verdict(name, key, figures[name][key], bound))
    return found


def speeds(model: Transformer, text: Heldout, context: int, names: list[str], rounds: int) -> dict[str, float]:
    """Tokens per second of decoding after `context` tokens: the fastest of `rounds` turns of 8 steps each."""
    engines, best = {}, dict.fromkeys(names, 0.0)
    for name in names:
        engines[name] = InferenceEngine(model, num_blocks=(context + 8 * rounds) // 16 + 2, **FORMATS[name])
        engines[name].prefill_from_pos(text.tokens[:context], 0)
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            for token in text.tokens[context : context + 8]:
                engine.decode_step(token, engine.num_tokens)
            best[name] = max(best[name], 8 / (time.perf_counter() - start))
    return best

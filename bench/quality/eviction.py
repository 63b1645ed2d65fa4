"""Eviction inside the engine's paged cache: perplexity of the continuation and copying, over the budget."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.quality.network import RandomEngine, Recorder, attention_mass
from bench.quality.prompts import LENGTH, Prompt
from kvcache import EvictionPolicy, InferenceEngine
from kvcache.engine import Transformer
from kvcache.policies import SnapKV

__all__ = ["BUDGETS", "CHUNK", "HEADER", "POLICIES", "engine_of", "measure", "rows", "survivors"]

SINKS, CHUNK = 4, 32
BUDGETS = (5, 10, 20, 40, 70)  # per cent of the prompt

# name -> function from (budget, layers) to the policy. Random eviction is H2O with random scores, see `RandomEngine`.
POLICIES: dict[str, Any] = {
    "H2O": lambda budget, layers: EvictionPolicy.H2O(),
    "H2O, 0.9 recent": lambda budget, layers: EvictionPolicy.H2O(0.9),
    "window": lambda budget, layers: EvictionPolicy.SlidingWindow(budget - SINKS, SINKS),
    "StreamingLLM": lambda budget, layers: EvictionPolicy.StreamingLLM(SINKS, budget - SINKS),
    "PyramidKV": lambda budget, layers: EvictionPolicy.PyramidKV(layers),
    "SnapKV": lambda budget, layers: SnapKV(min(CHUNK, budget // 2)),
    "random, half recent": lambda budget, layers: EvictionPolicy.H2O(0.5),
    "random": lambda budget, layers: EvictionPolicy.H2O(0.0),
}
HEADER = ["policy", "dtype", "budget", "tokens", "MiB held", "perplexity", "over all", "name tokens", "whole names"]


def engine_of(model: Any, name: str, budget: int, dtype: str = "f32", chunk: int = CHUNK) -> InferenceEngine:
    """An engine that keeps `budget` tokens per layer; all of them under the name "all"."""
    if name == "all":
        return InferenceEngine(model, dtype=dtype, prefill_chunk=chunk)
    make = RandomEngine if name.startswith("random") else InferenceEngine
    policy = POLICIES[name](budget, model.config.num_layers)
    return make(model, dtype=dtype, prefill_chunk=chunk, eviction_policy=policy, kv_budget=budget)


def measure(
    model: Transformer, prompts: list[Prompt], name: str, percent: int, dtype: str = "f32", chunk: int = CHUNK
) -> dict[str, Any]:
    """The figures of one policy at one budget, over all prompts.

    A piece of `chunk` tokens attends to the survivors and to itself, then every layer evicts down to the budget. So
    memory is that of the budget and one piece, and a policy has the scores of the whole piece before it evicts.
    """
    recorder = Recorder(model, lambda rows: rows.argmax(axis=1))
    budget = LENGTH * percent // 100
    engine = engine_of(recorder, name, budget, dtype, chunk)
    nats, tokens, right, asked, whole, names = 0.0, 0, 0, 0, 0, 0
    for prompt in prompts:
        scores = engine.score(prompt.tokens)
        best = recorder.take()  # row i has the most likely token i + 1
        part = slice(prompt.continuation.start - 1, prompt.continuation.stop - 1)
        nats -= float(scores[part].sum(dtype=np.float64))
        tokens += part.stop - part.start
        for where in prompt.names:
            hits = best[where.start - 1 : where.stop - 1] == prompt.tokens[where]
            right, asked, whole, names = right + int(hits.sum()), asked + len(hits), whole + bool(hits.all()), names + 1
    held = sum(engine.alive_tokens(layer) for layer in range(model.config.num_layers)) / model.config.num_layers
    return {
        "policy": name, "dtype": dtype, "percent": percent, "budget": budget, "chunk": chunk, "alive": held,
        "bytes": engine.cache.used_memory_bytes, "perplexity": float(np.exp(nats / tokens)),
        "copied": right / asked, "whole": whole / names, "tokens": tokens, "names": names,
    }


def rows(figures: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table; "over all" compares with the f32 cache that keeps all tokens."""
    exact = next(f for f in figures if f["policy"] == "all" and f["dtype"] == "f32")
    return [
        [
            f["policy"], f["dtype"], f"{f['percent']} %", f"{f['alive']:.0f}", f"{f['bytes'] / 2**20:.2f}",
            f"{f['perplexity']:.3f}", f"{100 * (f['perplexity'] / exact['perplexity'] - 1):+.1f} %",
            f"{100 * f['copied']:.1f} %", f"{100 * f['whole']:.0f} %",
        ]
        for f in figures
    ]


def survivors(model: Transformer, prompt: Prompt, percent: int, queries: int = 128) -> dict[str, Any]:
    """The attention of a prompt's last queries on earlier tokens, and the tokens that each policy has kept by then."""
    tokens = prompt.tokens
    mass = attention_mass(model, tokens, queries)
    kept = {}
    for name in POLICIES:
        engine = engine_of(model, name, LENGTH * percent // 100)
        engine.prefill_from_pos(tokens[:-queries], 0)
        kept[name] = [engine.kept_positions(layer).tolist() for layer in range(model.config.num_layers)]
    before = mass[:, : len(tokens) - queries]
    share = {
        name: float(np.mean([before[layer, at].sum() / before[layer].sum() for layer, at in enumerate(layers)]))
        for name, layers in kept.items()
    }
    return {"mass": mass, "kept": kept, "share": share, "percent": percent, "queries": queries}

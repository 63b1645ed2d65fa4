"""Endless text: a hundred thousand tokens through a model that was trained on two thousand."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.quality.heldout import Heldout
from bench.quality.network import Recorder
from bench.quality.parts import verdict
from kvcache import EvictionPolicy, InferenceEngine
from kvcache.engine import Transformer

__all__ = ["BIN", "HEADER", "RUNS", "measure", "reference", "rows", "verdicts"]

SINKS, WINDOW, CHUNK, BIN = 4, 1500, 64, 2048
FAR = 1 << 20  # overrides the network's number of positions, for runs beyond those it was trained on

# name -> (options, maximum number of tokens, whether positions exceed those of the network)
STREAM, FAR_SINKS = EvictionPolicy.StreamingLLM(SINKS, WINDOW), EvictionPolicy.SlidingWindow(WINDOW, SINKS)
RUNS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "StreamingLLM, f32": ({"eviction_policy": STREAM}, FAR, False),
    "StreamingLLM, q4": ({"eviction_policy": STREAM, "dtype": "q4"}, FAR, False),
    "no sinks": ({"eviction_policy": EvictionPolicy.StreamingLLM(0, SINKS + WINDOW)}, FAR, False),
    "sinks at their distance in the text": ({"eviction_policy": FAR_SINKS}, FAR, True),
    "plain positions, everything kept": ({"num_blocks": 1024}, 12288, True),
}
HEADER = [
    "cache", "tokens", "MiB, most", "perplexity", "first 2,048", "rest, against fresh", "worst bin",
    "CPU ms/token, 2k .. end",
]


def reference(model: Transformer, text: np.ndarray) -> np.ndarray:
    """Log-probabilities of the model in fresh windows, `(len(text) - 1,)`: the reference for a stream.

    Windows as long as the model's context overlap by half: each token but the first ones is predicted from at least
    1,024 tokens. A stream is compared with the same tokens, since perplexity differs between files.
    """
    length = model.config.max_position_embeddings
    engine = InferenceEngine(model)
    found = np.empty(len(text) - 1, np.float32)
    done = start = 0
    while done < len(found):
        scores = engine.score(text[start : start + length])
        found[done : start + len(scores)] = scores[done - start :]
        done, start = start + len(scores), start + length // 2
    return found


def measure(model: Transformer, text: Heldout, name: str, total: int) -> dict[str, Any]:
    """Run the stream in pieces of `CHUNK` tokens and time each piece."""
    options, most, far = RUNS[name]
    tokens = text.tokens[: min(total, most) + 1]
    recorder = Recorder(model, lambda rows: rows[:0].copy(), FAR if far else 0)  # a view would hold all rows
    engine = InferenceEngine(recorder, prefill_chunk=CHUNK, **options)
    scores, seconds = _score(engine, tokens)
    return {
        "name": name, "scores": scores, "seconds": seconds,
        "bytes": engine.cache.stats().peak_blocks_used * engine.cache.block_memory_bytes,
        "alive": engine.alive_tokens(0),
    }


def _score(engine: InferenceEngine, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`engine.score`, and the processor seconds of each piece, measured between calls of the network."""
    marks: list[float] = []
    network = engine.model
    forward = network.forward

    def timed(*args: Any, **more: Any) -> Any:
        marks.append(time.process_time())  # processor time does not count other processes
        return forward(*args, **more)

    network.forward = timed  # type: ignore[method-assign]
    try:
        scores = engine.score(tokens)
    finally:
        network.forward = forward  # type: ignore[method-assign]
    return scores, np.diff(marks)


def bins(scores: np.ndarray) -> np.ndarray:
    """Mean nats per token of each `BIN` tokens; a shorter last bin counts if it has at least half as many."""
    edges = range(0, max(len(scores) - BIN // 2, 1), BIN)
    return np.array([-scores[at : at + BIN].mean(dtype=np.float64) for at in edges])


def figures(run: dict[str, Any], fresh: np.ndarray) -> dict[str, float]:
    """The figures of a run; `fresh` is the reference over the same stream."""
    scores, seconds = run["scores"], run["seconds"]
    fresh = fresh[: len(scores)]
    apart = bins(scores) - bins(fresh)
    early = seconds[2048 // CHUNK : 6144 // CHUNK]
    rest = slice(2048, None) if len(scores) > 4096 else slice(None)
    return {
        "perplexity": float(np.exp(-scores.mean(dtype=np.float64))),
        "first": float(np.exp(-scores[:2048].mean(dtype=np.float64))),
        "ratio": float(np.exp((fresh[rest] - scores[rest]).mean(dtype=np.float64))),
        "worst": float(np.exp(apart.max())),
        "early": float(np.median(early) / CHUNK) if len(early) else float("nan"),
        "late": float(np.median(seconds[-len(early) :]) / CHUNK) if len(early) else float("nan"),
    }


def rows(runs: list[dict[str, Any]], fresh: np.ndarray) -> list[list[str]]:
    """The table."""
    table = []
    for run in runs:
        f = figures(run, fresh)
        table.append([
            run["name"], f"{len(run['scores']):,}", f"{run['bytes'] / 2**20:.2f}", f"{f['perplexity']:.2f}",
            f"{f['first']:.2f}", f"{100 * (f['ratio'] - 1):+.1f} %", f"{100 * (f['worst'] - 1):+.1f} %",
            f"{1e3 * f['early']:.2f} .. {1e3 * f['late']:.2f}",
        ])
    return table


def verdicts(runs: list[dict[str, Any]], fresh: np.ndarray) -> list[dict[str, Any]]:
    """The bounds: a stream's perplexity at most 10 % above fresh windows, its time per token at most 10 % higher."""
    found = []
    for run in runs:
        if run["name"].startswith("StreamingLLM"):
            f = figures(run, fresh)
            found.append(verdict(run["name"], "rise", f["ratio"] - 1, 0.1))
            found.append(verdict(run["name"], "slower", f["late"] / f["early"] - 1, 0.1))
    return found

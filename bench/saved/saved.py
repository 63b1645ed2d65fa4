"""`python -m bench saved`: the load of a saved prefix cache and the first token after it, compared with the prefill.

Each try has a new engine over a random checkpoint and one prompt. `first token` is `load` of the file plus `generate`
of one token, which reads the prompt's blocks, checks them, and decodes. Before the timing, every loaded block is
compared byte for byte with the computed one, and the next tokens with those of an engine that kept its cache.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.support.checkpoints import SIZES, write_checkpoint
from bench.support.common import timed
from bench.support.report import show, time_text, write_json
from kvcache import InferenceEngine, PrefixCachedEngine, SamplingParams
from kvcache.engine import Transformer

__all__ = ["add_arguments", "main", "measure"]

BOUND = 50  # minimum gain over the prefill
FORMATS = ("f32", "f16", "q8", "q4")
HEADER = ["format", "file", "prefill", "save", "load", "first token", "gain", f"at least {BOUND}x", "bit for bit"]
FIRST = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=1)
NEXT = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--tokens", type=int, default=4080, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="network size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="tries per figure (default: %(default)s)")


def measure(model: Transformer, dtype: str, tokens: int, rounds: int, folder: str) -> dict[str, Any]:
    """All figures of one format; times are medians, in seconds."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens)
    path = os.path.join(folder, f"{dtype}.kv")

    def fresh() -> PrefixCachedEngine:
        blocks = -(-(tokens + 64) // PrefixCachedEngine.BLOCK_SIZE)
        return PrefixCachedEngine(InferenceEngine(model, dtype=dtype), blocks, strict=True)

    prefill = []
    for _ in range(rounds):
        cached = fresh()
        prefill.append(timed(lambda cached=cached: cached.generate(prompt, FIRST)))
    save = [timed(lambda: cached.save(path)) for _ in range(rounds)]
    same = identical(cached, fresh(), path, prompt)
    load, first = [], []
    for _ in range(rounds):
        warm = fresh()
        load.append(timed(lambda warm=warm: warm.load(path)))
        first.append(load[-1] + timed(lambda warm=warm: warm.generate(prompt, FIRST)))
    return {
        "bytes": os.path.getsize(path), "prefill": median(prefill), "save": median(save), "load": median(load),
        "first_token": median(first), "gain": median(prefill) / median(first), "identical": same,
    }


def identical(kept: PrefixCachedEngine, loaded: PrefixCachedEngine, path: str, prompt: np.ndarray) -> bool:
    """True if a loaded cache has the same blocks as the saved one, byte for byte, and gives the same next tokens."""
    loaded.load(path)
    pair = [engine.prefix_cache.cache for engine in (kept, loaded)]
    with pair[0].open_session(prompt) as one, pair[1].open_session(prompt) as other:
        same = one.matched_prefix_len == other.matched_prefix_len > 0
        for layer in range(kept.inner.config.num_layers):
            rows = [cache._store.raw(layer)[s.block_indices] for cache, s in zip(pair, (one, other), strict=True)]
            same = same and np.array_equal(*rows)
    return bool(same) and kept.generate(prompt, NEXT) == loaded.generate(prompt, NEXT)


def main(options: argparse.Namespace) -> int:
    """Print the table; returns 1 if a bound was missed or a byte differs."""
    size = SIZES["tiny" if options.quick else options.size]
    tokens, rounds = (512, 1) if options.quick else (options.tokens, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        model = Transformer.from_pretrained(write_checkpoint(size, Path(folder) / "checkpoint"))
        figures = {dtype: measure(model, dtype, tokens, rounds, folder) for dtype in FORMATS}
    rows = []
    for dtype, f in figures.items():
        times = [time_text(f[name]) for name in ("prefill", "save", "load", "first_token")]
        verdict = "met" if f["gain"] >= BOUND else "MISSED"
        same = "yes" if f["identical"] else "NO"
        rows.append([dtype, f"{f['bytes'] / 2**20:.1f} MiB", *times, f"{f['gain']:.0f}x", verdict, same])
    show(options.markdown, f"a prompt of {tokens} tokens, {size}, median of {rounds}", HEADER, rows)
    write_json(options.json, formats=figures)
    missed = not options.quick and any(f["gain"] < BOUND for f in figures.values())
    return int(missed or not all(f["identical"] for f in figures.values()))

"""100,000 requests without a network: what the scheduler itself costs per step, whatever waits and whatever is cached.

The network is a stand-in whose steps advance a clock by the seconds that a step takes, by its rows (`SECONDS`, read
off a run of SmolLM2 on two threads); it has one layer of 8 channels, so that nearly all of the measured time is
the scheduler's, the blocks' and the index's. Seconds are those of the thread's processor, so that other processes
count little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.serving.measured import Measured
from bench.support.report import show
from kvcache import BatchEngine
from kvcache.engine import SamplingParams

__all__ = ["simulate"]

SECONDS = (3e-3, 3e-4)  # of a step, and of each of its rows
PROMPT, SHARED, NEW, RUNNING = 64, 32, 8, 32
_ROWS = {"all": slice(None), "last": slice(-1, None), "none": slice(0)}


@dataclass(frozen=True)
class _Config:
    num_layers: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    vocab_size: int = 64
    max_position_embeddings: int = 4096


class _Network:
    """Counts seconds, and predicts the token after the last one."""

    selects_rows = True

    def __init__(self) -> None:
        self.config, self.now, self.seconds = _Config(), 0.0, 0.0

    def clock(self) -> float:
        return self.now

    def forward(
        self, tokens: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64], attend: Any, logits: Any
    ) -> npt.NDArray[np.float32]:
        began = thread_time()
        self.now += SECONDS[0] + SECONDS[1] * len(tokens)
        rows = np.zeros((len(tokens), 1, 8), np.float32)
        attend(0, rows, rows, rows)
        chosen = tokens[_ROWS[logits] if isinstance(logits, str) else logits]
        scores = np.zeros((len(chosen), self.config.vocab_size), np.float32)
        scores[np.arange(len(chosen)), (chosen + 1) % self.config.vocab_size] = 1.0
        self.seconds += thread_time() - began
        return scores


def _cost(requests: int, waiting: int, cached: int) -> tuple[float, float, int]:
    """Microseconds of a step outside of the network, the share of a real step that they are, and steps.

    `waiting` requests wait all the time, and `cached` tokens of others are in the cache.
    """
    network, rng = _Network(), np.random.default_rng(0)
    engine = BatchEngine(
        network, num_blocks=cached // 16 + 4096, max_running=RUNNING, max_queue=waiting + 64, clock=network.clock,
        draft=None, residual_length=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW)
    heads = rng.integers(0, 64, (50, SHARED)).astype(np.uint32)
    for _ in range(cached // 2048):
        engine.submit(rng.integers(0, 64, 2040), SamplingParams(temperature=0.0, max_tokens=4)).result()
    sent, steps, spent, began_at, network.seconds = 0, 0, 0.0, network.now, 0.0
    finished = first = engine.stats().finished
    while sent < requests or finished < first + requests:
        while sent < requests and sent - (finished - first) < waiting + RUNNING:
            head = heads[int(rng.integers(50))]
            prompt = np.concatenate([head, rng.integers(0, 64, PROMPT - SHARED).astype(np.uint32)])
            engine.submit(prompt, params)
            sent += 1
        start = thread_time()
        engine.step()
        spent += thread_time() - start
        steps += 1
        finished = engine.stats().finished
    own = spent - network.seconds
    return own / steps * 1e6, own / (network.now - began_at), steps


def simulate(measured: Measured, *, as_markdown: bool = False, quick: bool = False) -> None:
    """Print what a step costs beside the network, and the share of a step that it is."""
    requests = 300 if quick else 100_000
    cases = [(8, 0)] if quick else [(8, 0), (1000, 0), (10_000, 0), (8, 100_000), (8, 1_000_000)]
    rows = []
    for waiting, cached in cases:
        name = f"simulation, {requests} requests, {waiting} waiting, {cached} cached"
        cost, share, steps = measured.get(name, partial(_cost, requests, waiting, cached))
        rows.append([f"{waiting:,d}", f"{cached:,d}", f"{cost:.0f}", f"{share:.1%}", f"{steps:,d}"])
    title = f"{requests:,} requests of {PROMPT} + {NEW} tokens, {RUNNING} running, no network"
    header = ["waiting", "cached tokens", "us per step", "share of a step of SmolLM2", "steps"]
    show(as_markdown, title, header, rows)

"""`python -m bench events`: what block events cost, in the index, in the publisher's thread and in an engine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.support.report import show
from kvcache import BatchEngine, PagedKvCache, PrefixCache, get_num_threads, set_num_threads
from kvcache.demo import DIRECTORY
from kvcache.engine import SamplingParams, Transformer
from kvcache.prefix.events.event_stream import EventStream
from kvcache.prefix.events.kv_events import KvEvents

__all__ = ["add_arguments", "main"]

SIZE = 16  # tokens of a block
ADDRESS = "tcp://127.0.0.1:*"


def seconds_of(run: Callable[[], Any]) -> float:
    """The time that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Cached:
    """A text of `blocks` blocks of a paged cache, which comes into the index and leaves it."""

    def __init__(self, blocks: int, told: bool) -> None:
        paged = PagedKvCache(blocks, SIZE, 1, 8)
        paged.allocate(0, blocks * SIZE)
        self.ids, self.cache, self.blocks = paged.block_table([0]).block_ids, PrefixCache.over(paged), blocks
        self.ring = self.cache.record_events(lambda name: (0, None), 4 * blocks) if told else None
        self.tokens = np.random.default_rng(0).integers(0, 50_000, blocks * SIZE).astype(np.uint32)

    def store(self, first: int, end: int) -> None:
        """Cache some of the blocks as a text of their own."""
        self.cache.adopt(self.tokens[first * SIZE : end * SIZE], self.ids[first:end])

    def round(self) -> tuple[float, float]:
        """Seconds to store the text and to evict it."""
        found = seconds_of(lambda: self.store(0, self.blocks)), seconds_of(lambda: self.cache.evict(self.blocks))
        if self.ring is not None:
            self.ring.take(4 * self.blocks)
        return found


def index_rows(blocks: int, rounds: int) -> list[list[str]]:
    """Nanoseconds of a block that is stored and evicted, with events and without them, at the least."""
    plain, told = Cached(blocks, False), Cached(blocks, True)
    times = [(plain.round(), told.round()) for _ in range(rounds)]
    rows = []
    for i, what in enumerate(("stored", "evicted")):
        before, after = (min(each[side][i] for each in times) / blocks * 1e9 for side in (0, 1))
        rows.append([f"a block is {what}, ns", f"{before:.0f}", f"{after:.0f}", f"{after - before:+.0f}"])
    return rows


def thread_rows(blocks: int) -> tuple[float, list[list[str]]]:
    """Seconds of a block in the publisher's thread, of texts of 20 blocks; and what else a block takes there."""
    from msgspec.msgpack import encode  # of the extra `cluster`, which other benches do without

    cached, sent = Cached(blocks, True), [0]

    def send(number: int, batch: bytes) -> None:
        sent[0] += len(batch)

    assert cached.ring is not None
    stream = EventStream(cached.ring, cached.cache, KvEvents(ADDRESS), send, encode, time.time, 10_000)
    for first in range(0, blocks - 19, 20):
        cached.store(first, first + 20)
    count = len(cached.ring)
    seconds, snapshot = seconds_of(stream.tell), seconds_of(cached.cache.event_snapshot)
    return seconds / count, [
        ["a block is told, in the thread, us", "", f"{seconds / count * 1e6:.2f}", ""],
        ["a block in a snapshot, under the lock, ns", "", f"{snapshot / count * 1e9:.0f}", ""],
        ["bytes of a block", "", f"{sent[0] / count:.0f}", ""],
    ]


def engine_rows(requests: int, rounds: int, cost: float) -> list[list[str]]:
    """The least CPU seconds of the same requests with and without events, and the share of `cost` seconds a block."""
    threads = get_num_threads()
    set_num_threads(1)  # others wait in loops, which is CPU time that a busy machine makes longer
    model = Transformer.from_pretrained(DIRECTORY)
    params = SamplingParams(temperature=0.0, max_tokens=48, repetition_penalty=1.0)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, model.config.vocab_size, 320).astype(np.uint32) for _ in range(requests)]
    engines = [BatchEngine(model, dtype="q8", num_blocks=256, kv_events=where) for where in (None, ADDRESS)]
    times: list[list[float]] = [[], []]
    for turn in range(2 * rounds):
        side = turn % 2 if turn // 2 % 2 else 1 - turn % 2
        began = time.process_time()
        engines[side].generate_batch(prompts, params, progress=False)
        times[side].append(time.process_time() - began)
    blocks = engines[1].stats().events_told / rounds
    for engine in engines:
        engine.close()
    set_num_threads(threads)
    before, after = min(times[0]), min(times[1])
    return [
        [
            f"{requests} requests of 368 tokens, one thread, CPU s", f"{before:.3f}", f"{after:.3f}",
            f"{after / before - 1:+.2%}",
        ],
        ["blocks told in these", "", f"{blocks:.0f}", ""],
        ["these in the thread, of the CPU time", "", f"{blocks * cost / before:.2%}", ""],
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="of each measurement (%(default)s)")


def main(options: argparse.Namespace) -> int:
    """Print the table."""
    blocks, requests, rounds = (200, 2, 1) if options.quick else (4_000, 24, options.rounds)
    cost, told = thread_rows(blocks)
    rows = [*index_rows(blocks, 2 * rounds), *told, *engine_rows(requests, rounds, cost)]
    show(options.markdown, "Block events", ["", "without", "with", "difference"], rows)
    return 0

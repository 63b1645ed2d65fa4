"""The demo itself: runs the workload without and with the prefix cache, and compares both passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import kvcache
from kvcache.demo import DIRECTORY
from kvcache.demo.display import Display
from kvcache.demo.workload import MAX_TOKENS, conversations
from kvcache.engine import InferenceEngine, SamplingParams
from kvcache.engine.cached import PrefixCachedEngine

__all__ = ["Pass", "Request", "run"]

CACHE_BLOCKS = 512
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Request:
    """The measurements of one request.

    Attributes:
        user, turn: the user, and the number of the turn (from 1).
        prompt: tokens of the prompt.
        reused, prefilled: tokens of the prompt that came from the cache, and that ran through the network.
        first: seconds to the first token.
        rate: new tokens per second after the first.
        answer: the new tokens.
    """

    user: str
    turn: int
    prompt: int
    reused: int
    prefilled: int
    first: float
    rate: float
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests of one pass, and the size of its cache at the end.

    Attributes:
        requests: in order of arrival.
        kv_bytes: bytes of K and V of all conversations.
        hit_rate: prompt tokens found in the cache over prompt tokens.
    """

    requests: tuple[Request, ...]
    kv_bytes: int
    hit_rate: float

    def mean_first(self, *, later: bool = False) -> float:
        """Mean seconds to the first token; with `later`, without the first request, which is always cold."""
        times = [request.first for request in self.requests[later:]]
        return sum(times) / len(times)


def run(display: Display) -> bool:
    """Run the demo and return whether both passes gave the same answers."""
    engine = InferenceEngine.from_pretrained(DIRECTORY)
    total = sum(map(len, conversations(engine.tokenizer)))
    display.start(
        f"kvcache {kvcache.__version__} on {kvcache.simd_level()}, {kvcache.get_num_threads()} threads", 2 * total
    )
    with display:
        cold = _serve(engine, None, display)
        warm = _serve(engine, PrefixCachedEngine(engine, CACHE_BLOCKS), display)
    same = [r.answer for r in cold.requests] == [r.answer for r in warm.requests]
    display.summary(cold, warm, same)
    return same


def _serve(engine: InferenceEngine, cached: PrefixCachedEngine | None, display: Display) -> Pass:
    display.heading("with the prefix cache" if cached else "without the prefix cache")
    requests = []
    rounds = conversations(engine.tokenizer)
    for turn, people in enumerate(rounds, 1):
        for person in people:
            person.tokens += person.turns.pop(0)
            stream = (cached or engine).stream(person.tokens, GREEDY)
            request = _request(engine, person.user, turn, person.tokens, stream, display)
            person.tokens += request.answer
            requests.append(request)
    token_bytes = engine.cache.block_memory_bytes // engine.cache.block_size
    if cached is None:
        kv_bytes = sum(len(person.tokens) for person in rounds[-1]) * token_bytes
        return Pass(tuple(requests), kv_bytes, 0.0)
    stats = cached.cache_stats()
    prompts = sum(request.prompt for request in requests)
    return Pass(tuple(requests), stats.memory_bytes, sum(request.reused for request in requests) / prompts)


def _request(
    engine: InferenceEngine, user: str, turn: int, prompt: list[int], stream: Iterator[int], display: Display
) -> Request:
    before = engine.prefill_token_count
    start = time.perf_counter()
    first = None
    answer = []
    display.prompt(user, turn)
    text = _text(engine.tokenizer)
    for token in stream:
        if first is None:
            first = time.perf_counter() - start
        answer.append(token)
        display.text(text(token))
    seconds = time.perf_counter() - start
    first = seconds if first is None else first
    prefilled = engine.prefill_token_count - before
    rate = (len(answer) - 1) / (seconds - first) if len(answer) > 1 else 0.0
    request = Request(user, turn, len(prompt), len(prompt) - prefilled, prefilled, first, rate, tuple(answer))
    display.request(request)
    return request


def _text(tokenizer: Any) -> Any:
    """A function that takes each new token and returns the characters that it completes."""
    from tokenizers.decoders import DecodeStream

    decoder = DecodeStream(skip_special_tokens=True)
    return lambda token: decoder.step(tokenizer, token) or ""

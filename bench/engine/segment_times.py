"""`timed_rows`: the seconds and the bytes of requests with eight documents, as segments and as plain prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache import InferenceEngine, PrefixCachedEngine, SamplingParams

__all__ = ["timed_rows"]

Tokens = npt.NDArray[np.uint32]

_HEAD, _DOCUMENTS, _SIZE, _QUESTION = 37, 8, 500, 30  # tokens
_STEPS = 32
_BLOCKS = 2048


class SegmentTimes:
    """Times requests with new documents, of random tokens.

    Args:
        file: of the network.
        dtype: the format of K and V.
    """

    def __init__(self, file: Path, dtype: str) -> None:
        inner = InferenceEngine.from_pretrained(file, dtype=dtype, num_blocks=640)
        self.engine = PrefixCachedEngine(inner, max_cache_blocks=_BLOCKS)
        self._rng = np.random.default_rng(0)
        self.head = self._fresh(_HEAD)

    def _fresh(self, count: int) -> Tokens:
        return self._rng.integers(1000, 40000, count, dtype=np.uint32)

    def _plain(self, documents: list[Tokens], steps: int = 1) -> float:
        prompt = np.concatenate([self.head, *documents, self._fresh(_QUESTION)])
        return self._seconds(lambda params: self.engine.complete(prompt, params), steps)

    def _segments(self, documents: list[Tokens], link: int, steps: int = 1) -> float:
        """The seconds of a request in a namespace of its own: the first document would share the plain prompt's."""
        given: dict[str, Any] = {"head": self.head, "segments": documents, "link": link, "namespace": "segments"}
        question = self._fresh(_QUESTION)
        return self._seconds(lambda params: self.engine.complete(question, params, **given), steps)

    @staticmethod
    def _seconds(run: Callable[[SamplingParams], Any], steps: int) -> float:
        params, start = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True), process_time()
        run(params)
        return process_time() - start

    def round(self) -> dict[str, float]:
        """The seconds of each request, over a new cache; of hits and steps, which take turns, the least of three."""
        self.engine.clear_cache()
        documents = [self._fresh(_SIZE) for _ in range(_DOCUMENTS)]
        found = {"full prefill": self._plain(documents)}
        found["bytes, one order"] = self._used()
        self._plain(self._in_another_order(documents))
        found["bytes, two orders"] = before = self._used()
        found["segments, cold"] = self._segments(documents, 0)
        found["bytes, segments, one order"] = self._used() - before
        self._segments(self._in_another_order(documents), 0)
        found["bytes, segments, two orders"] = self._used() - before
        for _ in range(3):
            other = self._in_another_order(documents)
            turn = {"plain prefix hit": self._plain(documents)}
            turn |= {f"segments, hit, link={link}": self._segments(other, link) for link in (0, 16)}
            turn["step, plain"] = (self._plain(documents, 1 + _STEPS) - self._plain(documents)) / _STEPS
            turn["step, segments"] = (self._segments(other, 0, 1 + _STEPS) - self._segments(other, 0)) / _STEPS
            found = {**found, **{name: min(value, found.get(name, value)) for name, value in turn.items()}}
        return found

    def _in_another_order(self, documents: list[Tokens]) -> list[Tokens]:
        return [documents[number] for number in self._rng.permutation(_DOCUMENTS)]

    def _used(self) -> float:
        """The bytes of all cached blocks."""
        return float(self.engine.cache_stats().memory_bytes)


def timed_rows(file: Path, dtype: str, rounds: int) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table: the least of each time over the rounds, and ratios of these."""
    times, best = SegmentTimes(file, dtype), dict[str, float]()
    for _ in range(rounds):
        for name, value in times.round().items():
            best[name] = min(value, best.get(name, value))
    full, hit, step = best["full prefill"], best["plain prefix hit"], best["step, plain"]
    beside = {
        "segments, cold": f"{best['segments, cold'] / full:.2f} of full prefill (target: at most 1.0)",
        "segments, hit, link=0": (
            f"full prefill is {full / best['segments, hit, link=0']:.0f} times this (target: 30); "
            f"{best['segments, hit, link=0'] / hit:.2f} of a plain prefix hit (target: at most 1.3)"
        ),
        "segments, hit, link=16": (
            f"full prefill is {full / best['segments, hit, link=16']:.0f} times this (target: 12)"
        ),
        "step, segments": f"{best['step, segments'] / step:.2f} of plain (target: at most 1.15)",
    }
    rows = []
    for name, value in best.items():
        shown = f"{value / 2**20:.1f} MiB" if name.startswith("bytes") else f"{value:.4f}"
        rows.append([name, shown, beside.get(name, "")])
    return ["", "", "beside"], rows

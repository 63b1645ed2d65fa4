"""Where the time of a decode step goes: attention, matrix products, sampling, and the Python around them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import kvcache.engine.model as network
from kvcache.engine.engine import InferenceEngine
from kvcache.engine.rope import RopeTable
from kvcache.engine.sampling import Sampler

__all__ = ["SHARES", "Meter", "metered", "shares_of"]

ATTENTION, WRITES, PRODUCTS, SAMPLING, ROWS, PYTHON = (
    "attention", "K and V written", "matrix products", "sampling", "norms, RoPE, SiLU", "Python",
)  # fmt: skip
SHARES = (ATTENTION, WRITES, PRODUCTS, SAMPLING, ROWS, PYTHON)


class Meter:
    """Seconds by what they were spent on; time in a wrapped function called by another counts for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent = perf_counter() - start
                self.seconds[what] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed


def _targets(engine: InferenceEngine) -> Iterator[tuple[Any, str, str]]:
    """What is timed: `(owner, name, what)`. What a network of another version lacks is Python's share then."""
    yield type(engine.cache), "attention", ATTENTION
    yield type(engine.cache), "write", WRITES
    yield type(engine.cache), "append", WRITES
    yield network, "linear", PRODUCTS
    yield network, "_rms_norm", ROWS
    yield network, "_mlp", ROWS
    yield RopeTable, "rotate", ROWS
    yield Sampler, "sample", SAMPLING


@contextmanager
def metered(engine: InferenceEngine) -> Iterator[Meter]:
    """Time the parts of everything that the engine does meanwhile."""
    meter = Meter()
    with ExitStack() as stack:
        for owner, name, what in _targets(engine):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, meter.wrap(getattr(owner, name), what))
        yield meter


def shares_of(engine: InferenceEngine, run: Callable[[], object]) -> dict[str, float]:
    """Parts of the time of `run` by name; they sum to 1."""
    with metered(engine) as meter:
        start = perf_counter()
        run()
        total = perf_counter() - start
    known = {what: meter.seconds[what] / total for what in SHARES[:-1]}
    return {**known, PYTHON: 1.0 - sum(known.values())}

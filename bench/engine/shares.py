"""The shares of a decode step's time: attention, matrix products, sampling, and the Python around them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import kvcache.networks.latent as latent
import kvcache.networks.model as network
from kvcache.engine.inference import InferenceEngine
from kvcache.networks.rope import RopeTable
from kvcache.sampling.sampling import Sampler

__all__ = ["SHARES", "Meter", "metered", "shares_of"]

ATTENTION, ROOM, PRODUCTS, SAMPLING, ROWS, PYTHON = (
    "attention and K and V written", "room for K and V", "matrix products", "sampling", "norms, RoPE, SiLU", "Python",
)
SHARES = (ATTENTION, ROOM, PRODUCTS, SAMPLING, ROWS, PYTHON)


class Meter:
    """Counts seconds per part. The time of a nested wrapped function counts for that function only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wrap a function so that its time counts for `what`."""

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
    """The timed functions as `(owner, name, part)`. The time of missing ones counts as Python."""
    yield type(engine.cache), "attention", ATTENTION
    yield type(engine.cache), "write_and_attend", ATTENTION
    yield type(engine.cache), "append_batch", ROOM
    yield network.Transformer, "_times", PRODUCTS
    yield network.Transformer, "_add_times", PRODUCTS
    yield latent, "times_heads", PRODUCTS
    yield network, "rms_norm", ROWS
    yield network, "layer_norm", ROWS
    yield engine.model, "_activated", ROWS
    yield RopeTable, "rotate", ROWS
    yield Sampler, "sample", SAMPLING


@contextmanager
def metered(engine: InferenceEngine) -> Iterator[Meter]:
    """Time the parts of all work of the engine inside the context."""
    meter = Meter()
    with ExitStack() as stack:
        for owner, name, what in _targets(engine):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, meter.wrap(getattr(owner, name), what))
        yield meter


def shares_of(engine: InferenceEngine, run: Callable[[], object]) -> dict[str, float]:
    """The shares of the time of `run` by part; they sum to 1."""
    with metered(engine) as meter:
        start = perf_counter()
        run()
        total = perf_counter() - start
    known = {what: meter.seconds[what] / total for what in SHARES[:-1]}
    return {**known, PYTHON: 1.0 - sum(known.values())}

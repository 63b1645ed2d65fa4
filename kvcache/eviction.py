"""The order of eviction: strategies for the sequences of a paged cache, policies for the tokens of a list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

from kvcache.support.arguments import as_count, as_finite, short

__all__ = ["EvictionPolicy", "EvictionStrategy", "Rule", "pyramid_budgets"]

MAX_LAYERS = 4096  # layers of a network; the largest networks have a few hundred
MAX_LEVELS = 2**31 - 1  # levels of priority
MAX_TOKENS = 2**62  # tokens of the sinks or of a window: their sum fits in 64 bits

# For each strategy the rank by which sequences are ordered and its arguments; for each policy its arguments.
_STRATEGIES = {
    "LRU": ("recency", ()),
    "LFU": ("frequency", ()),
    "LongestFirst": ("length", ()),
    "Priority": ("priority", ("levels",)),
    "StreamingLLM": ("recency", ("sink_tokens", "window_tokens")),
}
_POLICIES = {
    "H2O": ("recent_fraction",),
    "SlidingWindow": ("window", "sink"),
    "StreamingLLM": ("window", "sink"),
    "PyramidKV": ("recent_fraction", "total_layers"),
}


@dataclass(frozen=True, slots=True)
class EvictionStrategy:
    """The order in which sequences are evicted; ties go to the lowest id.

    Constructors: `LRU()`, `LFU()`, `LongestFirst()`, `Priority(levels)`, `StreamingLLM(sink_tokens, window_tokens)`.
    """

    name: str
    rank: str
    levels: int | None = None
    sink_tokens: int | None = None
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        rank, arguments = _of_name(_STRATEGIES, self.name)
        if self.rank != rank:
            raise ValueError(f"rank: expected {rank!r} for {self.name}, got {short(self.rank)}")
        _check_arguments(
            self,
            arguments,
            levels=lambda value: as_count(value, "levels", 1, MAX_LEVELS),
            sink_tokens=lambda value: as_count(value, "sink_tokens", 0, MAX_TOKENS),
            window_tokens=lambda value: as_count(value, "window_tokens", 0, MAX_TOKENS),
        )

    @classmethod
    def LRU(cls) -> EvictionStrategy:
        """Evict the least recently used sequence; appends, writes, reads and attention are uses."""
        return cls("LRU", "recency")

    @classmethod
    def LFU(cls) -> EvictionStrategy:
        """Evict the sequence with the fewest accesses."""
        return cls("LFU", "frequency")

    @classmethod
    def LongestFirst(cls) -> EvictionStrategy:
        """Evict the sequence with the most tokens."""
        return cls("LongestFirst", "length")

    @classmethod
    def Priority(cls, levels: int) -> EvictionStrategy:
        """Evict the sequence of the lowest priority, an int in [0, levels) set by `set_priority`, 0 at first.

        Raises:
            TypeError, ValueError: `levels` not an int from 1 to 2**31 - 1.
        """
        return cls("Priority", "priority", levels=levels)

    @classmethod
    def StreamingLLM(cls, sink_tokens: int, window_tokens: int) -> EvictionStrategy:
        """Evict sequences as LRU does; `apply_streaming_llm` keeps sinks and a window of one (Xiao et al., 2023).

        Raises:
            TypeError, ValueError: a count that is not an int from 0 to 2**62.
        """
        return cls("StreamingLLM", "recency", sink_tokens=sink_tokens, window_tokens=window_tokens)

    def __str__(self) -> str:
        if self.levels is not None:
            return f"Priority({self.levels})"
        if self.sink_tokens is not None:
            return f"StreamingLLM(sink={self.sink_tokens}, window={self.window_tokens})"
        return self.name


class Rule(NamedTuple):
    """The limits of one list of entries under a policy and a budget; `front + back <= limit`."""

    limit: int  # maximum number of entries
    front: int  # first entries that are protected, whatever their score
    back: int  # last entries that are protected


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """The choice of the entries that a list keeps when it exceeds its budget.

    Constructors: `H2O(recent_fraction)`, `SlidingWindow(window, sink)`, `StreamingLLM(sink_tokens, window_tokens)`,
    `PyramidKV(total_layers, recent_fraction)`.
    """

    name: str
    recent_fraction: float | None = None
    window: int | None = None
    sink: int | None = None
    total_layers: int | None = None

    def __post_init__(self) -> None:
        _check_arguments(
            self,
            _of_name(_POLICIES, self.name),
            recent_fraction=_fraction,
            window=lambda value: as_count(value, "window", 1, MAX_TOKENS),
            sink=lambda value: as_count(value, "sink", 0, MAX_TOKENS),
            total_layers=lambda value: as_count(value, "total_layers", 1, MAX_LAYERS),
        )

    @classmethod
    def H2O(cls, recent_fraction: float = 0.5) -> EvictionPolicy:
        """Keep the most recent entries, and of the rest those of the highest score; ties evict the earliest.

        Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
        Models" (2023), section 4: scores are accumulated attention weights, half of the budget is recent.

        Args:
            recent_fraction: in [0, 1]; `ceil(recent_fraction * budget)` entries are recent. At 0 even the newest entry
                is not protected; at 1 the oldest is always evicted.

        Raises:
            TypeError, ValueError: not a number; a fraction outside [0, 1], or NaN.
        """
        return cls("H2O", recent_fraction=recent_fraction)

    @classmethod
    def SlidingWindow(cls, window: int, sink: int) -> EvictionPolicy:
        """Keep the first `sink` and the last `window` entries, whatever their scores.

        Every entry keeps its text position, so the distance to the sinks grows with the text (under `StreamingLLM` it
        does not).

        Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), section 3.
        If the budget is below `sink + window`, the window shrinks first, down to the newest entry.

        Raises:
            TypeError, ValueError: not integers; `window` below 1 or `sink` below 0.
        """
        return cls("SlidingWindow", window=window, sink=sink)

    @classmethod
    def StreamingLLM(cls, sink_tokens: int, window_tokens: int) -> EvictionPolicy:
        """Keep what `SlidingWindow` keeps, with distances counted within the cache: the text may have any length.

        The distance from a query to the sinks does not count evicted tokens. Keys are not rewritten: a second set of
        queries, rotated to the shorter distance, attends to the sinks. Only an engine has these queries. No distance
        exceeds the length of the cache, so positions may exceed those that the network was trained on.

        Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453,
        section 3.2. Four sinks are enough for the networks tested there.

        Raises:
            TypeError, ValueError: not integers; `sink_tokens` below 0 or `window_tokens` below 1.
        """
        sink = as_count(sink_tokens, "sink_tokens", 0, MAX_TOKENS)
        return cls("StreamingLLM", window=as_count(window_tokens, "window_tokens", 1, MAX_TOKENS), sink=sink)

    @classmethod
    def PyramidKV(cls, total_layers: int, recent_fraction: float = 0.5) -> EvictionPolicy:
        """Give lower layers larger budgets (see `pyramid_budgets`), and evict within a layer as `H2O` does.

        Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
        (2024), section 4: budgets fall from layer to layer in an arithmetic sequence.

        Raises:
            TypeError, ValueError: `total_layers` not an int from 1 to 4096; a fraction outside [0, 1].
        """
        return cls("PyramidKV", recent_fraction=recent_fraction, total_layers=total_layers)

    @property
    def by_score(self) -> bool:
        """Whether the policy evicts by score."""
        return self.recent_fraction is not None

    @property
    def endless(self) -> bool:
        """Whether distances count within the cache, so that a text may exceed the network's positions."""
        return self.name == "StreamingLLM"

    @property
    def most(self) -> int | None:
        """The maximum number of entries under any budget; None: as many as the budget allows."""
        return None if self.window is None else self.window + (self.sink or 0)

    def rule(self, budget: int) -> Rule:
        """The limits of a list with a budget of `budget` entries."""
        if self.recent_fraction is not None:
            # 1e-9 less, so that rounding does not turn 0.1 * 30 into 4.
            return Rule(budget, 0, math.ceil(self.recent_fraction * budget - 1e-9))
        assert self.window is not None
        assert self.sink is not None
        back = min(self.window, max(budget - self.sink, min(budget, 1)))
        front = min(self.sink, budget - back)
        return Rule(front + back, front, back)

    def shares(self, budget: int, layers: Iterable[int]) -> dict[int, int]:
        """Divide `budget` entries among these layers, given in ascending order."""
        known = list(layers)
        if self.total_layers is not None:
            budgets = pyramid_budgets(budget, self.total_layers)
            return {layer: budgets[layer] for layer in known}
        return {layer: -(-(budget - i) // len(known)) for i, layer in enumerate(known)}

    def targets(self, budget: int, sizes: dict[int, int]) -> dict[int, int]:
        """The number of entries each layer keeps, so that `min(budget, sum(sizes))` remain in total.

        Each layer evicts what exceeds its share. Unused parts of shares go to the layers that exceed theirs, the lowest
        first.
        """
        shares = self.shares(budget, sizes)
        targets = {layer: min(size, shares[layer]) for layer, size in sizes.items()}
        left = budget - sum(targets.values())
        for layer, size in sizes.items():
            more = min(left, size - targets[layer])
            targets[layer] += more
            left -= more
        return targets

    def __str__(self) -> str:
        if self.endless:
            return f"StreamingLLM(sink={self.sink}, window={self.window})"
        if self.window is not None:
            return f"SlidingWindow(window={self.window}, sink={self.sink})"
        layers = "" if self.total_layers is None else f"total_layers={self.total_layers}, "
        return f"{self.name}({layers}recent_fraction={self.recent_fraction})"


def pyramid_budgets(budget: int, total_layers: int) -> tuple[int, ...]:
    """Divide `budget` entries among layers in proportion to L, L - 1, ..., 1: never increasing, with an exact sum.

    Each share is rounded down. The rest goes to the largest remainders, among equals to the lowest layers. Every layer
    gets at least 1 if there are enough entries.

    Raises:
        TypeError, ValueError: not ints; a negative budget; layers not from 1 to 4096.
    """
    return _pyramid(as_count(budget, "budget", 0, 2**80), as_count(total_layers, "total_layers", 1, MAX_LAYERS))


@lru_cache(maxsize=64)
def _pyramid(budget: int, total_layers: int) -> tuple[int, ...]:
    whole = total_layers * (total_layers + 1) // 2
    parts = [divmod(budget * weight, whole) for weight in range(total_layers, 0, -1)]
    budgets = [share for share, _ in parts]
    left = budget - sum(budgets)
    for layer in sorted(range(total_layers), key=lambda layer: -parts[layer][1])[:left]:
        budgets[layer] += 1
    if budget >= total_layers:
        # A layer without an entry takes one from the largest share, among equals from the highest layer.
        largest = [(-share, -layer) for layer, share in enumerate(budgets)]
        heapify(largest)
        for layer in range(total_layers):
            if budgets[layer] == 0:
                share, giver = largest[0]
                heapreplace(largest, (share + 1, giver))
                budgets[-giver] -= 1
                budgets[layer] = 1
    return tuple(budgets)


def _of_name(known: dict[str, Any], name: Any) -> Any:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"name: expected one of {', '.join(known)}, got {short(name)}")
    return known[name]


def _check_arguments(made: Any, wanted: tuple[str, ...], **checks: Callable[[Any], Any]) -> None:
    """Check the wanted fields and store what the checks return; all other fields must be None."""
    for name, check in checks.items():
        value = getattr(made, name)
        if name in wanted:
            object.__setattr__(made, name, check(value))
        elif value is not None:
            raise ValueError(f"{name}: expected None for {made.name}, got {short(value)}")


def _fraction(value: Any) -> float:
    return as_finite(value, "recent_fraction", 0.0, 1.0)

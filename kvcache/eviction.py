"""Who leaves first when memory runs short."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EvictionStrategy"]


@dataclass(frozen=True, slots=True)
class EvictionStrategy:
    """Which sequence leaves first; ties go to the lowest id.

    Made by its class methods: `LRU()`, `LFU()`, `LongestFirst()`, `Priority(levels)`,
    `StreamingLLM(sink_tokens, window_tokens)`.
    """

    name: str
    rank: str
    levels: int | None = None
    sink_tokens: int | None = None
    window_tokens: int | None = None

    @classmethod
    def LRU(cls) -> EvictionStrategy:
        """The sequence that was appended to, written, read or attended over the longest time ago."""
        return cls("LRU", "recency")

    @classmethod
    def LFU(cls) -> EvictionStrategy:
        """The sequence with the fewest accesses."""
        return cls("LFU", "frequency")

    @classmethod
    def LongestFirst(cls) -> EvictionStrategy:
        """The sequence with the most tokens."""
        return cls("LongestFirst", "length")

    @classmethod
    def Priority(cls, levels: int) -> EvictionStrategy:
        """The sequence of the lowest priority, an int in [0, levels) set by `set_priority`, 0 at first.

        Raises:
            ValueError: `levels` below 1.
        """
        if levels < 1:
            raise ValueError(f"expected levels >= 1, got {levels}")
        return cls("Priority", "priority", levels=levels)

    @classmethod
    def StreamingLLM(cls, sink_tokens: int, window_tokens: int) -> EvictionStrategy:
        """Sequences leave as under LRU; `apply_streaming_llm` says which tokens of one stay (Xiao et al., 2023).

        Raises:
            ValueError: a negative count.
        """
        if sink_tokens < 0 or window_tokens < 0:
            raise ValueError(f"expected counts >= 0, got sink {sink_tokens} and window {window_tokens}")
        return cls("StreamingLLM", "recency", sink_tokens=sink_tokens, window_tokens=window_tokens)

    def __str__(self) -> str:
        if self.levels is not None:
            return f"Priority({self.levels})"
        if self.sink_tokens is not None:
            return f"StreamingLLM(sink={self.sink_tokens}, window={self.window_tokens})"
        return self.name

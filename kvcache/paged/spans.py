"""Which tokens of a sequence have unpacked rows beside the packed ones; see paged/residual.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcache.core.arguments import as_count

__all__ = ["Span", "as_lengths", "refuse"]


def as_lengths(residual_length: Any, first_tokens: Any, max_memory_bytes: Any) -> tuple[int, int]:
    """The arguments of `PagedKvCache`.

    Raises:
        TypeError, ValueError: no integers; a length above 256; more first tokens than a group has; a limit in bytes
            beside a residual, whose memory grows with the sequences.
    """
    length = as_count(residual_length, "residual_length", 0, 256)
    if length and max_memory_bytes is not None:
        raise ValueError(f"residual_length: expected 0 with max_memory_bytes, got {length}")
    return length, as_count(first_tokens, "first_tokens", 0, length)


def refuse(what: str, length: int) -> None:
    """ValueError, where there is a residual."""
    if length:
        raise ValueError(f"{what}: expected a cache with residual_length 0, got {length}")


class Span(NamedTuple):
    """Which tokens of a sequence are unpacked: [0, firsts) and [base, stop); `firsts` is 0 where `base` is 0."""

    firsts: int
    base: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.firsts + self.stop - self.base

    def row(self, pos: int) -> int:
        """Which of the unpacked rows a token from `base` on is."""
        return self.firsts + pos - self.base

    def cut(self, pos: int) -> Span:
        """Of the first `pos` tokens."""
        if self.base and pos <= self.firsts:
            return Span(0, 0, pos)
        return Span(self.firsts, min(self.base, pos), min(self.stop, pos))

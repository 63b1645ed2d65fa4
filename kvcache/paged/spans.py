"""Which tokens of a sequence have unpacked rows beside the packed ones; see paged/residual.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.core.arguments import as_count

__all__ = ["Places", "Span", "Spans", "as_lengths", "groups_of", "refuse", "row_block"]

Int64 = npt.NDArray[np.int64]


def as_lengths(residual_length: Any, first_tokens: Any, max_memory_bytes: Any) -> tuple[int, int]:
    """The arguments of `PagedKvCache`.

    Raises:
        TypeError, ValueError: no integers; above 256; more first tokens than a group has; a limit in bytes beside
            unpacked rows, whose memory grows with the sequences.
    """
    length = as_count(residual_length, "residual_length", 0, 256)
    firsts = as_count(first_tokens, "first_tokens", 0, length or 256)
    if max_memory_bytes is not None:
        refuse("max_memory_bytes", length, firsts)
    return length, firsts


def row_block(length: int, firsts: int) -> int:
    """Tokens of a block of unpacked rows: blocks end where groups and the first tokens do."""
    return gcd(length, firsts, 16)


def refuse(what: str, length: int, firsts: int) -> None:
    """ValueError, where there are unpacked rows."""
    if length or firsts:
        raise ValueError(f"{what}: expected residual_length and first_tokens 0 beside it, got {length} and {firsts}")


def groups_of(pos: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
    """The groups of the tokens `[pos, end)`: where each begins, and those of these tokens that it has, `[from, to)`."""
    for group in range(pos - pos % length, end, length):
        yield group, max(group, pos), min(group + length, end)


class Span(NamedTuple):
    """Which tokens of a sequence are unpacked: [0, firsts) and [base, stop); `firsts` is 0 where `base` is 0.

    Without groups, `base` is `stop` once there are more than the first tokens. `gone` tokens were evicted before the
    last one: groups count them, so a group begins where a multiple of its length is in the text.
    """

    firsts: int
    base: int
    stop: int
    gone: int = 0

    @property
    def num_rows(self) -> int:
        return self.firsts + self.stop - self.base

    def has(self, firsts: int) -> bool:
        """Whether so many first tokens are unpacked, or all that there are."""
        return not self.base or self.firsts == firsts

    def row(self, pos: Any) -> Any:
        """Which of the unpacked rows a token from `base` on is; or several."""
        return self.firsts + pos - self.base

    def unpacked(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Of `count` tokens from `first` on those that are unpacked: the row of the first, and which, `[from, to)`."""
        begin = max(first, self.base)
        parts = [(first, 0, min(first + count, self.firsts) - first), (self.row(begin), begin - first, count)]
        return [part for part in parts if part[1] < part[2]]

    def longer(self, count: int, length: int, firsts: int) -> Span:
        """Of `count` more tokens: those of earlier groups are packed from then on."""
        stop = self.stop + count
        begin = self._group(length) if length else stop if self.base or stop > firsts else 0
        return self._replace(stop=stop).behind(begin, firsts) if count else self

    def behind(self, pos: int, firsts: int) -> Span:
        """Of the same tokens, where those before `pos` are packed but for the first ones, if there are so many."""
        if pos <= self.base or (not self.base and pos < firsts):
            return self
        return self._replace(firsts=self.firsts if self.base else firsts, base=pos)

    def cut(self, pos: int, gone: int) -> Span:
        """Of the first `pos` tokens, before the last of which `gone` were evicted."""
        if self.base and pos <= self.firsts:
            return Span(0, 0, pos, gone)
        return Span(self.firsts, min(self.base, pos), min(self.stop, pos), gone)

    def thinned(self, kept: Int64, length: int, firsts: int) -> tuple[Span, Int64]:
        """Of the tokens at `kept`, ascending, alone, and which rows of this one theirs are.

        Of the groups, the one that the next token continues stays unpacked.
        """
        left = self.behind(self._group(length), firsts) if length else self
        ahead, base = np.searchsorted(kept, (left.firsts, left.base)).tolist()
        gone = self.gone + self.stop - len(kept)
        rows = np.concatenate([kept[:ahead], self.row(kept[base:])])
        return (Span(0, 0, len(kept), gone) if ahead == base else Span(ahead, base, len(kept), gone)), rows

    def with_unpacked(self, ahead: int, count: int, length: int, firsts: int) -> Span:
        """Of the same tokens, where the first `ahead` and the last `count` are unpacked; ValueError: not these."""
        stop, base = self.stop, self.stop - count
        if ahead not in (0, firsts) or base < ahead:
            raise ValueError(f"firsts: expected {firsts} tokens or none, before the newest, got {ahead}")
        if count and (not length or base < stop - 1 - (stop - 1 + self.gone) % length):
            raise ValueError(f"newest: expected tokens of one group of {length}, got {count} before {stop}")
        return Span(ahead, base, stop, self.gone)

    def _group(self, length: int) -> int:
        """Where the group of the next token begins, if no token of it was evicted."""
        return self.stop - (self.stop + self.gone) % length


class Spans(dict[int, Span]):
    """The spans of sequences, by uid.

    Attributes:
        version: another number after each change.
    """

    version = 0

    def __setitem__(self, uid: int, span: Span) -> None:
        self.version += 1
        super().__setitem__(uid, span)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.version += 1
        super().update(*args, **kwargs)


class Places(NamedTuple):
    """Where the newest tokens of many sequences are stored unpacked.

    Attributes:
        uids: of the sequences, if all of these tokens are; None: some are not.
        lens: tokens of each, int64.
        parts: `(uid, row, from, to)` of those that are, if some are not.
    """

    uids: npt.NDArray[np.uint64] | None
    lens: npt.NDArray[np.int64]
    parts: list[tuple[int, int, int, int]]

    @classmethod
    def of(cls, uids: Sequence[int], spans: Sequence[Span], lens: npt.NDArray[np.int64]) -> Places:
        """Of the last `lens[i]` tokens of each."""
        texts = [(uid, span, span.stop - n, n) for uid, span, n in zip(uids, spans, lens.tolist(), strict=True)]
        if all(first >= span.base for _, span, first, _ in texts):
            return cls(np.array(uids, np.uint64), lens.copy(), [])
        parts, ahead = [], 0
        for uid, span, first, n in texts:
            parts += [(uid, row, ahead + begin, ahead + end) for row, begin, end in span.unpacked(first, n)]
            ahead += n
        return cls(None, lens, parts)
